"""Convolutions over patches that do not overlap, as a `Linear` over each flattened patch.

A convolution whose stride is its kernel, without padding, dilation or groups, multiplies each patch by the weight once:
`[out, in, *kernel]` as a matrix `[out, in * prod(kernel)]`. In the place of the convolution is a stand-in that cuts the
patches, multiplies and gives the result the shape that the convolution would.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, cast

import torch
from torch import nn

from loadplan.runtime.fusions.fused_class import (
    Fused,
    StandIn,
    fused_class,
    fused_parameter,
    is_plain,
    replace_children,
)

Convolution = nn.Conv2d | nn.Conv3d


class PatchProjection(StandIn):
    """What `conv` computes, from the weights of a `Linear`."""

    def __init__(self, source_name: str, source: nn.Module, conv: Convolution) -> None:
        super().__init__(source_name, source)
        self.in_channels, self.out_channels = conv.in_channels, conv.out_channels
        self.kernel_size: tuple[int, ...] = conv.kernel_size
        self.stride, self.padding, self.dilation = conv.stride, conv.padding, conv.dilation
        self.groups = conv.groups

    @property
    def weight(self) -> torch.Tensor:
        """A view of the weight as the convolution's, `[out, in, *kernel]`."""
        weight = cast(torch.Tensor, self.source.weight)
        return weight.view(weight.shape[0], self.in_channels, *self.kernel_size)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, `[out]`, if there is one."""
        return cast("torch.Tensor | None", self.source.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[batch, in, *size]` to `[batch, out, *(size // kernel)]`, with or without batch, as convolutions do."""
        ndim = len(self.kernel_size)
        if input.ndim == ndim + 1:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        grid = [size // kernel for size, kernel in zip(input.shape[2:], self.kernel_size, strict=True)]
        if not all(grid) or input.shape[1] != self.in_channels:
            raise RuntimeError(f"input {list(input.shape)} has no patch of {self.in_channels}x{list(self.kernel_size)}")
        for dim, (count, kernel) in enumerate(zip(grid, self.kernel_size, strict=True), start=2):
            input = input.narrow(dim, 0, count * kernel)  # a convolution leaves out what is no whole patch
        split = [size for pair in zip(grid, self.kernel_size, strict=True) for size in pair]
        patches = input.reshape(*input.shape[:2], *split)
        order = (0, *range(2, 2 + 2 * ndim, 2), 1, *range(3, 3 + 2 * ndim, 2))
        flat = patches.permute(order).reshape(input.shape[0], prod(grid), self.in_channels * prod(self.kernel_size))
        projected: torch.Tensor = self.source(flat)
        return projected.transpose(1, 2).view(input.shape[0], projected.shape[-1], *grid)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


class FusedPatchProjection(Fused):
    """A module whose convolution `X` is a stand-in for its `Linear` child `linear_X`."""

    kind: ClassVar[type[Convolution]]
    names: ClassVar[tuple[str, ...]]

    def fuse_(self) -> None:
        name = find_projection(self, self.kind, self.names)
        assert name is not None, "is_fusable was asked"
        conv = cast(Convolution, self._modules[name])
        features = conv.in_channels * prod(conv.kernel_size)
        linear = nn.Linear(features, conv.out_channels, bias=conv.bias is not None, device="meta")
        linear.weight = fused_parameter(conv.weight.detach().reshape(conv.out_channels, features), conv.weight)
        if conv.bias is not None:
            linear.bias = fused_parameter(conv.bias, conv.bias)
        linear.train(self.training)
        fused_name = f"linear_{name}"
        replace_children(self, {name: {fused_name: linear, name: PatchProjection(fused_name, linear, conv)}})


class PatchProjectionFamily:
    """The family of modules with one such convolution, under one of `mixin.names`."""

    def __init__(self, mixin: type[FusedPatchProjection], target_modules_patterns: Sequence[str] = ()) -> None:
        self._mixin = mixin
        self.target_modules_patterns = tuple(target_modules_patterns)
        where = f" in modules {', '.join(map(repr, target_modules_patterns))}" if target_modules_patterns else ""
        self.looks_for = (
            f"a {mixin.kind.__name__} {' or '.join(mixin.names)}{where} whose stride is its kernel, "
            "without padding, dilation or groups"
        )

    def is_fusable(self, module: nn.Module) -> bool:
        return self._find(module) is not None

    def replaces(self, module: nn.Module) -> Sequence[str]:
        name = self._find(module)
        return () if name is None else (name,)

    def describe(self, module: nn.Module) -> dict[str, object]:
        """The convolution's name and its shape, which the flat weight no longer tells."""
        (name,) = self.replaces(module)
        conv = cast(Convolution, module._modules[name])
        return {
            "bias": conv.bias is not None,
            "child": name,
            "in_channels": conv.in_channels,
            "kernel_size": list(conv.kernel_size),
            "out_channels": conv.out_channels,
        }

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return fused_class(self._mixin, original_cls)

    def _find(self, module: nn.Module) -> str | None:
        return find_projection(module, self._mixin.kind, self._mixin.names)


def find_projection(module: nn.Module, kind: type[Convolution], names: Sequence[str]) -> str | None:
    """The only child of `module` among `names` that is such a convolution, if its fused name is free."""
    found = [name for name in names if _is_over_patches(module._modules.get(name), kind)]
    return found[0] if len(found) == 1 and not hasattr(module, f"linear_{found[0]}") else None


def _is_over_patches(module: nn.Module | None, kind: type[Convolution]) -> bool:
    if not is_plain(module, kind):
        return False
    conv = cast(Convolution, module)
    return (
        tuple(conv.stride) == tuple(conv.kernel_size)
        and prod(conv.kernel_size) > 1
        and (conv.padding == "valid" or (not isinstance(conv.padding, str) and not any(conv.padding)))
        and all(step == 1 for step in conv.dilation)
        and conv.groups == 1
    )
