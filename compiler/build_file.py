"""`loadplan.toml`: which checkpoints to compile, as what, for which ranks.

    [build]
    output = "build/loadplan"                # plans and artifacts; relative to this file
    cache = ".loadplan"                      # what was compiled before, by content; may be shared by projects

    [checkpoint.NAME]
    source = "pkg://PACKAGE/SUBFOLDER"       # or a path, relative to this file

    [checkpoint.NAME.variant.VARIANT]        # at least one
    recipe = "auto"                          # by config.json; or a name, or "file.py:NAME" relative to this file
    signature = "auto"                       # "transformers": must be known there; "recipe": what the recipe makes
    dtype = "bfloat16"                       # of floating point tensors; left out: as the model or the file has it
    tp_size = 1
    convert = true                           # whether `doit convert` writes the runtime layout

Unknown keys are refused with the near ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from loadplan.cache.error import LoadplanError

FILE_NAME = "loadplan.toml"

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # names become folders


class BuildFileError(LoadplanError, ValueError):
    """loadplan.toml is missing, no TOML, or has a key or value that is not known."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class VariantTable(_Strict):
    """`[checkpoint.NAME.variant.VARIANT]`."""

    recipe: str = "auto"
    signature: Literal["auto", "transformers", "recipe"] = "auto"
    dtype: str | None = None
    tp_size: int = 1
    missing: Literal["error", "ignore"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    convert: bool = True


class CheckpointTable(_Strict):
    """`[checkpoint.NAME]`."""

    source: str
    variant: dict[_Name, VariantTable]


class BuildTable(_Strict):
    """`[build]`."""

    output: str = "build/loadplan"
    cache: str = ".loadplan"


class _File(_Strict):
    build: BuildTable = BuildTable()
    checkpoint: dict[_Name, CheckpointTable]


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to build."""

    checkpoint: str
    name: str
    source: str
    options: VariantTable

    @property
    def label(self) -> str:
        """`CHECKPOINT@VARIANT`: its task and folder are called so."""
        return f"{self.checkpoint}@{self.name}"


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a loadplan.toml, read."""

    folder: Path
    output: Path
    cache: Path
    variants: tuple[Variant, ...]

    def get(self, label: str) -> Variant:
        """The variant called `label`. Raises `BuildFileError`."""
        for variant in self.variants:
            if variant.label == label:
                return variant
        raise BuildFileError(
            f"{FILE_NAME}: nothing is called {label!r}{_near(label, [v.label for v in self.variants])}"
        )


def read_project(path: str | Path = FILE_NAME) -> Project:
    """The project of the file at `path`. Raises `BuildFileError`, with every fault and its key."""
    file = Path(path)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildFileError(f"{file}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BuildFileError(f"{file}: is not valid TOML: {error}") from error
    try:
        parsed = _File.model_validate(data)
    except ValidationError as error:
        raise BuildFileError("\n".join([f"{file}: {error.error_count()} faults", *_faults(error, data)])) from error
    folder = file.parent.resolve()
    empty = [name for name, table in parsed.checkpoint.items() if not table.variant]
    if empty:
        raise BuildFileError(f"{file}: checkpoint.{empty[0]} has no variant; add [checkpoint.{empty[0]}.variant.plain]")
    return Project(
        folder,
        folder / Path(parsed.build.output).expanduser(),
        folder / Path(parsed.build.cache).expanduser(),
        tuple(
            Variant(name, variant, _source(folder, table.source), options)
            for name, table in sorted(parsed.checkpoint.items())
            for variant, options in sorted(table.variant.items())
        ),
    )


def _source(folder: Path, source: str) -> str:
    return source if "://" in source else str(folder / Path(source).expanduser())


def _faults(error: ValidationError, data: Mapping[str, object]) -> Iterator[str]:
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if part != "[key]")
        if fault["type"] == "extra_forbidden":
            yield f"  {where}: is not a key{_near(str(fault['loc'][-1]), _known(fault['loc']))}"
        elif fault["type"] == "missing":
            yield f"  {where}: must be given"
        else:
            yield f"  {where}: {fault['msg']} (found {fault['input']!r})"


def _known(loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the table that `loc` leads into."""
    tables: dict[int, type[BaseModel]] = {1: _File, 2: BuildTable, 3: CheckpointTable, 5: VariantTable}
    return list(tables.get(len(loc), VariantTable).model_fields)


def _near(word: str, known: list[str]) -> str:
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
