"""The ops that rules are written in, under the names that transformers gave them.

`join.py`, `split.py` and `rearrange.py` move elements, and so do `experts.py`, `vocabulary.py` and `queries.py` for
layouts of their own; `cast.py` makes new values, and so does `fold.py`, by a kernel of the runtime. Each is a
frozen dataclass with the four rules of `loadplan.compiler.ir.Op`; none imports torch. Write a new one the same way:
`bind` what it takes from the config, refuse in `infer`, move in `lower`, undo in `reverse`.
"""

from loadplan.compiler.ops.cast import Cast
from loadplan.compiler.ops.experts import FuseRuns, PlainFloats, SplitRuns
from loadplan.compiler.ops.fold import FoldBatchNorm
from loadplan.compiler.ops.join import Concatenate, MergeModulelist
from loadplan.compiler.ops.queries import MergeMessageQueries
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
from loadplan.compiler.ops.vocabulary import UnpadVocab

ErnieFuseAndSplitTextVisionExperts = FuseRuns
ErnieSplitAndDecoupleTextVisionExperts = SplitRuns
Inkling2LoopDequantizeExperts = PlainFloats  # what it does for experts that are not quantised
Inkling2LoopMergeMessageQueries = MergeMessageQueries
Inkling2UnpadVocab = UnpadVocab

__all__ = [
    "Cast",
    "Chunk",
    "Concatenate",
    "Conv3dToLinear",
    "ErnieFuseAndSplitTextVisionExperts",
    "ErnieSplitAndDecoupleTextVisionExperts",
    "FoldBatchNorm",
    "FuseRuns",
    "Inkling2LoopDequantizeExperts",
    "Inkling2LoopMergeMessageQueries",
    "Inkling2UnpadVocab",
    "Interleave",
    "LinearToConv3d",
    "MergeMessageQueries",
    "MergeModulelist",
    "Permute",
    "PermuteForRope",
    "PlainFloats",
    "Reshape",
    "Slice",
    "Split",
    "SplitModulelist",
    "SplitRuns",
    "Transpose",
    "UnpadVocab",
]
