"""Object detectors of the DETR line: a backbone, an encoder and decoder with cross-attention, boxes and masks.

Ports called attention's last matrix `out_proj` and kept the MLP's two matrices in the layer itself; models now say
`o_proj` and `mlp.fc1`. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import PrefixChange
from loadplan.recipes.idioms import alike, cut_in_proj, inside, left_alone, qkv_names, rename

_BACKBONE = rename({"backbone.conv_encoder": "backbone"})
_ATTENTION = rename({"attn.out_proj": "attn.o_proj"})
_MLP = rename({r"layers\.(\d+)\.fc([12])\.": r"layers.\1.mlp.fc\2."})
_DETR = (*_BACKBONE, *_ATTENTION, *_MLP)
_COUNTERS = ("downsample.1.num_batches_tracked",)  # of batch norms, which are frozen in the models

# A mask head in the style of a feature pyramid; `lay` and `gn` were a convolution and its group norm.
_MASK_HEAD = rename(
    {
        r"bbox_attention\.([qk])_linear": r"bbox_attention.\1_proj",
        **{
            f"mask_head.{old}{number}": f"mask_head.{place}.{new}"
            for place, number in (
                ("conv1", 1),
                ("conv2", 2),
                ("fpn_stages.0.refine", 3),
                ("fpn_stages.1.refine", 4),
                ("fpn_stages.2.refine", 5),
            )
            for old, new in (("lay", "conv"), ("gn", "norm"))
        },
        **{f"mask_head.adapter{stage + 1}": f"mask_head.fpn_stages.{stage}.fpn_adapter" for stage in range(3)},
        "mask_head.out_lay": "mask_head.output_conv",
    }
)

# Content and position have matrices of their own, which stood in the layer: `sa_` self-, `ca_` cross-attention.
_CONDITIONAL_DETR = (
    *_DETR,
    *rename(
        {
            rf"decoder\.layers\.(\d+)\.{old}_{part}": rf"decoder.layers.\1.{new}.{name}"
            for old, new in (("sa", "self_attn"), ("ca", "encoder_attn"))
            for part, name in {
                "qcontent_proj": "q_content_proj",
                "qpos_proj": "q_pos_proj",
                "qpos_sine_proj": "q_pos_sine_proj",
                "kcontent_proj": "k_content_proj",
                "kpos_proj": "k_pos_proj",
                "v_proj": "v_proj",
            }.items()
        }
    ),
)

# The hybrid encoder's attention over one scale is a module of its own now.
_AIFI = rename({r"encoder\.encoder\.(\d+)\.layers": r"encoder.aifi.\1.layers"})
_RT_DETR = (*_ATTENTION, *_MLP, *_AIFI)
_D_FINE = (
    *_ATTENTION,
    *rename({rf"layers\.(\d+)\.fc{number + 1}\.": rf"layers.\1.mlp.layers.{number}." for number in range(2)}),
    *_AIFI,
)

# Two heads for reading order, with PaddleOCR's names.
_PP_DOCLAYOUT_V4 = (
    *rename(
        inside(
            "decoder_",
            "decoder.",
            {
                r"roor_order_head\.": "successor_order_head.proj.",
                r"roor_global_pointer\.": "successor_order_head.global_pointer.",
                r"order_head\.": "relative_order_head.proj.",
                r"global_pointer\.": "relative_order_head.global_pointer.",
            },
        )
    ),
    *rename({"s2r_fusion.a": "decoder.relative_order_head.s2r_fusion.closure_weight"}),
    *_RT_DETR,
)

# Roboflow's own layout: a joiner (`backbone.0`), a projector built of YOLO's blocks (`cv`, `bn`), torch's attention.
_RF_DETR = (
    *rename(
        {
            "backbone.0.encoder.encoder": "backbone.backbone",
            "backbone.0.projector": "backbone.projector",
            r"projector\.stages\.0\.0\.m\.": "projector.projector_layer.bottlenecks.",
            r"projector\.stages\.0\.0\.": "projector.projector_layer.",
            r"projector\.stages\.0\.1\.": "projector.layer_norm.",
            r"\.cv([12])\.conv\.": r".conv\1.conv.",
            r"\.cv([12])\.bn\.": r".conv\1.norm.",
            r"transformer\.(decoder|enc_output|enc_output_norm|enc_out_class_embed|enc_out_bbox_embed)\.": r"\1.",
            **inside(
                r"decoder\.layers\.(\d+)\.",
                r"decoder.layers.\1.",
                {
                    "norm1": "self_attn_layer_norm",
                    "norm2": "cross_attn_layer_norm",
                    "norm3": "layer_norm",
                    "linear1": "mlp.fc1",
                    "linear2": "mlp.fc2",
                },
            ),
            r"decoder\.norm\.": "decoder.layernorm.",
            r"refpoint_embed\.weight": "reference_point_embed.weight",
            **qkv_names("attention.attention", "attention"),
            "attention.output.dense": "attention.o_proj",
        }
    ),
    *_ATTENTION,
    *cut_in_proj("self_attn"),
)
_RF_DETR_SEGMENTATION = rename(
    {
        r"^(?!segmentation_head\.)": "model.",
        r"segmentation_head\.query_features_block\.layers\.0\.": "query_features_block.mlp.fc1.",
        r"segmentation_head\.query_features_block\.layers\.2\.": "query_features_block.mlp.fc2.",
        r"segmentation_head\.query_features_block\.norm_in\.": "query_features_block.norm.",
        r"segmentation_head\.(spatial_features_proj|query_features_proj)\.": r"\1.",
        "segmentation_head.bias": "segmentation_bias",
        **inside(
            r"segmentation_head\.blocks\.(\d+)\.",
            r"blocks.\1.",
            {r"norm\.": "layernorm.", r"dwconv\.": "depthwise_conv.", r"pwconv1\.": "pointwise_conv."},
        ),
    }
)

# Its ViT's attention output was a module with a `dense` in it, and is one matrix.
_LW_DETR = rename({**qkv_names("attention.attention", "attention"), "attention.output": "attention.o_proj"})

# One file holds SAM 3's detector and its tracker, which share a backbone; the tracker of images has no memory.
_SAM3_TRACKER = rename(
    {
        r"^tracker_model\.": "",
        r"^detector_model\.vision_encoder\.backbone\.": "vision_encoder.backbone.",
        r"^tracker_neck\.": "vision_encoder.neck.",
    }
)
_SAM3_MEMORY = (
    "memory_*",
    "mask_downsample",
    "object_pointer_proj",
    "temporal_positional_encoding_projection_layer",
    "no_memory_positional_encoding",
    "no_object_pointer",
    "occlusion_spatial_embedding_parameter",
)


def _sam3_tracker(config: Config) -> Recipe:
    detector = left_alone(config, ("TrackerModel", "TrackerVideoModel"), ("detector_model",))
    return Recipe(_SAM3_TRACKER, may_be_unused=(*detector, *left_alone(config, ("TrackerModel",), _SAM3_MEMORY)))


DETECTORS: Mapping[str, RecipeSource] = {
    **alike(Recipe(_DETR, may_be_unused=_COUNTERS), "DetrModel MaskFormerDetrDecoder deformable_detr"),
    "ConditionalDetrModel": Recipe(_CONDITIONAL_DETR, may_be_unused=_COUNTERS),
    **alike(Recipe(_MASK_HEAD), "DetrForSegmentation ConditionalDetrForSegmentation"),
    "maskformer": Recipe(_MLP, may_be_unused=_COUNTERS),
    **alike(Recipe(_RT_DETR), "rt_detr rt_detr_v2 pp_doclayout_v2 pp_doclayout_v3"),
    "pp_doclayout_v4": Recipe(_PP_DOCLAYOUT_V4),
    "d_fine": Recipe(_D_FINE),
    "RfDetrModel": Recipe(_RF_DETR),
    "RfDetrForObjectDetection": Recipe((PrefixChange(prefix_to_add="model"),)),
    "RfDetrForInstanceSegmentation": Recipe(_RF_DETR_SEGMENTATION),
    "lw_detr": Recipe(_LW_DETR),
    "sam3_tracker": _sam3_tracker,
    "sam3_tracker_video": _sam3_tracker,
}
