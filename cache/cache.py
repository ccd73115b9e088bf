"""The folder that a build keeps: blobs, actions and file digests under one root."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loadplan.cache.actions import ActionCache, Artifact
from loadplan.cache.file_digests import FileDigests
from loadplan.cache.store import BlobMissing, BlobStore, DigestMismatch

if TYPE_CHECKING:  # a build that finds all it needs here imports nothing of the network
    from loadplan.cache.remotes import Remote, RemoteSet
    from loadplan.cache.transfer import PushReport


class Cache:
    """A build's memory below `root`. An absent or read-only root can be read; the first put makes the folders.

    `remotes` are what `pull` asks, in order: remotes, or a `RemoteSet`.
    """

    __slots__ = ("_remotes", "actions", "blobs", "files", "root")

    def __init__(self, root: Path, remotes: "Iterable[Remote] | RemoteSet" = ()) -> None:
        self.root = root
        self._remotes = remotes
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

    def pull(self, key: str, progress: Callable[[int, int], None] | None = None) -> Artifact | None:
        """`find`, and where that is a miss, the same from the first remote that has it (`transfer.pull`)."""
        from loadplan.cache.transfer import pull

        return pull(self, key, self.remotes, progress=progress)

    def push(
        self, keys: Iterable[str], remote: "Remote", progress: Callable[[int, int], None] | None = None
    ) -> "PushReport":
        """Make `remote` have the artifacts of `keys` (`transfer.push`)."""
        from loadplan.cache.transfer import push

        return push(self, keys, remote, progress=progress)

    @property
    def remotes(self) -> "RemoteSet":
        """The remotes that `pull` asks."""
        from loadplan.cache.remotes import RemoteSet

        if not isinstance(self._remotes, RemoteSet):
            self._remotes = RemoteSet(self._remotes)
        return self._remotes
