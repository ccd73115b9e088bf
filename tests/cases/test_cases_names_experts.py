"""Cases about names, lists of experts and their cuts: loaded values against tensors that are made here and written out.

B-numbers are those of the cases, other numbers are rows of transformers_spec 9.1.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loadplan.compiler import CompileError, Signature, Target, compile_plan
from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist, Transpose
from loadplan.recipes import Recipe, Shard, WeightConverter, WeightRenaming
from loadplan.runtime import load_state_dict

SPELLINGS = {
    "dotted": ("blk.{}.w1.weight", "blk.*.w1.weight"),
    "glued": ("blk.w1_{}", "blk.w1_*"),
    "inside": ("blk{}_w1", "blk*_w1"),
    "padded": ("blk.{:02d}.w1.weight", "blk.*.w1.weight"),
}


def save_in_files(folder: Path, tensors: dict[str, torch.Tensor], count: int, seed: int) -> Path:
    """The tensors in `count` files, in an order and a division that `seed` draws."""
    folder.mkdir()
    rng = random.Random(seed)
    names = rng.sample(sorted(tensors), len(tensors))
    for number in range(count):
        part = {name: tensors[name] for name in names[number::count]}
        save_file(part, folder / f"model-{number + 1:05d}-of-{count:05d}.safetensors")
    return folder


def kinds_of(folder: Path, recipe: Recipe | None, signature: object) -> set[str]:
    with pytest.raises(CompileError) as caught:
        compile_plan(folder, recipe, signature)  # type: ignore[arg-type]
    return {problem.kind for problem in caught.value.problems}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("experts", "files", "seed"), [(12, 1, 0), (12, 3, 1), (101, 4, 2)])
def test_b17_experts_lie_in_the_order_of_their_numbers(
    spelling: str, experts: int, files: int, seed: int, tmp_path: Path
) -> None:
    stored, pattern = SPELLINGS[spelling]
    tensors = {stored.format(i): torch.full((2, 3), float(i)) for i in range(experts)}
    folder = save_in_files(tmp_path / "m", tensors, files, seed)
    recipe = Recipe([WeightConverter(pattern, "packed", [MergeModulelist(0)])])
    loaded = load_state_dict(compile_plan(folder, recipe), folder)
    assert torch.equal(loaded["packed"], torch.arange(float(experts)).view(-1, 1, 1).expand(experts, 2, 3))


@pytest.mark.parametrize(("experts", "ranks"), [(4, 2), (6, 3), (5, 2), (3, 4)])
def test_b22_ranks_hold_disjoint_experts_that_make_the_whole(experts: int, ranks: int, tmp_path: Path) -> None:
    """Weights, biases and scales are cut alike, also where the number does not divide."""
    whole = {
        "mix.w": torch.arange(experts * 6.0).view(experts, 2, 3),
        "mix.b": torch.arange(experts * 2.0).view(experts, 2),
        "mix.s": torch.arange(float(experts)),
    }
    save_file(whole, tmp_path / "model.safetensors")
    plan = {
        "mix.w": Shard(-3, uneven=True),
        "mix.b": Shard(-2, uneven=True),
        "mix.s": Shard(-1, one_dim=True, uneven=True),
    }
    compiled = compile_plan(tmp_path, target=Target(tp_size=ranks, tp_plan=plan))
    parts = [load_state_dict(compiled, tmp_path, rank) for rank in range(ranks)]
    step = -(-experts // ranks)
    for rank, part in enumerate(parts):
        for name, tensor in whole.items():
            assert torch.equal(part[name], tensor[rank * step : (rank + 1) * step]), (rank, name)
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


@pytest.mark.parametrize("option", ["ep_size", "pp_size"])
def test_b22_what_is_not_done_is_refused_by_name(option: str) -> None:
    with pytest.raises(CompileError, match=f"{option}=3: this version compiles for tensor parallelism only"):
        Target(**{option: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(("fits", "count"), [(0, 10), (1, 10), (0, 3), (2, 40)])
def test_b15_a_load_of_almost_nothing_is_refused(fits: int, count: int, tmp_path: Path) -> None:
    names = [f"block.{number}.proj.weight" for number in range(count)]
    common = {f"step{number}": torch.zeros(()) for number in range(fits)}
    save_file({**{f"old.{name}": torch.ones(2) for name in names}, **common}, tmp_path / "model.safetensors")
    wanted = {f"new.body.{name}": ((2,), "F32") for name in names} | dict.fromkeys(common, ((), "F32"))
    with pytest.raises(CompileError) as caught:
        compile_plan(tmp_path, signature=wanted)
    text = str(caught.value)
    assert f"{count} names are unexpected and {count} are missing" in text
    assert f"WeightRenaming('^old.', 'new.body.') would make {count} of them fit" in text


@pytest.mark.parametrize("front", ["a.0.b", "deep.tower"])
def test_8_a_star_is_one_component(front: str, tmp_path: Path) -> None:
    """Two nested lists are not one."""
    tensors = {f"{front}.{i}.inner.{j}.w": torch.full((2,), 10.0 * i + j) for i in range(2) for j in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    recipe = Recipe([WeightConverter("inner.*.w", "inner.w", [MergeModulelist(0)])])
    loaded = load_state_dict(compile_plan(tmp_path, recipe), tmp_path)
    assert {name: tensor[:, 0].tolist() for name, tensor in loaded.items()} == {
        f"{front}.{i}.inner.w": [10.0 * i + j for j in range(3)] for i in range(2)
    }
    crossing = Recipe([WeightConverter(f"{front}.*.w", "all", [MergeModulelist(0)])])
    assert compile_plan(tmp_path, crossing).report.rules[0][1] == 0


@pytest.mark.parametrize("held", [3, 5])
def test_2_a_list_of_another_length_than_the_parameter_is_refused(held: int, tmp_path: Path) -> None:
    save_file({f"e.{i}.w": torch.ones(2) for i in range(held)}, tmp_path / "model.safetensors")
    recipe = Recipe([WeightConverter("e.*.w", "e.w", [MergeModulelist(0)])])
    assert kinds_of(tmp_path, recipe, {"e.w": ((4, 2), "F32")}) == {"shape"}


@pytest.mark.parametrize("packed_too", [True, False])
def test_1_and_4_two_forms_of_one_tensor_are_refused(packed_too: bool, tmp_path: Path) -> None:
    parts = {"x.gate": torch.ones(3, 2), "x.up": torch.ones(3, 2)}
    more = {"x.gate_up": torch.ones(6, 2)} if packed_too else {"x.old_gate": torch.zeros(3, 2)}
    save_file(parts | more, tmp_path / "model.safetensors")
    recipe = Recipe(
        [WeightRenaming("old_gate", "gate"), WeightConverter(["x.gate", "x.up"], "x.gate_up", [Concatenate(0)])]
    )
    for signature in ({"x.gate_up": ((6, 2), "F32")}, "recipe"):
        assert kinds_of(tmp_path, recipe, signature) == {"duplicate"}


@pytest.mark.parametrize("rows", [(4, 2, 2), (6, 3, 3)])
def test_5_a_chunk_into_unequal_targets_is_refused(rows: tuple[int, ...], tmp_path: Path) -> None:
    save_file({"qkv": torch.ones(sum(rows), 2)}, tmp_path / "model.safetensors")
    wanted = {name: ((size, 2), "F32") for name, size in zip("qkv", rows, strict=True)}
    recipe = Recipe([WeightConverter("qkv", list(wanted), [Chunk(0)])])
    assert kinds_of(tmp_path, recipe, wanted) == {"shape"}


@pytest.mark.parametrize("turned_first", [True, False])
def test_11_of_two_converters_with_one_pattern_the_first_counts(turned_first: bool, tmp_path: Path) -> None:
    """By their order in the recipe, and the report says that the other did nothing."""
    one, two = torch.arange(6.0).view(2, 3), torch.arange(6.0, 12.0).view(2, 3)
    save_file({"e.0.w": one, "e.1.w": two}, tmp_path / "model.safetensors")
    plain = WeightConverter("e.*.w", "e.w", [MergeModulelist(0)])
    turned = WeightConverter("e.*.w", "e.w", [MergeModulelist(0), Transpose(1, 2)])
    rules = [turned, plain] if turned_first else [plain, turned]
    plan = compile_plan(tmp_path, Recipe(rules))
    wanted = torch.stack([one, two])
    assert torch.equal(load_state_dict(plan, tmp_path)["e.w"], wanted.mT if turned_first else wanted)
    assert [uses for _, uses in plan.report.rules] == [2, 0]


def test_14_layer_1_is_not_layer_10(tmp_path: Path) -> None:
    """Entries of all plans and waivers end at a component."""
    names = [f"layers.{number}.w" for number in (1, 10, 11)]
    save_file({name: torch.ones(4, 2) for name in names}, tmp_path / "model.safetensors")
    target = Target(tp_size=2, tp_plan={"layers.1": "colwise"}, dtype_plan={"layers.1": "F64"})
    plan = compile_plan(tmp_path, target=target)
    assert {t.name: (str(t.type.dtype), t.shard_dim) for t in plan.head.tensors} == {
        "layers.1.w": ("F64", 0),
        "layers.10.w": ("F32", -1),
        "layers.11.w": ("F32", -1),
    }
    signature = Signature.of({"layers.10.w": ((4, 2), "F32"), "layers.11.w": ((4, 2), "F32")})
    assert compile_plan(tmp_path, Recipe(may_be_unused=("layers.1",)), signature).report.unused == ("layers.1.w",)
