"""Saving: the tensors of a loaded model, back in the layout of the checkpoint that its plan was compiled for.

The program is the plan's own, run backwards: each copy goes from its buffer to its place in the file. It is proved
first, by the same proof as loading: every element of every stored tensor must be written exactly once. Files come out
bit for bit if values are unchanged: headers, index and config are those of the checkpoint, kept in the plan. A tensor
that was cast when it was loaded is cast back, so it has the stored dtype and the model's values. Stored tensors that
the plan waived are left out, and header and index then say so.

Fused modules come apart again. What a kernel made of stored tensors cannot be undone, and is given back as tensors that
would make the same: a batch normalisation that was folded into its convolution is saved as one that changes nothing but
the bias (mean 0, weight 1, variance so that it scales by 1), beside the folded weight. Names, shapes and dtypes are the
original ones, and outputs are equal within a few roundings of the stored dtype; a warning says how many there are.

All files are written and synced in a folder of their own inside the given one before the first is renamed to its
place, weights first, the index last. Until then a failure leaves the folder as it was. Renames take no space and no
time to speak of; a machine that dies between two of them leaves some files new and some old, each of them whole.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch
from torch import nn

from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import TEMPORARY_PREFIX, FolderNotWritable, commit, make_folder, write_atomically
from loadplan.runtime.artifact import PLAN_NAME, Artifact, open_any
from loadplan.runtime.cast import refuse_overflow
from loadplan.runtime.check_plan import Area, covers
from loadplan.runtime.dtype import DType
from loadplan.runtime.kernels import find_kernel, parse_options
from loadplan.runtime.memory import same_bytes
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Compute, Copy, Origin, PlanSource, Section
from loadplan.runtime.plan_format import PlanError
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import dtype_of, torch_dtype, torch_layout
from loadplan.runtime.write_safetensors import header_bytes, header_entry, lay_out, write_tensors

State = Mapping[str, torch.Tensor]
Files = tuple[list[str], Callable[[Path], None]]  # names, in the order of their renames, and what writes them

logger = logging.getLogger(__name__)


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
            What all ranks hold whole is taken from the first.
        plan: the plan or artifact that they were loaded by.
        folder: where to write; files of the same names are replaced, after all new ones are complete. Tensors that are
            mapped from those files stay as they are.
        original_format: the names, shapes, dtypes and files of the checkpoint, each tensor by where it came from; it
            has no place for targets that the plan waived as missing. Else the target names and layout, waived ones
            included, in `model.safetensors` or one file a rank.

    Raises:
        SaveError: tensors are missing, unknown, without values or of other types than the plan's, tied names differ,
            `folder` holds other weights that a loader could take for these, or the plan cannot be run backwards.
        CastOverflow: a value is too large for the stored dtype that it is cast back to.
        FolderNotWritable: `folder` takes no new files, or is full.
        ArtifactError: the artifact has lost the plan that it was made by.
        PlanError: the plan is damaged.
    """
    opened = open_any(plan)
    if isinstance(opened, Artifact):
        opened = opened.original if original_format else opened.plan
    states = [_tensors(item) for item in ([state] if isinstance(state, Mapping | nn.Module) else state)]
    _check_states(states, opened)
    names, write = _original_files(states, opened) if original_format else _runtime_files(states, opened)
    return _place(Path(folder), names, write)


def _tensors(state: State | nn.Module) -> State:
    return state.state_dict() if isinstance(state, nn.Module) else state


def _check_states(states: Sequence[State], plan: Plan) -> None:
    """Refuse states that are not what the plan loads."""
    if len(states) != plan.world_size:
        raise SaveError(f"the plan has {plan.world_size} ranks, {len(states)} states were given: give one per rank")
    faults: list[str] = []
    aliases, waived = dict(plan.head.aliases), set(plan.report.missing)
    for rank, state in enumerate(states):
        kinds = {tensor.name: tensor.local_type(rank) for tensor in plan.head.tensors}
        kinds |= {other: kinds[name] for other, name in aliases.items()}
        found = [f"{name} is missing" for name in kinds if name not in state and name not in aliases]
        found += [f"the plan does not make {name}" for name in state if name not in kinds and name not in waived]
        wrong = {name: fault for name, kind in kinds.items() if name in state and (fault := _fault(state[name], kind))}
        found += [f"{name} {fault}" for name, fault in wrong.items()]
        found += [
            f"{other} and {name} are one tensor in the checkpoint, and differ here"
            for other, name in aliases.items()
            if other in state and name in state and not {other, name} & wrong.keys()
            if not same_bytes(_dense(state[other]), _dense(state[name]))
        ]
        faults += [f"rank {rank}: {fault}" for fault in found] if plan.world_size > 1 else found
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise SaveError("; ".join(faults[:5]) + more)


def _fault(tensor: object, kind: TensorType | None) -> str | None:
    """Why `tensor` cannot be saved as `kind`, or as what it is."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}, not a tensor"
    if kind is not None and (tuple(tensor.shape), tensor.dtype) != torch_layout(kind):
        return f"is {tuple(tensor.shape)} {tensor.dtype}, {kind} in the plan"
    if tensor.device.type == "meta":
        return "is on the meta device: it has no values; load it first"
    if tensor.layout != torch.strided:
        return f"is a tensor of layout {tensor.layout}; give a dense one"
    return None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values of `tensor` in row-major order on the CPU; itself where it is that."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor in one dim with stride 1, which a single element need not have."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor).view(torch.uint8)


def _place(folder: Path, names: list[str], write: Callable[[Path], None]) -> tuple[Path, ...]:
    """Have `write` make the files in a draft folder beside their places, then move all of them there."""
    draft = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        _check_folder(folder, names)
        make_folder(draft)
        for name in names:
            make_folder((draft / name).parent)
        write(draft)
        for name in names:
            make_folder((folder / name).parent)
            with (draft / name).open("rb") as file:
                os.fsync(file.fileno())
        for name in names:
            with (draft / name).open("rb") as file:
                commit(file, folder / name)
    except OSError as error:
        if isinstance(error, LoadplanError):
            raise
        raise FolderNotWritable(error.errno, error.strerror, str(folder)) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return tuple(folder / name for name in names)


def _check_folder(folder: Path, names: Sequence[str]) -> None:
    """Refuse places that cannot be taken, and weights beside the new ones: a loader might prefer those (cases B61)."""
    if (folder / PLAN_NAME).exists():
        raise SaveError(f"{folder}: is a converted checkpoint, which new files would break; give another folder")
    others = sorted(
        path.name
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.suffix in (".safetensors", ".bin") or (".index." in path.name and path.suffix == ".json")
        if path.name not in names
    )
    if others:
        raise SaveError(f"{folder}: holds other weights, {', '.join(others[:5])}; remove them, or give another folder")
    for name in names:
        place = folder / name
        if place.is_dir() and not place.is_symlink():
            raise SaveError(f"{place}: is a folder, a file is to be written there; remove it, or give another folder")
        if not place.parent.resolve().is_relative_to(folder.resolve()):
            raise SaveError(f"{place.parent}: leads out of {folder}; remove the link, or give another folder")


def _runtime_files(states: Sequence[State], plan: Plan) -> Files:
    """One file a rank, with the tensors as they are; aliases are left out, one name of a tie is enough."""
    ranks, digits = range(plan.world_size), len(str(plan.world_size - 1))
    names = [f"rank-{rank:0{digits}}-of-{len(ranks)}.safetensors" for rank in ranks]
    if len(ranks) == 1:
        names = ["model.safetensors"]
    layouts = [
        lay_out(
            {tensor.name: tensor.local_type(rank) for tensor in plan.head.tensors} | _waived_types(states[rank], plan),
            {"format": "pt"},
        )
        for rank in ranks
    ]

    def write(draft: Path) -> None:
        for state, name, layout in zip(states, names, layouts, strict=True):
            with (draft / name).open("xb") as file:
                write_tensors(
                    file,
                    layout,
                    ([tensor] for tensor in layout.offsets),
                    lambda batch, state=state: {tensor: _dense(state[tensor]) for tensor in batch},  # type: ignore[misc]
                )

    return names, write


def _waived_types(state: State, plan: Plan) -> dict[str, TensorType]:
    """What the state holds beyond the plan: targets that the plan waived as missing."""
    found: dict[str, TensorType] = {}
    for name in plan.report.missing:
        if name not in state:
            continue
        fault, dtype = _fault(state[name], None), dtype_of(state[name].dtype)
        if fault or dtype is None:
            raise SaveError(f"{name} {fault or f'is {state[name].dtype}, which safetensors files cannot hold'}")
        found[name] = TensorType(tuple(state[name].shape), dtype)
    return found


def _original_files(states: Sequence[State], plan: Plan) -> Files:
    origin = plan.origin
    if origin is None:
        raise SaveError("the plan does not say what the checkpoint looked like; use original_format=False")
    torch_files = [file.name for file in plan.head.files if file.format != "safetensors"]
    if torch_files:
        raise SaveError(f"{torch_files[0]} was written by torch.save; use original_format=False")
    trees = _check_origin(plan, origin)
    left = sorted({name for state in states for name in state} & set(plan.report.missing))
    if left:
        logger.warning("not saved, the checkpoint has no such tensors: %s", ", ".join(left))
    restored = _restored(plan, origin)
    folded = len(plan.section(0).computes)
    if folded:
        logger.warning(
            "%d batch normalisations were folded into their convolutions: they are saved as equivalent ones, "
            "whose mean is 0 and whose scale is 1",
            folded,
        )
    try:
        layouts = [_FileLayout(number, origin, tree, restored) for number, tree in enumerate(trees)]
        others = _others(origin, restored)
    except (UnicodeEncodeError, RecursionError) as error:
        raise PlanError(f"a header or index in the plan cannot be closed up: {error}") from error
    for file, layout in zip(plan.head.files, layouts, strict=True):
        if layout.is_whole and not (layout.is_unmoved and layout.size == file.size):
            raise PlanError(f"the header of {file.name!r} in the plan leaves gaps in its file")
    written = {number: plan.head.files[number].name for number, layout in enumerate(layouts) if layout.is_wanted}
    names = [*written.values(), *sorted(others, key=lambda name: name != "config.json")]

    def write(draft: Path) -> None:
        for name, content in others.items():
            write_atomically(draft / name, content)
        maps = {number: _map_new(draft / name, layouts[number]) for number, name in written.items()}
        for rank, state in enumerate(states):
            _run_backwards(plan, rank, state, layouts, maps)

    return names, write


def _check_origin(plan: Plan, origin: Origin) -> list[dict[str, object]]:
    """The JSON of each file's header.

    Raises:
        PlanError: headers and index are not what a checkpoint has, or say otherwise than the origin's list of tensors.
    """
    trees: list[dict[str, object]] = []
    for file, header in zip(plan.head.files, origin.headers, strict=True):
        trees.append(_json_object(header[8:], f"the header of {file.name!r}"))
        if int.from_bytes(header[:8], "little") != len(header) - 8:
            raise PlanError(f"the header of {file.name!r} in the plan has another length than it says")
    for source in origin.sources:
        start = source.offset - len(origin.headers[source.file])
        if trees[source.file].get(source.name) != header_entry(source.type, start):
            raise PlanError(f"source {source.name!r} is not what its header in the plan says")
    for name, content in origin.others:
        index = _json_object(content, name)
        if "/" in name or not name.endswith(".json"):
            raise PlanError(f"the plan keeps {name!r}, which is no index or config")
        if name != "config.json" and not isinstance(index.get("weight_map"), dict):
            raise PlanError(f"the index {name!r} in the plan has no weight_map")
    names = [*(file.name for file in plan.head.files), *(name for name, _ in origin.others)]
    above = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    if len(set(names)) != len(names) or above & set(names):
        raise PlanError("two files of the plan would stand in one place")
    return trees


def _json_object(content: bytes, name: str) -> dict[str, object]:
    try:
        tree = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{name} in the plan is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise PlanError(f"{name} in the plan is no JSON object")
    return tree


def _saved_buffers(plan: Plan, section: Section, rank: int) -> set[int]:
    """The buffers of `rank` whose content goes to the files: of what all ranks hold, only the first rank's."""
    saved = {number for number, tensor in enumerate(plan.head.tensors) if rank == 0 or tensor.shard_dim >= 0}
    readers: dict[int, set[int]] = defaultdict(set)
    for copy in section.copies:
        if copy.source < 0:
            readers[-1 - copy.source].add(copy.buffer)
    for compute in section.computes:
        for number in compute.inputs:
            if rank == 0 or section.temporaries[number - len(plan.head.tensors)].shape:  # each rank reads whole scalars
                readers[number].update(compute.outputs)
    for number in sorted(readers, reverse=True):  # what is made of a temporary has a higher number, or is a tensor
        if not saved.isdisjoint(readers[number]):
            saved.add(number)
    return saved


def _restored(plan: Plan, origin: Origin) -> list[PlanSource]:
    """The stored tensors that the plan gives back whole; all but the waived ones.

    Raises:
        SaveError: a stored tensor, or a rank's part of a temporary, is used in part or twice.
        PlanError: copies and origin contradict each other.
    """
    places = _Places(origin)
    areas: dict[str, list[Area]] = defaultdict(list)
    for rank in range(plan.world_size):
        section = plan.section(rank)
        saved = _saved_buffers(plan, section, rank)
        inner: dict[int, list[Area]] = defaultdict(list)
        for copy in section.copies:
            if copy.buffer not in saved:
                continue
            stored = plan.head.chains[copy.chain][0]
            if copy.source < 0:
                inner[-1 - copy.source].append(_read_area(copy, 0, stored))
                continue
            source = places.source_at(copy.source, copy.src)
            if source.type.dtype != stored:
                raise PlanError(f"a copy reads {source.name!r} as {stored}, the plan says it is {source.type}")
            areas[source.name].append(_read_area(copy, source.offset, stored))
        for compute in section.computes:
            if saved.isdisjoint(compute.outputs):
                continue
            if not saved.issuperset(compute.outputs):
                raise SaveError(
                    f"the plan cannot be run backwards: of what {compute.kernel} makes, rank {rank} holds one part alone and "
                    "others with all ranks; use original_format=False"
                )
            for number in compute.inputs:
                inner[number].append(Area(0, section.temporaries[number - len(plan.head.tensors)].numel, ()))
        for slot, kind in enumerate(section.temporaries, start=len(plan.head.tensors)):
            if slot in saved and (fault := covers(kind.numel, inner[slot])):
                raise SaveError(
                    "the plan cannot be run backwards: "
                    f"of a temporary of rank {rank}, {fault}; use original_format=False"
                )
    unused = set(plan.report.unused)
    for source in origin.sources:
        if source.name in unused and source.name not in areas:
            continue
        if fault := covers(source.type.numel, areas.get(source.name, [])):
            raise SaveError(f"{source.name} cannot be restored: {fault}; use original_format=False")
    return [source for source in origin.sources if source.name in areas or source.name not in unused]


def _read_area(copy: Copy, start: int, stored: DType) -> Area:
    """The elements that `copy` reads of what begins at byte `start` of its source."""
    loops = ((loop.extent, loop.src * 8 // stored.bits) for loop in copy.loops)
    return Area((copy.src - start) * 8 // stored.bits, copy.run, tuple(sorted(loops, key=lambda loop: -loop[1])))


class _Places:
    """Finds the stored tensor that lies at a place of a file."""

    def __init__(self, origin: Origin) -> None:
        """Raises `PlanError` when stored tensors overlap."""
        self._sources: dict[int, list[PlanSource]] = defaultdict(list)
        for source in sorted((s for s in origin.sources if s.type.numel), key=lambda s: (s.file, s.offset)):
            found = self._sources[source.file]
            if found and found[-1].offset + found[-1].type.nbytes > source.offset:
                raise PlanError(f"sources {found[-1].name!r} and {source.name!r} of the plan overlap")
            found.append(source)
        self._starts = {file: [source.offset for source in found] for file, found in self._sources.items()}

    def source_at(self, file: int, offset: int) -> PlanSource:
        """The stored tensor that `offset` lies in. Raises `PlanError` where there is none."""
        at = bisect_right(self._starts.get(file, []), offset) - 1
        if at < 0 or offset >= self._sources[file][at].offset + self._sources[file][at].type.nbytes:
            raise PlanError(f"a copy reads byte {offset} of file {file}, where the plan names no tensor")
        return self._sources[file][at]


class _FileLayout:
    """Where the restored tensors of one file go: as they lay if all are there, else closed up."""

    def __init__(self, number: int, origin: Origin, tree: Mapping[str, object], restored: Sequence[PlanSource]) -> None:
        kept = sorted((s for s in restored if s.file == number), key=lambda s: (s.offset, s.type.nbytes, s.name))
        self.is_whole = {source.name for source in kept} == tree.keys() - {"__metadata__"}
        self.is_wanted = self.is_whole or bool(kept)
        self.header = origin.headers[number] if self.is_whole else _closed_up(kept, tree)
        places: dict[int, int] = {}  # offset in the checkpoint's file -> offset in the new one
        end = len(self.header)
        for source in kept:
            places[source.offset] = end
            end += source.type.nbytes
        self.size = end
        self.is_unmoved = all(old == new for old, new in places.items())
        self._places, self._starts = places, sorted(places)

    def moved(self, offset: int) -> int:
        """Where the byte at `offset` of the checkpoint's file goes."""
        start = self._starts[bisect_right(self._starts, offset) - 1]
        return self._places[start] + offset - start


def _closed_up(kept: Sequence[PlanSource], tree: Mapping[str, object]) -> bytes:
    """The header of a file that holds the `kept` tensors without gaps, in their order."""
    entries = {name: value for name, value in tree.items() if name == "__metadata__"}
    end = 0
    for source in kept:
        entries[source.name] = header_entry(source.type, end)
        end += source.type.nbytes
    return header_bytes(entries)


def _others(origin: Origin, restored: Sequence[PlanSource]) -> dict[str, bytes]:
    """Index and config as they were; the index without the names that are not restored."""
    others = dict(origin.others)
    kept = {source.name: source.type.nbytes for source in restored}
    for name, content in origin.others:
        if name == "config.json":
            continue
        tree = _json_object(content, name)
        weight_map, metadata = tree.get("weight_map"), tree.get("metadata")
        if not isinstance(weight_map, dict):
            raise PlanError(f"{name} in the plan has no weight_map")
        if kept.keys() >= weight_map.keys():
            continue
        tree["weight_map"] = {tensor: file for tensor, file in weight_map.items() if tensor in kept}
        if isinstance(metadata, dict) and "total_size" in metadata:
            metadata["total_size"] = sum(kept.values())
        others[name] = json.dumps(tree, indent=2, sort_keys=True).encode() + b"\n"
    return others


def _map_new(path: Path, layout: _FileLayout) -> torch.Tensor:
    """A new file of full size with its header written, as bytes that are the file."""
    with path.open("xb") as file:
        file.write(layout.header)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, layout.size)  # a mapped hole that finds no space kills the process
    return torch.from_file(str(path), shared=True, size=layout.size, dtype=torch.uint8)


def _run_backwards(
    plan: Plan, rank: int, state: State, layouts: Sequence[_FileLayout], maps: Mapping[int, torch.Tensor]
) -> None:
    """The copies of `rank`, from the buffers into the files: tensors first, then temporaries, the last one first."""
    section = plan.section(rank)
    saved = _saved_buffers(plan, section, rank)
    by_buffer: dict[int, list[Copy]] = defaultdict(list)
    for copy in section.copies:
        by_buffer[copy.buffer].append(copy)
    first = len(plan.head.tensors)
    computes = [compute for compute in section.computes if saved.issuperset(compute.outputs)]
    made = {number for compute in computes for number in compute.outputs}
    given = {number for compute in computes for number in compute.inputs} & saved
    temporaries = {
        slot: torch.empty(torch_layout(kind)[0], dtype=torch_layout(kind)[1])
        for slot, kind in enumerate(section.temporaries, start=first)
        if slot in saved - given
    }

    def reverse(compute: Compute) -> None:
        outputs = [
            temporaries.pop(number) if number >= first else _dense(state[plan.head.tensors[number].name])
            for number in compute.outputs
        ]
        types = [section.temporaries[number - first] for number in compute.inputs]
        parts = find_kernel(compute.kernel).reverse(outputs, types, parse_options(compute.options))
        temporaries.update({n: part for n, part in zip(compute.inputs, parts, strict=True) if n in given})

    def buffers() -> Iterator[tuple[int, torch.Tensor]]:
        for number, tensor in enumerate(plan.head.tensors):
            if number in saved:
                yield number, _dense(state[tensor.name])
        for slot in sorted(temporaries.keys() | given, reverse=True):
            for compute in computes:
                if slot == max(
                    given.intersection(compute.inputs)
                ):  # all that it made has higher numbers, and has come back by now
                    reverse(compute)
            if slot not in made:
                yield slot, temporaries.pop(slot)

    for number, tensor in buffers():
        name = plan.head.tensors[number].name if number < len(plan.head.tensors) else "a temporary"
        for copy in by_buffer[number]:
            chain = plan.head.chains[copy.chain]
            if copy.source < 0:
                _take_back(copy, chain, tensor, _bytes_of(temporaries[-1 - copy.source]), copy.src, name)
            else:
                _take_back(copy, chain, tensor, maps[copy.source], layouts[copy.source].moved(copy.src), name)


def _take_back(
    copy: Copy, chain: tuple[DType, ...], tensor: torch.Tensor, into: torch.Tensor, offset: int, name: str
) -> None:
    """Write what `copy` took back to byte `offset` of the bytes `into`, in the dtype that was stored.

    Bytes are moved, not elements: files may hold elements at any address.
    """
    stored, final = chain[0], chain[-1]
    extents = [loop.extent for loop in copy.loops]
    if stored == final:
        row = copy.run * stored.bits // 8
        taken = _strided(_bytes_of(tensor), [*extents, row], [loop.dst for loop in copy.loops], copy.dst)
    else:
        row = copy.run * stored.itemsize
        steps = [loop.dst // final.itemsize for loop in copy.loops]
        values = _strided(_flat(tensor), [*extents, copy.run], steps, copy.dst // final.itemsize)
        cast = values.to(torch_dtype(stored))
        refuse_overflow(values, cast, name)
        taken = _bytes_of(cast.contiguous()).view(*extents, row)
    _strided(into, [*extents, row], [loop.src for loop in copy.loops], offset).copy_(taken)


def _strided(flat: torch.Tensor, sizes: Sequence[int], steps: Sequence[int], offset: int) -> torch.Tensor:
    """A view that begins at `offset` of `flat`, which may itself begin anywhere in its storage."""
    return flat.as_strided(sizes, [*steps, 1], flat.storage_offset() + offset)
