"""Gemma's relatives: text models out of multimodal files, unified embedders, T5-like encoders, and robot policies.

Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import PrefixChange
from loadplan.recipes.idioms import inside, rename

# The patch embedder joined the module that projects into the language model.
_UNIFIED = rename(
    {
        r"vision_embedder\.(patch_ln1|patch_dense|patch_ln2|pos_embedding|pos_norm)\b": r"embed_vision.\1",
        r"embed_vision\.embedding_projection\.": "embed_vision.multimodal_embedder.embedding_projection.",
    }
)

# The encoder's text part had no module of its own; the decoder and the tower have layers and norms too.
_T5_TEXT = r"(?<!decoder\.)(?<!text_model\.)"
_T5_ENCODER = rename(
    {
        rf"{_T5_TEXT}embed_tokens\.": "text_model.embed_tokens.",
        rf"{_T5_TEXT}(?<!layer)(?<!_)norm\.": "text_model.norm.",
        rf"(?<!vision_model\.encoder\.)(?<!vision_tower\.encoder\.){_T5_TEXT}layers\.": "text_model.layers.",
    }
)

# LeRobot's layout: PaliGemma and a small Gemma that acts (`expert`); of each the head is the (tied) embedding.
_PI0 = (
    PrefixChange(prefix_to_remove="model"),
    *rename(
        {
            r"^(state_proj|action_in_proj|action_time_mlp_in|action_time_mlp_out)\.": r"embed_action_time.\1.",
            **inside(
                r"^paligemma_with_expert\.",
                "model.",
                {
                    r"paligemma\.model\.": "vlm.",
                    r"paligemma\.lm_head\.": "vlm.language_model.embed_tokens.",
                    r"gemma_expert\.model\.": "dit.",
                    r"gemma_expert\.lm_head\.": "dit.embed_tokens.",
                },
            ),
        }
    ),
)

GEMMA: Mapping[str, RecipeSource] = {
    "gemma3n_text": Recipe((PrefixChange(prefix_to_remove="language_model", model_prefix="model"),)),
    "gemma4_unified": Recipe(_UNIFIED),
    "shieldgemma2": Recipe((PrefixChange(prefix_to_add="model", model_prefix="model"),)),  # a classifier around Gemma 3
    "t5gemma2_encoder": Recipe(_T5_ENCODER),
    "pi0": Recipe(_PI0),
}
