"""The remotes of a cache, in the order they are asked, and what this process knows of their health."""

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from loadplan.cache.environment import says_yes
from loadplan.cache.remotes.remote import BadRemoteData, Remote, RemoteError

logger = logging.getLogger(__name__)

# A remote that is down or refuses us is left alone for so long, and twice as long each time: a build asks for many
# keys, and each would wait for the same timeout.
REST_S = 60.0

OFFLINE_VARIABLES = ("LOADPLAN_OFFLINE", "HF_HUB_OFFLINE")


class RemoteSet:
    """Remotes in order; the first that has an artifact gives it.

    `write_back`: what a later remote gave is pushed to the earlier ones that may be written to.
    """

    def __init__(self, remotes: Iterable[Remote] = (), *, write_back: bool = False) -> None:
        self.remotes, self.write_back = tuple(remotes), write_back
        self._lock = threading.Lock()
        self._rests_until_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._said: set[tuple[str, type[RemoteError] | None]] = set()

    def __iter__(self) -> Iterator[Remote]:
        """The remotes worth asking now; none when the environment says offline."""
        if self.remotes and (variable := find_offline_variable(os.environ)):
            if self._is_new(variable, None):
                logger.info("%s is set: no remote is contacted", variable)
            return
        for remote in self.remotes:
            if time.monotonic() >= self._rests_until_s.get(remote.name, 0.0):
                yield remote

    def __len__(self) -> int:
        return len(self.remotes)

    def report(self, error: RemoteError) -> None:
        """Say once what is wrong with a remote, and let it rest unless only one entry was bad."""
        if not isinstance(error, BadRemoteData):
            failures = self._failures[error.remote] = self._failures.get(error.remote, 0) + 1
            self._rests_until_s[error.remote] = time.monotonic() + REST_S * 2.0 ** min(failures - 1, 10)
        level = logging.WARNING if self._is_new(error.remote, type(error)) else logging.DEBUG
        logger.log(level, "%s (going on without it)", error)

    def _is_new(self, name: str, kind: type[RemoteError] | None) -> bool:
        with self._lock:
            is_new = (name, kind) not in self._said
            self._said.add((name, kind))
            return is_new


def find_offline_variable(environ: Mapping[str, str]) -> str | None:
    """The variable that forbids to contact any remote, if one does."""
    for name in OFFLINE_VARIABLES:
        if says_yes(environ.get(name, "")):
            return name
    return None
