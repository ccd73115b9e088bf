"""One recipe for a model made of models: each one's rules, for the names below it.

The walk is that of transformers (transformers_spec 2.1): outer models first, a class name before a model type, and a
model whose class or type an outer one has claimed already gets no rules of its own, since those reach it. Siblings of
one class each get theirs. Last come the rules for names of the past, which hold for every model.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadplan.compiler.ir import Config
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import find_recipe, is_registered
from loadplan.compiler.rules import Rule, Scoped
from loadplan.compiler.signature import Signature, Submodel

LEGACY = "legacy"  # the name of the recipe for every model


def compose_recipe(signature: Signature, config: Config) -> Recipe:
    """The recipe of the whole model; without rules when no model in it has a recipe.

    The parallel plan is the outermost model's; waivers are everybody's.
    """
    recipes = list(_claimed(signature.submodels, config))
    legacy = find_recipe(LEGACY, config=config) or Recipe()
    root = next((recipe for model, recipe in recipes if not model.path), Recipe())
    rules = [rule for model, recipe in recipes for rule in _scoped(model, recipe, signature.base_model_prefix)]
    everybody = [*(recipe for _, recipe in recipes), legacy]
    return Recipe(
        rules=(*rules, *(rule for rule in legacy.rules if rule not in rules)),
        tp_plan=root.tp_plan,
        dtype_plan=root.dtype_plan,
        may_be_missing=root.may_be_missing,
        may_be_unused=dict.fromkeys(pattern for recipe in everybody for pattern in recipe.may_be_unused),
    )


def _claimed(submodels: Sequence[Submodel], config: Config) -> list[tuple[Submodel, Recipe]]:
    """The models whose own recipe is used, outer ones first."""
    claims: list[tuple[str, str]] = []  # path, class name or model type
    found: list[tuple[Submodel, Recipe]] = []
    for model in submodels:
        above = {name for path, name in claims if not path or model.path == path or model.path.startswith(f"{path}.")}
        if model.class_name in above:
            continue
        names = [model.class_name]
        recipe = _find(model, model.class_name, config)
        if recipe is None and model.model_type not in above:
            recipe = _find(model, model.model_type, config)
            names.append(model.model_type)
        if recipe is not None:
            claims.extend((model.path, name) for name in names)
            found.append((model, recipe))
    return found


def _find(model: Submodel, name: str, config: Config) -> Recipe | None:
    """The recipe called `name`; for a custom class only if a user registered it, since its type may be another's."""
    return None if model.is_custom and not is_registered(name) else find_recipe(name, config=config)


def _scoped(model: Submodel, recipe: Recipe, base_prefix: str) -> list[Rule]:
    if not model.path:
        return list(recipe.rules)
    inside = model.path == base_prefix or model.path.startswith(f"{base_prefix}.")
    path = model.path[len(base_prefix) :].removeprefix(".") if base_prefix and inside else model.path
    return [rule if isinstance(rule, Scoped) else Scoped(rule, path, base_prefix) for rule in recipe.rules]
