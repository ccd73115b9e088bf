"""The layers that draft further tokens (MTP), as a model of their own beside the one whose checkpoint holds them.

DeepSeek's line appends them to the layers (`model.layers.61` of 61); others have a module `mtp`, with one layer's parts
one level up if there is only one. What is no part of a decoder layer (two norms, the projection of both inputs, a last
norm) has a name of its own. Facts: `MtpModel` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource, find_recipe
from loadplan.recipes.idioms import STALE_BUFFERS, draft_layers, inside, rename

_MODULE = rename(
    inside(
        r"^(?:model\.)?mtp\.",
        "",
        {
            r"layers\.(\d+)\.(?:transformer_block\.|mtp_block\.)?": r"layers.\1.mtp_block.",
            r"fc\.": "layers.0.eh_proj.",
            r"pre_fc_norm_embedding\.": "layers.0.enorm.",
            r"pre_fc_norm_hidden\.": "layers.0.hnorm.",
            r"norm\.": "layers.0.post_norm.",
            r"chain_norm\.": "shared_post_norm.",
        },
    )
)
_PARTS = rename(
    inside(
        r"^layers\.(\d+)\.mtp_block\.",
        r"layers.\1.",
        {
            r"(enorm|hnorm|eh_proj|post_norm)\.": r"\2.",
            r"shared_head\.norm\.": "post_norm.",
            r"hidden_norm\.": "hnorm.",
            r"embed_norm\.": "enorm.",
            r"input_proj\.": "eh_proj.",
        },
    )
)
_SHARED = rename({r"^model\.embed_tokens\.": "embed_tokens.", r"^lm_head\.": "shared_head."})


def drafts(config: Config) -> Recipe:
    """The draft layers by number, then the rules of the main model for what is in them.

    The rest of the main model's checkpoint is left; of what both use, embedding and head are taken from it.
    """
    main = find_recipe(str(config.find("model_type")), config=config) or Recipe()
    appended = {
        rf"^(?:model\.)?{layer}\.": f"layers.{number}.mtp_block." for number, layer in enumerate(draft_layers(config))
    }
    return Recipe(
        rules=(*rename(appended), *_MODULE, *_PARTS, *_SHARED, *main.rules),
        may_be_missing=("embed_tokens", "shared_head"),
        may_be_unused=("model", *STALE_BUFFERS),
    )


DRAFTS: Mapping[str, RecipeSource] = {"MtpModel": drafts}
