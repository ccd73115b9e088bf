"""Buffers that no checkpoint holds (cases B28): their values in the plan against those of `from_pretrained`'s models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from loadplan.compiler import Signature, compile_plan, convert
from loadplan.compiler.compose_recipe import compose_recipe
from loadplan.compiler.registry import parse_config
from loadplan.compiler.signature import Submodel
from loadplan.recipes import Recipe, WeightRenaming, register_recipe
from loadplan.runtime import ModuleMismatch, load_into

transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**_SIZES, num_key_value_heads=2)),
    "llama-scaled": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            **_SIZES,
            num_key_value_heads=2,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "bert": (transformers.BertModel, transformers.BertConfig(**_SIZES)),
    "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**_SIZES, num_key_value_heads=2, head_dim=8)),
}


@pytest.mark.parametrize("name", _MODELS)
def test_a_model_on_meta_gets_every_buffer(name: str, tmp_path: Path) -> None:
    model_class, config = _MODELS[name]
    torch.manual_seed(0)
    model_class(config).save_pretrained(tmp_path)
    wanted = model_class.from_pretrained(tmp_path).eval()
    plan = compile_plan(tmp_path)
    sources = ((plan, tmp_path), (convert(plan, tmp_path, tmp_path / "converted"), None))
    for source, files in sources:
        with torch.device("meta"):
            model = model_class._from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        load_into(model, source, files)
        found = dict(model.named_buffers())
        assert found.keys() == dict(wanted.named_buffers()).keys()
        for buffer, value in wanted.named_buffers():
            assert found[buffer].dtype == value.dtype
            assert torch.equal(found[buffer], value), buffer
        tokens = torch.arange(10).view(1, 10)
        assert torch.equal(model.eval()(tokens)[0], wanted(tokens)[0])


class Owner(nn.Module):
    """A parameter, a buffer that is stored, and one that is not."""

    def __init__(self, values: tuple[float, ...]) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2, bias=False)
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("frequencies", torch.tensor(values), persistent=False)


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0, 4.0), (-0.0,), (float("inf"), 1e-40)])
def test_a_real_module_declares_its_values(values: tuple[float, ...], tmp_path: Path) -> None:
    save_file({"lin.weight": torch.ones(2, 2), "kept": torch.full((1,), 7.0)}, tmp_path / "model.safetensors")
    plan = compile_plan(tmp_path, signature=Owner(values))
    with torch.device("meta"):
        module = Owner(values)
    load_into(module, plan, tmp_path)
    frequencies = module.get_buffer("frequencies")
    assert torch.equal(frequencies.view(torch.int32), torch.tensor(values).view(torch.int32))
    assert torch.equal(module.get_buffer("kept"), torch.full((1,), 7.0))
    real = Owner(tuple(value + 1 for value in values))
    load_into(real, plan, tmp_path)  # a real buffer is the module's own
    assert torch.equal(real.get_buffer("frequencies"), torch.tensor([value + 1 for value in values]))


def test_an_unknown_value_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    save_file({"lin.weight": torch.ones(2, 2), "kept": torch.ones(1)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = Owner((1.0, 2.0))
    plan = compile_plan(tmp_path, signature=module)  # on meta, a plain module's values cannot be known
    with pytest.raises(ModuleMismatch, match="buffer frequencies is on the meta device and its value is not known"):
        load_into(module, plan, tmp_path)
    assert all(tensor.is_meta for tensor in module.state_dict().values())


def test_signatures_with_constants_survive_storage() -> None:
    signature = Signature.from_module(Owner((1.0, 2.5)))
    assert [(c.name, str(c.type), c.data) for c in signature.constants] == [
        ("frequencies", "F32[2]", bytes.fromhex("0000803f00002040"))
    ]
    assert Signature.from_json(signature.to_json()) == signature


class Wrapper(nn.Module):
    """A plain module around a model, as adapters put one."""

    def __init__(self, model: nn.Module, more: nn.Module | None = None) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.add_module("model", model)
        self.more = more


def test_b09_a_wrapper_shifts_no_scope(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=3)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    wrapper = Wrapper(model)
    assert Signature.from_module(wrapper) == Signature.from_module(model)
    plan = compile_plan(tmp_path, signature=wrapper)
    assert plan.digest == compile_plan(tmp_path, signature=model).digest
    assert "model.layers.0.mlp.experts.gate_up_proj" in {tensor.name for tensor in plan.head.tensors}
    other = Signature.from_module(Wrapper(model, nn.Linear(2, 2)))  # more than a wrapper: names are what they are
    assert {name for name, _ in other.tensors} > {"more.weight", "base_model.model.lm_head.weight"}


def test_rules_of_a_type_do_not_reach_a_custom_class_unless_registered() -> None:
    """transformers_spec 2.1: custom code is skipped unless its class or type was registered."""
    models = (Submodel("", "MineForCausalLM", "mixtral", is_custom=True),)
    signature = Signature((), submodels=models)
    legacy = compose_recipe(Signature(()), parse_config({}))
    assert compose_recipe(signature, parse_config({})).rules == legacy.rules
    own = Recipe(rules=(WeightRenaming("a.", "b."),))
    register_recipe("MineForCausalLM", own)
    assert compose_recipe(signature, parse_config({})).rules == (*own.rules, *legacy.rules)
