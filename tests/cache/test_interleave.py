"""One process does all of its work between any two calls of another: whatever the order, a put keeps its blobs.

The outer work runs in a child with an audit hook; before its n-th call to the file system, another child does the inner
work from beginning to end, and the outer one goes on. All n are tried.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadplan.cache.cache import Cache
from loadplan.cache.digest import digest_bytes
from loadplan.cache.gc import collect

SCRIPT = """
import itertools, os, shutil, sys, time
from pathlib import Path
from loadplan.cache.cache import Cache, NotCached
from loadplan.cache.gc import collect

template, root, key, outer, inner = sys.argv[1:]
CALLS = {"open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.chmod", "os.utime", "os.scandir", "os.listdir"}
CONTENTS = {"a": b"first" * 1000, "b": b"second"}

def run(place, work):
    cache, soon = Cache(place / "cache"), time.time() + 10
    if work == "put":
        cache.put(key, CONTENTS)
    elif work == "put_files":
        cache.put_files(key, {name: place / "made" / name for name in CONTENTS})
    elif work == "collect":  # nothing is evicted, nothing is young
        collect(cache, max_nbytes=None, max_age_s=None, grace_s=0.0, is_dry_run=False, now_s=soon)
    elif work == "evict":
        collect(cache, max_nbytes=0, max_age_s=None, grace_s=0.0, is_dry_run=False, now_s=soon)
    elif work == "pin":
        try:
            cache.pin(key, "fleet")
        except NotCached:
            (place / "refused").touch()
    elif work == "fetch":
        found = cache.fetch(key)
        assert found in (None, CONTENTS)
        (place / "fetched").write_text("hit" if found else "miss")
    elif work == "materialize":
        try:
            cache.materialize(key, place / "out")
        except LookupError:
            (place / "refused").touch()

def put_half(place):
    # Up to the look at the blobs; the entry is written when the outer work is over. Returns what lets it go on.
    (looked, says), (goes_on, let) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        def hook(event, arguments):
            if event == "open" and "/actions/" in str(arguments[0]) and "/.tmp-" in str(arguments[0]):
                os.write(says, b"x")
                os.read(goes_on, 1)
        try:
            sys.addaudithook(hook)
            run(place, "put")
            os._exit(0)
        finally:
            os._exit(1)
    os.read(looked, 1)
    def finish():
        os.write(let, b"x")
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            os._exit(3)
    return finish

def interrupt_at(count, place):
    finish = lambda: None
    def hook(event, arguments):
        nonlocal count, finish
        if event not in CALLS:
            return
        count -= 1
        if count == 0 and inner == "put_half":
            finish = put_half(place)
        elif count == 0:
            child = os.fork()
            if child == 0:
                try:
                    run(place, inner)
                    os._exit(0)
                finally:
                    os._exit(1)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                os._exit(2)
    sys.addaudithook(hook)
    return lambda: (finish(), count > 0)[1]

for number in itertools.count(1):
    place = Path(root, str(number))
    shutil.copytree(template, place)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            is_over = interrupt_at(number, place)
            run(place, outer)
            code = 9 if is_over() else 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 9:
        shutil.rmtree(place)
        break
    if status:
        sys.exit(f"call {number}: {status}")
"""

KEY = digest_bytes(b"key")
CONTENTS = {"a": b"first" * 1000, "b": b"second"}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A cache that has one of the blobs, which nobody names."""
    folder = tmp_path / "template"
    (folder / "made").mkdir(parents=True)
    for name, data in CONTENTS.items():
        (folder / "made" / name).write_bytes(data)
    cache = Cache(folder / "cache")
    cache.put(digest_bytes(b"other"), {"kept": b"kept"})
    cache.blobs.put_bytes(CONTENTS["a"])
    return folder


def interleaved(tmp_path: Path, outer: str, inner: str) -> Iterator[Path]:
    """The folder that each order of events left."""
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "template", root, KEY, outer, inner], check=True)
    places = sorted(root.iterdir(), key=lambda path: int(path.name))
    assert len(places) > 3
    yield from places


def check_kept(cache: Cache) -> None:
    """The entry is right, and stays so under another gc."""
    assert cache.fetch(KEY) == CONTENTS
    collect(cache, max_nbytes=None, max_age_s=None, grace_s=0.0, is_dry_run=False, now_s=time.time() + 1e6)
    assert cache.fetch(KEY) == CONTENTS
    assert cache.check().problems == ()


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("put", "collect"),
        ("collect", "put"),
        ("put_files", "collect"),
        ("collect", "put_files"),
        ("put", "put_files"),
        ("collect", "put_half"),
    ],
)
def test_a_put_keeps_its_blobs(template: Path, tmp_path: Path, outer: str, inner: str) -> None:
    for place in interleaved(tmp_path, outer, inner):
        check_kept(Cache(place / "cache"))


@pytest.mark.parametrize("inner", ["put", "put_files"])
def test_an_entry_put_again_while_it_is_evicted(template: Path, tmp_path: Path, inner: str) -> None:
    Cache(template / "cache").put(KEY, CONTENTS)
    outcomes = set()
    for place in interleaved(tmp_path, "evict", inner):
        cache = Cache(place / "cache")
        found = cache.fetch(KEY)
        assert found in (None, CONTENTS)
        outcomes.add(found is not None)
        cache.put(KEY, CONTENTS)
        check_kept(cache)
    assert outcomes == {True, False}


@pytest.mark.parametrize(("outer", "inner"), [("evict", "pin"), ("pin", "evict")])
def test_a_pin_that_was_taken_keeps_its_entry(template: Path, tmp_path: Path, outer: str, inner: str) -> None:
    Cache(template / "cache").put(KEY, CONTENTS)
    refused = 0
    for place in interleaved(tmp_path, outer, inner):
        cache = Cache(place / "cache")
        if (place / "refused").exists():
            refused += 1
            assert cache.pins() == {}
            assert cache.fetch(KEY) in (None, CONTENTS)
        else:
            assert cache.pins() == {"fleet": KEY}
            check_kept(cache)
    assert refused > 0


@pytest.mark.parametrize(("outer", "inner"), [("evict", "fetch"), ("fetch", "evict")])
def test_a_reader_gets_all_or_nothing(template: Path, tmp_path: Path, outer: str, inner: str) -> None:
    Cache(template / "cache").put(KEY, CONTENTS)
    said = {(place / "fetched").read_text() for place in interleaved(tmp_path, outer, inner)}
    assert said == {"hit", "miss"}


@pytest.mark.parametrize(("outer", "inner"), [("evict", "materialize"), ("materialize", "evict")])
def test_a_folder_is_whole_or_absent(template: Path, tmp_path: Path, outer: str, inner: str) -> None:
    Cache(template / "cache").put(KEY, CONTENTS)
    outcomes = set()
    for place in interleaved(tmp_path, outer, inner):
        out = place / "out"
        outcomes.add(out.exists())
        assert out.exists() != (place / "refused").exists()
        if out.exists():
            assert {path.name: path.read_bytes() for path in out.iterdir()} == CONTENTS
    assert outcomes == {True, False}
