"""`qkv`: the projections of queries, keys and values as one."""

from __future__ import annotations

from typing import ClassVar

from loadplan.runtime.fusions.joined_linear import FusedJoinedLinear, JoinedLinearFamily


class FusedQkv(FusedJoinedLinear):
    """An attention module whose three projections are slices of `qkv_proj`."""

    fusion: ClassVar[str] = "qkv"
    fused_name: ClassVar[str] = "qkv_proj"
    groups: ClassVar[tuple[tuple[str, ...], ...]] = (  # the names that transformers 5.24 has for them
        ("q_proj", "k_proj", "v_proj"),
        ("query", "key", "value"),
        ("q", "k", "v"),
        ("linear_q", "linear_k", "linear_v"),
        ("query_proj", "key_proj", "value_proj"),
        ("q_lin", "k_lin", "v_lin"),
        ("to_q", "to_k", "to_v"),
    )


FAMILY = JoinedLinearFamily(FusedQkv)
