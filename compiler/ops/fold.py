"""Ops that make new values by a kernel of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadplan.cache.digest import canonical_json
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.pieces import Layout
from loadplan.runtime.kernels import KernelError, find_kernel, parse_options
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class FoldBatchNorm:
    """A convolution and the batch normalisation behind it as the weight and the bias of one convolution.

    Sources, in this order: the convolution's weight; the normalisation's weight, bias, mean and variance; then, where
    there are any, the convolution's bias and the normalisation's counter of batches. Targets: weight, bias. The
    arithmetic is that of `loadplan.runtime.kernels.FoldBatchNorm`; `eps` is the normalisation's.
    """

    spread: ClassVar[Spread] = "all"
    kernel: ClassVar[str] = "fold_batch_norm"
    eps: float = 1e-5

    @property
    def options(self) -> str:
        return canonical_json({"eps": repr(float(self.eps))}).decode()

    def bind(self, context: Binding, *args: TensorType) -> FoldBatchNorm:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        try:
            return find_kernel(self.kernel).infer(args, parse_options(self.options))
        except KernelError as error:
            raise ShapeError(f"{self}: {error}") from error

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        raise TypeError("what a kernel makes is no layout of its arguments")

    def reverse(self, *args: TensorType) -> Op:
        raise ShapeError(f"{self} makes new values: nothing gives the old ones back (saving gives equivalent ones)")
