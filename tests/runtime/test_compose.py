"""Tensors mapped from several stretches: the same bytes as reading gives, private, and of pages that are shared."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from builders import bytes_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from loadplan.compiler import Target, compile_plan
from loadplan.compiler.ops import Concatenate, MergeModulelist, Transpose
from loadplan.recipes import Recipe, WeightConverter
from loadplan.runtime import load_state_dict
from loadplan.runtime.compose import compose, joined, shift_of
from loadplan.runtime.pages import PAGE_NBYTES, bytes_at
from loadplan.runtime.schedule import Stretch

EXPERTS, ROWS, COLUMNS = 4, 256, 512  # an expert's matrix in float16 has 64 pages


def stretches_of(sizes: list[int], gaps: list[int]) -> list[Stretch]:
    """Stretches that fill a buffer in order; in the file each follows the one before after a gap."""
    found, src, dst = [], 0, 0
    for nbytes, gap in zip(sizes, gaps, strict=True):
        src += gap
        found.append(Stretch(0, src, nbytes, 0, dst))
        src, dst = src + nbytes, dst + nbytes
    return found


@given(
    sizes=st.lists(st.integers(1, 5 * PAGE_NBYTES), min_size=1, max_size=6),
    gaps=st.lists(st.sampled_from([0, 1, 8, 4096, 4100, 8192, 12_345]), min_size=6, max_size=6),
    shift=st.integers(0, PAGE_NBYTES - 1),
    backwards=st.booleans(),
)
def test_any_stretches(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], gaps: list[int], shift: int, backwards: bool
) -> None:
    """Whatever the shift: what is not mapped is read."""
    stretches = stretches_of(sizes, gaps[: len(sizes)])
    end = stretches[-1].src + stretches[-1].nbytes
    data = os.urandom(end)
    path = tmp_path_factory.mktemp("data") / "file"
    path.write_bytes(data)
    if backwards:  # in the buffer the other way round
        total = sum(sizes)
        stretches = [s._replace(dst=total - s.dst - s.nbytes) for s in stretches]
    wanted = bytearray(sum(sizes))
    for s in stretches:
        wanted[s.dst : s.dst + s.nbytes] = data[s.src : s.src + s.nbytes]
    with path.open("rb") as file:

        class Opened:
            def __enter__(self) -> int:
                return file.fileno()

            def __exit__(self, *_: object) -> None:
                pass

        parts = joined(stretches)
        memory, rest = compose(parts, shift, lambda _: Opened())
        for stretch, address in rest:
            bytes_at(address, stretch.nbytes)[:] = data[stretch.src : stretch.src + stretch.nbytes]
    assert bytes(memory) == wanted
    best = shift_of(parts, 1)
    if best is not None:
        _, seams = compose(parts, best, lambda _: _opened(path))
        assert sum(s.nbytes for s, _ in seams) <= sum(sizes) // 10 + 2 * PAGE_NBYTES * len(parts)


class _opened:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> int:
        self.descriptor = os.open(self.path, os.O_RDONLY)
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def test_neighbours_are_joined() -> None:
    one, two, apart = Stretch(0, 100, 50, 7, 0), Stretch(0, 150, 30, 7, 50), Stretch(0, 181, 9, 7, 80)
    assert joined([apart, two, one]) == [Stretch(0, 100, 80, 7, 0), apart]
    assert joined([one, two._replace(file=1)]) == [one, two._replace(file=1)]


@pytest.mark.parametrize(
    ("srcs", "nbytes", "itemsize", "shift"),
    [
        ([8, 8 + (1 << 20)], 1 << 20, 2, 8),  # alike: 8 bytes behind a page
        ([8, 4104 + (1 << 20)], 1 << 20, 2, 8),
        ([9, 9 + (1 << 20)], 1 << 20, 2, None),  # not on an element
        ([8, 24 + (1 << 20)], 1 << 20, 2, None),  # only half of it alike
        ([0, 1 << 16], 1 << 16, 2, None),  # small
    ],
)
def test_when_it_pays(srcs: list[int], nbytes: int, itemsize: int, shift: int | None) -> None:
    stretches = [Stretch(0, src, nbytes, 0, number * nbytes) for number, src in enumerate(srcs)]
    assert shift_of(stretches, itemsize) == shift


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {
        f"experts.{n}.{name}.weight": torch.randint(-99, 99, (ROWS, COLUMNS), dtype=torch.int16).view(torch.float16)
        for n in range(EXPERTS)
        for name in ("down", "gate", "up")
    }
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(tensors | {"a.norm": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    return folder


RECIPE = Recipe(
    [
        WeightConverter(
            ["experts.*.gate.weight", "experts.*.up.weight"],
            "experts.gate_up",
            [MergeModulelist(0), Concatenate(1)],
        ),
        WeightConverter("experts.*.down.weight", "experts.down", [MergeModulelist(0)]),
    ]
)


def composed(caplog: pytest.LogCaptureFixture) -> int:
    """How many tensors the log says were composed of pages."""
    (line,) = [r.args for r in caplog.records if r.name == "loadplan.runtime.execute"]
    assert isinstance(line, tuple)
    return int(str(line[2]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_stacks_are_mapped(checkpoint: Path, caplog: pytest.LogCaptureFixture, ranks: int) -> None:
    target = Target(tp_size=ranks, tp_plan={"experts.gate_up": "packed_colwise"} if ranks > 1 else None)
    plan = compile_plan(checkpoint, RECIPE, target=target)
    for rank in range(ranks):
        caplog.clear()
        with caplog.at_level("INFO", "loadplan.runtime.execute"):
            tensors = load_state_dict(plan, checkpoint, rank)
        assert composed(caplog) == 2
        read = load_state_dict(plan, checkpoint, rank, mode="read")
        assert {n: bytes_of(t) for n, t in tensors.items()} == {n: bytes_of(t) for n, t in read.items()}
        mapped = load_state_dict(compile_plan(checkpoint, RECIPE, target=target), checkpoint, rank, mode="auto")
        mapped["experts.down"].fill_(0)  # private: neither the file nor another load sees it
        assert bytes_of(tensors["experts.down"]) == bytes_of(read["experts.down"])
        assert not mapped["experts.down"].any()


def test_little_memory_of_its_own(checkpoint: Path) -> None:
    """Of a stack, only the seams are anonymous memory: one or two pages an expert."""
    plan = compile_plan(checkpoint, RECIPE)
    tensors = load_state_dict(plan, checkpoint)
    stack = tensors["experts.down"]
    low, high = stack.data_ptr(), stack.data_ptr() + stack.numel() * 2
    stack.view(torch.int16).sum()
    anonymous, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            inside = first < high and last > low
        elif inside and line.startswith("Anonymous:"):
            anonymous += int(line.split()[1]) * 1024
    assert anonymous <= 2 * (EXPERTS + 1) * PAGE_NBYTES < stack.numel() * 2 / 4


def test_unmapped_when_the_last_tensor_is_gone(checkpoint: Path) -> None:
    def maps() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count(str(checkpoint))

    tensors = load_state_dict(compile_plan(checkpoint, RECIPE), checkpoint)
    part = tensors["experts.down"][1]
    del tensors
    assert maps() > 0
    assert part.shape == (ROWS, COLUMNS)
    del part
    assert maps() == 0


def test_what_is_turned_is_copied(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(
        [WeightConverter("experts.*.down.weight", "experts.down", [MergeModulelist(0), Transpose(1, 2)])],
        may_be_unused=["gate", "up"],
    )
    with caplog.at_level("INFO", "loadplan.runtime.execute"):
        tensors = load_state_dict(compile_plan(checkpoint, recipe), checkpoint)
    assert composed(caplog) == 0
    parts = [tensors[f"experts.{n}.down.weight"] for n in range(EXPERTS) if f"experts.{n}.down.weight" in tensors]
    assert not parts
    assert tensors["experts.down"].shape == (EXPERTS, COLUMNS, ROWS)
