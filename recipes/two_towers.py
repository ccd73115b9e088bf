"""Models with a text and a vision tower that are trained against each other: CLIP, SigLIP and their kin, TIPS.

A tower loaded alone is stored with the whole model's prefix (`vision_model.`, `text_model.`). TIPSv2 keeps the layouts
of its parents: the text tower CLIP's, the vision tower timm's, and heads for dense prediction (DPT) over it.
Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import PrefixChange
from loadplan.recipes.idioms import Rules, alike, cut, cut_in_proj, cut_qkv, inside, rename

_POSITION_IDS = ("embeddings.position_ids",)  # 0, 1, 2, ...: old transformers saved it; models compute it

_TIPS_TEXT = (
    PrefixChange(prefix_to_remove="text_encoder"),
    *rename(
        {
            r"ln_final\.": "final_layer_norm.",
            r"(?<!embeddings\.)token_embedding\.": "embeddings.token_embedding.",
            r"transformer\.resblocks\.": "encoder.layers.",
            r"\.ln_([12])\.": r".layer_norm\1.",
            r"\.attn\.": ".self_attn.",
            r"\.mlp\.c_fc\.": ".mlp.fc1.",
            r"\.mlp\.c_proj\.": ".mlp.fc2.",
        }
    ),
    *cut_in_proj("self_attn"),
)
_TIPS_VISION = (
    PrefixChange(prefix_to_remove="vision_encoder"),
    *rename(
        {
            r"^patch_embed\.proj\.": "embeddings.patch_embeddings.projection.",
            r"^(cls_token|mask_token|register_tokens)\b": r"embeddings.\1",
            "^pos_embed": "embeddings.position_embeddings",
            r"^norm\.": "layernorm.",
            r"^blocks\.": "encoder.layer.",
            r"\.attn\.proj\.": ".attention.o_proj.",
            r"\.ls([12])\.gamma": r".layer_scale\1.lambda1",
            r"\.mlp\.c_fc\.": ".mlp.fc1.",
            r"\.mlp\.c_proj\.": ".mlp.fc2.",
            r"\.mlp\.w3\.": ".mlp.down_proj.",
        }
    ),
    cut("mlp.w12", "mlp.gate_proj", "mlp.up_proj"),
    cut_qkv("attn.qkv", "attention"),
)


def _dpt(head: str, neck: str, decoder: str) -> Rules:
    """One head of three: reassembled and fused maps go to the neck, the last layers to the decoder."""
    fusion = rf"{neck}.fusion_stage.layers.\1."
    return rename(
        {
            rf"{head}\.{head}\.": f"{decoder}.head.",
            rf"{head}\.project\.": f"{decoder}.project.",
            rf"{head}\.convs\.": f"{neck}.convs.",
            **inside(
                rf"{head}\.reassemble\.",
                f"{neck}.reassemble_stage.",
                {
                    r"readout_projects\.(\d+)\.": r"readout_projects.\1.layers.0.",
                    r"out_projections\.(\d+)\.": r"layers.\1.projection.",
                    r"resize_layers\.(\d+)\.": r"layers.\1.resize.",
                },
            ),
            **inside(
                rf"{head}\.fusion_blocks\.(\d+)\.",
                fusion,
                {
                    r"out_conv\.": "projection.",
                    r"residual_unit\.conv([12])\.": r"residual_layer1.convolution\2.",
                    r"main_unit\.conv([12])\.": r"residual_layer2.convolution\2.",
                },
            ),
        }
    )


_TASKS = ("depth", "normals", "segmentation")
_DPT_TOWER = rename({r"vision_encoder\.": "backbone."})
_DPT = (*_DPT_TOWER, *(rule for task in _TASKS for rule in _dpt(f"{task}_head", f"{task}_neck", f"{task}_decoder")))


def _one_task(task: str) -> Recipe:
    """The model with one head, from files that hold all three."""
    others = tuple(f"{other}_head" for other in _TASKS if other != task)
    return Recipe((*_DPT_TOWER, *_dpt(f"{task}_head", "neck", "decoder")), may_be_unused=others)


TWO_TOWERS: Mapping[str, RecipeSource] = {
    **alike(
        Recipe((PrefixChange(prefix_to_remove="vision_model"),), may_be_unused=_POSITION_IDS),
        "CLIPVisionModel AltCLIPVisionModel ChineseCLIPVisionModel CLIPSegVisionModel MetaClip2VisionModel "
        "SiglipVisionModel Siglip2VisionModel",
    ),
    **alike(
        Recipe((PrefixChange(prefix_to_remove="text_model"),), may_be_unused=_POSITION_IDS),
        "CLIPTextModel CLIPSegTextModel MetaClip2TextModel SiglipTextModel Siglip2TextModel",
    ),
    **alike(Recipe(may_be_unused=_POSITION_IDS), "clip chinese_clip"),
    "altclip": Recipe(rename({r"encoder\.layer\.": "encoder.layers."}), may_be_unused=_POSITION_IDS),
    "tipsv2": Recipe(rename({r"(text|vision)_encoder\.": r"\1_model."})),
    "Tipsv2TextModel": Recipe(_TIPS_TEXT),
    **alike(Recipe(_TIPS_VISION), "Tipsv2VisionModel Tipsv2VisionBackbone"),
    "tipsv2_dpt": Recipe(_DPT),
    "Tipsv2DptForDepthEstimation": _one_task("depth"),
    "Tipsv2DptForNormalEstimation": _one_task("normals"),
    "Tipsv2DptForSemanticSegmentation": _one_task("segmentation"),
}
