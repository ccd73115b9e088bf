"""Decoders with experts: stored one by one, run as stacks.

Each expert's gate and up matrices become one, and the experts of a layer become one tensor:
`gate_up_proj[expert, 2 * intermediate, hidden]` and `down_proj[expert, hidden, intermediate]`.
Facts: the rules that transformers 5.24 has registered for `mixtral` and `qwen2_moe` (alias `qwen3_moe`).
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.ops import Concatenate, MergeModulelist
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import WeightConverter, WeightRenaming
from loadplan.compiler.shard import Shard
from loadplan.recipes.llama import STALE_BUFFERS, attention_plan, mlp_plan, model_plan

_EXPERTS: dict[str, str | Shard] = {"mlp.experts.gate_up_proj": "packed_colwise", "mlp.experts.down_proj": "rowwise"}


def stack_experts(gate: str, up: str, down: str) -> tuple[WeightConverter, WeightConverter]:
    """The converters of a layer's experts, whose three matrices are called so."""
    return (
        WeightConverter(
            [f"mlp.experts.*.{gate}.weight", f"mlp.experts.*.{up}.weight"],
            "mlp.experts.gate_up_proj",
            [MergeModulelist(0), Concatenate(1)],
        ),
        WeightConverter(f"mlp.experts.*.{down}.weight", "mlp.experts.down_proj", [MergeModulelist(0)]),
    )


def mixtral(config: Config) -> Recipe:
    """Every layer has experts, stored under `block_sparse_moe` as w1 (gate), w2 (down) and w3 (up)."""
    attention = {f"self_attn.{name}": style for name, style in attention_plan(config).items()}
    return Recipe(
        rules=(WeightRenaming(".block_sparse_moe.", ".mlp."), *stack_experts("w1", "w3", "w2")),
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
        rules=stack_experts("gate_proj", "up_proj", "down_proj"),
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


MOE: Mapping[str, RecipeSource] = {"mixtral": mixtral, "qwen2_moe": qwen_moe, "qwen3_moe": qwen_moe}
