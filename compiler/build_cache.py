"""The cache of a project: what was built before."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from loadplan.cache import Artifact, BlobMissing, Cache, DigestMismatch, FileDigests
from loadplan.cache.write_file import make_folder
from loadplan.compiler.build_file import CacheSpec

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class BuildCache:
    """A `Cache`, as loadplan.toml describes it."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.local = Cache(spec.root)

    @property
    def files(self) -> FileDigests:
        """Digests of files, remembered."""
        return self.local.files

    @property
    def headers(self) -> Path:
        """The folder of what is remembered of checkpoints."""
        return self.spec.root / "headers"

    def fetch(self, key: str) -> dict[str, bytes] | None:
        """The bytes of the artifact of `key` by name, verified."""
        return self.local.fetch(key)

    def fetch_one(self, key: str, name: str) -> bytes | None:
        """As `fetch`, of one blob; the others are not read."""
        artifact = self.local.actions.find(key)
        if artifact is None or name not in artifact.blobs:
            return None
        try:
            return self.local.blobs.get_bytes(artifact.blobs[name])
        except (BlobMissing, DigestMismatch):
            return None

    def find(self, key: str) -> Artifact | None:
        """The artifact of `key`, verified."""
        return self.local.find(key)

    def put(self, key: str, contents: Mapping[str, bytes], info: Mapping[str, str]) -> Artifact:
        """File what was built."""
        return self.local.put(key, contents, info)

    def put_files(self, key: str, files: Mapping[str, Path], info: Mapping[str, str]) -> Artifact:
        """As `put`, of files."""
        artifact = Artifact({name: self.local.blobs.put_file(path) for name, path in files.items()}, info)
        self.local.actions.put(key, artifact)
        return artifact

    def materialize(self, artifact: Artifact, folder: Path) -> None:
        """Make `folder` hold the files of `artifact` and nothing else, whole or not at all."""
        make_folder(folder.parent)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            draft = Path(temporary, "artifact")
            draft.mkdir()
            for name, digest in artifact.blobs.items():
                self.local.blobs.copy_to(digest, draft / name)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
