"""The recipe: a frozen value that says what to turn into what."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeVar

from loadplan.cache.digest import digest_json
from loadplan.compiler.patterns import PatternError, check_plan_pattern
from loadplan.compiler.rules import Rule
from loadplan.compiler.shard import Shard, parse_style
from loadplan.runtime.dtype import DType

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """Rules, plans and waivers; equal values are equal recipes, however they were written down.

    Args:
        rules: renaming rules and converters (`loadplan.compiler.rules`). As in transformers, all renamings run first,
            in order; then the first converter that claims a name takes it.
        tp_plan: pattern of a module or tensor, from the start of its target name, to a style (`colwise`, `rowwise`,
            `packed_colwise`, `packed_rowwise`, `embedding_rowwise`, `replicated`) or a `Shard`.
        dtype_plan: pattern of whole name components to the dtype that matching floating point targets keep.
            Of the entries of a plan that match, the first counts; in a mapping the one that says most (with the fewest
            `*`, then the most components, then the longest), wherever it stands.
        may_be_missing: patterns of target names that need no source; they are left out of the result.
        may_be_unused: patterns of source names that need no target; they are not loaded.

    Raises:
        PatternError: a pattern, style or dtype is not well formed.
    """

    rules: tuple[Rule, ...]
    tp_plan: tuple[tuple[str, Shard], ...]
    dtype_plan: tuple[tuple[str, DType], ...]
    may_be_missing: tuple[str, ...]
    may_be_unused: tuple[str, ...]

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        tp_plan: Mapping[str, str | Shard] | Iterable[tuple[str, str | Shard]] = (),
        dtype_plan: Mapping[str, object] | Iterable[tuple[str, object]] = (),
        may_be_missing: Iterable[str] = (),
        may_be_unused: Iterable[str] = (),
    ) -> None:
        object.__setattr__(self, "rules", tuple(rules))
        object.__setattr__(self, "tp_plan", parse_tp_plan(tp_plan))
        object.__setattr__(self, "dtype_plan", parse_dtype_plan(dtype_plan))
        object.__setattr__(self, "may_be_missing", _patterns(may_be_missing))
        object.__setattr__(self, "may_be_unused", _patterns(may_be_unused))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise PatternError(f"{rule!r} is not a rule (see loadplan.compiler.rules)")

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the value: comments, order of definitions and file names do not count, patterns do.

        An op from outside loadplan counts with the source of its class, since its behaviour may change under its name.
        """
        return digest_json(plain(self))


def parse_tp_plan(plan: Mapping[str, str | Shard] | Iterable[tuple[str, str | Shard]]) -> tuple[tuple[str, Shard], ...]:
    """Pattern and shard, in order. Raises `PatternError`."""
    return tuple((_checked(pattern), parse_style(style)) for pattern, style in _items(plan))


def parse_dtype_plan(plan: Mapping[str, object] | Iterable[tuple[str, object]]) -> tuple[tuple[str, DType], ...]:
    """Pattern and dtype, in order. Raises `PatternError`."""
    return tuple((_checked(pattern), parse_dtype(dtype)) for pattern, dtype in _items(plan))


def parse_dtype(dtype: object) -> DType:
    """A `DType`, from its own name (`"BF16"`), torch's (`"bfloat16"`, `"torch.bfloat16"`) or a `torch.dtype`.

    Raises:
        PatternError: no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    found = _TORCH_NAMES.get(name, name)
    try:
        return DType(found)
    except ValueError:
        raise PatternError(f"{dtype!r} is not a dtype; known are {', '.join(DType)} and torch's names") from None


_TORCH_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float": "F32",
    "complex64": "C64",
    "float64": "F64",
    "double": "F64",
    "int64": "I64",
    "long": "I64",
    "uint64": "U64",
}


def _items(plan: Mapping[str, T] | Iterable[tuple[str, T]]) -> Iterable[tuple[str, T]]:
    """Pairs as they are; a mapping has no order, so the entry that says most comes first."""
    if not isinstance(plan, Mapping):
        return plan
    return sorted(plan.items(), key=lambda item: (_stars(item[0]), -item[0].count("."), -len(item[0]), item[0]))


def _stars(pattern: str) -> int:
    return sum("*" in part for part in pattern.split("."))


def _checked(pattern: str) -> str:
    check_plan_pattern(pattern)
    return pattern


def _patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise PatternError(f"waivers are a list of patterns, not one text: write ({patterns!r},)")
    return tuple(map(_checked, patterns))


def plain(value: object) -> object:
    """`value` as JSON: dataclasses by class name and fields, so that a digest says what they are."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        found: dict[str, object] = {
            "class": kind.__qualname__,
            "fields": {f.name: plain(getattr(value, f.name)) for f in fields(value)},
        }
        if not kind.__module__.startswith("loadplan.compiler."):
            found["source"] = _source_of(kind)
        return found
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return {"float": repr(value)}
    return value


def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError) as error:
        raise PatternError(
            f"{kind.__qualname__}: its source cannot be read ({error}), so a change to it would go unseen; "
            "define it in a file"
        ) from error
