"""A checkpoint's files and entries, from headers alone.

Which files: a file by itself, an index and what it names, or all files of a folder. An index decides which file holds
a tensor, and must agree with the files. Where a folder holds several checkpoints, or parts of one, it is refused rather
than guessed: shard names and numbers prove nothing (cases B61, B65, B66, B68; malformed F).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from loadplan.compiler.checkpoint import Checkpoint, CheckpointFile, Entry
from loadplan.compiler.problem import CheckpointError, Problem
from loadplan.compiler.read_header import read_header
from loadplan.compiler.read_index import read_index, read_json
from loadplan.runtime.location import locate

_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_INDEX = re.compile(r"\.index(?:\.[^.]+)*\.json$")  # .index.json, and .index.fp16.json of a variant
_SHARD_OF = re.compile(r"(?P<stem>.*?)\d*-of-0*(?P<count>\d+)\.(?:safetensors|bin|pth?)")
_GENERATION = "generation_config.json"
_SINGLES = ("model.safetensors", "pytorch_model.bin")  # what other loaders prefer over an index


def read_checkpoint(location: str | Path) -> Checkpoint:
    """The checkpoint at `location`: a folder, a file, an index, or `pkg://PACKAGE/SUBFOLDER`.

    Raises:
        LocationError: there is nothing at `location`.
        CheckpointError: the files are damaged, incomplete, or contradict each other; all faults at once.
    """
    path = locate(location)
    if path.is_dir():
        return _read_folder(path)
    if path.name.endswith(".json"):
        return _read_indexed(path.parent, path.name, notes=())
    return _read_files(path.parent, [path.name], notes=())


def _read_folder(folder: Path) -> Checkpoint:
    names = _file_names(folder)
    tensors = [name for name in names if name.endswith(".safetensors")]
    indices = [name for name in names if _INDEX.search(name)]
    ours = [name for name in indices if ".safetensors.index" in name]
    others = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    if ours or tensors:
        notes = tuple(f"{name} is left out: safetensors files are there" for name in others)
    else:
        ours, tensors, notes = [name for name in indices if name not in ours], others, ()
    if ours:
        index = _choose_index(folder, ours)
        whole = _read_indexed(folder, index, notes=notes)
        _refuse_twin(folder, whole, index)
        return whole
    if not tensors:
        raise _fault("file", f"{folder.name}: holds no .safetensors, .bin, .pt or .pth file", folder.name)
    _check_siblings(tensors)
    return _read_files(folder, tensors, notes=notes)


def _file_names(folder: Path) -> list[str]:
    """The names of what is no folder, in order; a link that leads nowhere is one."""
    try:
        return sorted(item.name for item in folder.iterdir() if not item.is_dir())
    except OSError as error:
        raise _fault("file", f"{folder.name}: cannot be listed: {error.strerror or error}", folder.name) from error


def _choose_index(folder: Path, indices: list[str]) -> str:
    plain = [name for name in indices if name in ("model.safetensors.index.json", "pytorch_model.bin.index.json")]
    if len(plain) == 1 or len(indices) == 1:
        return (plain or indices)[0]
    raise _fault(
        "index", f"{folder.name}: holds {len(indices)} indices, {', '.join(indices)}; give the path of one", *indices
    )


def _check_siblings(names: list[str]) -> None:
    """Refuse a folder without an index that holds fewer files than their own names say (`-of-00059`)."""
    found: dict[tuple[str, int], list[str]] = {}
    for name in names:
        if match := _SHARD_OF.fullmatch(name):
            found.setdefault((match["stem"], int(match["count"])), []).append(name)
    problems = [
        Problem(
            "file", f"{files[0]} says it is one of {count} files, {len(files)} are there and no index", tuple(files)
        )
        for (_, count), files in found.items()
        if len(files) < count
    ]
    if problems:
        raise CheckpointError(problems)


def _read_indexed(folder: Path, index: str, *, notes: tuple[str, ...]) -> Checkpoint:
    kept: dict[str, bytes] = {}
    weight_map = read_index(folder / index, index, kept)
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not _is_file(folder / name)]
    if absent:
        raise CheckpointError(
            Problem("file", f"{index}: names {name!r}, which is not a file in the folder; download it again", (name,))
            for name in absent
        )
    whole = _read_files(folder, files, notes=notes, weight_map=weight_map, index=index, others=kept)
    named, suffixes = set(files), tuple({Path(name).suffix for name in files})
    strays = [name for name in _file_names(folder) if name.endswith(suffixes) and name not in named]
    seen = (*whole.notes, *(f"{name} is left out: {index} does not name it" for name in strays))
    return replace(whole, notes=seen)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than names may be
        return False


def _refuse_twin(folder: Path, indexed: Checkpoint, index: str) -> None:
    """Refuse `model.safetensors` beside an index when both are the whole model: either may be the stale one."""
    suffixes = {Path(file.name).suffix for file in indexed.files}
    named = {file.name for file in indexed.files}
    for single in _SINGLES:
        if single in named or Path(single).suffix not in suffixes or not (folder / single).is_file():
            continue
        try:
            _, entries, _ = _read_file(folder / single, single)
        except CheckpointError:
            continue  # left out, and noted: it cannot be mistaken for a checkpoint
        if {entry.name: entry.type for entry in entries} == {name: e.type for name, e in indexed.entries.items()}:
            message = f"{single} and {index} both hold the whole model; remove the stale one, or give the path of one"
            raise _fault("file", message, single, index)


def _read_files(
    folder: Path,
    names: list[str],
    *,
    notes: tuple[str, ...],
    weight_map: Mapping[str, str] | None = None,
    index: str = "",
    others: Mapping[str, bytes] | None = None,
) -> Checkpoint:
    files: list[CheckpointFile] = []
    found: dict[str, list[Entry]] = {}
    problems: list[Problem] = []
    seen = list(notes)
    for name in names:
        try:
            file, entries, file_notes = _read_file(folder / name, name)
        except CheckpointError as error:
            problems += error.problems
            continue
        files.append(file)
        seen += file_notes
        for entry in entries:
            found.setdefault(entry.name, []).append(entry)
    config: dict[str, object] | None = None
    raw = dict(others or {})
    if (folder / "config.json").is_file():
        try:
            config = read_json(folder / "config.json", "config.json", "config", raw)
        except CheckpointError as error:
            problems += error.problems
    beside: dict[str, bytes] = {}
    if (folder / _GENERATION).is_file():
        try:
            read_json(folder / _GENERATION, _GENERATION, "config", beside)
        except CheckpointError as error:
            problems += error.problems
    if not problems:
        problems += _disagreements(found, weight_map, index) if weight_map is not None else _duplicates(found)
    if problems:
        raise CheckpointError(problems)
    kept = {
        name: next(entry for entry in entries if weight_map is None or entry.file == weight_map[name])
        for name, entries in sorted(found.items())
    }
    seen += _copies(found, kept)
    ordered = tuple(sorted(files, key=lambda file: file.name))
    return Checkpoint(ordered, kept, config, raw, beside.get(_GENERATION, b""), tuple(seen))


def _read_file(path: Path, name: str) -> tuple[CheckpointFile, tuple[Entry, ...], tuple[str, ...]]:
    if name.endswith(_TORCH_SUFFIXES):
        from loadplan.compiler.read_torch import read_torch  # imports torch

        return read_torch(path, name=name)
    header, digest = read_header(path, name=name)
    file = CheckpointFile(name, path.stat().st_size, "safetensors", ((0, header.nbytes),), digest, header.raw)
    return file, header.entries, ()


def _duplicates(found: Mapping[str, list[Entry]]) -> list[Problem]:
    return [
        Problem(
            "duplicate",
            f"{name!r} lies in {' and in '.join(entry.file for entry in entries)}, and no index says which counts",
            (name, *(entry.file for entry in entries)),
        )
        for name, entries in found.items()
        if len(entries) > 1
    ]


def _copies(found: Mapping[str, list[Entry]], kept: Mapping[str, Entry]) -> list[str]:
    """A note per file on those of its tensors that the index takes from another file."""
    spare: dict[str, list[str]] = {}
    for name, entries in found.items():
        for entry in entries:
            if entry is not kept[name]:
                spare.setdefault(entry.file, []).append(name)
    return [
        f"{file}: {len(names)} of its tensors are left out, for the index takes them from another file: "
        f"{', '.join(map(repr, names[:5]))}"
        for file, names in sorted(spare.items())
    ]


def _disagreements(found: Mapping[str, list[Entry]], weight_map: Mapping[str, str], index: str) -> list[Problem]:
    """Where the index and the headers of its files contradict each other."""
    problems: list[Problem] = []
    for name, file in weight_map.items():
        holders = [entry.file for entry in found.get(name, [])]
        if file not in holders:
            where = f"it lies in {' and '.join(holders)}" if holders else "none of its files has it"
            message = f"{index}: says {name!r} lies in {file}, but {where}; the index does not describe these files"
            problems.append(Problem("index", message, (name, file)))
    problems += [
        Problem(
            "index",
            f"{entries[0].file}: holds {name!r}, which {index} does not list; the index is stale",
            (name, entries[0].file),
        )
        for name, entries in found.items()
        if name not in weight_map
    ]
    return problems


def _fault(kind: str, message: str, *names: str) -> CheckpointError:
    return CheckpointError([Problem(kind, message, names)])
