"""Folders of checkpoint files: what is read, what is left out with a note, and what is refused rather than guessed.

Entries are compared with what the safetensors library sees in the same files. F rows are those of the list of malformed
inputs, B rows those of public bug reports (B61, B65, B66, B68).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import torch
from builders import Raw, filled, raw, write_file, write_index, write_shards
from hypothesis import given
from hypothesis import strategies as st

from loadplan.compiler.checkpoint import Checkpoint
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.problem import CheckpointError, Problem
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.location import LocationError

DATA = Path(__file__).parent.parent / "data"
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS: Mapping[str, Mapping[str, Raw]] = {
    ONE: {"lin1.weight": raw("F32", 2, 3), "lin1.bias": raw("F32", 2)},
    TWO: {"lin2.weight": raw("BF16", 4, 2)},
}


def places(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: entry.file for name, entry in checkpoint.entries.items()}


def refused(location: Path) -> tuple[Problem, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(location)
    text = str(caught.value)
    assert all(problem.message in text for problem in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize("path", sorted(DATA.glob("burn-*/*.safetensors")), ids=lambda path: path.stem)
def test_published_files(path: Path) -> None:
    checkpoint = read_checkpoint(path)
    with safetensors.safe_open(path, "pt") as reference:
        assert sorted(checkpoint.entries) == sorted(reference.keys())
        for name, entry in checkpoint.entries.items():
            held = reference.get_slice(name)
            assert (list(entry.type.shape), entry.type.dtype) == (held.get_shape(), held.get_dtype())
            begin = entry.offset
            data = path.read_bytes()[begin : begin + entry.type.nbytes]
            assert data == bytes(reference.get_tensor(name).flatten().view(torch.uint8).tolist())
    assert [file.size for file in checkpoint.files] == [path.stat().st_size]


def test_folder_of_shards(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_shards(tmp_path, SHARDS))
    assert places(checkpoint) == {"lin1.bias": ONE, "lin1.weight": ONE, "lin2.weight": TWO}
    assert list(checkpoint.entries) == sorted(checkpoint.entries)
    assert [file.name for file in checkpoint.files] == [ONE, TWO]
    assert checkpoint.config is None
    assert checkpoint.notes == ()


def test_what_lies_elsewhere_is_equal(tmp_path: Path) -> None:
    here = read_checkpoint(write_shards(tmp_path / "here", SHARDS))
    there = read_checkpoint(write_shards(tmp_path / "there", SHARDS))
    assert here == there == read_checkpoint(tmp_path / "here" / INDEX)


def test_config(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS)
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    for location in (tmp_path, tmp_path / INDEX, tmp_path / ONE):
        assert read_checkpoint(location).config == {"model_type": "toy"}


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(LocationError, match="no such file or folder"):
        read_checkpoint(tmp_path / "none")
    (problem,) = refused(tmp_path)
    assert problem.message.endswith("holds no .safetensors, .bin, .pt or .pth file")


def test_a_shard_by_itself(tmp_path: Path) -> None:
    write_shards(tmp_path, SHARDS)
    assert places(read_checkpoint(tmp_path / TWO)) == {"lin2.weight": TWO}


def test_links_are_followed(tmp_path: Path) -> None:
    """The hub's cache: `snapshots/REVISION/NAME` is a link to a blob outside of the folder."""
    blobs, snapshot = write_shards(tmp_path / "blobs", SHARDS), tmp_path / "snapshots"
    snapshot.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / f"{number}")
        (snapshot / path.name).symlink_to(blobs / f"{number}")
    assert places(read_checkpoint(snapshot)) == {"lin1.bias": ONE, "lin1.weight": ONE, "lin2.weight": TWO}
    (blobs / "1").unlink()
    (problem,) = refused(snapshot)
    assert problem.kind == "file"
    (snapshot / INDEX).unlink()
    (problem,) = refused(snapshot)
    assert problem.message.startswith(f"{TWO}: is a link to ") or problem.message.startswith(f"{ONE}: is a link to ")


class TestMissingFiles:
    """F9, F13, F14, F15, B65."""

    def test_all_absent_files_are_named(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {**SHARDS, "model-extra.safetensors": {"mtp.fc": raw("F32", 1)}})
        (tmp_path / TWO).unlink()
        (tmp_path / "model-extra.safetensors").unlink()
        assert [problem.names for problem in refused(tmp_path)] == [(TWO,), ("model-extra.safetensors",)]
        for problem in refused(tmp_path):
            assert problem.kind == "file"
            assert problem.message.startswith(f"{INDEX}: names {problem.names[0]!r}, which is not a file in the folder")

    def test_merged_into_one_file(self, tmp_path: Path) -> None:
        """F13: the index still names the shards."""
        write_index(tmp_path / INDEX, {"a": ONE, "b": TWO})
        write_file(tmp_path / "model.safetensors", {"a": raw("F32", 1), "b": raw("F32", 2)})
        assert [problem.names for problem in refused(tmp_path)] == [(ONE,), (TWO,)]
        assert set(places(read_checkpoint(tmp_path / "model.safetensors"))) == {"a", "b"}

    @pytest.mark.parametrize("name", ["sub", "Model-00001-of-00002.safetensors", "m" * 300, "sub/none.safetensors"])
    def test_not_a_file(self, tmp_path: Path, name: str) -> None:
        """F16: a folder, another case, a name longer than names may be."""
        write_shards(tmp_path, SHARDS)
        (tmp_path / "sub").mkdir()
        write_index(tmp_path / INDEX, {"lin1.weight": name})
        (problem,) = refused(tmp_path)
        assert problem.names == (name,)

    def test_no_index(self, tmp_path: Path) -> None:
        """F14: all shards are there."""
        checkpoint = read_checkpoint(write_shards(tmp_path, SHARDS, index=None))
        assert checkpoint == read_checkpoint(write_shards(tmp_path, SHARDS))

    def test_no_index_and_a_file_missing(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS, index=None)
        (tmp_path / ONE).unlink()
        (problem,) = refused(tmp_path)
        assert problem.message == f"{TWO} says it is one of 2 files, 1 are there and no index"

    @pytest.mark.parametrize(
        "names",
        [
            ["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"],
            ["m-00000-of-000002.safetensors", "m-00001-of-000002.safetensors"],
            ["model_00001-of-00002.safetensors", "model_00002-of-00002.safetensors"],
            ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"],
            ["model.fp16-00001-of-00001.safetensors", "mtp_float-2.safetensors", "model-mtp.safetensors"],
        ],
    )
    def test_numbers_prove_nothing(self, tmp_path: Path, names: list[str]) -> None:
        """F15: the published ways to number. No name is made up from them."""
        shards = {name: {f"t{number}": raw("F32", 2)} for number, name in enumerate(names)}
        wanted = {f"t{number}": name for number, name in enumerate(names)}
        assert places(read_checkpoint(write_shards(tmp_path, shards))) == wanted
        (tmp_path / INDEX).unlink()
        assert places(read_checkpoint(tmp_path)) == wanted

    def test_halves_of_two_models(self, tmp_path: Path) -> None:
        """Two files that both say `of-00002`, each of another set."""
        write_file(tmp_path / "a-00001-of-00002.safetensors", {"a": raw("F32", 1)})
        write_file(tmp_path / "b-00002-of-00002.safetensors", {"b": raw("F32", 1)})
        assert [problem.names for problem in refused(tmp_path)] == [
            ("a-00001-of-00002.safetensors",),
            ("b-00002-of-00002.safetensors",),
        ]

    @pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
    def test_torch_siblings(self, tmp_path: Path, suffix: str) -> None:
        (tmp_path / f"pytorch_model-00002-of-00003.{suffix}").write_bytes(b"")
        (problem,) = refused(tmp_path)
        assert "says it is one of 3 files" in problem.message


class TestIndexAgainstHeaders:
    """F11, F12, B66: an index decides, and must agree with the files."""

    def test_never_in_this_checkpoint(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        write_index(tmp_path / INDEX, {"lin1.weight": ONE, "lin1.bias": ONE, "lin2.weight": TWO, "mtp.fc.weight": TWO})
        (problem,) = refused(tmp_path)
        assert (problem.kind, problem.names) == ("index", ("mtp.fc.weight", TWO))
        assert "none of its files has it" in problem.message

    def test_in_another_file(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        write_index(tmp_path / INDEX, {"lin1.weight": ONE, "lin1.bias": TWO, "lin2.weight": TWO})
        (problem,) = refused(tmp_path)
        assert problem.message.startswith(f"{INDEX}: says 'lin1.bias' lies in {TWO}, but it lies in {ONE}")

    def test_all_disagreements_at_once(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        write_index(tmp_path / INDEX, {"lin1.weight": TWO, "lin3.weight": ONE, "lin2.weight": TWO})
        assert [problem.names for problem in refused(tmp_path)] == [
            ("lin1.weight", TWO),
            ("lin3.weight", ONE),
            ("lin1.bias", ONE),
        ]

    def test_not_in_the_index(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        write_index(tmp_path / INDEX, {"lin1.weight": ONE, "lin2.weight": TWO})
        (problem,) = refused(tmp_path)
        assert problem.message == f"{ONE}: holds 'lin1.bias', which {INDEX} does not list; the index is stale"

    def test_in_two_files(self, tmp_path: Path) -> None:
        """F12: the index says which one counts; the other one is noted."""
        shards = {ONE: {"x": filled(1, 2), "y": filled(2, 2)}, TWO: {"x": filled(3, 2), "z": filled(4, 1)}}
        for wanted, value in ((ONE, 1), (TWO, 3)):
            write_shards(tmp_path, shards)
            write_index(tmp_path / INDEX, {"x": wanted, "y": ONE, "z": TWO})
            checkpoint = read_checkpoint(tmp_path)
            assert places(checkpoint) == {"x": wanted, "y": ONE, "z": TWO}
            other = TWO if wanted == ONE else ONE
            assert checkpoint.notes == (
                f"{other}: 1 of its tensors are left out, for the index takes them from another file: 'x'",
            )
            assert load_state_dict(compile_plan(tmp_path), tmp_path)["x"].tolist() == [value, value]

    def test_damaged_files_are_all_named(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        (tmp_path / ONE).write_bytes(b"")
        (tmp_path / TWO).write_bytes((tmp_path / TWO).read_bytes()[:-1])
        (tmp_path / "config.json").write_text("{]")
        problems = refused(tmp_path)
        assert [problem.names[0] for problem in problems] == [ONE, TWO, "config.json"]
        assert [problem.kind for problem in problems] == ["header", "header", "config"]

    def test_a_file_that_holds_no_tensors(self, tmp_path: Path) -> None:
        write_index(tmp_path / INDEX, {"a": "config.json"})
        (tmp_path / "config.json").write_text("{}")
        (problem,) = refused(tmp_path)
        assert problem.message.startswith("config.json: ")

    def test_in_a_subfolder(self, tmp_path: Path) -> None:
        write_file(tmp_path / "sub" / "m.safetensors", {"a": raw("F32", 1)})
        write_index(tmp_path / INDEX, {"a": "sub/m.safetensors"})
        assert places(read_checkpoint(tmp_path)) == {"a": "sub/m.safetensors"}


class TestSeveralCheckpoints:
    """F10, F19, B61, B68: two layouts of one model in one folder."""

    @pytest.mark.parametrize("sharded_first", [True, False])
    def test_saved_twice(self, tmp_path: Path, sharded_first: bool) -> None:
        """B61: the newer save must not be shadowed by the older one, whichever that is."""

        def save_sharded(value: float) -> None:
            write_shards(tmp_path, {ONE: {"w": filled(value, 2)}, TWO: {"v": filled(value, 1)}})

        def save_whole(value: float) -> None:
            write_file(tmp_path / "model.safetensors", {"w": filled(value, 2), "v": filled(value, 1)})

        for save, value in zip((save_sharded, save_whole)[:: 1 if sharded_first else -1], (1, 5), strict=True):
            save(value)
        (problem,) = refused(tmp_path)
        assert problem.names == ("model.safetensors", INDEX)
        assert "both hold the whole model" in problem.message
        newer = tmp_path / ("model.safetensors" if sharded_first else INDEX)
        assert load_state_dict(compile_plan(newer), newer)["w"].tolist() == [5, 5]  # as the message says

    def test_bin_beside_safetensors(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        (tmp_path / "pytorch_model.bin").write_bytes(b"older")
        assert read_checkpoint(tmp_path).notes == ("pytorch_model.bin is left out: safetensors files are there",)

    def test_another_model_in_a_single_file(self, tmp_path: Path) -> None:
        """B68: a 4-bit model.safetensors beside the index; the index decides, and the report tells."""
        write_shards(tmp_path, SHARDS)
        write_file(tmp_path / "model.safetensors", {"lin1.weight": raw("U8", 3), "lin1.weight.absmax": raw("F32", 1)})
        write_file(tmp_path / "consolidated.safetensors", {"layers.0.w1": raw("F32", 2, 3)})
        (tmp_path / "original").mkdir()
        write_file(tmp_path / "original" / "model.safetensors", {"w": raw("F32", 1)})
        checkpoint = read_checkpoint(tmp_path)
        assert places(checkpoint) == {"lin1.bias": ONE, "lin1.weight": ONE, "lin2.weight": TWO}
        assert checkpoint.notes == (
            f"consolidated.safetensors is left out: {INDEX} does not name it",
            f"model.safetensors is left out: {INDEX} does not name it",
        )

    def test_a_damaged_single_file(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        (tmp_path / "model.safetensors").write_bytes(b"")
        assert read_checkpoint(tmp_path).notes == (f"model.safetensors is left out: {INDEX} does not name it",)

    def test_numbered_siblings_are_noted(self, tmp_path: Path) -> None:
        """B65: the index names one of two."""
        write_shards(tmp_path, SHARDS)
        write_index(tmp_path / INDEX, {"lin1.weight": ONE, "lin1.bias": ONE})
        assert read_checkpoint(tmp_path).notes == (f"{TWO} is left out: {INDEX} does not name it",)

    def test_no_index_and_names_in_common(self, tmp_path: Path) -> None:
        """B68: all candidates are named."""
        write_shards(tmp_path, SHARDS, index=None)
        write_file(tmp_path / "consolidated.safetensors", {"lin1.bias": raw("F32", 2), "lin2.weight": raw("F32", 1)})
        problems = refused(tmp_path)
        assert [problem.names for problem in problems] == [
            ("lin1.bias", "consolidated.safetensors", ONE),
            ("lin2.weight", "consolidated.safetensors", TWO),
        ]
        assert "no index says which counts" in problems[0].message

    def test_variant_indices(self, tmp_path: Path) -> None:
        """F19: the plain index is meant; the variant can be asked for."""
        write_shards(tmp_path, SHARDS)
        variant = "model.safetensors.index.fp16.json"
        write_shards(tmp_path, {"model.fp16.safetensors": {"lin1.weight": raw("F16", 2, 3)}}, index=variant)
        assert set(places(read_checkpoint(tmp_path)).values()) == {ONE, TWO}
        assert places(read_checkpoint(tmp_path / variant)) == {"lin1.weight": "model.fp16.safetensors"}

    def test_two_variants(self, tmp_path: Path) -> None:
        for variant in ("fp16", "bf16"):
            shard = {f"model.{variant}.safetensors": {"a": raw("F16", 1)}}
            write_shards(tmp_path, shard, index=f"model.safetensors.index.{variant}.json")
        (problem,) = refused(tmp_path)
        assert problem.names == ("model.safetensors.index.bf16.json", "model.safetensors.index.fp16.json")
        assert "give the path of one" in problem.message

    def test_other_names_for_the_index(self, tmp_path: Path) -> None:
        """Diffusers prefix it; what an editor leaves behind is no index."""
        write_shards(tmp_path, SHARDS, index="diffusion_pytorch_model.safetensors.index.json")
        for leftover in (f"{INDEX}.bak", f"{INDEX}.lock", f"{INDEX}~"):
            (tmp_path / leftover).write_text("{")
        assert len(read_checkpoint(tmp_path).entries) == 3

    def test_bin_index_beside_safetensors(self, tmp_path: Path) -> None:
        write_shards(tmp_path, SHARDS)
        write_index(tmp_path / "pytorch_model.bin.index.json", {"lin1.weight": "pytorch_model-00001-of-00001.bin"})
        assert set(places(read_checkpoint(tmp_path)).values()) == {ONE, TWO}


class TestTorchFolders:
    """The same rules for `.bin` files, which are read when no safetensors file is there."""

    def test_saved_twice(self, tmp_path: Path) -> None:
        shutil.copy(DATA / "burn-pt" / "linear.pt", tmp_path / "pytorch_model.bin")
        shutil.copy(DATA / "burn-pt" / "linear.pt", tmp_path / "part.bin")
        names = ["fc1.weight", "fc1.bias", "fc2.weight"]
        index = "pytorch_model.bin.index.json"
        write_index(tmp_path / index, dict.fromkeys(names, "part.bin"))
        (problem,) = refused(tmp_path)
        assert problem.names == ("pytorch_model.bin", index)
        assert set(places(read_checkpoint(tmp_path / index)).values()) == {"part.bin"}

    def test_strays_are_noted(self, tmp_path: Path) -> None:
        shutil.copy(DATA / "burn-pt" / "linear.pt", tmp_path / "part.bin")
        shutil.copy(DATA / "burn-pt" / "embedding.pt", tmp_path / "other.bin")
        (tmp_path / "optimizer.pt").write_bytes(b"not looked at")
        index = "pytorch_model.bin.index.json"
        write_index(tmp_path / index, dict.fromkeys(["fc1.weight", "fc1.bias", "fc2.weight"], "part.bin"))
        assert read_checkpoint(tmp_path).notes == (f"other.bin is left out: {index} does not name it",)

    def test_variant_index(self, tmp_path: Path) -> None:
        shutil.copy(DATA / "burn-pt" / "embedding.pt", tmp_path / "model.fp16.bin")
        write_index(tmp_path / "pytorch_model.bin.index.fp16.json", {"embed.weight": "model.fp16.bin"})
        assert places(read_checkpoint(tmp_path)) == {"embed.weight": "model.fp16.bin"}


def test_messages_show_names_escaped(tmp_path: Path) -> None:
    """A tensor or file may be called anything: no message moves the cursor of a terminal."""
    name = "a\x1b[31m\n"
    write_file(tmp_path / "one.safetensors", {name: raw("F32", 1)})
    write_file(tmp_path / "two.safetensors", {name: raw("F32", 1)})
    (problem,) = refused(tmp_path)
    assert problem.message.isprintable()
    write_index(tmp_path / INDEX, {name: "x\x1b[31m.safetensors"})
    (problem,) = refused(tmp_path)
    assert problem.message.isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "closed", SHARDS)
    folder.chmod(0)
    try:
        (problem,) = refused(folder)
        assert "cannot be listed" in problem.message
    finally:
        folder.chmod(0o700)


@given(
    weight_map=st.dictionaries(
        st.sampled_from(["lin1.weight", "lin1.bias", "lin2.weight", "mtp"]),
        st.sampled_from([ONE, TWO, "none.safetensors", "../x", INDEX, "."]) | st.text(max_size=5),
        max_size=4,
    )
)
def test_any_weight_map(tmp_path: Path, weight_map: dict[str, str]) -> None:
    """Read, and as the map says; or refused with a CheckpointError."""
    write_shards(tmp_path, SHARDS)
    write_index(tmp_path / INDEX, weight_map)
    try:
        assert places(read_checkpoint(tmp_path)) == weight_map
    except CheckpointError as error:
        assert error.problems
    else:
        assert all(weight_map[name] == file for file in set(weight_map.values()) for name in SHARDS[file])
