"""The ops that rules are written in, under the names that transformers gave them.

`join.py`, `split.py` and `rearrange.py` move elements; `cast.py` makes new values. Each is a frozen dataclass with the
four rules of `loadplan.compiler.ir.Op`; none imports torch. Write a new one the same way: `bind` what it takes from
the config, refuse in `infer`, move in `lower`, undo in `reverse`.
"""

from loadplan.compiler.ops.cast import Cast
from loadplan.compiler.ops.join import Concatenate, MergeModulelist
from loadplan.compiler.ops.rearrange import (
    Conv3dToLinear,
    Interleave,
    LinearToConv3d,
    Permute,
    PermuteForRope,
    Reshape,
    Transpose,
)
from loadplan.compiler.ops.split import Chunk, Slice, Split, SplitModulelist

__all__ = [
    "Cast",
    "Chunk",
    "Concatenate",
    "Conv3dToLinear",
    "Interleave",
    "LinearToConv3d",
    "MergeModulelist",
    "Permute",
    "PermuteForRope",
    "Reshape",
    "Slice",
    "Split",
    "SplitModulelist",
    "Transpose",
]
