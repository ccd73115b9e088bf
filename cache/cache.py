"""The folder that a build keeps: blobs, actions and file digests under one root."""

from collections.abc import Mapping
from pathlib import Path

from loadplan.cache.actions import ActionCache, Artifact
from loadplan.cache.file_digests import FileDigests
from loadplan.cache.store import BlobMissing, BlobStore, DigestMismatch


class Cache:
    """A build's memory below `root`. An absent or read-only root can be read; the first put makes the folders."""

    __slots__ = ("actions", "blobs", "files", "root")

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = BlobStore(root / "blobs")
        self.actions = ActionCache(root / "actions", self.blobs)
        self.files = FileDigests(root / "file-digests")

    def find(self, key: str) -> Artifact | None:
        """The artifact of `key` with every blob verified, hence read; a damaged one is a miss."""
        artifact = self.actions.find(key)
        if artifact is None or not all(map(self.blobs.is_good, artifact.blobs.values())):
            return None
        return artifact

    def fetch(self, key: str) -> dict[str, bytes] | None:
        """The bytes of the artifact of `key` by name, verified; a damaged one is a miss."""
        artifact = self.actions.find(key)
        if artifact is None:
            return None
        try:
            return {name: self.blobs.get_bytes(digest) for name, digest in artifact.blobs.items()}
        except (BlobMissing, DigestMismatch):
            return None

    def put(self, key: str, contents: Mapping[str, bytes], info: Mapping[str, str] | None = None) -> Artifact:
        """File the bytes, then the entry that `fetch` finds them by."""
        blobs = {name: self.blobs.put_bytes(data) for name, data in contents.items()}
        artifact = Artifact(blobs, info or {})
        self.actions.put(key, artifact)
        return artifact
