"""What every remote can do, what it may answer, and how it fails.

A remote is never trusted. It may be down, slow, full, half-synced or hostile: whatever it answers is bounded before it
is read and checked before it is used, and each way to fail has one of the errors below.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from loadplan.cache.actions import Artifact, BadArtifact
from loadplan.cache.digest import is_digest
from loadplan.cache.error import LoadplanError

if TYPE_CHECKING:
    from loadplan.cache.remotes.blob_streams import IncomingBlob, OutgoingBlob

MAX_ENTRY_NBYTES = 16 << 20  # of one action's entry: room for 100,000 files with names of 80 bytes
MAX_FILES = 100_000  # of one artifact
MAX_NAME_NBYTES = 1024
MAX_BLOB_NBYTES = 1 << 40


class RemoteError(LoadplanError, OSError):
    """A remote did not do what it was asked; `remote` names it, without any secret."""

    advice = "look at its own log"

    def __init__(self, remote: str, reason: str) -> None:
        super().__init__(remote, reason)
        self.remote, self.reason = remote, reason

    def __str__(self) -> str:
        return f"remote {self.remote}: {self.reason}; {self.advice}"


class RemoteUnavailable(RemoteError):
    """Down, overloaded, or cut off: the same may work later. The only error that is tried again."""

    advice = "check that it is up and can be reached from here"

    def __init__(self, remote: str, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(remote, reason)
        self.retry_after_s = retry_after_s  # what the remote asked for, if it did


class RemoteRefused(RemoteError):
    """It answered, and the answer is no: trying again changes nothing."""

    advice = "check the address, the login and what it may do there"


class BadRemoteData(RemoteError):
    """An entry or blob that is damaged, incomplete or not what it is filed under."""

    advice = "nothing of it was used; push the artifact again to replace it"


class DeadlinePassed(RemoteError, TimeoutError):
    """A transfer took longer than it may."""

    advice = "allow it more time (deadline_s), or find out why it is slow"


class RemoteReadOnly(RemoteError, PermissionError):
    """Something was to be pushed to a remote that is opened for reading."""

    advice = "open it with read_only = false where pushing is meant"


class RemoteOffline(RemoteError):
    """Something was to be pushed while no remote may be contacted."""

    advice = "unset the variable to go online"


class RemoteLibraryMissing(LoadplanError, ImportError):
    """A kind of remote needs a package that is not installed."""

    def __init__(self, address: str, package: str, install: str) -> None:
        super().__init__(address, package, install)
        self.address, self.package, self.install = address, package, install

    def __str__(self) -> str:
        return f"remote {self.address}: needs {self.package}, which is not installed; run pip install {self.install!r}"


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """What a remote has, or is to have, under an action key: an artifact, and the size of each blob in it."""

    artifact: Artifact
    nbytes: Mapping[str, int]  # digest -> nbytes

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())


class Remote(Protocol):
    """A place that keeps artifacts. All methods may be called from several threads at once.

    Each may raise `RemoteUnavailable` and `RemoteRefused`; those that bring data also `BadRemoteData`.
    """

    @property
    def name(self) -> str:
        """The address, for messages and logs: without login, password or query."""

    @property
    def read_only(self) -> bool: ...

    def find_entry(self, key: str) -> RemoteEntry | None:
        """What is filed under the action key, checked (`check_entry`), or None."""

    def put_entry(self, key: str, entry: RemoteEntry) -> None:
        """File the entry; its blobs are there already."""

    def has_blob(self, digest: str, nbytes: int) -> bool:
        """Whether a blob of this digest and size is there; its bytes are not looked at."""

    def fetch_blob(self, blob: "IncomingBlob") -> None:
        """Write the blob's bytes from `blob.offset` on; a remote without ranges calls `blob.restart()` first."""

    def put_blob(self, blob: "OutgoingBlob") -> None:
        """File the blob so that readers see all of it or, as far as the remote can, nothing."""

    def close(self) -> None:
        """Let go of connections; the remote may still be used."""


def check_entry(remote: str, files: Iterable[tuple[str, str, int]], info: Mapping[str, str]) -> RemoteEntry:
    """The entry with these files, each (name, digest, nbytes).

    Raises:
        BadRemoteData: a name that is not a plain relative path, is there twice or too long; a digest that is none or
            has two sizes; a size out of bounds; too many files; a note that is not text.
    """
    blobs: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, digest, nbytes in files:
        fault = find_name_fault(name)
        if fault:
            raise BadRemoteData(remote, f"an entry names a file {name[:80]!r}: {fault}")
        if name in blobs:
            raise BadRemoteData(remote, f"an entry names {name[:80]!r} twice")
        if not is_digest(digest):
            raise BadRemoteData(remote, f"an entry has no digest for {name[:80]!r}")
        if not 0 <= nbytes <= MAX_BLOB_NBYTES or sizes.setdefault(digest, nbytes) != nbytes:
            raise BadRemoteData(remote, f"an entry gives {name[:80]!r} {nbytes} bytes")
        if len(blobs) == MAX_FILES:
            raise BadRemoteData(remote, f"an entry has more than {MAX_FILES} files")
        blobs[name] = digest
    try:
        return RemoteEntry(Artifact(blobs, info), sizes)
    except BadArtifact as error:
        raise BadRemoteData(remote, f"an entry has a note {error.name!r} that is not text") from error


def find_name_fault(name: str) -> str | None:
    """Why a file of an artifact may not have this name; None when it may.

    Names become paths below somebody's folder: nothing may lead out of it.
    """
    if not name:
        return "it is empty"
    try:
        if len(name.encode()) > MAX_NAME_NBYTES:
            return f"it is longer than {MAX_NAME_NBYTES} bytes"
    except UnicodeEncodeError:
        return "it is not Unicode"
    if not name.isprintable() or "\\" in name or ":" in name:
        return "it has a backslash, a colon or a control character"
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        return "it is not a plain relative path"
    return None
