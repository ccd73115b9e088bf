"""What to turn into what: the words recipes are written in, and the library of those for published models.

A recipe is a value (`Recipe`) or a function from a model's config to one; `register_recipe` and the entry point group
`loadplan.recipes` name them by model class or model type. One module a family; `library` lists them all. `fusions` has
the rules of the built-in fusion families; `register_fusion` and the entry point group `loadplan.fusions` add others.
"""

from loadplan.compiler.patterns import PatternError
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeNameError, find_recipe, register_recipe
from loadplan.compiler.rules import GroupWeightRename, PrefixChange, WeightConverter, WeightRenaming
from loadplan.compiler.shard import Shard, heads
from loadplan.runtime.fusion import FusionError, find_fusion, register_fusion, unregister_fusion

__all__ = [
    "FusionError",
    "GroupWeightRename",
    "PatternError",
    "PrefixChange",
    "Recipe",
    "RecipeNameError",
    "Shard",
    "WeightConverter",
    "WeightRenaming",
    "find_fusion",
    "find_recipe",
    "heads",
    "register_fusion",
    "register_recipe",
    "unregister_fusion",
]
