"""What is wanted: dtype, ranks, and how strict to be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from loadplan.cache.digest import NotCanonical, canonical_json, digest_json
from loadplan.compiler.patterns import PatternError
from loadplan.compiler.problem import CompileError, Problem
from loadplan.compiler.recipe import parse_dtype, parse_dtype_plan, parse_tp_plan, plain
from loadplan.compiler.shard import Shard
from loadplan.runtime.dtype import DType

Policy = Literal["error", "ignore"]


@dataclass(frozen=True)
class Target:
    """The layout to compile for.

    Args:
        dtype: of floating point targets; None keeps what the signature declares, or what is stored without one.
        tp_size: tensor-parallel ranks.
        ep_size, pp_size: expert- and pipeline-parallel ranks; only 1 for now.
        tp_plan: entries that come before those of the recipe's `tp_plan`.
        dtype_plan: entries that come before those of the recipe's `dtype_plan`.
        fusions: what is fused: name of a family to True, False or its options (`loadplan.runtime.fusion`); None is what
            the model's config asks for as `fusion_config`, an empty mapping nothing.
        missing: `"ignore"` leaves targets without a source out of the result, and the report lists them.
        unexpected: `"ignore"` does not load sources without a target, and the report lists them.

    Raises:
        CompileError: an option is not known, or not one that this version can do.
    """

    dtype: DType | None
    tp_size: int
    ep_size: int
    pp_size: int
    tp_plan: tuple[tuple[str, Shard], ...]
    dtype_plan: tuple[tuple[str, DType], ...]
    fusions: tuple[tuple[str, str], ...] | None  # name of a family, canonical JSON; in name order
    missing: Policy
    unexpected: Policy

    def __init__(
        self,
        dtype: object | None = None,
        tp_size: int = 1,
        ep_size: int = 1,
        pp_size: int = 1,
        tp_plan: Mapping[str, str | Shard] | Iterable[tuple[str, str | Shard]] | None = None,
        dtype_plan: Mapping[str, object] | Iterable[tuple[str, object]] | None = None,
        fusions: Mapping[str, object] | None = None,
        missing: Policy = "error",
        unexpected: Policy = "error",
    ) -> None:
        problems = [
            Problem("option", f"{name}={size!r}: a number of ranks from 1")
            for name, size in (("tp_size", tp_size), ("ep_size", ep_size), ("pp_size", pp_size))
            if not isinstance(size, int) or isinstance(size, bool) or size < 1
        ]
        problems += [
            Problem("option", f"{name}={value!r}: this version compiles for tensor parallelism only; leave it out")
            for name, value, off in (("ep_size", ep_size, 1), ("pp_size", pp_size, 1))
            if value != off
        ]
        problems += [
            Problem("option", f"{name}={value!r}: one of {', '.join(get_args(Policy))}")
            for name, value in (("missing", missing), ("unexpected", unexpected))
            if value not in get_args(Policy)
        ]
        try:
            wanted = None if dtype is None else parse_dtype(dtype)
            if wanted is not None and not wanted.is_float:
                raise PatternError(f"dtype={dtype!r}: weights are cast to F16, BF16, F32 or F64 only")
            plans = parse_tp_plan(tp_plan or ()), parse_dtype_plan(dtype_plan or ())
        except PatternError as error:
            problems.append(Problem("option", str(error)))
        try:
            fused = None if fusions is None else parse_fusions(fusions)
        except (PatternError, NotCanonical) as error:
            problems.append(Problem("option", f"fusions={fusions!r}: {error}"))
        if problems:
            raise CompileError(problems)
        for name, value in (
            ("dtype", wanted),
            ("tp_size", tp_size),
            ("ep_size", ep_size),
            ("pp_size", pp_size),
            ("tp_plan", plans[0]),
            ("dtype_plan", plans[1]),
            ("fusions", fused),
            ("missing", missing),
            ("unexpected", unexpected),
        ):
            object.__setattr__(self, name, value)

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan has a section for."""
        return self.tp_size * self.ep_size * self.pp_size

    @property
    def fusion_config(self) -> dict[str, object] | None:
        """`fusions` as it was given."""
        return None if self.fusions is None else {name: json.loads(text) for name, text in self.fusions}

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the value."""
        return digest_json(plain(self))


def parse_fusions(fusions: object) -> tuple[tuple[str, str], ...]:
    """Names and canonical JSON, in name order; whether there are such families is seen when the model is known.

    Raises:
        PatternError: not a mapping from names to True, False or options.
        NotCanonical: options that are not JSON, or have floats.
    """
    if not isinstance(fusions, Mapping) or not all(isinstance(name, str) for name in fusions):
        raise PatternError("a mapping from names of families to True, False or options")
    for name, value in fusions.items():
        if not isinstance(value, bool | Mapping):
            raise PatternError(f"{name!r} is True, False or a mapping of options, not {value!r}")
    plain_values = {name: value if isinstance(value, bool) else dict(value) for name, value in fusions.items()}
    return tuple((name, canonical_json(value).decode()) for name, value in sorted(plain_values.items()))
