"""Names to targets: cases B01, B02, B06, B08 (registry), B10, B11, B14, B17, B21, B24 and B48 through the graph.

What is right is written out by hand for each case, with other names and sizes than the report's; values are those of
`reference.evaluate`, each source tensor filled with a number of its own. Whole compilations (`compile_parts`) say what
is refused, by the kind of the problem and the names in it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
import torch
from by_hand import checkpoint, tensor_type
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.compiler.build_graph import build_graph
from loadplan.compiler.ir import Config, Op
from loadplan.compiler.ops import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Permute,
    PermuteForRope,
    Split,
    SplitModulelist,
    Transpose,
)
from loadplan.compiler.pipeline import compile_parts
from loadplan.compiler.problem import CompileError, Problem
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.reference import evaluate
from loadplan.compiler.registry import find_recipe, register_recipe
from loadplan.compiler.route_names import Routing, route_names
from loadplan.compiler.rules import GroupWeightRename, PrefixChange, Rule, Scoped, WeightConverter, WeightRenaming
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.runtime.torch_types import torch_dtype

EXPERTS = (
    WeightConverter(
        ["experts.*.gate.weight", "experts.*.up.weight"], "experts.gate_up", [MergeModulelist(0), Concatenate(1)]
    ),
    WeightConverter("experts.*.down.weight", "experts.down", [MergeModulelist(0)]),
)


def routed(names: Sequence[str], *rules: Rule, known: Sequence[str] | None = None, prefix: str = "") -> Routing:
    return route_names(names, rules, known, prefix)


def targets_of(routing: Routing) -> dict[str, str]:
    """Source name -> target, of what is only renamed."""
    return dict(routing.plain)


def made(
    stored: Mapping[str, str],
    rules: Sequence[Rule],
    declared: Mapping[str, str] | None = None,
    config: Mapping[str, object] | None = None,
) -> dict[str, torch.Tensor]:
    """Every target's value; source number i is filled with i. Fails when there is a problem."""
    entries = checkpoint(stored).entries
    wanted = {name: tensor_type(text) for name, text in (declared or {}).items()}
    routing = route_names(tuple(entries), rules, wanted if declared is not None else None)
    products, broken, problems = build_graph(routing, entries, wanted, Config(tuple((config or {}).items())))
    assert (list(routing.problems), list(routing.broken), problems, broken) == ([], [], [], [])
    tensors = {
        name: torch.full(entry.type.shape, number, dtype=torch_dtype(entry.type.dtype))
        for number, (name, entry) in enumerate(entries.items())
    }
    return {product.target: evaluate(product.value, tensors) for product in products}


def problems_of(
    stored: Mapping[str, str], rules: Sequence[Rule] = (), declared: Mapping[str, str] | None = None, prefix: str = ""
) -> list[Problem]:
    """What a whole compilation refuses; fails when it refuses nothing."""
    signature = None
    if declared is not None:
        tensors = tuple((name, tensor_type(text)) for name, text in declared.items())
        signature = Signature(tensors, base_model_prefix=prefix)
    with pytest.raises(CompileError) as caught:
        compile_parts(checkpoint(stored), Recipe(rules), signature, Target())
    return list(caught.value.problems)


def loads(
    stored: Mapping[str, str], rules: Sequence[Rule] = (), declared: Mapping[str, str] | None = None, prefix: str = ""
) -> list[str]:
    """Names of the tensors of the compiled plan."""
    signature = None
    if declared is not None:
        tensors = tuple((name, tensor_type(text)) for name, text in declared.items())
        signature = Signature(tensors, base_model_prefix=prefix)
    plan = compile_parts(checkpoint(stored), Recipe(rules), signature, Target())
    return [tensor.name for tensor in plan.head.tensors]


def fills(tensor: torch.Tensor) -> list[float]:
    """The one value in each slice of dim 0."""
    assert all(bool((part == part.flatten()[0]).all()) for part in tensor)
    return [float(part.flatten()[0]) for part in tensor]


# B01, B02.


def test_routed_experts_leave_their_neighbours_alone() -> None:
    names = [f"l.0.mlp.experts.{i}.down.weight" for i in range(2)]
    neighbours = [
        "l.0.mlp.shared_experts.down.weight",
        "l.0.mlp.shared_experts.3.down.weight",
        "l.0.mlp.experts.3.adapter.down.weight",
        "l.0.mlp.experts.0.down.weight_scale_inv",
        "l.0.mlp.experts.0.down.weight.absmax",
        "l.0.mlp.experts.0.down.bias",
    ]
    routing = routed([*names, *neighbours], *EXPERTS)
    assert targets_of(routing) == {name: name for name in neighbours}
    (conversion,) = routing.conversions
    assert (conversion.targets, list(conversion.sources())) == (("l.0.mlp.experts.down",), names)


@pytest.mark.parametrize("suffix", ["_scale_inv", ".absmax", "_blocks", ".scale", "_g", "2"])
def test_siblings_of_a_fused_weight_keep_their_names(suffix: str) -> None:
    rule = WeightConverter(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight", [Concatenate(0)])
    sibling = f"m.gate_proj.weight{suffix}"
    routing = routed(["m.gate_proj.weight", "m.up_proj.weight", sibling], rule)
    assert targets_of(routing) == {sibling: sibling}
    assert [conversion.targets for conversion in routing.conversions] == [("m.gate_up_proj.weight",)]


def test_a_module_pattern_takes_weight_and_bias_apart() -> None:
    rule = WeightConverter("attn.qkv", ["attn.q", "attn.k", "attn.v"], [Chunk(0)])
    found = made({"m.attn.qkv.weight": "F32[6,2]", "m.attn.qkv.bias": "F32[6]", "m.attn.qkv.scale": "F32[1]"}, [rule])
    wanted = {f"m.attn.{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")}
    assert set(found) == {*wanted, "m.attn.qkv.scale"}


# B06, B10, B14: prefixes, and names that the model knows as they are.


@pytest.mark.parametrize("prefix", ["model", "bert", "a.b"])
def test_a_base_prefix_is_whole_components(prefix: str) -> None:
    names = ["extra.weight", f"{prefix}_extra.weight"]
    assert targets_of(routed(names, known=names, prefix=prefix)) == {name: name for name in names}
    stray = [f"{prefix}Xlin.weight", f"{prefix}_lin.weight", f"x{prefix}.lin.weight"]
    found = targets_of(routed(stray, known=["lin.weight"], prefix=prefix))
    assert found == {name: name for name in stray}


def test_names_that_the_model_knows_are_not_shifted() -> None:
    """A head with a `norm` of its own around a base with one (transformers swaps the two)."""
    names = ["norm.weight", "model.norm.weight"]
    for order in permutations(names):
        assert targets_of(routed(order, known=names, prefix="model")) == {name: name for name in names}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("stored", [0, 1, 2, 3])
@pytest.mark.parametrize("prefix", ["model", "base.inner"])
def test_every_depth_of_the_base_prefix_loads(depth: int, stored: int, prefix: str) -> None:
    target = f"{prefix}." * depth + "lin.weight"
    source = f"{prefix}." * stored + "lin.weight"
    assert loads({source: "F32[2,2]"}, declared={target: "F32[2,2]"}, prefix=prefix) == [target]


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("second", [0, 1, 2])
def test_two_depths_in_one_checkpoint_are_refused(first: int, second: int) -> None:
    if first == second:
        return
    names = ["model." * depth + "lin.weight" for depth in (first, second)]
    problems = problems_of(
        dict.fromkeys(names, "F32[2]"), declared={"model.model.lin.weight": "F32[2]"}, prefix="model"
    )
    assert [problem.kind for problem in problems] == ["duplicate"]
    assert set(problems[0].names) == {"model.model.lin.weight", *names}


@pytest.mark.parametrize("base", ["text_model", "vision.tower"])
def test_a_renaming_is_undone_where_only_the_original_exists(base: str) -> None:
    name, rule = f"{base}.lin.weight", WeightRenaming(rf"^{base}\.", "")
    kept = routed([name], rule, known=[name])
    assert (targets_of(kept), kept.kept) == ({name: name}, ((name, "lin.weight"),))
    both = routed([name], rule, known=[name, "lin.weight"])
    assert (targets_of(both), both.kept) == ({name: "lin.weight"}, ())
    neither = routed([name], rule, known=["other"])
    assert (targets_of(neither), neither.kept) == ({name: "lin.weight"}, ())
    assert both.rule_uses == ((str(rule), 1),)


def test_a_renaming_is_undone_under_the_base_prefix_too() -> None:
    routing = routed(["old.w"], WeightRenaming("old", "new"), known=["model.old.w"], prefix="model")
    assert (targets_of(routing), routing.kept) == ({"old.w": "model.old.w"}, (("old.w", "new.w"),))


def test_a_converter_is_undone_where_only_the_original_exists() -> None:
    names = [f"experts.{i}.down.weight" for i in range(2)]
    routing = routed(names, *EXPERTS, known=names)
    assert targets_of(routing) == {name: name for name in names}
    assert (routing.conversions, routing.problems) == ((), ())
    assert routing.kept == tuple((name, "experts.down") for name in names)


def test_converted_names_get_the_base_prefix() -> None:
    names = ["experts.0.down.weight", "experts.1.down.weight"]
    (conversion,) = routed(names, *EXPERTS, known=["model.experts.down"], prefix="model").conversions
    assert conversion.targets == ("model.experts.down",)


def test_renamings_run_before_converters_wherever_they_stand() -> None:
    rules: list[Rule] = [*EXPERTS, WeightRenaming("moe", "mlp"), WeightRenaming("w2", "down"), PrefixChange("model")]
    names = [f"l.0.moe.experts.{i}.w2.weight" for i in range(3)]
    routing = routed(names, *rules)
    assert [conversion.targets for conversion in routing.conversions] == [("model.l.0.mlp.experts.down",)]
    assert dict(routing.rule_uses) == {str(rules[0]): 0, str(rules[1]): 3, **{str(rule): 3 for rule in rules[2:]}}


def test_the_first_converter_that_claims_a_name_takes_it() -> None:
    first = WeightConverter("a.*.w", "first", [MergeModulelist(0)])
    second = WeightConverter("a.*.w", "second", [MergeModulelist(0)])
    assert [c.targets for c in routed(["a.0.w"], first, second).conversions] == [("first",)]
    assert [c.targets for c in routed(["a.0.w"], second, first).conversions] == [("second",)]


# B08: classes and types, and the scopes of nested models.


def test_a_recipe_of_a_class_does_not_reach_its_cousins() -> None:
    with_box, plain = Recipe([WeightRenaming("bbox", "box")]), Recipe()
    register_recipe("TestRouteDetSeg", with_box)
    register_recipe("test_route_det", plain)
    assert find_recipe(config={"architectures": ["TestRouteDetSeg"], "model_type": "test_route_det"}) is with_box
    assert find_recipe(config={"architectures": ["TestRouteDet"], "model_type": "test_route_det"}) is plain
    assert find_recipe(config={"architectures": ["TestRouteOther"], "model_type": "test_route_other"}) is None
    assert targets_of(routed(["bbox.w"], *plain.rules)) == {"bbox.w": "bbox.w"}
    assert targets_of(routed(["bbox.w"], *with_box.rules)) == {"bbox.w": "box.w"}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_rules_of_a_child_stay_below_it(prefix: str) -> None:
    inner: list[WeightRenaming | WeightConverter] = [WeightRenaming(r"^blocks\.", "layers."), EXPERTS[1]]
    rules = [Scoped(rule, path, "model") for path in ("vision", "audio.tower") for rule in inner]
    names = [
        f"{prefix}{path}.{rest}"
        for path in ("vision", "audio.tower", "text", "vision_extra", "audio", "x.vision")
        for rest in ("blocks.0.w", "moe.experts.0.down.weight")
    ]
    routing = routed(names, *rules)
    found = targets_of(routing) | {name: c.targets[0] for c in routing.conversions for name in c.sources()}
    assert found == {
        f"{prefix}{path}.{rest}": f"{prefix}{path}.{wanted if path in ('vision', 'audio.tower') else rest}"
        for path in ("vision", "audio.tower", "text", "vision_extra", "audio", "x.vision")
        for rest, wanted in (("blocks.0.w", "layers.0.w"), ("moe.experts.0.down.weight", "moe.experts.down"))
    }


# B11: two sources on one target are refused, never one of them taken.


def test_a_chain_of_plain_renamings_is_refused_and_a_group_is_right() -> None:
    stored = {f"l.{layer}.{norm}.w": "F32[2]" for layer in range(2) for norm in ("norm0", "norm1")}
    problems = problems_of(stored, [WeightRenaming("norm0", "norm1"), WeightRenaming("norm1", "norm2")])
    assert [problem.kind for problem in problems] == ["duplicate", "duplicate"]
    group = GroupWeightRename(["norm0", "norm1"], ["norm1", "norm2"])
    found = made(stored, [group])
    assert {name: fills(value) for name, value in found.items()} == {
        f"l.{layer}.norm{at + 1}.w": [layer * 2 + at] * 2 for layer in range(2) for at in range(2)
    }


# B17: list order is the number's, never the text's or the file's.

SPELLINGS = [
    ("experts.*.w1.weight", "l.{}.experts.{}.w1.weight"),
    ("experts.w1_*", "l.{}.experts.w1_{}"),
    ("expert*_w1", "l.{}.expert{}_w1"),
    ("experts.*.w1.weight", "l.{}.experts.{:02d}.w1.weight"),
]


@pytest.mark.parametrize(("pattern", "spelling"), SPELLINGS)
@pytest.mark.parametrize("count", [1, 2, 12, 101])
def test_slice_i_holds_expert_i_whatever_the_order(pattern: str, spelling: str, count: int) -> None:
    rule = WeightConverter(pattern, "packed", [MergeModulelist(0)])
    names = [spelling.format(layer, number) for layer in range(2) for number in range(count)]
    shuffled = random.Random(count).sample(names, len(names))
    found = made(dict.fromkeys(shuffled, "F32[2,3]"), [rule])
    for layer in range(2):
        wanted = [float(shuffled.index(spelling.format(layer, number))) for number in range(count)]
        assert fills(found[f"l.{layer}.packed"]) == wanted


@pytest.mark.parametrize(
    ("numbers", "kind", "message"),
    [
        ([0, 1, 3], "hole", "1 of 4 numbers of 'experts.*.down.weight' are not in the checkpoint: 2"),
        ([1, 2], "hole", "1 of 3 numbers of 'experts.*.down.weight' are not in the checkpoint: 0"),
        (
            [0, 20],
            "hole",
            "19 of 21 numbers of 'experts.*.down.weight' are not in the checkpoint: 1, 2, 3, 4, 5, 6, 7, 8, ...",
        ),
        (
            [0, 999_999_999],
            "hole",
            "999999998 of 1000000000 numbers of 'experts.*.down.weight' are not in the checkpoint: 1, 2, 3, 4, 5, 6, ",
        ),
        ([0, "01", 1], "duplicate", "number 1 is there 2 times: experts.01.down.weight, experts.1.down.weight"),
        (
            [0, "shared"],
            "rule",
            "experts.shared.down.weight matches 'experts.*.down.weight', but 'shared' is not a number",
        ),
        (
            [0, 10**12],
            "rule",
            "experts.1000000000000.down.weight matches 'experts.*.down.weight', but '1000000000000' is",
        ),
    ],
)
def test_lists_with_faults_are_refused(numbers: list[object], kind: str, message: str) -> None:
    routing = routed([f"experts.{number}.down.weight" for number in numbers], *EXPERTS)
    assert (routing.conversions, len(routing.broken)) == ((), 1)
    assert [problem.kind for problem in routing.problems] == [kind]
    assert routing.problems[0].message.startswith(f"experts.down: {message}")
    assert routing.problems[0].rule == str(EXPERTS[1])
    assert len(routing.problems[0].names) <= 1000


def test_a_list_that_is_shorter_than_its_partner_has_a_hole() -> None:
    names = [f"experts.{i}.{part}.weight" for i in range(3) for part in ("gate", "up") if (i, part) != (2, "up")]
    (problem,) = routed(names, *EXPERTS).problems
    assert (problem.kind, problem.names) == ("hole", ("experts.2.up.weight",))
    (missing,) = routed([name for name in names if "gate" in name], *EXPERTS).problems
    assert missing.kind == "missing"
    assert missing.message == "experts.gate_up: no tensor matches 'experts.*.up.weight'"


def test_two_tensors_for_one_place_are_refused() -> None:
    rule = WeightConverter([r"(?:q|query)\.weight", "k.weight"], "qk.weight", [Concatenate(0)])
    (problem,) = routed(["m.q.weight", "m.query.weight", "m.k.weight"], rule).problems
    assert problem.kind == "duplicate"
    assert problem.names == ("m.q.weight", "m.query.weight")


# B21: forms of experts in one checkpoint.

DECLARED = {
    f"l.{layer}.experts.{name}": kind
    for layer in range(2)
    for name, kind in (("gate_up", "F32[2,8,3]"), ("down", "F32[2,3,4]"))
}


def per_expert(layer: int, *parts: str) -> dict[str, str]:
    shapes = {"gate": "F32[4,3]", "up": "F32[4,3]", "down": "F32[3,4]"}
    return {f"l.{layer}.experts.{i}.{part}.weight": shapes[part] for part in parts for i in range(2)}


def packed(layer: int, *parts: str) -> dict[str, str]:
    return {f"l.{layer}.experts.{part}": DECLARED[f"l.{layer}.experts.{part}"] for part in parts}


FORMS = {
    "per expert": per_expert(0, "gate", "up", "down") | per_expert(1, "gate", "up", "down"),
    "packed": packed(0, "gate_up", "down") | packed(1, "gate_up", "down"),
    "gate and up per expert, down packed": per_expert(0, "gate", "up")
    | packed(0, "down")
    | per_expert(1, "gate", "up")
    | packed(1, "down"),
    "layer 0 packed, layer 1 per expert": packed(0, "gate_up", "down") | per_expert(1, "gate", "up", "down"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("declared", [DECLARED, None])
def test_each_form_of_experts_loads(form: str, declared: dict[str, str] | None) -> None:
    assert loads(FORMS[form], EXPERTS, declared) == sorted(DECLARED)
    found = made(FORMS[form], EXPERTS, declared)
    numbers = {name: float(number) for number, name in enumerate(FORMS[form])}
    for layer in range(2):
        sources = [f"l.{layer}.experts.{i}.down.weight" for i in range(2)]
        whole = f"l.{layer}.experts.down"
        wanted = [numbers[whole]] * 2 if whole in numbers else [numbers[name] for name in sources]
        assert fills(found[whole]) == wanted


@pytest.mark.parametrize("declared", [DECLARED, None])
def test_both_forms_of_one_layer_are_refused(declared: dict[str, str] | None) -> None:
    stored = FORMS["per expert"] | packed(1, "down")
    (problem,) = problems_of(stored, EXPERTS, declared)
    assert problem.kind == "duplicate"
    assert problem.message.startswith("l.1.experts.down would be written 2 times: ")
    assert set(problem.names) == {"l.1.experts.down", *per_expert(1, "down")}


def test_gate_and_up_are_each_in_its_half_of_every_expert() -> None:
    found = made(per_expert(0, "gate", "up"), EXPERTS)["l.0.experts.gate_up"]
    assert [[float(half[0, 0]) for half in expert.split(4)] for expert in found] == [[0, 2], [1, 3]]


# B24, B48: ops that look at the model.


@pytest.mark.parametrize(("shape", "declared"), [("2,3,5", "2,5,3"), ("2,5,3", "2,5,3")])
def test_a_transposition_if_needed_is_decided_by_the_declared_shape(shape: str, declared: str) -> None:
    rule = WeightConverter("experts.w", "experts.w", [Transpose(1, 2, check_dims=True)])
    found = made({"m.experts.w": f"F32[{shape}]"}, [rule], {"m.experts.w": f"F32[{declared}]"})
    assert list(found["m.experts.w"].shape) == [int(size) for size in declared.split(",")]


def test_a_transposition_if_needed_of_a_square_is_refused() -> None:
    rule = WeightConverter("experts.w", "experts.w", [Transpose(1, 2, check_dims=True)])
    (problem,) = problems_of({"m.experts.w": "F32[2,3,3]"}, [rule], {"m.experts.w": "F32[2,3,3]"})
    assert problem.kind == "shape"
    assert problem.message.startswith("m.experts.w: Transpose(dim0=1, dim1=2, check_dims=True) of F32[2,3,3]: both")
    assert problem.names == ("m.experts.w",)


@pytest.mark.parametrize(("op", "rows", "count"), [(Chunk(0), 8, 3), (Chunk(0), 6, 4), (Chunk(0, 3), 8, 3)])
def test_a_chunk_of_no_multiple_is_refused(op: Op, rows: int, count: int) -> None:
    rule = WeightConverter("qkv.weight", [f"p{i}.weight" for i in range(count)], [op])
    (problem,) = problems_of({"m.qkv.weight": f"F32[{rows},2]"}, [rule])
    assert problem.kind == "shape"
    assert problem.message.endswith(f"{rows} is not a multiple of {count}; use Split for unequal parts")


@pytest.mark.parametrize("sizes", [(4, 2, 2), (6, 1, 1), (2, 4), (1, 2, 3, 4)])
def test_unequal_parts_are_split_as_the_model_declares(sizes: tuple[int, ...]) -> None:
    names = [f"p{i}.weight" for i in range(len(sizes))]
    rule = WeightConverter("qkv.weight", names, [Split(0)])
    declared = {f"m.{name}": f"F32[{size},2]" for name, size in zip(names, sizes, strict=True)}
    found = made({"m.qkv.weight": f"F32[{sum(sizes)},2]"}, [rule], declared)
    assert {name: f"F32[{','.join(map(str, value.shape))}]" for name, value in found.items()} == declared


def test_rotary_rows_are_permuted_by_the_heads_of_each_target() -> None:
    """Fused q, k, v with 4 and 2 heads of size 4: only q and k are permuted, k by its own heads."""
    sources = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    ops: list[Op] = [Split(0, (16, 8, 8)), PermuteForRope(permute_layer_names=("q_proj", "k_proj"))]
    rule = WeightConverter("qkv.weight", sources, ops)
    entries = checkpoint({"m.qkv.weight": "F32[32,1]"}).entries
    config = Config((("hidden_size", 16), ("num_attention_heads", 4)))
    routing = route_names(tuple(entries), [rule], None)
    products, _, problems = build_graph(routing, entries, {}, config)
    assert problems == []
    rows = torch.arange(32, dtype=torch.float32).reshape(32, 1)
    found = {p.target: evaluate(p.value, {"m.qkv.weight": rows}).flatten().tolist() for p in products}
    head = [0, 2, 1, 3]
    assert found["m.q_proj.weight"] == [4 * at + row for at in range(4) for row in head]
    assert found["m.k_proj.weight"] == [16 + 4 * at + row for at in range(2) for row in head]
    assert found["m.v_proj.weight"] == [*range(24, 32)]


# How groups pass through the operations.


def test_a_packed_tensor_becomes_a_list() -> None:
    rule = WeightConverter("experts.down", "experts.*.down.weight", [SplitModulelist(0)])
    found = made({"l.3.experts.down": "F32[3,2,4]"}, [rule])
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        f"l.3.experts.{i}.down.weight": (2, 4) for i in range(3)
    }


@pytest.mark.parametrize(
    ("rule", "stored", "message"),
    [
        (
            WeightConverter("a.w", "b.w", [MergeModulelist(0)]),
            {"a.w": "F32[2]"},
            "b.w: MergeModulelist(dim=0) takes a list, and 'a.w' has no `*` that makes one",
        ),
        (
            WeightConverter("a.*.w", "b.w", [Transpose()]),
            {"a.0.w": "F32[2,3]"},
            "b.w: the operations leave a list for 'b.w', which takes one tensor",
        ),
        (
            WeightConverter("a.w", "b.*.w", [Transpose()]),
            {"a.w": "F32[2,3]"},
            "b.*.w: the operations leave one tensor for 'b.*.w', which takes a list, for its `*`",
        ),
        (
            WeightConverter("a.*.w", ["b.w", "c.w"], [Chunk(0), MergeModulelist(0)]),
            {"a.0.w": "F32[2,3]"},
            "b.w, c.w: Chunk(dim=0, parts=None) splits each tensor of the list 'a.*.w'; merge the list first",
        ),
        (
            WeightConverter(["a.w", "b.w"], "c.w", [Permute((1, 0))]),
            {"a.w": "F32[2,3]", "b.w": "F32[2,3]"},
            "c.w: the operations leave 2 tensors for 1 targets",
        ),
    ],
)
def test_operations_that_do_not_fit_the_groups_are_refused(
    rule: WeightConverter, stored: dict[str, str], message: str
) -> None:
    (problem,) = problems_of(stored, [rule])
    assert (problem.kind, problem.message) == ("shape", message)
    assert problem.names == tuple(stored)


@pytest.mark.parametrize("order", list(permutations(["a.w", "b.w", "c.w"])))
def test_sources_are_joined_in_the_order_of_the_rule(order: tuple[str, ...]) -> None:
    rule = WeightConverter(order, "abc.w", [Concatenate(0)])
    found = made({"m.a.w": "F32[1,2]", "m.b.w": "F32[1,2]", "m.c.w": "F32[1,2]"}, [rule])
    assert fills(found["m.abc.w"]) == ["abc".index(name[0]) for name in order]


# Random names.

_WORDS = st.sampled_from(
    ["experts", "0", "1", "10", "01", "down", "gate", "up", "weight", "bias", "model", "x", "", "*"]
)
_RANDOM_NAMES = st.lists(st.lists(_WORDS, min_size=1, max_size=5).map(".".join), unique=True, max_size=12)


@settings(max_examples=600, deadline=None)
@given(
    _RANDOM_NAMES,
    st.none() | _RANDOM_NAMES,
    st.lists(
        st.sampled_from(
            [
                *EXPERTS,
                WeightRenaming("gate", "up"),
                WeightRenaming("experts.*", "e.*"),
                PrefixChange("model"),
                Scoped(WeightRenaming("gate", "up"), "x", "model"),
                Scoped(EXPERTS[1], "x", "model"),
                PrefixChange(prefix_to_remove="model"),
                GroupWeightRename(["up", "gate"], ["gate", "down"]),
                WeightConverter(["experts.*.gate", "x"], "y", [Concatenate(0)]),
            ]
        ),
        max_size=4,
    ),
    st.sampled_from(("", "model")),
)
def test_every_source_is_accounted_for_exactly_once(
    names: list[str], known: list[str] | None, rules: list[Rule], prefix: str
) -> None:
    routing = routed(names, *rules, known=known, prefix=prefix)
    claimed = [name for conversion in (*routing.conversions, *routing.broken) for name in conversion.sources()]
    assert sorted([*claimed, *(source for source, _ in routing.plain)]) == sorted(names)
    assert bool(routing.problems) is bool(routing.broken)
    again = routed(names[::-1], *rules, known=known, prefix=prefix)
    assert targets_of(again) == targets_of(routing)
    assert {c.targets: c.groups for c in again.conversions} == {c.targets: c.groups for c in routing.conversions}
    for source, _ in routing.kept:
        assert known is not None
        assert targets_of(routing)[source].replace("*", "0") in known
