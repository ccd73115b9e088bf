"""The cache of a project with its remotes and policies: what was built before, here or elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from loadplan.cache import (
    Artifact,
    BlobMissing,
    Cache,
    DigestMismatch,
    FileDigests,
    TrustedKeys,
    read_signing_key,
)
from loadplan.cache.error import LoadplanError
from loadplan.compiler.build_file import BuildFileError, CacheSpec, RemoteSpec

if TYPE_CHECKING:  # a build that finds all it needs here imports nothing of the network
    from loadplan.cache.remotes import Remote
    from loadplan.cache.transfer import PushReport

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


class BuildCache:
    """A `Cache`, asked through the policies of loadplan.toml; remotes are opened when the first key is not here."""

    def __init__(self, spec: CacheSpec) -> None:
        """The cache of a project; the keys that it names are read now. Raises `KeyFileError` and `OSError`."""
        self.spec = spec
        self._trust = TrustedKeys.read(spec.trust.keys) if spec.trust.keys else None
        self._signer = None if spec.trust.sign_with is None else read_signing_key(spec.trust.sign_with)
        self.local = Cache(spec.root, trust=self._trust, signer=self._signer)

    @property
    def files(self) -> FileDigests:
        """Digests of files, remembered."""
        return self.local.files

    @property
    def headers(self) -> Path:
        """The folder of what is remembered of checkpoints."""
        return self.spec.root / "headers"

    @cached_property
    def remotes(self) -> Mapping[str, Remote]:
        """All remotes by name, in order. Raises `BadRemoteAddress` and `RemoteLibraryMissing`."""
        return {spec.name: open_spec(spec) for spec in self.spec.remotes}

    @cached_property
    def _asking(self) -> Cache:
        """The cache that pulls: one, so that a remote that is down is asked once."""
        return Cache(self.spec.root, self.remotes.values(), trust=self._trust, signer=self._signer)

    @property
    def _may_pull(self) -> bool:
        return self.spec.pull == "auto" and bool(self.spec.remotes)

    def fetch(self, key: str) -> dict[str, bytes] | None:
        """The bytes of the artifact of `key` by name, verified; from a remote where they are not here."""
        found = self.local.fetch(key)
        if found is not None or not self._may_pull or self._asking.pull(key) is None:
            return found
        return self.local.fetch(key)

    def fetch_one(self, key: str, name: str) -> bytes | None:
        """As `fetch`, of one blob; the others are not read where it is here."""
        artifact = self.local.actions.find(key)
        if artifact is None or name not in artifact.blobs:
            return (self.fetch(key) or {}).get(name)
        try:
            return self.local.blobs.get_bytes(artifact.blobs[name])
        except (BlobMissing, DigestMismatch):
            return (self.fetch(key) or {}).get(name)

    def find(self, key: str, progress: Progress | None = None) -> Artifact | None:
        """The artifact of `key`, verified; from a remote where it is not here."""
        found = self.local.find(key)
        if found is not None or not self._may_pull:
            return found
        return self._asking.pull(key, progress)

    def put(self, key: str, contents: Mapping[str, bytes], info: Mapping[str, str]) -> Artifact:
        """File what was built; and give it to the remotes, if `push = "auto"`."""
        artifact = self.local.put(key, contents, info)
        self._share(key)
        return artifact

    def put_files(self, key: str, files: Mapping[str, Path], info: Mapping[str, str]) -> Artifact:
        """As `put`, of files."""
        artifact = self.local.put_files(key, files, info)
        self._share(key)
        return artifact

    def put_blobs(self, key: str, blobs: Mapping[str, str], info: Mapping[str, str]) -> Artifact:
        """As `put`, of what the store has already."""
        artifact = self.local.actions.signed(key, blobs, info)
        self.local.actions.put(key, artifact)
        self._share(key)
        return artifact

    def push(self, keys: Iterable[str], progress: Progress | None = None) -> dict[str, PushReport]:
        """Give the artifacts of `keys` to every remote that may be written; what was sent, by remote.

        Raises:
            BuildFileError: there is no such remote.
            RemoteError: a remote fails.
            NotBuilt: an artifact is not here.
        """
        wanted = list(keys)
        targets = {name: remote for name, remote in self.remotes.items() if not remote.read_only}
        if not targets:
            raise BuildFileError(
                "loadplan.toml: no remote may be written; add [cache.remote.NAME] with a url and read_only = false"
            )
        return {name: self.local.push(wanted, remote, progress) for name, remote in targets.items()}

    def _share(self, key: str) -> None:
        if self.spec.push != "auto":
            return
        try:
            self.push([key])
        except LoadplanError as error:  # a remote that fails never fails a build
            logger.warning("%s (not pushed; `doit push` does it later)", error)


def open_spec(spec: RemoteSpec) -> Remote:
    """The remote that `spec` describes; nothing is contacted yet. Raises `BadRemoteAddress`, `RemoteLibraryMissing`."""
    from loadplan.cache.remotes import RemoteOptions, open_remote

    options = RemoteOptions(
        read_only=spec.read_only,
        timeout_s=spec.timeout_s,
        token_env=spec.token_env,
        login_env=spec.login_env,
        ca_file=spec.ca_file,
        zstd=spec.zstd,
        storage=spec.storage,
    )
    return open_remote(spec.url, options)
