"""`loadplan.toml`: which checkpoints to compile, as what, for which ranks, and where the results are kept.

    [build]
    output = "build/loadplan"                # plans and artifacts; relative to this file
    recipes = ["recipes.py"]                 # run first: what they register is found by config.json

    [defaults]                               # any key of a variant, for all variants that do not give it

    [checkpoint.NAME]
    source = "pkg://PACKAGE/SUBFOLDER"       # or a path, relative to this file

    [checkpoint.NAME.variant.VARIANT]        # called NAME@VARIANT
    recipe = "auto"                          # by config.json; or a name, or "file.py:NAME" relative to this file
    signature = "auto"                       # "transformers": must be known there; "recipe": what the recipe makes;
                                             # or "FILE.json" with name -> [shape, dtype]
    dtype = "bfloat16"                       # of floating point tensors; left out: as the model or the file has it
    tp_size = 1
    tp_plan = { "PATTERN" = "colwise" }      # before the recipe's own; dtype_plan likewise
    fusions = { FAMILY = true }              # fused module families; left out: as config.json asks; {}: none
    missing = "error"                        # or "ignore": leave out targets without a source; unexpected likewise
    convert = true                           # whether `doit convert` writes the runtime layout

    [checkpoint.NAME.matrix.MATRIX]          # a variant for each combination of what is listed
    tp_size = [1, 2]                         # NAME@MATRIX-bfloat16-tp1, NAME@MATRIX-bfloat16-tp2, ...
    dtype = ["bfloat16", "float16"]          # also recipe = [...]

    [cache]
    root = ".loadplan"                       # what was built before, by content; may be shared by projects
    max_size = "200 GiB"                     # `doit gc` keeps the root below it; left out: no bound
    grace = "7 days"                         # and removes nothing that was used since
    pull = "auto"                            # ask the remotes before building; "never": work offline
    push = "never"                           # "auto": each thing that is built goes to the remotes that may be written

    [cache.remote.NAME]                      # asked in the order of this file
    url = "s3://bucket/prefix"               # a folder, http(s)://, or what fsspec knows
    read_only = true
    timeout = "30 s"
    token_env = "VARIABLE"                   # environment variable that holds a bearer token; or login_env: user:password
    ca_file = "ca.pem"                       # https; zstd = true: compress on the wire (http)
    storage = {}                             # options of the fsspec file system

    [trust]
    require = true                           # what no trusted key signed is built again, wherever it lies
    keys = ["keys/"]                         # files, and folders of files, of public keys
    sign_with = "~/ci.pem"                   # private key that signs what is built here

    [executor]
    dask = "tcp://scheduler:8786"            # where conversion runs; left out: on this machine

All faults are reported at once, each with its line, its key and what to do; unknown keys with the near ones.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from loadplan.cache.error import LoadplanError
from loadplan.compiler.build_tables import (
    MATRIX_KEYS,
    MOVED,
    CacheTable,
    CheckpointTable,
    FileTable,
    MatrixTable,
    TrustTable,
    VariantTable,
    known_keys,
    parse_size,
    parse_span,
)
from loadplan.compiler.problem import CompileError
from loadplan.compiler.target import Target

FILE_NAME = "loadplan.toml"

_Loc = tuple[int | str, ...]  # a path of keys from the top of the file


class BuildFileError(LoadplanError, ValueError):
    """loadplan.toml is missing, no TOML, or has a key or value that is not known."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to build."""

    checkpoint: str
    name: str
    source: str  # relative paths resolved
    written_source: str  # as the file has it
    options: VariantTable
    target: Target

    @property
    def label(self) -> str:
        """`CHECKPOINT@VARIANT`: its task and folder are called so."""
        return f"{self.checkpoint}@{self.name}"


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """A remote as the file describes it; nothing is opened yet."""

    name: str
    url: str
    read_only: bool
    timeout_s: float
    token_env: str | None
    login_env: str | None
    ca_file: Path | None
    zstd: bool
    storage: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TrustSpec:
    """Whose entries of the cache are used, and who signs ours; no key is read yet."""

    keys: tuple[Path, ...] = ()  # files and folders; entries need no signature if there are none
    sign_with: Path | None = None


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Where and how results are kept and shared."""

    root: Path
    max_nbytes: int | None
    grace_s: float
    pull: Literal["auto", "never"]
    push: Literal["auto", "never"]
    remotes: tuple[RemoteSpec, ...]
    trust: TrustSpec = TrustSpec()


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a loadplan.toml, read."""

    folder: Path
    output: Path
    cache: CacheSpec
    recipes: tuple[Path, ...]  # files to run before recipes are looked for
    dask: str | None  # address of a scheduler
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
    """The project of the file at `path`. Raises `BuildFileError`, with every fault, its line and its key."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise BuildFileError(
            f"{file}: cannot be read ({error.strerror}); `loadplan init` writes a first one"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BuildFileError(f"{file}: is not valid TOML: {error}") from error
    folder = file.parent.resolve()
    faults: list[tuple[_Loc, str]] = []
    variants: tuple[Variant, ...] = ()
    try:
        parsed = FileTable.model_validate(data)
    except ValidationError as error:
        faults = list(_faults(error))
    else:
        faults, variants = _expand(parsed, folder)
    if faults:
        raise BuildFileError("\n".join([f"{file}: {_count(faults)}", *_described(faults, text)]))
    return Project(
        folder,
        folder / Path(parsed.build.output).expanduser(),
        _cache_spec(parsed.cache, parsed.trust, folder),
        tuple(folder / Path(recipe).expanduser() for recipe in parsed.build.recipes),
        parsed.executor.dask,
        variants,
    )


def _cache_spec(table: CacheTable, trust: TrustTable, folder: Path) -> CacheSpec:
    return CacheSpec(
        folder / Path(table.root).expanduser(),
        None if table.max_size is None else parse_size(table.max_size),
        parse_span(table.grace),
        table.pull,
        table.push,
        tuple(
            RemoteSpec(
                name,
                remote.url if "://" in remote.url else str(folder / Path(remote.url).expanduser()),
                remote.read_only,
                parse_span(remote.timeout),
                remote.token_env,
                remote.login_env,
                None if remote.ca_file is None else folder / Path(remote.ca_file).expanduser(),
                remote.zstd,
                remote.storage,
            )
            for name, remote in table.remote.items()
        ),
        TrustSpec(
            tuple(folder / Path(key).expanduser() for key in trust.keys),
            None if trust.sign_with is None else folder / Path(trust.sign_with).expanduser(),
        ),
    )


# -- variants ----------------------------------------------------------------------------------------------------


def _expand(parsed: FileTable, folder: Path) -> tuple[list[tuple[_Loc, str]], tuple[Variant, ...]]:
    """Every variant, those of matrices included, in the order of their labels; or what is wrong with them."""
    faults = list(_overlaps(parsed, folder))
    variants: list[Variant] = []
    for name, checkpoint in sorted(parsed.checkpoint.items()):
        tables = list(_tables(name, checkpoint))
        if not tables:
            advice = f"add [checkpoint.{name}.variant.plain]"
            faults.append((("checkpoint", name), f"has no variant and no matrix; {advice}"))
        taken: dict[str, _Loc] = {}
        for loc, variant, given in tables:
            if variant in taken:
                message = f"makes {variant!r}, which {_dotted(taken[variant])} makes too; give another name"
                faults.append((loc, message))
                continue
            taken[variant] = loc
            try:
                options = VariantTable.model_validate({**_given(parsed.defaults), **given})
                target = _target(options)
            except ValidationError as error:  # of a key here with one in [defaults]
                faults += [(loc, f"with [defaults]: {_plain(fault['msg'])}") for fault in error.errors()]
            except CompileError as error:
                faults += [(loc, problem.message) for problem in error.problems]
            else:
                source = checkpoint.source
                variants.append(Variant(name, variant, _source(folder, source), source, options, target))
    return list(dict.fromkeys(faults)), tuple(sorted(variants, key=lambda variant: variant.label))


def _target(options: VariantTable) -> Target:
    return Target(
        options.dtype,
        options.tp_size,
        tp_plan=options.tp_plan or None,
        dtype_plan=options.dtype_plan or None,
        fusions=options.fusions,
        missing=options.missing,
        unexpected=options.unexpected,
    )


def _tables(name: str, checkpoint: CheckpointTable) -> Iterator[tuple[_Loc, str, dict[str, object]]]:
    """Where it stands, the variant's name and the given keys, of each variant of a checkpoint."""
    for variant, table in checkpoint.variant.items():
        yield ("checkpoint", name, "variant", variant), variant, _given(table)
    for matrix, table in checkpoint.matrix.items():
        given = _given(table)
        listed = [key for key in MATRIX_KEYS if isinstance(given.get(key), list)]
        for values in product(*(_values(given[key]) for key in listed)):
            label = "-".join([matrix, *(_word(key, value) for key, value in zip(listed, values, strict=True))])
            loc = ("checkpoint", name, "matrix", matrix)
            yield loc, label, {**given, **dict(zip(listed, values, strict=True))}


def _given(table: VariantTable | MatrixTable) -> dict[str, object]:
    return {key: getattr(table, key) for key in table.model_fields_set}


def _values(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


def _word(key: str, value: object) -> str:
    """`value` of `key` as part of a label."""
    if key == "tp_size":
        return f"tp{value}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value).rpartition(":")[2]).strip("-")


def _overlaps(parsed: FileTable, folder: Path) -> Iterator[tuple[_Loc, str]]:
    """Folders that must not be one: what `gc` keeps small, and what it never touches."""
    output, root = ((folder / Path(p).expanduser()).resolve() for p in (parsed.build.output, parsed.cache.root))
    if output == root or root in output.parents or output in root.parents:
        yield (
            ("cache", "root"),
            f"{parsed.cache.root!r} and build.output {parsed.build.output!r} overlap; separate them",
        )


def _source(folder: Path, source: str) -> str:
    return source if "://" in source else str(folder / Path(source).expanduser())


# -- faults ------------------------------------------------------------------------------------------------------


def _faults(error: ValidationError) -> Iterator[tuple[_Loc, str]]:
    seen: set[_Loc] = set()  # of alternatives (one value or a list) pydantic reports each
    for fault in error.errors():
        loc = _real(fault["loc"])
        if loc in seen:
            continue
        seen.add(loc)
        if fault["type"] == "extra_forbidden":
            moved = MOVED.get(_dotted(loc))
            near = _near(str(loc[-1]), known_keys(loc))
            yield loc, f"is not a key any more; {moved}" if moved else f"is not a key{near}"
        elif fault["type"] == "missing":
            yield loc, "must be given"
        elif fault["type"] == "value_error":
            found = f" (found {fault['input']!r})" if isinstance(fault["input"], str) else ""
            yield loc, _plain(fault["msg"]) + found
        else:
            yield loc, f"{fault['msg']} (found {fault['input']!r})"


def _real(loc: _Loc) -> _Loc:
    """`loc` without what pydantic puts in for keys and alternatives, which are no keys of the file."""
    if loc[0] == "checkpoint" and loc[2:3] == ("matrix",):
        loc = loc[:5]
    return loc[:-1] if loc[-1] == "[key]" else loc


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ")


def _count(faults: list[tuple[_Loc, str]]) -> str:
    return "1 fault" if len(faults) == 1 else f"{len(faults)} faults"


def _described(faults: list[tuple[_Loc, str]], text: str) -> Iterator[str]:
    lines = _lines(text)
    for loc, message in faults:
        shown = next((lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in lines), None)
        yield f"  {f'line {shown}: ' if shown else ''}{_dotted(loc)}: {message}"


_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE_LINE = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?")
_KEY_LINE = re.compile(rf"\s*({_DOTTED})\s*=")


def _lines(text: str) -> dict[_Loc, int]:
    """The line of each key, counted from 1, as far as lines show it: only messages rest on it."""
    found: dict[_Loc, int] = {}
    table: _Loc = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _TABLE_LINE.fullmatch(line):
            table = _path(match[1])
            found.setdefault(table, number)
        elif match := _KEY_LINE.match(line):
            found.setdefault((*table, *_path(match[1])), number)
    return found


def _path(dotted: str) -> _Loc:
    return tuple(part.strip().strip("\"'") for part in re.findall(_KEY, dotted))


def _dotted(loc: _Loc) -> str:
    return ".".join(str(part) for part in loc)


def _near(word: str, known: list[str]) -> str:
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
