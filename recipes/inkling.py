"""Inkling: text, images and sound in one decoder with short convolutions, in the layout of the authors' trainer.

Gate and up lie row by row side by side (`w13`: g0 u0 g1 u1 ...) and are taken apart; the head has rows for padding.
Inkling 2 keeps queries over the outputs of earlier layers (`attn_res`); its loop variant passes messages between runs
through the same layers, and is also published with quantised experts, which are refused here. Facts: the rules that
transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ops import Chunk, Interleave, MergeMessageQueries, PlainFloats, UnpadVocab
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import IndexShift, WeightConverter
from loadplan.recipes.idioms import Rules, alike, inside, rename

_EXPERTS = "mlp.experts"
_NORMS = {r"\.mlp_norm\.": ".post_attention_layernorm.", r"\.attn_norm\.": ".input_layernorm."}
_ROUTER = {"mlp.gate.bias": "mlp.gate.e_score_correction_bias"}
_GATE_UP = WeightConverter(f"{_EXPERTS}.w13_weight", f"{_EXPERTS}.gate_up_proj", [Interleave(1)])

_INKLING = (
    *rename(
        {
            **inside(
                r"^model\.llm\.",
                "model.language_model.",
                {
                    r"embed_norm\.": "embed_tokens.embed_norm.",
                    r"embed\.": "embed_tokens.",
                    r"(layers|norm)\.": r"\1.",
                },
            ),
            r"^model\.llm\.unembed\.": "lm_head.",
            r"^model\.audio\.": "model.audio_tower.",
            r"^model\.visual\.": "model.vision_tower.",
            r"vision_tower\.layers\.linear_(\d+)\.": r"vision_tower.encoder_layers.\1.projection.",
            r"vision_tower\.layers\.norm_(\d+)\.": r"vision_tower.encoder_layers.\1.layer_norm.",
            r"audio_tower\.encoder\.weight": "audio_tower.embed_audio_tokens.embed_audio_tokens.weight",
            r"audio_tower\.final_norm\.": "audio_tower.norm.",
            r"\.attn\.": ".self_attn.",
            r"self_attn\.wo_ud\.": "self_attn.o_proj.",
            r"self_attn\.w([qkvr])_d[uv]\.": r"self_attn.\1_proj.",
            r"self_attn\.([kv])_sconv\.weight": r"self_attn.\1_sconv.conv1d.weight",
            r"\.(attn|mlp)_sconv\.weight": r".\1_sconv.conv1d.weight",
            **_NORMS,
            **_ROUTER,
            f"{_EXPERTS}.w2_weight": f"{_EXPERTS}.down_proj",
            "shared_experts.shared_w2_weight": "shared_experts.down_proj",
            "mlp.w2_md.": "mlp.down_proj.",
        }
    ),
    _GATE_UP,
    WeightConverter(
        "shared_experts.shared_w13_weight",
        ["shared_experts.gate_proj", "shared_experts.up_proj"],
        [Interleave(1), Chunk(1)],
    ),
    WeightConverter("mlp.w13_dn", ["mlp.gate_proj", "mlp.up_proj"], [Interleave(0), Chunk(0)]),
)

_HEAD: Rules = (
    *rename({r"^model\.llm\.unembed\.": "lm_head."}),
    WeightConverter("lm_head.weight", "lm_head.weight", [UnpadVocab()]),
)
_TOWER = (
    *_HEAD,
    *rename(
        {
            r"^model\.llm\.": "model.language_model.",
            r"^model\.visual\.": "model.vision_tower.",
            **inside(
                r"vision_tower\.",
                "vision_tower.",
                {
                    r"backbone\.ln_pre\.": "pre_layernorm.",
                    r"backbone\.": "",
                    r"proj_in\.": "merger.linear_1.",
                    r"proj_out\.": "merger.linear_2.",
                    r"embeddings\.position_embedding(?!\.)": "embeddings.position_embedding.weight",
                },
            ),
            **inside(
                r"(vision_tower\.layers\.\d+)\.",
                r"\1.",
                {
                    r"ln_1\.": "layernorm_before.",
                    r"ln_2\.": "layernorm_after.",
                    r"mlp\.c_fc\.": "mlp.fc1.",
                    r"mlp\.c_proj\.": "mlp.fc2.",
                    r"ls_([12])\.gamma": r"lambda_\2",
                },
            ),
        }
    ),
)

# Queries of layer 0's attention serve layer 1: it has none before it to look at.
_QUERIES: Rules = (
    IndexShift(r"attn_res\.attn_queries\.(\d+)", r"layers.\1.attention_input.query", 1),
    *rename(
        {
            r"attn_res\.mlp_queries\.(\d+)": r"layers.\1.mlp_input.query",
            r"attn_res\.output_query": "final_input.query",
        }
    ),
)
_BIAS = "self_attn.relative_position_bias"
_LAYERS = (
    *_HEAD,
    *rename(
        {
            r"^model\.llm\.": "model.",
            r"(?<!\w)embed\.weight": "embed_tokens.weight",
            r"(?<!embed_tokens\.)embed_norm\.": "embed_tokens.embed_norm.",
            **_ROUTER,
            r"\.attn\.": ".self_attn.",
            r"self_attn\.wo_ud\.": "self_attn.o_proj.linear.",
            r"self_attn\.w([qkv])_d[uv]\.": r"self_attn.\1_proj.linear.",
            r"self_attn\.wr_du\.": f"{_BIAS}.linear.",
            r"self_attn\.([kv])_sconv\.": r"self_attn.\1_proj.sconv.",
            r"self_attn\.rel_logits_proj\.": f"{_BIAS}.",
            r"self_attn\.rel_l2_clip\.": f"{_BIAS}.norm.",
            r"self_attn\.q_l2_clip\.": "self_attn.q_proj.norm.",
            r"self_attn\.gate_attn\.": "self_attn.o_proj.gate_proj.",
            r"self_attn\.attn_sink_proj\.": "self_attn.sink_proj.",
            r"\.attn_sconv\.": ".post_attention_convolution.",
            r"\.mlp_sconv\.": ".post_mlp_convolution.",
            r"(convolution|sconv)\.weight": r"\1.conv1d.weight",
            r"(convolution|sconv)\.static_w": r"\1.static_weight",
            r"(convolution|sconv)\.weight_proj": r"\1.weight_proj.weight",
            **_NORMS,
            r"\.([qkv])_input_norm\.": r".\1_input_layernorm.",
        }
    ),
    *_QUERIES,
)
_TEXT = (
    *_LAYERS,
    *rename(
        inside(f"{_EXPERTS}.", f"{_EXPERTS}.", {"w2_weight": "down_proj", "w2_weight_scale": "down_proj_scale_inv"})
    ),
    _GATE_UP,
    WeightConverter(f"{_EXPERTS}.w13_weight_scale", f"{_EXPERTS}.gate_up_proj_scale_inv", [Interleave(1)]),
)
_LOOP_TEXT = (
    *rename(
        {
            r"controllers\.attn\.": "q_message_gate.",
            r"controllers\.(k|v|mlp)\.": r"\1_message_gate.",
            r"_message_gate\.down_weight": "_message_gate.down_proj.weight",
            r"_message_gate\.gain_weight": "_message_gate.message_gate_proj.weight",
            r"_message_gate\.forget_weight": "_message_gate.forget_gate_proj.weight",
        }
    ),
    *_LAYERS,
    WeightConverter(
        ["middle_cycle_cross_pass_queries", "middle_cycle_cross_pass_kv_queries"],
        "message_input.query",
        [MergeMessageQueries()],
    ),
    WeightConverter(f"{_EXPERTS}.w13_weight", f"{_EXPERTS}.gate_up_proj", [PlainFloats(), Interleave(1)]),
    WeightConverter(f"{_EXPERTS}.w2_weight", f"{_EXPERTS}.down_proj", [PlainFloats()]),
)
_DRAFTS = ("model.mtp",)

INKLING: Mapping[str, RecipeSource] = {
    "inkling_mm_model": Recipe(_INKLING, may_be_unused=_DRAFTS),
    **alike(Recipe(_TOWER, may_be_unused=_DRAFTS), "inkling2 inkling2_loop"),
    "inkling2_text": Recipe(_TEXT, may_be_unused=_DRAFTS),
    "inkling2_loop_text": Recipe(_LOOP_TEXT, may_be_unused=_DRAFTS),
}
