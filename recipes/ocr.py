"""Models that read documents: DeepSeek-OCR 2 and its kin, PaddleOCR-VL, Qianfan-OCR, Hunyuan's.

They join towers that others published (SAM's encoder, CLIP, InternViT, Qwen 2), each with its own names, to a language
model that stood bare in the file. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.recipes.idioms import (
    BARE_TEXT,
    STALE_BUFFERS,
    Rules,
    cut_qkv,
    inside,
    into_language_model,
    rename,
    stack_experts,
)

_POSITION_IDS = ("embeddings.position_ids",)  # of a CLIP tower

_SEPARATOR = {"view_seperator": "view_separator"}


def _sam(at: str) -> Rules:
    """SAM's image encoder at `at`, with two convolutions after its neck."""
    new = at.removeprefix("^").replace("\\", "")
    return rename(
        inside(
            at,
            new,
            {
                r"blocks\.(\d+)\.norm([12])\.": r"layers.\1.layer_norm\2.",
                r"blocks\.": "layers.",
                r"patch_embed\.proj\.": "patch_embed.projection.",
                r"neck\.0\.": "neck.conv1.",
                r"neck\.1\.": "neck.layer_norm1.",
                r"neck\.2\.": "neck.conv2.",
                r"neck\.3\.": "neck.layer_norm2.",
                r"net_2\.": "proj.conv1.",
                r"net_3\.": "proj.conv2.",
            },
        )
    )


# After SAM's encoder comes a small Qwen 2, which turns learned queries (one set a resolution) into image tokens.
_DEEPSEEK_OCR2 = (
    *rename({r"sam_model\.": "vision_tower.sam_encoder."}),
    *_sam(r"sam_encoder\."),
    *rename(
        {
            r"qwen2_model\.model\.model\.(layers|norm)\.": r"vision_tower.vision_encoder.\1.",
            r"qwen2_model\.query_(768|1024)\.": r"vision_tower.query_\1_resolution.",
            r"projector\.layers\.": "multi_modal_projector.",
            **_SEPARATOR,
            **BARE_TEXT,
        }
    ),
    *stack_experts(),
)
_UNLIMITED_OCR = rename(
    {
        r"^(model\.)?sam_model\.": r"\1vision_tower.sam_encoder.",
        r"^(model\.)?vision_model\.": r"\1vision_tower.vision_encoder.",
        r"^(model\.)?projector\.layers\.": r"\1multi_modal_projector.",
        **_SEPARATOR,
        **BARE_TEXT,
    }
)
_CLIP_IN_ONE = (*rename({r"^transformer\.": "encoder."}), cut_qkv("self_attn.qkv_proj", "self_attn"))

_PADDLE = (
    *rename({r"^mlp_AR\.": "model.projector.", r"^visual\.": "model.visual."}),
    into_language_model("visual", "projector"),
)

# InternViT in its authors' layout, with layer scales `ls1`, `ls2`.
_QIANFAN = (
    *rename(
        {
            r"^vision_model\.": "model.vision_tower.",
            r"encoder\.layers\.": "layers.",
            r"\.ls([12])\b": r".lambda_\1",
            r"(layers\.\d+)\.attn\.proj\.": r"\1.attention.projection_layer.",
            r"\.norm1\.": ".layernorm_before.",
            r"\.norm2\.": ".layernorm_after.",
            r"\.embeddings\.class_embedding": ".embeddings.cls_token",
            r"\.embeddings\.position_embedding": ".embeddings.position_embeddings",
            r"\.embeddings\.patch_embedding\.": ".embeddings.patch_embeddings.projection.",
            r"^language_model\.model\.": "model.language_model.",
            r"^language_model\.lm_head\.": "lm_head.",
            **inside(
                r"^mlp1\.",
                "model.multi_modal_projector.",
                {r"0\.": "layer_norm.", r"1\.": "linear_1.", r"3\.": "linear_2."},
            ),
        }
    ),
    cut_qkv("attn.qkv", "attention"),
)

# Megatron's names in the tower (`vit`), a patch merger called `perceive`.
_HUNYUAN_TOWER = {
    "mlp.dense_h_to_4h": "mlp.fc1",
    "mlp.dense_4h_to_h": "mlp.fc2",
    r"^vit\.layers\.(\d+)\.input_layernorm\.": r"vit.layers.\1.layer_norm1.",
    r"^vit\.layers\.(\d+)\.post_attention_layernorm\.": r"vit.layers.\1.layer_norm2.",
}
_HUNYUAN_MERGER = {
    r"perceive\.proj\.0\.": "perceive.proj_conv.",
    r"perceive\.proj\.2\.": "perceive.proj_out.",
    r"perceive\.": "patch_merger.",
}
_HUNYUAN_PARTS = (into_language_model("vit", "vision_tower"), *rename({r"^(?:model\.)?vit\.": "model.vision_tower."}))
_HUNYUAN = (*rename({**_HUNYUAN_TOWER, **_HUNYUAN_MERGER}), *_HUNYUAN_PARTS)
_HUNYUAN_4 = (
    *rename(
        {
            **_HUNYUAN_TOWER,
            r"(perceive|patch_merger)\.norm\.": r"\1.before_rms.",
            **_HUNYUAN_MERGER,
        }
    ),
    *_HUNYUAN_PARTS,
)

OCR: Mapping[str, RecipeSource] = {
    "deepseek_ocr2": Recipe(_DEEPSEEK_OCR2, may_be_unused=STALE_BUFFERS),
    "unlimited_ocr": Recipe(_UNLIMITED_OCR, may_be_unused=(*STALE_BUFFERS, *_POSITION_IDS)),
    "UnlimitedOcrSamVisionEncoder": Recipe(_sam("^")),
    "UnlimitedOcrVisionEncoder": Recipe(_CLIP_IN_ONE, may_be_unused=_POSITION_IDS),
    "UnlimitedOcrTextModel": Recipe(stack_experts(), may_be_unused=STALE_BUFFERS),
    "paddleocr_vl": Recipe(_PADDLE, may_be_unused=("packing_position_embedding", "vision_model.head")),
    "qianfan_ocr": Recipe(_QIANFAN),
    "hunyuan_vl": Recipe(_HUNYUAN),
    "hy_v4_vl": Recipe(_HUNYUAN_4, may_be_unused=("mtp_layers",)),
}
