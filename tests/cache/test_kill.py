"""A writer killed before any of its lines leaves a cache that answers rightly and takes the same writes again.

One process forks a child for each line; the child ends by `os._exit`, so no `finally` and no flush runs (case B80).
"""

import os
import subprocess
import sys
from pathlib import Path

from loadplan.cache.cache import Cache
from loadplan.cache.digest import digest_bytes
from loadplan.cache.store import BlobMissing, ProblemKind

SCRIPT = """
import itertools, os, sys
from pathlib import Path
import loadplan.cache.cache, loadplan.cache.digest

root, source, key, work = sys.argv[1:]
loadplan.cache.digest.CHUNK_NBYTES = 20_000  # so that the kill also comes between two chunks of a small file
folder = os.path.dirname(loadplan.cache.cache.__file__)

def run(place):
    cache = loadplan.cache.cache.Cache(place)
    if work == "put":
        cache.put(key, {"plan": b"a plan", "data": bytes(100_000)})
    elif work == "put_file":
        cache.blobs.put_file(Path(source))
    elif work == "copy_to":
        cache.blobs.copy_to(cache.blobs.put_bytes(b"new"), place / "copy")
    else:
        cache.files.digest(Path(source))

def kill_before(count):
    def trace(frame, event, argument):
        nonlocal count
        if os.path.dirname(frame.f_code.co_filename) != folder:
            return None
        if event == "line":
            count -= 1
            if count == 0:
                os._exit(9)
        return trace
    sys.settrace(trace)

for count in itertools.count(1):
    place = Path(root, str(count))
    place.mkdir()
    (place / "copy").write_bytes(b"old")
    child = os.fork()
    if child == 0:
        try:
            kill_before(count)
            run(place)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 9:
        sys.exit(status)
"""

KEY = digest_bytes(b"key")
CONTENTS = {"plan": b"a plan", "data": bytes(100_000)}
LARGE = b"0123456789" * 10_000


def killed_caches(tmp_path: Path, work: str) -> list[Cache]:
    """The cache that each killed child left, by line; the last child ran to its end."""
    root, source = tmp_path / "root", tmp_path / "source"
    root.mkdir()
    source.write_bytes(LARGE)
    os.utime(source, ns=(0, 0))  # old enough to be remembered
    subprocess.run([sys.executable, "-c", SCRIPT, root, source, KEY, work], check=True)
    caches = [Cache(path) for path in sorted(root.iterdir(), key=lambda path: int(path.name))]
    assert len(caches) > 50
    return caches


def assert_nothing_damaged(cache: Cache) -> int:
    """How many temporary files the killed writer left in the store, which are all it may leave."""
    problems = cache.blobs.check()
    assert {problem.kind for problem in problems} <= {ProblemKind.TEMPORARY}
    return len(problems)


def test_put(tmp_path: Path) -> None:
    *killed, finished = killed_caches(tmp_path, "put")
    outcomes, strays = set(), 0
    for cache in killed:
        fetched = cache.fetch(KEY)
        outcomes.add(fetched is not None)
        assert fetched in (None, CONTENTS)
        if cache.actions.find(KEY):
            assert fetched == CONTENTS  # the entry comes last
        strays += assert_nothing_damaged(cache)
        cache.put(KEY, CONTENTS)
        assert cache.fetch(KEY) == CONTENTS
    assert outcomes == {True, False}
    assert strays > 0
    assert finished.fetch(KEY) == CONTENTS
    assert finished.blobs.check() == ()


def test_put_file(tmp_path: Path) -> None:
    *killed, finished = killed_caches(tmp_path, "put_file")
    strays = 0
    for cache in killed:
        try:
            assert cache.blobs.get_bytes(digest_bytes(LARGE)) == LARGE
        except BlobMissing:
            assert not cache.blobs.has(digest_bytes(LARGE))
        strays += assert_nothing_damaged(cache)
        cache.blobs.put_file(tmp_path / "source")
        assert cache.blobs.get_bytes(digest_bytes(LARGE)) == LARGE
    assert strays > 0
    assert finished.blobs.check() == ()
    assert finished.blobs.get_bytes(digest_bytes(LARGE)) == LARGE


def test_copy_to(tmp_path: Path) -> None:
    *killed, finished = killed_caches(tmp_path, "copy_to")
    assert {(cache.root / "copy").read_bytes() for cache in killed} == {b"old", b"new"}
    assert (finished.root / "copy").read_bytes() == b"new"


def test_file_digests(tmp_path: Path) -> None:
    *killed, finished = killed_caches(tmp_path, "file_digests")
    assert list((finished.root / "file-digests").rglob("*"))
    for cache in killed:
        assert cache.files.digest(tmp_path / "source") == digest_bytes(LARGE)
