"""Fused subclasses, made once per original class, of instances that can be copied and pickled."""

from __future__ import annotations

import threading
import types
import weakref
from typing import Any, ClassVar, cast

import torch
from torch import nn

from loadplan.runtime.fusion import find_fusion


class StandIn(nn.Module):
    """A module in the place of one that was fused away: it owns no weights, and computes from those of another child.

    Args:
        source_name: name of that child, in the module that is the parent of both.
        source: the child.
    """

    def __init__(self, source_name: str, source: nn.Module) -> None:
        super().__init__()
        self.source_name = source_name
        self.train(source.training)
        self.point_to(source)

    @property
    def source(self) -> nn.Module:
        """The child with the weights; not a child of this module, whose state dict is empty."""
        return cast(nn.Module, self.__dict__["_source"])

    def point_to(self, source: nn.Module) -> None:
        """Compute from `source` from now on."""
        self.__dict__["_source"] = source


class Fused(nn.Module):
    """What every built-in fused class has in front of its original."""

    fusion: ClassVar[str]  # name of the family
    original_class: ClassVar[type[nn.Module]]

    def fuse_(self) -> None:
        """Put fused parameters in the place of the original's, computed from them."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, StandIn):  # whatever was put in the source's place meanwhile, that is what computes now
            found.point_to(cast(nn.Module, self._modules[found.source_name]))
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """By family and original class, since nobody can import the class itself."""
        reduced = super().__reduce_ex__(max(2, int(protocol)))
        return (_new, (self.fusion, self.original_class), *reduced[2:])


_lock = threading.Lock()
_classes: weakref.WeakKeyDictionary[type, dict[type, weakref.ref[type[nn.Module]]]] = weakref.WeakKeyDictionary()


def fused_class(mixin: type[Fused], original: type[nn.Module]) -> type[nn.Module]:
    """`FusedX` for class `X`, the same one as long as it is in use."""
    with _lock:
        made = _classes.setdefault(original, {})
        known = made[mixin]() if mixin in made else None
        if known is None:
            body = {
                "__module__": original.__module__,
                "__qualname__": f"Fused{original.__qualname__}",
                "__doc__": original.__doc__,
                "original_class": original,
            }
            known = types.new_class(
                f"Fused{original.__name__}", (mixin, original), exec_body=lambda ns: ns.update(body)
            )
            made[mixin] = weakref.ref(known)
        return known


def replace_children(module: nn.Module, changes: dict[str, dict[str, nn.Module]]) -> None:
    """Put, in the place of each named child, the children of `changes[name]`; the others keep their places."""
    children = [pair for name, child in module._modules.items() for pair in changes.get(name, {name: child}).items()]
    module._modules.clear()
    module._modules.update(children)


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether `module` is exactly of class `kind`, and nothing was hung on it that fusing would lose."""
    if type(module) is not kind:
        return False
    hung = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in module.__dict__ and not any(module.__dict__.get(name) for name in hung)


def fused_parameter(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """`value`, detached, as a parameter that wants a gradient if `like` does."""
    return nn.Parameter(value.detach(), requires_grad=like.requires_grad)


def _new(fusion: str, original: type[nn.Module]) -> nn.Module:
    made = find_fusion(fusion).make_fused_class(original)
    return made.__new__(made)
