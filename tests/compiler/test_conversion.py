"""Converted files: what is in them, what plans share of them, and that they depend on nothing but their tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import safetensors.torch
import torch
from builders import Raw, bytes_of, raw, write_file
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.compiler import Target, compile_plan, convert
from loadplan.compiler.file_groups import first_byte, group_files, is_whole, layer_of
from loadplan.recipes import Recipe
from loadplan.runtime import FileMismatch, load_state_dict
from loadplan.runtime.artifact import Artifact
from loadplan.runtime.dtype import DType
from loadplan.runtime.plan import Head, PlanTensor
from loadplan.runtime.tensor_type import TensorType

RECIPE = Recipe(
    tp_plan={"layers.*.up.weight": "colwise", "layers.*.up.bias": "colwise", "layers.*.down.weight": "rowwise"}
)
LAYERS = 4
ALONE = 1 << 10  # bytes; matrices of the model below have 2,048, vectors less than 130


def model(**changes: int) -> dict[str, Raw]:
    """A decoder with a matrix that is cut by rows and one by columns in each layer; `changes`: name -> seed."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (24, 32), "norm.weight": (32,)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.up.weight": (32, 32), f"layers.{layer}.up.bias": (32,)}
        shapes |= {f"layers.{layer}.down.weight": (32, 32), f"layers.{layer}.norm.weight": (32,)}
    return {name: raw("BF16", *shape, seed=changes.get(name, i)) for i, (name, shape) in enumerate(shapes.items())}


def converted(tmp_path: Path, tensors: Mapping[str, Raw], size: int, name: str = "m", alone: int = ALONE) -> Artifact:
    folder = write_file(tmp_path / name / "model.safetensors", tensors).parent
    plan = compile_plan(folder, RECIPE, target=Target(tp_size=size))
    return convert(plan, folder, tmp_path / f"{name}-tp{size}", alone_nbytes=alone)


def digests(artifact: Artifact) -> dict[str, int]:
    """SHA-256 of each weight file, read from disk, and its size."""
    files = sorted(artifact.folder.glob("*.safetensors"))
    return {hashlib.sha256(path.read_bytes()).hexdigest(): path.stat().st_size for path in files}


def cut(name: str, tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The ranks' parts by torch."""
    if ".up." in name:
        return tensor.chunk(size, 0)
    return tensor.chunk(size, 1) if ".down." in name else (tensor,) * size


@pytest.mark.parametrize("alone", [0, ALONE, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_ranks_map_what_torch_cuts(tmp_path: Path, size: int, alone: int) -> None:
    tensors = model()
    artifact = converted(tmp_path, tensors, size, alone=alone)
    source = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    for rank, mode in product(range(size), ("map", "read")):
        loaded = load_state_dict(artifact, rank=rank, mode=mode)  # type: ignore[arg-type]
        assert loaded.keys() == source.keys()
        for name, tensor in source.items():
            assert bytes_of(loaded[name]) == bytes_of(cut(name, tensor, size)[rank].contiguous()), name
            assert loaded[name].shape == cut(name, tensor, size)[rank].shape


@pytest.mark.parametrize("size", [1, 2, 4])
def test_other_tools_read_the_files_by_the_index(tmp_path: Path, size: int) -> None:
    artifact = converted(tmp_path, model(), size)
    source = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    for rank in range(size):
        stem = "model" if size == 1 else f"rank-{rank}-of-{size}"
        index = json.loads((artifact.folder / f"{stem}.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == source.keys()
        files = {file: safetensors.torch.load_file(artifact.folder / file) for file in index["weight_map"].values()}
        assert index["metadata"]["total_size"] == sum(
            len(bytes_of(t)) for file in files.values() for t in file.values()
        )
        slices = index["metadata"].get("slices", {})
        assert set(slices) == ({name for name in source if ".up." in name} if size > 1 else set())
        for name, file in index["weight_map"].items():
            tensor = files[file][name]
            if name in slices:
                dim, low, high = slices[name]
                tensor = tensor.narrow(dim, low, high - low)
            wanted = cut(name, source[name], size)[rank]
            assert (tensor.shape, bytes_of(tensor)) == (wanted.shape, bytes_of(wanted))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_data_is_aligned_and_files_are_complete(tmp_path: Path, size: int) -> None:
    artifact = converted(tmp_path, model(), size)
    assert {path.name for path in artifact.folder.iterdir()} == artifact.files.keys()
    assert all(path == artifact.folder / name for name, path in artifact.files.items())
    for file in artifact.plan.head.files:
        data = (artifact.folder / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.content_digest)
        assert (8 + int.from_bytes(data[:8], "little")) % 4096 == 0


def test_stored_bytes_of_three_sizes_and_a_fine_tune(tmp_path: Path) -> None:
    """To the byte what the structure of the model allows, counted by hand."""
    changed = {"layers.1.up.weight": 1001, "layers.3.down.weight": 1002}  # of 18 tensors
    artifacts = [converted(tmp_path, model(), size) for size in (1, 2, 4)]
    artifacts += [converted(tmp_path, model(**changed), size, "tuned") for size in (1, 2)]
    stored = {digest: size for artifact in artifacts for digest, size in digests(artifact).items()}

    header, matrix = 4096, 32 * 32 * 2
    vectors = LAYERS * (header + 2 * 32 * 2) + header + 32 * 2  # a file a layer and one for the rest; the same for all
    up, down = LAYERS * (header + matrix), LAYERS * (header + matrix)  # `up` is the same for all sizes
    embedding = header + 24 * 32 * 2
    slices = LAYERS * (2 * header + matrix) + LAYERS * (4 * header + matrix)  # `down` for tp2 and tp4
    tuned = 2 * (header + matrix) + (2 * header + matrix)  # up, down, and down for tp2
    assert sum(stored.values()) == vectors + up + down + embedding + slices + tuned


def test_files_depend_on_their_tensors_alone(tmp_path: Path) -> None:
    """Not on the checkpoint's files, other tensors, folders, or dtypes elsewhere (cases B78)."""
    tensors = model()
    first = digests(converted(tmp_path, tensors, 1))
    again = digests(converted(tmp_path / "elsewhere", dict(reversed(tensors.items())), 1, "other"))
    assert first == again
    wider = digests(converted(tmp_path, tensors | {"layers.0.extra.weight": raw("F32", 32, 32)}, 1, "wider"))
    assert len(wider.keys() - first.keys()) == 1
    assert not first.keys() - wider.keys()


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({}, False),
        ({"layers.0.norm.weight": raw("BF16", 32, seed=99)}, True),  # data
        ({"layers.0.norm.weight": raw("F16", 32, seed=99)}, True),  # dtype
        ({"layers.0.norm.weight": raw("BF16", 16, seed=99)}, True),  # shape
        ({"layers.0.scale.weight": raw("BF16", 32, seed=99)}, True),  # one more
    ],
)
def test_each_property_of_a_tensor_counts(tmp_path: Path, change: dict[str, Raw], is_another: bool) -> None:
    """Cases B77, one file of a layer's vectors at a time."""
    first = digests(converted(tmp_path, model(), 1))
    second = digests(converted(tmp_path, model() | change, 1, "changed"))
    assert len(second.keys() - first.keys()) == (1 if is_another else 0)


def test_no_path_inside(tmp_path: Path) -> None:
    """Nor the user's name, nor the time: byte for byte the same wherever it is made (cases B78)."""
    one = converted(tmp_path, model(), 2)
    two = converted(tmp_path / "other", model(), 2, "elsewhere")
    assert one.files.keys() == two.files.keys()
    for name, path in one.files.items():
        assert path.read_bytes() == two.files[name].read_bytes()
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.parametrize("batch_nbytes", [1, 1 << 20])
@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_rewritten_meanwhile(
    tmp_path: Path, size: int, batch_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases B82: old and new values together are refused, whenever they were read; nothing is left."""
    folder = write_file(tmp_path / "m" / "model.safetensors", model()).parent
    plan = compile_plan(folder, RECIPE, target=Target(tp_size=size))
    other = write_file(tmp_path / "new.safetensors", model(**{"embed.weight": 77})).read_bytes()

    def rewrite(done: int, total: int) -> None:
        if done < total:
            (folder / "model.safetensors").write_bytes(other)

    monkeypatch.setattr("loadplan.compiler.conversion._BATCH_NBYTES", batch_nbytes)
    with pytest.raises(FileMismatch, match="replaced or changed"):
        convert(plan, folder, tmp_path / "out", rewrite, alone_nbytes=ALONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "new.safetensors"]
    loaded = load_state_dict(convert(plan, folder, tmp_path / "out", alone_nbytes=ALONE))
    assert bytes_of(loaded["embed.weight"]) == model(**{"embed.weight": 77})["embed.weight"].data


def test_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digests(converted(tmp_path, model(), 4))
    monkeypatch.setattr("loadplan.compiler.conversion._BATCH_NBYTES", 2500)
    assert digests(converted(tmp_path / "again", model(), 4)) == whole


def test_a_rank_needs_its_own_files_only(tmp_path: Path) -> None:
    artifact = converted(tmp_path, model(), 2)
    whole = load_state_dict(artifact, rank=0)
    for path in artifact.folder.glob("rank-1-*.safetensors"):
        path.unlink()
    assert {name: bytes_of(t) for name, t in load_state_dict(artifact, rank=0).items()} == {
        name: bytes_of(t) for name, t in whole.items()
    }
    with pytest.raises(FileMismatch, match="rank-1-of-2"):
        load_state_dict(artifact, rank=1)


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    artifact = converted(tmp_path, model(), 1, alone=1 << 20)
    assert [file.name for file in artifact.plan.head.files] == ["model.safetensors"]
    assert not list(artifact.folder.glob("*.json"))


def test_layers() -> None:
    assert layer_of("model.layers.3.mlp.experts.17.w") == "model.layers.3"
    assert layer_of("model.norm.weight") == ""
    assert layer_of("0.weight") == "0"


INTERVALS = st.integers(1, 4).flatmap(
    lambda ranks: st.lists(st.integers(0, ranks - 1), min_size=1, max_size=8).map(lambda owners: (ranks, owners))
)


@settings(max_examples=300)
@given(INTERVALS, st.integers(0, 2), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.sampled_from(DType))
def test_whole_tensors_are_those_of_which_each_rank_has_one_stretch(
    owned: tuple[int, list[int]], dim: int, sizes: list[int], dtype: DType
) -> None:
    """Against bytes numbered one by one."""
    ranks, owners = owned
    shape = (*sizes[:dim], len(owners), *sizes[dim + 1 :])
    intervals = tuple(tuple((i, i + 1) for i, owner in enumerate(owners) if owner == rank) for rank in range(ranks))
    tensor = PlanTensor("t", TensorType(shape, dtype), dim, intervals)
    bits = torch.arange(tensor.type.numel * dtype.bits).reshape(*shape, dtype.bits)
    for rank in range(ranks):
        own = bits.index_select(dim, torch.tensor([low for low, _ in intervals[rank]], dtype=torch.int64)).flatten()
        if own.numel() and is_whole(tensor, ranks):
            assert torch.equal(own, torch.arange(int(own[0]), int(own[0]) + own.numel()))
            assert own[0] == first_byte(tensor, rank) * 8
    assert not is_whole(tensor, 9)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["a", "b.0.x", "b.0.y", "b.1.x"]), st.integers(1, 600)), max_size=9))
def test_each_tensor_is_in_one_file(found: list[tuple[str, int]]) -> None:
    kinds = [TensorType((size,) if size % 2 else (size, 1), DType.U8) for _, size in found]
    tensors = tuple(
        PlanTensor(f"{name}.{i:03}w", kind) for i, ((name, _), kind) in enumerate(zip(found, kinds, strict=True))
    )
    groups = group_files(Head((), tensors, (), (), (), 1), 512)
    assert sorted(number for group in groups for number in group.numbers) == list(range(len(tensors)))
    assert len({group.name for group in groups}) == len(groups)
    total = sum(kind.nbytes for kind in kinds)
    for group in groups:
        assert total < 512 or len(group.numbers) == 1 or all(kinds[number].nbytes < 512 for number in group.numbers)
