"""Decoders with experts: stored one by one, run as stacks.

Each expert's gate and up matrices become one, and the experts of a layer become one tensor:
`gate_up_proj[expert, 2 * intermediate, hidden]` and `down_proj[expert, hidden, intermediate]`.
DeepSeek's line is in `deepseek.py`. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import WeightRenaming
from loadplan.compiler.shard import Shard
from loadplan.recipes.idioms import STALE_BUFFERS, Rules, alike, inside, rename, stack, stack_experts
from loadplan.recipes.llama import attention_plan, mlp_plan, model_plan

_EXPERTS: dict[str, str | Shard] = {"mlp.experts.gate_up_proj": "packed_colwise", "mlp.experts.down_proj": "rowwise"}
_MIXTRAL: Rules = (WeightRenaming(".block_sparse_moe.", ".mlp."), *stack_experts("w1", "w3", "w2"))
_QWEN: Rules = stack_experts()


def mixtral(config: Config) -> Recipe:
    """Every layer has experts, stored under `block_sparse_moe` as w1 (gate), w2 (down) and w3 (up)."""
    attention = {f"self_attn.{name}": style for name, style in attention_plan(config).items()}
    return Recipe(
        rules=_MIXTRAL,
        tp_plan=model_plan(config, attention | _EXPERTS),
        may_be_unused=STALE_BUFFERS,
    )


def qwen_moe(config: Config) -> Recipe:
    """Layers have experts or one dense MLP, as the config says; Qwen2's have a shared expert beside them."""
    attention = {f"self_attn.{name}": style for name, style in attention_plan(config).items()}
    sparse, dense = _layer_kinds(config)
    mlp: dict[str, str | Shard] = {}
    if sparse:
        mlp |= _EXPERTS
        if config.find("model_type") == "qwen2_moe":
            mlp |= {f"mlp.shared_expert.{name}": style for name, style in mlp_plan().items()}
    if dense:
        mlp |= {f"mlp.{name}": style for name, style in mlp_plan().items()}
    return Recipe(
        rules=_QWEN,
        tp_plan=model_plan(config, attention | mlp),
        may_be_unused=STALE_BUFFERS,
    )


def _layer_kinds(config: Config) -> tuple[bool, bool]:
    """Whether some layer has experts, and whether some has none (transformers: Qwen3MoeDecoderLayer)."""
    count = config.find_int("num_hidden_layers") or 1
    step = config.find_int("decoder_sparse_step") or 1
    named = config.find("mlp_only_layers")
    dense_only = set(named) if isinstance(named, list) else set()
    has_experts = config.find_int("num_experts") != 0
    sparse = [layer for layer in range(count) if has_experts and layer not in dense_only and (layer + 1) % step == 0]
    return bool(sparse), len(sparse) < count


def _like_qwen(names: Mapping[str, str], *unused: str) -> Recipe:
    """Experts named as Qwen's; the router, its bias and other modules are called otherwise."""
    return Recipe((*rename(names), *_QWEN), may_be_unused=(*STALE_BUFFERS, *unused))


_PHI_ROUTER = rename({".block_sparse_moe.gate.weight": ".block_sparse_moe.router.weight"})

# Stored as stacks, as modules of one weight.
_GRANITE = rename(
    inside(
        r"block_sparse_moe\.",
        "block_sparse_moe.",
        {
            r"input_linear\.weight": "experts.gate_up_proj",
            r"output_linear\.weight": "experts.down_proj",
            r"router\.layer\.weight": "router.weight",
        },
    )
)
_ARIA = rename(inside("mlp.experts.", "mlp.experts.", {"fc1.weight": "gate_up_proj", "fc2.weight": "down_proj"}))

# Experts without a gate, in layers of which each is one mixer (Mamba, attention or MLP).
_NEMOTRON_H = (
    *rename({r"^backbone\.": "model."}),
    *(stack(f"mixer.experts.*.{name}.weight", f"mixer.experts.{name}") for name in ("up_proj", "down_proj")),
)

_SHARED = {"mlp.shared_expert.": "mlp.shared_experts."}

MOE: Mapping[str, RecipeSource] = {
    "mixtral": mixtral,
    **alike(Recipe(_MIXTRAL, may_be_unused=STALE_BUFFERS), "minimax minimax_m2"),
    "phimoe": Recipe((*_PHI_ROUTER, *_MIXTRAL), may_be_unused=STALE_BUFFERS),
    "qwen2_moe": qwen_moe,
    "qwen3_moe": qwen_moe,
    **alike(_like_qwen({}), "olmoe flex_olmo hunyuan_v1_moe cohere2_moe afmoe beam"),
    "mellum": _like_qwen({}, "mtp"),
    "exaone_moe": _like_qwen({"mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias"}, "mtp"),
    "ernie4_5_moe": _like_qwen(
        {"mlp.moe_statics.e_score_correction_bias": "mlp.gate.moe_statics.e_score_correction_bias"}, "mtp"
    ),
    "mimo_v2_flash": _like_qwen({"self_attn.attention_sink_bias": "self_attn.sinks"}, "model.mtp"),
    "flint": _like_qwen({"self_attn.softmax_offset": "self_attn.sinks"}),
    "kolibri1": _like_qwen(
        {
            "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
            "post_attn_norm": "post_self_attn_layernorm",
            "post_ffn_norm": "post_mlp_layernorm",
        }
    ),
    "laguna": _like_qwen({"mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias", **_SHARED}),
    "hy_v3": _like_qwen(
        {
            "mlp.router.gate.weight": "mlp.gate.weight",
            "mlp.expert_bias": "mlp.e_score_correction_bias",
            "mlp.shared_mlp.": "mlp.shared_experts.",
        },
        "layers.80",
    ),
    "jamba": Recipe(stack_experts(at="feed_forward.experts")),
    "lfm2_moe": Recipe(stack_experts("w1", "w3", "w2", at="feed_forward.experts")),
    "nemotron_h": Recipe(_NEMOTRON_H, may_be_unused=("mtp",)),
    **alike(Recipe(_GRANITE, may_be_unused=STALE_BUFFERS), "granitemoe granitemoeshared granitemoehybrid"),
    "aria_text": Recipe(_ARIA),
}
