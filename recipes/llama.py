"""Dense decoders laid out as Llama is: attention with grouped heads, a gated MLP, one norm before each.

Checkpoint and model share their names, so there is nothing to rename; the parallel plan is what the recipe is for.
Facts: transformers' classes of these types and their `base_model_tp_plan`.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.shard import Shard, heads
from loadplan.recipes.idioms import STALE_BUFFERS

_BARE = "Model"  # classes so called have no head, and no `model.` in front of their names
_TRANSFORMER = tuple(  # these call their base model `transformer` (transformers 5.24, `base_model_prefix`)
    f"{name}ForQuestionAnswering" for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
)


def head_dim(config: Config) -> int:
    """Rows of one attention head; 1 when the config does not say, so that cuts may fall anywhere."""
    declared = config.find_int("head_dim")
    hidden, count = config.find_int("hidden_size"), config.find_int("num_attention_heads")
    return declared or (hidden // count if hidden and count else 1)


def attention_plan(config: Config) -> dict[str, str | Shard]:
    """Query, key and value by whole heads; the output projection by columns."""
    by_head = heads(head_dim(config))
    return {"q_proj": by_head, "k_proj": by_head, "v_proj": by_head, "o_proj": "rowwise"}


def mlp_plan() -> dict[str, str | Shard]:
    """A gated MLP: gate and up by rows, down by columns."""
    return {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def model_plan(config: Config, layers: Mapping[str, str | Shard]) -> dict[str, str | Shard]:
    """`layers` (from the layer on) in the place where the class of `config` has them, with embedding and head."""
    classes = config.find("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else "ForCausalLM"
    front = "" if name.endswith(_BARE) else "transformer." if name in _TRANSFORMER else "model."
    plan: dict[str, str | Shard] = {f"{front}embed_tokens": "embedding_rowwise"}
    plan.update({f"{front}layers.*.{path}": style for path, style in layers.items()})
    if name.endswith("ForCausalLM"):
        plan["lm_head"] = "embedding_rowwise"  # vocabularies need not divide; the same cut as a tied embedding
    return plan


def dense_decoder(config: Config) -> Recipe:
    """The recipe of a dense decoder."""
    attention = {f"self_attn.{name}": style for name, style in attention_plan(config).items()}
    mlp = {f"mlp.{name}": style for name, style in mlp_plan().items()}
    return Recipe(tp_plan=model_plan(config, attention | mlp), may_be_unused=STALE_BUFFERS)


_TYPES = ("llama", "mistral", "qwen2", "qwen3")
DENSE: Mapping[str, RecipeSource] = dict.fromkeys(_TYPES, dense_decoder)
