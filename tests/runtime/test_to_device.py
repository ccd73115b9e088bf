"""Loading through staging: onto the CPU everywhere, onto an accelerator where there is one; the same bytes as in place."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from builders import BITS, bytes_of, raw, write_file

from loadplan.compiler import Target, compile_plan, pieces
from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist, Permute, Transpose
from loadplan.recipes import Recipe, WeightConverter
from loadplan.runtime import Plan, load_state_dict, to_device
from loadplan.runtime.cast import CastOverflow
from loadplan.runtime.execute import Execution, ModeError
from loadplan.runtime.source_files import find_files

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
    ),
]
RECIPE = Recipe(
    [
        WeightConverter(["e.*.gate", "e.*.up"], "e.gate_up", [MergeModulelist(0), Concatenate(1), Transpose(1, 2)]),
        WeightConverter("qkv", ["q", "k", "v"], [Chunk(0)]),
        WeightConverter("cube", "turned", [Permute((0, 2, 1))]),
    ],
    dtype_plan={"e.gate_up": "float16", "turned": "float64"},
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {f"e.{n}.{name}": raw("BF16", 6, 10, seed=n) for n in range(3) for name in ("gate", "up")}
    tensors = {name: type(t)(t.dtype, t.shape, bytes(b & 0x3F for b in t.data)) for name, t in tensors.items()}  # small
    tensors |= {"qkv": raw("I32", 12, 5), "cube": raw("F32", 3, 5, 4), "odd": raw("U8", 3), "flag": raw("BOOL", 7)}
    tensors |= {f"t.{dtype}": raw(dtype, 3, 8) for dtype in BITS if not dtype.startswith(("F6", "F4"))}
    write_file(tmp_path / "m.safetensors", tensors)
    return tmp_path


def staged(plan: Plan, folder: Path, device: str, threads: int, rank: int = 0) -> dict[str, torch.Tensor]:
    files = find_files(folder, plan.head.files)
    execution = Execution(plan.head, plan.section(rank), rank, files, threads=threads, device=torch.device(device))
    loaded = execution.run()
    assert {tensor.device.type for tensor in loaded.values()} == {device}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loadplan")]
    return {plan.head.tensors[number].name: tensor.cpu() for number, tensor in loaded.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("budget", [64 << 20, 600], ids=["whole", "tiled"])
@pytest.mark.parametrize("most", [None, 3], ids=["direct", "temporaries"])
def test_as_in_place(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, device: str, threads: int, budget: int, most: int | None
) -> None:
    monkeypatch.setattr(to_device, "STAGING_NBYTES", budget)
    if most is not None:
        monkeypatch.setattr(pieces, "MAX_PIECES", most)
    target = Target(tp_size=2, tp_plan={"q": "colwise", "turned": "colwise"})
    plan = compile_plan(checkpoint, RECIPE, target=target)
    assert bool(plan.section(0).temporaries) == (most is not None)
    for rank in range(2):
        wanted = load_state_dict(plan, checkpoint, rank, mode="copy")
        found = staged(plan, checkpoint, device, threads, rank)
        assert {n: (t.shape, t.dtype, bytes_of(t)) for n, t in found.items()} == {
            n: (t.shape, t.dtype, bytes_of(t)) for n, t in wanted.items()
        }


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_in_the_order_of_the_model(checkpoint: Path, device: str) -> None:
    plan = compile_plan(checkpoint, RECIPE)
    files = find_files(checkpoint, plan.head.files)
    execution = Execution(plan.head, plan.section(0), 0, files, threads=1, device=torch.device(device))
    loading = execution.start(range(len(plan.head.tensors) - 1, -1, -1))
    wanted = load_state_dict(plan, checkpoint)
    for number, tensor in enumerate(plan.head.tensors):
        (found,) = loading.wait([number]).values()
        assert bytes_of(found.cpu()) == bytes_of(wanted[tensor.name])
    loading.result()


@pytest.mark.parametrize("device", DEVICES)
def test_overflow(tmp_path: Path, device: str) -> None:
    write_file(tmp_path / "m.safetensors", {"w": type(raw("F32", 1))("F32", (2,), b"\0\0\0\0\0\0\x80\x7e")})
    plan = compile_plan(tmp_path, Recipe(dtype_plan={"w": "float16"}))
    with pytest.raises(CastOverflow, match="w: 1 finite values"):
        staged(plan, tmp_path, device, 2)


@pytest.mark.parametrize(("mode", "residency"), [("map", "lazy"), ("auto", "lock"), ("auto", "read")])
def test_nothing_is_mapped_there(checkpoint: Path, mode: str, residency: str) -> None:
    plan = compile_plan(checkpoint, RECIPE)
    execution = Execution(
        plan.head,
        plan.section(0),
        0,
        find_files(checkpoint, plan.head.files),
        mode=mode,  # type: ignore[arg-type]
        residency=residency,  # type: ignore[arg-type]
        device=torch.device("cpu"),
    )
    with pytest.raises(ModeError, match="files are mapped in the memory of this host"):
        execution.run()
