"""All recipes of this library, by model class and model type: what `loadplan.compiler.registry` finds."""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.registry import RecipeSource
from loadplan.recipes.bert import BERT
from loadplan.recipes.llama import DENSE
from loadplan.recipes.moe import MOE

RECIPES: Mapping[str, RecipeSource] = {**BERT, **DENSE, **MOE}
