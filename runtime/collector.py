"""The garbage collector, held back while many objects are made that will stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_LOCK = Lock()
_inside = 0
_was_enabled = False


@contextmanager
def paused_collector() -> Iterator[None]:
    """No cyclic collection inside; blocks may nest, also over threads, and the last one to end restores what was.

    A collection looks at every object of the process: with torch imported it takes 65 ms (2 cores), several times what
    mapping a model does, and finds nothing, for what a load makes stays.
    """
    global _inside, _was_enabled
    with _LOCK:
        if _inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0 and _was_enabled:
                gc.enable()
