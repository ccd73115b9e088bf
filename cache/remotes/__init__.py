"""Places that machines share artifacts through: a folder, whatever fsspec reaches, a server of Bazel's HTTP cache.

A remote is asked and never trusted; `loadplan.cache.transfer` moves artifacts to and from it. Read in this order:

    remote          what each can do, what it may answer, how it fails
    blob_streams    blobs on their way in and out: bounded, digested, resumed
    action_result   the message of Bazel's protocol
    entry_format    an entry as bytes
    directory, fsspec_remote, http_remote (over http_client)
    open_remote     address and options -> remote
    retry           trying again, in bounded time
    remote_set      several remotes in order, and their health
"""

from loadplan.cache.remotes.action_result import BadActionResult
from loadplan.cache.remotes.directory import DirectoryRemote
from loadplan.cache.remotes.fsspec_remote import FsspecRemote
from loadplan.cache.remotes.http_client import Login
from loadplan.cache.remotes.http_remote import HttpRemote
from loadplan.cache.remotes.open_remote import BadRemoteAddress, RemoteOptions, open_remote
from loadplan.cache.remotes.remote import (
    BadRemoteData,
    DeadlinePassed,
    Remote,
    RemoteEntry,
    RemoteError,
    RemoteLibraryMissing,
    RemoteOffline,
    RemoteReadOnly,
    RemoteRefused,
    RemoteUnavailable,
)
from loadplan.cache.remotes.remote_set import RemoteSet
from loadplan.cache.remotes.retry import TransferPolicy

__all__ = [
    "BadActionResult",
    "BadRemoteAddress",
    "BadRemoteData",
    "DeadlinePassed",
    "DirectoryRemote",
    "FsspecRemote",
    "HttpRemote",
    "Login",
    "Remote",
    "RemoteEntry",
    "RemoteError",
    "RemoteLibraryMissing",
    "RemoteOffline",
    "RemoteOptions",
    "RemoteReadOnly",
    "RemoteRefused",
    "RemoteSet",
    "RemoteUnavailable",
    "TransferPolicy",
    "open_remote",
]
