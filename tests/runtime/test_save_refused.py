"""What saving refuses, against the folder as it was before: nothing is written.

States that are not the plan's, plans that cannot be run backwards, and plans that lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest
import safetensors
import safetensors.torch
import torch
from builders import bytes_of, filled, raw, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import check_restores, files_in, load_ranks, save_tensors
from strategies import json_texts
from torch import nn

from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import FolderNotWritable
from loadplan.compiler import pieces
from loadplan.compiler.conversion import convert
from loadplan.compiler.ir import Binding, Op, Spread
from loadplan.compiler.ops import Chunk, Concatenate, Reshape, Slice, Transpose
from loadplan.compiler.pieces import Layout
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import Rule, WeightConverter, WeightRenaming
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.runtime.artifact import ArtifactError
from loadplan.runtime.dtype import DType
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import CopyColumns, Origin, PlanSource, Section
from loadplan.runtime.plan_format import PlanError
from loadplan.runtime.save import SaveError, save_checkpoint
from loadplan.runtime.tensor_type import TensorType

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.emb.weight


@dataclass(frozen=True, slots=True)
class Twice:
    """The first rows, and the first rows again: an op of a user's own, which uses elements twice."""

    spread: ClassVar[Spread] = "each"
    rows: int

    def bind(self, context: Binding, *args: TensorType) -> Twice:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return (TensorType((2 * self.rows, *args[0].shape[1:]), args[0].dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        first = pieces.narrow(args[0], 0, 0, self.rows)
        return (pieces.concatenate([first, first], 0),)

    def reverse(self, *args: TensorType) -> Slice:
        return Slice(0, 0, self.rows)


class TestRefused:
    """Each with nothing written: a new folder is not even made, an old one keeps what it had."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        tensors = {"a.w": raw("F32", 4, 3), "b.w": raw("F32", 4, 3), "n": raw("F16", 2)}
        return write_shards(tmp_path / "source", {ONE: tensors, TWO: {"m": raw("I32", 3)}})

    def refused(
        self, state: object, plan: object, source: Path, match: str, error: type[LoadplanError] = SaveError
    ) -> None:
        before = files_in(source)
        for folder in (source.parent / "new", source):
            with pytest.raises(error, match=match):
                save_checkpoint(state, plan, folder)  # type: ignore[arg-type]
        assert not (source.parent / "new").exists()
        assert files_in(source) == before
        assert {path.name for path in source.iterdir()} == {ONE, TWO, INDEX}

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"n": None}, "n is missing"),
            ({"n": None, "m": None}, "m is missing; n is missing"),
            ({"extra": torch.zeros(1)}, "the plan does not make extra"),
            ({"n": torch.zeros(3).half()}, r"n is \(3,\) torch.float16, F16\[2\] in the plan"),
            ({"n": torch.zeros(2, 1).half()}, r"n is \(2, 1\) torch.float16, F16\[2\] in the plan"),
            ({"n": torch.zeros(2)}, r"n is \(2,\) torch.float32, F16\[2\] in the plan"),
            ({"n": torch.zeros(2, dtype=torch.bfloat16)}, "torch.bfloat16"),
            ({"n": torch.zeros(2, dtype=torch.float16, device="meta")}, "n is on the meta device: it has no values"),
            ({"n": torch.zeros(2).half().to_sparse()}, "n is a tensor of layout torch.sparse_coo; give a dense one"),
            ({"n": [1.0, 2.0]}, "n is a list, not a tensor"),
            ({"extra": 3}, "the plan does not make extra"),
            ({str(number): torch.zeros(1) for number in range(7)}, r"does not make 4 \(and 2 more\)"),
        ],
    )
    def test_states(self, source: Path, changes: Mapping[str, object], match: str) -> None:
        plan = compile_plan(source)
        state: dict[str, object] = {**load_state_dict(plan, source), **changes}
        self.refused({name: tensor for name, tensor in state.items() if tensor is not None}, plan, source, match)

    def test_numbers_of_states(self, source: Path) -> None:
        plan = compile_plan(source, target=Target(tp_size=2, tp_plan={"a.w": "colwise"}))
        first, second = load_ranks(plan, source)
        for states in (first, [first], [], [first, second, second]):
            count = len(states) if isinstance(states, list) else 1
            self.refused(states, plan, source, f"the plan has 2 ranks, {count} states were given: give one per rank")
        self.refused([first, {**second, "a.w": torch.zeros(4, 3)}], plan, source, r"rank 1: a\.w is \(4, 3\)")
        self.refused([first, second], compile_plan(source), source, "the plan has 1 ranks, 2 states were given")

    @pytest.mark.parametrize("value", [torch.zeros(3, 2), torch.full((3, 2), -5.0), torch.zeros(2, 3), None])
    def test_aliases_that_differ(self, tmp_path: Path, value: torch.Tensor | None) -> None:
        source = save_tensors(tmp_path / "source", {"emb.weight": filled(5, 3, 2)})
        plan = compile_plan(source, signature=Signature.from_module(Tied()))
        loaded = load_state_dict(plan, source)
        with pytest.raises(SaveError, match=r"head\.weight (and emb\.weight are one tensor|is)"):
            save_checkpoint({**loaded, "head.weight": value}, plan, tmp_path / "saved")  # type: ignore[dict-item]
        assert not (tmp_path / "saved").exists()

    @pytest.mark.parametrize(
        ("rule", "match"),
        [
            (WeightConverter("a.w", "a.w", [Slice(0, 1, 4)]), r"a\.w cannot be restored: 9 elements .* it has 12"),
            (WeightConverter("a.w", "a.w", [Slice(1, 0, 2)]), r"a\.w cannot be restored: 8 elements"),
            (WeightConverter("a.w", "a.w", [Slice(0, 2, 2)]), r"a\.w cannot be restored: 0 elements"),
            (
                WeightConverter(["a.w", "b.w"], "ab", [Concatenate(0), Slice(0, 0, 4)]),
                r"b\.w cannot be restored: 0 elements",
            ),
            (WeightConverter("a.w", "a.w", [Twice(4)]), r"a\.w cannot be restored: 24 elements"),
            (WeightConverter("a.w", "a.w", [Twice(2)]), r"a\.w cannot be restored: element 0 is written twice"),
        ],
    )
    def test_what_cannot_be_run_backwards(self, source: Path, rule: Rule, match: str) -> None:
        """A source used in part, not at all, twice, or in part twice."""
        plan = compile_plan(source, Recipe([rule]))
        self.refused(load_state_dict(plan, source), plan, source, match + ".* use original_format=False")

    @pytest.mark.parametrize(
        ("last", "fault"),
        [
            (Slice(1, 0, 12), "96 elements are written, it has 192"),
            (Twice(8), "384 elements are written, it has 192"),
            (Twice(4), "192 elements are written, it has 96"),  # the rows that nobody reads are not made
        ],
    )
    def test_temporaries_used_in_part_or_twice(
        self, source: Path, monkeypatch: pytest.MonkeyPatch, last: Op, fault: str
    ) -> None:
        monkeypatch.setattr(pieces, "MAX_PIECES", 2)
        tensors = {"a.w": raw("F32", 8, 12), "b.w": raw("F32", 8, 12), "n": raw("F16", 2)}
        write_shards(source, {ONE: tensors, TWO: {"m": raw("I32", 3)}})
        ops: list[Op] = [Concatenate(0), Transpose(0, 1), Reshape((8, 24)), last]
        plan = compile_plan(source, Recipe([WeightConverter(["a.w", "b.w"], "ab", ops)]))
        assert plan.section(0).temporaries
        self.refused(load_state_dict(plan, source), plan, source, f"a temporary of rank 0, {fault}")

    def test_twice_but_each_once(self, source: Path, tmp_path: Path) -> None:
        """What counts is the elements: rows 2, 3, 0, 1 of four are all of them."""
        plan = compile_plan(source, Recipe([WeightConverter("a.w", "a.w", [Twice(4), Slice(0, 2, 6)])]))
        check_restores(plan, source, tmp_path / "saved")

    def test_a_part_that_is_waived(self, source: Path) -> None:
        """Half of a tensor is loaded: the other half is known to nobody."""
        recipe = Recipe([WeightConverter("a.w", ["x", "y"], [Chunk(0)])], may_be_unused=["y"])
        plan = compile_plan(source, recipe)
        self.refused(load_state_dict(plan, source), plan, source, r"a\.w cannot be restored: 6 elements")

    def test_plans_without_an_origin(self, source: Path, tmp_path: Path) -> None:
        artifact = convert(compile_plan(source), source, tmp_path / "artifact")
        loaded = load_state_dict(artifact)
        mapping = Plan.open(artifact.folder / "artifact.loadplan")
        self.refused(loaded, mapping, source, "does not say what the checkpoint looked like; use original_format=False")
        (path,) = save_checkpoint(loaded, mapping, tmp_path / "runtime", original_format=False)
        assert safetensors.torch.load_file(path).keys() == loaded.keys()

    def test_artifacts_that_lost_their_plan(self, source: Path, tmp_path: Path) -> None:
        artifact = convert(compile_plan(source), source, tmp_path / "artifact")
        loaded = load_state_dict(artifact)
        original = artifact.folder / "original.loadplan"
        compile_plan(source, Recipe([WeightRenaming("a", "c")])).save(original)
        self.refused(loaded, artifact, source, "is not the plan that artifact.loadplan was made by", ArtifactError)
        original.write_bytes(b"LOADPLAN")
        self.refused(loaded, artifact, source, "ends inside its frame table|is not a plan file", PlanError)
        original.unlink()
        self.refused(loaded, artifact, source, "holds no original.loadplan", ArtifactError)


def lie(plan: Plan, **changes: object) -> Plan:
    """The plan with another origin, its digests made to fit."""
    assert plan.origin is not None
    origin = replace(plan.origin, **changes)  # type: ignore[arg-type]
    files = tuple(
        replace(file, header_digest=sha256(header).hexdigest())
        for file, header in zip(plan.head.files, origin.headers, strict=True)
    )
    sections = tuple(plan.section(rank) for rank in range(plan.world_size))
    return Plan.of(replace(plan.head, files=files), sections, origin)


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


class TestHostilePlans:
    """A plan comes from an untrusted place, its origin too: whatever it says, nothing is written elsewhere."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        tensors = {"a": raw("F32", 4), "b": raw("F32", 2)}
        return write_shards(tmp_path / "source", {ONE: tensors, TWO: {"c": raw("I32", 3)}})

    def refused(self, plan: Plan, source: Path, match: str) -> None:
        with pytest.raises((PlanError, SaveError), match=match):
            save_checkpoint(
                {name: t + 0 for name, t in load_state_dict(compile_plan(source), source).items()},
                plan,
                source.parent / "saved",
            )
        assert {path.name for path in source.parent.iterdir()} == {"source"}

    @pytest.mark.parametrize(
        ("header", "match"),
        [
            (b"", "another length than it says|not JSON"),
            (b"12345678", "not JSON"),
            (framed(b"{"), "the header of .* is not JSON"),
            (framed(b"\xff\xfe{}"), "is not JSON"),
            (framed(b"[]"), "is no JSON object"),
            (framed(b'"a"'), "is no JSON object"),
            (framed(b"[" * 100_000), "is not JSON"),
            (framed(b"{}"), "source 'a' is not what its header in the plan says"),
            (framed(b'{"a":null,"b":[]}'), "source 'a' is not what its header in the plan says"),
            (framed(b"{}") + b" ", "another length than it says"),
        ],
    )
    def test_headers(self, source: Path, header: bytes, match: str) -> None:
        plan = compile_plan(source)
        assert plan.origin is not None
        self.refused(lie(plan, headers=(header, plan.origin.headers[1])), source, match)

    def test_what_cannot_be_closed_up(self, source: Path) -> None:
        """JSON that is read and cannot be written: text that is no Unicode, and levels that are too many."""
        plan = compile_plan(source, Recipe(may_be_unused=["b"]))
        assert plan.origin is not None
        first, second = plan.origin.headers
        lone = framed(first[8:].rstrip().removesuffix(b"}") + b',"__metadata__":{"a":"\\ud800"}}')
        moved = tuple(
            replace(item, offset=item.offset - len(first) + len(lone)) if item.file == 0 else item
            for item in plan.origin.sources
        )
        longer = replace(plan.head.files[0], size=plan.head.files[0].size - len(first) + len(lone), guards=())
        columns = plan.section(0).copies
        copies = [
            copy._replace(src=copy.src - len(first) + len(lone) if copy.source == 0 else copy.src) for copy in columns
        ]
        head = replace(plan.head, files=(replace(longer, header_digest=sha256(lone).hexdigest()), plan.head.files[1]))
        state = load_state_dict(plan, source)
        lying = Plan.of(
            head, (Section((), CopyColumns.of(copies)),), replace(plan.origin, headers=(lone, second), sources=moved)
        )
        with pytest.raises(PlanError, match="a header or index in the plan cannot be closed up"):
            save_checkpoint(state, lying, source.parent / "saved")
        deep = b'{"weight_map":{"b":"x"},"metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5001  # some json reads it
        with pytest.raises(PlanError, match=r"cannot be closed up|is not JSON"):
            save_checkpoint(state, lie(plan, others=((INDEX, deep),)), source.parent / "saved")
        assert not (source.parent / "saved").exists()

    def test_number_of_headers(self, source: Path) -> None:
        plan = compile_plan(source)
        assert plan.origin is not None
        sections = (plan.section(0),)
        for headers in ((), plan.origin.headers[:1], plan.origin.headers * 2):
            lying = Plan.of(plan.head, sections, replace(plan.origin, headers=headers))
            self.refused(lying, source, f"{len(headers)} headers for 2 files")

    @pytest.mark.parametrize("kind", ["F32[4] at 8", "F32[2] at 0", "F32[4] at 4", "I32[4] at 0", "F32[2,2] at 0"])
    def test_sources(self, source: Path, kind: str) -> None:
        """Other places, sizes and dtypes than the header's; and a header that agrees with the lie."""
        plan = compile_plan(source)
        assert plan.origin is not None
        shape, _, place = kind.partition(" at ")
        dtype, _, sizes = shape.removesuffix("]").partition("[")
        lied = TensorType(tuple(map(int, sizes.split(","))), DType(dtype))
        start = len(plan.origin.headers[0])
        others = tuple(source for source in plan.origin.sources if source.name != "a")
        false = PlanSource("a", lied, 0, start + int(place))
        self.refused(lie(plan, sources=(false, *others)), source, "source 'a' is not what its header")
        header = json.loads(plan.origin.headers[0][8:])
        header["a"] = {"dtype": dtype, "shape": lied.shape, "data_offsets": [int(place), int(place) + lied.nbytes]}
        text = json.dumps(header, separators=(",", ":")).encode()
        if lied.shape == (2, 2):
            return  # the plan may as well have been compiled for such a file
        text += b" " * (start - 8 - len(text))
        self.refused(
            lie(plan, sources=(false, *others), headers=(framed(text), plan.origin.headers[1])),
            source,
            "overlap|names no tensor|cannot be restored|reads 'a' as F32|does not lie in a file",
        )

    def lies_about(self, plan: Plan, without: str = "", more: Sequence[PlanSource] = ()) -> Plan:
        """The plan without one source of its first file, or with more, whose header says the same at the same length."""
        assert plan.origin is not None
        first, second = plan.origin.headers
        header = json.loads(first[8:])
        header.pop(without, None)
        for source in more:
            begin = source.offset - len(first)
            span = [begin, begin + source.type.nbytes]
            header[source.name] = {"dtype": source.type.dtype, "shape": source.type.shape, "data_offsets": span}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (len(first) - 8 - len(text))
        assert len(text) == len(first) - 8
        sources = sorted(
            (*(s for s in plan.origin.sources if s.name != without), *more), key=lambda source: source.name
        )
        return lie(plan, sources=tuple(sources), headers=(framed(text), second), traces=())

    def test_sources_that_contradict_the_copies(self, tmp_path: Path) -> None:
        """Origins whose headers agree with them: only the copies, or the size of the file, tell."""
        padded = {"a": raw("F32", 4), "b": raw("F32", 2), "c": raw("F32", 3), "long" * 50: raw("U8", 0)}
        source = write_shards(tmp_path / "source", {ONE: padded, TWO: {"d": raw("I32", 3)}})
        plan = compile_plan(source, Recipe(may_be_unused=["b", "long" * 50]))
        assert plan.origin is not None
        start = len(plan.origin.headers[0])
        plain = self.lies_about(plan, without="long" * 50)
        state = load_state_dict(plan, source)
        save_checkpoint(state, plain, tmp_path / "fine")
        assert safetensors.torch.load_file(tmp_path / "fine" / ONE).keys() == {"a", "c"}
        overlapping = PlanSource("z", TensorType((1,), DType.F32), 0, start + 8)
        for lying, match in (
            (self.lies_about(plain, without="b"), "leaves gaps in its file"),
            (self.lies_about(plain, without="a"), "where the plan names no tensor"),
            (self.lies_about(plain, without="c"), "where the plan names no tensor"),
            (self.lies_about(plain, more=[overlapping]), "sources 'a' and 'z' of the plan overlap"),
        ):
            with pytest.raises(PlanError, match=match):
                save_checkpoint(state, lying, tmp_path / "saved")
            assert not (tmp_path / "saved").exists()

    @pytest.mark.parametrize(
        ("others", "match"),
        [
            ((("../evil.json", b"{}"),), "leads out of the checkpoint folder"),
            ((("/tmp/evil.json", b"{}"),), "leads out of the checkpoint folder"),
            ((("a/../../evil.json", b"{}"),), "leads out of the checkpoint folder"),
            ((("deep/evil.json", b'{"weight_map":{}}'),), "which is no index or config"),
            ((("evil.py", b'{"weight_map":{}}'),), "which is no index or config"),
            (((ONE, b'{"weight_map":{}}'),), "which is no index or config"),
            ((("config.json", b"{}"), ("config.json", b"{}")), "would stand in one place"),
            ((("config.json", b"\x80"),), "is not JSON"),
            ((("config.json", b"[]"),), "is no JSON object"),
            (((INDEX, b"{"),), "is not JSON"),
            (((INDEX, b"{}"),), "has no weight_map"),
            (((INDEX, b'{"weight_map":[]}'),), "has no weight_map"),
        ],
    )
    def test_index_and_config(self, source: Path, others: tuple[tuple[str, bytes], ...], match: str) -> None:
        self.refused(lie(compile_plan(source), others=others), source, match)

    def test_files_in_one_place(self, source: Path) -> None:
        plan = compile_plan(source)
        origin = plan.origin
        assert origin is not None
        nested = replace(plan.head, files=(plan.head.files[0], replace(plan.head.files[1], name=f"{ONE}/x")))
        self.refused(Plan.of(nested, (plan.section(0),), origin), source, "would stand in one place")

    def test_files_behind_links(self, source: Path, tmp_path: Path) -> None:
        """A folder inside the folder that is a link to elsewhere."""
        plan = compile_plan(source)
        linked = replace(plan.head, files=(plan.head.files[0], replace(plan.head.files[1], name="deep/x.safetensors")))
        lying = Plan.of(linked, (plan.section(0),), plan.origin)
        saved, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
        saved.mkdir()
        elsewhere.mkdir()
        (saved / "deep").symlink_to(elsewhere)
        with pytest.raises(SaveError, match="deep: leads out of"):
            save_checkpoint(load_state_dict(compile_plan(source), source), lying, saved)
        assert files_in(elsewhere) == {} and [path.name for path in saved.iterdir()] == ["deep"]

    def test_names_that_are_too_long(self, source: Path) -> None:
        plan = compile_plan(source)
        long = replace(plan.head, files=(replace(plan.head.files[0], name="x" * 300), plan.head.files[1]))
        with pytest.raises(FolderNotWritable, match="File name too long"):
            save_checkpoint(
                load_state_dict(compile_plan(source), source),
                Plan.of(long, (plan.section(0),), plan.origin),
                source.parent / "saved",
            )
        assert files_in(source.parent).keys() == {f"source/{name}" for name in files_in(source)}


@st.composite
def origins(draw: st.DrawFn, origin: Origin) -> Origin:
    """An origin with lies in it."""
    sources = list(origin.sources)
    headers = list(origin.headers)
    others = list(origin.others)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["source", "header", "other", "text"]))
        if kind == "source":
            at = draw(st.integers(0, len(sources) - 1))
            numel = draw(st.sampled_from([0, 1, 2, 4, 6]))
            sources[at] = replace(
                sources[at],
                file=draw(st.sampled_from([0, 1, 2])),
                offset=max(0, sources[at].offset + draw(st.sampled_from([-1000, -8, -4, 0, 4, 8, 2**40]))),
                type=TensorType((numel,), draw(st.sampled_from([DType.F32, DType.I32, DType.U8, DType.F64]))),
            )
        elif kind == "other":
            name = draw(st.sampled_from([INDEX, "config.json", "../config.json", ONE, "x/y.json", ".", "a\0b", "/x"]))
            others.append((name, draw(json_texts("weight_map"))))
        else:
            at = draw(st.integers(0, len(headers) - 1))
            text = bytearray(headers[at][8:])
            if kind == "header":
                text = bytearray(draw(json_texts()))
            elif text:
                text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(32, 126))
            headers[at] = framed(bytes(text)) if draw(st.booleans()) else bytes(text)
    return Origin(tuple(sources), tuple(headers), tuple(others))


@settings(max_examples=150)
@given(data=st.data())
def test_lies_are_refused_or_harmless(data: st.DataObject) -> None:
    """Our errors only, and no byte outside of the folder; inside it whole files or none."""
    with TemporaryDirectory() as folder:
        shards = {ONE: {"a": raw("F32", 4), "b": raw("F32", 2)}, TWO: {"c": raw("I32", 3), "z": raw("U8", 0)}}
        source = write_shards(Path(folder, "source"), shards)
        before = files_in(Path(folder))
        plan = compile_plan(source)
        state = load_state_dict(plan, source)
        assert plan.origin is not None
        try:
            written = save_checkpoint(
                state, lie(plan, **vars_of(data.draw(origins(plan.origin)))), Path(folder, "inner/saved")
            )
        except LoadplanError:
            assert files_in(Path(folder)) == before
            return
        after = files_in(Path(folder))
        assert {name: after[name] for name in before} == before
        assert {Path(folder, name) for name in after.keys() - before.keys()} == set(written)
        for path in written:
            if path.suffix == ".safetensors":
                for name, tensor in safetensors.torch.load_file(path).items():
                    assert bytes_of(tensor) == bytes_of(state[name])


def vars_of(origin: Origin) -> dict[str, object]:
    return {"sources": origin.sources, "headers": origin.headers, "others": origin.others}
