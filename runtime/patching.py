"""Patches: inside a block, and for the thread that runs it, modules of some classes are built as others.

    with apply_patches({"LlamaAttention": MyAttention, r"^Qwen\\d+MLP$": MyMLP}):
        model = LlamaForCausalLM(config)  # its layers hold MyAttention

A key that is a name, plain (`LlamaAttention`) or with its module (`my.models.LlamaAttention`), is the name of one class;
any other key is a regular expression, sought in the plain name. Names come before expressions, the name with its module
first, then expressions in the order in which they were given. Of nested blocks, the inner one comes first.

What is replaced is the construction: the object gets its class and its `__init__` from the replacement. So neither the
modules that name a class nor the objects built elsewhere are touched, and classes that are made during the block count
as well. While any block that may replace a class is open, the class's `__init__` is one that asks the context
(`contextvars`) whether to; when the last is closed, exception or not, its namespace is what it was before.

`__new__` is no place for this: once it was set on a class, CPython 3.11 does not take its removal for one, and refuses
arguments to every constructor from then on (seen with 3.11.7).
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from loadplan.cache.error import LoadplanError

logger = logging.getLogger(__name__)

PatchMapping = Mapping[str, type[nn.Module]]
_Init = Callable[..., None]

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class PatchError(LoadplanError, ValueError):
    """A patch is not well formed, is in conflict with another, or cannot be made."""


class _Patches:
    """The patches of one block, by kind of key."""

    def __init__(self, mapping: PatchMapping) -> None:
        self.names = {key: replacement for key, replacement in mapping.items() if _NAME.fullmatch(key)}
        self.patterns = [(re.compile(key), new) for key, new in mapping.items() if not _NAME.fullmatch(key)]
        self.unused = set(mapping)
        self.is_open = True

    def find(self, cls: type[nn.Module]) -> tuple[str, type[nn.Module]] | None:
        """The key for `cls` and what to build instead; None for a replacement, and for what is derived from it."""
        found = self._matched(cls)
        return None if found is None or issubclass(cls, found[1]) else found

    def _matched(self, cls: type[nn.Module]) -> tuple[str, type[nn.Module]] | None:
        for name in (f"{cls.__module__}.{cls.__qualname__}", cls.__name__):
            if name in self.names:
                return name, self.names[name]
        return next(((one.pattern, new) for one, new in self.patterns if one.search(cls.__name__)), None)


_lock = threading.RLock()
_registered: dict[str, type[nn.Module]] = {}
_open: list[_Patches] = []  # of all threads
_hooked: dict[type[nn.Module], _Init] = {}  # classes whose `__init__` asks, and the one that does
_active: ContextVar[tuple[_Patches, ...]] = ContextVar("loadplan_patches", default=())  # innermost last
_built: ContextVar[nn.Module | None] = ContextVar("loadplan_patched_module", default=None)  # in the midst of it
_spared: ContextVar[frozenset[type[nn.Module]]] = ContextVar("loadplan_spared_classes", default=frozenset())


def register_patch_mapping(mapping: PatchMapping, overwrite: bool = False) -> None:
    """Add patches to those that `apply_patches()` applies; all of `mapping`, or on an error none.

    Raises:
        PatchError: a key is no name and no regular expression, a replacement is no subclass of `nn.Module`, or a key has
            another replacement already and `overwrite` is false.
    """
    _check(mapping)
    with _lock:
        for key, replacement in mapping.items():
            if not overwrite and _registered.get(key, replacement) is not replacement:
                raise PatchError(
                    f"{key!r} is patched with {_registered[key].__qualname__} already; pass overwrite=True to replace it"
                )
        _registered.update(mapping)


def unregister_patch_mapping(keys: str | Iterable[str]) -> None:
    """Take patches out again, all of `keys`, or on an error none.

    Raises:
        PatchError: there is no patch under a key.
    """
    names = [keys] if isinstance(keys, str) else list(keys)
    with _lock:
        missing = [key for key in names if key not in _registered]
        if missing:
            raise PatchError(
                f"no patch was registered as {', '.join(map(repr, missing))}; there are {sorted(_registered)}"
            )
        for key in names:
            _registered.pop(key, None)


@contextmanager
def apply_patches(mapping: PatchMapping | None = None) -> Iterator[None]:
    """Build replacements in the block, in the thread (and asyncio task) that opens it and in no other.

    Args:
        mapping: from class names or regular expressions to replacements; None takes those that are registered.

    Raises:
        PatchError: see `register_patch_mapping`; or, when such an object is built, its replacement has its own `__new__`
            or another memory layout.
    """
    if mapping is not None:
        _check(mapping)
    with _lock:
        patches = _Patches(dict(_registered if mapping is None else mapping))
    try:
        with _lock:
            _open.append(patches)
            _hook_all()
        _active.set((*_active.get(), patches))
        yield
    finally:
        _active.set(tuple(one for one in _active.get() if one is not patches))
        with _lock:
            _close(patches)
    if mapping is not None and patches.unused:
        logger.warning(
            "patches %s replaced nothing: a key that is a name is a whole one (a part of one is '.*Attention')",
            ", ".join(map(repr, sorted(patches.unused))),
        )


def _check(mapping: PatchMapping) -> None:
    if not isinstance(mapping, Mapping):
        raise PatchError(f"patches are a mapping from class names to classes, not {mapping!r}")
    for key, replacement in mapping.items():
        if not isinstance(key, str) or not key:
            raise PatchError(f"{key!r} is no class name and no regular expression")
        try:
            re.compile(key)
        except re.error as error:
            raise PatchError(f"{key!r} is no class name and no regular expression: {error}") from error
        if not isinstance(replacement, type) or not issubclass(replacement, nn.Module):
            raise PatchError(f"the replacement of {key!r} is {replacement!r}, not a subclass of torch.nn.Module")


def _close(patches: _Patches) -> None:
    """Take the block's hooks away, but for those that other blocks need."""
    patches.is_open = False
    if patches in _open:
        _open.remove(patches)
    for cls in [cls for cls in _hooked if not _is_wanted(cls)]:
        _unhook(cls)
    if not _open and "__init_subclass__" in vars(nn.Module):
        del nn.Module.__init_subclass__


def _hook_all() -> None:
    if "__init_subclass__" not in vars(nn.Module):
        nn.Module.__init_subclass__ = classmethod(_hook_new)  # type: ignore[assignment]
    for cls in _subclasses(nn.Module):
        _hook(cls)


def _hook_new(cls: type[nn.Module], /, **kwargs: Any) -> None:
    """`__init_subclass__` of `nn.Module` while a block is open: classes made during it count, too."""
    super(nn.Module, cls).__init_subclass__(**kwargs)
    with _lock:
        _hook(cls)


def _subclasses(cls: type[nn.Module]) -> set[type[nn.Module]]:
    found: set[type[nn.Module]] = set()
    queue = [cls]
    while queue:
        new = set(type.__subclasses__(queue.pop())) - found
        found |= new
        queue.extend(new)
    return found


def _is_wanted(cls: type[nn.Module]) -> bool:
    return any(patches.find(cls) is not None for patches in _open)


def _hook(cls: type[nn.Module]) -> None:
    if cls in _hooked or not _is_wanted(cls):
        return
    original: _Init | None = vars(cls).get("__init__")

    @functools.wraps(cls.__init__)
    def init(self: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        replacement = _replacement_of(cls) if type(self) is cls and self is not _built.get() else None
        if replacement is not None:
            _build(self, cls, replacement, args, kwargs)
        elif original is not None:
            original(self, *args, **kwargs)
        else:
            super(cls, self).__init__(*args, **kwargs)

    init.__loadplan_original__ = original  # type: ignore[attr-defined]
    cls.__init__ = init  # type: ignore[method-assign, assignment]
    _hooked[cls] = init


def _unhook(cls: type[nn.Module]) -> None:
    init = _hooked.pop(cls)
    if vars(cls).get("__init__") is not init:
        return  # someone replaced it meanwhile, perhaps wrapped it: without an open block it does what it did before
    original: _Init | None = init.__loadplan_original__
    if original is None:
        del cls.__init__
    else:
        cls.__init__ = original  # type: ignore[method-assign]


def _replacement_of(cls: type[nn.Module]) -> type[nn.Module] | None:
    """What the innermost open block of this context makes of `cls`."""
    if cls in _spared.get():
        return None
    for patches in reversed(_active.get()):
        if patches.is_open and (found := patches.find(cls)) is not None:
            patches.unused.discard(found[0])
            return found[1]
    return None


def _build(
    module: nn.Module, cls: type[nn.Module], replacement: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the bare object of class `cls` one of `replacement`."""
    if replacement.__new__ is not cls.__new__:
        raise PatchError(
            f"{replacement.__qualname__} has its own __new__: it cannot take the place of {cls.__qualname__}"
        )
    try:
        module.__class__ = replacement
    except TypeError as error:
        raise PatchError(f"{replacement.__qualname__} cannot take the place of {cls.__qualname__}: {error}") from error
    # A replacement that is no subclass may hold an original; one that is may hold others of its kind, as the original.
    spared = _spared.get() if issubclass(replacement, cls) else _spared.get() | {cls}
    tokens = _built.set(module), _spared.set(spared)
    try:
        replacement.__init__(module, *args, **kwargs)
    finally:
        _built.reset(tokens[0])
        _spared.reset(tokens[1])
