"""The recipe library against transformers' `from_pretrained` of the same files, bit for bit.

Models are made and saved by transformers itself. The other side of every comparison is the state dict, or the output,
of the model that `from_pretrained` gives: by plan, from converted files, and inside a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from builders import TINY_DECODER, bytes_of, save_tiny
from safetensors.torch import load_file, save_file
from torch import nn

from loadplan.compiler import CompileError, Signature, Target, compile_plan, convert
from loadplan.runtime import load_into, load_state_dict

_GROUPED = {**TINY_DECODER, "num_key_value_heads": 2}
_MOE = {"num_experts": 12, "moe_intermediate_size": 16, "head_dim": 8}
_BERT = {key: value for key, value in TINY_DECODER.items() if key != "num_key_value_heads"}
MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "llama-tied": ("LlamaForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "llama-bare": ("LlamaModel", _GROUPED),
    "llama-biases": ("LlamaForCausalLM", {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama-classifier": ("LlamaForSequenceClassification", {**_GROUPED, "pad_token_id": 0}),
    "llama-questions": ("LlamaForQuestionAnswering", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen2-tied": ("Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 12}),
    "mixtral-bare": ("MixtralModel", {**_GROUPED, "num_local_experts": 12}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {**_GROUPED, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_GROUPED, **_MOE}),
    "qwen3-moe-mixed": ("Qwen3MoeForCausalLM", {**_GROUPED, **_MOE, "mlp_only_layers": [1]}),
    "bert-bare": ("BertModel", _BERT),
    "bert": ("BertForMaskedLM", _BERT),
}
OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32"}

Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder with a model as transformers saves it; each is made once."""
    folders: dict[tuple[str, ...], Path] = {}

    def save(model: str, dtype: str = "float32", shard: str = "1GB") -> Path:
        key = (model, dtype, shard)
        if key not in folders:
            place = tmp_path_factory.mktemp(model)
            folders[key] = save_tiny(place, *MODELS[model], dtype, max_shard_size=shard)
        return folders[key]

    return save


def pretrained(folder: Path, model_class: str, dtype: str = "auto") -> nn.Module:
    """The model as transformers loads it."""
    model = getattr(transformers, model_class).from_pretrained(folder, dtype=dtype)
    assert isinstance(model, nn.Module)
    return model.eval()


def assert_same(loaded: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Same names, and for each the same shape, dtype and bits; the same names are one tensor."""
    assert sorted(loaded) == sorted(wanted)
    for name, tensor in wanted.items():
        assert (loaded[name].shape, loaded[name].dtype) == (tensor.shape, tensor.dtype), name
        assert bytes_of(loaded[name]) == bytes_of(tensor), name
    assert _ties(loaded, id) == _ties(wanted, torch.Tensor.data_ptr)


def _ties(tensors: Mapping[str, torch.Tensor], key: Callable[[torch.Tensor], int]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(key(tensor), set()).add(name)
    return {frozenset(group) for group in groups.values()}


@pytest.mark.parametrize("cast", [False, True], ids=["as-stored", "cast"])
@pytest.mark.parametrize(("dtype", "shard"), [("float32", "1GB"), ("bfloat16", "20KB")], ids=["f32", "bf16-sharded"])
@pytest.mark.parametrize("model", MODELS)
def test_plan_and_converted_files_equal_from_pretrained(
    saved: Saved, tmp_path: Path, model: str, dtype: str, shard: str, cast: bool
) -> None:
    folder = saved(model, dtype, shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "20KB")
    wanted_dtype = OTHER_DTYPE[dtype] if cast else dtype
    wanted = pretrained(folder, MODELS[model][0], wanted_dtype).state_dict()
    assert {tensor.dtype for tensor in wanted.values()} == {getattr(torch, wanted_dtype)}

    plan = compile_plan(folder, target=Target(dtype=wanted_dtype if cast else None))

    assert_same(load_state_dict(plan, folder), wanted)
    assert_same(load_state_dict(convert(plan, folder, tmp_path / "converted")), wanted)
    assert plan.report.unused == plan.report.missing == ()
    assert len(plan.report.casts) == (len(plan.head.tensors) if cast else 0)


@pytest.mark.parametrize("model", ["llama", "mixtral", "bert"])
def test_float16_rounds_as_torch_does(saved: Saved, model: str) -> None:
    folder = saved(model)
    wanted = pretrained(folder, MODELS[model][0], "float16").state_dict()
    assert_same(load_state_dict(compile_plan(folder, target=Target(dtype="float16")), folder), wanted)


@pytest.mark.parametrize("model", ["llama-tied", "qwen3-moe"])
def test_the_signature_decides_the_dtype_when_the_target_does_not(saved: Saved, model: str) -> None:
    folder = saved(model)
    wanted = pretrained(folder, MODELS[model][0], "bfloat16")
    plan = compile_plan(folder, signature=Signature.from_module(wanted))
    assert_same(load_state_dict(plan, folder), wanted.state_dict())


def test_experts_are_stacked_by_number(saved: Saved) -> None:
    folder = saved("mixtral")
    stored = load_file(folder / "model.safetensors")
    stack = load_state_dict(compile_plan(folder), folder)["model.layers.1.mlp.experts.down_proj"]
    for expert in range(12):
        assert torch.equal(stack[expert], stored[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("model", "bare"), [("llama", "LlamaModel"), ("mixtral", "MixtralModel")])
def test_a_bare_model_from_a_checkpoint_with_a_head(saved: Saved, model: str, bare: str, ranks: int) -> None:
    folder = saved(model)
    signature = signature_of(bare, MODELS[model][1])

    assert refusal(folder, signature, Target(tp_size=ranks)) == {("unexpected", ("lm_head.weight",))}

    plan = compile_plan(folder, signature=signature, target=Target(tp_size=ranks, unexpected="ignore"))
    assert plan.report.unused == ("lm_head.weight",)
    if ranks == 1:
        assert_same(load_state_dict(plan, folder), pretrained(folder, bare).state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("head", ["llama", "llama-tied"])
def test_a_model_with_a_head_from_a_bare_checkpoint(saved: Saved, tmp_path: Path, head: str, ranks: int) -> None:
    config = MODELS[head][1]
    folder = save_tiny(tmp_path, "LlamaModel", config, "float32")
    signature = signature_of("LlamaForCausalLM", config)
    if head == "llama":
        assert refusal(folder, signature, Target(tp_size=ranks)) == {("missing", ("lm_head.weight",))}

    plan = compile_plan(folder, signature=signature, target=Target(tp_size=ranks, missing="ignore"))

    assert plan.report.missing == (("lm_head.weight",) if head == "llama" else ())
    if ranks == 1:
        wanted = pretrained(folder, "LlamaForCausalLM").state_dict()
        assert_same(load_state_dict(plan, folder), without(wanted, plan.report.missing))


def test_a_bert_with_pooler_from_one_without(saved: Saved) -> None:
    folder = saved("bert")
    signature = signature_of("BertModel", _BERT)
    head = {name for name in load_file(folder / "model.safetensors") if name.startswith("cls.")}
    pooler = {"pooler.dense.weight", "pooler.dense.bias"}
    assert len(head) == 5

    refused = refusal(folder, signature, Target())
    assert {name for kind, names in refused if kind == "unexpected" for name in names} == head
    assert {name for kind, names in refused if kind == "missing" for name in names} == pooler

    plan = compile_plan(folder, signature=signature, target=Target(missing="ignore", unexpected="ignore"))
    assert (set(plan.report.unused), set(plan.report.missing)) == (head, pooler)
    wanted = pretrained(folder, "BertModel").state_dict()
    assert_same(load_state_dict(plan, folder), without(wanted, pooler))


@pytest.mark.parametrize("model", ["bert", "bert-bare"])
def test_bert_with_legacy_names_of_norms(saved: Saved, tmp_path: Path, model: str) -> None:
    folder = saved(model)
    stored = load_file(folder / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in stored.items()
    }
    assert len(set(old) - set(stored)) >= 10
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())

    plan = compile_plan(tmp_path)

    assert_same(load_state_dict(plan, tmp_path), pretrained(tmp_path, MODELS[model][0]).state_dict())
    assert_same(load_state_dict(plan, tmp_path), load_state_dict(compile_plan(folder), folder))


@pytest.mark.parametrize("model", [name for name in MODELS if name != "llama-questions"])
def test_a_model_built_on_meta_gives_equal_outputs(saved: Saved, model: str) -> None:
    folder = saved(model)
    reference = pretrained(folder, MODELS[model][0])
    built = on_meta(*MODELS[model])

    load_into(built, compile_plan(folder), folder, mode="read")

    assert not [name for name, tensor in built.state_dict().items() if tensor.is_meta]
    tokens = torch.arange(1, 41).reshape(2, 20)
    with torch.no_grad():
        wanted, found = reference(input_ids=tokens), built(input_ids=tokens)
    assert torch.isfinite(wanted[0]).all()
    assert torch.equal(found[0], wanted[0])
    assert_same(tied_state(built), tied_state(reference))


def on_meta(model_class: str, config: Mapping[str, object]) -> nn.Module:
    """The model with parameters on the meta device, and buffers, which no checkpoint holds, on the CPU."""
    found = getattr(transformers, model_class)
    model = found(found.config_class(**config))
    assert isinstance(model, nn.Module)
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"))
            setattr(module, name, moved.setdefault(id(parameter), empty))
    return model.eval()


def tied_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, tied names with one object."""
    return dict(model.state_dict(keep_vars=True))


def signature_of(model_class: str, config: Mapping[str, object]) -> Signature:
    """The signature of a transformers model on the meta device."""
    found = getattr(transformers, model_class)
    with torch.device("meta"):
        return Signature.from_module(found(found.config_class(**config)))


def refusal(folder: Path, signature: Signature, target: Target) -> set[tuple[str, tuple[str, ...]]]:
    """Kind and names of each problem, hints (which name nothing) left out."""
    with pytest.raises(CompileError) as caught:
        compile_plan(folder, signature=signature, target=target)
    return {(problem.kind, problem.names) for problem in caught.value.problems if problem.names}


def without(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """`tensors` less those of `names`."""
    left_out = set(names)
    assert left_out <= set(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}
