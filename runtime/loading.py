"""Work that threads do until buffers are complete: in order, bounded, and ended by the first error or by who asks.

A thread runs tasks until there are none, or until somebody stops it: an error in another task, `cancel`, the end of the
last reference to the `Loading`, or the end of the main thread. Whoever waits for a buffer gets the error instead.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from loadplan.cache.error import LoadplanError

Progress = Callable[[int, int], None]


class LoadCancelled(LoadplanError, RuntimeError):
    """Tensors are asked for that will not come: the load was cancelled."""


class Task(NamedTuple):
    """A piece of work, and the buffers that need it."""

    nbytes: int
    buffers: tuple[int, ...]
    run: Callable[[], None]


class _State:
    """What the threads share. They hold this and not the `Loading`, so that dropping that one stops them."""

    def __init__(self, tasks: Sequence[Task], last: Callable[[], None] | None, late: Collection[int]) -> None:
        self.tasks, self.last, self.late = tasks, last, frozenset(late)
        self.changed = threading.Condition()
        self.next = 0
        self.running = 0
        self.done_nbytes = 0
        self.stop = False
        self.error: BaseException | None = None
        self.complete = False
        self.left: dict[int, int] = defaultdict(int)  # buffer -> tasks that are not done
        for task in tasks:
            for buffer in task.buffers:
                self.left[buffer] += 1

    def work(self, after: Callable[[], None] | None = None) -> None:
        """Run tasks until there are none left, then the last step, in whichever thread comes to it."""
        while (task := self._take()) is not None:
            try:
                task.run()
            except BaseException as error:  # noqa: BLE001 - also an interrupt: who waits must be told
                self._end(error=error)
                return
            self._end(task)
            if after is not None and task.nbytes:
                after()

    def _take(self) -> Task | None:
        with self.changed:
            if self.stop or not threading.main_thread().is_alive():
                self._stop()
                return None
            if self.next < len(self.tasks):
                self.next += 1
                self.running += 1
                return self.tasks[self.next - 1]
            if self.running or self.complete:
                return None
            if self.last is None:
                self.complete = True
                self.changed.notify_all()
                return None
            last, self.last = self.last, None
            self.running += 1
            return Task(0, (), last)

    def _end(self, task: Task | None = None, error: BaseException | None = None) -> None:
        with self.changed:
            self.running -= 1
            if error is not None:
                self.error = self.error or error
                self._stop()
            elif task is not None:
                self.done_nbytes += task.nbytes
                for buffer in task.buffers:
                    self.left[buffer] -= 1
            self.changed.notify_all()

    def _stop(self) -> None:
        self.stop = True
        self.changed.notify_all()

    def abandon(self) -> None:
        """Stop after the tasks that run now."""
        with self.changed:
            self._stop()

    def is_ready(self, buffer: int) -> bool:
        """Whether nothing will write to the buffer any more; the lock is held."""
        return self.complete or not (self.left.get(buffer) or buffer in self.late)


class Loading:
    """Buffers that are being filled. Dropping it stops the work."""

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        tasks: Sequence[Task],
        threads: int,
        last: Callable[[], None] | None = None,
        late: Collection[int] = (),
        join: Callable[[], None] | None = None,
    ) -> None:
        """Start `tasks` on at most `threads` threads; then `last` on one, which completes the buffers `late`.

        `join` is called by whoever was given complete buffers, in its own thread, before it uses them.

        With 0 threads nothing happens before `result`, which does the work itself.
        """
        self._tensors, self._join = dict(tensors), join
        self._state = _State(tasks, last, late)
        self.nbytes = sum(task.nbytes for task in tasks)
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._state.abandon).atexit = False
        if not tasks and last is None:
            self._state.complete = True
            return
        self._threads = [  # known before they run: an interrupt may come right after
            threading.Thread(target=self._state.work, name=f"loadplan-{number}")
            for number in range(min(threads, max(len(tasks), 1)))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.cancel()
            raise

    def ready(self, number: int) -> bool:
        """Whether the buffer is complete."""
        with self._state.changed:
            return self._state.is_ready(number)

    def wait(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """The buffers, when they are complete.

        Raises:
            LoadCancelled: they will not be.
            And what ended the load.
        """
        wanted = list(numbers)
        state = self._state
        with state.changed:
            for number in wanted:
                while not state.is_ready(number):
                    self._raise_end()
                    state.changed.wait()
        if self._join is not None:
            self._join()
        return {number: self._tensors[number] for number in wanted}

    def result(self, progress: Progress | None = None) -> dict[int, torch.Tensor]:
        """All buffers, when they are complete; whatever interrupts the wait cancels the load.

        `progress` is called with (bytes done, bytes in all), in this thread. Raises what `wait` raises.
        """
        state = self._state
        said = -1

        def say() -> None:
            if progress is not None and self.nbytes:
                progress(state.done_nbytes, self.nbytes)

        try:
            if not self._threads:
                state.work(say)
            while True:
                with state.changed:
                    while not (state.complete or state.stop) and (progress is None or state.done_nbytes == said):
                        state.changed.wait()
                    ended, done = state.complete or state.stop, state.done_nbytes
                if done != said and self._threads:
                    say()
                    said = done
                if ended:
                    break
        except BaseException:
            self.cancel()
            raise
        for thread in self._threads:
            thread.join()
        with state.changed:
            if not state.complete:
                self._raise_end()
        if self._join is not None:
            self._join()
        return dict(self._tensors)

    def cancel(self) -> None:
        """Stop, and wait for the threads; buffers that are not complete will not be."""
        self._state.abandon()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join()

    def _raise_end(self) -> None:
        if self._state.error is not None:
            raise self._state.error
        if self._state.stop:
            raise LoadCancelled("the load was cancelled before these tensors were complete; load again")
