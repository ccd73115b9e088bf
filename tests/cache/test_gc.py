"""What gc evicts, and what it must leave; tables, with times set on disk."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from loadplan.cache.cache import Cache, NotCached
from loadplan.cache.check import repair_cache
from loadplan.cache.digest import digest_bytes
from loadplan.cache.entries import GcReport
from loadplan.cache.gc import PinsDamaged, _evict, collect
from loadplan.cache.pins import NoSuchPin
from loadplan.cache.store import ProblemKind

KEYS = {name: digest_bytes(name.encode()) for name in "abcd"}
SHARED = bytes(1000)
DAY_S = 86_400.0


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Four entries of 100 bytes of their own and 1,000 that `a` and `b` share; `a` was used first, `d` last."""
    cache = Cache(tmp_path / "cache")
    for day, (name, key) in enumerate(KEYS.items(), start=1):
        own = {"own": name.encode() * 100}
        cache.put(key, own | ({"shared": SHARED} if name in "ab" else {}), {"name": name})
        os.utime(cache.actions.path(key), (day * DAY_S, 0))
    return cache


def gc(cache: Cache, *, grace_s: float = 0.0, dry_run: bool = False, days: float = 365, **limits: float) -> GcReport:
    """At the given number of days after 1970 for entries: blobs, whose ctime cannot be set, are old all the same."""
    nbytes, age_s = limits.get("max_nbytes"), limits.get("max_age_s")
    late = time.time() + 1e6
    return collect(
        cache,
        max_nbytes=None if nbytes is None else int(nbytes),
        max_age_s=None if age_s is None else late - days * DAY_S + age_s,
        grace_s=grace_s,
        is_dry_run=dry_run,
        now_s=late,
    )


def held(cache: Cache) -> str:
    return "".join(name for name, key in KEYS.items() if cache.actions.read(key) is not None)


@pytest.mark.parametrize(
    ("max_nbytes", "left", "nbytes"),
    [
        (1400, "abcd", 0),
        (1399, "bcd", 100),  # the shared blob stays
        (1300, "bcd", 100),
        (1299, "cd", 1200),  # only with `b` does it go
        (200, "cd", 1200),
        (199, "d", 1300),
        (0, "", 1400),
    ],
)
def test_least_recently_used_first(cache: Cache, max_nbytes: int, left: str, nbytes: int) -> None:
    said = gc(cache, max_nbytes=max_nbytes, dry_run=True)
    assert held(cache) == "abcd"
    report = gc(cache, max_nbytes=max_nbytes)
    assert held(cache) == left
    assert (report.nbytes, report.kept_nbytes, report.kept, report.over_nbytes) == (nbytes, 1400 - nbytes, len(left), 0)
    assert "".join(entry.info["name"] for entry in report.evicted) == "abcd"[: 4 - len(left)]
    assert said.to_json() == {**report.to_json(), "is_dry_run": True}
    assert cache.info().nbytes == 1400 - nbytes
    json.dumps(report.to_json())


@pytest.mark.parametrize(
    ("days", "left"), [(0, ""), (1, ""), (1.5, "d"), (2.5, "cd"), (3, "cd"), (3.5, "bcd"), (9, "abcd")]
)
def test_age(cache: Cache, days: float, left: str) -> None:
    """At the end of day 5: `d` is one day old."""
    gc(cache, max_age_s=days * DAY_S, days=5)
    assert held(cache) == left


def test_pins_stay_and_are_counted(cache: Cache) -> None:
    cache.pin(KEYS["a"], "fleet / Ω")
    report = gc(cache, max_nbytes=50)
    assert held(cache) == "a"
    assert report.over_nbytes == 1050
    assert cache.fetch(KEYS["a"]) == {"own": b"a" * 100, "shared": SHARED}
    assert cache.pins() == {"fleet / Ω": KEYS["a"]}
    cache.pin(KEYS["a"], "second")
    cache.unpin("fleet / Ω")
    gc(cache, max_nbytes=0)
    assert held(cache) == "a"
    cache.unpin("second")
    gc(cache, max_nbytes=0)
    assert held(cache) == ""


def test_a_pin_moves_and_needs_an_entry(cache: Cache) -> None:
    cache.pin(KEYS["a"], "x")
    cache.pin(KEYS["b"], "x")
    assert cache.pins() == {"x": KEYS["b"]}
    with pytest.raises(NotCached, match=f"has no entry {'0' * 12}"):
        cache.pin("0" * 64, "x")
    assert cache.pins() == {"x": KEYS["b"]}
    with pytest.raises(NoSuchPin, match="no pin is called 'y'; the cache has 'x'"):
        cache.unpin("y")


def test_nothing_is_evicted_while_a_pin_is_damaged(cache: Cache) -> None:
    cache.pin(KEYS["a"], "fleet")
    cache.pin_records.path("fleet").write_bytes(b"half")
    with pytest.raises(PinsDamaged, match="1 damaged pins"):
        gc(cache, max_nbytes=0)
    assert held(cache) == "abcd"
    assert [problem.kind for problem in cache.check().problems] == [ProblemKind.DAMAGED]
    repair_cache(cache, None, 0.0, time.time())
    gc(cache, max_nbytes=0)
    assert held(cache) == ""


def test_the_grace_period(cache: Cache) -> None:
    """By the real clock: all blobs are young, and so is an entry that was just used."""
    assert cache.fetch(KEYS["a"]) is not None
    report = cache.gc(max_nbytes=0)
    assert held(cache) == "a"
    assert (report.blobs, report.nbytes, report.kept_nbytes, report.over_nbytes) == (0, 0, 1400, 1400)
    cache.gc(max_nbytes=0, grace_s=0.0)
    assert held(cache) == ""
    assert cache.info().nbytes == 0


@pytest.mark.parametrize("use", ["fetch", "put", "pin"])
def test_an_entry_used_after_it_was_judged(cache: Cache, use: str) -> None:
    entry = next(entry for entry in cache.entries() if entry.key == KEYS["a"])
    if use == "fetch":
        cache.fetch(KEYS["a"])
    elif use == "put":
        cache.put(KEYS["a"], {"own": b"other"})
    else:
        cache.pin(KEYS["a"], "fleet")
    before = cache.fetch(KEYS["a"])
    assert not _evict(cache, entry)
    assert cache.fetch(KEYS["a"]) == before is not None


def test_looking_is_no_use(cache: Cache) -> None:
    before = {entry.key: entry.last_used_s for entry in cache.entries()}
    cache.check(), cache.info(), cache.pins(), gc(cache)
    assert {entry.key: entry.last_used_s for entry in cache.entries()} == before
    assert [before[KEYS[name]] for name in "abcd"] == [day * DAY_S for day in (1, 2, 3, 4)]


def test_what_killed_writers_left(cache: Cache) -> None:
    strays = [cache.blobs.folder / ".tmp-1", cache.actions.path(KEYS["a"]).parent / ".tmp-2"]
    with cache.claims.hold([digest_bytes(b"x")]), cache.leases.hold(KEYS["a"], lambda: False):
        kept = [*cache.claims.paths(), *cache.leases.paths()]
        strays += [path.with_name(f"{path.name}-left") for path in kept]
        for path in strays:
            path.write_bytes(b"half")
        cache.gc(grace_s=0.0)
        assert all(path.exists() for path in (*kept, *strays))  # none of them is an hour old
        report = gc(cache)
    assert report.temporaries == 6
    assert not any(path.exists() for path in strays)


def test_info_and_entries(cache: Cache) -> None:
    cache.blobs.put_bytes(bytes(7))
    cache.pin(KEYS["b"], "fleet")
    info = cache.info()
    assert (info.entries, info.blobs, info.pins, info.nbytes, info.entry_nbytes, info.unused_nbytes) == (
        4, 6, 1, 1407, 2400, 7,
    )  # fmt: skip
    assert info.sharing == 1400 / 2400
    entries = {entry.info["name"]: entry for entry in cache.entries()}
    assert [entries[name].nbytes for name in "abcd"] == [1100, 1100, 100, 100]
    assert entries["b"].pins == ("fleet",)
    assert entries["b"].is_pinned and not entries["a"].is_pinned
    json.dumps([info.to_json(), *(entry.to_json() for entry in entries.values()), cache.check().to_json()])


def test_of_an_absent_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "none")
    assert (list(cache.entries()), cache.pins(), cache.info().entries, cache.info().sharing) == ([], {}, 0, 1.0)
    assert cache.check().problems == ()
    assert cache.gc(max_nbytes=0).blobs == 0
    assert cache.repair().removed == ()
    assert not cache.root.exists()
