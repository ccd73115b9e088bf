"""Qwen's multimodal models, from 2-VL to 4, and Cosmos 3, which is built on them.

2-VL and 2.5-VL were published with the language model itself as `model` and the tower as `visual` beside it; Omni
models wrap that into a `thinker`. From 3.5 on, files of a multimodal model also serve its language model alone.
Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.ops import Concatenate, Transpose
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import PrefixChange, WeightConverter
from loadplan.recipes.idioms import Rules, alike, into_language_model, left_alone, rename, stack_experts

_DRAFTS = ("mtp",)  # further tokens at once; models without that leave it

_ADD_LEVEL = PrefixChange(prefix_to_add="language_model", model_prefix="model")
_DROP_LEVEL = PrefixChange(prefix_to_remove="language_model", model_prefix="model")
_NO_THINKER = PrefixChange(prefix_to_remove="thinker")

_VL = (*rename({r"^visual\.": "model.visual."}), into_language_model("visual"))
_THINKER = (
    _NO_THINKER,
    *rename({r"^(audio_tower|visual)\.": r"model.\1."}),
    into_language_model("visual", "audio_tower"),
)

# The tables of n-grams (tens of GB) are stored in parts, by number.
_QWEN4 = (
    _DROP_LEVEL,
    *stack_experts(),
    WeightConverter("ngram_embedding.shard_*.weight", "ngram_embedding.weight", [Concatenate(0)]),
)

# Stacked experts were stored in both orders of the inner dims; the model's shape tells which.
_EITHER_ORDER = tuple(
    WeightConverter(f"mlp.experts.{name}", f"mlp.experts.{name}", [Transpose(1, 2, check_dims=True)])
    for name in ("gate_up_proj", "down_proj")
)

# diffusers' names for attention, and no levels above the parts.
_DIFFUSERS_ATTENTION = {
    r"\.self_attn\.to_([qkv])\.": r".self_attn.\1_proj.",
    r"\.self_attn\.to_out\.": ".self_attn.o_proj.",
}
_COSMOS_TEXT = {r"^(embed_tokens|layers|norm)\.": r"model.language_model.\1."}
_COSMOS_EDGE = rename(
    {**_COSMOS_TEXT, **_DIFFUSERS_ATTENTION, r"\.mlp\.up_proj\.": ".mlp.fc1.", r"\.mlp\.down_proj\.": ".mlp.fc2."}
)
_COSMOS_OMNI = rename(
    {
        **_COSMOS_TEXT,
        r"^(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\.": r"model.visual.\1.",
        **_DIFFUSERS_ATTENTION,
        r"\.self_attn\.norm_([qk])\.": r".self_attn.\1_norm.",
    }
)

_OMNI = ("talker", "token2wav", "code2wav")  # beside the thinker


def _thinker(rules: Rules) -> Callable[[Config], Recipe]:
    def recipe(config: Config) -> Recipe:
        thinkers = ("ThinkerModel", "ThinkerForConditionalGeneration")
        return Recipe(rules, may_be_unused=left_alone(config, thinkers, _OMNI))

    return recipe


def _text(rules: Rules, *others: str) -> Callable[[Config], Recipe]:
    """A text model, which leaves `others` of a multimodal checkpoint."""

    def recipe(config: Config) -> Recipe:
        return Recipe(rules, may_be_unused=(*_DRAFTS, *left_alone(config, ("ForCausalLM", "TextModel"), others)))

    return recipe


QWEN: Mapping[str, RecipeSource] = {
    **alike(Recipe((_ADD_LEVEL,)), "Qwen2VLModel Qwen2_5_VLModel"),
    **alike(Recipe(_VL), "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration"),
    **alike(_thinker((_NO_THINKER, _ADD_LEVEL)), "Qwen2_5OmniThinkerModel Qwen3OmniMoeThinkerModel"),
    **alike(
        _thinker(_THINKER),
        "qwen2_5_omni_thinker Qwen2_5OmniThinkerForConditionalGeneration Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
    **alike(Recipe(stack_experts()), "qwen3_omni_moe qwen3_omni_moe_thinker qwen3_omni_moe_text"),
    "qwen3_vl_moe": Recipe(_EITHER_ORDER),
    "qwen3_next": Recipe(stack_experts(), may_be_unused=_DRAFTS),
    "qwen3_5_text": _text((_DROP_LEVEL,), "model.visual"),
    "qwen3_5_moe_text": _text((_DROP_LEVEL, *stack_experts()), "model.visual"),
    "qwen4_exp_text": _text(_QWEN4, "model.visual"),
    "apertus1p5_text": _text((_DROP_LEVEL,), "model.vision_tokenizer", "model.audio_tokenizer"),
    "colqwen2": Recipe((PrefixChange(prefix_to_remove="model", model_prefix="vlm"),)),  # a retriever around Qwen2-VL
    "cosmos3_edge": Recipe(_COSMOS_EDGE),
    "cosmos3_omni": Recipe(_COSMOS_OMNI),
    "jev": Recipe(rename({"^weight": "proj.weight"})),  # one linear layer on Qwen 3.5, of which the weight stands bare
}
