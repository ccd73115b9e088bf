"""BERT, with the names its norms had before PyTorch, and a variant with query, key and value in one matrix.

Facts: transformers' BertModel; Google's release and early conversions call a norm's scale and shift gamma and beta.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.ops import Concatenate
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource, config_names
from loadplan.compiler.rules import WeightConverter, WeightRenaming
from loadplan.compiler.shard import Shard, heads
from loadplan.recipes.llama import head_dim

LEGACY_NORMS = (
    WeightRenaming("LayerNorm.gamma", "LayerNorm.weight"),
    WeightRenaming("LayerNorm.beta", "LayerNorm.bias"),
)
_POSITION_IDS = "embeddings.position_ids"  # 0, 1, 2, ...: old transformers saved it; models compute it
_PARTS = ("query", "key", "value")


def bert(config: Config) -> Recipe:
    """Names as they are, legacy ones made new; attention by whole heads, the MLP by rows then columns."""
    by_head = heads(head_dim(config))
    layer: dict[str, str | Shard] = {f"attention.self.{part}": by_head for part in _PARTS}
    layer |= {"attention.output.dense": "rowwise", "intermediate.dense": "colwise", "output.dense": "rowwise"}
    bare = any(name.endswith("Model") for name in config_names(config)[:1])
    front = "" if bare else "bert."
    return Recipe(
        rules=LEGACY_NORMS,
        tp_plan={f"{front}encoder.layer.*.{path}": style for path, style in layer.items()},
        may_be_unused=(_POSITION_IDS,),
    )


BERT_FUSED_QKV = Recipe(
    rules=(
        *LEGACY_NORMS,
        *(
            WeightConverter(
                [f"attention.self.{part}.{kind}" for part in _PARTS],
                f"attention.self.qkv.{kind}",
                [Concatenate(0)],
            )
            for kind in ("weight", "bias")
        ),
    ),
    may_be_unused=(_POSITION_IDS,),
)
"""Rows of query, then of key, then of value, as one `attention.self.qkv` per layer; for one rank."""

BERT: Mapping[str, RecipeSource] = {"bert": bert, "bert-fused-qkv": BERT_FUSED_QKV}
