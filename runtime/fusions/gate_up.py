"""`gate_up`: the two projections of a gated MLP that take its input as one, the gate first."""

from __future__ import annotations

from typing import ClassVar

from loadplan.runtime.fusions.joined_linear import FusedJoinedLinear, JoinedLinearFamily


class FusedGateUp(FusedJoinedLinear):
    """A gated MLP whose gate and up projections are slices of `gate_up_proj`."""

    fusion: ClassVar[str] = "gate_up"
    fused_name: ClassVar[str] = "gate_up_proj"
    groups: ClassVar[tuple[tuple[str, ...], ...]] = (("gate_proj", "up_proj"), ("wi_0", "wi_1"), ("w1", "w3"))


FAMILY = JoinedLinearFamily(FusedGateUp)
