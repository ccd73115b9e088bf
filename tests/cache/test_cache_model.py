"""The cache against a dict, with damage and left-overs between the steps."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loadplan.cache.actions import Artifact, ArtifactIncomplete
from loadplan.cache.cache import Cache
from loadplan.cache.digest import digest_bytes
from loadplan.cache.store import BlobMissing, DigestMismatch, Problem, ProblemKind

DATA = st.sampled_from([b"", b"a", b"bb", bytes(70_000), b"last"])
KEYS = st.sampled_from([digest_bytes(bytes([i])) for i in range(3)])
NAMES = st.lists(st.sampled_from(["plan", "data", "ß"]), unique=True)


class CacheMachine(RuleBasedStateMachine):
    """`blobs`: digest -> (right bytes, bytes on disk); `actions`: key -> artifact, or None when damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.cache = Cache(Path(self.folder.name) / "cache")
        self.blobs: dict[str, tuple[bytes, bytes]] = {}
        self.actions: dict[str, Artifact | None] = {}
        self.strays: set[Path] = set()

    def teardown(self) -> None:
        self.folder.cleanup()

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

    @rule(key=KEYS, names=NAMES, data=DATA)
    def put(self, key: str, names: list[str], data: bytes) -> None:
        contents = {name: data + name.encode() for name in names}
        self.actions[key] = self.cache.put(key, contents, {"names": str(len(names))})
        self.blobs.update((digest_bytes(held), (held, held)) for held in contents.values())

    @rule(key=KEYS, data=DATA)
    def put_action_only(self, key: str, data: bytes) -> None:
        artifact = Artifact({"only": digest_bytes(data)})
        if digest_bytes(data) in self.blobs:
            self.cache.actions.put(key, artifact)
            self.actions[key] = artifact
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

    @invariant()
    def check(self) -> None:
        damaged = {self.cache.blobs.path(digest) for digest, (right, held) in self.blobs.items() if right != held}
        problems = {Problem(ProblemKind.DAMAGED, path) for path in damaged}
        problems |= {Problem(ProblemKind.TEMPORARY, path) for path in self.strays}
        found = self.cache.blobs.check()
        assert set(found) == problems
        assert len(found) == len(problems)


TestCacheModel = CacheMachine.TestCase
TestCacheModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
