r"""The bridge: what an installed transformers has registered, as recipes of ours.

The other side is transformers itself, given the same registrations: it saves in the layout that they describe, and
loads what it saved; the plan must come to the same tensors bit for bit. All its own mappings are in `tests/oracle`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import TINY_DECODER, bytes_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import conversion_mapping, core_model_loading

from loadplan.compiler import CompileError, Signature, compile_plan
from loadplan.compiler.patterns import PatternError
from loadplan.compiler.rules import IndexFold, IndexShift, Scoped, WeightConverter, WeightRenaming, converter_of
from loadplan.recipes.bridge import BridgeError, bridge_recipe
from loadplan.runtime import load_state_dict

theirs: Any = core_model_loading  # its classes have hardly any types
_GROUPED = {**TINY_DECODER, "num_key_value_heads": 2}
_MOE = {**_GROUPED, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}

Register = Callable[..., None]


@pytest.fixture
def register() -> Iterator[Register]:
    """Registers with transformers as a user does; afterwards its registry is as before."""
    lookup: Any = conversion_mapping
    lookup.get_checkpoint_conversion_mapping("llama")  # fills the registry
    before, users = dict(lookup._checkpoint_conversion_mapping_cache), set(lookup.USER_REGISTERED_MAPPINGS)

    def registered(name: str, *rules: Any) -> None:
        lookup.register_checkpoint_conversion_mapping(name, list(rules), overwrite=True)

    yield registered
    lookup._checkpoint_conversion_mapping_cache = before
    lookup.USER_REGISTERED_MAPPINGS.clear()
    lookup.USER_REGISTERED_MAPPINGS.update(users)


def built(model_class: str, config: Mapping[str, Any], device: str = "cpu") -> Any:
    """A model with random weights, always the same ones."""
    found: Any = getattr(transformers, model_class)
    torch.manual_seed(5)
    with torch.device(device):
        return found(found.config_class(**config))


def assert_loads_as_transformers_does(
    model: Any, folder: Path, changed: tuple[str, ...] = (), key_mapping: dict[str, str] | None = None
) -> None:
    """What the bridge's plan gives, against `from_pretrained` of `folder`; `changed` names are in its files."""
    stored = load_file(folder / "model.safetensors")
    assert [name for name in changed if name not in stored] == []
    wanted = type(model).from_pretrained(folder, key_mapping=key_mapping).state_dict()
    plan = compile_plan(folder, bridge_recipe(model, key_mapping), Signature.from_module(model))
    loaded = load_state_dict(plan, folder)
    assert sorted(loaded) == sorted(wanted)
    assert [name for name, tensor in wanted.items() if bytes_of(tensor) != bytes_of(loaded[name])] == []
    assert all(torch.equal(wanted[name], tensor) for name, tensor in model.state_dict().items())


def test_a_users_mapping_of_a_class_is_read(register: Register, tmp_path: Path) -> None:
    register(
        "LlamaForCausalLM",
        theirs.WeightRenaming(r"^net\.blocks\.", "model.layers."),
        theirs.WeightRenaming(r"\.attention\.", ".self_attn."),
        theirs.WeightConverter(
            "mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [theirs.Chunk(dim=0)]
        ),
        theirs.WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [theirs.Transpose(0, 1)]),
    )
    model = built("LlamaForCausalLM", _GROUPED)
    model.save_pretrained(tmp_path)
    changed = ("attention.q_proj", "mlp.gate_up", "mlp.down")
    assert_loads_as_transformers_does(model, tmp_path, tuple(f"net.blocks.1.{name}.weight" for name in changed))


def test_a_users_mapping_of_a_type_reaches_the_bare_model(register: Register, tmp_path: Path) -> None:
    register(
        "mistral",
        theirs.GroupWeightRename(["norm0", "norm1"], ["input_layernorm", "post_attention_layernorm"]),
        theirs.PrefixChange(prefix_to_remove="net"),
    )
    model = built("MistralModel", _GROUPED)
    model._weight_conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    model.save_pretrained(tmp_path)
    assert_loads_as_transformers_does(model, tmp_path, ("net.layers.0.norm0.weight", "net.layers.1.norm1.weight"))


def test_key_mapping_comes_first(tmp_path: Path) -> None:
    model = built("LlamaForCausalLM", _GROUPED)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = {f"wrapped.{name.replace('.mlp.', '.ff.')}": tensor for name, tensor in load_file(path).items()}
    save_file(stored, path, metadata={"format": "pt"})
    changed = ("wrapped.model.layers.0.ff.down_proj.weight", "wrapped.lm_head.weight")
    assert_loads_as_transformers_does(model, tmp_path, changed, {r"^wrapped\.": "", r"\.ff\.": ".mlp."})
    with pytest.raises(CompileError):
        compile_plan(tmp_path, bridge_recipe(model), Signature.from_module(model))


_TEXT = {**_GROUPED, "model_type": "llama"}
_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_LLAVA = {"text_config": _TEXT, "vision_config": _VISION, "image_token_index": 3}


def test_rules_of_a_model_inside_concern_its_own_names_only(register: Register, tmp_path: Path) -> None:
    register("clip_vision_model", theirs.WeightRenaming(r"\.attn\.", ".self_attn."))
    register("CLIPVisionModel", theirs.WeightRenaming(r"\.attn\.", ".self_attn."))
    model = built("LlavaForConditionalGeneration", _LLAVA)
    scopes = {rule.path for rule in bridge_recipe(model).rules if isinstance(rule, Scoped)}
    assert scopes == {"vision_tower", ""}  # the base model itself has rules, for its names without a prefix
    assert {rule.base_prefix for rule in bridge_recipe(model).rules if isinstance(rule, Scoped)} == {"model"}
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".attn." in name and "vision" in name for name in stored)
    assert all(".self_attn." in name for name in stored if "q_proj" in name and "vision" not in name)
    assert_loads_as_transformers_does(model, tmp_path)


def test_the_bridge_reads_names_and_config_only() -> None:
    on_meta = built("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}, "meta")
    assert bridge_recipe(on_meta).rules == bridge_recipe(built("MixtralForCausalLM", on_meta.config.to_dict())).rules
    assert bridge_recipe(on_meta).digest == bridge_recipe(on_meta).digest


_Llama: Any = transformers.LlamaForCausalLM


class Aliased(_Llama):  # type: ignore[misc]
    """A user's model: transformers' mappings of its type are not meant for it."""


def test_a_users_model_has_no_rules_unless_the_user_registers_them(register: Register) -> None:
    def model() -> Any:
        return Aliased(_Llama.config_class(**_GROUPED))

    register("LlamaForCausalLM", theirs.WeightRenaming("a", "b"))
    legacy = bridge_recipe(model()).rules
    assert WeightRenaming("a", "b") not in legacy
    register("Aliased", theirs.WeightRenaming("c", "d"))
    assert bridge_recipe(model()).rules == (WeightRenaming("c", "d"), *legacy)


# What is refused.


class OwnOp(theirs.ConversionOps):  # type: ignore[misc]
    """A user's op."""

    def convert(self, *args: Any, **kwargs: Any) -> Any:
        return args

    @property
    def reverse_op(self) -> OwnOp:
        return self


class Chunk(theirs.Chunk):  # type: ignore[misc]
    """A user's op that has the name of one of transformers'."""


class WeightRename(theirs.WeightRenaming):  # type: ignore[misc]
    """A user's rule."""


@pytest.mark.parametrize(
    ("rule", "kind", "name"),
    [
        (WeightRename("a", "b"), "rule", "test_bridge.WeightRename"),
        (theirs.WeightConverter("a", "b", [OwnOp()]), "op", "test_bridge.OwnOp()"),
        (
            theirs.WeightConverter("a", ["b", "c"], [Chunk(1)]),
            "op",
            "test_bridge.Chunk(dim=1, num_shards_attribute=None)",
        ),
        (
            theirs.WeightConverter("a", "b.*", [theirs.Chunk(0, "parts")]),
            "op",
            "core_model_loading.Chunk(dim=0, num_shards_attribute='parts')",
        ),
        (
            theirs.WeightConverter("a", "b", [theirs.Inkling2UnpadVocab(inverse=True)]),
            "op",
            "core_model_loading.Inkling2UnpadVocab(inverse=True)",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(register: Register, rule: Any, kind: str, name: str) -> None:
    register("llama", rule)
    model = built("LlamaModel", _GROUPED, "meta")
    with pytest.raises(BridgeError, match=rf"has the {kind} \S*{re.escape(name)} registered for LlamaModel,") as caught:
        bridge_recipe(model)
    assert (caught.value.kind, caught.value.model) == (kind, "LlamaModel")
    assert isinstance(caught.value, TypeError)


def test_quantised_experts_are_refused_and_dense_ones_pass(register: Register, tmp_path: Path) -> None:
    """Three of the four sources are scales, which only a quantised checkpoint has."""
    names = [rf"mlp\.{name}" for name in ("w2", "w2_scale", "w2_amax", "w2_denominator")]
    register("llama", theirs.WeightConverter(names, "mlp.down_proj.weight", [theirs.Inkling2LoopDequantizeExperts()]))
    model = built("LlamaForCausalLM", {**_GROUPED, "num_hidden_layers": 1})
    state = {name.replace("down_proj.weight", "w2"): tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    signature, recipe = Signature.from_module(model), bridge_recipe(model)
    loaded = load_state_dict(compile_plan(path, recipe, signature), path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())

    w2 = "model.layers.0.mlp.w2"
    state |= {w2: state[w2].to(torch.uint8), f"{w2}_scale": torch.ones(2, dtype=torch.uint8)}
    save_file(state, path)
    with pytest.raises(CompileError) as caught:
        compile_plan(path, recipe, signature)
    assert {(problem.kind, problem.names) for problem in caught.value.problems} == {
        ("shape", (w2,)),
        ("unexpected", (f"{w2}_scale",)),
    }
    assert "quantised values, which mean nothing without their scales" in str(caught.value)


# Where converters begin (cases B01), and what transformers gets wrong.


def claims(model: nn.Module, name: str) -> bool:
    """Whether a converter of the bridge takes `name`."""
    rules = [rule for rule in bridge_recipe(model).rules if isinstance(rule, WeightConverter | Scoped)]
    return any(converter_of(rule) is not None and rule.claim(name) is not None for rule in rules)


@pytest.mark.parametrize(
    ("name", "claimed"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", True),
        ("model.layers.0.mlp.experts.12.down_proj.weight", True),
        ("model.layers.0.mlp.shared_experts.3.gate_proj.weight", False),
        ("model.layers.0.mlp.experts.3.adapter.gate_proj.weight", False),
        ("model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv", False),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", False),
    ],
)
def test_experts_are_taken_by_whole_components(name: str, claimed: bool) -> None:
    assert claims(built("Qwen2MoeForCausalLM", _MOE, "meta"), name) == claimed


def test_a_pattern_may_begin_inside_a_component_where_all_its_targets_do(register: Register, tmp_path: Path) -> None:
    register(
        "llama",
        theirs.WeightConverter(
            r"attn\.pair\.weight", ["attn.q_proj.weight", "attn.o_proj.weight"], [theirs.Chunk(dim=0)]
        ),
        theirs.WeightConverter(r"up_w", r"up_proj.weight", [theirs.Transpose(0, 1)]),
    )
    model = built("LlamaForCausalLM", _GROUPED)
    model.save_pretrained(tmp_path)
    assert_loads_as_transformers_does(
        model, tmp_path, ("model.layers.1.self_attn.pair.weight", "model.layers.0.mlp.up_w")
    )
    assert claims(model, "model.layers.0.cross_attn.pair.weight")
    assert claims(model, "model.layers.0.mlp.up_w")
    assert not claims(model, "model.layers.0.mlp.shared_up_w")  # the model has targets that begin at a component


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1), (8, 2)])
def test_keys_are_permuted_by_their_own_heads(register: Register, tmp_path: Path, heads: int, key_heads: int) -> None:
    """Cases B48. transformers counts the heads of queries for keys too, which is wrong where those have fewer."""
    for name in ("q_proj", "k_proj"):
        weight = rf"self_attn\.{name}\.weight"
        register("llama", theirs.WeightConverter(weight, f"self_attn.{name}.weight", [theirs.PermuteForRope()]))
    size = 32 // heads
    config = {**_GROUPED, "hidden_size": 32, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    model = built("LlamaForCausalLM", config)
    state = dict(model.state_dict())
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    loaded = load_state_dict(compile_plan(path, bridge_recipe(model), Signature.from_module(model)), path)
    halves = [*range(0, size, 2), *range(1, size, 2)]  # pairs side by side -> first ones, then second ones
    rows = [head * size + row for head in range(key_heads) for row in halves]
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(loaded[name], state[name][rows])


# The rules that reckon with numbers; transformers has one of each, for one type.


@pytest.mark.parametrize(
    ("rule", "name", "wanted"),
    [
        (IndexShift(r"res\.queries\.(\d+)", r"layers.\1.query", 1), "m.res.queries.0", "m.layers.1.query"),
        (IndexShift(r"res\.queries\.(\d+)", r"layers.\1.query", 1), "m.res.queries.9", "m.layers.10.query"),
        (IndexShift(r"res\.queries\.(\d+)", r"layers.\1.query", -1), "m.res.queries.1.w", "m.layers.0.query.w"),
        (IndexShift(r"res\.queries\.(\d+)", r"layers.\1.query", -1), "m.res.queries.0", "m.res.queries.0"),
        (IndexShift(r"res\.queries\.(\d+)", r"layers.\1.query", 1), "m.res.other.0", "m.res.other.0"),
        (IndexShift(r"h\.(\w+)\.", r"layers.\1.", 1), "h.last.w", "h.last.w"),
        (IndexShift(r"h\.(\d+)\.", r"layers.\1.", 1), f"h.{'9' * 5000}.w", f"h.{'9' * 5000}.w"),
        (IndexFold(r"h\.(\d+)\.mix", (r"h.\1.attn", r"h.\1.mlp")), "h.4.mix.w", "h.2.attn.w"),
        (IndexFold(r"h\.(\d+)\.mix", (r"h.\1.attn", r"h.\1.mlp")), "h.11.mix.w", "h.5.mlp.w"),
        (IndexFold(r"h\.(\d+)\.mix", (r"h.\1.attn", r"h.\1.mlp")), "h.11.mixer.w", "h.11.mixer.w"),
        (IndexFold(r"h\.(\d+)", (r"a.\1", r"b.\1", r"c.\1")), "x.h.8.w", "x.c.2.w"),
        (IndexFold(r"h\.(\d+)\.one", (r"h.\1.gain",) * 2), "h.7.one", "h.3.gain"),
        (IndexFold(r"h\.(\w+)\.", (r"h.\1.",) * 2), "h.x.w", "h.x.w"),
    ],
)
def test_numbers_are_shifted_and_folded(rule: IndexShift | IndexFold, name: str, wanted: str) -> None:
    assert rule.rename(["other", name]) == ["other", wanted]
    (scoped,) = Scoped(rule, "tower", "model").rename([f"model.tower.{name}"])
    assert scoped == f"model.tower.{wanted}"
    assert Scoped(rule, "tower", "model").rename([name]) == [name]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (r"h\.\d+", r"l.\1"),
        (r"(h)\.(\d+)", r"l.\1"),
        (r"h\.(\d+)", "l"),
        (r"h\.(\d+)", r"\1.\1"),
        (r"h\.(\d+)\.*", r"\1"),
    ],
)
def test_a_rule_on_a_number_needs_one_number(source: str, target: str) -> None:
    with pytest.raises(PatternError):
        IndexShift(source, target, 1)
    with pytest.raises(PatternError):
        IndexFold(source, (target, target))
