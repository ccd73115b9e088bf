"""A first loadplan.toml, written from the checkpoints that are there: `loadplan init`.

Nothing is overwritten. What is proposed has been read: a folder whose headers are faulty is named, with its fault, in a
comment.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import make_folder, write_atomically
from loadplan.compiler.build_file import FILE_NAME
from loadplan.compiler.checkpoint import Checkpoint
from loadplan.compiler.problem import CheckpointError
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.compiler.registry import config_names, known_recipes, parse_config
from loadplan.runtime.location import locate

DODO_NAME = "dodo.py"
DODO_LINE = "from loadplan.compiler.tasks import *"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_DEPTH = 4  # folders below the given one that are searched: a hub's cache has hub/models--x/snapshots/revision


class ProjectExists(LoadplanError, FileExistsError):
    """There is a loadplan.toml already, and it is left alone."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: exists, and is never overwritten; edit it, or choose another folder with --into"


class NothingFound(LoadplanError, FileNotFoundError):
    """No checkpoint lies in the given places."""

    def __init__(self, places: Sequence[str]) -> None:
        super().__init__(places)
        self.places = tuple(places)

    def __str__(self) -> str:
        return (
            f"{', '.join(self.places)}: no checkpoint found ({', '.join(_WEIGHTS)}, up to {_DEPTH} folders down); "
            "give the folder of one, or a file, an index, or pkg://PACKAGE/SUBFOLDER"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A place with a checkpoint, or with one that cannot be read."""

    name: str
    source: str
    checkpoint: Checkpoint | None
    fault: CheckpointError | None = None


def init_project(places: Sequence[str], folder: Path) -> list[str]:
    """Write loadplan.toml, and dodo.py where there is none, into `folder`; returns lines that say what was done.

    Raises:
        ProjectExists: `folder` has a loadplan.toml.
        NothingFound, LocationError: there is no checkpoint in `places` (`folder` itself, if there are none).
        CheckpointError: a checkpoint that was given by itself is faulty.
    """
    target = folder / FILE_NAME
    if target.exists() or target.is_symlink():
        raise ProjectExists(target)
    wanted = list(places) or [str(folder)]
    sources = [source for place in wanted for source in _sources(place)]
    if not sources:
        raise NothingFound(wanted)
    found = list(_read(list(dict.fromkeys(sources)), folder, explicit=set(wanted)))
    faults = [item.fault for item in found if item.fault is not None]
    if len(faults) == len(found):
        raise faults[0]
    make_folder(folder)
    write_atomically(target, _text(found).encode())
    said = [f"{target}: {sum(f.checkpoint is not None for f in found)} checkpoints"]
    dodo = folder / DODO_NAME
    if not dodo.exists():
        write_atomically(dodo, f"{DODO_LINE}\n".encode())
        said.append(f"{dodo}: written; run `doit list`, then `doit`")
    elif "loadplan.compiler.tasks" not in dodo.read_text(encoding="utf-8", errors="replace"):
        said.append(f"{dodo}: is left as it is; add the line: {DODO_LINE}")
    return said


def _sources(place: str) -> Iterator[str]:
    """The checkpoints at or below a place."""
    path = locate(place)
    if path.is_file() or "://" in place or _holds_weights(path):
        yield place
        return
    for below in sorted(_walk(path, _DEPTH)):
        if _holds_weights(below):
            yield str(below)


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for item in folder.iterdir():
        if item.is_dir() and not item.name.startswith(".") and item.name not in ("build", "node_modules"):
            yield item
            if depth > 1 and not _holds_weights(item):
                yield from _walk(item, depth - 1)


def _holds_weights(folder: Path) -> bool:
    return any(item.suffix in _WEIGHTS and item.is_file() for item in folder.iterdir())


def _read(sources: list[str], folder: Path, explicit: set[str]) -> Iterator[Found]:
    names = [_name(source) for source in sources]
    twice, count = {name for name, n in Counter(names).items() if n > 1}, Counter[str]()
    for source, name in zip(sources, names, strict=True):
        count[name] += 1
        label = f"{name}-{count[name]}" if name in twice else name
        written = source if "://" in source else _relative(Path(source), folder)
        try:
            yield Found(label, written, read_checkpoint(source))
        except CheckpointError as error:
            if source in explicit:
                raise
            yield Found(label, written, None, error)


def _relative(path: Path, folder: Path) -> str:
    """As the build reads it: relative to the file where it lies below it, so that both may move."""
    whole, base = path.expanduser().absolute(), folder.absolute()
    return whole.relative_to(base).as_posix() if whole.is_relative_to(base) else str(whole)


def _name(source: str) -> str:
    """What a person calls it: of a hub's cache the model, else the folder or file."""
    path = Path(source.partition("://")[2]) if "://" in source else Path(source).expanduser().absolute()
    hub = next((part for part in path.parts if part.startswith("models--")), None)
    if hub is not None:
        words = hub.rpartition("--")[2]
    elif "://" in source:
        words = path.parts[0]
    else:
        words = path.stem if path.suffix in (*_WEIGHTS, ".json") else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", words).strip("-._") or "model"


# -- text --------------------------------------------------------------------------------------------------------


def _text(found: Iterable[Found]) -> str:
    parts = ["# What `doit` builds here: `doit list` names the tasks, `doit report` says what is built.\n"]
    parts += ["# Keys: docstring of loadplan.compiler.build_file.\n"]
    parts += [_table(item) for item in found]
    return "".join([*parts, _OPTIONS])


def _table(item: Found) -> str:
    key = f"checkpoint.{_key(item.name)}"
    if item.checkpoint is None:
        fault = "\n".join(f"#   {line}" for line in _printable(str(item.fault)).splitlines())
        return f"\n# {_printable(item.source)} is left out:\n{fault}\n"
    return (
        f"\n# {_described(item.checkpoint)}\n[{key}]\nsource = {_quoted(item.source)}\n\n"
        f"[{key}.variant.plain]\n"
        '# dtype = "bfloat16"  # of floating point tensors; left out: as config.json or the files have it\n'
        "# tp_size = 2  # tensor-parallel ranks\n"
        '# recipe = "recipes.py:NAME"  # left out: found by config.json\n'
        '# signature = "recipe"  # what the recipe makes is what is wanted; left out: transformers is asked\n'
        "# convert = false  # plans only\n\n"
        f"# [{key}.matrix.serve]  # a variant for each combination\n"
        "# tp_size = [1, 2, 4]\n"
        '# dtype = ["bfloat16", "float16"]\n'
    )


def _described(checkpoint: Checkpoint) -> str:
    nbytes = sum(entry.type.nbytes for entry in checkpoint.entries.values())
    dtypes = sorted({str(entry.type.dtype) for entry in checkpoint.entries.values()})
    names = config_names(parse_config(checkpoint.config))
    known = next((name for name in names if name in known_recipes()), None)
    recipe = f"recipe {known}" if known else "no recipe by its config.json: names stay as they are"
    what = names[0] if names else "no config.json names its class"
    files = len(checkpoint.files)
    return _printable(
        f"{what}: {len(checkpoint.entries)} tensors, {nbytes:,} bytes of {', '.join(dtypes)} in {files} "
        f"{'file' if files == 1 else 'files'}; {recipe}"
    )


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are among TOML's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _printable(text: str) -> str:
    """For a comment, which takes no control characters."""
    return "".join(mark if mark.isprintable() or mark == "\n" else "?" for mark in text)


_OPTIONS = """
# [cache]
# root = ".loadplan"  # what was built before, by content; may be shared by projects
# max_size = "200 GiB"  # `doit gc` keeps it below
# push = "auto"  # give what is built to the remotes that may be written

# [cache.remote.team]
# url = "s3://bucket/prefix"  # or a folder, or https://
# read_only = false

# [executor]
# dask = "tcp://scheduler:8786"  # where conversion runs; left out: here
"""
