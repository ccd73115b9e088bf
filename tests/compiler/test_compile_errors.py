"""What the compiler refuses and what it waives: every fault by kind and names, cases B15, B21, B26, B32, B33 and B46.

Expected problems are written out by hand for checkpoints of a few tensors; where a case loads, the values are compared
with what torch makes of the same tensors.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import Raw, filled, raw, sparse_twin, write_file, write_shards
from safetensors.torch import save_file
from torch import nn

from loadplan.compiler import CompileError, Problem, Signature, Target, compile_plan, read_checkpoint
from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist
from loadplan.compiler.rules import Rule
from loadplan.recipes import PrefixChange, Recipe, WeightConverter, WeightRenaming
from loadplan.runtime import ModuleMismatch, load_into, load_state_dict

Shapes = Mapping[str, object]


def problems_of(
    checkpoint: object, recipe: Recipe | None = None, signature: object = None, target: Target | None = None
) -> tuple[Problem, ...]:
    """What the compiler refuses."""
    with pytest.raises(CompileError) as caught:
        compile_plan(checkpoint, recipe, signature, target)  # type: ignore[arg-type]
    for problem in caught.value.problems[:50]:
        assert str(problem) in str(caught.value)
    return caught.value.problems


def kinds_and_names(problems: Iterable[Problem]) -> set[tuple[str, tuple[str, ...]]]:
    return {(problem.kind, problem.names) for problem in problems}


GATE_UP = WeightConverter(
    ["experts.*.w1.weight", "experts.*.w3.weight"], "experts.gate_up_proj", [MergeModulelist(0), Concatenate(1)]
)
DOWN = WeightConverter("experts.*.w2.weight", "experts.down_proj", [MergeModulelist(0)])
QKV = WeightConverter("qkv.weight", ["q.weight", "k.weight", "v.weight"], [Chunk(0)])
OLD_NORM = WeightRenaming("old_norm", "norm")


# One checkpoint with every fault, and what must be said about each.
FAULTY: Mapping[str, Raw] = {
    **{f"l.0.experts.{expert}.{part}.weight": raw("F32", 2, 3) for expert in (0, 1, 3) for part in ("w1", "w3")},
    **{f"l.0.experts.{expert}.w2.weight": raw("F32", 3, 2) for expert in (0, 1, 2, 4)},
    "l.0.norm.weight": raw("F32", 3),
    "l.0.old_norm.weight": raw("F32", 3),
    "l.0.surplus.weight": raw("F32", 3),
    "l.0.wide.weight": raw("F32", 3, 4),
    "l.0.count": raw("I64", 2),
    "l.1.attn.qkv.weight": raw("F32", 8, 2),
    "fine.weight": raw("F32", 2),
}
WANTED: Shapes = {
    "l.0.experts.gate_up_proj": ((4, 4, 3), "F32"),
    "l.0.experts.down_proj": ((5, 3, 2), "F32"),
    "l.0.norm.weight": ((3,), "F32"),
    "l.0.wide.weight": ((4, 3), "F32"),
    "l.0.count": ((2,), "BF16"),
    "l.1.attn.q.weight": ((4, 2), "F32"),
    "l.1.attn.k.weight": ((2, 2), "F32"),
    "l.1.attn.v.weight": ((2, 2), "F32"),
    "l.1.absent.weight": ((2,), "F32"),
    "fine.weight": ((2,), "F32"),
}
FAULTY_RECIPE = Recipe(
    rules=(OLD_NORM, GATE_UP, DOWN, QKV), tp_plan={"l.*.nrom": "replicated"}, dtype_plan={"wide_": "F32"}
)
FAULTS: Sequence[tuple[str, set[str], object, str]] = (  # kind, some of the names, rule, some of the message
    ("hole", {"experts.2.w1.weight"}, GATE_UP, "1 of 4 numbers of 'experts.*.w1.weight' are not in the checkpoint: 2"),
    ("hole", {"experts.2.w3.weight"}, GATE_UP, "1 of 4 numbers of 'experts.*.w3.weight'"),
    ("hole", {"experts.3.w2.weight"}, DOWN, "l.0.experts.down_proj: 1 of 5 numbers"),
    ("duplicate", {"l.0.norm.weight", "l.0.old_norm.weight"}, None, "l.0.norm.weight would be written 2 times"),
    ("unexpected", {"l.0.surplus.weight"}, None, "the model has no l.0.surplus.weight"),
    ("missing", {"l.1.absent.weight"}, None, "no source tensor becomes l.1.absent.weight"),
    ("shape", {"l.0.wide.weight"}, None, "F32[3,4]"),
    ("dtype", {"l.0.count"}, None, "cast of I64[2] to BF16"),
    ("shape", {"l.1.attn.qkv.weight"}, QKV, "8 is not a multiple of 3"),
    ("unbound", {"l.*.nrom"}, None, "tp_plan entry 'l.*.nrom'"),
    ("unbound", {"wide_"}, None, "dtype_plan entry 'wide_' (F32) matches no tensor; near are l.0.wide"),
)


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", FAULTY)

    problems = problems_of(tmp_path, FAULTY_RECIPE, WANTED, Target(tp_size=2))

    for kind, names, rule, text in FAULTS:
        found = [
            problem
            for problem in problems
            if problem.kind == kind and names <= set(problem.names) and text in problem.message
        ]
        assert len(found) == 1, (kind, names, problems)
        assert found[0].rule == (None if rule is None else str(rule))
    assert len(problems) == len(FAULTS), problems
    assert all("fine.weight" not in problem.names for problem in problems)


def test_faults_are_found_before_data_is_read(tmp_path: Path) -> None:
    layers = {f"layers.{layer}.mlp.up_proj.weight": "a.safetensors" for layer in range(4)}
    config = {
        "torch_dtype": "float32",
        "hidden_size": 8192,
        "intermediate_size": 1 << 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 100,
    }
    folder = sparse_twin({"weight_map": layers}, config, tmp_path)
    assert (folder / "a.safetensors").stat().st_size > 1 << 40  # a hole of two TiB, which nobody reads by accident
    before = _read_nbytes()
    problems = problems_of(folder, signature={"layers.0.mlp.up_proj.weight": ((1, 1), "F32")})
    read = _read_nbytes() - before
    assert {problem.kind for problem in problems} == {"shape", "unexpected"}
    assert read < 64 << 10


def _read_nbytes() -> int:
    """Bytes that this process has read so far, as Linux counts them."""
    return int(Path("/proc/self/io").read_text().partition("\n")[0].removeprefix("rchar:"))


@pytest.mark.parametrize("seed", range(6))
def test_problems_do_not_depend_on_the_order_of_entries_and_files(tmp_path: Path, seed: int) -> None:
    names = list(FAULTY)
    write_file(tmp_path / "one" / "model.safetensors", FAULTY)
    wanted = problems_of(tmp_path / "one", FAULTY_RECIPE, WANTED, Target(tp_size=2))
    rng = random.Random(seed)
    rng.shuffle(names)
    shards: dict[str, dict[str, Raw]] = {f"model-{n}.safetensors": {} for n in range(1, 4)}
    for name in names:
        shards[rng.choice(sorted(shards))][name] = FAULTY[name]
    folder = tmp_path / "three"
    folder.mkdir()
    write_shards(folder, dict(reversed(shards.items())))

    assert problems_of(folder, FAULTY_RECIPE, WANTED, Target(tp_size=2)) == wanted

    checkpoint = read_checkpoint(folder)
    shuffled = replace(checkpoint, entries={name: checkpoint.entries[name] for name in names})
    assert problems_of(shuffled, FAULTY_RECIPE, WANTED, Target(tp_size=2)) == wanted


def test_two_sources_of_one_renamed_target(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"a.w": raw("F32", 2), "b.w": raw("F32", 2), "c.w": raw("F32", 2)})
    (problem,) = problems_of(tmp_path, Recipe(rules=(WeightRenaming("^[ab]", "c"),)), {"c.w": ((2,), "F32")})
    assert problem.kind == "duplicate"
    assert set(problem.names) == {"a.w", "b.w", "c.w"}
    assert "3 times" in problem.message


# B15: nothing fits, for one prefix.


@pytest.mark.parametrize(
    ("stored", "wanted", "rule"),
    [
        ("wrong.", "right.", WeightRenaming("^wrong.", "right.")),
        ("outer.inner.", "right.", WeightRenaming("^outer.inner.", "right.")),
        ("", "right.", PrefixChange(prefix_to_add="right")),
        ("wrong.", "", PrefixChange(prefix_to_remove="wrong")),
        ("model.", "model.language_model.", WeightRenaming("^model.", "model.language_model.")),
    ],
)
def test_a_wrong_root_is_explained(tmp_path: Path, stored: str, wanted: str, rule: Rule) -> None:
    names = [f"layer.{number}.weight" for number in range(10)]
    write_file(tmp_path / "model.safetensors", {stored + name: raw("F32", 2) for name in names})
    signature = {wanted + name: ((2,), "F32") for name in names}

    problems = problems_of(tmp_path, signature=signature)

    assert kinds_and_names(problem for problem in problems if problem.names) == {
        *(("missing", (wanted + name,)) for name in names),
        *(("unexpected", (stored + name,)) for name in names),
    }
    (hint,) = [problem.message for problem in problems if not problem.names]
    assert "10 names are unexpected and 10 are missing" in hint
    shown = re.search(r"the rule (\w+\(.*\)) would make 10 of them fit", hint)
    assert shown
    words = {"WeightRenaming": WeightRenaming, "PrefixChange": PrefixChange}
    assert eval(shown[1], words) == rule  # it can be pasted into a recipe, and then
    assert len(compile_plan(tmp_path, Recipe(rules=(rule,)), signature).head.tensors) == 10


def test_a_wrong_root_with_one_buffer_that_fits(tmp_path: Path) -> None:
    names = [f"layer.{number}.weight" for number in range(9)]
    tensors = {f"model.{name}": raw("F32", 2) for name in names} | {"steps": raw("I64")}
    write_file(tmp_path / "model.safetensors", tensors)
    wanted: Shapes = {**dict.fromkeys(names, ((2,), "F32")), "steps": ((), "I64")}

    problems = problems_of(tmp_path, signature=wanted)

    assert kinds_and_names(problems) >= {("missing", (name,)) for name in names}
    hint = problems[-1].message
    assert "9 names are unexpected and 9 are missing" in hint
    assert "the rule PrefixChange(prefix_to_remove='model') would make 9 of them fit" in hint


# B21: packed and per-expert forms.

EXPERTS = Recipe(rules=(GATE_UP, DOWN))


def moe_layer(layer: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One layer with two experts: per expert, and packed."""
    generator = torch.Generator().manual_seed(layer)
    front = f"l.{layer}.experts"
    parts = {
        f"{front}.{expert}.{part}.weight": torch.randn(2, 3) if part != "w2" else torch.randn(3, 2)
        for expert in range(2)
        for part in ("w1", "w2", "w3")
    }
    parts = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in parts.items()}
    packed = {
        f"{front}.gate_up_proj": torch.stack(
            [
                torch.cat([parts[f"{front}.{expert}.w1.weight"], parts[f"{front}.{expert}.w3.weight"]])
                for expert in range(2)
            ]
        ),
        f"{front}.down_proj": torch.stack([parts[f"{front}.{expert}.w2.weight"] for expert in range(2)]),
    }
    return parts, packed


@pytest.mark.parametrize("form", ["per-expert", "packed", "mixed", "by-layer"])
@pytest.mark.parametrize("signed", [True, False], ids=["signature", "recipe"])
def test_each_form_of_experts_loads(tmp_path: Path, form: str, signed: bool) -> None:
    parts, packed = zip(*(moe_layer(layer) for layer in range(2)), strict=True)
    wanted = {**packed[0], **packed[1]}
    mixed = [
        {name: t for name, t in parts[layer].items() if ".w2." not in name}
        | {name: t for name, t in packed[layer].items() if name.endswith("down_proj")}
        for layer in range(2)
    ]
    stored = {
        "per-expert": {**parts[0], **parts[1]},
        "packed": wanted,
        "mixed": {**mixed[0], **mixed[1]},
        "by-layer": {**packed[0], **parts[1]},
    }[form]
    save_file(stored, tmp_path / "model.safetensors")
    signature = Signature.of(wanted) if signed else None

    loaded = load_state_dict(compile_plan(tmp_path, EXPERTS, signature), tmp_path)

    assert sorted(loaded) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor), name


def test_packed_and_per_expert_forms_of_one_layer_are_refused(tmp_path: Path) -> None:
    parts, packed = moe_layer(0)
    save_file(parts | packed, tmp_path / "model.safetensors")
    for signature in (Signature.of(packed), None):
        problems = problems_of(tmp_path, EXPERTS, signature)
        assert [problem.kind for problem in problems] == ["duplicate", "duplicate"]
        for problem, rule, target in zip(problems, (DOWN, GATE_UP), ("down_proj", "gate_up_proj"), strict=True):
            assert problem.rule == str(rule)
            assert problem.names[0] == f"l.0.experts.{target}"
            assert set(problem.names[1:]) >= {f"l.0.experts.{target}"} | {
                name for name in parts if ("w2" in name) == (target == "down_proj")
            }


# B26: what the config says is tied, and what the checkpoint has.

EMB, HEAD = "emb.weight", "head.weight"
TIED = Signature.of({EMB: ((3, 2), "F32"), HEAD: ((3, 2), "F32")}, ties=[(EMB, HEAD)])


@pytest.mark.parametrize(
    ("stored", "tied"),
    [
        pytest.param({EMB: 1.0}, True, id="a-only-embedding"),
        pytest.param({HEAD: 1.0}, True, id="b-only-head"),
        pytest.param({EMB: 1.0, HEAD: 1.0}, True, id="c-both-equal"),
        pytest.param({EMB: 1.0, HEAD: 2.0}, False, id="d-both-different"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ties_follow_the_values(tmp_path: Path, stored: Mapping[str, float], tied: bool, ranks: int) -> None:
    write_file(tmp_path / "model.safetensors", {name: filled(value, 3, 2) for name, value in stored.items()})
    plan = compile_plan(tmp_path, signature=TIED, target=Target(tp_size=ranks, tp_plan={"emb": "embedding_rowwise"}))
    for rank in range(ranks):
        loaded = load_state_dict(plan, tmp_path, rank)
        assert (loaded[EMB] is loaded[HEAD]) == tied
        for name in (EMB, HEAD):
            value = stored[name] if name in stored else max(stored.values())
            assert torch.equal(loaded[name], torch.full((3 // ranks, 2), value))
    assert plan.head.equal_ties == (((EMB, HEAD),) if len(stored) == 2 else ())  # recorded


class Tied(nn.Module):
    """An embedding and a head that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.emb.weight


def test_different_tensors_do_not_overwrite_each_other_in_a_tied_module(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {EMB: filled(1.0, 3, 2), HEAD: filled(2.0, 3, 2)})
    plan = compile_plan(tmp_path, signature=TIED)
    module = Tied()
    before = module.emb.weight.detach().clone()
    try:
        load_into(module, plan, tmp_path)
    except ModuleMismatch:  # to refuse is right too, as long as nothing was changed
        assert torch.equal(module.emb.weight, before)
    else:
        assert torch.equal(module.emb.weight, torch.full((3, 2), 1.0))
        assert torch.equal(module.head.weight, torch.full((3, 2), 2.0))


def test_equal_values_are_not_equal_bits(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {EMB: filled(0.0, 3, 2), HEAD: filled(-0.0, 3, 2)})
    loaded = load_state_dict(compile_plan(tmp_path, signature=TIED), tmp_path)
    assert loaded[EMB] is not loaded[HEAD]
    assert torch.signbit(loaded[HEAD]).all() and not torch.signbit(loaded[EMB]).any()


def test_a_tie_without_any_source_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"other": raw("F32", 1)})
    signature = Signature.of({**dict(TIED.tensors), "other": ((1,), "F32")}, TIED.ties)
    (problem,) = problems_of(tmp_path, signature=signature)
    assert (problem.kind, problem.names) == ("missing", (EMB,))


def test_an_untied_head_that_is_absent_is_refused_unless_waived(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {EMB: filled(1.0, 3, 2)})
    untied = Signature(TIED.tensors)
    (problem,) = problems_of(tmp_path, signature=untied)
    assert (problem.kind, problem.names) == ("missing", (HEAD,))
    for plan in (
        compile_plan(tmp_path, Recipe(may_be_missing=("head",)), untied),
        compile_plan(tmp_path, signature=untied, target=Target(missing="ignore")),
    ):
        assert list(load_state_dict(plan, tmp_path)) == [EMB]
        assert plan.report.missing == (HEAD,)


def test_a_waived_name_still_counts_for_plans(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {EMB: filled(1.0, 4, 2)})
    recipe = Recipe(tp_plan={"head": "colwise"}, dtype_plan={"head": "F32"}, may_be_missing=("head",))
    plan = compile_plan(tmp_path, recipe, {EMB: ((4, 2), "F32"), HEAD: ((4, 2), "F32")}, Target(tp_size=2))
    assert plan.report.missing == (HEAD,)


# Waivers: what is left out is listed.


def test_waivers_are_in_the_report(tmp_path: Path) -> None:
    names = ["a.weight", "a.inv_freq", "b.inv_freq", "stray.weight"]
    write_file(tmp_path / "model.safetensors", {name: raw("F32", 2) for name in names})
    wanted = {"a.weight": ((2,), "F32"), "a.bias": ((2,), "F32"), "b.bias": ((2,), "F32")}
    recipe = Recipe(may_be_missing=("*.bias",), may_be_unused=("inv_freq",))

    (problem,) = problems_of(tmp_path, recipe, wanted)
    assert (problem.kind, problem.names) == ("unexpected", ("stray.weight",))

    report = compile_plan(tmp_path, recipe, wanted, Target(unexpected="ignore")).report
    assert report.unused == ("a.inv_freq", "b.inv_freq", "stray.weight")
    assert report.missing == ("a.bias", "b.bias")
    assert (report.sources, report.targets) == (4, 1)


def test_a_waiver_means_whole_components(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"a.inv_freq": raw("F32", 2), "b.my_inv_freq": raw("F32", 2)})
    problems = problems_of(tmp_path, Recipe(may_be_unused=("inv_freq",)), {"c": ((1,), "F32")})
    assert kinds_and_names(problems) == {("unexpected", ("b.my_inv_freq",)), ("missing", ("c",))}


# B32, B33, B46: dtype plans.


def test_a_dtype_plan_matches_whole_components(tmp_path: Path) -> None:
    names = ["wo.weight", "word_embedding.weight", "block.wo.weight", "two.weight"]
    write_file(tmp_path / "model.safetensors", {name: filled(1.5, 2) for name in names})
    for recipe, target in (
        (Recipe(dtype_plan={"wo": "float32"}), Target(dtype="bfloat16")),
        (None, Target(dtype="bfloat16", dtype_plan={"wo": "float32"})),
    ):
        loaded = load_state_dict(compile_plan(tmp_path, recipe, target=target), tmp_path)
        kept = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
        assert kept == {"wo.weight", "block.wo.weight"}
        assert all(torch.equal(tensor.float(), torch.full((2,), 1.5)) for tensor in loaded.values())


def test_the_targets_dtype_plan_comes_before_the_recipes(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"a.wo.weight": filled(1.5, 2), "b.wo.weight": filled(1.5, 2)})
    plan = compile_plan(
        tmp_path,
        Recipe(dtype_plan={"wo": "F64", "b.wo": "F32"}),  # in a mapping, the entry that says more counts
        target=Target(dtype="F16", dtype_plan={"a.wo": "BF16"}),
    )
    assert {tensor.name: str(tensor.type.dtype) for tensor in plan.head.tensors} == {
        "a.wo.weight": "BF16",
        "b.wo.weight": "F32",
    }


def test_integers_and_flags_keep_dtype_and_value(tmp_path: Path) -> None:
    stored = {
        "router.tid2eid": torch.tensor([1, 2**40 + 1, 3]),
        "router.weight": torch.ones(2, dtype=torch.float64),
        "flag": torch.tensor([True, False]),
        "ids": torch.tensor([2**53 + 1]),
        "lin.weight": torch.ones(2),
    }
    save_file(stored, tmp_path / "model.safetensors")
    signature = Signature.of(stored)
    for model in (signature, None):
        target = Target(dtype="bfloat16", dtype_plan={"router": "float32"})
        plan = compile_plan(tmp_path, signature=model, target=target)
        loaded = load_state_dict(plan, tmp_path)
        for name in ("router.tid2eid", "flag", "ids"):
            assert loaded[name].dtype == stored[name].dtype
            assert torch.equal(loaded[name], stored[name])
        assert (loaded["router.weight"].dtype, loaded["lin.weight"].dtype) == (torch.float32, torch.bfloat16)
        assert plan.report.casts == ("lin.weight: F32 -> BF16", "router.weight: F64 -> F32")


@pytest.mark.parametrize("stored", ["I64", "BOOL", "F8_E4M3", "F8_E8M0", "U8"])
def test_no_cast_by_value_of_what_is_no_plain_float(tmp_path: Path, stored: str) -> None:
    write_file(
        tmp_path / "model.safetensors", {"w": raw(stored, 2) if stored != "BOOL" else Raw("BOOL", (2,), b"\0\1")}
    )
    (problem,) = problems_of(tmp_path, signature={"w": ((2,), "BF16")})
    assert (problem.kind, problem.names) == ("dtype", ("w", "w"))


@pytest.mark.parametrize("of", ["recipe", "target"])
def test_a_dtype_plan_entry_that_matches_nothing_is_refused(tmp_path: Path, of: str) -> None:
    write_file(tmp_path / "model.safetensors", {"model.layers.0.mlp.weight": raw("F32", 2)})
    plan = {"layers.*.mpl": "float32"}
    recipe, target = (Recipe(dtype_plan=plan), None) if of == "recipe" else (None, Target(dtype_plan=plan))
    (problem,) = problems_of(tmp_path, recipe, target=target)
    assert (problem.kind, problem.names) == ("unbound", ("layers.*.mpl",))
    assert "near are model.layers.0.mlp" in problem.message


def test_a_fault_elsewhere_does_not_unbind_an_entry(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"a.weight": raw("F32", 2, 3)})
    recipe = Recipe(tp_plan={"a": "colwise"}, dtype_plan={"a": "F32"})
    (problem,) = problems_of(tmp_path, recipe, {"a.weight": ((3, 2), "F32")}, Target(tp_size=2))
    assert (problem.kind, problem.names) == ("shape", ("a.weight", "a.weight"))
