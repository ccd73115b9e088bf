"""Batch normalisation folded into the convolution before it: the arithmetic, for live modules and for plans."""

from __future__ import annotations

from typing import NamedTuple

import torch


class BatchNorm(NamedTuple):
    """The tensors of a batch normalisation, each `[channels]`."""

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor


def fold_batch_norm(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: BatchNorm, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias of one convolution that does what it and the normalisation after it (in eval mode) do.

    With `scale = norm.weight / sqrt(running_var + eps)`, per output channel: `weight * scale`, and
    `norm.bias + (bias - running_mean) * scale`; computed in float64 and rounded once, to the dtype of `weight`.
    Only operations that IEEE 754 rounds correctly are used, so that an element is the same in any company.

    Args:
        weight: of the convolution, `[channels, in / groups, *kernel]`.
        bias: of the convolution, `[channels]`; None when it has none.
        norm: the normalisation.
        eps: its epsilon.
    """
    gamma, beta, mean, var = (tensor.double() for tensor in norm)
    scale = gamma / (var + eps).sqrt()
    folded = weight.double() * scale.view(-1, *[1] * (weight.ndim - 1))
    shift = beta + ((0 if bias is None else bias.double()) - mean) * scale
    return folded.to(weight.dtype), shift.to(weight.dtype)
