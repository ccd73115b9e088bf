"""Checkpoint files that are not, or no longer, those of the plan: refused by name; whatever ends a load leaves nothing.

Thread names, `/proc/self/fd` and `/proc/self/maps` tell what is left.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from builders import Raw, bytes_of, filled, raw, write_file, write_shards
from hypothesis import given
from hypothesis import strategies as st

from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.target import Target
from loadplan.runtime import execute
from loadplan.runtime.execute import Execution, Mode
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.source_files import FileMismatch, ReadError, SourceFile, find_files, source_paths

MODES: tuple[Mode, ...] = ("auto", "read", "copy")
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class TestFileGuards:
    """Another file than the plan's is refused, by name, before anything is read from it."""

    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        shards = {ONE: {"a": raw("F32", 2), "b": raw("F32", 3)}, TWO: {"c": raw("F32", 3), "d": raw("F32", 2)}}
        write_shards(tmp_path, shards)
        return compile_plan(tmp_path)

    def refused(self, plan: Plan, folder: Path, says: str) -> FileMismatch:
        with pytest.raises(FileMismatch, match=says) as caught:
            load_state_dict(plan, folder)
        assert str(caught.value).startswith(f"{caught.value.name}: ")
        assert "restore the file, or compile the plan again" in str(caught.value)
        return caught.value

    def test_truncated(self, tmp_path: Path, plan: Plan) -> None:
        size = (tmp_path / TWO).stat().st_size
        os.truncate(tmp_path / TWO, size - 1)
        assert self.refused(plan, tmp_path, f"has {size - 1} bytes, the plan expects {size}").name == TWO
        os.truncate(tmp_path / TWO, 0)
        assert self.refused(plan, tmp_path, f"has 0 bytes, the plan expects {size}").name == TWO

    def test_extended(self, tmp_path: Path, plan: Plan) -> None:
        with (tmp_path / ONE).open("ab") as file:
            file.write(b"\0")
        assert self.refused(plan, tmp_path, "bytes, the plan expects").name == ONE

    def test_another_header(self, tmp_path: Path, plan: Plan) -> None:
        size = (tmp_path / ONE).stat().st_size
        write_file(tmp_path / ONE, {"a": raw("F32", 2), "x": raw("F32", 3)})
        assert (tmp_path / ONE).stat().st_size == size
        assert self.refused(plan, tmp_path, "its header is not the one").name == ONE

    def test_swapped(self, tmp_path: Path, plan: Plan) -> None:
        assert (tmp_path / ONE).stat().st_size == (tmp_path / TWO).stat().st_size
        (tmp_path / ONE).rename(tmp_path / "aside")
        (tmp_path / TWO).rename(tmp_path / ONE)
        (tmp_path / "aside").rename(tmp_path / TWO)
        assert self.refused(plan, tmp_path, "its header is not the one").name == ONE

    def test_missing(self, tmp_path: Path, plan: Plan) -> None:
        (tmp_path / TWO).unlink()
        assert self.refused(plan, tmp_path, "cannot be opened .No such file").name == TWO
        (tmp_path / TWO).symlink_to(tmp_path / "nowhere")
        assert self.refused(plan, tmp_path, "cannot be opened .No such file").name == TWO

    def test_a_folder(self, tmp_path: Path, plan: Plan) -> None:
        (tmp_path / TWO).unlink()
        (tmp_path / TWO).mkdir()
        assert self.refused(plan, tmp_path, "is no file").name == TWO

    def test_another_single_file(self, tmp_path: Path) -> None:
        plan = compile_plan(write_file(tmp_path / "m.safetensors", {"a": raw("F32", 2)}))
        write_file(tmp_path / "other", {"a": raw("F16", 4)})
        assert self.refused(plan, tmp_path / "other", "its header is not the one").name == "m.safetensors"

    def test_other_data_is_loaded(self, tmp_path: Path, plan: Plan) -> None:
        """A plan is for a layout: new values under the same header load."""
        write_file(tmp_path / ONE, {"a": raw("F32", 2, seed=1), "b": raw("F32", 3)})
        assert bytes_of(load_state_dict(plan, tmp_path)["a"]) == raw("F32", 2, seed=1).data

    def test_torch_file_with_another_pickle(self, tmp_path: Path) -> None:
        """All bytes around the storages are guarded, also behind the data."""
        path = tmp_path / "model.pt"
        torch.save({"w": torch.arange(3.0)}, path)
        plan = compile_plan(path)
        data = path.read_bytes()
        for place in (60, len(data) - 30):
            changed = bytearray(data)
            changed[place] ^= 1
            path.write_bytes(changed)
            assert self.refused(plan, path, "its header is not the one").name == "model.pt"
        path.write_bytes(data)
        assert load_state_dict(plan, path)["w"].tolist() == [0, 1, 2]


def _replace(path: Path) -> None:
    """Another file with the same bytes in its place."""
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


def _touch(path: Path) -> None:
    """As if it was written in place."""
    os.utime(path, ns=(1, 1))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


CHANGES = [
    pytest.param(_replace, "was replaced or changed", id="replaced"),
    pytest.param(_touch, "was replaced or changed", id="written"),
    pytest.param(_truncate, "the plan expects", id="truncated"),
    pytest.param(Path.unlink, "cannot be opened", id="removed"),
]


class TestChangedMeanwhile:
    """Between the check and the read."""

    @pytest.mark.parametrize(("change", "says"), CHANGES)
    def test_source_file(self, tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
        path = write_file(tmp_path / "m.safetensors", {"w": raw("F32", 4)})
        (expected,) = compile_plan(tmp_path).head.files
        file = SourceFile(path, expected)
        change(path)
        with pytest.raises(FileMismatch, match=says) as caught, file.open():
            pass
        assert caught.value.name == "m.safetensors"
        with pytest.raises(FileMismatch, match=says):
            file.map()

    def test_a_new_link_is_no_change(self, tmp_path: Path) -> None:
        """A cache lays the same file into another folder while it is read; what is written is seen all the same."""
        path = write_file(tmp_path / "m.safetensors", {"w": raw("F32", 4)})
        (expected,) = compile_plan(tmp_path).head.files
        file = SourceFile(path, expected)
        (tmp_path / "link").hardlink_to(path)
        assert bytes(file.map()) == path.read_bytes()
        (tmp_path / "link").write_bytes(path.read_bytes())
        with pytest.raises(FileMismatch, match="was replaced or changed"), file.open():
            pass

    @pytest.mark.parametrize(("change", "says"), CHANGES)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("threads", [1, 4])
    def test_execution(
        self, tmp_path: Path, change: Callable[[Path], None], says: str, mode: Mode, threads: int
    ) -> None:
        shards = {ONE: {"a": raw("F32", 4), "b": raw("F16", 3)}, TWO: {"c": raw("F32", 4), "d": raw("U8", 3)}}
        write_shards(tmp_path, shards)
        plan = compile_plan(tmp_path, target=Target(dtype="bfloat16"))
        files = find_files(tmp_path, plan.head.files)
        change(tmp_path / TWO)
        with nothing_left(), pytest.raises(FileMismatch, match=says) as caught:
            Execution(plan.head, plan.section(0), 0, files, mode, threads).run()
        assert caught.value.name == TWO

    def test_ends_while_it_is_read(self, tmp_path: Path) -> None:
        path = write_file(tmp_path / "m.safetensors", {"w": raw("F32", 4)})
        file = SourceFile(path, compile_plan(tmp_path).head.files[0])
        size = path.stat().st_size
        with file.open() as descriptor:
            os.truncate(path, size - 4)
            with pytest.raises(FileMismatch, match=f"ends at byte {size - 4}"):
                file.read_into(descriptor, [memoryview(bytearray(16))], size - 16)

    def test_reads_into_many_views(self, tmp_path: Path) -> None:
        path = write_file(tmp_path / "m.safetensors", {"w": raw("U8", 30)})
        file = SourceFile(path, compile_plan(tmp_path).head.files[0])
        parts = [bytearray(size) for size in (1, 20, 2, 7)]
        with file.open() as descriptor:
            file.read_into(descriptor, [memoryview(part) for part in parts], path.stat().st_size - 30)
        assert b"".join(parts) == raw("U8", 30).data


def open_descriptors() -> set[str]:
    return {link for link in map(_target, Path("/proc/self/fd").iterdir()) if link}


def _target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # the one that lists the folder
        return ""


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread of a load and no file stays behind."""
    before = open_descriptors()
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loadplan")] == []
    assert {link for link in open_descriptors() - before if link.startswith("/") and "safetensors" in link} == set()


class TestNothingIsLeft:
    """B76."""

    @pytest.fixture
    def plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
        monkeypatch.setattr(execute, "_READ_NBYTES", 1000)
        write_file(tmp_path / "m.safetensors", {f"t{number}": raw("F32", 500) for number in range(20)})
        return compile_plan(tmp_path)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
    @pytest.mark.parametrize("threads", [1, 2, 8])
    @pytest.mark.parametrize("mode", ["read", "copy"])
    def test_progress_raises(
        self, tmp_path: Path, plan: Plan, mode: Mode, threads: int, error: type[BaseException]
    ) -> None:
        calls = 0

        def progress(done: int, total: int) -> None:
            nonlocal calls
            calls += 1
            raise error("stop")

        with nothing_left(), pytest.raises(error, match="stop"):
            load_state_dict(plan, tmp_path, mode=mode, threads=threads, progress=progress)
        assert calls == 1
        with nothing_left():
            loaded = load_state_dict(plan, tmp_path, mode=mode, threads=threads)
        assert {bytes_of(tensor) for tensor in loaded.values()} == {raw("F32", 500).data}

    @pytest.mark.parametrize("mode", [*MODES, "map"])
    def test_after_success(self, tmp_path: Path, plan: Plan, mode: Mode) -> None:
        """Also while the tensors are there: mapped files need no descriptor."""
        with nothing_left():
            loaded = load_state_dict(plan, tmp_path, mode=mode)
        assert len(loaded) == 20

    def test_maps_end_with_their_tensors(self, tmp_path: Path, plan: Plan) -> None:
        def maps() -> int:
            return Path("/proc/self/maps").read_text().count(str(tmp_path / "m.safetensors"))

        loaded = load_state_dict(plan, tmp_path, mode="map")
        kept = loaded.popitem()[1]
        assert maps() == 1
        loaded.clear()
        assert maps() == 1
        del kept
        assert maps() == 0

    @pytest.mark.parametrize("mode", [*MODES, "map"])
    def test_more_files_than_descriptors(self, tmp_path: Path, mode: Mode) -> None:
        shards = {f"m-{number}.safetensors": {f"t{number}": filled(number, 4)} for number in range(300)}
        plan = compile_plan(write_shards(tmp_path, shards))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            loaded = load_state_dict(plan, tmp_path, mode=mode, threads=4)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
            f"t{number}": [number] * 4 for number in range(300)
        }


@pytest.mark.parametrize("way", ["read_into", "scatter"])
def test_a_read_that_fails_names_file_and_offset(tmp_path: Path, way: str) -> None:
    path = write_file(tmp_path / "m.safetensors", {"a": raw("F32", 2)})
    (file,) = find_files(tmp_path, compile_plan(tmp_path).head.files)
    memory = bytearray(8)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    descriptor = os.open(path, os.O_WRONLY)
    try:
        with pytest.raises(ReadError) as caught:
            if way == "scatter":
                file.scatter(descriptor, array("Q", [address, 8]), 24)
            else:
                file.read_into(descriptor, [memoryview(memory)], 24)
    finally:
        os.close(descriptor)
    assert str(caught.value).startswith("m.safetensors: cannot be read at byte 24 (Bad file descriptor)")


@given(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=30), limit=st.integers(1, 500))
def test_scatter(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int) -> None:
    """Any number of places; a file that ends before they are full is refused, not taken for whole."""
    folder = tmp_path_factory.mktemp("scatter")
    data = os.urandom(sum(sizes))
    write_file(folder / "m.safetensors", {"a": Raw("U8", (len(data),), data)})
    plan = compile_plan(folder)
    (file,) = find_files(folder, plan.head.files)
    start = plan.section(0).copies[0].src
    memory = bytearray(len(data))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    places = array("Q")
    at = 0
    for nbytes in sizes:
        places.extend((address + at, nbytes))
        at += nbytes
    with file.open() as descriptor:
        file.scatter(descriptor, places, start)
        assert bytes(memory) == data
        with pytest.raises(FileMismatch, match="ends at byte"):
            file.scatter(descriptor, array("Q", [address, len(data)]), start + min(limit, len(data)))


def test_a_file_that_changed_meanwhile(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", {"a": raw("F32", 2)})
    (file,) = find_files(tmp_path, compile_plan(tmp_path).head.files)
    file.check_unchanged()
    os.utime(path, ns=(1, 1))
    with pytest.raises(FileMismatch, match="was replaced or changed while it was being loaded"):
        file.check_unchanged()


def test_paths_are_those_of_the_files_that_are_found(tmp_path: Path) -> None:
    """By folder, by index, by one file, and by the only file under another name."""
    write_shards(tmp_path / "two", {ONE: {"a": raw("F32", 2)}, TWO: {"b": raw("F32", 3)}})
    expected = compile_plan(tmp_path / "two").head.files
    paths = {name: tmp_path / "two" / name for name in (ONE, TWO)}
    for location in (tmp_path / "two", tmp_path / "two" / ONE, tmp_path / "two" / "model.safetensors.index.json"):
        assert source_paths(location, expected) == paths
        assert [file.name for file in find_files(location, expected)] == list(paths)
    only = write_file(tmp_path / "only.safetensors", {"a": raw("F32", 2)})
    expected = compile_plan(only).head.files
    only.rename(tmp_path / "renamed.safetensors")
    assert source_paths(tmp_path / "renamed.safetensors", expected) == {
        "only.safetensors": tmp_path / "renamed.safetensors"
    }
    assert len(find_files(tmp_path / "renamed.safetensors", expected)) == 1
