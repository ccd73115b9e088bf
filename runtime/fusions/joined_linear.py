"""Several `Linear`s of one input as one.

The fused module holds one `Linear`; in the places of the original ones are slices of it. While the fused module's
forward runs, the first slice that is called computes the whole product and the others take their parts of it, if they
are called with the same tensor, unchanged. With another one (cross attention, positions added to queries and keys only)
a slice multiplies by its own rows. A result is handed out once only, and never outlives the forward. In
`torch.inference_mode` nothing is shared, since its tensors do not tell when they are changed: use `no_grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from itertools import accumulate
from threading import get_ident
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn import functional

from loadplan.runtime.fusion import FusionError
from loadplan.runtime.fusions.fused_class import (
    Fused,
    StandIn,
    fused_class,
    fused_parameter,
    is_plain,
    replace_children,
)

_Stamp = tuple[object, ...]


class _Sharing:
    """The product that the slices of one running forward share; for the thread that runs it alone."""

    __slots__ = ("entry", "parts", "source", "thread")

    def __init__(self, source: nn.Module, parts: int) -> None:
        self.source = source
        self.parts = parts
        self.thread = get_ident()
        self.entry: tuple[torch.Tensor, _Stamp, torch.Tensor, frozenset[int]] | None = None

    def take(self, start: int, tensor: torch.Tensor) -> torch.Tensor | None:
        """The product of `tensor`, of which the slice at `start` takes its part; None if it is not to be shared."""
        if tensor.is_inference() or get_ident() != self.thread:  # the former do not say when they were changed
            return None
        entry = self.entry
        stamp = _stamp(tensor)
        if entry is None:
            entry = (tensor, stamp, self.source(tensor), frozenset())
        elif entry[0] is not tensor or entry[1] != stamp or start in entry[3]:
            return None
        taken = entry[3] | {start}
        self.entry = None if len(taken) == self.parts else (*entry[:3], taken)
        return entry[2]


_sharing: ContextVar[_Sharing | None] = ContextVar("loadplan_joined_linear", default=None)


def _stamp(tensor: torch.Tensor) -> _Stamp:
    """What the product depends on besides the tensor's identity."""
    device = tensor.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return tensor._version, torch.is_grad_enabled(), autocast


class LinearSlice(StandIn):
    """Rows `start` to `start + out_features` of a `Linear` that has `rows`."""

    def __init__(
        self, source_name: str, source: nn.Module, in_features: int, start: int, out_features: int, rows: int
    ) -> None:
        super().__init__(source_name, source)
        self.in_features = in_features
        self.out_features = out_features
        self.start = start
        self.rows = rows

    @property
    def weight(self) -> torch.Tensor:
        """A view of the rows, `[out_features, in_features]`."""
        return self._part(cast(torch.Tensor, self.source.weight), 0)

    @property
    def bias(self) -> torch.Tensor | None:
        """A view of their bias, `[out_features]`, if there is one."""
        bias = cast("torch.Tensor | None", self.source.bias)
        return None if bias is None else self._part(bias, 0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`; may be a view of a larger tensor."""
        source = self.source
        sharing = None if torch.compiler.is_compiling() else _sharing.get()
        if sharing is not None and sharing.source is source:
            shared = sharing.take(self.start, input)
            if shared is not None:
                return self._part(shared, -1)
        if is_plain(source, nn.Linear):
            return functional.linear(input, self.weight, self.bias)
        whole: torch.Tensor = source(input)  # something took the place of the `Linear`: only it knows how to compute
        return self._part(whole, -1)

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if tensor.shape[dim] != self.rows:  # a rank's share, say: where a slice begins in it is not known here
            raise FusionError(
                f"{self.source_name} has {tensor.shape[dim]} rows, and its parts were fused when it had {self.rows}; "
                "a model with tensor parallelism needs modules of its own for them"
            )
        return tensor.narrow(dim, self.start, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, start={self.start}"


class FusedJoinedLinear(Fused):
    """A module whose `Linear`s are slices of one, its child `fused_name`."""

    fused_name: ClassVar[str]
    groups: ClassVar[tuple[tuple[str, ...], ...]]

    def fuse_(self) -> None:
        names = find_group(self, self.groups, self.fused_name)
        assert names is not None, "is_fusable was asked"
        parts = [cast(nn.Linear, self._modules[name]) for name in names]
        sizes = [part.out_features for part in parts]
        in_features = parts[0].in_features
        joined = nn.Linear(in_features, sum(sizes), bias=parts[0].bias is not None, device="meta")
        joined.weight = _joined([part.weight for part in parts])
        if parts[0].bias is not None:
            joined.bias = _joined([part.bias for part in parts])
        joined.train(self.training)
        starts = accumulate(sizes, initial=0)
        changes: dict[str, dict[str, nn.Module]] = {
            name: {name: LinearSlice(self.fused_name, joined, in_features, start, size, sum(sizes))}
            for name, start, size in zip(names, starts, sizes, strict=False)
        }
        changes[names[0]] = {self.fused_name: joined, **changes[names[0]]}
        replace_children(self, changes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # it joins products of views by itself
            return super().forward(*args, **kwargs)
        source = cast(nn.Module, self._modules[self.fused_name])
        token = _sharing.set(_Sharing(source, sum(isinstance(child, LinearSlice) for child in self._modules.values())))
        try:
            return super().forward(*args, **kwargs)
        finally:
            _sharing.reset(token)


class JoinedLinearFamily:
    """The family of modules that have one of `groups` of child `Linear`s, in the order in which they are joined."""

    def __init__(self, mixin: type[FusedJoinedLinear]) -> None:
        self._mixin = mixin
        self.looks_for = (
            f"child Linears {' or '.join('/'.join(names) for names in mixin.groups)} of equal input, dtype and device, "
            "all with or all without bias"
        )

    def is_fusable(self, module: nn.Module) -> bool:
        return find_group(module, self._mixin.groups, self._mixin.fused_name) is not None

    def replaces(self, module: nn.Module) -> Sequence[str]:
        return find_group(module, self._mixin.groups, self._mixin.fused_name) or ()

    def describe(self, module: nn.Module) -> dict[str, object]:
        """The children that are joined, and whether they have biases."""
        names = self.replaces(module)
        return {"bias": cast(nn.Linear, module._modules[names[0]]).bias is not None, "parts": list(names)}

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return fused_class(self._mixin, original_cls)


def find_group(module: nn.Module, groups: Sequence[tuple[str, ...]], fused_name: str) -> tuple[str, ...] | None:
    """The only group of which `module` has all children, if they can be joined under `fused_name`."""
    there = [names for names in groups if all(is_plain(module._modules.get(name), nn.Linear) for name in names)]
    if len(there) != 1 or hasattr(module, fused_name):
        return None
    parts = [cast(nn.Linear, module._modules[name]) for name in there[0]]
    weights = {(p.weight.shape[1], p.weight.dtype, p.weight.device, p.weight.requires_grad) for p in parts}
    biases = {p.bias is not None and (p.bias.dtype, p.bias.device, p.bias.requires_grad) for p in parts}
    is_distinct = len({id(part) for part in parts}) == len(parts)
    return there[0] if len(weights) == len(biases) == 1 and is_distinct else None


def _joined(parts: Sequence[torch.Tensor]) -> nn.Parameter:
    return fused_parameter(torch.cat([part.detach() for part in parts]), parts[0])
