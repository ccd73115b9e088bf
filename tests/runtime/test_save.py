"""Saving what was loaded, against the files that it was loaded from: byte for byte, folder for folder.

Where values are changed before they are saved, or were cast, the files are read with the safetensors library and
compared with torch's own ops on the original tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import safetensors.torch
import torch
from builders import BITS, Raw, bytes_of, filled, raw, safetensors_bytes, write_file, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import check_restores, files_in, load_ranks, save_tensors
from strategies import factorings, unary
from torch import nn

from loadplan.compiler import pieces
from loadplan.compiler.conversion import convert
from loadplan.compiler.ir import Op, Stored, Value, apply
from loadplan.compiler.ops import (
    Cast,
    Chunk,
    Concatenate,
    Conv3dToLinear,
    FuseRuns,
    Interleave,
    LinearToConv3d,
    MergeMessageQueries,
    MergeModulelist,
    Permute,
    PermuteForRope,
    Reshape,
    Split,
    SplitModulelist,
    Transpose,
)
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import (
    GroupWeightRename,
    IndexFold,
    IndexShift,
    Rule,
    WeightConverter,
    WeightRenaming,
)
from loadplan.compiler.target import Target
from loadplan.runtime.dtype import DType
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.save import SaveError, save_checkpoint
from loadplan.runtime.tensor_type import TensorType

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def floats(dtype: str, *shape: int) -> Raw:
    """Finite values that every narrower float rounds, and no wider one changes."""
    values = (torch.arange(prod(shape), dtype=torch.float64) + 1) * -0.3
    values[::2] *= 1e-6  # where F16 has fewer digits than BF16
    return Raw(dtype, shape, bytes_of(values.to(FLOATS[dtype])))


def experts(count: int, *names: str) -> dict[str, Raw]:
    """Expert matrices [2, 3] in text order, so that 10 comes before 2."""
    found = [f"layers.{layer}.experts.{number}.{name}" for layer in (0, 1) for number in range(count) for name in names]
    return {name: raw("BF16", 2, 3, seed=seed) for seed, name in enumerate(sorted(found))}


@dataclass(frozen=True)
class Case:
    """A checkpoint of one file, and rules for it."""

    tensors: Mapping[str, Raw]
    rules: Sequence[Rule]


CASES = {
    "no rules": Case({f"a.{number}": raw("I16", number, 2) for number in range(12)}, []),
    "capture groups": Case(
        {f"enc.{i}.blk.{j}.w": raw("F32", 2, seed=i * 10 + j) for i in (3, 11) for j in (0, 7)},
        [WeightRenaming(r"enc\.(\d+)\.blk\.(\d+)\.", r"e\2.b\1.")],
    ),
    "groups of renames": Case(
        {f"layers.{i}.norm{j}.w": raw("F32", 3, seed=i * 2 + j) for i in range(2) for j in range(2)},
        [GroupWeightRename(["norm0", "norm1"], ["norm1", "norm2"])],
    ),
    "numbers": Case(
        {f"blocks.{i}.w": raw("U8", 3, seed=i) for i in range(12)},
        [IndexShift(r"blocks\.(\d+)", r"layers.\1", 3), IndexFold(r"layers\.(\d+)\.", [r"l.\1.attn.", r"l.\1.mlp."])],
    ),
    "experts": Case(
        experts(12, "w1.weight", "w2.weight", "w3.weight"),
        [
            WeightConverter(
                ["experts.*.w1.weight", "experts.*.w3.weight"],
                "experts.gate_up_proj",
                [MergeModulelist(0), Concatenate(1)],
            ),
            WeightConverter("experts.*.w2.weight", "experts.down_proj", [MergeModulelist(0), Transpose(1, 2)]),
        ],
    ),
    "experts of two runs": Case(
        experts(6, "gate", "up"),
        [WeightConverter(["experts.*.gate", "experts.*.up"], ["text", "vision"], [FuseRuns(runs=(4, 2))])],
    ),
    "experts taken apart": Case(
        {"layers.0.experts.w": raw("F16", 12, 2, 3)},
        [WeightConverter("experts.w", "experts.*.w", [SplitModulelist(0)])],
    ),
    "qkv": Case(
        {f"{i}.{name}": raw("F32", rows, 5, seed=i) for i in range(2) for name, rows in (("q", 4), ("k", 2), ("v", 2))},
        [WeightConverter(["q", "k", "v"], "qkv", [Concatenate(0)])],
    ),
    "columns side by side": Case(
        {"a": raw("F32", 3, 2), "b": raw("F32", 3, 5)}, [WeightConverter(["a", "b"], "ab", [Concatenate(1)])]
    ),
    "chunks": Case({"w": raw("F64", 6, 2)}, [WeightConverter("w", ["x", "y", "z"], [Chunk(0)])]),
    "unequal parts": Case({"w": raw("I8", 4, 7)}, [WeightConverter("w", ["x", "y"], [Split(1, (2, 5))])]),
    "transposed": Case({"w": raw("F32", 3, 5, 2)}, [WeightConverter("w", "w", [Transpose(0, 2)])]),
    "permuted": Case({"w": raw("I64", 3, 5, 2)}, [WeightConverter("w", "v", [Permute((2, 0, 1))])]),
    "rope": Case(
        {"q": raw("BF16", 16, 4), "k": raw("BF16", 8, 4), "b": raw("BF16", 8)},
        [WeightConverter(name, name, [PermuteForRope(head_dim=4)]) for name in ("q", "k", "b")],
    ),
    "interleaved": Case(
        {"w": raw("F32", 3, 8), "v": raw("F32", 8, 3)},
        [WeightConverter("w", "w", [Interleave(1)]), WeightConverter("v", "v", [Interleave(0, inverse=True)])],
    ),
    "reshaped": Case({"w": raw("F32", 4, 6)}, [WeightConverter("w", "w", [Transpose(0, 1), Reshape((8, 3))])]),
    "conv": Case(
        {"w": raw("F32", 3, 2, 1, 2, 2), "v": raw("F32", 3, 8)},
        [
            WeightConverter("w", "w", [Conv3dToLinear(2, (1, 2, 2))]),
            WeightConverter("v", "v", [LinearToConv3d(2, (1, 2, 2))]),
        ],
    ),
    "queries": Case(
        {"qm": raw("F32", 6, 4), "kv": raw("F32", 6, 4)}, [WeightConverter(["qm", "kv"], "m", [MergeMessageQueries()])]
    ),
    "bytes of booleans": Case(
        {"w": Raw("BOOL", (2, 4), bytes([0, 1, 2, 255, 3, 4, 5, 6]))}, [WeightConverter("w", "w", [Transpose(0, 1)])]
    ),
}


CUT_ACROSS: tuple[Op, ...] = (Concatenate(0), Transpose(0, 1), Reshape((8, 24)))
"""Two [8, 12] as [8, 24] whose rows are one and a half of those that both lie in: more than two pieces."""

FRAGMENTS: dict[str, list[Op]] = {
    "one": [Permute((0, 1))],
    "one after the other": [Interleave(1), Transpose(0, 1), Reshape((16, 12)), Interleave(0), Reshape((-1,))],
    "read by two": [Split(0, (3, 5))],
    "last": [Interleave(1), Transpose(0, 1), Reshape((16, 12)), Chunk(1)],
}


class TestByteForByte:
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    @pytest.mark.parametrize("most", [65_536, 24, 12])
    def test_ops(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, most: int) -> None:
        monkeypatch.setattr(pieces, "MAX_PIECES", most)
        source = save_tensors(tmp_path / "source", case.tensors)
        check_restores(compile_plan(source, Recipe(case.rules)), source, tmp_path / "saved")

    @pytest.mark.parametrize("more", FRAGMENTS.values(), ids=FRAGMENTS)
    def test_through_temporaries(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Sequence[Op]) -> None:
        monkeypatch.setattr(pieces, "MAX_PIECES", 2)
        source = save_tensors(tmp_path / "source", {"a": raw("F32", 8, 12), "b": raw("F32", 8, 12), "c": raw("I8", 3)})
        targets = ["x", "y"] if isinstance(more[-1], Split | Chunk) else ["x"]
        plan = compile_plan(source, Recipe([WeightConverter(["a", "b"], targets, [*CUT_ACROSS, *more])]))
        assert plan.section(0).temporaries
        check_restores(plan, source, tmp_path / "saved")

    @pytest.mark.parametrize("dtype", BITS)
    def test_dtypes(self, tmp_path: Path, dtype: str) -> None:
        tensors = {"w": raw(dtype, 4, 8), "none": raw(dtype, 0, 4), "more": raw(dtype, 3, 8, seed=1)}
        source = save_tensors(tmp_path / "source", tensors)
        check_restores(compile_plan(source), source, tmp_path / "saved")

    def test_mixed_forms(self, tmp_path: Path) -> None:
        """B21: per expert, packed, one of each in a layer, and another form in another layer."""
        rules = [
            WeightConverter(
                ["experts.*.gate", "experts.*.up"], "experts.gate_up", [MergeModulelist(0), Concatenate(1)]
            ),
            WeightConverter("experts.*.down", "experts.down", [MergeModulelist(0)]),
        ]
        single = {
            f"{name}.{number}.{part}": raw("F32", 2, 3, seed=number)
            for name in ("experts",)
            for number in range(2)
            for part in ("gate", "up", "down")
        }
        packed = {"experts.gate_up": raw("F32", 2, 4, 3), "experts.down": raw("F32", 2, 2, 3)}
        both = {
            **{name: tensor for name, tensor in single.items() if "down" not in name},
            "experts.down": packed["experts.down"],
        }
        forms = (single, packed, both)
        for number, (first, second) in enumerate((one, other) for one in forms for other in forms):
            tensors = {f"layers.0.{name}": tensor for name, tensor in first.items()}
            tensors |= {f"layers.1.{name}": tensor for name, tensor in second.items()}
            source = save_tensors(tmp_path / f"source{number}", tensors)
            plan = compile_plan(source, Recipe(rules))
            assert [tensor.name for tensor in plan.head.tensors] == [
                f"layers.{layer}.experts.{name}" for layer in (0, 1) for name in ("down", "gate_up")
            ]
            check_restores(plan, source, tmp_path / f"saved{number}")

    def test_the_saved_checkpoint_compiles_to_the_same_plan(self, tmp_path: Path) -> None:
        """B30: whoever opens it, sees the checkpoint that was there before."""
        case = CASES["experts"]
        source = save_tensors(tmp_path / "source", case.tensors)
        plan = compile_plan(source, Recipe(case.rules))
        loaded = load_state_dict(plan, source)
        save_checkpoint(loaded, plan, tmp_path / "saved")
        assert compile_plan(tmp_path / "saved", Recipe(case.rules)).digest == plan.digest
        for location in (tmp_path / "saved", tmp_path / "saved/model.safetensors"):
            assert {name: bytes_of(tensor) for name, tensor in load_state_dict(plan, location).items()} == {
                name: bytes_of(tensor) for name, tensor in loaded.items()
            }

    @pytest.mark.parametrize("as_path", [True, False])
    def test_plans_and_artifacts(self, tmp_path: Path, as_path: bool) -> None:
        case = CASES["qkv"]
        source = save_tensors(tmp_path / "source", case.tensors)
        plan = compile_plan(source, Recipe(case.rules))
        plan.save(tmp_path / "a.loadplan")
        artifact = convert(plan, source, tmp_path / "artifact")
        loaded = load_state_dict(artifact)
        ways: tuple[Path | str, ...] = (
            tmp_path / "a.loadplan",
            str(tmp_path / "artifact"),
            tmp_path / "artifact/artifact.loadplan",
        )
        for number, way in enumerate(ways if as_path else (plan, artifact)):
            save_checkpoint(loaded, way, tmp_path / f"saved{number}")
            assert files_in(tmp_path / f"saved{number}") == files_in(source)


class TestRanks:
    TENSORS: ClassVar[dict[str, Raw]] = {
        **{f"experts.{number}.w1": raw("F32", 4, 6, seed=number) for number in range(12)},
        **{f"experts.{number}.w3": raw("F32", 4, 6, seed=number + 12) for number in range(12)},
        "q": raw("F32", 8, 6),
        "k": raw("F32", 4, 6),
        "o": raw("F32", 6, 8),
        "bias": raw("F32", 12),
        "norm": raw("F32", 5),
        "scalar": raw("I64"),
        "none": raw("BF16", 0, 4),
        "words": raw("BF16", 5, 2),
    }
    RULES = (
        WeightConverter(["experts.*.w1", "experts.*.w3"], "experts.gate_up", [MergeModulelist(0), Concatenate(1)]),
        WeightConverter(["q", "k"], "qk", [Concatenate(0), Transpose(0, 1)]),
    )
    PLAN = (
        ("experts.gate_up", "packed_colwise"),
        ("qk", "rowwise"),
        ("o", "rowwise"),
        ("bias", "colwise"),
        ("none", "rowwise"),
        ("words", "embedding_rowwise"),  # fewer rows than four ranks need: uneven
        ("norm", "replicated"),
    )

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_ranks(self, tmp_path: Path, ranks: int) -> None:
        source = save_tensors(tmp_path / "source", self.TENSORS)
        target = Target(tp_size=ranks, tp_plan=self.PLAN)
        plan = compile_plan(source, Recipe(self.RULES), target=target)
        assert {tensor.shard_dim >= 0 for tensor in plan.head.tensors} == ({False} if ranks == 1 else {False, True})
        check_restores(plan, source, tmp_path / "saved")

    def test_what_all_hold_is_the_first_ones(self, tmp_path: Path) -> None:
        source = save_tensors(tmp_path / "source", self.TENSORS)
        plan = compile_plan(source, Recipe(self.RULES), target=Target(tp_size=2, tp_plan=self.PLAN))
        states = load_ranks(plan, source)
        for rank, state in enumerate(states):
            state["norm"] = torch.full((5,), float(rank + 1))
            state["bias"] = torch.full((6,), float(rank + 1))
        save_checkpoint(states, plan, tmp_path / "saved")
        found = safetensors.torch.load_file(tmp_path / "saved/model.safetensors")
        assert found["norm"].tolist() == [1] * 5
        assert found["bias"].tolist() == [1] * 6 + [2] * 6

    @pytest.mark.parametrize("style", ["replicated", "colwise"])
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_through_temporaries(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, style: str) -> None:
        """Every rank makes what all hold through its own temporaries; the first one's counts."""
        monkeypatch.setattr(pieces, "MAX_PIECES", 2)
        source = save_tensors(tmp_path / "source", {"a": raw("F32", 8, 12), "b": raw("F32", 8, 12)})
        recipe = Recipe([WeightConverter(["a", "b"], "ab", CUT_ACROSS)])
        plan = compile_plan(source, recipe, target=Target(tp_size=ranks, tp_plan={"ab": style}))
        assert all(plan.section(rank).temporaries for rank in range(ranks))
        check_restores(plan, source, tmp_path / "saved")

    def test_temporaries_that_ranks_share_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No rank holds a whole row of the temporary: nothing is written, and nothing guessed."""
        monkeypatch.setattr(pieces, "MAX_PIECES", 2)
        source = save_tensors(tmp_path / "source", {"a": raw("F32", 8, 12), "b": raw("F32", 8, 12)})
        recipe = Recipe([WeightConverter(["a", "b"], "ab", CUT_ACROSS)])
        plan = compile_plan(source, recipe, target=Target(tp_size=2, tp_plan={"ab": "rowwise"}))
        with pytest.raises(SaveError, match=r"of a temporary of rank 0, .* use original_format=False"):
            save_checkpoint(load_ranks(plan, source), plan, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


class TestCasts:
    @pytest.mark.parametrize("rules", [False, True], ids=["plain", "strided"])
    @pytest.mark.parametrize("align", [8, 1], ids=["aligned", "misaligned"])
    @pytest.mark.parametrize("to", FLOATS)
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_dtype_restored_with_the_values_of_the_model(
        self, tmp_path: Path, dtype: str, to: str, align: int, rules: bool
    ) -> None:
        tensors = {"w": floats(dtype, 3, 5), "v": raw("U8", 1 + rules), "x": floats(dtype, 4)}
        if align == 1 and int.from_bytes(safetensors_bytes(tensors, align=1)[:8], "little") % 2 == 0:
            tensors = {"vv": tensors["v"], "w": tensors["w"], "x": tensors["x"]}
        source = tmp_path / "source"
        path = write_file(source / "m.safetensors", tensors, align=align)
        recipe = Recipe([WeightConverter("w", "w", [Transpose(0, 1)])] if rules else [])
        plan = compile_plan(source, recipe, target=Target(dtype=to))
        loaded = load_state_dict(plan, source)
        assert loaded["w"].dtype == loaded["x"].dtype == FLOATS[to]
        save_checkpoint(loaded, plan, tmp_path / "saved")
        saved = safetensors.torch.load_file(tmp_path / "saved/m.safetensors")
        for name, tensor in safetensors.torch.load_file(path).items():
            wanted = tensor.to(FLOATS[to]).to(FLOATS[dtype]) if tensor.is_floating_point() else tensor
            assert (saved[name].dtype, bytes_of(saved[name])) == (wanted.dtype, bytes_of(wanted))
        widens = FLOATS[to] == torch.promote_types(FLOATS[dtype], FLOATS[to])
        assert (files_in(tmp_path / "saved") == files_in(source)) is widens

    def test_changed_values_are_rounded_to_what_is_stored(self, tmp_path: Path) -> None:
        source = save_tensors(tmp_path / "source", {"w": floats("BF16", 4)})
        plan = compile_plan(source, target=Target(dtype="float32"))
        changed = torch.tensor([1 / 3, 1e-3, 1000.5, float("inf")])
        save_checkpoint({"w": changed}, plan, tmp_path / "saved")
        found = safetensors.torch.load_file(tmp_path / "saved/model.safetensors")["w"]
        assert torch.equal(found, changed.to(torch.bfloat16))

    def test_through_temporaries_and_several_casts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pieces, "MAX_PIECES", 2)
        source = save_tensors(tmp_path / "source", {"a": floats("BF16", 8, 12), "b": floats("BF16", 8, 12)})
        ops: list[Op] = [Cast(DType.F32), *CUT_ACROSS[:2], Cast(DType.F64), CUT_ACROSS[2], Cast(DType.F32)]
        plan = compile_plan(source, Recipe([WeightConverter(["a", "b"], "w", ops)]))
        assert plan.section(0).temporaries
        assert plan.head.tensors[0].type.dtype == DType.F32
        check_restores(plan, source, tmp_path / "saved")


class TestValues:
    """B60 and B64: what is given is read, and only read, however it lies in memory."""

    TENSORS: ClassVar[dict[str, Raw]] = {
        "w": raw("F32", 4, 3),
        "t": raw("F32", 6),
        "one": raw("F32", 1),
        "scalar": raw("F32"),
        "none": raw("F32", 0),
        "rows": raw("F32", 0, 4),
        "c": raw("C64", 2, 2),
    }

    def saved(self, tmp_path: Path, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What is in the file after `state` was saved over a checkpoint, `w` transposed on its way."""
        source = save_tensors(tmp_path / "source", self.TENSORS)
        plan = compile_plan(source, Recipe([WeightConverter("w", "w", [Transpose(0, 1)])]))
        save_checkpoint({**load_state_dict(plan, source), **state}, plan, tmp_path / "saved")
        found = safetensors.torch.load_file(tmp_path / "saved/model.safetensors")
        assert found.keys() == self.TENSORS.keys()
        return {**found, "w": found["w"].T}

    def test_views(self, tmp_path: Path) -> None:
        storage = torch.arange(40.0)
        state = {
            "w": storage[3:15].view(3, 4),
            "t": storage[10:16],  # overlaps w
            "one": storage[7:17:5][:1],  # a single element whose stride is 5
            "scalar": storage[9],
            "none": storage[5:5],
            "rows": storage[:8].view(2, 4)[1:1],
        }
        found = self.saved(tmp_path, state)
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor), name
        assert torch.equal(storage, torch.arange(40.0))

    def test_strides(self, tmp_path: Path) -> None:
        grid = torch.arange(48.0).view(6, 8)
        state = {
            "w": grid[1:5, 2:8:2].T,
            "t": torch.tensor(3.0).expand(6),
            "one": grid[:, 3][5:],
            "scalar": grid.diagonal()[4],
        }
        found = self.saved(tmp_path, state)
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor), name

    def test_values_that_torch_puts_off(self, tmp_path: Path) -> None:
        """Conjugation and negation are bits of a view until someone reads it."""
        tensor = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6 + 0j]], dtype=torch.complex64)
        negative = torch.tensor([1 + 1j, 2 + 2j, 3 + 3j, 4j, 5j, 6j], dtype=torch.complex64).conj().imag
        assert tensor.conj().is_conj() and negative.is_neg()
        one = torch.tensor([1 + 7j], dtype=torch.complex64).conj().imag
        found = self.saved(tmp_path, {"c": tensor.conj(), "t": negative, "one": one})
        assert found["one"].tolist() == [-7]
        assert found["c"].tolist() == [[1 - 2j, 3 + 4j], [-5j, -6 + 0j]]
        assert found["t"].tolist() == [-1, -2, -3, -4, -5, -6]

    def test_graphs(self, tmp_path: Path) -> None:
        leaf = nn.Parameter(torch.ones(3, 4))
        found = self.saved(tmp_path, {"w": leaf * 2, "t": nn.Parameter(torch.zeros(6))})
        assert found["w"].eq(2).all() and found["t"].eq(0).all()
        assert leaf.grad is None

    def test_nothing_is_changed(self, tmp_path: Path) -> None:
        """B64b: the state and the source are as they were, and load as before."""
        source = save_tensors(tmp_path / "source", {"qk": filled(1, 4, 2)})
        plan = compile_plan(source, Recipe([WeightConverter("qk", ["q", "k"], [Chunk(0)])]))
        state = load_state_dict(plan, source)
        state["q"].add_(1)
        save_checkpoint(state, plan, tmp_path / "saved")
        assert list(state) == ["k", "q"] and state["k"].eq(1).all() and state["q"].eq(2).all()
        assert load_state_dict(plan, source)["q"].eq(1).all()
        assert load_state_dict(plan, tmp_path / "saved")["q"].eq(2).all()

    def test_modules(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        source = tmp_path / "source"
        source.mkdir()
        safetensors.torch.save_file(model.state_dict(), source / "model.safetensors")
        plan = compile_plan(source, signature=model)
        save_checkpoint(model, plan, tmp_path / "same")
        assert files_in(tmp_path / "same") == files_in(source)
        with torch.no_grad():
            model.state_dict()["0.weight"].fill_(3)
        save_checkpoint(model, plan, tmp_path / "saved")
        for name, tensor in safetensors.torch.load_file(tmp_path / "saved/model.safetensors").items():
            assert torch.equal(tensor, model.state_dict()[name])

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_changed_values_come_back(self, tmp_path: Path, ranks: int) -> None:
        """The same plan loads from the saved checkpoint what was saved."""
        source = save_tensors(tmp_path / "source", TestRanks.TENSORS)
        plan = compile_plan(source, Recipe(TestRanks.RULES), target=Target(tp_size=ranks, tp_plan=TestRanks.PLAN))
        states = load_ranks(plan, source)
        for state in states:
            for number, (name, tensor) in enumerate(state.items()):
                state[name] = torch.arange(tensor.numel()).reshape(tensor.shape).to(tensor.dtype) + number
        save_checkpoint(states, plan, tmp_path / "saved")
        for rank, state in enumerate(load_ranks(plan, tmp_path / "saved")):
            replicated = {tensor.name for tensor in plan.head.tensors if tensor.shard_dim < 0}
            for name, tensor in state.items():
                assert torch.equal(tensor, states[0 if name in replicated else rank][name]), name


@dataclass(frozen=True)
class Drawn:
    """Checkpoint files, rules that lose nothing, and what to compile for."""

    shards: dict[str, dict[str, Raw]]
    rules: tuple[Rule, ...]
    styles: dict[str, str]
    ranks: int


def _bijections(kind: TensorType) -> Iterator[str]:
    ndim = len(kind.shape)
    yield "reshape"
    if ndim:
        yield from ("permute", "transpose")
    if any(size % 2 == 0 for size in kind.shape):
        yield "interleave"
    if ndim in (1, 2) and kind.shape[0] % 2 == 0:
        yield "rope"
    if ndim == 2 and kind.shape[1]:
        yield "to_conv"
    if ndim == 5:
        yield "from_conv"


@st.composite
def conversions(draw: st.DrawFn, number: int) -> tuple[dict[str, Raw], Rule, dict[str, TensorType]]:
    """Stored tensors, a converter for them whose ops can all be undone, and what it makes."""
    dtype = draw(st.sampled_from([d for d in BITS if BITS[d] >= 8 and d != "BOOL"]))
    shape = draw(factorings(draw(st.sampled_from([1, 2, 4, 6, 12, 24, 0]))))
    count = draw(st.integers(1, 4))
    join = draw(st.sampled_from(["merge", "concatenate"] if shape else ["merge"]))
    names = [f"c{number}.{index}.w" for index in range(count)]
    tensors = {name: raw(dtype, *shape, seed=index) for index, name in enumerate(names)}
    values = [apply(Stored(name, TensorType(shape, DType(dtype))))[0] for name in names]
    ops: list[Op] = []
    if join == "merge":
        sources = [f"c{number}.*.w"]
        ops.append(MergeModulelist(draw(st.integers(0, len(shape)))))
        (value,) = apply(ops[0], *values)
    else:
        sources = [rf"c{number}\.{index}\.w" for index in range(count)]
        ops.append(Concatenate(draw(st.integers(0, len(shape) - 1))))
        (value,) = apply(ops[0], *values)
    for _ in range(draw(st.integers(0, 5))):
        ops.append(draw(unary(draw(st.sampled_from(list(_bijections(value.type)))), value.type, ())))
        (value,) = apply(ops[-1], value)
    targets, made = [f"t{number}"], list[Value]([value])
    if draw(st.booleans()) and value.type.shape:
        dim = draw(st.integers(0, len(value.type.shape) - 1))
        low = draw(st.integers(0, value.type.shape[dim]))
        ops.append(Split(dim, (low, value.type.shape[dim] - low)))
        made = list(apply(ops[-1], value))
        targets = [f"t{number}.x", f"t{number}.y"]
    kinds = {target: value.type for target, value in zip(targets, made, strict=True)}
    return tensors, WeightConverter(sources, targets, ops), kinds


@st.composite
def checkpoints(draw: st.DrawFn) -> Drawn:
    """Some conversions, their tensors strewn over files."""
    made = [draw(conversions(number)) for number in range(draw(st.integers(1, 3)))]
    tensors = {name: tensor for stored, _, _ in made for name, tensor in stored.items()}
    kinds = {name: kind for _, _, found in made for name, kind in found.items()}
    shards: dict[str, dict[str, Raw]] = {}
    for name in draw(st.permutations(list(tensors))):
        shards.setdefault(draw(st.sampled_from([ONE, TWO])), {})[name] = tensors[name]
    ranks = draw(st.sampled_from([1, 1, 2, 3]))
    styles = {
        name: draw(st.sampled_from(["replicated", style]))
        for name, kind in kinds.items()
        for style, dim in (("colwise", -2), ("rowwise", -1))
        if len(kind.shape) > 1 and kind.shape[dim] % ranks == 0 and draw(st.booleans())
    }
    return Drawn(shards, tuple(rule for _, rule, _ in made), styles, ranks)


@settings(max_examples=80)
@given(drawn=checkpoints(), most=st.sampled_from([65_536, 4, 6, 8]))
def test_whatever_loses_nothing_comes_back(drawn: Drawn, most: int) -> None:
    """Load and save is the identity on files; changed values are those that the saved files load."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_PIECES", most if drawn.ranks == 1 else 65_536)
        source = write_shards(Path(folder, "source"), drawn.shards)
        plan = compile_plan(source, Recipe(drawn.rules), "recipe", Target(tp_size=drawn.ranks, tp_plan=drawn.styles))
        check_restores(plan, source, Path(folder, "saved"))
        states = load_ranks(plan, source)
        shared = {tensor.name for tensor in plan.head.tensors if tensor.shard_dim < 0}
        for rank, state in enumerate(states):
            for name, tensor in state.items():
                seed = 0 if name in shared else rank
                kind = next(dtype for dtype in BITS if BITS[dtype] == 8 * tensor.element_size())
                data = bytearray(raw(kind, *tensor.shape, seed=99 + seed).data)
                if data:
                    state[name] = torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)
        save_checkpoint(states, plan, Path(folder, "changed"))
        for wanted, found in zip(states, load_ranks(plan, Path(folder, "changed")), strict=True):
            assert {name: bytes_of(tensor) for name, tensor in found.items()} == {
                name: bytes_of(tensor) for name, tensor in wanted.items()
            }
