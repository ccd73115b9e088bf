"""`patch_embeddings_2d`: the `Conv2d` over the patches of an image as a `Linear` (ViT, CLIP, SigLIP, Dinov2, ...)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from loadplan.runtime.fusions.patch_projection import Convolution, FusedPatchProjection, PatchProjectionFamily


class FusedPatchEmbeddings2d(FusedPatchProjection):
    """A patch embedding over height and width."""

    fusion: ClassVar[str] = "patch_embeddings_2d"
    kind: ClassVar[type[Convolution]] = nn.Conv2d
    names: ClassVar[tuple[str, ...]] = ("projection", "proj", "patch_embedding", "patch_embeddings", "patch_embed")


FAMILY = PatchProjectionFamily(FusedPatchEmbeddings2d)
