"""Recipes by the name of a model class or model type.

A table is any mapping from such names to a `Recipe`, or to a function from the model's config to one. Tables come from
`register_recipe`, and from installed packages through the entry point group `loadplan.recipes`; loadplan's own library
is found in the same way. Registered names come before those of packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points

from loadplan.cache.error import LoadplanError
from loadplan.compiler.ir import Config
from loadplan.compiler.recipe import Recipe

RecipeSource = Recipe | Callable[[Config], Recipe]
_GROUP = "loadplan.recipes"
_registered: dict[str, RecipeSource] = {}


class RecipeNameError(LoadplanError, KeyError):
    """A recipe's name is taken, or names no recipe."""

    def __str__(self) -> str:
        return str(self.args[0])


def register_recipe(name: str, recipe: RecipeSource, overwrite: bool = False) -> None:
    """Make `recipe` the one for the model class, model type or free name `name`, in this process.

    Raises:
        RecipeNameError: a recipe is registered under `name`, and `overwrite` is false.
    """
    if name in _registered and not overwrite:
        raise RecipeNameError(f"a recipe is registered as {name!r} already; pass overwrite=True to replace it")
    _registered[name] = recipe


def find_recipe(*names: str, config: Mapping[str, object] | Config | None = None) -> Recipe | None:
    """The recipe of the first of `names` that has one, None if none has; give class names before model types.

    Without names, those of `config` are taken: its `architectures`, then its `model_type`.

    Raises:
        RecipeNameError: two installed packages have recipes under one name.
    """
    fields = config if isinstance(config, Config) else parse_config(config)
    for name in names or config_names(fields):
        source = _registered.get(name, _packaged().get(name))
        if source is not None:
            return source if isinstance(source, Recipe) else source(fields)
    return None


def is_registered(name: str) -> bool:
    """Whether `register_recipe` was called for `name` in this process."""
    return name in _registered


def known_recipes() -> list[str]:
    """All names, in order."""
    return sorted({*_registered, *_packaged()})


def parse_config(config: Mapping[str, object] | None) -> Config:
    """A config.json as read, by field."""
    return Config(tuple((config or {}).items()))


def config_names(config: Config) -> list[str]:
    """The names under which `config` asks for a recipe: classes first."""
    classes = config.find("architectures")
    names = [*(classes if isinstance(classes, list | tuple) else ()), config.find("model_type")]
    return [name for name in names if isinstance(name, str)]


@cache
def _packaged() -> Mapping[str, RecipeSource]:
    found: dict[str, RecipeSource] = {}
    owners: dict[str, str] = {}
    for point in sorted(entry_points(group=_GROUP), key=lambda point: (point.name != "loadplan", point.name)):
        for name, source in point.load().items():
            if owners.setdefault(name, point.name) not in (point.name, "loadplan"):
                raise RecipeNameError(
                    f"{owners[name]} and {point.name} both have a recipe for {name!r}; register one yourself"
                )
            found[name] = source  # a package's recipe comes before the library's
    return found
