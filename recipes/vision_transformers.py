"""Vision transformers: ViT and what descends from it, hierarchical ones, and those published in timm's layout.

Most ports of the first years copy BERT's modules (`encoder.layer.N.attention.attention.query`); since 5.0 the models
have flat layers with `q_proj` ... `o_proj` and `mlp.fc1`, `mlp.fc2`. timm's layout keeps query, key and value in one
`attn.qkv`. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import PrefixChange
from loadplan.recipes.idioms import alike, cut, cut_qkv, inside, qkv_names, rename

_STALE_INDEX = ("relative_position_index",)  # a buffer that models compute

_ATTENTION = rename({**qkv_names("attention.attention", "attention"), "attention.output.dense": "attention.o_proj"})
_MLP = rename({"intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"})
_FLAT_LAYERS = rename({r"encoder\.layer\.": "layers."})
_VIT = (*_FLAT_LAYERS, *_ATTENTION, *_MLP)

# BERT's modules as they were, but for the names of attention; MLPs of Dinov2-giant are gated, gate first.
_DINOV2 = (
    *_ATTENTION,
    cut("mlp.weights_in", "mlp.gate_proj", "mlp.up_proj"),
    *rename({"mlp.weights_out": "mlp.down_proj"}),
)

# Without a pooler and a class token the backbone wraps the model; its pyramid was two bare `Sequential`s.
_BEIT_PYRAMID = rename(
    inside(
        "^",
        "fpn.",
        {
            r"fpn1\.0\.": "fpn1.conv_transpose1.",
            r"fpn1\.1\.": "fpn1.normalization.",
            r"fpn1\.3\.": "fpn1.conv_transpose2.",
            r"fpn2\.0\.": "fpn2.",
        },
    )
)
_BEIT_TABLE = "relative_position_bias_table"  # one a layer, or one for all
_BEIT = (
    *_VIT,
    *rename(
        {
            "encoder.relative_position_bias": "shared_position_bias",
            f"attention.attention.relative_position_bias.{_BEIT_TABLE}": f"relative_position_bias.{_BEIT_TABLE}",
        }
    ),
)
_BEIT_BACKBONE = (
    *_BEIT_PYRAMID,
    *rename({r"^encoder\.layer\.": "beit.encoder.layer.", r"^embeddings\.": "beit.embeddings."}),
    *_ATTENTION,
    *_MLP,
)
# UperNet's head, named after mmsegmentation; pooled maps (`psp_modules`) were `Sequential`s of pooling and convolution.
_BEIT_SEGMENTATION = (
    *rename(
        {
            r"psp_modules\.(\d+)\.1\.conv\.weight": r"psp_modules.blocks.\1.conv.convolution.weight",
            r"psp_modules\.(\d+)\.1\.bn\.": r"psp_modules.blocks.\1.conv.normalization.",
            r"\.bn\.": ".normalization.",
            r"\.conv\.weight": ".convolution.weight",
            r"decode_head\.bottleneck\.": "decode_head.psp_bottleneck.",
        }
    ),
    *_BEIT_PYRAMID,
)

# One list of patch embeddings, of blocks and of norms over all stages; now one module a stage.
_SEGFORMER = rename(
    {
        r"encoder\.patch_embeddings\.(\d+)\.": r"stages.\1.patch_embeddings.",
        r"encoder\.block\.(\d+)\.": r"stages.\1.blocks.",
        r"encoder\.layer_norm\.(\d+)": r"stages.\1.layer_norm",
        **qkv_names("attention.self", "attention"),
        "attention.self.sr": "attention.sequence_reduction.sequence_reduction",
        "attention.self.layer_norm": "attention.sequence_reduction.layer_norm",
        "attention.output.dense": "attention.o_proj",
        r"mlp\.dense([12])\.": r"mlp.fc\1.",
        "layer_norm_1": "layernorm_before",
        "layer_norm_2": "layernorm_after",
    }
)

_SWIN = (
    *rename(
        {
            **qkv_names("attention.self", "attention"),
            f"attention.self.{_BEIT_TABLE}": f"attention.relative_position_bias.{_BEIT_TABLE}",
            "attention.output.dense": "attention.o_proj",
        }
    ),
    *_MLP,
)

# A pixel encoder in front of its decoder, which the model without one calls by its own name.
_PIXIO = (*_VIT, *rename({"norm1": "layernorm_before", "norm2": "layernorm_after", r"^encoder\.": "pixio."}))

# NVIDIA's wrapper around a timm model: everything below `radio_model`, query, key and value in one.
_RADIO = (
    *rename(
        {
            **inside(
                "radio_model.model.patch_generator.",
                "embeddings.",
                {
                    "video_embedder": "video_patch_projection",
                    "embedder": "patch_projection",
                    "pos_embed": "position_embedding",
                    "cls_token.token": "cls_register_token",
                },
            ),
            "radio_model.model.blocks": "encoder.layer",
            "attn.proj": "attention.o_proj",
            r"radio_model\.(input_conditioner|summary_idxs)\b": r"\1",
        }
    ),
    cut_qkv("attn.qkv", "attention"),
)

VISION_TRANSFORMERS: Mapping[str, RecipeSource] = {
    **alike(Recipe(_VIT), "ViTModel ASTModel DeiTModel IJepaModel ViTMAEModel ViTMSNModel VivitModel"),
    "ViTMAEForPreTraining": Recipe((*_ATTENTION, *_MLP)),
    "ViTMSNForImageClassification": Recipe(rename({r"^encoder\.": "vit.encoder."})),
    **alike(Recipe(_DINOV2), "Dinov2Model Dinov2Backbone Dinov2WithRegistersModel Dinov2WithRegistersBackbone"),
    "dinov3_vit": Recipe(rename({r"(?<!model\.)layer\.": "model.layer."})),
    "dinov3_convnext": Recipe(rename({r"(?<!model\.)stages\.": "model.stages."})),
    "BeitModel": Recipe(_BEIT, may_be_unused=_STALE_INDEX),
    "BeitBackbone": Recipe(_BEIT_BACKBONE, may_be_unused=_STALE_INDEX),
    "BeitForSemanticSegmentation": Recipe(_BEIT_SEGMENTATION, may_be_unused=_STALE_INDEX),
    "SegformerModel": Recipe(_SEGFORMER),
    "SegformerForSemanticSegmentation": Recipe(rename({"decode_head.linear_c": "decode_head.linear_projections"})),
    "swin": Recipe(_SWIN, may_be_unused=_STALE_INDEX),
    "SwinBackbone": Recipe(rename({r"^(encoder|embeddings)\.": r"swin.\1."}), may_be_unused=_STALE_INDEX),
    "videomae": Recipe(  # query and value had bare biases, key none
        rename(inside("attention.attention.", "attention.attention.", {"q_bias": "query.bias", "v_bias": "value.bias"}))
    ),
    "yolos": Recipe(rename({"encoder.mid_position_embeddings": "encoder.interpolation.mid_position_embeddings"})),
    "pixio": Recipe(_PIXIO),
    "radio": Recipe(_RADIO),
    "timm_wrapper": Recipe((PrefixChange(prefix_to_add="timm_model"),)),  # timm's own files
}
