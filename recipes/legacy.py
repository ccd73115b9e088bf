"""What once was written differently in every family; `compose_recipe` adds these rules to each model's own.

TensorFlow called a norm's scale and shift gamma and beta. Weight norm was `weight_g` (sizes) and `weight_v`
(directions) until torch 2.1 made it a parametrization. transformers 5.10 to 5.23 wrote some multimodal models with the
language model's `model` doubled.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.compose_recipe import LEGACY
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import WeightRenaming
from loadplan.recipes.bert import LEGACY_NORMS
from loadplan.recipes.idioms import rename

_LEGACY = (
    *LEGACY_NORMS,
    *rename(
        {
            ".weight_g": ".parametrizations.weight.original0",
            ".weight_v": ".parametrizations.weight.original1",
        }
    ),
    WeightRenaming([r"^model\.language_model\.model\.", r"^language_model\.model\.model\."], "model.language_model."),
)

LEGACY_NAMES: Mapping[str, RecipeSource] = {LEGACY: Recipe(_LEGACY)}
