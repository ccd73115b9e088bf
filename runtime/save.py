"""Saving: the tensors of a loaded model, back in the layout of the checkpoint that its plan was compiled for.

The program is the plan's own, run backwards: each copy goes from its buffer to its place in the file. It is proved
first, by the same proof as loading: every element of every stored tensor must be written exactly once. Files come out
bit for bit if values are unchanged: headers, index and config are those of the checkpoint, kept in the plan. Stored
tensors that the plan waived are left out, and the file's header then says so.
"""

from __future__ import annotations

import json
import mmap
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import nn

from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import commit, make_folder, temporary_file, write_atomically
from loadplan.runtime.artifact import Artifact, open_any
from loadplan.runtime.check_plan import Area, covers
from loadplan.runtime.dtype import DType
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Copy, Origin, PlanSource, Section
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype, torch_layout
from loadplan.runtime.write_safetensors import lay_out, write_tensors

State = Mapping[str, torch.Tensor]


class SaveError(LoadplanError, ValueError):
    """Tensors cannot be saved in the layout asked for; nothing was written."""


def save_checkpoint(
    state: State | nn.Module | Sequence[State | nn.Module],
    plan: Plan | Artifact | str | Path,
    folder: str | Path,
    original_format: bool = True,
) -> tuple[Path, ...]:
    """Write the tensors of `state` to `folder`; returns the files written.

    Args:
        state: a state dict or module with the plan's target names; for a plan of several ranks, one per rank, in order.
        plan: the plan or artifact that they were loaded by.
        folder: where to write; files of the same names are replaced, each when it is complete. Tensors that are mapped
            from those files stay as they are.
        original_format: the names, shapes, dtypes and files of the checkpoint, each tensor by where it came from; else
            the target names and layout, in `model.safetensors` or one file a rank.

    Raises:
        SaveError: tensors are missing, unknown or of other types than the plan's, tied names differ, `folder` holds
            other weights that a loader could take for these, or the plan cannot be run backwards.
    """
    opened = open_any(plan)
    loaded = opened.plan if isinstance(opened, Artifact) else opened
    states = [_tensors(item) for item in ([state] if isinstance(state, Mapping | nn.Module) else state)]
    _check_states(states, loaded)
    place = Path(folder)
    if not original_format:
        return _save_runtime_layout(states, loaded, place)
    return _save_original(states, opened.original if isinstance(opened, Artifact) else opened, place)


def _tensors(state: State | nn.Module) -> State:
    found = state.state_dict() if isinstance(state, nn.Module) else state
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def _check_states(states: Sequence[State], plan: Plan) -> None:
    """Refuse states that are not what the plan loads."""
    if len(states) != plan.world_size:
        raise SaveError(f"the plan has {plan.world_size} ranks, {len(states)} states were given: give one per rank")
    faults: list[str] = []
    aliases = dict(plan.head.aliases)
    for rank, state in enumerate(states):
        kinds = {tensor.name: tensor.local_type(rank) for tensor in plan.head.tensors}
        faults += [f"rank {rank}: {name} is missing" for name in kinds if name not in state]
        faults += [f"rank {rank}: the plan does not make {name}" for name in state if name not in kinds | aliases]
        faults += [
            f"rank {rank}: {name} is {tuple(state[name].shape)} {state[name].dtype}, {kind} in the plan"
            for name, kind in kinds.items()
            if name in state and (tuple(state[name].shape), state[name].dtype) != torch_layout(kind)
        ]
        faults += [
            f"rank {rank}: {other} and {name} are one tensor in the checkpoint, and differ here"
            for other, name in aliases.items()
            if other in state and name in state and not torch.equal(state[other], state[name])
        ]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise SaveError("; ".join(faults[:5]) + more)


def _check_folder(folder: Path, names: Iterable[str]) -> None:
    """Refuse weights beside the new ones: the next loader might prefer them (cases B61)."""
    kept = set(names)
    others = sorted(
        path.name
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")) and path.name not in kept
    )
    if others:
        raise SaveError(f"{folder}: holds other weights, {', '.join(others[:5])}; remove them, or give another folder")


def _save_runtime_layout(states: Sequence[State], plan: Plan, folder: Path) -> tuple[Path, ...]:
    ranks = range(plan.world_size)
    names = ["model.safetensors"] if len(ranks) == 1 else [f"rank-{r}-of-{len(ranks)}.safetensors" for r in ranks]
    _check_folder(folder, names)
    make_folder(folder)
    for rank, name in enumerate(names):
        layout = lay_out({t.name: t.local_type(rank) for t in plan.head.tensors}, {"format": "pt"})
        with temporary_file(folder) as file:
            write_tensors(file, layout, [list(layout.offsets)], lambda batch, rank=rank: states[rank])  # type: ignore[misc]
            commit(file, folder / name)
    return tuple(folder / name for name in names)


def _save_original(states: Sequence[State], plan: Plan, folder: Path) -> tuple[Path, ...]:
    origin = plan.origin
    if origin is None:
        raise SaveError("the plan does not say what the checkpoint looked like; use original_format=False")
    torch_files = [file.name for file, header in zip(plan.head.files, origin.headers, strict=True) if not header]
    if torch_files:
        raise SaveError(f"{torch_files[0]} was written by torch.save; use original_format=False")
    sections = [plan.section(rank) for rank in range(plan.world_size)]
    restored = _restored(plan, origin, sections)
    others = _others(origin, {source.name for source in restored})
    layouts = [_FileLayout(number, origin, restored) for number in range(len(plan.head.files))]
    written = [(file.name, layout) for file, layout in zip(plan.head.files, layouts, strict=True) if layout.places]
    _check_folder(folder, [*(name for name, _ in written), *others])
    make_folder(folder)
    values = [_temporaries(plan, section, state) for section, state in zip(sections, states, strict=True)]
    with ExitStack() as stack:
        files = {layout.number: stack.enter_context(temporary_file(folder)) for _, layout in written}
        maps = {layout.number: _prepare(files[layout.number], layout) for _, layout in written}
        for rank, section in enumerate(sections):
            for copy in section.copies:
                if copy.source in maps and _counts(plan, copy, rank):
                    offset = layouts[copy.source].moved(copy.src)
                    chain = plan.head.chains[copy.chain]
                    _take_back(copy, chain, values[rank][copy.buffer], maps[copy.source], offset)
        del maps
        for name, layout in written:
            commit(files[layout.number], folder / name)
    for name, content in others.items():
        write_atomically(folder / name, content)
    return tuple(folder / name for name in (*(name for name, _ in written), *others))


def _counts(plan: Plan, copy: Copy, rank: int) -> bool:
    """Whether the copy of `rank` is the one to save: of what all ranks hold, the first rank's is."""
    return rank == 0 or copy.buffer >= len(plan.head.tensors) or plan.head.tensors[copy.buffer].shard_dim >= 0


def _restored(plan: Plan, origin: Origin, sections: Sequence[Section]) -> list[PlanSource]:
    """The stored tensors that the plan gives back whole.

    Raises:
        SaveError: a stored tensor, or a temporary, is used in part or twice.
    """
    by_file = _Places(origin)
    areas: dict[PlanSource, list[Area]] = defaultdict(list)
    for rank, section in enumerate(sections):
        inner: dict[int, list[Area]] = defaultdict(list)
        for copy in section.copies:
            bits = plan.head.chains[copy.chain][0].bits
            loops = tuple(
                sorted(((loop.extent, loop.src * 8 // bits) for loop in copy.loops), key=lambda item: -item[1])
            )
            if copy.source < 0:
                inner[-1 - copy.source].append(Area(copy.src * 8 // bits, copy.run, loops))
            elif _counts(plan, copy, rank):
                source = by_file.source_at(copy.source, copy.src)
                areas[source].append(Area((copy.src - source.offset) * 8 // bits, copy.run, loops))
        for slot, kind in enumerate(section.temporaries, start=len(plan.head.tensors)):
            if fault := covers(kind.numel, inner[slot]):
                raise SaveError(f"the plan cannot be run backwards: a temporary of rank {rank}: {fault}")
    for source, found in sorted(areas.items(), key=lambda item: item[0].name):
        if fault := covers(source.type.numel, found):
            raise SaveError(f"{source.name} cannot be restored: {fault}; use original_format=False")
    unused = set(plan.report.unused)
    return [s for s in origin.sources if s in areas or (s.type.numel == 0 and s.name not in unused)]


class _Places:
    """Finds the stored tensor that lies at a place of a file."""

    def __init__(self, origin: Origin) -> None:
        self._sources: dict[int, list[PlanSource]] = defaultdict(list)
        for source in sorted((s for s in origin.sources if s.type.numel), key=lambda s: (s.file, s.offset)):
            self._sources[source.file].append(source)
        self._starts = {file: [source.offset for source in found] for file, found in self._sources.items()}

    def source_at(self, file: int, offset: int) -> PlanSource:
        """The stored tensor that `offset` lies in."""
        return self._sources[file][bisect_right(self._starts[file], offset) - 1]


class _FileLayout:
    """Where the restored tensors of one file go: as they lay if all are there, else closed up."""

    def __init__(self, number: int, origin: Origin, restored: Sequence[PlanSource]) -> None:
        self.number = number
        kept = sorted((s for s in restored if s.file == number), key=lambda s: (s.offset, s.type.nbytes, s.name))
        header = origin.headers[number]
        tree = json.loads(header[8:]) if header else {}
        if {s.name for s in kept} != tree.keys() - {"__metadata__"}:
            header = _header_of(kept, tree)
        self.header = header
        self.places: dict[int, int] = {}  # offset in the checkpoint's file -> offset in the new one
        end = len(header)
        for source in kept:
            self.places[source.offset] = end
            end += source.type.nbytes
        self.size = end
        self._starts = sorted(self.places)

    def moved(self, offset: int) -> int:
        """Where the byte at `offset` of the checkpoint's file goes."""
        start = self._starts[bisect_right(self._starts, offset) - 1]
        return self.places[start] + offset - start


def _header_of(kept: Sequence[PlanSource], tree: Mapping[str, object]) -> bytes:
    entries = {"__metadata__": tree["__metadata__"]} if "__metadata__" in tree else {}
    end = 0
    for source in kept:
        span = [end, end + source.type.nbytes]
        entries[source.name] = {"dtype": str(source.type.dtype), "shape": list(source.type.shape), "data_offsets": span}
        end = span[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _others(origin: Origin, kept: set[str]) -> dict[str, bytes]:
    """Index and config as they were; the index without the names that are not restored."""
    others = dict(origin.others)
    for name, content in others.items():
        tree = json.loads(content) if name != "config.json" else {}
        if tree.keys() and not kept.issuperset(tree["weight_map"]):
            tree["weight_map"] = {tensor: file for tensor, file in tree["weight_map"].items() if tensor in kept}
            others[name] = json.dumps(tree, indent=2, sort_keys=True).encode() + b"\n"
    return others


def _prepare(file: BinaryIO, layout: _FileLayout) -> torch.Tensor:
    """The new file at its full size with its header written, as bytes that are the file."""
    file.write(layout.header)
    file.flush()
    os.ftruncate(file.fileno(), layout.size)
    with Path(file.name).open("r+b") as both_ways:  # a file that is only written to cannot be mapped
        return torch.frombuffer(mmap.mmap(both_ways.fileno(), layout.size), dtype=torch.uint8)


def _temporaries(plan: Plan, section: Section, state: State) -> dict[int, torch.Tensor]:
    """All buffers of a rank: its tensors, and its temporaries filled from them, the last one first."""
    count = len(plan.head.tensors)
    buffers = {n: state[tensor.name].contiguous() for n, tensor in enumerate(plan.head.tensors)}
    for slot, kind in enumerate(section.temporaries, start=count):
        buffers[slot] = _empty(kind)
    for copy in reversed(list(section.copies)):
        if copy.source < 0:
            into = _bytes_of(buffers[-1 - copy.source])
            _take_back(copy, plan.head.chains[copy.chain], buffers[copy.buffer], into, copy.src)
    return buffers


def _empty(kind: TensorType) -> torch.Tensor:
    shape, dtype = torch_layout(kind)
    return torch.empty(shape, dtype=dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _take_back(copy: Copy, chain: tuple[DType, ...], tensor: torch.Tensor, into: torch.Tensor, offset: int) -> None:
    """Write what `copy` took back to byte `offset` of the bytes `into`, in the dtype that was stored.

    Bytes are moved, not elements: files may hold elements at any address.
    """
    stored, final = chain[0], chain[-1]
    extents = [loop.extent for loop in copy.loops]
    if stored == final:
        row = copy.run * stored.bits // 8
        taken = _bytes_of(tensor).as_strided([*extents, row], [*(loop.dst for loop in copy.loops), 1], copy.dst)
    else:
        row = copy.run * stored.itemsize
        steps = [*(loop.dst // final.itemsize for loop in copy.loops), 1]
        values = tensor.reshape(-1).as_strided([*extents, copy.run], steps, copy.dst // final.itemsize)
        taken = _bytes_of(values.to(torch_dtype(stored)).contiguous()).view(*extents, row)
    into.as_strided([*extents, row], [*(loop.src for loop in copy.loops), 1], offset).copy_(taken)
