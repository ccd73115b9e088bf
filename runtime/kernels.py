"""The kernels that plans may name: what makes new values, where copies only move them.

A kernel works row by row: rows `low` to `high` (along the first dim) of all of its outputs are made of the rows of its
inputs that `pull` names, and do not depend on how rows are shared out among calls. It says what it makes (`infer`), so
that a plan from an untrusted place is proved before anything runs. Torch is imported by what runs, not by what is
asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Protocol

from loadplan.cache.error import LoadplanError
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType

if TYPE_CHECKING:
    import torch

Options = Mapping[str, object]
Rows = tuple[int, int]  # low, high (excluded), along the first dim; (0, 1) for a 0-d tensor

_MAX_OPTIONS = 4096  # characters


class KernelError(LoadplanError, ValueError):
    """A kernel is not known, or does not take what it is given."""


class Kernel(Protocol):
    """What a compute of a plan runs. All methods raise `KernelError` for what `infer` would refuse."""

    def infer(self, types: Sequence[TensorType], options: Options) -> tuple[TensorType, ...]:
        """The types of the outputs."""

    def pull(self, low: int, high: int, types: Sequence[TensorType], options: Options) -> tuple[Rows, ...]:
        """For each input, the rows that rows `low` to `high` of the outputs are made of."""

    def row_nbytes(self, types: Sequence[TensorType], options: Options) -> int:
        """Bytes that `run` needs besides inputs and outputs, per row of the outputs."""

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], options: Options, names: Sequence[str]
    ) -> None:
        """Fill the outputs, rows of the whole ones; `names` are theirs, for messages. Raises `CastOverflow`."""

    def reverse(
        self, outputs: Sequence[torch.Tensor], types: Sequence[TensorType], options: Options
    ) -> tuple[torch.Tensor, ...]:
        """Inputs of `types` that would give these outputs, for saving in the layout of the checkpoint."""


def find_kernel(name: str) -> Kernel:
    """The kernel called `name`. Raises `KernelError`."""
    found = _KERNELS.get(name)
    if found is None:
        raise KernelError(f"no kernel is called {name[:80]!r}; known are {', '.join(sorted(_KERNELS))}")
    return found


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make `kernel` the one called `name`, in this process. Raises `KernelError` when there is one."""
    if name in _KERNELS:
        raise KernelError(f"a kernel is called {name!r} already")
    _KERNELS[name] = kernel


def parse_options(text: str) -> Options:
    """The options of a compute. Raises `KernelError` for what is no JSON object."""
    try:
        if len(text) > _MAX_OPTIONS:
            raise ValueError(f"{len(text)} characters, at most {_MAX_OPTIONS}")
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KernelError(f"options are not JSON: {error}") from error
    if not isinstance(options, dict):
        raise KernelError(f"options {text[:80]!r} are no JSON object")
    return options


class FoldBatchNorm:
    """A convolution and the batch normalisation behind it as one convolution with a bias, for evaluation.

    Inputs: weight of the convolution `[out, ...]`, weight, bias, mean and variance of the normalisation `[out]`; then,
    if there are any, the bias of the convolution `[out]` and the I64 counter of batches `[]`, which nothing is made of.
    Outputs: weight and bias, both of the dtype of the convolution's weight (`loadplan.runtime.fold_batch_norm`).

    The reverse is an equivalent pair: the convolution has the folded weight and no bias (zeros), the normalisation mean
    0, weight 1, the folded bias, and the variance nearest to `1 - eps`, which makes the scale exactly 1 in float32, and
    1 within `eps` in shorter dtypes. Its counter is 0.
    """

    def infer(self, types: Sequence[TensorType], options: Options) -> tuple[TensorType, ...]:
        _eps(options)
        weight, *others = types or [TensorType((), DType.I64)]
        counters = [kind for kind in others[4:] if kind == TensorType((), DType.I64)]
        floats = others[: len(others) - len(counters)]
        if not weight.shape or len(floats) not in (4, 5) or others[len(floats) :] != counters or len(counters) > 1:
            raise KernelError(f"{_shown(types)}: not a convolution's weight and what a batch normalisation has")
        if any(kind.shape != weight.shape[:1] for kind in floats):
            raise KernelError(
                f"{_shown(types)}: the normalisation is not of the {weight.shape[0]} channels that come in"
            )
        if not all(kind.dtype.is_float for kind in (weight, *floats)):
            raise KernelError(f"{_shown(types)}: only F16, BF16, F32 and F64 are folded")
        return weight, TensorType(weight.shape[:1], weight.dtype)

    def pull(self, low: int, high: int, types: Sequence[TensorType], options: Options) -> tuple[Rows, ...]:
        return tuple((low, high) if kind.shape else (0, 1) for kind in types)

    def row_nbytes(self, types: Sequence[TensorType], options: Options) -> int:
        return 16 * (prod(types[0].shape[1:]) + len(types))  # two float64 of each element

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], options: Options, names: Sequence[str]
    ) -> None:
        from loadplan.runtime.cast import refuse_overflow
        from loadplan.runtime.fold_batch_norm import BatchNorm, fold_batch_norm

        weight, *floats = (tensor for tensor in inputs if tensor.dim())
        shift = floats[4] if len(floats) > 4 else None
        folded, bias = fold_batch_norm(weight.double(), shift, BatchNorm(*floats[:4]), eps=_eps(options))
        for value, output, name in zip((folded, bias), outputs, names, strict=True):
            output.copy_(value)
            refuse_overflow(value, output, name)

    def reverse(
        self, outputs: Sequence[torch.Tensor], types: Sequence[TensorType], options: Options
    ) -> tuple[torch.Tensor, ...]:
        import torch

        from loadplan.runtime.torch_types import torch_dtype

        weight, bias = outputs
        values = [weight, torch.ones(()), bias, torch.zeros(()), torch.tensor(1 - _eps(options), dtype=torch.float64)]
        values += [torch.zeros(())] * (len(types) - len(values))
        return tuple(
            value.to(torch_dtype(kind.dtype)).expand(kind.shape).contiguous()
            for value, kind in zip(values, types, strict=True)
        )


def _eps(options: Options) -> float:
    text = options.get("eps")
    try:
        eps = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        eps = math.nan
    if not 0 <= eps < 1 or len(options) != 1:
        raise KernelError(f"options {str(options)[:80]}: eps, a text from 0 to below 1, and nothing else")
    return eps


def _shown(types: Sequence[TensorType]) -> str:
    return ", ".join(map(str, types[:8]))


_KERNELS: dict[str, Kernel] = {"fold_batch_norm": FoldBatchNorm()}
