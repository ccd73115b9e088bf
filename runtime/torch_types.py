"""Between loadplan's dtypes and torch's."""

from __future__ import annotations

import torch

from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType

_TORCH = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.F8_E4M3FNUZ: torch.float8_e4m3fnuz,
    DType.F8_E5M2FNUZ: torch.float8_e5m2fnuz,
    DType.I16: torch.int16,
    DType.U16: torch.uint16,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I32: torch.int32,
    DType.U32: torch.uint32,
    DType.F32: torch.float32,
    DType.C64: torch.complex64,
    DType.F64: torch.float64,
    DType.I64: torch.int64,
    DType.U64: torch.uint64,
}
_OURS = {theirs: ours for ours, theirs in _TORCH.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's dtype; the packed kinds, which torch cannot address, come as bytes (`torch.uint8`)."""
    return _TORCH.get(dtype, torch.uint8)


def torch_layout(kind: TensorType) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the tensor that torch holds a value of type `kind` in.

    F4 elements come in pairs, as torch's packed dtype shows them, where the last dim is even; other packed values come
    as their bytes, in one dim.
    """
    if not kind.dtype.is_packed:
        return kind.shape, _TORCH[kind.dtype]
    pairs = getattr(torch, "float4_e2m1fn_x2", None)
    if kind.dtype is DType.F4 and pairs is not None and kind.shape and kind.shape[-1] % 2 == 0:
        return (*kind.shape[:-1], kind.shape[-1] // 2), pairs
    return (kind.nbytes,), torch.uint8


def dtype_of(dtype: torch.dtype) -> DType | None:
    """The dtype that safetensors stores a tensor of torch's `dtype` as, None if it has none."""
    return _OURS.get(dtype)


def torch_dtype_named(name: str) -> torch.dtype:
    """torch's dtype by its own name, with or without `torch.`. Raises `ValueError`."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return found
