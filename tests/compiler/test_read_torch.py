"""Torch files: published ones and ones saved here, against `torch.load(weights_only=True)`, tensor by tensor.

The published ones are those of the burn project (tests/data/burn-pt), twelve of which it also holds as safetensors
files with the same tensors.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builders import bytes_of, rewrite_zip
from hypothesis import given
from hypothesis import strategies as st

from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.problem import CheckpointError
from loadplan.compiler.read_torch import read_torch
from loadplan.runtime.dtype import DType
from loadplan.runtime.execute import Mode
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.torch_types import torch_dtype

DATA = Path(__file__).parent.parent / "data"
PUBLISHED = sorted((DATA / "burn-pt").glob("*.pt"))
OLD = {"legacy_shared_storage", "legacy_uncloned_views", "legacy_with_offsets", "simple_legacy", "broken"}
ZIPPED = [path for path in PUBLISHED if path.stem not in OLD]
TWINS = [  # tests/data/burn-safetensors/SOURCE.txt
    "batch_norm2d",
    "boolean",
    "buffer",
    "conv1d",
    "conv_transpose1d",
    "embedding",
    "enum_depthwise_false",
    "enum_depthwise_true",
    "group_norm",
    "integer",
    "layer_norm",
    "non_contiguous_indexes",
]
MODES: tuple[Mode, ...] = ("auto", "read", "copy")


def flat(value: object, *path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts, names joined by dots."""
    if isinstance(value, torch.Tensor):
        yield ".".join(path), value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, *path, str(key))


def wanted(path: Path) -> dict[str, torch.Tensor]:
    return dict(flat(torch.load(path, weights_only=True)))


def entries(path: Path) -> dict[str, Entry]:
    return {entry.name: entry for entry in read_torch(path, name=path.name)[1]}


def check(path: Path) -> None:
    """Types and bytes are those that torch loads."""
    reference = wanted(path)
    found = entries(path)
    assert found.keys() == reference.keys()
    for name, tensor in reference.items():
        kind = found[name].type
        assert (kind.shape, torch_dtype(kind.dtype)) == (tuple(tensor.shape), tensor.dtype), name
    plan = compile_plan(path)
    for mode in MODES:
        loaded = load_state_dict(plan, path, mode=mode)
        assert loaded.keys() == reference.keys()
        for name, tensor in reference.items():
            assert (loaded[name].shape, loaded[name].dtype) == (tensor.shape, tensor.dtype), (mode, name)
            assert bytes_of(loaded[name]) == bytes_of(tensor), (mode, name)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_torch(path, name=path.name)
    (problem,) = caught.value.problems
    assert problem.message.startswith(f"{path.name}: ")
    assert problem.names[0] == path.name
    return problem.message


def save(folder: Path, content: object) -> Path:
    path = folder / "model.pt"
    torch.save(content, path)
    return path


@pytest.mark.parametrize("path", ZIPPED, ids=lambda path: path.stem)
def test_published(path: Path) -> None:
    check(path)


def test_published_are_all_there() -> None:
    assert len(ZIPPED) == 51
    assert {path.stem for path in PUBLISHED} - {path.stem for path in ZIPPED} == OLD


@pytest.mark.parametrize("stem", sorted(OLD))
def test_older_and_broken(stem: str) -> None:
    assert "is not a zip file" in refused(DATA / "burn-pt" / f"{stem}.pt")


@pytest.mark.parametrize("stem", TWINS)
def test_twins(stem: str) -> None:
    ours, theirs = DATA / "burn-pt" / f"{stem}.pt", DATA / "burn-safetensors" / f"{stem}.safetensors"
    left, right = (load_state_dict(compile_plan(path), path) for path in (ours, theirs))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.shape, tensor.dtype) == (right[name].shape, right[name].dtype)
        assert bytes_of(tensor) == bytes_of(right[name])


@pytest.mark.parametrize("dtype", sorted({torch_dtype(dtype) for dtype in DType}, key=str), ids=str)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every dtype that loadplan and torch share, as this torch writes it: dense, strided, 0-d and empty."""
    whole = torch.arange(96, dtype=torch.uint8).view(dtype).reshape(2, -1) if dtype != torch.bool else torch.eye(4) > 0
    check(save(tmp_path, {"whole": whole, "turned": whole.T, "one": whole[1, 0], "none": whole[:, :0]}))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"a": {"b": {"c": torch.arange(3)}, "d": torch.zeros(())}, "e": torch.ones(1)}, id="nested"),
        pytest.param({0: torch.arange(3), 1: {2: torch.arange(2)}}, id="numbered"),
        pytest.param({"p": torch.nn.Parameter(torch.arange(4.0))}, id="parameter"),
        pytest.param({"x": torch.arange(3.0).expand(4, 3)}, id="expanded"),
        pytest.param({"x": torch.arange(3.0)[:, None].expand(3, 4)}, id="expanded-inside"),
        pytest.param({"x": torch.zeros(()).expand(2, 3)}, id="expanded-scalar"),
        pytest.param({"x": torch.arange(60).reshape(3, 4, 5).permute(2, 0, 1)}, id="permuted"),
        pytest.param({"x": torch.arange(60).reshape(6, 10)[1:5:2, 2:9:3]}, id="strided"),
        pytest.param({"x": torch.arange(20).as_strided((4, 3), (2, 1), 1)}, id="overlapping"),
        pytest.param({"x": torch.arange(6).as_strided((1, 3), (77, 2))}, id="odd-stride-of-one"),
        pytest.param({"x": torch.zeros(0), "y": torch.zeros(0, 4), "z": torch.zeros(3, 0, 2)}, id="empty"),
        pytest.param({"x": torch.arange(4)[4:]}, id="empty-view"),
        pytest.param({"x": torch.arange(10)[3:4], "y": torch.tensor(7)}, id="single"),
    ],
)
def test_layouts(tmp_path: Path, content: object) -> None:
    check(save(tmp_path, content))


def test_shared_storages(tmp_path: Path) -> None:
    """B60: disjoint and overlapping views of one storage come as independent tensors."""
    base = torch.arange(12.0)
    path = save(tmp_path, {"base": base, "head": base[:4], "tail": base[8:], "over": base[2:10], "again": base})
    check(path)
    for mode in ("read", "copy"):
        loaded = load_state_dict(compile_plan(path), path, mode=mode)
        loaded["base"].zero_()
        assert loaded["over"].tolist() == base[2:10].tolist()
        assert loaded["head"].tolist() == base[:4].tolist()


def test_what_else_is_in_it(tmp_path: Path) -> None:
    path = save(tmp_path, {"w": torch.zeros(2), "epoch": 3, "note": "x", "more": [1], "deep": {"lr": 0.1}})
    check(path)
    _, _, notes = read_torch(path, name="model.pt")
    assert notes == ("model.pt: 4 values besides tensors are left out: epoch, note, more, deep.lr",)


def test_no_data_is_needed(tmp_path: Path) -> None:
    """Entries and guards depend on nothing but the bytes around the storages."""
    path = save(tmp_path, {"w": torch.arange(6.0), "v": torch.arange(9)})
    before = read_torch(path, name="model.pt")
    data = bytearray(path.read_bytes())
    for entry in before[1]:
        data[entry.offset : entry.offset + entry.type.nbytes] = bytes(entry.type.nbytes)
    path.write_bytes(data)
    assert read_torch(path, name="model.pt") == before
    inside = sum(nbytes for _, nbytes in before[0].guards)
    assert inside + sum(entry.type.nbytes for entry in before[1]) == before[0].size


@pytest.mark.parametrize("location", ["cuda:0", "mps", "xpu:3"])
def test_saved_on_another_device(tmp_path: Path, location: str) -> None:
    cpu, other = (b"X" + len(text).to_bytes(4, "little") + text for text in (b"cpu", location.encode()))
    plain = save(tmp_path, {"w": torch.arange(6.0)})
    moved = rewrite_zip(plain, tmp_path / "moved.pt", lambda name, data: data.replace(cpu, other))
    assert location.encode() in moved.read_bytes()
    loaded = load_state_dict(compile_plan(moved), moved)
    assert loaded["w"].tolist() == [0, 1, 2, 3, 4, 5]


class TestRefused:
    @pytest.mark.parametrize(
        "content", [torch.zeros(2), [torch.zeros(2)], 3, None], ids=["tensor", "list", "3", "none"]
    )
    def test_no_dict(self, tmp_path: Path, content: object) -> None:
        assert f"holds a {type(content).__name__}, a dict of tensors belongs there" in refused(save(tmp_path, content))

    @pytest.mark.parametrize(
        "tensor",
        [
            pytest.param(torch.zeros(2, dtype=torch.complex128), id="complex128"),
            pytest.param(torch.eye(2).to_sparse(), id="sparse"),
            pytest.param(torch.complex(torch.ones(2), torch.ones(2)).conj(), id="conjugate"),
            pytest.param(torch.zeros(2, device="meta"), id="meta"),
        ],
    )
    def test_what_cannot_be_planned(self, tmp_path: Path, tensor: torch.Tensor) -> None:
        assert "'deep.w'" in refused(save(tmp_path, {"deep": {"w": tensor}}))

    def test_two_of_one_name(self, tmp_path: Path) -> None:
        path = save(tmp_path, {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})
        assert "two tensors are called 'a.b'" in refused(path)

    def test_no_unicode(self, tmp_path: Path) -> None:
        assert "lone surrogate" in refused(save(tmp_path, {"\ud800": torch.zeros(1)}))

    def test_compressed(self, tmp_path: Path) -> None:
        """torch loads it; but the bytes in the file are not the tensors'."""
        path = save(tmp_path, {"w": torch.zeros(100)})
        rewrite_zip(path, tmp_path / "small.pt", compression=zipfile.ZIP_DEFLATED)
        assert "is compressed" in refused(tmp_path / "small.pt")

    @pytest.mark.parametrize("record", ["byteorder", "BYTEORDER"])
    def test_big_endian(self, tmp_path: Path, record: str) -> None:
        path = save(tmp_path, {"w": torch.arange(3.0)})
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "big.pt", "w") as new:
            for name in old.namelist():
                front, _, last = name.rpartition("/")
                if last == "byteorder":
                    new.writestr(f"{front}/{record}", b"big")
                else:
                    new.writestr(name, old.read(name))
        assert "big-endian" in refused(tmp_path / "big.pt")

    def test_storage_larger_than_its_record(self, tmp_path: Path) -> None:
        """The pickle says 1,000 elements; the file is long enough, the record is not."""
        path = save(tmp_path, {"w": torch.zeros(1000), "z": torch.ones(1000)})
        path = rewrite_zip(
            path, tmp_path / "short.pt", lambda name, data: data[:400] if name.endswith("data/0") else data
        )
        assert "'w' reaches past" in refused(path)

    def test_contains_itself(self, tmp_path: Path) -> None:
        content: dict[str, object] = {"w": torch.zeros(1)}
        content["self"] = content
        assert "cannot be read as a torch file" in refused(save(tmp_path, content))

    def test_torchscript(self, tmp_path: Path) -> None:
        """A zip of another kind."""
        with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
            file.writestr("model/code/__torch__.py", "pass")
        refused(tmp_path / "model.pt")

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert "No such file" in refused(tmp_path / "none.pt")
        assert "Is a directory" in refused(tmp_path)


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


class Call:
    """Unpickled, it calls `exec`."""

    def __init__(self, path: Path) -> None:
        self.code = f"open({str(path)!r}, 'w').close()"

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (self.code,)


@pytest.mark.parametrize("payload", [Payload, Call])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_code_is_not_run(tmp_path: Path, payload: type[Payload | Call], zipped: bool) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(1), "x": payload(mark)}, path, _use_new_zipfile_serialization=zipped)
    message = refused(path)
    assert not mark.exists()
    if zipped:
        assert "does not load with weights_only" in message
    torch.load(path, weights_only=False)
    assert mark.exists()  # so the payload would have worked


def test_plain_pickle_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Call(mark)}))
    assert "is not a zip file" in refused(tmp_path / "pytorch_model.bin")
    assert not mark.exists()


def _sample() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "deep": {"v": torch.arange(3)[1:]}}, buffer)
    return buffer.getvalue()


SAMPLE = _sample()
with zipfile.ZipFile(io.BytesIO(SAMPLE)) as _archive:
    PICKLE = next(name for name in _archive.namelist() if name.endswith("data.pkl"))
    PICKLED = _archive.read(PICKLE)


def read_or_refuse(path: Path) -> None:
    """Only CheckpointError; whatever is read lies inside the file."""
    try:
        file, found, _ = read_torch(path, name="model.pt")
    except CheckpointError as error:
        assert all(problem.message.startswith("model.pt: ") for problem in error.problems)
        return
    for entry in found:
        assert entry.offset >= 0
        if entry.type.numel and entry.strides is None:
            assert entry.offset + entry.type.nbytes <= file.size


@pytest.mark.parametrize("length", [*range(0, len(SAMPLE), 41), len(SAMPLE) - 1])
def test_truncated(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.pt").write_bytes(SAMPLE[:length])
    refused(tmp_path / "model.pt")


@given(edits=st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for place, byte in edits:
        data[place] = byte
    (tmp_path / "model.pt").write_bytes(data)
    read_or_refuse(tmp_path / "model.pt")


@given(
    edits=st.lists(st.tuples(st.integers(0, len(PICKLED) - 1), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, len(PICKLED)) | st.just(len(PICKLED)),
)
def test_any_pickle(tmp_path: Path, edits: list[tuple[int, int]], cut: int) -> None:
    """Damage under a right checksum: the zip is sound, its pickle is not."""
    data = bytearray(PICKLED)
    for place, byte in edits:
        data[place] = byte
    (tmp_path / "sample.pt").write_bytes(SAMPLE)
    rewrite_zip(
        tmp_path / "sample.pt", tmp_path / "model.pt", lambda name, old: bytes(data[:cut]) if name == PICKLE else old
    )
    read_or_refuse(tmp_path / "model.pt")
