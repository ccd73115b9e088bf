"""Reading libraries in the place of `preadv`: the same bytes, the same checks, the same errors, and nothing left.

What is loaded is compared with the bytes that were written, and with torch on whole tensors as safetensors reads them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from builders import BITS, Raw, bytes_of, raw, write_file, write_shards
from hypothesis import given
from hypothesis import strategies as st

from loadplan.compiler import Target, compile_plan
from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist, Transpose
from loadplan.recipes import Recipe, WeightConverter
from loadplan.runtime import BackendError, FileMismatch, ModeError, Plan, ReadError, execute, load_state_dict
from loadplan.runtime.execute import Execution, Mode, Residency
from loadplan.runtime.readers import Backend, Reader, explain, find_reader
from loadplan.runtime.source_files import SourceFile, find_files

LIBRARIES: list[Backend] = ["runai", "fastsafetensors"]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _is_installed(backend: Backend) -> bool:
    try:
        find_reader(backend)
    except BackendError:
        return False
    return True


INSTALLED = {backend: _is_installed(backend) for backend in LIBRARIES}
BACKENDS = [
    "preadv",
    *(
        pytest.param(backend, marks=pytest.mark.skipif(not there, reason=f"the library of {backend} is not installed"))
        for backend, there in INSTALLED.items()
    ),
]
each_library = pytest.mark.parametrize("backend", BACKENDS[1:])
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def load(
    plan: Plan, folder: Path, backend: Backend, threads: int | None = None, rank: int = 0, mode: Mode = "auto"
) -> dict[str, torch.Tensor]:
    return load_state_dict(plan, folder, rank, mode=mode, threads=threads, backend=backend)


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread, of ours or of a library, and no open file stays behind."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)  # else torch starts and keeps some for each thread that casts
    threads, files = _system_threads(), _open_files()
    try:
        yield
    finally:
        torch.set_num_threads(count)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loadplan")] == []
    deadline = time.monotonic() + 30
    while _system_threads() - threads and time.monotonic() < deadline:  # the system lists joined ones a little longer
        os.sched_yield()
    assert _system_threads() - threads == set()
    assert _open_files() - files == set()


def _system_threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def _open_files() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


class TestSameBytes:
    @each_backend
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("align", [8, 1], ids=["padded", "unpadded"])
    def test_dtypes_and_shapes(self, tmp_path: Path, backend: Backend, threads: int, align: int) -> None:
        tensors = {f"t.{dtype}": raw(dtype, 3, 8) for dtype in BITS}
        tensors |= {
            "scalar": raw("I64"),
            "none": raw("F32", 0, 4),
            "deep": raw("I8", 2, 1, 3, 1, 2),
            "odd": raw("U8", 7),
        }
        write_file(tmp_path / "m.safetensors", tensors, align=align)
        with nothing_left():
            loaded = load(compile_plan(tmp_path), tmp_path, backend, threads)
        assert {name: bytes_of(tensor) for name, tensor in loaded.items()} == {
            name: tensor.data for name, tensor in tensors.items()
        }

    @each_backend
    def test_slices_stacks_and_casts(self, tmp_path: Path, backend: Backend) -> None:
        tensors = {f"e.{n}.{name}": raw("BF16", 6, 10, seed=n) for n in range(3) for name in ("gate", "up")}
        tensors = {name: Raw(t.dtype, t.shape, bytes(b & 0x3F for b in t.data)) for name, t in tensors.items()}
        tensors |= {"qkv": raw("I32", 12, 5), "rows": raw("F64", 4, 6)}
        path = write_file(tmp_path / "m.safetensors", tensors)
        recipe = Recipe(
            [
                WeightConverter(
                    ["e.*.gate", "e.*.up"], "e.gate_up", [MergeModulelist(0), Concatenate(1), Transpose(1, 2)]
                ),
                WeightConverter("qkv", ["q", "k", "v"], [Chunk(0)]),
            ],
            dtype_plan={"e.gate_up": "float32"},
        )
        plan = compile_plan(tmp_path, recipe, target=Target(tp_size=2, tp_plan={"rows": "rowwise"}))
        whole = safetensors.torch.load_file(path)
        gate, up = (torch.stack([whole[f"e.{n}.{name}"] for n in range(3)]) for name in ("gate", "up"))
        wanted = dict(zip("qkv", whole["qkv"].chunk(3), strict=True))
        wanted["e.gate_up"] = torch.cat([gate, up], 1).transpose(1, 2).float()
        for rank in range(2):
            with nothing_left():
                loaded = load(plan, tmp_path, backend, threads=2, rank=rank)
            wanted["rows"] = whole["rows"][:, 3 * rank : 3 * rank + 3]
            assert set(loaded) == set(wanted)
            assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())

    @each_backend
    @pytest.mark.parametrize("nbytes", [1, 64, 1000])
    def test_many_tasks_and_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend, nbytes: int
    ) -> None:
        """Descriptors are used again for other files: no library may keep what it once opened."""
        monkeypatch.setattr(execute, "_READ_NBYTES", nbytes)
        shards = {f"m-{n}.safetensors": {f"t{n}": raw("F32", 40, seed=n), f"u{n}": raw("U8", 5)} for n in range(9)}
        plan = compile_plan(write_shards(tmp_path, shards))
        loaded = load(plan, tmp_path, backend, threads=2)
        tensors = {name: tensor for file in shards.values() for name, tensor in file.items()}
        assert {name: bytes_of(loaded[name]) for name in tensors} == {name: t.data for name, t in tensors.items()}

    @each_backend
    def test_larger_than_any_buffer_inside(self, tmp_path: Path, backend: Backend) -> None:
        data = os.urandom((9 << 20) + 3)
        write_file(tmp_path / "m.safetensors", {"a": Raw("U8", (len(data),), data)})
        assert bytes_of(load(compile_plan(tmp_path), tmp_path, backend)["a"]) == data

    @each_library
    def test_names_that_are_not_unicode(self, tmp_path: Path, backend: Backend) -> None:
        folder = tmp_path / os.fsdecode(b"\xff s3:")
        folder.mkdir()
        write_file(folder / "m.safetensors", {"a": raw("F32", 5)})
        assert bytes_of(load(compile_plan(folder), folder, backend)["a"]) == raw("F32", 5).data

    @each_library
    @pytest.mark.parametrize("residency", ["lazy", "read", "lock"])
    def test_nothing_is_mapped(self, tmp_path: Path, backend: Backend, residency: Residency) -> None:
        """A tensor that would be mapped is read: a change of the file in place does not reach it."""
        path = write_file(tmp_path / "m.safetensors", {"a": raw("F64", 3000)})
        loaded = load_state_dict(compile_plan(tmp_path), tmp_path, residency=residency, backend=backend)
        with path.open("r+b") as file:
            file.seek(-24_000, os.SEEK_END)
            file.write(bytes(24_000))
        assert bytes_of(loaded["a"]) == raw("F64", 3000).data

    @each_library
    def test_through_stages(self, tmp_path: Path, backend: Backend) -> None:
        """The way to accelerators, here with the CPU in the place of one."""
        write_file(tmp_path / "m.safetensors", {"a": raw("F32", 50, 3), "b": raw("F16", 7)})
        plan = compile_plan(tmp_path, target=Target(tp_size=3, tp_plan={"a": "rowwise"}))
        files = find_files(tmp_path, plan.head.files)
        for threads in (1, 100):
            with nothing_left():
                found = Execution(
                    plan.head, plan.section(0), 0, files, threads=threads, device=torch.device("cpu"), backend=backend
                ).run()
            reference = load(plan, tmp_path, "preadv", mode="read")
            assert all(bytes_of(tensor) == bytes_of(reference["ab"[number]]) for number, tensor in found.items())


class TestReader:
    """The interface itself."""

    @each_backend
    @given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=40), gap=st.integers(0, 3))
    def test_any_places(
        self, tmp_path_factory: pytest.TempPathFactory, backend: Backend, sizes: list[int], gap: int
    ) -> None:
        """Places in any order in memory, in several batches; nothing beside them is written."""
        data = os.urandom(sum(sizes) + gap * len(sizes))
        reader, file, start = _open(tmp_path_factory.mktemp("any"), backend, data)
        memory = bytearray(len(data) + 2)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 1
        batches: list[tuple[int, array[int]]] = []
        expected = bytearray(len(memory))
        at = 0
        for number, nbytes in enumerate(sizes):
            if nbytes:
                place = len(data) - at - nbytes  # backwards
                expected[1 + place : 1 + place + nbytes] = data[at : at + nbytes]
                if gap or not batches or number % 7 == 0 or not sizes[number - 1]:
                    batches.append((start + at, array("Q")))
                batches[-1][1].extend((base + place, nbytes))
            at += nbytes + gap
        with file.open() as descriptor, nothing_left():
            reader.read(file, descriptor, batches)
        assert memory == expected

    @each_backend
    def test_nothing_to_read(self, tmp_path: Path, backend: Backend) -> None:
        reader, file, _ = _open(tmp_path, backend, b"abc")
        with file.open() as descriptor, nothing_left():
            reader.read(file, descriptor, [])

    @each_backend
    @pytest.mark.parametrize("before", [0, 10])
    def test_a_file_that_ends(self, tmp_path: Path, backend: Backend, before: int) -> None:
        data = os.urandom((2 << 20) + 100)
        reader, file, start = _open(tmp_path, backend, data)
        memory = bytearray(len(data))
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        cut = start + len(data) - 50
        with file.open() as descriptor, nothing_left():
            os.truncate(tmp_path / "m.safetensors", cut)
            with pytest.raises(FileMismatch, match=f"ends at byte {cut};") as caught:
                batches = [
                    (start, array("Q", [base, before])),
                    (start + before, array("Q", [base + before, len(data) - before])),
                ]
                reader.read(file, descriptor, batches if before else batches[1:])
            assert caught.value.name == "m.safetensors"

    @each_backend
    def test_a_read_that_fails(self, tmp_path: Path, backend: Backend) -> None:
        reader, file, start = _open(tmp_path, backend, b"abcdef")
        memory = bytearray(6)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with file.open() as descriptor:
            pass
        with nothing_left(), pytest.raises(ReadError, match=f"read at byte {start} .Bad file descriptor") as caught:
            reader.read(file, descriptor, [(start, array("Q", [base, 6]))])
        assert caught.value.name == "m.safetensors"

    @each_backend
    def test_a_file_under_another_name(self, tmp_path: Path, backend: Backend) -> None:
        """What is read is what was opened and checked, though another file has its name by then."""
        reader, file, start = _open(tmp_path, backend, b"abcdef")
        memory = bytearray(6)
        with file.open() as descriptor:
            (tmp_path / "m.safetensors").rename(tmp_path / "aside")
            write_file(tmp_path / "m.safetensors", {"a": Raw("U8", (6,), b"ghijkl")})
            base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            reader.read(file, descriptor, [(start, array("Q", [base, 6]))])
        assert memory == b"abcdef"

    def test_what_only_the_library_cannot_read(self, tmp_path: Path) -> None:
        """It is an error though `preadv` can, and says where and whose."""
        _, file, start = _open(tmp_path, "preadv", b"abcdef")
        with file.open() as descriptor:
            error = explain(file, descriptor, [(start, 0, 1), (start + 1, 0, 5)], 1, "library: no")
        assert str(error).startswith(f"m.safetensors: cannot be read at byte {start + 1} (library: no)")


def _open(folder: Path, backend: Backend, data: bytes) -> tuple[Reader, SourceFile, int]:
    """The reader, a file whose last bytes are `data`, and where they begin."""
    path = write_file(folder / "m.safetensors", {"a": Raw("U8", (len(data),), data)})
    (file,) = find_files(folder, compile_plan(folder).head.files)
    return find_reader(backend), file, path.stat().st_size - len(data)


class TestWhatEndsALoad:
    @pytest.fixture
    def plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
        monkeypatch.setattr(execute, "_READ_NBYTES", 1000)
        write_file(tmp_path / "m.safetensors", {f"t{number}": raw("F32", 500) for number in range(20)})
        return compile_plan(tmp_path)

    @each_library
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_progress_raises(
        self, tmp_path: Path, plan: Plan, backend: Backend, threads: int, error: type[BaseException]
    ) -> None:
        def progress(done: int, total: int) -> None:
            raise error("stop")

        with nothing_left(), pytest.raises(error, match="stop"):
            load_state_dict(plan, tmp_path, threads=threads, progress=progress, backend=backend)

    @each_library
    def test_cancel(self, tmp_path: Path, plan: Plan, backend: Backend) -> None:
        files = find_files(tmp_path, plan.head.files)
        with nothing_left():
            loading = Execution(plan.head, plan.section(0), 0, files, threads=2, backend=backend).start()
            first = loading.wait([0])[0]
            loading.cancel()
        assert bytes_of(first) == raw("F32", 500).data

    @each_library
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            pytest.param(lambda path: os.utime(path, ns=(1, 1)), "was replaced or changed", id="written"),
            pytest.param(lambda path: os.truncate(path, path.stat().st_size - 4), "the plan expects", id="truncated"),
            pytest.param(Path.unlink, "cannot be opened", id="removed"),
        ],
    )
    def test_a_file_that_changed_meanwhile(
        self, tmp_path: Path, backend: Backend, change: Callable[[Path], None], says: str
    ) -> None:
        write_shards(tmp_path, {ONE: {"a": raw("F32", 4), "b": raw("F16", 3)}, TWO: {"c": raw("F32", 4)}})
        plan = compile_plan(tmp_path)
        files = find_files(tmp_path, plan.head.files)
        change(tmp_path / TWO)
        with nothing_left(), pytest.raises(FileMismatch, match=says) as caught:
            Execution(plan.head, plan.section(0), 0, files, threads=2, backend=backend).run()
        assert caught.value.name == TWO

    @each_library
    def test_environment_stays(self, tmp_path: Path, plan: Plan, backend: Backend) -> None:
        before = dict(os.environ)
        load(plan, tmp_path, backend)
        assert dict(os.environ) == before


class TestRefused:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        write_file(tmp_path / "m.safetensors", {"a": raw("F32", 2)})
        return compile_plan(tmp_path)

    @pytest.mark.parametrize("backend", LIBRARIES)
    @pytest.mark.parametrize("mode", ["map", "copy"])
    def test_modes_that_map(self, tmp_path: Path, plan: Plan, backend: Backend, mode: Mode) -> None:
        with pytest.raises(ModeError, match=f"mode='{mode}', backend='{backend}': this mode maps files"):
            load(plan, tmp_path, backend, mode=mode)

    @pytest.mark.parametrize("backend", ["", "RUNAI", None])
    def test_unknown(self, tmp_path: Path, plan: Plan, backend: Backend) -> None:
        with pytest.raises(ModeError, match="one of preadv, runai, fastsafetensors"):
            load(plan, tmp_path, backend)

    @pytest.mark.parametrize("backend", LIBRARIES)
    def test_not_installed(self, tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
        library = {"runai": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}[backend]
        monkeypatch.delitem(sys.modules, f"loadplan.runtime.read_with_{backend}", raising=False)
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(BackendError, match=rf"pip install 'loadplan\[{backend}\]', or use preadv"):
            load(plan, tmp_path, backend)
