"""Saving, against what the folder should then hold: which files, under which names, with which headers and index.

What comes back is compared with the bytes that were written to the checkpoint; files that are written anew (closed up,
or in the runtime layout) are read with the safetensors library. What fails is compared with the folder as it was before.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise, permutations
from pathlib import Path
from typing import ClassVar

import pytest
import safetensors
import safetensors.torch
import torch
from builders import Raw, bytes_of, filled, raw, write_file, write_index, write_shards
from saving import check_restores, files_in, load_ranks, save_tensors
from torch import nn

from loadplan.cache.write_file import FolderNotWritable
from loadplan.compiler.conversion import convert
from loadplan.compiler.ops import Concatenate, MergeModulelist, Transpose
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import PrefixChange, Rule, WeightConverter, WeightRenaming
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.runtime.load import load_into, load_state_dict
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.save import SaveError, save_checkpoint
from loadplan.runtime.targets import TieConflict

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def odd_file(
    tensors: Mapping[str, Raw], keys: Sequence[str], metadata: object = None, indent: int | None = None, blanks: int = 0
) -> bytes:
    """A safetensors file whose data lies in the order of `tensors`, whose keys come in that of `keys`."""
    ends = [0]
    for tensor in tensors.values():
        ends.append(ends[-1] + len(tensor.data))
    spans = dict(zip(tensors, pairwise(ends), strict=True))
    header: dict[str, object] = {
        name: {"data_offsets": spans[name], "shape": tensors[name].shape, "dtype": tensors[name].dtype} for name in keys
    }
    if metadata is not None:
        header["__metadata__"] = metadata
    text = json.dumps(header, indent=indent).encode() + b" " * blanks
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors.values())


class TestFiles:
    """Files that the library would not have written so, given back so."""

    @pytest.mark.parametrize("blanks", range(8))
    @pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "é": '"\\'}], ids=["none", "empty", "some"])
    def test_headers(self, tmp_path: Path, metadata: object, blanks: int) -> None:
        """Order of keys is not that of data; misaligned, empty and 0-d tensors; any number of blanks at the end."""
        tensors = {
            "first": raw("F32", 0, 4),
            "odd": raw("U8", 3),
            "b": raw("F64", 5, 2),
            "middle": raw("I64", 0),
            "scalar": raw("F16"),
            "a": raw("F32", 2, 2),
            "last": raw("BF16", 2, 0),
        }
        source = tmp_path / "source"
        source.mkdir()
        for number, (order, indent) in enumerate([(sorted(tensors), None), (sorted(tensors)[::-1], 1)]):
            named = {f"{number}.{name}": tensor for name, tensor in tensors.items()}
            content = odd_file(named, [f"{number}.{name}" for name in order], metadata, indent, blanks)
            (source / f"{number}.safetensors").write_bytes(content)
        recipe = Recipe([WeightConverter("b", "b", [Transpose(0, 1)])])
        check_restores(compile_plan(source, recipe), source, tmp_path / "saved")

    def test_index_and_config(self, tmp_path: Path) -> None:
        """Several files, one of them in a folder, and metadata that says what it likes."""
        source = tmp_path / "source"
        stem = {"q": raw("F32", 4, 3), "e.10": raw("F32", 2), "e.2": raw("F32", 2)}
        more = {"k": raw("F32", 4, 3), **{f"e.{number}": raw("F32", 2) for number in (0, 1, 3, 4, 5, 6, 7, 8, 9, 11)}}
        write_file(source / ONE, stem, align=1)
        write_file(source / "deep/er.safetensors", more)
        weight_map = dict.fromkeys(more, "deep/er.safetensors") | dict.fromkeys(stem, ONE)
        index = {"metadata": {"total_size": "1", "é": [1.5e300, None, {}]}, "weight_map": weight_map, "more": [[]]}
        (source / INDEX).write_text(json.dumps(index, indent=3, ensure_ascii=False) + "\n\n", encoding="utf-8")
        config = {"text_config": {"tie_word_embeddings": True}, "eps": 1e-05, "ü": "ü"}
        (source / "config.json").write_text(json.dumps(config, indent=7, ensure_ascii=False), encoding="utf-8")
        rules = [
            WeightConverter(["q", "k"], "qk", [Concatenate(0)]),
            WeightConverter("e.*", "e", [MergeModulelist(0)]),
        ]
        plan = compile_plan(source, Recipe(rules))
        check_restores(plan, source, tmp_path / "saved")
        again = save_checkpoint(load_state_dict(plan, source), plan, tmp_path / "saved")
        assert [path.name for path in again] == ["er.safetensors", ONE, "config.json", INDEX]  # the index last
        assert files_in(tmp_path / "saved") == files_in(source)

    def test_several_files_without_an_index(self, tmp_path: Path) -> None:
        source = write_shards(tmp_path / "source", {ONE: {"a": raw("F32", 5)}, TWO: {"b": raw("I8", 3)}}, index=None)
        write_file(source / "nothing.safetensors", {})
        check_restores(compile_plan(source), source, tmp_path / "saved")

    def test_one_file_of_many(self, tmp_path: Path) -> None:
        source = write_shards(tmp_path / "source", {ONE: {"a": raw("F32", 5)}, TWO: {"b": raw("I8", 3)}})
        plan = compile_plan(source / TWO)
        assert save_checkpoint(load_ranks(plan, source), plan, tmp_path / "saved") == (tmp_path / "saved" / TWO,)
        assert files_in(tmp_path / "saved") == {TWO: (source / TWO).read_bytes()}


class TestProvenance:
    """Each tensor goes back by the way it came; rules themselves are never run backwards."""

    @pytest.mark.parametrize(
        "names",
        [
            ["model.x", "model.y.w"],
            ["x", "y.w"],
            ["model.x", "lm_head.w"],
            ["model.model.x", "model.y"],
        ],
        ids="abcd",
    )
    def test_removed_prefix(self, tmp_path: Path, names: list[str]) -> None:
        """B58"""
        source = save_tensors(tmp_path / "source", {name: raw("F32", 2, seed=len(name)) for name in names})
        plan = compile_plan(source, Recipe([PrefixChange(prefix_to_remove="model")]))
        assert {tensor.name for tensor in plan.head.tensors} == {name.removeprefix("model.") for name in names}
        check_restores(plan, source, tmp_path / "saved")

    @pytest.mark.parametrize(
        ("rule", "stored", "target"),
        [
            (WeightRenaming("encoder.layers", "layers"), "encoder.layers.0.w", "encoder.layers.0.w"),
            (WeightRenaming("encoder.layers", "layers"), "layers.0.w", "layers.0.w"),
            (WeightRenaming("encoder.layers", "layers"), "encoder.layers.0.w", "layers.0.w"),
            (WeightRenaming(r"embedding\.weight", "embeddings.weight"), "embeddings.weight", "embeddings.weight"),
            (WeightRenaming(r"^text_model\.", ""), "text_model.lin.weight", "text_model.lin.weight"),
            (PrefixChange(prefix_to_add="model"), "model.lin.weight", "model.lin.weight"),
        ],
    )
    def test_rules_that_did_not_fire(self, tmp_path: Path, rule: Rule, stored: str, target: str) -> None:
        """B05, B13, B14: the name in the file decides, whether a rule made the target's or left it alone."""
        source = save_tensors(tmp_path / "source", {stored: raw("F32", 2, 2), "other": raw("F32", 1)})
        declared = Signature.of({target: ((2, 2), "F32"), "other": ((1,), "F32")})
        plan = compile_plan(source, Recipe([rule]), declared)
        assert sorted(load_state_dict(plan, source)) == sorted([target, "other"])
        check_restores(plan, source, tmp_path / "saved")

    def test_neighbours_of_experts(self, tmp_path: Path) -> None:
        """B01: neither collected as experts, nor cut into rows on the way back."""
        tensors = {f"l.0.mlp.experts.{number}.w2.weight": raw("F32", 4, 3, seed=number) for number in range(2)}
        tensors |= {
            "l.0.mlp.shared_experts.down_proj.weight": raw("F32", 4, 3, seed=7),
            "l.0.mlp.shared_experts.3.w2.weight": raw("F32", 4, 3, seed=8),
            "l.0.mlp.experts.3.adapter.w2.weight": raw("F32", 4, 3, seed=9),
        }
        source = save_tensors(tmp_path / "source", tensors)
        rule = WeightConverter("experts.*.w2.weight", "experts.down_proj", [MergeModulelist(0)])
        plan = compile_plan(source, Recipe([rule]))
        loaded = load_state_dict(plan, source)
        assert loaded["l.0.mlp.experts.down_proj"].shape == (2, 4, 3)
        assert len(loaded) == 4
        check_restores(plan, source, tmp_path / "saved")


def emb_and_head(**tensors: Raw) -> dict[str, Raw]:
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.emb.weight


class TestTies:
    STORED: ClassVar[dict[str, dict[str, Raw]]] = {
        "a": emb_and_head(emb=filled(5, 3, 2)),
        "b": emb_and_head(head=filled(5, 3, 2)),
        "c": emb_and_head(emb=filled(5, 3, 2), head=filled(5, 3, 2)),
        "d": emb_and_head(emb=filled(5, 3, 2), head=filled(2, 3, 2)),
        "nan": emb_and_head(head=filled(float("nan"), 3, 2)),
    }

    def plan(self, folder: Path, stored: str) -> Plan:
        save_tensors(folder, self.STORED[stored])
        return compile_plan(folder, signature=Signature.from_module(Tied()))

    @pytest.mark.parametrize("stored", STORED)
    def test_as_they_were(self, tmp_path: Path, stored: str) -> None:
        """B26"""
        plan = self.plan(tmp_path / "source", stored)
        check_restores(plan, tmp_path / "source", tmp_path / "saved")

    @pytest.mark.parametrize("stored", ["a", "b", "c"])
    def test_trained_together(self, tmp_path: Path, stored: str) -> None:
        """A module whose names share a parameter gives every stored one its value."""
        plan = self.plan(tmp_path / "source", stored)
        model = load_into(Tied(), plan, tmp_path / "source")
        with torch.no_grad():
            model.head.weight.add_(1)  # type: ignore[operator, union-attr]
        save_checkpoint(model, plan, tmp_path / "saved")
        found = safetensors.torch.load_file(tmp_path / "saved/model.safetensors")
        assert found.keys() == self.STORED[stored].keys()
        assert all(tensor.eq(6).all() for tensor in found.values())
        assert load_state_dict(plan, tmp_path / "saved")["emb.weight"].eq(6).all()

    def test_untied_ones_keep_their_own(self, tmp_path: Path) -> None:
        plan = self.plan(tmp_path / "source", "d")
        loaded = load_state_dict(plan, tmp_path / "source")
        save_checkpoint({**loaded, "head.weight": loaded["head.weight"] + 1}, plan, tmp_path / "saved")
        found = safetensors.torch.load_file(tmp_path / "saved/model.safetensors")
        assert found["emb.weight"].eq(5).all() and found["head.weight"].eq(3).all()

    @pytest.mark.parametrize("stored", ["a", "b"])
    def test_an_alias_may_be_left_out(self, tmp_path: Path, stored: str) -> None:
        plan = self.plan(tmp_path / "source", stored)
        name = "emb.weight" if stored == "a" else "head.weight"
        loaded = load_state_dict(plan, tmp_path / "source")
        save_checkpoint({name: loaded[name]}, plan, tmp_path / "saved")
        assert files_in(tmp_path / "saved") == files_in(tmp_path / "source")

    @pytest.mark.parametrize("order", list(permutations(["enc", "dec", "head"])), ids="-".join)
    def test_three_way(self, tmp_path: Path, order: tuple[str, ...]) -> None:
        """B25: two of four tied names are there and differ. Nothing is loaded for the others; both are saved as given."""
        state = {"dec": filled(250, 3, 2), "head": filled(2, 3, 2)}
        source = save_tensors(tmp_path / "source", state)
        names = ("shared", *order)
        signature = Signature.of(dict.fromkeys(names, ((3, 2), "F32")), ties=[names])
        plan = compile_plan(source, signature=signature)
        with pytest.raises(TieConflict):
            load_state_dict(plan, source)
        stored = {n: t for path in source.glob("*.safetensors") for n, t in safetensors.torch.load_file(path).items()}
        save_checkpoint(stored, plan, tmp_path / "saved")
        assert files_in(tmp_path / "saved") == files_in(source)


class TestWaived:
    def test_unused_sources(self, tmp_path: Path) -> None:
        """Left out of files, headers and index; what is left is a valid checkpoint without holes."""
        one = {"b": raw("F32", 2, 3), "drop.x": raw("U8", 5), "a": raw("I64", 3), "drop.none": raw("F32", 0)}
        source = tmp_path / "source"
        source.mkdir()
        (source / ONE).write_bytes(odd_file(one, sorted(one), {"format": "pt", "é": "1"}, blanks=3))
        write_file(source / TWO, {"drop.y": raw("F32", 4)})
        write_file(source / "whole.safetensors", {"c": raw("F32", 2)}, align=1)
        places = {**dict.fromkeys(one, ONE), "drop.y": TWO, "c": "whole.safetensors"}
        write_index(source / INDEX, places, metadata={"total_size": 1, "note": "é"}, more=[1])
        plan = compile_plan(source, Recipe([WeightConverter("b", "b", [Transpose(0, 1)])], may_be_unused=["drop"]))
        assert plan.report.unused == ("drop.none", "drop.x", "drop.y")
        loaded = load_state_dict(plan, source)
        saved = tmp_path / "saved"
        written = save_checkpoint(loaded, plan, saved)

        assert [path.name for path in written] == [ONE, "whole.safetensors", INDEX]
        assert (saved / "whole.safetensors").read_bytes() == (source / "whole.safetensors").read_bytes()
        with safetensors.safe_open(saved / ONE, "pt") as file:
            assert file.metadata() == {"format": "pt", "é": "1"}
            assert {name: bytes_of(file.get_tensor(name)) for name in file.keys()} == {  # noqa: SIM118
                name: one[name].data for name in ("a", "b")
            }
        index = json.loads((saved / INDEX).read_text(encoding="utf-8"))
        assert index == {
            "weight_map": {"a": ONE, "b": ONE, "c": "whole.safetensors"},
            "metadata": {"total_size": 24 + 24 + 8, "note": "é"},
            "more": [1],
        }
        again = load_state_dict(compile_plan(saved, Recipe([WeightConverter("b", "b", [Transpose(0, 1)])])), saved)
        assert {name: bytes_of(t) for name, t in again.items()} == {name: bytes_of(t) for name, t in loaded.items()}

    @pytest.mark.parametrize("metadata", [{}, {"metadata": {}}, {"metadata": None}, {"metadata": [1]}])
    def test_indices_that_give_no_size(self, tmp_path: Path, metadata: Mapping[str, object]) -> None:
        source = write_shards(tmp_path / "source", {ONE: {"a": raw("F32", 2)}, TWO: {"x": raw("F32", 3)}})
        write_index(source / INDEX, {"a": ONE, "x": TWO}, **metadata)
        plan = compile_plan(source, target=Target(unexpected="ignore"), signature={"a": ((2,), "F32")})
        save_checkpoint(load_state_dict(plan, source), plan, tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / INDEX).read_bytes()) == {**metadata, "weight_map": {"a": ONE}}

    def test_copies_that_the_index_does_not_take(self, tmp_path: Path) -> None:
        """One name in two files: the index says which counts, and the other one is not loaded, so not saved."""
        one, two = {"a": filled(1, 2), "b": filled(2, 3)}, {"b": filled(9, 3), "c": filled(3, 1)}
        source = write_shards(tmp_path / "source", {ONE: one, TWO: two})
        write_index(source / INDEX, {"a": ONE, "b": ONE, "c": TWO})
        plan = compile_plan(source)
        save_checkpoint(load_state_dict(plan, source), plan, tmp_path / "saved")
        found = {name: safetensors.torch.load_file(tmp_path / "saved" / name) for name in (ONE, TWO)}
        assert {name: {key: t.tolist() for key, t in tensors.items()} for name, tensors in found.items()} == {
            ONE: {"a": [1, 1], "b": [2, 2, 2]},
            TWO: {"c": [3]},
        }

    def test_missing_targets(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The checkpoint has no place for them; the runtime layout has."""
        source = save_tensors(tmp_path / "source", {"a": raw("F32", 2)})
        declared = Signature.of({"a": ((2,), "F32"), "head": ((3,), "F32"), "ids": ((2,), "I64")})
        plan = compile_plan(source, Recipe(may_be_missing=["head", "ids"]), declared)
        check_restores(plan, source, tmp_path / "without")
        assert caplog.text == ""
        state = {**load_state_dict(plan, source), "head": torch.ones(3, dtype=torch.float16)}
        save_checkpoint(state, plan, tmp_path / "with")
        assert files_in(tmp_path / "with") == files_in(source)
        assert "the checkpoint has no such tensors: head" in caplog.text
        save_checkpoint(state, plan, tmp_path / "runtime", original_format=False)
        found = safetensors.torch.load_file(tmp_path / "runtime/model.safetensors")
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        for tensor, message in (
            (torch.zeros(2, dtype=torch.complex128), "head is torch.complex128, which safetensors files cannot hold"),
            (torch.zeros(2, device="meta"), "head is on the meta device"),
        ):
            with pytest.raises(SaveError, match=message):
                save_checkpoint({**state, "head": tensor}, plan, tmp_path / "not", original_format=False)


class TestRuntimeLayout:
    def test_one_rank(self, tmp_path: Path) -> None:
        """Target names and dtypes, views and all; the library reads it, and it compiles without a recipe."""
        tensors = {
            "q": raw("F32", 4, 3),
            "k": raw("F32", 2, 3),
            "n": raw("I64"),
            "z": raw("U8", 0, 2),
            "f": raw("F4", 4),
        }
        source = save_tensors(tmp_path / "source", tensors)
        recipe = Recipe([WeightConverter(["q", "k"], "qk", [Concatenate(0), Transpose(0, 1)])])
        plan = compile_plan(source, recipe, target=Target(dtype="bfloat16"))
        state = load_state_dict(plan, source)
        state["qk"] = torch.arange(40).bfloat16()[3:33].view(6, 5)[:, 1:4].T
        written = save_checkpoint(state, plan, tmp_path / "saved", original_format=False)
        assert written == (tmp_path / "saved/model.safetensors",)
        with safetensors.safe_open(written[0], "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert list(file.keys()) == sorted(state)
            assert torch.equal(file.get_tensor("qk"), state["qk"])
        signature = Signature.of({tensor.name: (tensor.type.shape, tensor.type.dtype) for tensor in plan.head.tensors})
        again = load_state_dict(compile_plan(tmp_path / "saved", Recipe(), signature), tmp_path / "saved")
        assert {name: bytes_of(t) for name, t in again.items()} == {name: bytes_of(t) for name, t in state.items()}

    @pytest.mark.parametrize("ranks", [2, 11])
    def test_ranks(self, tmp_path: Path, ranks: int) -> None:
        source = save_tensors(tmp_path / "source", {"w": raw("F32", 3, 22), "n": raw("F32", 5)})
        plan = compile_plan(source, target=Target(tp_size=ranks, tp_plan={"w": "rowwise"}))
        states = load_ranks(plan, source)
        written = save_checkpoint(states, plan, tmp_path / "saved", original_format=False)
        digits = len(str(ranks - 1))
        assert [path.name for path in written] == [f"rank-{r:0{digits}}-of-{ranks}.safetensors" for r in range(ranks)]
        for path, state in zip(written, states, strict=True):
            found = safetensors.torch.load_file(path)
            assert {name: bytes_of(t) for name, t in found.items()} == {name: bytes_of(t) for name, t in state.items()}
            signature = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
            again = load_state_dict(compile_plan(path, signature=signature), path)
            assert {name: bytes_of(t) for name, t in again.items()} == {name: bytes_of(t) for name, t in state.items()}

    def test_ties(self, tmp_path: Path) -> None:
        """One name of an alias is enough: the signature ties the other again."""
        source = save_tensors(tmp_path / "source", {"head.weight": filled(5, 3, 2)})
        plan = compile_plan(source, signature=Signature.from_module(Tied()))
        model = load_into(Tied(), plan, source)
        (path,) = save_checkpoint(model, plan, tmp_path / "saved", original_format=False)
        assert safetensors.torch.load_file(path).keys() == {"head.weight"}
        again = load_into(Tied(), compile_plan(path, signature=Signature.from_module(Tied())), path)
        assert len(list(again.parameters())) == 1
        assert again.state_dict()["emb.weight"].eq(5).all()

    def test_of_torch_files(self, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        torch.save({"a": torch.arange(6.0).view(2, 3).T}, source / "pytorch_model.bin")
        plan = compile_plan(source)
        loaded = load_state_dict(plan, source)
        with pytest.raises(
            SaveError, match=r"pytorch_model\.bin was written by torch\.save; use original_format=False"
        ):
            save_checkpoint(loaded, plan, tmp_path / "saved")
        (path,) = save_checkpoint(loaded, plan, tmp_path / "saved", original_format=False)
        assert torch.equal(safetensors.torch.load_file(path)["a"], torch.arange(6.0).view(2, 3).T)


class TestFolder:
    """B61, B62: what else is in the folder, and what happens to it."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        tensors = {f"w{number}": raw("F32", 40, 30, seed=number) for number in range(4)}
        write_shards(tmp_path / "source", {ONE: tensors, TWO: {"m": raw("I32", 3)}})
        (tmp_path / "source/config.json").write_text("{}", encoding="utf-8")
        return tmp_path / "source"

    @pytest.mark.parametrize(
        "name",
        [
            "model.safetensors",
            "model-00003-of-00003.safetensors",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "model.safetensors.index.fp16.json",
        ],
    )
    @pytest.mark.parametrize("original", [True, False])
    def test_other_weights(self, source: Path, tmp_path: Path, name: str, original: bool) -> None:
        plan = compile_plan(source)
        loaded = load_state_dict(plan, source)
        folder = tmp_path / "saved"
        folder.mkdir()
        (folder / "tokenizer.json").write_text("kept", encoding="utf-8")
        save_checkpoint(loaded, plan, folder, original)
        other = name if original or name != "model.safetensors" else ONE
        (folder / other).write_text("old", encoding="utf-8")
        before = files_in(folder)
        with pytest.raises(SaveError, match=rf"holds other weights, {other}; remove them, or give another folder"):
            save_checkpoint(loaded, plan, folder, original)
        with pytest.raises(SaveError, match=r"holds other weights"):
            save_checkpoint(loaded, plan, folder, not original)
        assert files_in(folder) == before

    def test_over_a_converted_checkpoint(self, source: Path, tmp_path: Path) -> None:
        """It would still look whole, and not be."""
        plan = compile_plan(source)
        artifact = convert(plan, source, tmp_path / "artifact")
        loaded = load_state_dict(artifact)
        for original in (True, False):
            with pytest.raises(SaveError, match="is a converted checkpoint, which new files would break"):
                save_checkpoint(loaded, artifact, artifact.folder, original)
        assert load_state_dict(artifact).keys() == loaded.keys()

    @pytest.mark.parametrize("mode", ["map", "auto"])
    def test_over_the_files_that_are_mapped(self, source: Path, mode: str) -> None:
        """B62: new files in their places; tensors that are mapped from the old ones keep their values."""
        plan = compile_plan(source)
        loaded = load_state_dict(plan, source, mode=mode)  # type: ignore[arg-type]
        before = {name: bytes_of(tensor) for name, tensor in loaded.items()}
        inodes = {path.name: path.stat().st_ino for path in source.iterdir()}
        changed = {name: tensor + 1 for name, tensor in loaded.items()}
        with ExitStack() as stack:
            for path in source.iterdir():
                stack.enter_context(path.open("rb"))  # so that no inode is given again
            save_checkpoint(changed, plan, source)
            assert all(path.stat().st_ino != inodes[path.name] for path in source.iterdir())
        assert {name: bytes_of(tensor) for name, tensor in loaded.items()} == before
        again = load_state_dict(plan, source)
        assert {name: bytes_of(t) for name, t in again.items()} == {name: bytes_of(t) for name, t in changed.items()}
        save_checkpoint(loaded, plan, source)
        assert {name: bytes_of(tensor) for name, tensor in load_state_dict(plan, source).items()} == before

    def test_links_are_replaced(self, source: Path, tmp_path: Path) -> None:
        """As a download cache lays them out: the file behind the link stays as it is."""
        plan = compile_plan(source)
        loaded = load_state_dict(plan, source)
        store = tmp_path / "store"
        (source / ONE).rename(store)
        (source / ONE).symlink_to(store)
        before = store.read_bytes()
        save_checkpoint({name: tensor + 1 for name, tensor in loaded.items()}, plan, source)
        assert store.read_bytes() == before
        assert not (source / ONE).is_symlink()

    @pytest.mark.parametrize("name", [ONE, TWO, INDEX, "config.json"])
    def test_folders_in_the_place_of_files(self, source: Path, tmp_path: Path, name: str) -> None:
        plan = compile_plan(source)
        loaded = load_state_dict(plan, source)
        saved = tmp_path / "saved"
        save_checkpoint(loaded, plan, saved)
        (saved / name).unlink()
        (saved / name).mkdir()
        before = files_in(saved)
        with pytest.raises(SaveError, match=rf"{name}: is a folder, a file is to be written there"):
            save_checkpoint({key: tensor + 1 for key, tensor in loaded.items()}, plan, saved)
        assert files_in(saved) == before
        assert len(list(saved.iterdir())) == 4

    @pytest.mark.parametrize("original", [True, False])
    def test_a_file_in_the_place_of_the_folder(self, source: Path, tmp_path: Path, original: bool) -> None:
        plan = compile_plan(source)
        (tmp_path / "saved").write_text("kept", encoding="utf-8")
        for place in ("saved", "saved/deeper"):
            with pytest.raises(FolderNotWritable, match="saved"):
                save_checkpoint(load_state_dict(plan, source), plan, tmp_path / place, original)
        assert (tmp_path / "saved").read_text(encoding="utf-8") == "kept"

    @pytest.mark.parametrize("original", [True, False])
    def test_failing_half_way(self, source: Path, tmp_path: Path, original: bool) -> None:
        """The second of the files (or the only one) does not fit: what was there is there, whole, and nothing else."""
        tensors = {"big": raw("F32", 40, 50)}
        write_file(source / TWO, tensors)
        write_index(source / INDEX, {**{f"w{number}": ONE for number in range(4)}, "big": TWO})
        (source / ONE).unlink()
        write_file(source / ONE, {f"w{number}": raw("F32", 2) for number in range(4)})
        plan = compile_plan(source)
        loaded = load_state_dict(plan, source)
        saved = tmp_path / "saved"
        save_checkpoint(loaded, plan, saved, original)
        before = files_in(saved)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
        try:
            with pytest.raises(FolderNotWritable, match=r"saved.*: cannot be written \(File too large\)"):
                save_checkpoint({name: tensor + 1 for name, tensor in loaded.items()}, plan, saved, original)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert files_in(saved) == before
        assert {path.name for path in saved.iterdir()} == before.keys()

    def test_more_files_than_descriptors(self, tmp_path: Path) -> None:
        shards = {f"{number:02}.safetensors": {f"w{number}": raw("F32", 3, seed=number)} for number in range(60)}
        source = write_shards(tmp_path / "source", shards)
        plan = compile_plan(source)
        loaded = load_state_dict(plan, source)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are numbers
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 12, limits[1]))
        try:
            save_checkpoint(loaded, plan, tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert files_in(tmp_path / "saved") == files_in(source)
