"""The op graph: what a recipe computes, one typed node an op application.

    graph ::= value per target
    value ::= node [index]                 -- one result of a node
    node  ::= op value*                    -- `Stored` has no arguments, all else has at least one

A node is built by `apply` alone, which runs the op's type rule, so that an ill-typed node cannot exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from loadplan.compiler.pieces import Layout
from loadplan.runtime.tensor_type import TensorType


class ShapeError(ValueError):
    """An op does not fit its arguments; the message holds the op's name and the types."""


Spread = Literal["each", "list", "all"]


@runtime_checkable
class Op(Protocol):
    """One small frozen dataclass: how it reads the tensors of a rule, its type rule, its slice rule and its inverse.

    The slice rule is `lower`: it says where each element of each result lies in the arguments, as pieces, and the
    narrowing of pieces is exact, so that a rank's slice needs no rule of its own.
    """

    spread: ClassVar[Spread]
    """How a converter hands its groups of tensors over: `each` tensor by itself, the tensors of one `list` together
    (one result per list), or `all` of them together."""

    def bind(self, context: Binding, *args: TensorType) -> Op:
        """The op with everything filled in that it takes from config, targets or argument types; self if nothing."""

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        """The types of the results. Raises `ShapeError`."""

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        """The results as pieces of the arguments; only called with what `infer` accepted."""

    def reverse(self, *args: TensorType) -> Op:
        """The op that makes the arguments out of the results."""


@runtime_checkable
class ComputeOp(Op, Protocol):
    """An op that makes new values, by a kernel of the runtime; its `lower` is not called.

    Its slice rule, the rows of the arguments that rows of the results need, is the kernel's `pull`.
    """

    kernel: ClassVar[str]
    """Name of the kernel (`loadplan.runtime.kernels`), which says what the results are."""

    @property
    def options(self) -> str:
        """The kernel's options, as canonical JSON."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What an op may look at before it is applied."""

    names: tuple[str, ...]  # patterns of the groups that the op gets: sources of the rule, targets after a split
    results: int  # number of tensors that the rule's targets name
    targets: tuple[TensorType | None, ...]  # declared type of each, when the signature has it
    config: Config


@dataclass(frozen=True, slots=True)
class Config:
    """The model's config.json, read by field; an absent field and an absent config look the same."""

    fields: tuple[tuple[str, object], ...] = ()

    def find(self, name: str, within: str | None = None) -> object | None:
        """The value of field `name`, of the sub-config `within` if given, else None."""
        fields = dict(self.fields)
        if within is not None:
            inner = fields.get(within)
            fields = inner if isinstance(inner, dict) else {}
        return fields.get(name)

    def find_int(self, name: str, within: str | None = None) -> int | None:
        """The field if it is an integer (bool is not one), else None."""
        value = self.find(name, within)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint; the only op without arguments."""

    spread: ClassVar[Spread] = "each"
    name: str
    type: TensorType

    def bind(self, context: Binding, *args: TensorType) -> Stored:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return (self.type,)

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        raise TypeError("the lowering looks stored tensors up in the checkpoint")

    def reverse(self, *args: TensorType) -> Stored:
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An op applied to values; equal only to itself, so that a shared node is lowered once."""

    op: Op
    args: tuple[Value, ...]
    types: tuple[TensorType, ...]  # of the results


@dataclass(frozen=True, slots=True)
class Value:
    """One result of a node."""

    node: Node
    index: int = 0

    @property
    def type(self) -> TensorType:
        """Shape and dtype."""
        return self.node.types[self.index]


def apply(op: Op, *args: Value) -> tuple[Value, ...]:
    """The results of `op` on `args`. Raises `ShapeError` when the op's type rule refuses them."""
    node = Node(op, args, op.infer(*(arg.type for arg in args)))
    return tuple(Value(node, index) for index in range(len(node.types)))
