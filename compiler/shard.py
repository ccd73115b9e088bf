"""How a tensor is cut over tensor-parallel ranks: styles, and the explicit intervals they give.

Style names are those of transformers' tensor-parallel plans (transformers_spec 4.2, where known to be right).
"""

from __future__ import annotations

from dataclasses import dataclass

from loadplan.compiler.patterns import PatternError
from loadplan.runtime.plan import Intervals


class ShardError(ValueError):
    """A tensor cannot be cut as its style says; the message holds the numbers."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A cut of one dim over the ranks; `dim` None leaves every rank the whole tensor.

    The dim is made of `groups` parts that lie one after the other (2 for gate and up in one matrix); each is cut by
    itself, so that a rank's local tensor has the same parts. Cuts fall on multiples of `unit` positions (the size of
    an attention head). Sizes that do not divide evenly are refused unless `uneven`: then the first ranks hold
    ceil(size / ranks), the last ones less or nothing, as `torch.chunk` cuts.
    """

    dim: int | None  # counted from the back: -2 rows of a matrix or of each expert's, -1 columns
    one_dim: bool = False  # whether 1-d tensors (biases) are cut too
    groups: int = 1
    unit: int = 1
    uneven: bool = False

    def __post_init__(self) -> None:
        if self.groups < 1 or self.unit < 1 or (self.dim is not None and self.dim >= 0):
            raise PatternError(f"{self}: dim is counted from the back (-1 the last), groups and unit are counts from 1")

    def cut(self, shape: tuple[int, ...], ranks: int) -> tuple[int, tuple[Intervals, ...]] | None:
        """The dim that is cut, from the front, and per rank the intervals that it holds; None when nothing is.

        Raises:
            ShardError: the dim does not divide, or is not there.
        """
        if ranks == 1 or self.dim is None or not shape or (len(shape) == 1 and not self.one_dim):
            return None
        dim = len(shape) + self.dim if len(shape) > 1 else 0
        if dim < 0:
            raise ShardError(f"{list(shape)} has no dim {self.dim}")
        size = shape[dim]
        if size % self.groups:
            raise ShardError(f"dim {dim} of {list(shape)} is not made of {self.groups} equal parts")
        part = size // self.groups
        if part % self.unit:
            raise ShardError(f"{part} positions on dim {dim} of {list(shape)} are not whole units of {self.unit}")
        units = part // self.unit
        if units % ranks and not self.uneven:
            what = "positions" if self.unit == 1 else f"units of {self.unit} (heads)"
            raise ShardError(f"{units} {what} on dim {dim} of {list(shape)} do not divide by {ranks} ranks")
        step = -(-units // ranks) * self.unit
        bounds = [(min(rank * step, part), min((rank + 1) * step, part)) for rank in range(ranks)]
        return dim, tuple(
            tuple((group * part + low, group * part + high) for group in range(self.groups)) for low, high in bounds
        )


REPLICATED = Shard(None)
_STYLES = {
    "colwise": Shard(-2, one_dim=True),
    "rowwise": Shard(-1),
    "packed_colwise": Shard(-2, one_dim=True, groups=2),
    "packed_rowwise": Shard(-1, groups=2),
    "embedding_rowwise": Shard(-2, uneven=True),
    "replicated": REPLICATED,
}


def parse_style(style: str | Shard) -> Shard:
    """The shard that a style name stands for. Raises `PatternError`."""
    if isinstance(style, Shard):
        return style
    found = _STYLES.get(style)
    if found is None:
        raise PatternError(f"{style!r} is not a tensor-parallel style; known are {', '.join(_STYLES)}, or pass a Shard")
    return found


def heads(size: int) -> Shard:
    """Rows cut between attention heads of `size` rows each, never through one."""
    return Shard(-2, one_dim=True, unit=size)
