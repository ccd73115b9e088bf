"""Casts by value that do not lose a number without a word."""

from __future__ import annotations

import torch

from loadplan.cache.error import LoadplanError


class CastOverflow(LoadplanError, OverflowError):
    """A finite value is too large for the dtype it is cast to, and would become infinite (cases B34)."""

    def __init__(self, name: str, count: int, stored: str, wanted: str) -> None:
        super().__init__(name, count, stored, wanted)
        self.name, self.count, self.stored, self.wanted = name, count, stored, wanted

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.count} finite values of {self.stored} are too large for {self.wanted} and would become "
            "infinite; compile for another dtype, or keep this tensor's by dtype_plan"
        )


def refuse_overflow(before: torch.Tensor, after: torch.Tensor, name: str) -> None:
    """Raise `CastOverflow` if `after`, a cast of `before`, is infinite where `before` is not.

    Only a cast to a smaller range can overflow. The extremes tell in one pass over `after`, without other memory; only
    if they are not finite are elements compared.
    """
    if after.numel() == 0 or torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max:
        return
    if all(bool(extreme.isfinite()) for extreme in torch.aminmax(after)):
        return
    count = int((after.isinf() & before.isfinite()).sum())
    if count:
        raise CastOverflow(name, count, str(before.dtype), str(after.dtype))
