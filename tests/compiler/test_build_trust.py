"""`[trust]` in loadplan.toml: what is built is signed, and what nobody trusted signed is built again."""

from __future__ import annotations

from pathlib import Path

import pytest
from keys import write_private, write_public

from loadplan.cache import KeyFileError, digest_bytes
from loadplan.cache.file_digests import FileState
from loadplan.compiler.build_cache import BuildCache
from loadplan.compiler.build_file import CacheSpec, TrustSpec

KEY, CONTENTS = digest_bytes(b"key"), {"plan": b"a plan"}


def _open(folder: Path, trust: TrustSpec) -> BuildCache:
    return BuildCache(CacheSpec(folder / "cache", None, 0.0, "never", "never", (), trust))


@pytest.fixture
def trust(tmp_path: Path) -> TrustSpec:
    return TrustSpec((write_public(tmp_path, "ci"),), write_private(tmp_path, "ci"))


def test_what_is_built_is_found_again(tmp_path: Path, trust: TrustSpec) -> None:
    cache = _open(tmp_path, trust)
    cache.put(KEY, CONTENTS, {})
    assert cache.fetch(KEY) == CONTENTS
    digest = cache.local.blobs.put_bytes(b"more")
    cache.put_blobs(KEY, {"plan": digest}, {})
    assert cache.fetch_one(KEY, "plan") == b"more"
    (tmp_path / "file").write_bytes(b"from a file")
    cache.put_files(KEY, {"plan": tmp_path / "file"}, {})
    assert _open(tmp_path, trust).fetch(KEY) == {"plan": b"from a file"}


def test_what_others_put_is_not(tmp_path: Path, trust: TrustSpec) -> None:
    _open(tmp_path, TrustSpec()).put(KEY, CONTENTS, {})
    cache = _open(tmp_path, trust)
    assert (cache.fetch(KEY), cache.find(KEY), cache.fetch_one(KEY, "plan")) == (None, None, None)
    assert _open(tmp_path, TrustSpec()).fetch(KEY) == CONTENTS


def test_remembered_digests_are_not_believed(tmp_path: Path, trust: TrustSpec) -> None:
    """They lie beside the blobs, unsigned: who can write one can write the other."""
    cache = _open(tmp_path, trust)
    digest = cache.put(KEY, CONTENTS, {}).blobs["plan"]
    path = cache.local.blobs.path(digest)
    path.unlink()
    path.write_bytes(b"A plan")
    cache.local.files._remember(FileState.of(path), digest)
    assert cache.local.files.digest(path) == digest  # the lie
    assert cache.find(KEY) is None
    assert _open(tmp_path, TrustSpec()).local._is_good(digest)


def test_keys_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "ci.pub.pem").write_bytes(b"no key")
    with pytest.raises(KeyFileError, match=r"ci\.pub\.pem: is no public key"):
        _open(tmp_path, TrustSpec((tmp_path / "ci.pub.pem",)))
    with pytest.raises(FileNotFoundError):
        _open(tmp_path, TrustSpec((), tmp_path / "absent.pem"))
