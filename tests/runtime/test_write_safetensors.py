"""Where the tensors of a written file lie: without gaps, each aligned as far as its size and those before it allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.write_safetensors import lay_out

TYPES = st.builds(
    TensorType,
    st.lists(st.integers(0, 33), max_size=3).map(tuple),
    st.sampled_from([DType.U8, DType.BF16, DType.F32, DType.I64]),
)


@given(st.lists(TYPES, min_size=1, max_size=12))
def test_tensors_are_aligned_and_leave_no_gap(types: list[TensorType]) -> None:
    layout = lay_out({f"t{number}": kind for number, kind in enumerate(types)}, {})
    end = len(layout.header)
    assert end % 4096 == 0
    for name, offset in layout.offsets.items():
        kind = types[int(name[1:])]
        assert offset == end and offset % kind.dtype.itemsize == 0
        assert kind.nbytes == 0 or kind.nbytes % 64 or offset % 64 == 0
        end += kind.nbytes
    assert end == layout.size
