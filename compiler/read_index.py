"""The index of a sharded checkpoint: which file holds which tensor."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from reprlib import Repr

from loadplan.compiler.problem import CheckpointError, Problem

_MAX_INDEX_NBYTES = 1 << 28  # the largest published ones, with 90,000 names, have 10 MB
_MAX_DEPTH = 100  # published ones nest 6 deep; whoever walks the value may recurse
_SHORT = Repr()
_SHORT.maxstring = 200


class _Repeated(ValueError):
    """A JSON object has one key twice."""


def read_json(path: Path, name: str, kind: str, kept: dict[str, bytes] | None = None) -> dict[str, object]:
    """The JSON object in a file; a key given twice is refused.

    Args:
        path: the file.
        name: what to call it in messages.
        kind: kind of the problem that is reported (`index`, `config`).
        kept: takes the bytes of the file, under `name`.

    Raises:
        CheckpointError: the file cannot be read, is no JSON, no JSON object, or nests too deep.
    """

    def refuse(why: str) -> CheckpointError:
        return CheckpointError([Problem(kind, f"{name}: {why}", (name,))])

    try:
        if path.stat().st_size > _MAX_INDEX_NBYTES:
            raise refuse(f"has {path.stat().st_size} bytes, at most {_MAX_INDEX_NBYTES} are read")
        raw = path.read_bytes()
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror or error}") from error
    if raw.startswith(b"version https://git-lfs"):
        raise refuse("is a git-lfs pointer, not the file itself; fetch it with `git lfs pull`")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise refuse(f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise refuse(f"holds a JSON {type(value).__name__}, an object belongs there")
    if fault := _fault_in(value):
        raise refuse(fault)
    if kept is not None:
        kept[name] = raw
    return value


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _Repeated(f"the key {_SHORT.repr(key)} is there twice")
    return found


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _fault_in(value: dict[str, object]) -> str | None:
    """What is wrong with a value that json takes: too many levels, or text that is not Unicode."""
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        inside: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inside += (*item.keys(), *item.values())
            elif isinstance(item, list):
                inside += item
            elif isinstance(item, str) and not item.isascii() and any("\ud800" <= mark <= "\udfff" for mark in item):
                return f"has a lone surrogate, which is not Unicode, in {_SHORT.repr(item)}"
        level = inside
    return f"nests more than {_MAX_DEPTH} levels deep" if level else None


def read_index(path: Path, name: str, kept: dict[str, bytes] | None = None) -> dict[str, str]:
    """Tensor name to file name, relative to the index's folder. `metadata` is not read: published ones are often wrong.

    `kept` takes the bytes of the file, under `name`.

    Raises:
        CheckpointError: the index is malformed, empty, or leads out of its folder.
    """
    weight_map = read_json(path, name, "index", kept).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError([Problem("index", f"{name}: has no weight_map object", (name,))])
    if not weight_map:
        raise CheckpointError([Problem("index", f"{name}: weight_map is empty", (name,))])
    problems = [
        Problem("index", f"{name}: {_SHORT.repr(tensor)} lies in {fault}", (name, tensor))
        for tensor, file in weight_map.items()
        if (fault := _outside(file))
    ]
    if problems:
        raise CheckpointError(problems)
    return weight_map


def _outside(file: object) -> str | None:
    """What `file` is instead of the name of a file inside the checkpoint folder."""
    if not isinstance(file, str):
        return f"a JSON {type(file).__name__}, the name of a file belongs there"
    path = PurePosixPath(file)
    if file in ("", ".") or set(file) & set("\\:\0") or path.is_absolute() or ".." in path.parts or str(path) != file:
        return f"{_SHORT.repr(file)}, which is not a file name inside the checkpoint folder"
    return None
