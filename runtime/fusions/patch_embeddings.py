"""`patch_embeddings`: the `Conv3d` over the patches of vision-language models as a `Linear`.

Names are those of the family of this name in transformers 5.24 (`proj` becomes `linear_proj`), so that a checkpoint
saved in its fused layout has the same keys.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from loadplan.runtime.fusions.patch_projection import Convolution, FusedPatchProjection, PatchProjectionFamily


class FusedPatchEmbeddings(FusedPatchProjection):
    """A patch embedding over time, height and width."""

    fusion: ClassVar[str] = "patch_embeddings"
    kind: ClassVar[type[Convolution]] = nn.Conv3d
    names: ClassVar[tuple[str, ...]] = ("proj",)


FAMILY = PatchProjectionFamily(FusedPatchEmbeddings, (r"(^|\.)patch_embed$",))
