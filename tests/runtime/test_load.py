"""Loading, in every mode, against the safetensors library and torch's own ops; and what ends it, leaving nothing behind.

Where the library cannot make a tensor (F6), the bytes that were written are compared.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import ClassVar

import pytest
import safetensors
import safetensors.torch
import torch
from builders import BITS, Raw, bytes_of, filled, raw, safetensors_bytes, write_file, write_shards

from loadplan.compiler.ops import Cast, Chunk, Concatenate, MergeModulelist, Reshape, Transpose
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.problem import CompileError
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import WeightConverter
from loadplan.compiler.target import Target
from loadplan.runtime import execute
from loadplan.runtime.check_plan import check_section
from loadplan.runtime.dtype import DType
from loadplan.runtime.execute import Execution, Mode, ModeError, Residency
from loadplan.runtime.load import ArgumentError, load_state_dict
from loadplan.runtime.location import LocationError
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Copy, CopyColumns, Head, Loop, PlanTensor, Report, Section
from loadplan.runtime.plan_format import PlanError
from loadplan.runtime.source_files import find_files
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype

MODES: tuple[Mode, ...] = ("auto", "read", "copy")
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PAIRS = getattr(torch, "float4_e2m1fn_x2", None)  # since torch 2.8
READABLE = [dtype for dtype in BITS if not dtype.startswith("F6") and (dtype != "F4" or PAIRS is not None)]
ALL_DTYPES = {f"t.{dtype}": raw(dtype, 3, 8) for dtype in BITS}
SHAPES = {
    "scalar": raw("I64"),
    "none": raw("F32", 0),
    "rows": raw("F32", 0, 4),
    "columns": raw("BF16", 4, 0),
    "one": raw("F16", 1, 1, 1),
    "deep": raw("I8", 2, 1, 3, 1, 2),
}


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (found.shape, found.dtype, bytes_of(found)) == (wanted.shape, wanted.dtype, bytes_of(wanted))


def check(location: Path, path: Path, mode: Mode, threads: int | None = None) -> None:
    """What is loaded from `location` is what the library reads from `path`."""
    loaded = load_state_dict(compile_plan(location), location, mode=mode, threads=threads)
    reference = safetensors.torch.load_file(path)
    assert list(loaded) == sorted(reference)
    for name, tensor in reference.items():
        assert same(loaded[name], tensor), name
        assert loaded[name].is_contiguous()


class TestSameAsTheLibrary:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dtype", READABLE)
    def test_dtypes(self, tmp_path: Path, dtype: str, mode: Mode) -> None:
        path = write_file(tmp_path / "m.safetensors", {"w": raw(dtype, 3, 8), "none": raw(dtype, 0, 4)})
        check(tmp_path, path, mode)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2", "F4"])
    def test_packed(self, tmp_path: Path, dtype: str, mode: Mode) -> None:
        """What torch has no shape for comes as bytes; F4 in pairs where the last dim is even."""
        shapes = [(4, 4), (4, 3)] if dtype != "F4" else [(4, 4), (4, 3), (2,)]
        tensors = {f"t{number}": raw(dtype, *shape) for number, shape in enumerate(shapes)}
        write_file(tmp_path / "m.safetensors", tensors)
        loaded = load_state_dict(compile_plan(tmp_path), tmp_path, mode=mode)
        for name, tensor in tensors.items():
            assert bytes_of(loaded[name]) == tensor.data
            if PAIRS is not None and dtype == "F4" and tensor.shape[-1] % 2 == 0:
                assert loaded[name].shape == (*tensor.shape[:-1], tensor.shape[-1] // 2)
                assert loaded[name].dtype == PAIRS
            else:
                assert (loaded[name].shape, loaded[name].dtype) == ((len(tensor.data),), torch.uint8)

    @pytest.mark.parametrize("mode", [*MODES, "map"])
    def test_shapes(self, tmp_path: Path, mode: Mode) -> None:
        path = write_file(
            tmp_path / "m.safetensors", dict(sorted(SHAPES.items(), key=lambda item: -BITS[item[1].dtype]))
        )
        check(tmp_path, path, mode)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("threads", [None, 1, 2, 8])
    @pytest.mark.parametrize("align", [8, 1], ids=["padded", "unpadded"])
    def test_all_at_once(self, tmp_path: Path, align: int, threads: int | None, mode: Mode) -> None:
        """D20: an unpadded header leaves every tensor misaligned."""
        tensors = {name: tensor for name, tensor in (ALL_DTYPES | SHAPES).items() if tensor.dtype in READABLE}
        if align == 1:
            while int.from_bytes(safetensors_bytes(tensors, align=1)[:8], "little") % 2 == 0:
                tensors = {f"x{name}": tensor for name, tensor in tensors.items()} | {"x": raw("U8", len(tensors))}
        path = write_file(tmp_path / "m.safetensors", tensors, align=align)
        check(tmp_path, path, mode, threads)

    @pytest.mark.parametrize("mode", MODES)
    def test_misaligned(self, tmp_path: Path, mode: Mode) -> None:
        """D19: three bytes before floats."""
        path = write_file(tmp_path / "m.safetensors", {"a": raw("U8", 3), "b": raw("F32", 5, 2), "c": raw("F64", 3)})
        check(tmp_path, path, mode)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("threads", [1, 2, 8])
    def test_many_small_tensors(self, tmp_path: Path, threads: int, mode: Mode) -> None:
        """More than one `preadv` takes."""
        tensors = {f"layers.{number}.w": raw("F16", number % 5, seed=number) for number in range(2500)}
        check(tmp_path, write_file(tmp_path / "m.safetensors", tensors), mode, threads)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("nbytes", [1, 7, 64, 1000])
    def test_larger_than_a_batch(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, mode: Mode
    ) -> None:
        monkeypatch.setattr(execute, "_READ_NBYTES", nbytes)
        path = write_file(tmp_path / "m.safetensors", {"a": raw("F32", 40, 3), "b": raw("U8", 5), "c": raw("I16", 21)})
        check(tmp_path, path, mode, threads=2)

    @pytest.mark.parametrize("mode", MODES)
    def test_several_files(self, tmp_path: Path, mode: Mode) -> None:
        shards = {ONE: {"a": raw("F32", 5), "c": raw("U8", 3)}, TWO: {"b": raw("BF16", 2, 2)}}
        write_shards(tmp_path, shards)
        loaded = load_state_dict(compile_plan(tmp_path), tmp_path, mode=mode)
        for file in shards:
            for name, tensor in safetensors.torch.load_file(tmp_path / file).items():
                assert same(loaded.pop(name), tensor)
        assert loaded == {}

    @pytest.mark.parametrize("mode", MODES)
    def test_booleans_are_bytes(self, tmp_path: Path, mode: Mode) -> None:
        """D23: nobody checks what booleans are made of; they keep their bytes, cut or whole."""
        path = write_file(tmp_path / "m.safetensors", {"w": Raw("BOOL", (2, 4), bytes([0, 1, 2, 255, 3, 4, 5, 6]))})
        check(tmp_path, path, mode)
        plan = compile_plan(tmp_path, target=Target(tp_size=2, tp_plan={"w": "rowwise"}))
        assert bytes_of(load_state_dict(plan, tmp_path, 1, mode=mode)["w"]) == bytes([2, 255, 5, 6])


class TestAgainstTorch:
    """Ranks, casts and strided copies, against the same done with torch on whole tensors."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("align", [8, 1], ids=["padded", "unpadded"])
    @pytest.mark.parametrize("dtype", [dtype for dtype in BITS if BITS[dtype] >= 8])
    def test_ranks(self, tmp_path: Path, dtype: str, align: int, mode: Mode) -> None:
        tensors = {"w": raw(dtype, 4, 6), "v": raw(dtype, 8)}
        if int.from_bytes(safetensors_bytes(tensors, align=1)[:8], "little") % 2 == 0:
            tensors = {"vv": tensors["v"], "w": tensors["w"]}
        (column,) = set(tensors) - {"w"}
        path = write_file(tmp_path / "m.safetensors", tensors, align=align)
        target = Target(tp_size=2, tp_plan={"w": "rowwise", column: "colwise"})
        plan = compile_plan(tmp_path, target=target)
        reference = safetensors.torch.load_file(path)
        for rank in range(2):
            loaded = load_state_dict(plan, tmp_path, rank, mode=mode)
            assert same(loaded["w"], reference["w"][:, 3 * rank : 3 * rank + 3])
            assert same(loaded[column], reference[column][4 * rank : 4 * rank + 4])

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("align", [8, 1], ids=["padded", "unpadded"])
    @pytest.mark.parametrize("to", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "F64"])
    def test_casts(self, tmp_path: Path, dtype: str, to: str, align: int, mode: Mode) -> None:
        special = torch.tensor([0.0, -0.0, 1e-8, 60000.0, 2.5, float("inf"), float("nan"), -1 / 3])
        tensor = special.to(torch_dtype(DType(dtype)))
        tensors = {"w": Raw(dtype, (2, 4), bytes_of(tensor)), "n": raw("I32", 2)}
        write_file(tmp_path / "m.safetensors", tensors, align=align)
        loaded = load_state_dict(compile_plan(tmp_path, target=Target(dtype=to)), tmp_path, mode=mode)
        assert same(loaded["w"], tensor.reshape(2, 4).to(getattr(torch, to)))
        assert loaded["n"].dtype == torch.int32

    @pytest.mark.parametrize("mode", MODES)
    def test_casts_round_one_after_the_other(self, tmp_path: Path, mode: Mode) -> None:
        path = write_file(tmp_path / "m.safetensors", {"w": raw("F32", 50)})
        recipe = Recipe([WeightConverter("w", "w", [Cast(DType.BF16), Cast(DType.F64), Cast(DType.F32)])])
        loaded = load_state_dict(compile_plan(tmp_path, recipe), tmp_path, mode=mode)
        reference = safetensors.torch.load_file(path)["w"]
        assert same(loaded["w"], reference.to(torch.bfloat16).to(torch.float64).to(torch.float32))
        assert not torch.equal(loaded["w"], reference)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("pieces_kept", [True, False], ids=["direct", "materialized"])
    def test_ops(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces_kept: bool, mode: Mode) -> None:
        if not pieces_kept:
            from loadplan.compiler import pieces

            monkeypatch.setattr(pieces, "MAX_PIECES", 3)
        tensors = {"q": raw("F32", 4, 6), "k": raw("F32", 4, 6), "t": raw("I8", 4, 5)}
        tensors |= {f"e.{number}.w": raw("F32", 2, 4, seed=number) for number in range(3)}
        reference = safetensors.torch.load_file(write_file(tmp_path / "m.safetensors", tensors))
        recipe = Recipe(
            [
                WeightConverter(["q", "k"], "qk", [Concatenate(0), Transpose(0, 1)]),
                WeightConverter("e.*.w", "e", [MergeModulelist(0)]),
                WeightConverter("t", ["t0", "t1"], [Transpose(0, 1), Reshape((2, 10)), Chunk(0)]),
            ]
        )
        plan = compile_plan(tmp_path, recipe)
        assert bool(plan.section(0).temporaries) is not pieces_kept
        loaded = load_state_dict(plan, tmp_path, mode=mode)
        assert same(loaded["qk"], torch.cat([reference["q"], reference["k"]]).T.contiguous())
        assert same(loaded["e"], torch.stack([reference[f"e.{number}.w"] for number in range(3)]))
        assert same(loaded["t0"], reference["t"].T.reshape(2, 10)[:1])
        assert same(loaded["t1"], reference["t"].T.reshape(2, 10)[1:])

    @pytest.mark.parametrize("mode", MODES)
    def test_split_sources_are_independent(self, tmp_path: Path, mode: Mode) -> None:
        """B64a: writing into one part changes no other, and no later load."""
        write_file(tmp_path / "m.safetensors", {"qk": filled(1, 4, 2)})
        plan = compile_plan(tmp_path, Recipe([WeightConverter("qk", ["q", "k"], [Chunk(0)])]))
        loaded = load_state_dict(plan, tmp_path, mode=mode)
        loaded["q"].fill_(7)
        assert loaded["k"].tolist() == [[1, 1], [1, 1]]
        assert loaded["q"].untyped_storage().data_ptr() != loaded["k"].untyped_storage().data_ptr()
        assert load_state_dict(plan, tmp_path, mode=mode)["q"].tolist() == [[1, 1], [1, 1]]

    def test_wanted_only(self, tmp_path: Path) -> None:
        write_file(tmp_path / "m.safetensors", {"a": raw("F32", 2), "b": raw("F32", 3), "c": raw("F32", 4)})
        plan = compile_plan(tmp_path)
        files = find_files(tmp_path, plan.head.files)
        seen: list[tuple[int, int]] = []
        found = Execution(plan.head, plan.section(0), 0, files, "read").run(
            [1], lambda done, total: seen.append((done, total))
        )
        assert set(found) == {1} and bytes_of(found[1]) == raw("F32", 3).data
        assert seen == [(12, 12)]


def test_packed_elements_in_strides(tmp_path: Path) -> None:
    """No compiler cuts packed tensors, but the proof lets whole bytes of them move."""
    path = write_file(tmp_path / "m.safetensors", {"w": raw("F4", 4, 8), "v": raw("F6_E2M3", 4, 4)})
    files = compile_plan(tmp_path).head.files
    start = path.stat().st_size - 16 - 12
    head = Head(
        files=files,
        tensors=(
            PlanTensor("v", TensorType((4, 4), DType.F6_E2M3)),
            PlanTensor("w", TensorType((4, 4), DType.F4)),
        ),
        aliases=(),
        equal_ties=(),
        chains=((DType.F4,), (DType.F6_E2M3,)),
        world_size=1,
        report=Report(),
    )
    copies = [
        Copy(0, 2, start, 0, 4, 0, (Loop(4, 4, 2),)),  # left half of each row of w
        Copy(0, 0, start + 16, 9, 4, 1, (Loop(4, 3, -3),)),
        Copy(-3, 1, 0, 0, 4, 0, (Loop(4, 2, 2),)),
    ]
    copies[1:2] = [Copy(0, 0, start + 16 + 3 * row, 9 - 3 * row, 4, 1, ()) for row in range(4)]  # rows of v, backwards
    section = Section((TensorType((4, 4), DType.F4),), CopyColumns.of(copies))
    assert list(check_section(head, section, 0)) == []
    plan = Plan.of(head, (section,))
    data = raw("F4", 4, 8).data
    rows = raw("F6_E2M3", 4, 4).data
    for mode in MODES:
        loaded = load_state_dict(plan, tmp_path, mode=mode)
        assert bytes_of(loaded["w"]) == b"".join(data[at : at + 2] for at in range(0, 16, 4))
        assert bytes_of(loaded["v"]) == b"".join(rows[at : at + 3] for at in (9, 6, 3, 0))


class TestMap:
    TENSORS: ClassVar = {
        "a": raw("F64", 3),
        "b": raw("F32", 2, 2),
        "c": raw("BF16", 5),
        "d": raw("U8", 3),
        "n": raw("F32", 0, 4),
    }

    def test_same_as_the_library(self, tmp_path: Path) -> None:
        check(tmp_path, write_file(tmp_path / "m.safetensors", self.TENSORS), "map")

    @pytest.mark.parametrize("dtype", [dtype for dtype in BITS if BITS[dtype] >= 8])
    def test_dtypes(self, tmp_path: Path, dtype: str) -> None:
        check(tmp_path, write_file(tmp_path / "m.safetensors", {"w": raw(dtype, 3, 8)}), "map")

    def test_private(self, tmp_path: Path) -> None:
        """Writing to a tensor changes neither the file nor what is loaded from it next."""
        path = write_file(tmp_path / "m.safetensors", self.TENSORS)
        before, plan = path.read_bytes(), compile_plan(tmp_path)
        for mode in ("map", "auto"):
            loaded = load_state_dict(plan, tmp_path, mode=mode)
            for tensor in loaded.values():
                tensor.zero_()
            assert path.read_bytes() == before
            assert bytes_of(load_state_dict(plan, tmp_path, mode=mode)["b"]) == self.TENSORS["b"].data

    def test_tensors_have_storages_of_their_own(self, tmp_path: Path) -> None:
        """So that saving one does not save the file."""
        write_file(tmp_path / "m.safetensors", self.TENSORS)
        for name, tensor in load_state_dict(compile_plan(tmp_path), tmp_path, mode="map").items():
            assert tensor.untyped_storage().nbytes() == len(self.TENSORS[name].data)

    def test_lives_on(self, tmp_path: Path) -> None:
        """A tensor outlives the file, the plan, and the tensors beside it."""
        path = write_file(tmp_path / "m.safetensors", self.TENSORS)
        tensor = load_state_dict(compile_plan(tmp_path), tmp_path, mode="map")["a"]
        path.unlink()
        assert bytes_of(tensor) == self.TENSORS["a"].data

    @pytest.mark.parametrize(
        ("tensors", "target"),
        [
            pytest.param({"a": raw("U8", 3), "b": raw("F32", 1)}, Target(), id="misaligned"),
            pytest.param({"a": raw("U8", 3), "b": raw("F32", 1)}, Target(dtype="float16"), id="cast"),
            pytest.param({"a": raw("U8", 3), "b": raw("F4", 2)}, Target(), id="packed"),
            pytest.param({"b": raw("F32", 2, 2)}, Target(tp_size=2, tp_plan={"b": "rowwise"}), id="strided"),
        ],
    )
    def test_what_cannot_be_mapped(self, tmp_path: Path, tensors: dict[str, Raw], target: Target) -> None:
        write_file(tmp_path / "m.safetensors", tensors)
        with pytest.raises(
            ModeError, match=r"mode='map': 1 tensors are not made of aligned stretches .* the first is b;"
        ):
            load_state_dict(compile_plan(tmp_path, target=target), tmp_path, mode="map")


class TestArguments:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        write_shards(tmp_path, {ONE: {"a": raw("F32", 2)}, TWO: {"b": raw("F32", 2)}})
        return compile_plan(tmp_path)

    @pytest.mark.parametrize("mode", ["", "mmap", "AUTO", None])
    def test_unknown_mode(self, tmp_path: Path, plan: Plan, mode: Mode) -> None:
        with pytest.raises(ModeError, match="one of auto, map, read, copy"):
            load_state_dict(plan, tmp_path, mode=mode)

    @pytest.mark.parametrize("rank", [-1, 1, 10**6])
    def test_bad_rank(self, tmp_path: Path, plan: Plan, rank: int) -> None:
        with pytest.raises(PlanError, match=f"has ranks 0 to 0, not {rank}"):
            load_state_dict(plan, tmp_path, rank)

    @pytest.mark.parametrize("threads", [0, -1])
    def test_bad_threads(self, tmp_path: Path, plan: Plan, threads: int) -> None:
        with pytest.raises(ArgumentError, match=f"threads={threads}: at least 1"):
            load_state_dict(plan, tmp_path, threads=threads)

    def test_no_checkpoint(self, tmp_path: Path, plan: Plan) -> None:
        with pytest.raises(ArgumentError, match="a plan needs the checkpoint"):
            load_state_dict(plan)
        with pytest.raises(LocationError, match="no such file or folder"):
            load_state_dict(plan, tmp_path / "none")

    def test_plan_by_path(self, tmp_path: Path, plan: Plan) -> None:
        plan.save(tmp_path / "plans" / "m.loadplan")
        loaded = load_state_dict(tmp_path / "plans" / "m.loadplan", str(tmp_path))
        assert bytes_of(loaded["a"]) == bytes_of(loaded["b"]) == raw("F32", 2).data

    def test_checkpoint_by_any_of_its_files(self, tmp_path: Path, plan: Plan) -> None:
        for place in (tmp_path, tmp_path / ONE, tmp_path / TWO, tmp_path / "model.safetensors.index.json"):
            assert set(load_state_dict(plan, place)) == {"a", "b"}

    def test_a_single_file_by_another_name(self, tmp_path: Path) -> None:
        plan = compile_plan(write_file(tmp_path / "m.safetensors", {"a": raw("F32", 2)}))
        (tmp_path / "m.safetensors").rename(tmp_path / "blob")
        assert bytes_of(load_state_dict(plan, tmp_path / "blob")["a"]) == raw("F32", 2).data


class TestProgress:
    @pytest.mark.parametrize("threads", [1, 2, 8])
    @pytest.mark.parametrize("mode", ["read", "copy"])
    def test_sums(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, threads: int) -> None:
        """Rising, up to the bytes of all tensors, from the calling thread."""
        monkeypatch.setattr(execute, "_READ_NBYTES", 100)
        tensors = {f"t{number}": raw("F32", 50 + number) for number in range(5)}
        write_file(tmp_path / "m.safetensors", tensors)
        total = sum(len(tensor.data) for tensor in tensors.values())
        seen: list[tuple[int, int]] = []
        callers: set[int] = set()

        def progress(done: int, total: int) -> None:
            seen.append((done, total))
            callers.add(threading.get_ident())

        load_state_dict(compile_plan(tmp_path), tmp_path, mode=mode, threads=threads, progress=progress)
        assert seen == sorted(seen)
        assert seen[-1] == (total, total)
        assert {whole for _, whole in seen} == {total}
        assert callers == {threading.get_ident()}

    def test_mapped_bytes_are_not_counted(self, tmp_path: Path) -> None:
        write_file(tmp_path / "m.safetensors", {"a": raw("F32", 2), "b": raw("U8", 3), "c": raw("F32", 3)})
        seen: list[tuple[int, int]] = []
        load_state_dict(compile_plan(tmp_path), tmp_path, progress=lambda *counts: seen.append(counts))
        assert seen == [(12, 12)]


class TestBytesAreKept:
    """B35, B36: no value is cast on the way to a type of the same size."""

    def test_scales(self, tmp_path: Path) -> None:
        write_file(tmp_path / "m.safetensors", {"s": Raw("F8_E8M0", (5,), bytes([120, 125, 127, 130, 140]))})
        for mode in MODES:
            loaded = load_state_dict(compile_plan(tmp_path), tmp_path, mode=mode)["s"]
            assert loaded.dtype == torch.float8_e8m0fnu
            assert list(bytes_of(loaded)) == [120, 125, 127, 130, 140]
        with pytest.raises(CompileError):
            compile_plan(tmp_path, signature={"s": ((5,), "U8")})

    def test_planned_from_the_header(self, tmp_path: Path) -> None:
        write_file(tmp_path / "m.safetensors", ALL_DTYPES | SHAPES)
        plan = compile_plan(tmp_path)
        assert {tensor.name: (tensor.type.dtype, tensor.type.shape) for tensor in plan.head.tensors} == {
            name: (tensor.dtype, tensor.shape) for name, tensor in (ALL_DTYPES | SHAPES).items()
        }
        for mode in MODES:
            loaded = load_state_dict(plan, tmp_path, mode=mode)
            assert {name: bytes_of(tensor) for name, tensor in loaded.items()} == {
                name: tensor.data for name, tensor in (ALL_DTYPES | SHAPES).items()
            }


class TestResidency:
    """When mapped pages are read changes no value."""

    @pytest.mark.parametrize("residency", ["lazy", "read", "lock"])
    @pytest.mark.parametrize("mode", [*MODES, "map"])
    def test_values(self, tmp_path: Path, mode: Mode, residency: Residency) -> None:
        path = write_file(
            tmp_path / "m.safetensors", {"a": raw("F64", 3000, 3), "b": raw("F64", 0), "c": raw("I32", 5)}
        )
        loaded = load_state_dict(compile_plan(tmp_path), tmp_path, mode=mode, residency=residency)
        reference = safetensors.torch.load_file(path)
        assert all(same(loaded[name], tensor) for name, tensor in reference.items())

    def test_locked_pages_are_counted(self, tmp_path: Path) -> None:
        write_file(tmp_path / "m.safetensors", {"a": raw("U8", 1 << 20)})

        def locked() -> int:
            (line,) = [n for n in Path("/proc/self/status").read_text().splitlines() if n.startswith("VmLck")]
            return int(line.split()[1]) * 1024

        before = locked()
        tensors = load_state_dict(compile_plan(tmp_path), tmp_path, residency="lock")
        assert locked() - before >= 1 << 20
        del tensors
        assert locked() == before

    def test_unknown(self, tmp_path: Path) -> None:
        write_file(tmp_path / "m.safetensors", {"a": raw("U8", 1)})
        with pytest.raises(ModeError, match="residency='eager': one of lazy, read, lock"):
            load_state_dict(compile_plan(tmp_path), tmp_path, residency="eager")  # type: ignore[arg-type]
