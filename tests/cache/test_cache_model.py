"""The cache against a dict, with damage and left-overs between the steps."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loadplan.cache.actions import Artifact, ArtifactIncomplete
from loadplan.cache.cache import Cache, NotCached
from loadplan.cache.check import repair_cache
from loadplan.cache.digest import digest_bytes
from loadplan.cache.gc import collect
from loadplan.cache.pins import NoSuchPin
from loadplan.cache.store import BlobMissing, DigestMismatch, Problem, ProblemKind

DATA = st.sampled_from([b"", b"a", b"bb", bytes(70_000), b"last"])
KEYS = st.sampled_from([digest_bytes(bytes([i])) for i in range(3)])
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where syncing is for nothing
NAMES = st.lists(st.sampled_from(["plan", "data", "ß"]), unique=True)


class CacheMachine(RuleBasedStateMachine):
    """`blobs`: digest -> (right bytes, bytes on disk); `actions`: key -> artifact, or None when damaged.

    `used`: key -> when it was last used, by a clock of the test's own, which is also set on disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=FAST)
        self.cache = Cache(Path(self.folder.name) / "cache")
        self.blobs: dict[str, tuple[bytes, bytes]] = {}
        self.actions: dict[str, Artifact | None] = {}
        self.strays: set[Path] = set()
        self.pins: dict[str, str] = {}
        self.used: dict[str, int] = {}
        self.clock = 0

    def teardown(self) -> None:
        self.folder.cleanup()

    def note_use(self, key: str) -> None:
        """The library has noted a use just now; replace it by a time that does not depend on the machine's clock."""
        times = self.cache.actions.times(key)
        assert times is not None and times[1] > time.time() - 60
        self.clock += 10
        self.used[key] = self.clock
        os.utime(self.cache.actions.path(key), (self.clock, self.clock))

    def model_complete(self, artifact: Artifact) -> bool:
        return all(digest in self.blobs for digest in artifact.blobs.values())

    def model_find(self, key: str) -> Artifact | None:
        artifact = self.actions.get(key)
        return artifact if artifact and all(digest in self.blobs for digest in artifact.blobs.values()) else None

    def model_fetch(self, key: str) -> dict[str, bytes] | None:
        artifact = self.model_find(key)
        if artifact is None:
            return None
        found = {name: self.blobs[digest] for name, digest in artifact.blobs.items()}
        is_good = all(right == held for right, held in found.values())
        return {name: right for name, (right, _) in found.items()} if is_good else None

    @rule(data=DATA)
    def put_bytes(self, data: bytes) -> None:
        digest = self.cache.blobs.put_bytes(data)
        self.blobs[digest] = (data, data)

    @rule(data=DATA)
    def put_file(self, data: bytes) -> None:
        source = Path(self.folder.name) / "source"
        source.write_bytes(data)
        digest = self.cache.blobs.put_file(source)
        source.write_bytes(b"changed afterwards")
        self.blobs[digest] = (data, data)

    @rule(data=DATA, cut=st.integers(0, 100), byte=st.integers(0, 255))
    def damage_blob(self, data: bytes, cut: int, byte: int) -> None:
        digest = digest_bytes(data)
        if digest not in self.blobs:
            return
        path = self.cache.blobs.path(digest)
        held = path.read_bytes()
        held = held[: len(held) * cut // 100] + bytes([byte]) + held[len(held) * cut // 100 + 1 :]
        path.unlink()
        path.write_bytes(held)
        self.blobs[digest] = (data, held)

    @rule(data=DATA, cut=st.integers(0, 99))
    def truncate_blob(self, data: bytes, cut: int) -> None:
        digest = digest_bytes(data)
        if digest not in self.blobs:
            return
        path = self.cache.blobs.path(digest)
        held = path.read_bytes()
        held = held[: len(held) * cut // 100]
        path.unlink()
        path.write_bytes(held)
        self.blobs[digest] = (data, held)

    @rule(data=DATA)
    def delete_blob(self, data: bytes) -> None:
        if self.blobs.pop(digest_bytes(data), None):
            self.cache.blobs.path(digest_bytes(data)).unlink()

    @rule(number=st.integers(0, 3))
    def leave_temporary_file(self, number: int) -> None:
        self.cache.blobs.folder.mkdir(parents=True, exist_ok=True)
        path = self.cache.blobs.folder / f".tmp-{number}"
        path.write_bytes(b"half")
        self.strays.add(path)

    @rule(key=KEYS, names=NAMES, data=DATA, pin=st.sampled_from([None, "fleet", "a/b"]))
    def put(self, key: str, names: list[str], data: bytes, pin: str | None) -> None:
        contents = {name: data + name.encode() for name in names}
        self.actions[key] = self.cache.put(key, contents, {"names": str(len(names))})
        self.blobs.update((digest_bytes(held), (held, held)) for held in contents.values())
        self.note_use(key)
        if pin is not None:
            self.pin(key, pin)

    @rule(key=KEYS, data=DATA, are_ours=st.booleans())
    def put_files(self, key: str, data: bytes, are_ours: bool) -> None:
        self.clock += 1
        sources = {f"{n}/file": Path(self.folder.name) / f"source-{self.clock}-{n}" for n in range(2)}
        for n, path in enumerate(sources.values()):
            path.write_bytes(data + bytes(n))
        self.actions[key] = self.cache.put_files(key, sources, are_ours=are_ours)
        self.blobs.update((digest_bytes(data + bytes(n)), (data + bytes(n),) * 2) for n in range(2))
        self.note_use(key)

    @rule(key=KEYS)
    def materialize(self, key: str) -> None:
        artifact, wanted, folder = self.model_find(key), self.model_fetch(key), Path(self.folder.name) / "out"
        if artifact is None:
            with pytest.raises(NotCached):
                self.cache.materialize(key, folder, replace=True)
        elif wanted is None:
            with pytest.raises(DigestMismatch):
                self.cache.materialize(key, folder, replace=True)
        else:
            self.cache.materialize(key, folder, replace=True)
            assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == wanted
            self.note_use(key)

    @rule(key=KEYS, name=st.sampled_from(["fleet", "a/b"]))
    def pin_any(self, key: str, name: str) -> None:
        self.pin(key, name)

    def pin(self, key: str, name: str) -> None:
        if self.actions.get(key) is None:
            with pytest.raises(NotCached):
                self.cache.pin(key, name)
        else:
            self.cache.pin(key, name)
            self.pins[name] = key
        assert self.cache.pins() == self.pins

    @rule(name=st.sampled_from(["fleet", "a/b"]))
    def unpin(self, name: str) -> None:
        if name in self.pins:
            self.cache.unpin(name)
            del self.pins[name]
        else:
            with pytest.raises(NoSuchPin):
                self.cache.unpin(name)
        assert self.cache.pins() == self.pins

    @precondition(lambda self: self.actions)
    @rule(limit=st.sampled_from([0, None, 2, 70_000, 70_010]), age=st.sampled_from([None, 0, 35]), is_dry=st.booleans())
    def gc(self, limit: int | None, age: int | None, is_dry: bool) -> None:
        """At a time when nothing is young; ages are counted from now on the test's clock."""
        live = {key: artifact for key, artifact in self.actions.items() if artifact is not None}
        evicted = []
        for key in sorted(live, key=lambda key: self.used[key]):
            left = {digest for artifact in live.values() for digest in artifact.blobs.values()} & self.blobs.keys()
            is_above = limit is not None and sum(len(self.blobs[digest][1]) for digest in left) > limit
            is_old = age is not None and self.clock + 1 - self.used[key] >= age
            if key not in self.pins.values() and (is_above or is_old or not self.model_complete(live[key])):
                del live[key]
                evicted.append(key)
        named = {digest for artifact in live.values() for digest in artifact.blobs.values()}
        gone = {digest: held for digest, (_, held) in self.blobs.items() if digest not in named}

        now = time.time() + 1e6
        report = collect(
            self.cache,
            max_nbytes=limit,
            max_age_s=None if age is None else now - (self.clock + 1) + age,
            grace_s=0.0,
            is_dry_run=is_dry,
            now_s=now,
        )
        assert [entry.key for entry in report.evicted] == evicted
        assert (report.blobs, report.temporaries, report.kept) == (len(gone), len(self.strays), len(live))
        assert report.nbytes == sum(map(len, gone.values())) + len(b"half") * len(self.strays)
        assert report.kept_nbytes == sum(len(held) for _, held in self.blobs.values()) - sum(map(len, gone.values()))
        if not is_dry:
            for key in evicted:
                del self.actions[key]
            for digest in gone:
                del self.blobs[digest]
            self.strays.clear()

    @rule()
    def repair(self) -> None:
        before = set(self.cache.check().problems)
        report = repair_cache(self.cache, None, 0.0, time.time() + 1e6)
        assert (set(report.removed), report.left) == (before, ())
        self.blobs = {digest: held for digest, held in self.blobs.items() if held[0] == held[1]}
        self.actions = {key: found for key, found in self.actions.items() if found and self.model_complete(found)}
        self.strays.clear()
        assert self.cache.check().problems == ()

    @rule(key=KEYS, data=DATA)
    def put_action_only(self, key: str, data: bytes) -> None:
        artifact = Artifact({"only": digest_bytes(data)})
        if digest_bytes(data) in self.blobs:
            self.cache.actions.put(key, artifact)
            self.actions[key] = artifact
            self.note_use(key)
        else:
            with pytest.raises(ArtifactIncomplete):
                self.cache.actions.put(key, artifact)

    @rule(key=KEYS, cut=st.integers(0, 99), tail=st.binary(max_size=3))
    def damage_action(self, key: str, cut: int, tail: bytes) -> None:
        if key not in self.actions:
            return
        path = self.cache.actions.path(key)
        held = path.read_bytes()
        path.write_bytes(held[: len(held) * cut // 100] + tail)
        self.actions[key] = None

    @rule(key=KEYS)
    def delete_action(self, key: str) -> None:
        if key in self.actions:
            del self.actions[key]
            self.cache.actions.path(key).unlink()

    @rule()
    def reopen(self) -> None:
        self.cache = Cache(self.cache.root)

    @rule(data=DATA)
    def get(self, data: bytes) -> None:
        digest, copy = digest_bytes(data), Path(self.folder.name) / "copy"
        copy.write_bytes(b"old")
        right, held = self.blobs.get(digest, (data, None))
        assert self.cache.blobs.has(digest) == (held is not None)
        assert self.cache.blobs.is_good(digest) == (held == right)
        if held == right:
            assert self.cache.blobs.get_bytes(digest) == right
            self.cache.blobs.copy_to(digest, copy)
            assert copy.read_bytes() == right
            return
        error = BlobMissing if held is None else DigestMismatch
        with pytest.raises(error):
            self.cache.blobs.get_bytes(digest)
        with pytest.raises(error):
            self.cache.blobs.copy_to(digest, copy)
        assert copy.read_bytes() == b"old"

    @rule(key=KEYS)
    def fetch(self, key: str) -> None:
        fetched = self.model_fetch(key)
        assert self.cache.actions.find(key) == self.model_find(key)
        assert self.cache.find(key) == (None if fetched is None else self.model_find(key))
        assert self.cache.fetch(key) == fetched
        if fetched is not None:
            self.note_use(key)

    @invariant()
    def check(self) -> None:
        damaged = {self.cache.blobs.path(digest) for digest, (right, held) in self.blobs.items() if right != held}
        problems = {Problem(ProblemKind.DAMAGED, path) for path in damaged}
        problems |= {Problem(ProblemKind.TEMPORARY, path) for path in self.strays}
        found = self.cache.blobs.check()
        assert set(found) == problems
        assert len(found) == len(problems)

        for key, artifact in self.actions.items():
            if artifact is None:
                problems.add(Problem(ProblemKind.DAMAGED, self.cache.actions.path(key)))
            elif self.model_fetch(key) is None:
                problems.add(Problem(ProblemKind.INCOMPLETE, self.cache.actions.path(key)))
        report = self.cache.check()
        assert set(report.problems) == problems
        assert len(report.problems) == len(problems)
        assert (report.blobs, report.entries) == (len(self.blobs), len(self.actions))

    @invariant()
    def entries(self) -> None:
        found = {entry.key: entry for entry in self.cache.entries()}
        good = {key: artifact for key, artifact in self.actions.items() if artifact is not None}
        assert found.keys() == good.keys()
        for key, entry in found.items():
            assert entry.blobs == good[key].blobs
            assert entry.pins == tuple(sorted(name for name, pinned in self.pins.items() if pinned == key))
            assert entry.is_complete == self.model_complete(good[key])
            assert entry.last_used_s == self.used[key]
        info = self.cache.info()
        assert (info.blobs, info.entries, info.pins) == (len(self.blobs), len(good), len(self.pins))
        assert info.nbytes == sum(len(held) for _, held in self.blobs.values())
        assert info.entry_nbytes == sum(entry.nbytes for entry in found.values())


TestCacheModel = CacheMachine.TestCase
TestCacheModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
