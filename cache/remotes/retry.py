"""Trying again what may work the next time, within the time that the whole may take."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TypeVar

from loadplan.cache.remotes.remote import DeadlinePassed, RemoteUnavailable

T = TypeVar("T")

PROGRESS_NBYTES = 1 << 20  # this much more than at the last failure, and the tries are counted anew


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """How hard a transfer tries.

    A transfer of n bytes may take `deadline_s` in all; when that is None, 300 s and a second a MiB, so that a remote
    which drips one byte a minute cannot hold a build up for ever.
    """

    threads: int = 8
    attempts: int = 4  # of one request, with no progress in between
    first_delay_s: float = 0.25
    max_delay_s: float = 15.0
    deadline_s: float | None = None

    def find_deadline_s(self, nbytes: int) -> float:
        return 300.0 + nbytes / (1 << 20) if self.deadline_s is None else self.deadline_s

    def find_delay_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row: doubled each time, and spread, so that the machines of a
        fleet do not come back all at once."""
        delay_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** (failures - 1))
        return delay_s * random.uniform(0.5, 1.0)


class Budget:
    """The time that is left to a transfer, and the word to its threads to stop."""

    def __init__(self, remote: str, deadline_s: float) -> None:
        self._remote, self._deadline_s = remote, deadline_s
        self._end_s = time.monotonic() + deadline_s
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        self._is_stopped.set()

    def check(self) -> None:
        """
        Raises:
            CancelledError: stopped.
            DeadlinePassed
        """
        self.wait(0.0)

    def wait(self, delay_s: float) -> None:
        """Wait, unless that is longer than what is left.

        Raises:
            CancelledError, DeadlinePassed
        """
        left_s = self._end_s - time.monotonic()
        if left_s < delay_s or left_s <= 0:
            raise DeadlinePassed(self._remote, f"not done in {self._deadline_s:g} s")
        if self._is_stopped.wait(delay_s):
            raise CancelledError


def retry(step: Callable[[], T], policy: TransferPolicy, budget: Budget, find_offset: Callable[[], int] = int) -> T:
    """What `step` returns, tried again while the remote is merely unavailable.

    `find_offset` says how many bytes the step has behind it: a long transfer may be cut more often than a short one.

    Raises:
        RemoteUnavailable: it still was at the last try.
        CancelledError, DeadlinePassed, and whatever else `step` raises
    """
    failures, offset = 0, find_offset()
    while True:
        budget.check()
        try:
            return step()
        except RemoteUnavailable as error:
            if find_offset() >= offset + PROGRESS_NBYTES:
                failures, offset = 0, find_offset()
            failures += 1
            if failures >= policy.attempts:
                raise
            budget.wait(max(policy.find_delay_s(failures), error.retry_after_s or 0.0))
