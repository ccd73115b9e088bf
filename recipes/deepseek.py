"""DeepSeek's line of decoders, and those that follow it: routed and shared experts, latent attention, draft layers.

V2 and V3 and their like store experts as Qwen does. V4 and Hunyuan 4 add hyper-connections (`hc_`: mixtures of several
residual streams); Kimi Linear, Ling and GLM 5 Next have layers of linear attention (Kimi Delta) beside the latent ones.
Drafts of further tokens follow the last layer, or stand in `mtp`; models do not have them.
Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.ops import Split
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import WeightConverter
from loadplan.recipes.idioms import (
    QKV,
    STALE_BUFFERS,
    Rules,
    alike,
    draft_layers,
    inside,
    join_convolutions,
    rename,
    stack_experts,
)

_EXPERTS = stack_experts()
_MTP = ("mtp", "mtp_layers")


def _with_drafts(rules: Rules, *unused: str) -> Callable[[Config], Recipe]:
    """A recipe that leaves the draft layers, of which the config gives the number."""

    def recipe(config: Config) -> Recipe:
        return Recipe(rules, may_be_unused=(*STALE_BUFFERS, *unused, *draft_layers(config)))

    return recipe


def _hyper_connections(old: str, new: str) -> dict[str, str]:
    return {f"{old}{part}": f"{new}{part}" for part in ("fn", "base", "scale")}


# DeepSeek's own inference code has short names without `model.`; scores of compressed keys have an indexer.
_V4 = (
    *rename(
        {
            r"\.attn\.": ".self_attn.",
            r"\.ffn\.": ".mlp.",
            r"\.indexer\.compressor\.": ".compressor.indexer.",
            r"^embed\.weight": "embed_tokens.weight",
            r"^head\.weight": "lm_head.weight",
            **_hyper_connections("^hc_head_", "hc_head.hc_"),
            r"\.attn_norm\.": ".input_layernorm.",
            r"\.ffn_norm\.": ".post_attention_layernorm.",
            **_hyper_connections(r"\.hc_attn_", ".attn_hc."),
            **_hyper_connections(r"\.hc_ffn_", ".ffn_hc."),
            r"\.attn_sink": ".sinks",
            r"\.indexer\.weights_proj\.": ".compressor.indexer.scorer.weights_proj.",
            r"\.indexer\.wq_b\.": ".compressor.indexer.q_b_proj.",
            r"\.norm\.": ".kv_norm.",
            r"\.ape": ".position_bias",
            r"\.self_attn\.wq_b\.": ".self_attn.q_b_proj.",
            r"\.wq_a\.": ".q_a_proj.",
            r"\.wkv\.": ".kv_proj.",
            r"\.wgate\.": ".gate_proj.",
            r"\.wo_([ab])\.": r".o_\1_proj.",
            r"\.q_norm\.": ".q_a_norm.",
            r"\.gate\.bias": ".gate.e_score_correction_bias",
            **inside(
                r"\.shared_experts\.",
                ".shared_experts.",
                {r"w1\.": "gate_proj.", r"w2\.": "down_proj.", r"w3\.": "up_proj."},
            ),
        }
    ),
    *stack_experts("w1", "w3", "w2"),
)

_HY_V4 = rename(
    {
        r"\.hc_pre\.hc_": ".hc_",
        r"\.learnable_sink_param": ".sinks",
        r"\.linear_gate": ".gate_proj",
        **_hyper_connections(r"\.hc_attn_layer\.hc_", ".attn_hc."),
        **_hyper_connections(r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
        **_hyper_connections(r"\.hc_head_", ".hc_"),
    }
)

# Kimi Delta attention: the decay's parameters are a module, `forget_gate`.
_DECAY = {r"self_attn\.(dt_bias|A_log)\b": r"self_attn.forget_gate.\1"}
_KIMI_DECAY = rename({r"self_attn\.(f_a_proj|f_b_proj)\.": r"self_attn.forget_gate.\1.", **_DECAY})
_KIMI_LINEAR = (
    *_KIMI_DECAY,
    join_convolutions("self_attn"),
    *rename({r"\.block_sparse_moe\.": ".mlp."}),
    *stack_experts("w1", "w3", "w2"),
)
_GLM5_NEXT = (
    *_KIMI_DECAY,
    *rename({**_hyper_connections("hc_attn_", "attn_hc."), **_hyper_connections("hc_ffn_", "ffn_hc.")}),
    *_EXPERTS,
    join_convolutions("self_attn"),
)

# Ling's names: Megatron's embedding and `attention`, an expert's bias.
_LING_NAMES = {
    r"^model\.word_embeddings\.": "model.embed_tokens.",
    r"\.attention\.": ".self_attn.",
    r"\.self_attn\.dense\.": ".self_attn.o_proj.",
    r"\.mlp\.gate\.expert_bias": ".mlp.gate.e_score_correction_bias",
}
_LING = (
    *rename({**_LING_NAMES, r"self_attn\.f_proj\.": "self_attn.forget_gate.f_proj.", **_DECAY}),
    *_EXPERTS,
    join_convolutions("self_attn"),
)
_SARVAM = (
    *rename({**_LING_NAMES, r"\.query_layernorm\.": ".q_norm.", r"\.key_layernorm\.": ".k_norm."}),
    *_EXPERTS,
    WeightConverter("self_attn.query_key_value", [f"self_attn.{part}" for part in QKV], [Split(0)]),
)

_AXK1 = (*rename({r"(?<!mlp\.)post_mlp_layernorm": "mlp.post_mlp_layernorm"}), *_EXPERTS)
_AXK2 = (
    *rename({"W_down": "mlp.fc1", "W_up": "mlp.fc2", r"self_attn\.q_b_proj\.": "self_attn.q_gate_proj."}),
    *_EXPERTS,
)

DEEPSEEK: Mapping[str, RecipeSource] = {
    **alike(
        _with_drafts(_EXPERTS),
        "deepseek_v2 deepseek_v3 deepseek_v32 dots1 glm4_moe glm4_moe_lite glm_moe_dsa glm4v_moe solar_open sarvam_mla",
    ),
    "longcat_flash": Recipe(_EXPERTS, may_be_unused=_MTP),
    "axk1": _with_drafts(_AXK1, "mlp.post_mlp_layernorm"),
    "axk2": _with_drafts(_AXK2),
    "deepseek_v4": Recipe(_V4, may_be_unused=_MTP),
    **alike(Recipe(_HY_V4, may_be_unused=_MTP), "hy_v4 hy_v4_vl_text"),
    "kimi_linear": Recipe(_KIMI_LINEAR),
    **alike(_with_drafts(_GLM5_NEXT, "shared_head", "layers.45"), "glm5_next glm5_next_text"),
    "bailing_hybrid": _with_drafts(_LING),
    "sarvam_moe": Recipe(_SARVAM),
}
