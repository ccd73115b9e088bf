"""Ops on tensors with one row for each word of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadplan.compiler import pieces
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.ops.arguments import one
from loadplan.compiler.pieces import Layout
from loadplan.runtime.tensor_type import TensorType

_FIELD = "unpadded_vocab_size"
_TEXT = "text_config"


@dataclass(frozen=True, slots=True)
class UnpadVocab:
    """The first `rows` rows: without those that only round a vocabulary up.

    `rows` None is the config's `unpadded_vocab_size` (in `text_config` if there is one), else what the rule's target
    declares. A tensor that has no more rows passes. The padding is zeros, which pieces of stored tensors cannot make,
    so only a tensor without padding has an inverse.
    """

    spread: ClassVar[Spread] = "each"
    rows: int | None = None

    def bind(self, context: Binding, *args: TensorType) -> UnpadVocab:
        if self.rows is not None:
            return self
        rows = context.config.find_int(_FIELD, _TEXT) or context.config.find_int(_FIELD)
        declared = context.targets[0] if len(context.targets) == 1 else None
        if rows is None and declared is not None and declared.shape:
            rows = declared.shape[0]
        return UnpadVocab(rows)

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        arg = one(self, args)
        if self.rows is None:
            raise ShapeError(f"{self}: neither the config ({_FIELD}) nor a signature says how many rows are words")
        if not arg.shape or not 0 <= self.rows <= arg.shape[0]:
            raise ShapeError(f"{self} of {arg}: it has not so many rows")
        return (TensorType((self.rows, *arg.shape[1:]), arg.dtype),)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        assert self.rows is not None, "bound"
        return (pieces.narrow(args[0], 0, 0, self.rows),)

    def reverse(self, *args: TensorType) -> Op:
        whole = args[0].shape[0]
        if self.rows == whole:
            return self
        raise ShapeError(
            f"{self} of {args[0]} gives {whole - (self.rows or 0)} of {whole} positions up: it has no inverse"
        )
