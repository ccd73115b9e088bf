"""Action keys and the artifacts they led to: the answer to "has this been built before?"."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadplan.cache.digest import NotADigest, is_digest
from loadplan.cache.entry_trust import EntryTrust
from loadplan.cache.error import LoadplanError
from loadplan.cache.record import find_record, write_record
from loadplan.cache.store import ABSENT, BlobStore

FORMAT = 1


class BadArtifact(LoadplanError, ValueError):
    """An artifact with a name, digest or note that cannot be written down."""

    def __init__(self, name: object, value: object) -> None:
        super().__init__(name, value)
        self.name, self.value = name, value

    def __str__(self) -> str:
        return f"artifact: {self.name!r}: {self.value!r}; `blobs` maps str to digest, `info` maps str to str"


class ArtifactIncomplete(LoadplanError, ValueError):
    """An artifact that names blobs which are not in the store."""

    def __init__(self, key: str, missing: tuple[str, ...], total: int) -> None:
        super().__init__(key, missing, total)
        self.key, self.missing, self.total = key, missing, total

    def __str__(self) -> str:
        return (
            f"action {self.key[:12]}: {len(self.missing)} of {self.total} blobs are not in the store "
            f"({', '.join(self.missing[:5])}{', …' if self.missing[5:] else ''}); put the blobs first"
        )


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a build made: its files by name, and what is worth knowing about them."""

    blobs: Mapping[str, str]  # name -> digest
    info: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blobs", dict(self.blobs))  # copies: the caller may change theirs
        object.__setattr__(self, "info", dict(self.info))
        for name, digest in self.blobs.items():
            if not isinstance(name, str) or not is_digest(digest):
                raise BadArtifact(name, digest)
        for name, note in self.info.items():
            if not isinstance(name, str) or not isinstance(note, str):
                raise BadArtifact(name, note)


@dataclass(frozen=True, slots=True)
class ActionCache:
    """One record a key at `folder/ab/cdef…`; the artifact's bytes lie in `store`."""

    folder: Path
    store: BlobStore
    trust: EntryTrust = field(default_factory=EntryTrust)  # whose entries are found

    def path(self, key: str) -> Path:
        if not is_digest(key):
            raise NotADigest(key)
        return self.folder / key[:2] / key[2:]

    def find(self, key: str) -> Artifact | None:
        """The artifact of `key`; None when never put, damaged, one of its blobs is gone, or nobody vouches for it.

        The bytes of the blobs are verified by who reads them (`BlobStore.get_bytes`, `copy_to`, `Cache.find`).
        """
        artifact = self.read(key)
        if artifact is None or not all(map(self.store.has, artifact.blobs.values())):
            return None
        return artifact if self.trust.accepts(key, artifact.blobs, artifact.info) else None

    def signed(self, key: str, blobs: Mapping[str, str], info: Mapping[str, str] | None = None) -> Artifact:
        """The artifact that `key` leads to, signed if there is a signer: for what was built here, and nothing else.

        Raises:
            ReservedNote: a note is called like a signature.
        """
        return Artifact(blobs, self.trust.signature_notes(key, blobs, info or {}))

    def all_keys(self) -> Iterator[str]:
        """The keys that have a record, good or not, in order."""
        for path in sorted(self.folder.glob("??/*")):
            key = path.parent.name + path.name
            if is_digest(key):
                yield key

    def read(self, key: str) -> Artifact | None:
        """What the record of `key` says, whether its blobs are there or not; None when it is absent or damaged."""
        return parse_artifact(find_record(self.path(key)), key)

    def times(self, key: str) -> tuple[float, float] | None:
        """When the record was made, and when it was last used, in seconds since 1970; None when it is gone."""
        try:
            found = self.path(key).lstat()
        except ABSENT:
            return None
        return found.st_mtime, max(found.st_mtime, found.st_atime)

    def touch(self, key: str) -> None:
        """Note that `key` is used now, in the record's access time; where it cannot be written it stays as it is."""
        path = self.path(key)
        with suppress(OSError):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def put(self, key: str, artifact: Artifact) -> None:
        """Say that `key` leads to `artifact`: the last step of a build. An earlier entry is replaced.

        Raises:
            ArtifactIncomplete: a blob is not in the store.
        """
        path = self.path(key)
        missing = tuple(name for name, digest in artifact.blobs.items() if not self.store.has(digest))
        if missing:
            raise ArtifactIncomplete(key, missing, len(artifact.blobs))
        write_record(path, {"format": FORMAT, "key": key, "blobs": artifact.blobs, "info": artifact.info})


def parse_artifact(value: object, key: str) -> Artifact | None:
    """The artifact in the record of `key`, or None when the record says anything else."""
    found = artifact_of(value)
    return found[1] if found is not None and found[0] == key else None


def artifact_of(value: object) -> tuple[str, Artifact] | None:
    """Key and artifact in a record, or None when it says anything else."""
    match value:
        case {"format": 1, "key": str(key), "blobs": dict(blobs), "info": dict(info)}:
            try:
                return key, Artifact(blobs, info)
            except BadArtifact:
                return None
        case _:
            return None
