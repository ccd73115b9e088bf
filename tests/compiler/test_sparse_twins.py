"""Compiling published models of full size: time, memory and bytes read, and the sizes that the publisher states.

The index and config are those of real models (tests/data, see SOURCE.txt there); the files beside them are twins with
complete headers and holes for data. That the compiler accepts them means that transformers' model has the same names and
shapes. Memory and bytes read are the operating system's numbers for a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import sparse_twin
from safetensors import safe_open

from loadplan.compiler import Target, compile_plan
from loadplan.runtime import Plan

DATA = Path(__file__).parents[1] / "data"
GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    """What is known of a model from its publisher and its architecture."""

    tensors: int
    files: int
    targets: int
    layers: int


MODELS: Mapping[str, Model] = {
    "mixtral-8x22b": Model(tensors=1739, files=59, targets=3 + 56 * 9, layers=56),
    "llama3_1-70b": Model(tensors=723, files=162, targets=3 + 80 * 9, layers=80),
}

_COMPILE = """
import json, sys, time
from loadplan.compiler import Target, compile_plan

def read_nbytes():
    with open("/proc/self/io") as counters:
        return int(counters.readline().removeprefix("rchar:"))

warm, folder, results = sys.argv[1:]
compile_plan(warm, target=Target(tp_size=2))  # whatever is imported later is imported now
for ranks in (1, 8):
    began, before = time.perf_counter(), read_nbytes()
    plan = compile_plan(folder, target=Target(tp_size=ranks))
    seconds, read = time.perf_counter() - began, read_nbytes() - before
    plan.save(f"{results}/tp{ranks}.loadplan")
    peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024  # ru_maxrss has the parent's
    print(json.dumps({"ranks": ranks, "seconds": seconds, "read": read, "peak": peak}))
"""


def published(model: str) -> tuple[dict[str, object], dict[str, object]]:
    """The index and the config."""
    folder = DATA / model
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return index, json.loads((folder / "config.json").read_text())


@dataclass(frozen=True)
class Run:
    """What the process measured of one compilation."""

    ranks: int
    seconds: float
    read: int  # bytes, by all read calls
    peak: int  # bytes of resident memory, of the whole process so far


@dataclass(frozen=True)
class Compiled:
    """A twin and its plans."""

    model: str
    twin: Path
    plans: Path
    runs: tuple[Run, ...]

    def plan(self, ranks: int) -> Plan:
        return Plan.open(self.plans / f"tp{ranks}.loadplan")


@pytest.fixture(scope="module", params=MODELS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Each model, compiled for one rank and for eight in a process of its own."""
    model = str(request.param)
    index, config = published(model)
    folder = tmp_path_factory.mktemp(model)
    sparse_twin(index, config, folder / "twin")
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    first = {name: file for name, file in weight_map.items() if "layers." not in name or ".layers.0." in name}
    sparse_twin({"weight_map": first}, {**config, "num_hidden_layers": 1}, folder / "warm")
    (folder / "plans").mkdir()
    command: list[str | Path] = [sys.executable, "-c", _COMPILE, folder / "warm", folder / "twin", folder / "plans"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(f"\n{model}:\n{output}")
    runs = tuple(Run(**json.loads(line)) for line in output.splitlines())
    return Compiled(model, folder / "twin", folder / "plans", runs)


def test_the_twin_is_what_was_published(compiled: Compiled) -> None:
    index, _ = published(compiled.model)
    weight_map, metadata = index["weight_map"], index["metadata"]
    assert isinstance(weight_map, dict) and isinstance(metadata, dict)
    assert (len(weight_map), len(set(weight_map.values()))) == (
        MODELS[compiled.model].tensors,
        MODELS[compiled.model].files,
    )
    files = sorted(compiled.twin.glob("*.safetensors"))
    assert sum(path.stat().st_size - _header_nbytes(path) for path in files) == metadata["total_size"]
    assert sum(path.stat().st_blocks * 512 for path in files) < 32 << 20  # on disk: headers
    with safe_open(files[0], "pt") as reader:  # the library takes it for a complete file
        assert set(reader.keys()) == {name for name, file in weight_map.items() if file == files[0].name}


def test_compiling_takes_little_memory_and_reads_headers_only(compiled: Compiled) -> None:
    headers = sum(_header_nbytes(path) for path in compiled.twin.glob("*.safetensors"))
    texts = sum(path.stat().st_size for path in compiled.twin.glob("*.json"))
    assert [run.ranks for run in compiled.runs] == [1, 8]
    for run in compiled.runs:
        assert run.peak < 10**9
        assert headers + texts <= run.read < headers + texts + (64 << 10)


def _header_nbytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("ranks", [1, 8])
def test_bytes_to_read_are_the_bytes_of_the_rank(compiled: Compiled, ranks: int) -> None:
    index, _ = published(compiled.model)
    metadata, known = index["metadata"], MODELS[compiled.model]
    assert isinstance(metadata, dict)
    plan = compiled.plan(ranks)
    assert (len(plan.head.tensors), len(plan.head.files)) == (known.targets, known.files)
    whole = sum(tensor.type.nbytes for tensor in plan.head.tensors)
    assert whole == plan.report.target_nbytes == plan.report.source_nbytes == metadata["total_size"]
    for rank in range(ranks):
        cost = plan.cost(rank)
        assert cost.read_nbytes == cost.target_nbytes
        assert cost.temporary_nbytes == 0
    kept = sum(tensor.type.nbytes for tensor in plan.head.tensors if tensor.shard_dim < 0)
    assert sum(plan.cost(rank).read_nbytes for rank in range(ranks)) == whole + (ranks - 1) * kept


@pytest.mark.parametrize("compiled", ["mixtral-8x22b"], indirect=True)
def test_gate_and_up_of_a_layer_come_from_the_files_that_the_index_names(compiled: Compiled) -> None:
    index, _ = published(compiled.model)
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    plan = compiled.plan(8)
    numbers = {tensor.name: number for number, tensor in enumerate(plan.head.tensors)}
    for layer in range(MODELS[compiled.model].layers):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        tensor = plan.head.tensors[numbers[name]]
        assert tensor.type.shape == (8, 2 * 16384, 6144)
        for rank in (0, 7):
            wanted = {}  # where in the rank's tensor the part of each expert's matrix begins, and in which file it lies
            for expert in range(8):
                for half, part in enumerate(("w1", "w3")):
                    source = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"
                    begin = _place(compiled.twin / weight_map[source], source)
                    row = 2 * (expert * 4096 + half * 2048)
                    wanted[row * 6144] = (weight_map[source], begin + rank * 2 * 2048 * 6144)
            copies = [copy for copy in plan.section(rank).copies if copy.buffer == numbers[name]]
            assert {copy.dst: (plan.head.files[copy.source].name, copy.src) for copy in copies} == wanted
            assert all(copy.numel == 2048 * 6144 and not copy.loops for copy in copies)


_HEADERS: dict[Path, tuple[int, dict[str, dict[str, list[int]]]]] = {}


def _place(path: Path, name: str) -> int:
    """Where the data of a tensor begins in its file."""
    if path not in _HEADERS:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            _HEADERS[path] = (8 + length, json.loads(file.read(length)))
    start, header = _HEADERS[path]
    return start + header[name]["data_offsets"][0]


def test_a_vocabulary_that_does_not_divide(compiled: Compiled) -> None:
    _, config = published(compiled.model)
    vocabulary = config["vocab_size"]
    assert isinstance(vocabulary, int)
    plan = compiled.plan(8)
    sizes = {
        tensor.name: [tensor.local_type(rank).shape for rank in range(8)]
        for tensor in plan.head.tensors
        if tensor.name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    step = -(-vocabulary // 8)
    hidden = config["hidden_size"]
    wanted = [(min(step, vocabulary - rank * step), hidden) for rank in range(8)]
    assert sizes == {"model.embed_tokens.weight": wanted, "lm_head.weight": wanted}
    if compiled.model == "llama3_1-70b":
        assert [rows for rows, _ in wanted] == [16033] * 7 + [16031]


def test_a_hole_in_the_experts_of_a_full_size_model(tmp_path: Path) -> None:
    index, config = published("mixtral-8x22b")
    weight_map = index["weight_map"]
    assert isinstance(weight_map, dict)
    lost = "model.layers.37.block_sparse_moe.experts.5.w3.weight"
    kept = {name: file for name, file in weight_map.items() if name != lost}
    folder = sparse_twin({"weight_map": kept}, config, tmp_path)
    with pytest.raises(ValueError, match=r"1 of 8 numbers of .* are not in the checkpoint: 5") as caught:
        compile_plan(folder, target=Target(tp_size=8))
    assert "model.layers.37.mlp.experts.gate_up_proj" in str(caught.value)
    assert str(caught.value).startswith("cannot compile: 1 problem\n")
