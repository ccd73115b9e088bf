"""A process killed before any of its calls that change the file system: what is left is good, and nothing stays for ever.

As in `test_kill`, a child is forked for each call and ends by `os._exit`. Calls are counted by an audit hook (case B80).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadplan.cache.cache import Cache
from loadplan.cache.check import repair_cache
from loadplan.cache.digest import digest_bytes
from loadplan.cache.gc import collect
from loadplan.cache.lease import Leases
from loadplan.cache.place_folder import remove_drafts
from loadplan.cache.store import ProblemKind

SCRIPT = """
import itertools, os, shutil, sys, time
from pathlib import Path
from loadplan.cache.cache import Cache
from loadplan.cache.check import repair_cache
from loadplan.cache.gc import collect

template, root, key, work = sys.argv[1:]
CALLS = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.utime", "os.truncate"}

def run(place):
    cache, late = Cache(place / "cache"), time.time() + 1e6
    if work in ("put_files", "put_copies"):
        files = {path.name: path for path in sorted((place / "made").iterdir())}
        cache.put_files(key, files, {"n": "2"}, are_ours=work == "put_files")
    elif work == "materialize":
        cache.materialize(key, place / "out", replace=True)
    elif work == "gc":
        collect(cache, max_nbytes=0, max_age_s=None, grace_s=0.0, is_dry_run=False, now_s=late)
    elif work == "repair":
        repair_cache(cache, None, 0.0, late)
    elif work == "pin":
        cache.pin(key, "fleet")
    elif work == "lease":
        with cache.lease(key) as lease:
            if lease.is_builder:
                cache.put(key, {"x": b"x"})

def kill_at(count):
    def hook(event, arguments):
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in CALLS or writes:
            count -= 1
            if count == 0:
                os._exit(9)
    sys.addaudithook(hook)

for count in itertools.count(1):
    place = Path(root, str(count))
    shutil.copytree(template, place)
    child = os.fork()
    if child == 0:
        try:
            kill_at(count)
            run(place)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 9:
        sys.exit(status)
"""

KEY, OTHER = digest_bytes(b"key"), digest_bytes(b"other")
CONTENTS = {"a": b"first" * 1000, "b": b"second"}
KEPT = {"a": CONTENTS["a"], "c": b"kept"}  # shares a blob
LATE_S = 1e6


def killed(tmp_path: Path, work: str) -> Iterator[Path]:
    """The folder that each killed child left; the last child ran to its end."""
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "template", root, KEY, work], check=True)
    places = sorted(root.iterdir(), key=lambda path: int(path.name))
    assert len(places) > 3
    yield from places


def clean(cache: Cache) -> None:
    """What an operator runs a day later; afterwards there is nothing but entries, their blobs and pins."""
    repair_cache(cache, None, 0.0, time.time() + LATE_S)
    collect(cache, max_nbytes=None, max_age_s=None, grace_s=0.0, is_dry_run=False, now_s=time.time() + LATE_S)
    assert cache.check().problems == ()
    entries = list(cache.entries())
    wanted = {cache.actions.path(entry.key) for entry in entries}
    wanted |= {cache.blobs.path(digest) for entry in entries for digest in entry.blobs.values()}
    wanted |= {cache.pin_records.path(name) for name in cache.pins()}
    found = {path for path in cache.root.rglob("*") if path.is_file() and cache.files.folder not in path.parents}
    assert found == wanted


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    (folder / "made").mkdir(parents=True)
    for name, data in CONTENTS.items():
        (folder / "made" / name).write_bytes(data)
    cache = Cache(folder / "cache")
    cache.put(OTHER, KEPT)
    cache.pin(OTHER, "kept")
    return folder


@pytest.mark.parametrize("work", ["put_files", "put_copies"])
def test_put_files(template: Path, tmp_path: Path, work: str) -> None:
    outcomes = []
    for place in killed(tmp_path, work):
        cache = Cache(place / "cache")
        fetched = cache.fetch(KEY)
        outcomes.append(fetched is not None)
        assert fetched in (None, CONTENTS)
        assert cache.fetch(OTHER) == KEPT
        assert {problem.kind for problem in cache.check().problems} <= {ProblemKind.TEMPORARY}
        files = {name: place / "made" / name for name in CONTENTS}
        assert {name: path.read_bytes() for name, path in files.items()} == CONTENTS
        cache.put_files(KEY, files, are_ours=work == "put_files")
        assert cache.fetch(KEY) == CONTENTS
        clean(cache)
        assert (cache.fetch(KEY), cache.fetch(OTHER)) == (CONTENTS, KEPT)
    assert set(outcomes) == {True, False}
    assert outcomes == sorted(outcomes)  # never a hit, then a miss


def test_materialize(template: Path, tmp_path: Path) -> None:
    Cache(template / "cache").put(KEY, CONTENTS)
    (template / "out").mkdir()
    (template / "out" / "old").write_bytes(b"old")
    states = []
    for place in killed(tmp_path, "materialize"):
        out = place / "out"
        held = {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else None
        assert held in ({"old": b"old"}, None, CONTENTS)
        states.append(held == CONTENTS)
        cache = Cache(place / "cache")
        cache.materialize(KEY, out, replace=True)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == CONTENTS
        remove_drafts(out, time.time() + LATE_S)
        assert sorted(path.name for path in place.iterdir()) == ["cache", "made", "out"]
        clean(cache)
    assert states[-1] and not states[0]


def test_gc(template: Path, tmp_path: Path) -> None:
    cache = Cache(template / "cache")
    cache.put(KEY, CONTENTS)
    cache.blobs.put_bytes(b"nobody's")
    outcomes = set()
    for place in killed(tmp_path, "gc"):
        cache = Cache(place / "cache")
        fetched = cache.fetch(KEY)
        outcomes.add(fetched is not None)
        assert fetched in (None, CONTENTS)
        assert cache.fetch(OTHER) == KEPT  # pinned
        assert cache.check().is_good
        cache.put(KEY, CONTENTS)
        assert cache.fetch(KEY) == CONTENTS
        clean(cache)
    assert outcomes == {True, False}


def test_repair(template: Path, tmp_path: Path) -> None:
    cache = Cache(template / "cache")
    artifact = cache.put(KEY, CONTENTS)
    (path := cache.blobs.path(artifact.blobs["b"])).chmod(0o644)
    path.write_bytes(b"damaged")
    (cache.blobs.folder / ".tmp-left").write_bytes(b"half")
    (damaged := cache.actions.path(digest_bytes(b"third"))).parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"half a record")
    for place in killed(tmp_path, "repair"):
        cache = Cache(place / "cache")
        assert cache.fetch(KEY) is None
        assert cache.fetch(OTHER) == KEPT
        clean(cache)
        assert {entry.key for entry in cache.entries()} == {OTHER}
        cache.put(KEY, CONTENTS)
        assert cache.fetch(KEY) == CONTENTS
    assert cache.check().problems == ()


def test_pin(template: Path, tmp_path: Path) -> None:
    Cache(template / "cache").put(KEY, CONTENTS)
    states = []
    for place in killed(tmp_path, "pin"):
        cache = Cache(place / "cache")
        states.append("fleet" in cache.pins())
        cache.pin(KEY, "fleet")
        assert cache.pins() == {"fleet": KEY, "kept": OTHER}
        clean(cache)
    assert set(states) == {True, False}


def test_lease(template: Path, tmp_path: Path) -> None:
    """The next one need not wait for a holder that is dead."""

    def refuse(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s")

    held = 0
    for place in killed(tmp_path, "lease"):
        cache = Cache(place / "cache")
        held += cache.leases.find(KEY) is not None
        found = cache.fetch(KEY)
        assert found in (None, {"x": b"x"})
        leases = Leases(cache.leases.folder, sleep=refuse)
        with leases.hold(KEY, lambda found=found: found is not None) as lease:  # type: ignore[misc]
            assert lease.is_builder == (found is None)
        assert leases.paths() == []
        clean(cache)
    assert held > 3
