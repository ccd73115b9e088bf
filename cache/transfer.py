"""Artifacts between the local store and remotes. Nothing enters the store unverified; the entry is written last.

`pull` answers None for whatever is the remote's fault, after one warning: a build goes on without it. `push` is asked
for by somebody who wants to know, so it raises. Both may be interrupted anywhere and run again; Ctrl-C ends them with
the next bytes that come, or, where a server has fallen silent, after the remote's timeout.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loadplan.cache.actions import Artifact, ArtifactIncomplete, BadArtifact
from loadplan.cache.digest import digest_file
from loadplan.cache.error import LoadplanError
from loadplan.cache.remotes.blob_streams import OutgoingBlob, receive_blob
from loadplan.cache.remotes.remote import (
    BadRemoteData,
    Remote,
    RemoteEntry,
    RemoteError,
    RemoteOffline,
    RemoteReadOnly,
    RemoteUnavailable,
    find_name_fault,
)
from loadplan.cache.remotes.remote_set import RemoteSet, find_offline_variable
from loadplan.cache.remotes.retry import Budget, TransferPolicy, retry
from loadplan.cache.store import BlobMissing, DigestMismatch

if TYPE_CHECKING:
    from loadplan.cache.cache import Cache

logger = logging.getLogger(__name__)

T = TypeVar("T")

Progress = Callable[[int, int], None]  # (done_nbytes, total_nbytes); done shrinks when a blob has to start anew

DEFAULT_POLICY = TransferPolicy()


class NotBuilt(LoadplanError, KeyError):
    """An artifact is to be pushed that the local store does not have."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"action {self.key[:12]}: no complete artifact in the local store; build it first"


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did."""

    entries: int  # written; those already there as they are do not count
    blobs: int  # sent
    nbytes: int  # sent
    known_nbytes: int  # of blobs that were there already


class _Progress:
    """Adds up what the threads of one transfer did, and tells the caller; ends them when the budget says so."""

    def __init__(self, total_nbytes: int, tell: Progress | None, budget: Budget) -> None:
        self._done, self._total, self._tell, self._budget = 0, total_nbytes, tell, budget
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        self._budget.check()
        if self._tell is None:
            return
        with self._lock:
            self._done += nbytes
            self._tell(self._done, self._total)


def pull(
    cache: "Cache",
    key: str,
    remotes: RemoteSet,
    *,
    policy: TransferPolicy = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> Artifact | None:
    """The artifact of `key`, from the store if it is there and good, else from the first remote that has it.

    Raises:
        FolderNotWritable: the local store takes no new file.
        Whatever `progress` raises.
    """
    found = cache.find(key)
    if found is not None:
        return found
    passed: list[Remote] = []
    for remote in remotes:
        try:
            entry = _pull_from(cache, key, remote, policy, progress)
        except RemoteError as error:
            remotes.report(error)
            continue
        if entry is None:
            passed.append(remote)
            continue
        if remotes.write_back:
            _write_back(cache, key, passed, remotes, policy)
        return entry.artifact
    return None


def push(
    cache: "Cache",
    keys: Iterable[str],
    remote: Remote,
    *,
    policy: TransferPolicy = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> PushReport:
    """Make the remote have the artifacts of `keys`; what it has already is not sent.

    Raises:
        RemoteReadOnly, RemoteOffline, RemoteUnavailable, RemoteRefused, DeadlinePassed
        NotBuilt: the store has no artifact for a key.
        BlobMissing, DigestMismatch: a blob of the store is gone or damaged; it is not sent.
    """
    if remote.read_only:
        raise RemoteReadOnly(remote.name, "opened for reading only")
    if variable := find_offline_variable(environ):
        raise RemoteOffline(remote.name, f"{variable} is set")
    entries = {key: _get_entry(cache, key) for key in dict.fromkeys(keys)}
    sizes = {digest: nbytes for entry in entries.values() for digest, nbytes in entry.nbytes.items()}
    budget = Budget(remote.name, policy.find_deadline_s(sum(sizes.values())))
    told = _Progress(sum(sizes.values()), progress, budget)
    start_s = time.monotonic()

    def send(digest: str, nbytes: int) -> bool:
        if retry(partial(remote.has_blob, digest, nbytes), policy, budget):
            told.add(nbytes)
            return False
        path = _get_blob(cache, digest)
        retry(partial(remote.put_blob, OutgoingBlob(path, digest, nbytes, told.add)), policy, budget)
        return True

    def send_entry(key: str) -> bool:
        try:
            if retry(partial(remote.find_entry, key), policy, budget) == entries[key]:
                return False
        except BadRemoteData:
            pass  # replaced now
        retry(partial(remote.put_entry, key, entries[key]), policy, budget)
        return True

    sent = _run_all({digest: partial(send, digest, nbytes) for digest, nbytes in sizes.items()}, policy, budget)
    written = _run_all({key: partial(send_entry, key) for key in entries}, policy, budget)
    sent_nbytes = sum(sizes[digest] for digest, is_sent in sent.items() if is_sent)
    report = PushReport(
        entries=sum(written.values()),
        blobs=sum(sent.values()),
        nbytes=sent_nbytes,
        known_nbytes=sum(sizes.values()) - sent_nbytes,
    )
    logger.info(
        "pushed %d of %d artifacts to %s: %d bytes sent, %d were there, %.1f s",
        report.entries,
        len(entries),
        remote.name,
        report.nbytes,
        report.known_nbytes,
        time.monotonic() - start_s,
    )
    return report


def _pull_from(
    cache: "Cache", key: str, remote: Remote, policy: TransferPolicy, progress: Progress | None
) -> RemoteEntry | None:
    start_s = time.monotonic()
    entry = retry(partial(remote.find_entry, key), policy, Budget(remote.name, policy.find_deadline_s(0)))
    if entry is None or not cache.actions.trust.accepts(key, entry.artifact.blobs, entry.artifact.info, remote.name):
        return None
    missing = {digest: nbytes for digest, nbytes in entry.nbytes.items() if not cache.blobs.is_good(digest)}
    total_nbytes = sum(missing.values())
    _check_space(cache, remote, key, total_nbytes)
    budget = Budget(remote.name, policy.find_deadline_s(total_nbytes))
    told = _Progress(total_nbytes, progress, budget)

    def receive(digest: str, nbytes: int) -> None:
        with receive_blob(remote.name, cache.blobs, digest, nbytes, told.add) as blob:

            def fetch() -> None:
                if blob.offset < nbytes:
                    remote.fetch_blob(blob)
                if blob.offset < nbytes:
                    raise RemoteUnavailable(
                        remote.name, f"blob {digest[:12]} ended after {blob.offset} of {nbytes} bytes"
                    )

            retry(fetch, policy, budget, lambda: blob.offset)
            if blob.is_resumed and not blob.is_right():  # what was left of an earlier transfer was bad
                blob.restart()
                retry(fetch, policy, budget, lambda: blob.offset)

    _run_all({digest: partial(receive, digest, nbytes) for digest, nbytes in missing.items()}, policy, budget)
    try:
        cache.actions.put(key, entry.artifact)
    except ArtifactIncomplete as error:  # somebody emptied the store meanwhile
        raise BadRemoteData(remote.name, f"pulled blobs are gone again: {error}") from error
    logger.info(
        "pulled %s from %s: %d blobs, %d bytes of %d, %.1f s",
        key[:12],
        remote.name,
        len(missing),
        total_nbytes,
        entry.total_nbytes,
        time.monotonic() - start_s,
    )
    return entry


def _check_space(cache: "Cache", remote: Remote, key: str, nbytes: int) -> None:
    """Refuse what cannot fit before the disk is full of it; a hostile entry may claim any size."""
    folder = cache.root
    while not folder.exists():
        folder = folder.parent
    free_nbytes = shutil.disk_usage(folder).free
    if nbytes > free_nbytes:
        raise BadRemoteData(remote.name, f"{key[:12]} needs {nbytes} bytes, and {cache.root} has {free_nbytes} free")


def _get_entry(cache: "Cache", key: str) -> RemoteEntry:
    artifact = cache.actions.find(key)
    if artifact is None:
        raise NotBuilt(key)
    for name, digest in artifact.blobs.items():
        if find_name_fault(name):  # the other side would refuse it
            raise BadArtifact(name, digest)
    sizes = {}
    for digest in dict.fromkeys(artifact.blobs.values()):
        path = cache.blobs.path(digest)
        try:
            sizes[digest] = path.stat().st_size
        except FileNotFoundError as error:
            raise BlobMissing(path, digest) from error
    return RemoteEntry(artifact, sizes)


def _get_blob(cache: "Cache", digest: str) -> Path:
    """Where the blob is, its bytes verified."""
    path = cache.blobs.path(digest)
    try:
        found, _ = digest_file(path)
    except FileNotFoundError as error:
        raise BlobMissing(path, digest) from error
    if found != digest:
        raise DigestMismatch(path, digest, found)
    return path


def _write_back(
    cache: "Cache", key: str, earlier: Iterable[Remote], remotes: RemoteSet, policy: TransferPolicy
) -> None:
    for remote in earlier:
        if remote.read_only:
            continue
        try:
            push(cache, [key], remote, policy=policy)
        except RemoteError as error:
            remotes.report(error)


def _run_all(tasks: dict[str, Callable[[], T]], policy: TransferPolicy, budget: Budget) -> dict[str, T]:
    """What each task returns; on the first error, or Ctrl-C, the others are stopped and waited for."""
    with ThreadPoolExecutor(max(1, min(policy.threads, len(tasks)))) as threads:
        futures = {threads.submit(task): name for name, task in tasks.items()}
        try:
            return {futures[future]: future.result() for future in as_completed(futures)}
        except BaseException:
            budget.stop()
            threads.shutdown(wait=True, cancel_futures=True)
            raise
