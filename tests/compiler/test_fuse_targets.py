"""Targets of fused models: coverage, waivers, dtypes, ties and cuts, and what is refused, on small modules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from saving import check_restores
from torch import nn

from loadplan.compiler import CompileError, Signature, Target, compile_plan
from loadplan.compiler.ops import Cast, Concatenate, Reshape
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import Rule, WeightConverter, WeightRenaming
from loadplan.compiler.shard import heads
from loadplan.compiler.show import show_plan
from loadplan.runtime import load_into, load_state_dict
from loadplan.runtime.dtype import DType
from loadplan.runtime.fusion import fuse_modules, register_fusion, unregister_fusion


class Attention(nn.Module):
    """Projections of 4 queries, 2 keys and 2 values of 2 rows each; and something that no fusion concerns."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 8, bias)
        self.k_proj = nn.Linear(6, 4, bias)
        self.v_proj = nn.Linear(6, 4, bias)
        self.q_norm = nn.LayerNorm(2)


class Model(nn.Module):
    def __init__(self, layers: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 6)
        self.layers = nn.ModuleList(Attention(bias) for _ in range(layers))


def write(model: nn.Module, folder: Path, without: Sequence[str] = ()) -> Path:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in without}
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors")
    return folder


def problems(folder: Path, model: Any, target: Target, recipe: Recipe | None = None) -> list[tuple[str, str]]:
    with pytest.raises(CompileError) as caught:
        compile_plan(folder, recipe, model, target)
    return [(problem.kind, problem.message) for problem in caught.value.problems]


QKV = {"qkv": True}


@pytest.mark.parametrize("bias", [False, True])
def test_loads_into_the_fused_model_and_comes_back(bias: bool, tmp_path: Path) -> None:
    model = Model(bias=bias)
    folder = write(model, tmp_path / "a")
    plan = compile_plan(folder, signature=model, target=Target(fusions=QKV))
    assert [tensor.name for tensor in plan.head.tensors if "layers.0" in tensor.name] == [
        "layers.0.q_norm.bias",
        "layers.0.q_norm.weight",
        *(["layers.0.qkv_proj.bias"] if bias else []),
        "layers.0.qkv_proj.weight",
    ]
    with torch.device("meta"):
        fused = Model(bias=bias)
    fuse_modules(fused, plan.head.fusions)
    load_into(fused, plan, folder)
    fuse_modules(model, plan.head.fusions)
    assert all(torch.equal(tensor, fused.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert any(line.startswith('fused layers.1 by qkv {"bias":') for line in show_plan(plan))
    check_restores(plan, folder, tmp_path / "b")


def test_what_is_asked_for_is_part_of_the_key(tmp_path: Path) -> None:
    model = Model()
    folder = write(model, tmp_path)
    plain, fused, some = (
        compile_plan(folder, signature=model, target=Target(fusions=fusions))
        for fusions in (None, QKV, {"qkv": {"modules": r"layers\.0"}})
    )
    digests = [Target(fusions=f).digest for f in (None, {}, QKV, {"qkv": False}, {"qkv": {"modules": "a"}})]
    assert len(set(digests)) == 5
    parts = [dict(plan.head.provenance) for plan in (plain, fused, some)]
    assert len({part["signature"] for part in parts}) == len({part["target"] for part in parts}) == 3
    assert [len(plan.head.fusions) for plan in (plain, fused, some)] == [0, 2, 1]
    assert "fusions" not in parts[0] and parts[1]["fusions"] != parts[2]["fusions"]


def test_a_signature_with_fusions_is_stored_whole() -> None:
    signature = Signature.from_module(Model(), QKV)
    text = json.dumps(signature.to_json())
    assert Signature.from_json(json.loads(text)) == signature
    assert signature.fused is not None and signature.fused.fused is None
    assert signature.digest != Signature.from_module(Model()).digest


# What is refused.


@pytest.mark.parametrize(
    ("fusions", "says"),
    [
        ({"qvk": True}, "unknown fusion 'qvk'; near ones: qkv"),
        ({"gate_up": True}, "fusion 'gate_up' finds nothing to fuse in Model"),
        ({"qkv": {"modules": "nowhere"}}, "fusion 'qkv' finds nothing to fuse in Model in modules 'nowhere'"),
        ({"qkv": {"wrong": 1}}, "unknown option 'wrong'"),
    ],
)
def test_fusions_that_are_not_there(fusions: Any, says: str, tmp_path: Path) -> None:
    model = Model()
    ((kind, message),) = problems(write(model, tmp_path), model, Target(fusions=fusions))
    assert kind == "option" and says in message


@pytest.mark.parametrize("fusions", ["qkv", ["qkv"], {"qkv": 1}, {"qkv": None}, {1: True}, {"qkv": {"a": 0.5}}])
def test_fusions_are_a_mapping(fusions: Any) -> None:
    with pytest.raises(CompileError, match="option: fusions="):
        Target(fusions=fusions)


def test_without_a_model_nothing_can_be_fused(tmp_path: Path) -> None:
    model = Model()
    folder = write(model, tmp_path)
    types = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    for signature in (types, "recipe", None):
        ((kind, message),) = problems(folder, signature, Target(fusions=QKV))
        assert kind == "option" and "they are found in a model, and none is known: pass it as signature" in message
        assert compile_plan(folder, signature=signature, target=Target(fusions={"qkv": False})).head.fusions == ()


def test_a_signature_that_was_made_otherwise(tmp_path: Path) -> None:
    folder = write(Model(), tmp_path)
    plain, fused = Signature.from_module(Model()), Signature.from_module(Model(), QKV)
    assert compile_plan(folder, signature=fused).head.fusions == fused.fusions
    for signature, fusions in ((plain, QKV), (fused, {}), (fused, {"qkv": False})):
        ((kind, message),) = problems(folder, signature, Target(fusions=fusions))
        assert kind == "option" and "make it with these" in message


def test_parts_of_different_dtypes(tmp_path: Path) -> None:
    model = Model()
    folder = write(model, tmp_path)
    found = problems(folder, model, Target(fusions=QKV, dtype_plan={"k_proj.weight": "bfloat16"}))
    assert {kind for kind, _ in found} == {"fusion"}
    assert "layers.0.qkv_proj.weight" in found[0][1] and "tensor 1 is BF16[4,6], tensor 0 is F32[8,6]" in found[0][1]
    plan = compile_plan(folder, signature=model, target=Target(fusions=QKV, dtype_plan={"layers.0": "bfloat16"}))
    kinds = {tensor.name: tensor.type.dtype for tensor in plan.head.tensors}
    assert kinds["layers.0.qkv_proj.weight"] is DType.BF16 and kinds["layers.1.qkv_proj.weight"] is DType.F32
    assert len(plan.report.casts) == 8 and all("qkv" not in cast for cast in plan.report.casts)


def test_waivers_are_for_original_names(tmp_path: Path) -> None:
    """A target all of whose parts are waived is waived; one without some of its parts cannot be made."""
    model = Model()
    biases = [f"layers.1.{part}_proj.bias" for part in "qkv"]
    folder = write(model, tmp_path, without=biases)
    waiver = Recipe(may_be_missing=["layers.*.k_proj.bias", "layers.*.q_proj.bias", "layers.*.v_proj.bias"])
    assert {name for kind, name in problems(folder, model, Target(fusions=QKV)) if kind == "missing"} == {
        f"no source tensor becomes {name}" for name in biases
    }
    for recipe, target in ((waiver, Target(fusions=QKV)), (None, Target(fusions=QKV, missing="ignore"))):
        plan = compile_plan(folder, recipe, model, target)
        assert plan.report.missing == ("layers.1.qkv_proj.bias",)
    some = write(model, tmp_path / "some", without=biases[1:])
    ((kind, message),) = problems(some, model, Target(fusions=QKV), waiver)
    assert kind == "missing"
    assert "layers.1.qkv_proj.bias: nothing makes layers.1.k_proj.bias, layers.1.v_proj.bias, and the other" in message


# Cuts over ranks.

STYLES = {f"layers.*.{part}_proj": heads(2) for part in "qkv"}


def test_ranks_hold_their_heads_with_biases(tmp_path: Path) -> None:
    model = Model()
    folder = write(model, tmp_path / "a")
    plan = compile_plan(folder, signature=model, target=Target(fusions=QKV, tp_size=2, tp_plan=STYLES))
    state = model.state_dict()
    for rank in range(2):
        loaded = load_state_dict(plan, folder, rank)
        for kind in ("weight", "bias"):
            parts = [state[f"layers.1.{part}_proj.{kind}"].chunk(2)[rank] for part in "qkv"]
            assert torch.equal(loaded[f"layers.1.qkv_proj.{kind}"], torch.cat(parts))
    check_restores(plan, folder, tmp_path / "b")


def test_keys_that_every_rank_holds_whole_cannot_be_joined(tmp_path: Path) -> None:
    model = Model(layers=1)
    plan = {"layers.*.q_proj": "colwise", "layers.*.k_proj": "replicated", "layers.*.v_proj": "replicated"}
    found = problems(write(model, tmp_path), model, Target(fusions=QKV, tp_size=2, tp_plan=plan))
    assert [kind for kind, _ in found] == ["shard", "shard"]
    assert "the ranks together hold 24 positions along dim 0, there are 16; cut all parts, or none" in found[0][1]
    found = problems(
        write(model, tmp_path), model, Target(fusions=QKV, tp_size=2, tp_plan={"layers.*.q_proj": "rowwise"})
    )
    assert "layers.0.qkv_proj.weight, of layers.0.q_proj.weight, layers.0.k_proj.weight" in found[0][1]


# Ties.


class Shared(nn.Module):
    """One layer used twice, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        layer = Attention()
        self.layers = nn.ModuleList([layer, layer])


@pytest.mark.parametrize("stored", [0, 1])
def test_a_module_at_two_paths_is_fused_once(stored: int, tmp_path: Path) -> None:
    """Whichever of its names the checkpoint has."""
    model = Shared()
    other = [name for name in model.state_dict() if name.startswith(f"layers.{1 - stored}.")]
    folder = write(model, tmp_path / "a", without=other)
    plan = compile_plan(folder, signature=model, target=Target(fusions=QKV))
    assert [one.path for one in plan.head.fusions] == ["layers.0"]
    loaded = load_state_dict(plan, folder)
    assert loaded["layers.0.qkv_proj.weight"] is loaded["layers.1.qkv_proj.weight"]
    with torch.device("meta"):
        fused = Shared()
    fuse_modules(fused, plan.head.fusions)
    load_into(fused, plan, folder)
    parts = [model.state_dict()[f"layers.0.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(fused.state_dict()["layers.1.qkv_proj.weight"], torch.cat(parts))
    check_restores(plan, folder, tmp_path / "b")


def test_a_module_that_is_stored_twice_cannot_be_fused(tmp_path: Path) -> None:
    """Each copy could be the right one: as two they would be compared, joined they are not."""
    model = Shared()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    found = problems(tmp_path, model, Target(fusions=QKV))
    assert {kind for kind, _ in found} == {"fusion"}
    assert "are one tensor in the model and two in the checkpoint: they cannot be fused" in found[0][1]


# Families with wrong rules.


class FusedPair(nn.Module):
    def fuse_(self) -> None:
        a, b = cast(nn.Linear, self.a), cast(nn.Linear, self.b)
        self.ab = nn.Linear(a.in_features, a.out_features + b.out_features, device="meta")
        del self.a, self.b


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 3)


class PairFamily:
    """Modules `a` and `b` as `ab`, by the rules it is made with."""

    def __init__(self, rules: Sequence[object]) -> None:
        self._rules = rules

    def is_fusable(self, module: nn.Module) -> bool:
        return type(module) is Pair

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return type("FusedPairOf", (FusedPair, original_cls), {})

    def make_transforms(self, config: object, **facts: object) -> Sequence[object]:
        return self._rules


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Any]:
    """Compiles a `Pair` with the given rules, as the family `pair`."""

    def compiled(*rules: object, target: Target | None = None) -> Any:
        register_fusion("pair", PairFamily(rules), overwrite=True)
        model = nn.ModuleDict({"x": Pair()})
        return compile_plan(write(model, tmp_path), signature=model, target=target or Target(fusions={"pair": True}))

    yield compiled
    unregister_fusion("pair")


WEIGHT = WeightConverter(["^a.weight$", "^b.weight$"], "ab.weight", [Concatenate(0)])
BIAS = WeightConverter(["^a.bias$", "^b.bias$"], "ab.bias", [Concatenate(0)])


def test_rules_that_are_right(pair: Any) -> None:
    assert [tensor.name for tensor in pair(WEIGHT, BIAS).head.tensors] == ["x.ab.bias", "x.ab.weight"]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([WEIGHT], "missing: nothing makes x.ab.bias of the fused model"),
        ([WEIGHT], "unexpected: the fused model has no x.b.bias of the original, and no fusion takes it"),
        (
            [WEIGHT, WeightRenaming("^a.bias$", "ab.bias")],
            "fusion: x.ab.bias is made as F32[3], the fused model has F32[6]",
        ),
        ([WEIGHT, WeightRenaming(r"^(a|b).bias$", "ab.bias")], "x.ab.bias"),
        (
            [WEIGHT, WeightConverter(["^a.bias$", "^b.bias$"], "c.bias", [Concatenate(0)])],
            "x.c.bias is not in the fused model",
        ),
        (
            [WEIGHT, WeightConverter(["^a.bias$", "^b.bias$"], "ab.bias", [Concatenate(1)])],
            "fusion: x.ab.bias: Concatenate",
        ),
        ([WEIGHT, WeightConverter("^a.bias$", "ab.bias", [Reshape((3,))])], "the fused model has F32[6]"),
        (
            [WEIGHT, WeightConverter(["^a.bias$", "^b.bias$"], "ab.bias", [Concatenate(0), Cast(DType.BF16)])],
            "fusion: x.ab.bias is made as BF16[6], the fused model has F32[6]",
        ),
        (
            [WEIGHT, WeightConverter(["a.bias", "b.bias", "c.bias"], "ab.bias", [Concatenate(0)])],
            "nothing makes x.ab.bias",
        ),
        ([WEIGHT, "not a rule"], "option: fusion 'pair' of 'x': 'not a rule' is not a rule"),
    ],
)
def test_rules_that_are_wrong(pair: Any, rules: Sequence[Rule | str], says: str) -> None:
    with pytest.raises(CompileError) as caught:
        pair(*rules)
    assert any(says in str(problem) for problem in caught.value.problems), str(caught.value)


class ScaledFamily:
    """A `Linear` whose weight is another one in the fused module, under the same name and of the same type."""

    def is_fusable(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        def fuse_(self: nn.Linear) -> None:
            self.weight = nn.Parameter(self.weight * 2)

        return type("Scaled", (original_cls,), {"fuse_": fuse_})

    def make_transforms(self, config: object, **facts: object) -> Sequence[object]:
        return ()


def test_a_name_that_stays_does_not_mean_that_the_tensor_does(tmp_path: Path) -> None:
    """Without a rule for it, the original weight would be loaded where a scaled one belongs."""
    model = nn.ModuleDict({"x": nn.Linear(2, 3)})
    register_fusion("scaled", ScaledFamily())
    try:
        found = problems(write(model, tmp_path), model, Target(fusions={"scaled": True}))
    finally:
        unregister_fusion("scaled")
    assert found == [
        ("missing", "nothing makes x.weight of the fused model"),
        ("unexpected", "the fused model has no x.weight of the original, and no fusion takes it"),
    ]


def test_changed_rules_change_the_key(pair: Any) -> None:
    swapped = WeightConverter(["^b.weight$", "^a.weight$"], "ab.weight", [Concatenate(0)])
    one, other = pair(WEIGHT, BIAS), pair(swapped, BIAS)
    changed = {key for key, digest in one.head.provenance if dict(other.head.provenance)[key] != digest}
    assert changed == {"fusions"}


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    ranks=st.sampled_from([1, 2]),
    grouped=st.booleans(),
    dtype=st.sampled_from([None, "bfloat16"]),
)
def test_groups_of_any_sizes(tmp_path: Path, sizes: list[int], ranks: int, grouped: bool, dtype: str | None) -> None:
    """Loaded from every rank and put together, the parts are those of the checkpoint."""
    model = nn.Module()
    for name, size in zip("qkv", sizes, strict=True):
        model.add_module(f"{name}_proj", nn.Linear(3, 2 * size))
    folder = write(model, tmp_path / f"{sizes}")
    plan: Mapping[str, Any] = {
        f"{name}_proj": heads(size) if grouped else "colwise" for name, size in zip("qkv", sizes, strict=True)
    }
    made = compile_plan(folder, signature=model, target=Target(dtype=dtype, fusions=QKV, tp_size=ranks, tp_plan=plan))
    loaded = [load_state_dict(made, folder, rank)["qkv_proj.weight"] for rank in range(ranks)]
    parts = [rank.split([2 * size // ranks for size in sizes]) for rank in loaded]  # type: ignore[no-untyped-call]
    for index, name in enumerate("qkv"):
        whole = model.get_submodule(f"{name}_proj").state_dict()["weight"]
        assert torch.equal(torch.cat([part[index] for part in parts]), whole.to(loaded[0].dtype))
