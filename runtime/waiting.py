"""Modules that wait for their own weights.

While a model loads in the background, the `_parameters` and `_buffers` of its modules are mappings that know their
names, and give a tensor when it is complete: whoever asks for one waits for those of that module, be it the module's own
forward, that of another module that uses its weight, `parameters()`, `state_dict()`, `to()`, `copy.deepcopy` or pickle.
Nothing gives a tensor that is not final. A mapping is replaced by the plain dict that it stands for when it is complete,
and with the last one nothing of this is left in the model.

A load that fails raises its error wherever a tensor is asked for, each time; so does one that was interrupted (Ctrl-C)
in a wait. It is cancelled then, and when the model is dropped, or the interpreter ends.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from traceback import clear_frames
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch import nn

from loadplan.runtime.loading import LoadCancelled

Slots = dict[str, torch.Tensor | None]
Fetch = Callable[[], Mapping[str, torch.Tensor]]
_Module = TypeVar("_Module", bound=nn.Module)


class Cancellable(Protocol):
    """A load that goes on in the background."""

    def ready(self, number: int) -> bool:
        """Whether a tensor is complete."""
        ...

    def cancel(self) -> None:
        """Stop, and wait for what runs."""
        ...


def wait_for(model: _Module) -> _Module:
    """`model`, when all its weights are there: nothing in it waits any more. Raises what loading them raises."""
    for module in model.modules():
        for attribute in ("_parameters", "_buffers"):
            slots = module.__dict__.get(attribute)
            if isinstance(slots, WaitingSlots):
                slots.finish()
    return model


class Wait:
    """What the waiting modules of one model share; dropping it ends the load."""

    def __init__(self, loading: Cancellable, order: Collection[int]) -> None:
        self.lock = threading.RLock()
        self._loading: Cancellable | None = loading
        self._left = iter(order)  # not known to be complete
        self._next = next(self._left, None)
        self._slots: list[weakref.ref[WaitingSlots]] = []
        self._process = os.getpid()
        self._failure: tuple[Exception, TracebackType | None] | None = None
        self._end = weakref.finalize(self, _cancel, loading, self._process)

    def join(self, slots: WaitingSlots) -> None:
        """Have `slots` finished with the others."""
        self._slots.append(weakref.ref(slots))

    def run(self, fetch: Fetch | None) -> Mapping[str, torch.Tensor]:
        """What `fetch` gives when the load has come so far; the lock is held. Raises what ended the load."""
        if self._failure is not None:
            failure, trace = self._failure
            raise failure.with_traceback(trace)  # as it was: raised often, it would grow
        assert fetch is not None, "it is let go of after a failure only"
        try:
            return fetch()
        except BaseException as error:
            fetch = None  # the traceback keeps what stands here
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """End the load. Whoever keeps the error, or the model, keeps no file of it."""
        if not isinstance(error, Exception):
            error = LoadCancelled(f"the load of this model was interrupted ({type(error).__name__}); load it again")
        self._failure = error, error.__traceback__
        self._end()
        self._loading = self._next = None
        for slots in self._waiting():
            slots.let_go()
        clear_frames(error.__traceback__)

    def _waiting(self) -> list[WaitingSlots]:
        rest, self._slots = self._slots, []
        return [slots for reference in rest if (slots := reference()) is not None]

    def check_process(self) -> None:
        """Refuse to wait in a fork for threads that only the parent has: it would be for ever."""
        if os.getpid() != self._process:
            raise LoadCancelled("the process was forked while the model was loading; call wait_for(model) before")

    def finish_if_done(self) -> None:
        """If all tensors are complete, give them to all modules: those that are never used keep no trace either."""
        while self._loading is not None and self._next is not None and self._loading.ready(self._next):
            self._next = next(self._left, None)
        if self._next is None:
            for slots in self._waiting():
                slots.finish()


def _cancel(loading: Cancellable, process: int) -> None:
    if os.getpid() == process:  # a fork has the locks, but not the threads that hold them
        loading.cancel()


class WaitingSlots(MutableMapping[str, "torch.Tensor | None"]):
    """The `_parameters` or `_buffers` of a module that waits for some of them."""

    def __init__(self, module: nn.Module, attribute: str, wait: Wait, fetch: Fetch) -> None:
        """Put it in the place of `attribute` of `module`; `fetch` gives the tensors by their names there, and waits."""
        self._held: Slots = module.__dict__[attribute]
        self._module, self._attribute = weakref.ref(module), attribute
        self._wait: Wait | None = wait
        self._fetch: Fetch | None = fetch
        wait.join(self)
        module.__dict__[attribute] = self

    def finish(self) -> Slots:
        """The plain dict, complete, which is the module's from now on. Raises what loading raises."""
        wait = self._wait
        if wait is None:
            return self._held
        wait.check_process()
        with wait.lock:
            if self._wait is not None:
                self._held.update(wait.run(self._fetch))
                self._fetch = self._wait = None
                module = self._module()
                if module is not None and module.__dict__.get(self._attribute) is self:
                    module.__dict__[self._attribute] = self._held
                wait.finish_if_done()
        return self._held

    def let_go(self) -> None:
        """Forget where the tensors would come from: the load failed."""
        self._fetch = None

    def __getitem__(self, name: str) -> torch.Tensor | None:
        if self._held[name] is None:
            return None
        return self.finish()[name]

    def __setitem__(self, name: str, tensor: torch.Tensor | None) -> None:
        self.finish()[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self.finish()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def copy(self) -> Slots:
        """As of a dict."""
        return self.finish().copy()

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (), None, None, iter(self.finish().items())

    def __repr__(self) -> str:
        return f"<{self._attribute} that are being loaded: {', '.join(self._held)}>"
