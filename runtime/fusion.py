"""Fusions: modules of one model instance that compute the same from weights in another layout.

A *family* (`FusionFamily`) knows which modules it can fuse, and makes a subclass of their class that is fused. Asked
for by `fusion_config`, `find_fusions` lists the modules of a model, built on the meta device or not, and `fuse_modules`
changes exactly these, in place. No class is changed, nothing is global: other instances and other threads see nothing.

    fusion_config ::= {name: True | False | {"modules": regex or list of regexes on module paths}}

The built-in families are those of `loadplan.runtime.fusions`; `register_fusion` adds one for this process, and the
entry point group `loadplan.fusions` those of an installed package. What turns the weights of the original module into
those of the fused one is the build side's: `fusion_rules` gives the rules, which this module never reads.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from loadplan.cache.digest import canonical_json
from loadplan.cache.error import LoadplanError
from loadplan.runtime.plan import FusedModule

if TYPE_CHECKING:
    from torch import nn

_GROUP = "loadplan.fusions"
_BUILT_IN = ("conv_bn", "gate_up", "patch_embeddings", "patch_embeddings_2d", "qkv")
_OPTIONS = ("modules",)
_lock = threading.Lock()
_registered: dict[str, FusionFamily] = {}


class FusionError(LoadplanError, ValueError):
    """A fusion is unknown, asked for wrongly, in conflict with another, or does not fit the model."""


@runtime_checkable
class FusionFamily(Protocol):
    """What every family has. It may also have, each looked up by name:

    - `target_modules_patterns`: regular expressions; only modules whose path one of them finds are asked about;
    - `looks_for`: what it fuses, in words, for the message when there is nothing to fuse;
    - `describe(module)`: facts of a module that its rules need, as a dict of str, int, bool, lists and dicts of these.
      They go into the plan (`FusedModule.options`), and `fuse_modules` refuses a module that is not as described;
    - `replaces(module)`: names of the child modules that fusing takes over; without it, all of them;
    - `make_transforms(config, **facts)`: the rules (`WeightConverter`, `WeightRenaming`, ...), patterns relative to the
      module, from the names of the original to those of the fused module; each of these has exactly one producer.
    """

    def is_fusable(self, module: nn.Module) -> bool:
        """Whether the family can fuse `module`, as far as the module itself can tell."""
        ...

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        """A subclass of `original_cls`, the same one each time, with a method `fuse_()`.

        `fuse_` is called on an instance of `original_cls` after its class was changed, and puts fused parameters in the
        place of its own, computed from them: on the meta device, that is their shape, dtype and device.
        """
        ...


def register_fusion(name: str, family: FusionFamily, overwrite: bool = False) -> None:
    """Make `family` the one that `fusion_config` and plans mean by `name`, in this process.

    Raises:
        FusionError: the name is taken and `overwrite` is false, or `family` lacks a method.
    """
    if not name or not isinstance(family, FusionFamily):
        raise FusionError(f"fusion {name!r}: {family!r} needs a name, and methods is_fusable and make_fused_class")
    with _lock:
        if not overwrite and (name in _registered or name in _BUILT_IN):
            raise FusionError(f"a fusion is known as {name!r} already; pass overwrite=True to replace it")
        _registered[name] = family


def unregister_fusion(name: str) -> None:
    """Undo `register_fusion`; a built-in or packaged family of that name is found again.

    Raises:
        FusionError: none was registered under the name.
    """
    with _lock:
        if _registered.pop(name, None) is None:
            raise FusionError(f"no fusion was registered as {name!r}{_near(name, _registered)}")


def find_fusion(name: str) -> FusionFamily:
    """The family called `name`: registered here, else built in, else of an installed package.

    Raises:
        FusionError: there is none.
    """
    with _lock:
        family = _registered.get(name)
    if family is None and name in _BUILT_IN:
        return cast(FusionFamily, import_module(f"loadplan.runtime.fusions.{name}").FAMILY)
    family = family or _packaged(own=False).get(name)
    if family is None:
        raise FusionError(f"no fusion is known as {name!r}{_near(name, known_fusions())}")
    return family


def known_fusions() -> list[str]:
    """All names, in order."""
    with _lock:
        registered = list(_registered)
    return sorted({*registered, *_BUILT_IN, *_packaged(own=False)})


@cache
def _packaged(own: bool) -> Mapping[str, Any]:
    """Families of installed packages by name; `own`: the build half of the built-in ones."""
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for point in sorted(entry_points(group=_GROUP), key=lambda point: point.name):
        if (point.name == "loadplan") != own:
            continue
        for name, family in point.load().items():
            if name in owners or (not own and name in _BUILT_IN):
                raise FusionError(
                    f"{owners.get(name, 'loadplan')} and {point.name} both have a fusion {name!r}; remove one of them"
                )
            found[name], owners[name] = family, point.name
    return found


def fusion_rules(fused: FusedModule, config: object = None) -> tuple[object, ...]:
    """The rules from the original names of a module to its fused ones; patterns are relative to the module.

    For the build side: the rules of built-in families are `loadplan.recipes.fusions`, found as an installed package's.

    Args:
        fused: as `find_fusions` gives it.
        config: of the model, for families that need it; those built in take all they need from `fused.options`.

    Raises:
        FusionError: the family is unknown or has no rules, or its options are not those of the family.
    """
    rules, facts = _family_rules(fused), _facts(fused)
    try:
        return tuple(rules(config, **facts))
    except (TypeError, KeyError) as error:
        raise FusionError(f"fusion {fused.family!r} of {fused.path!r} cannot use {fused.options}: {error}") from error


def _family_rules(fused: FusedModule) -> Callable[..., Sequence[object]]:
    with _lock:
        is_built_in = fused.family in _BUILT_IN and fused.family not in _registered
    half = (
        _packaged(own=True).get(fused.family) if is_built_in else find_fusion(fused.family)
    )  # the former needs no torch
    rules: Callable[..., Sequence[object]] | None = getattr(half, "make_transforms", None)
    if rules is None:
        raise FusionError(f"fusion {fused.family!r} has no make_transforms: it can be loaded, not compiled for")
    return rules


def _facts(fused: FusedModule) -> dict[str, object]:
    try:
        facts = json.loads(fused.options)
    except (ValueError, RecursionError) as error:
        raise FusionError(f"fusion {fused.family!r} of {fused.path!r}: options are not JSON: {error}") from error
    if not isinstance(facts, dict):
        raise FusionError(f"fusion {fused.family!r} of {fused.path!r}: options are not a JSON object: {fused.options}")
    return facts


@dataclass(frozen=True, slots=True)
class FusionRequest:
    """One family that was asked for, and where."""

    name: str
    modules: tuple[str, ...] = ()  # regular expressions on module paths, one of which must be found; empty: anywhere


def parse_fusion_config(fusion_config: object) -> tuple[FusionRequest, ...]:
    """The families that a `fusion_config` turns on, by name. Those that it turns off must be known, too.

    Raises:
        FusionError: a name or an option is unknown, or a value is none of True, False and a mapping of options.
    """
    if not isinstance(fusion_config, Mapping):
        raise FusionError(f"fusion_config is a mapping from names to True, False or options, not {fusion_config!r}")
    requests = []
    for name, value in fusion_config.items():
        if name not in known_fusions():
            raise FusionError(f"fusion_config asks for an unknown fusion {name!r}{_near(name, known_fusions())}")
        if not isinstance(value, bool | Mapping):
            raise FusionError(f"fusion_config[{name!r}] is True, False or a mapping of options, not {value!r}")
        if value is not False:
            requests.append(FusionRequest(name, _parse_modules(name, value if isinstance(value, Mapping) else {})))
    return tuple(sorted(requests, key=lambda request: request.name))


def _parse_modules(name: str, options: Mapping[object, object]) -> tuple[str, ...]:
    for option in options:
        if option not in _OPTIONS:
            raise FusionError(f"fusion_config[{name!r}] has an unknown option {option!r}{_near(option, _OPTIONS)}")
    value = options.get("modules", ())
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(text, str) and text for text in patterns):
        raise FusionError(
            f"fusion_config[{name!r}]['modules'] is a regular expression or a list of them, not {value!r}"
        )
    if "modules" in options and not patterns:
        raise FusionError(f"fusion_config[{name!r}]['modules'] is empty: leave it out, or say which modules")
    for text in patterns:
        _compiled(name, text)
    return tuple(patterns)


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FusionError(f"fusion {name!r}: {pattern!r} is not a regular expression: {error}") from error


def find_fusions(model: nn.Module, fusion_config: object = None) -> tuple[FusedModule, ...]:
    """The modules of `model` that a configuration fuses, in the order of their paths. The model stays as it is.

    A module at several paths is listed once, under the first.

    Args:
        model: on any device; the meta device is enough.
        fusion_config: see the module's docstring; None takes `model.config.fusion_config`, if there is one.

    Raises:
        FusionError: see `parse_fusion_config`; or a family finds nothing to fuse, two of them claim one module or one
            claims what lies in a module that another takes over, or a weight to be fused is tied to another.
    """
    if fusion_config is None:
        fusion_config = getattr(getattr(model, "config", None), "fusion_config", None) or {}
    found: dict[str, FusedModule] = {}
    for request in parse_fusion_config(fusion_config):
        family = find_fusion(request.name)
        fused = list(_claims(model, request, family))
        if not fused:
            words = getattr(family, "looks_for", "a module that its is_fusable accepts")
            where = f" in modules {', '.join(map(repr, request.modules))}" if request.modules else ""
            raise FusionError(
                f"fusion {request.name!r} finds nothing to fuse in {type(model).__name__}{where}; it looks for {words}"
            )
        for one in fused:
            if one.path in found:
                raise FusionError(f"fusions {found[one.path].family!r} and {one.family!r} both claim {one.path!r}")
            found[one.path] = one
    fusions = tuple(found[path] for path in sorted(found))
    _refuse_conflicts(model, [(one, model.get_submodule(one.path), find_fusion(one.family)) for one in fusions])
    return fusions


def _claims(model: nn.Module, request: FusionRequest, family: FusionFamily) -> Iterator[FusedModule]:
    patterns = getattr(family, "target_modules_patterns", ())
    own = [_compiled(request.name, text) for text in ((patterns,) if isinstance(patterns, str) else patterns)]
    asked = [_compiled(request.name, text) for text in request.modules]
    for path, module in model.named_modules():
        is_meant = all(any(one.search(path) for one in ones) for ones in (own, asked) if ones)
        if is_meant and family.is_fusable(module):
            yield FusedModule(path, request.name, _described(family, module))


def fuse_modules(model: nn.Module, fusions: Sequence[FusedModule]) -> None:
    """Change the listed modules of `model` into fused ones, in place, with their weights; on an error, none.

    Each gets the fused subclass of its class and new parameters, computed from its own by plain torch ops: on the meta
    device that costs nothing, elsewhere the old weights are freed as the caller lets go of them. `requires_grad` and
    the training flag are kept.

    Raises:
        FusionError: a path or family is unknown, a module is not fusable or not the one described, or fusions are in
            conflict (see `find_fusions`).
    """
    targets = [(fused, _module_at(model, fused), find_fusion(fused.family)) for fused in fusions]
    for fused, module, family in targets:
        _refuse_unfit(fused, module, family)
    _refuse_conflicts(model, targets)
    before = [
        (inner, type(inner), dict(inner.__dict__), {name: copy(inner.__dict__[name]) for name in _MEMBERS})
        for _, module, _ in targets
        for inner in module.modules()
    ]
    try:
        for fused, module, family in targets:
            _fuse(fused, module, family)
    except BaseException:
        for inner, original, attributes, members in before:
            inner.__class__ = original
            inner.__dict__.clear()
            inner.__dict__.update(attributes)
            for name, values in members.items():
                inner.__dict__[name].clear()
                inner.__dict__[name].update(values)
        raise


def _fuse(fused: FusedModule, module: nn.Module, family: FusionFamily) -> None:
    original = type(module)
    made = family.make_fused_class(original)
    if not issubclass(made, original) or not callable(getattr(made, "fuse_", None)):
        raise FusionError(
            f"fusion {fused.family!r} makes {made!r} of {original!r}: not a subclass of it with a fuse_()"
        )
    module.__class__ = made
    module.fuse_()  # type: ignore[operator]


_MEMBERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_Target = tuple[FusedModule, "nn.Module", FusionFamily]


def _module_at(model: nn.Module, fused: FusedModule) -> nn.Module:
    try:
        return model.get_submodule(fused.path)
    except AttributeError:
        paths = [path for path, _ in model.named_modules()]
        raise FusionError(
            f"fusion {fused.family!r}: {type(model).__name__} has no module {fused.path!r}{_near(fused.path, paths)}"
        ) from None


def _refuse_unfit(fused: FusedModule, module: nn.Module, family: FusionFamily) -> None:
    if not family.is_fusable(module):
        raise FusionError(
            f"fusion {fused.family!r} cannot fuse {fused.path!r}, a {type(module).__name__}; "
            f"it looks for {getattr(family, 'looks_for', 'a module that its is_fusable accepts')}"
        )
    if hasattr(family, "describe") and (found := _described(family, module)) != fused.options:
        raise FusionError(
            f"fusion {fused.family!r} of {fused.path!r}: the plan is for {fused.options}, the module has {found}"
        )


def _described(family: FusionFamily, module: nn.Module) -> str:
    describe = getattr(family, "describe", None)
    return canonical_json(describe(module)).decode() if describe is not None else "{}"


def _refuse_conflicts(model: nn.Module, targets: Sequence[_Target]) -> None:
    """Refuse what would make one fusion undo another, or break a tie of the model."""
    claimed: dict[int, FusedModule] = {}
    taken: dict[int, FusedModule] = {}  # modules that a fusion takes over, and those inside them
    holders = Counter(id(child) for module in model.modules() for child in module._modules.values())
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                owners.setdefault(id(tensor), set()).add(id(module))
    for fused, module, _ in targets:
        if id(module) in claimed:
            first = claimed[id(module)]
            raise FusionError(
                f"{first.path!r} and {fused.path!r} are one module, claimed by {first.family!r} and {fused.family!r}"
            )
        if getattr(module, "_can_record_outputs", None):  # transformers keeps its recorders by the name of the class
            raise FusionError(
                f"fusion {fused.family!r} claims {fused.path or 'the model'!r}, a whole model with outputs to record; "
                "fuse modules inside it"
            )
        claimed[id(module)] = fused
    for fused, module, family in targets:
        names = (
            family.replaces(module) if hasattr(family, "replaces") else [name for name, _ in module.named_children()]
        )
        for name in names:
            child = module._modules[name]
            assert child is not None, "a family replaces what is there"
            if holders[id(child)] > 1:
                raise FusionError(f"fusion {fused.family!r}: {_below(fused, name)} is also elsewhere in the model")
            for inner in child.modules():
                taken[id(inner)] = fused
                for key, tensor in (*inner._parameters.items(), *inner._buffers.items()):
                    if tensor is not None and len(owners[id(tensor)]) > 1:
                        raise FusionError(f"fusion {fused.family!r}: {key} of {_below(fused, name)} is tied to another")
    for fused, module, _ in targets:
        if id(module) in taken:
            outer = taken[id(module)]
            raise FusionError(
                f"fusion {outer.family!r} of {outer.path!r} takes over {fused.path!r}, which {fused.family!r} claims"
            )


def _below(fused: FusedModule, name: str) -> str:
    return f"{fused.path}.{name}" if fused.path else name


def _near(name: object, known: Sequence[str] | Mapping[str, object]) -> str:
    close = get_close_matches(str(name), list(known), n=3)
    listed = close or (sorted(known) if len(known) < 10 else [])
    return f"; {'near ones' if close else 'there are'}: {', '.join(listed)}" if listed else ""
