"""The tables of `loadplan.toml`, as pydantic checks them: types, known keys, and keys that contradict each other.

`build_file` reads them, says what each key means, and turns them into a `Project`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # names become folders
Policy = Literal["auto", "never"]

_UNITS = {"B": 0, "KB": 3, "MB": 6, "GB": 9, "TB": 12}
_BINARY_UNITS = {"KIB": 10, "MIB": 20, "GIB": 30, "TIB": 40}
_SPANS = {"s": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "d": 86400, "day": 86400}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def parse_size(text: str) -> int:
    """Bytes of `"200 GiB"` or `"1.5 TB"`. Raises `ValueError`."""
    match = _QUANTITY.fullmatch(text.strip())
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS | _BINARY_UNITS:
        raise ValueError('is not a size; write for example "200 GiB" (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)')
    scale = 2 ** _BINARY_UNITS[unit] if unit in _BINARY_UNITS else 10 ** _UNITS[unit]
    return int(float(match[1]) * scale)


def parse_span(text: str) -> float:
    """Seconds of `"7 days"`, `"12 h"` or `"90 s"`. Raises `ValueError`."""
    match = _QUANTITY.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    unit = unit if unit in _SPANS else unit.removesuffix("s")
    if match is None or unit not in _SPANS:
        raise ValueError('is not a span of time; write for example "7 days" (seconds, minutes, hours, days)')
    return float(match[1]) * _SPANS[unit]


def _checked_size(text: str) -> str:
    parse_size(text)
    return text


def _checked_span(text: str) -> str:
    parse_span(text)
    return text


class Strict(BaseModel):
    """A table whose keys are all known and whose values have the type that is written here."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class VariantTable(Strict):
    """`[checkpoint.NAME.variant.VARIANT]`, and `[defaults]`."""

    recipe: str = "auto"
    signature: str = "auto"
    dtype: str | None = None
    tp_size: Annotated[int, Field(ge=1)] = 1
    tp_plan: dict[str, str] = {}
    dtype_plan: dict[str, str] = {}
    fusions: dict[str, object] | None = None  # as the model's config says; empty: none
    missing: Literal["error", "ignore"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    convert: bool = True

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.signature not in ("auto", "transformers", "recipe") and not self.signature.endswith(".json"):
            raise ValueError(
                f'signature = {self.signature!r} is none of "auto", "transformers", "recipe", '
                'or a "FILE.json" with name -> [shape, dtype]'
            )
        if self.fusions and self.signature not in ("auto", "transformers"):
            raise ValueError(
                f'fusions need the model, and signature = "{self.signature}" has none; '
                'leave fusions out, or write signature = "transformers"'
            )
        return self


MATRIX_KEYS = ("recipe", "dtype", "tp_size")  # what a matrix may list, in the order of the labels


class MatrixTable(VariantTable):
    """`[checkpoint.NAME.matrix.MATRIX]`: as a variant, where some keys hold a list of values."""

    recipe: str | Annotated[list[str], Field(min_length=1)] = "auto"  # type: ignore[assignment]  # wider on purpose
    dtype: str | Annotated[list[str], Field(min_length=1)] | None = None  # type: ignore[assignment]
    tp_size: Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = 1  # type: ignore[assignment]


class CheckpointTable(Strict):
    """`[checkpoint.NAME]`."""

    source: str
    variant: dict[Name, VariantTable] = {}
    matrix: dict[Name, MatrixTable] = {}


class BuildTable(Strict):
    """`[build]`."""

    output: str = "build/loadplan"
    recipes: list[str] = []


class RemoteTable(Strict):
    """`[cache.remote.NAME]`: where artifacts are shared. Secrets are named, never written here."""

    url: Annotated[str, StringConstraints(min_length=1)]
    read_only: bool = True
    timeout: Annotated[str, AfterValidator(_checked_span)] = "30 s"
    token_env: str | None = None
    login_env: str | None = None
    ca_file: str | None = None
    zstd: bool = False
    storage: dict[str, object] = {}

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.token_env and self.login_env:
            raise ValueError("token_env and login_env exclude each other; keep one")
        if "@" in self.url.partition("://")[2].partition("/")[0]:
            raise ValueError("url holds a user or password; name the variable that holds user:password in login_env")
        return self


class CacheTable(Strict):
    """`[cache]`."""

    root: str = ".loadplan"
    max_size: Annotated[str, AfterValidator(_checked_size)] | None = None
    grace: Annotated[str, AfterValidator(_checked_span)] = "7 days"
    pull: Policy = "auto"
    push: Policy = "never"
    remote: dict[Name, RemoteTable] = {}

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.push == "auto" and all(remote.read_only for remote in self.remote.values()):
            raise ValueError('push = "auto", but no remote may be written; set read_only = false in one')
        return self


class TrustTable(Strict):
    """`[trust]`: whose entries of the cache are used, and by whom ours are signed."""

    require: bool = False
    keys: list[str] = []
    sign_with: str | None = None

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.require and not self.keys:
            raise ValueError("require = true, but no keys are trusted; list files or folders of public keys in keys")
        if self.keys and not self.require:
            raise ValueError("keys are trusted, but nothing need be signed; set require = true, or leave keys out")
        return self


class ExecutorTable(Strict):
    """`[executor]`."""

    dask: Annotated[str, StringConstraints(pattern=r"^(tcp|tls|ucx|ws|wss|inproc)://.")] | None = None


class FileTable(Strict):
    """All of `loadplan.toml`."""

    build: BuildTable = BuildTable()
    cache: CacheTable = CacheTable()
    trust: TrustTable = TrustTable()
    executor: ExecutorTable = ExecutorTable()
    defaults: VariantTable = VariantTable()
    checkpoint: dict[Name, CheckpointTable]


MOVED = {"build.cache": "write it as root in [cache]"}  # keys of earlier versions, and what became of them


def known_keys(loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the table that holds the last part of `loc`, a path of keys from the top."""
    match loc[:-1]:
        case ():
            return list(FileTable.model_fields)
        case ("cache", "remote", _):
            return list(RemoteTable.model_fields)
        case ("checkpoint", _):
            return list(CheckpointTable.model_fields)
        case ("checkpoint", _, "variant" | "matrix", _):
            return list(VariantTable.model_fields)
        case (str(table),):
            tables: Mapping[str, type[BaseModel]] = {
                "build": BuildTable,
                "cache": CacheTable,
                "trust": TrustTable,
                "executor": ExecutorTable,
                "defaults": VariantTable,
            }
            return list(tables[table].model_fields) if table in tables else []
    return []
