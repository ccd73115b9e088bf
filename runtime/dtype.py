"""Element types, under the names that safetensors headers use.

The closed list is that of the safetensors format (crate `safetensors` 0.8, enum `Dtype`). No torch here: the compiler
reads headers and writes plans without it. `loadplan.runtime.torch_types` maps to `torch.dtype`.
"""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """An element type; `bits` is its size, a multiple of 8 except for the packed F4 and F6 kinds."""

    BOOL = "BOOL"
    F4 = "F4"
    F6_E2M3 = "F6_E2M3"
    F6_E3M2 = "F6_E3M2"
    U8 = "U8"
    I8 = "I8"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    C64 = "C64"
    F64 = "F64"
    I64 = "I64"
    U64 = "U64"

    @property
    def bits(self) -> int:
        """Bits per element."""
        return _BITS[self]

    @property
    def is_packed(self) -> bool:
        """Whether an element is smaller than a byte, so that it has no address of its own."""
        return self.bits % 8 != 0

    @property
    def itemsize(self) -> int:
        """Bytes per element; a packed dtype has none.

        Raises:
            ValueError: the dtype is packed.
        """
        if self.is_packed:
            raise ValueError(f"{self} has {self.bits} bits per element: it has no item size in bytes")
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether values are real floating point numbers that a cast may round."""
        return self in _CASTABLE_FLOATS


_BITS = {
    dtype: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "I16 U16 F16 BF16",
        32: "I32 U32 F32",
        64: "C64 F64 I64 U64",
    }.items()
    for dtype in map(DType, names.split())
}

# F8 kinds are left out on purpose: they come with scales, and a cast by value would drop those silently.
_CASTABLE_FLOATS = frozenset({DType.F16, DType.BF16, DType.F32, DType.F64})
