"""Sapiens 2: a gated vision transformer, and one head a task on convolutions that bring the map back to full size.

The authors' heads are `Sequential`s in which every third module is a convolution (then norm, then activation); the
models number the convolutions alone. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.recipes.idioms import alike, cut, inside, rename

_STEPS = 6  # more than any published head has


def _every_third(old: str, new: str) -> dict[str, str]:
    return {rf"{old}\.{3 * number}\.(weight|bias)": rf"{new}.{number}.convolution.\1" for number in range(_STEPS)}


_BACKBONE = (
    *rename(
        {
            "^cls_token": "embeddings.cls_token",
            "^storage_tokens": "embeddings.register_tokens",
            r"^patch_embed\.projection\.": "embeddings.patch_embeddings.",
            r"blocks\.(\d+)\.": r"model.layer.\1.",
            r"attn\.proj\.": "attention.o_proj.",
            r"attn\.w([qkv])\.": r"attention.\1_proj.",
            r"attn\.([qk])_norm\.": r"attention.\1_norm.",
            r"attn\.gamma\.weight": "layer_scale1.lambda1",
            r"ffn\.w3\.": "mlp.down_proj.",
            r"\.ln([12])\.": r".norm\1.",
            r"^ln1\.": "norm.",
        }
    ),
    cut("ffn.w12", "mlp.gate_proj", "mlp.up_proj"),
)
# The layers are the same for all tasks; only the pointmap has a scale beside it.
_HEAD = rename(
    {
        r"^backbone\.": "model.",
        r"decode_head\.input_conv\.0\.": "decode_head.input_conv.convolution.",
        r"decode_head\.upsample_blocks\.(\d+)\.0\.": r"decode_head.upsample_layers.\1.convolution.",
        **_every_third(r"decode_head\.deconv_layers", "decode_head.upsample_layers"),
        **_every_third(r"decode_head\.conv_layers", "decode_head.conv_layers"),
        r"decode_head\.conv_(?:seg|pose|normal|pointmap|matting)\.": "decode_head.predictor.",
    }
)
_SCALE = rename(
    {
        **_every_third(r"decode_head\.scale_conv_layers", "scale_head.conv_layers"),
        **inside(
            r"decode_head\.scale_final_layer\.",
            "scale_head.predictor.",
            {r"1\.": "block1.layers.0.", r"3\.": "block2.layers.0.", r"5\.": "proj."},
        ),
    }
)
_PERIODS = ("periods",)  # of the rotary embedding; models compute them

SAPIENS: Mapping[str, RecipeSource] = {
    "sapiens2": Recipe(_BACKBONE, may_be_unused=_PERIODS),
    **alike(
        Recipe(_HEAD),
        "Sapiens2ForSemanticSegmentation Sapiens2ForPoseEstimation Sapiens2ForNormalEstimation Sapiens2ForImageMatting",
    ),
    "Sapiens2ForPointmapEstimation": Recipe((*_HEAD, *_SCALE)),
}
