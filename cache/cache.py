"""The folder that a build keeps: blobs, actions and file digests under one root."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from loadplan.cache.actions import ActionCache, Artifact, ArtifactIncomplete
from loadplan.cache.check import CheckReport, Progress, RepairReport, check_cache, repair_cache
from loadplan.cache.claims import Claims
from loadplan.cache.digest import digest_file
from loadplan.cache.entries import CacheInfo, Entry, GcReport
from loadplan.cache.error import LoadplanError
from loadplan.cache.file_digests import FileChanged, FileDigests
from loadplan.cache.gc import GRACE_S, collect
from loadplan.cache.lease import TIMEOUT_S, TTL_S, Lease, Leases
from loadplan.cache.pins import Pins
from loadplan.cache.place_folder import new_folder
from loadplan.cache.record import NotReadable
from loadplan.cache.signing import SigningKey, TrustedKeys
from loadplan.cache.store import ABSENT, BlobMissing, BlobStore, DigestMismatch, nbytes_of
from loadplan.cache.write_file import make_folder, temporary_files

_T = TypeVar("_T")  # bytes or a path

from loadplan.cache.entry_trust import EntryTrust

if TYPE_CHECKING:  # a build that finds all it needs here imports nothing of the network
    from loadplan.cache.remotes import Remote, RemoteSet
    from loadplan.cache.transfer import PushReport


class NotCached(LoadplanError, KeyError):
    """The cache has no entry for a key."""

    def __init__(self, key: str, root: Path) -> None:
        super().__init__(key, root)
        self.key, self.root = key, root

    def __str__(self) -> str:  # KeyError's own would print a repr
        return f"{self.root}: has no entry {self.key[:12]}, or not all of its blobs; build it, or pull it"


class CannotMaterialize(LoadplanError, ValueError):
    """A name in an artifact leads out of the folder that it is to be laid out in."""


class Cache:
    """A build's memory below `root`. An absent or read-only root can be read; the first put makes the folders.

    Any number of processes, on any number of machines, may do anything at once. Locks are not needed, and leases save
    work only: what a reader gets is verified and right, or absent.

    `remotes` are what `pull` asks, in order: remotes, or a `RemoteSet`. With `trust`, entries that none of these keys
    signed are misses, wherever they come from; `signer` signs what is put.
    """

    __slots__ = ("_remotes", "actions", "blobs", "claims", "files", "leases", "pin_records", "root")

    def __init__(
        self,
        root: Path,
        remotes: Iterable[Remote] | RemoteSet = (),
        *,
        trust: TrustedKeys | None = None,
        signer: SigningKey | None = None,
    ) -> None:
        self.root = root
        self._remotes = remotes
        self.blobs = BlobStore(root / "blobs")
        self.actions = ActionCache(root / "actions", self.blobs, EntryTrust(trust, signer))
        self.files = FileDigests(root / "file-digests")
        self.claims = Claims(root / "claims")
        self.pin_records = Pins(root / "pins")
        self.leases = Leases(root / "leases")

    # -- entries -------------------------------------------------------------------------------------------------

    def find(self, key: str) -> Artifact | None:
        """The artifact of `key` with every blob verified, hence read if it is new here; a damaged one is a miss."""
        artifact = self.actions.find(key)
        if artifact is None or not all(map(self._is_good, artifact.blobs.values())):
            return None
        self.actions.touch(key)
        return artifact

    def fetch(self, key: str) -> dict[str, bytes] | None:
        """The bytes of the artifact of `key` by name, verified; a damaged one is a miss."""
        artifact = self.actions.find(key)
        if artifact is None:
            return None
        try:
            found = {name: self.blobs.get_bytes(digest) for name, digest in artifact.blobs.items()}
        except (BlobMissing, DigestMismatch):
            return None
        self.actions.touch(key)
        return found

    def put(self, key: str, contents: Mapping[str, bytes], info: Mapping[str, str] | None = None) -> Artifact:
        """File the bytes, then the entry that `fetch` finds them by. Raises `FolderNotWritable`."""
        return self._put(key, contents, self.blobs.put_bytes, info)

    def put_files(
        self, key: str, files: Mapping[str, Path], info: Mapping[str, str] | None = None, *, are_ours: bool = True
    ) -> Artifact:
        """File the files, then the entry that `fetch` and `materialize` find them by.

        Args:
            key: what they were made from.
            files: name in the artifact -> file.
            info: what is worth knowing about them.
            are_ours: nobody will write to them: they may be made read-only, and blobs are hard links to them where they
                lie on the cache's file system. Otherwise they are copied.

        Raises:
            FolderNotWritable: no space, or no permission.
        """
        return self._put(key, files, lambda path: self._put_file(path, are_ours), info)

    def _put(
        self, key: str, contents: Mapping[str, _T], file: Callable[[_T], str], info: Mapping[str, str] | None
    ) -> Artifact:
        """The order of writes that `gc` relies on: blobs, claim, a look at the blobs, entry."""
        blobs = {name: file(content) for name, content in contents.items()}
        while True:
            artifact = self.actions.signed(key, blobs, info)
            with self.claims.hold(blobs.values()):
                try:
                    self.actions.put(key, artifact)
                except ArtifactIncomplete as error:  # gc has taken blobs away that were not claimed yet
                    missing = error.missing
                else:
                    return artifact
            blobs |= {name: file(contents[name]) for name in missing}

    def _put_file(self, path: Path, is_ours: bool) -> str:
        known = self.files.find(path)
        if known is not None and self._is_good(known):
            return known
        return self.blobs.put_file(path, is_ours=is_ours, is_kept=self._is_good)

    def _is_good(self, digest: str) -> bool:
        """Whether the blob is there and right; its bytes are read once, and again when it changed."""
        try:
            return self._digest(self.blobs.path(digest)) == digest
        except (*ABSENT, IsADirectoryError):
            return False
        except PermissionError as error:
            raise NotReadable(error.errno, error.strerror, str(self.blobs.path(digest))) from error

    def materialize(self, artifact: Artifact | str, folder: Path, *, replace: bool = False) -> Path:
        """The artifact's files as `folder`, whole or not at all, verified; returns the folder.

        They are hard links to blobs, read-only, where cache and folder lie on one file system, else copies.

        Args:
            artifact: what to lay out, or its key.
            folder: absent or empty.
            replace: put it in the place of the folder that is there, whatever that holds.

        Raises:
            NotCached: the cache has no entry of this key.
            BlobMissing, DigestMismatch: a blob is gone, or damaged; build it again.
            FolderExists: there is something at `folder`, and it is not to be replaced.
            CannotMaterialize: a name in the artifact leads out of the folder.
            FolderNotWritable: no space, or no permission.
        """
        found = self.actions.find(artifact) if isinstance(artifact, str) else artifact
        if found is None:
            raise NotCached(str(artifact), self.root)
        for name in found.blobs:
            if "\\" in name or "\0" in name or {"", ".", ".."} & set(name.split("/")):
                raise CannotMaterialize(f"{name!r}: leads out of the folder; the artifact was not made by loadplan")
        with new_folder(folder, replace=replace) as draft:
            for name, digest in found.blobs.items():
                self._lay(digest, draft / name)
        if isinstance(artifact, str):
            self.actions.touch(artifact)
        return folder

    def _lay(self, digest: str, place: Path) -> None:
        """The blob as a file at `place`, verified."""
        make_folder(place.parent)
        path = self.blobs.path(digest)
        try:
            self.files.link(path, place)
        except ABSENT as error:
            raise BlobMissing(path, digest) from error
        except OSError:  # another file system, or one without links
            self.blobs.copy_to(digest, place)
            return
        held = self._digest(place)  # of the link: the blob's place may be taken by another copy
        if held != digest:
            raise DigestMismatch(path, digest, held)

    def _digest(self, path: Path) -> str:
        """The digest of a file that nobody writes to, whatever others do with its links and its name meanwhile.

        Where entries must be signed, it is read each time: what is remembered of files lies in the same folder, and
        nobody signed it.
        """
        if self.actions.trust.trusted is not None:
            return digest_file(path)[0]
        try:
            return self.files.digest(path)
        except FileChanged:
            return digest_file(path)[0]

    def entries(self) -> Iterator[Entry]:
        """Each entry whose record is good, in the order of keys."""
        pins: dict[str, list[str]] = {}
        for name, key in self.pins().items():
            pins.setdefault(key, []).append(name)
        for key in self.actions.all_keys():
            times, artifact = self.actions.times(key), self.actions.read(key)
            if times is None or artifact is None:
                continue
            digests = set(artifact.blobs.values())
            yield Entry(
                key=key,
                blobs=artifact.blobs,
                info=artifact.info,
                nbytes=sum(nbytes_of(self.blobs.path(digest)) for digest in digests),
                created_s=times[0],
                last_used_s=times[1],
                pins=tuple(pins.get(key, ())),
                is_complete=all(map(self.blobs.has, digests)),
            )

    def info(self) -> CacheInfo:
        """How much there is, and how much of it is shared; looks at no bytes."""
        entries = list(self.entries())
        sizes = {digest: found.st_size for digest, found in self.blobs.digests()}
        used = {digest for entry in entries for digest in entry.blobs.values()}
        return CacheInfo(
            root=self.root,
            entries=len(entries),
            pins=len(self.pins()),
            blobs=len(sizes),
            nbytes=sum(sizes.values()),
            entry_nbytes=sum(entry.nbytes for entry in entries),
            unused_nbytes=sum(nbytes for digest, nbytes in sizes.items() if digest not in used),
            temporary_nbytes=sum(map(nbytes_of, temporary_files(self.root))),
        )

    # -- remotes -------------------------------------------------------------------------------------------------

    def pull(self, key: str, progress: Callable[[int, int], None] | None = None) -> Artifact | None:
        """`find`, and where that is a miss, the same from the first remote that has it (`transfer.pull`)."""
        from loadplan.cache.transfer import pull

        return pull(self, key, self.remotes, progress=progress)

    def push(
        self, keys: Iterable[str], remote: Remote, progress: Callable[[int, int], None] | None = None
    ) -> PushReport:
        """Make `remote` have the artifacts of `keys` (`transfer.push`)."""
        from loadplan.cache.transfer import push

        return push(self, keys, remote, progress=progress)

    @property
    def remotes(self) -> RemoteSet:
        """The remotes that `pull` asks."""
        from loadplan.cache.remotes import RemoteSet

        if not isinstance(self._remotes, RemoteSet):
            self._remotes = RemoteSet(self._remotes)
        return self._remotes

    # -- lifetime ------------------------------------------------------------------------------------------------

    def lease(self, key: str, *, timeout_s: float = TIMEOUT_S, ttl_s: float = TTL_S) -> AbstractContextManager[Lease]:
        """Whether to build `key`, or another process has just done so: a block, as long as which others wait.

            with cache.lease(key) as lease:
                if lease.is_builder:
                    cache.put_files(key, build())
            artifact = cache.find(key)

        Advisory: after `timeout_s`, or where there can be no lease file, everybody builds. A holder that died on this
        machine is noticed at once, another after `ttl_s` without a sign.
        """
        return self.leases.hold(key, lambda: self.find(key) is not None, timeout_s, ttl_s)

    def pin(self, key: str, name: str) -> None:
        """Keep the entry of `key` from gc, for the reason called `name`; a pin of that name moves to `key`.

        Raises:
            NotCached: there is no such entry.
            FolderNotWritable: no space, or no permission.
        """
        if self.actions.read(key) is None:
            raise NotCached(key, self.root)
        self.pin_records.put(name, key)
        if self.actions.read(key) is None:  # gc, which reads the pins after it has taken the entry away
            self.pin_records.remove(name)
            raise NotCached(key, self.root)

    def unpin(self, name: str) -> None:
        """Take the pin called `name` away. Raises `NoSuchPin`, `FolderNotWritable`."""
        self.pin_records.remove(name)

    def pins(self) -> dict[str, str]:
        """Name -> key, in name order."""
        return self.pin_records.all()

    def gc(
        self,
        max_nbytes: int | None = None,
        max_age_s: float | None = None,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
    ) -> GcReport:
        """Evict entries, least recently used first, and remove what no entry names.

        Args:
            max_nbytes: evict until the blobs take no more than this; None for no bound.
            max_age_s: evict what was not used for so long; None for no bound.
            grace_s: what was written or used so recently stays.
            dry_run: only say what would be done.

        Pinned entries stay. So do blobs of puts in progress, whatever the grace.

        Raises:
            PinsDamaged: it is not known what is pinned.
            FolderNotWritable: the cache is read-only.
        """
        return collect(
            self,
            max_nbytes=max_nbytes,
            max_age_s=max_age_s,
            grace_s=grace_s,
            is_dry_run=dry_run,
            now_s=time.time(),
        )

    def check(self, progress: Progress | None = None) -> CheckReport:
        """Every blob and record that is not what its name says; reads every byte, changes nothing.

        `progress` is called with (bytes read, bytes in all).
        """
        return check_cache(self, progress)

    def repair(self, progress: Progress | None = None, grace_s: float = GRACE_S) -> RepairReport:
        """Remove what `check` finds damaged, so that it is a miss, and temporary files older than `grace_s`.

        Raises:
            FolderNotWritable: the cache is read-only.
        """
        return repair_cache(self, progress, grace_s, time.time())
