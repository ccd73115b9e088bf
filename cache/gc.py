"""What a cache can do without: least recently used entries above a bound, and blobs that no entry names.

Why no put in progress, and no entry that stays, ever loses a blob, without a lock. A put writes, in this order:

    1. its blobs      2. a claim that lists them      3. a look whether all are there, else 1 for those that are not
    4. its entry      5. the claim is removed

gc works in the order

    a. entries to evict are chosen, and set aside; one that was used or replaced meanwhile is put back
    b. blobs that no entry and no claim names, and older than the grace period, are set aside (renamed)
    c. claims are read, then all entries; what either names is put back
    d. what is still aside is deleted

If a put looks (3) after gc set the blob aside (b), it finds it missing and writes it again. If it looked before, its
claim (2) was there before (b); then gc finds in (c) either the claim, or, since that is removed last (5) and claims are
read first, the entry; and puts the blob back. What is written anew while the old one is aside stays: putting back
never replaces. A reader that has a blob open, mapped or linked keeps its bytes, which live as long as anybody holds
them; one that comes between (b) and (c) misses, as it would if it came after (d), and builds. A gc that is killed leaves
temporary files, in the worst case of a blob that it would have put back: a miss, too. An entry that misses a blob
may be about to have it put back; so only entries older than an hour, which (b) cannot concern, are removed for that.

The grace period makes (b) and (c) rare, and keeps what a build has just fetched or put. It should exceed the
difference between the clocks of the machines that share the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from loadplan.cache.actions import artifact_of
from loadplan.cache.entries import Entry, GcReport
from loadplan.cache.error import LoadplanError
from loadplan.cache.record import find_record
from loadplan.cache.store import nbytes_of
from loadplan.cache.write_file import TEMPORARY_PREFIX, age_s, put_back, remove_file, set_aside, temporary_files

if TYPE_CHECKING:
    from loadplan.cache.cache import Cache

GRACE_S = 3600.0
_LONGEST_PUT_S = 86_400.0  # no put takes so long from its claim to its entry, no holder renews its lease so late


class PinsDamaged(LoadplanError, ValueError):
    """Pins that cannot be read, so that it is not known what they keep."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        super().__init__(paths)
        self.paths = paths

    def __str__(self) -> str:
        return (
            f"{self.paths[0]}: {len(self.paths)} damaged pins; nothing is evicted as long as it is not known what they "
            "keep: run `loadplan cache repair`, and pin again"
        )


def collect(
    cache: Cache, *, max_nbytes: int | None, max_age_s: float | None, grace_s: float, is_dry_run: bool, now_s: float
) -> GcReport:
    """Do what `Cache.gc` says, at the time `now_s` (seconds since 1970)."""
    if damaged := cache.pin_records.damaged():
        raise PinsDamaged(damaged)
    entries = sorted(cache.entries(), key=lambda entry: (entry.last_used_s, entry.key))
    sizes = {digest: found.st_size for digest, found in cache.blobs.digests()}
    old = {digest for digest in sizes if age_s(cache.blobs.path(digest), now_s) >= grace_s}
    removable = old - cache.claims.held()
    evicted = _choose(entries, sizes, removable, max_nbytes, max_age_s, now_s - grace_s, now_s)
    abandoned = [
        path for path in temporary_files(cache.root) if is_abandoned(cache, path, max(grace_s, GRACE_S), now_s)
    ]
    abandoned += [
        path for path in (*cache.claims.paths(), *cache.leases.paths()) if is_abandoned(cache, path, grace_s, now_s)
    ]
    if not is_dry_run:
        evicted = [entry for entry in evicted if _evict(cache, entry)]
    keys = {entry.key for entry in evicted}
    live = _named(cache, keys if is_dry_run else set())
    doomed = sorted(removable - live)
    temporary_nbytes = sum(map(nbytes_of, abandoned))
    if not is_dry_run:
        doomed = _remove(cache, doomed)
        abandoned = [path for path in abandoned if remove_file(path)]
    nbytes = sum(sizes[digest] for digest in doomed)
    kept_nbytes = sum(sizes.values()) - nbytes
    return GcReport(
        is_dry_run=is_dry_run,
        evicted=tuple(evicted),
        kept=len(entries) - len(evicted),
        blobs=len(doomed),
        nbytes=nbytes + temporary_nbytes,
        kept_nbytes=kept_nbytes,
        temporaries=len(abandoned),
        over_nbytes=max(0, kept_nbytes - max_nbytes) if max_nbytes is not None else 0,
    )


def _choose(
    entries: list[Entry],
    sizes: dict[str, int],
    removable: set[str],
    max_nbytes: int | None,
    max_age_s: float | None,
    young_s: float,
    now_s: float,
) -> list[Entry]:
    """The entries to evict, from `entries` in the order of their last use."""
    names = Counter(digest for entry in entries for digest in set(entry.blobs.values()))
    total = sum(nbytes for digest, nbytes in sizes.items() if names[digest] or digest not in removable)
    chosen: list[Entry] = []
    for entry in entries:
        if entry.is_pinned or entry.last_used_s > young_s:
            continue
        is_old = max_age_s is not None and now_s - entry.last_used_s >= max_age_s
        is_above = max_nbytes is not None and total > max_nbytes
        is_useless = not entry.is_complete and now_s - entry.last_used_s >= GRACE_S
        if not (is_old or is_above or is_useless):
            continue
        chosen.append(entry)
        for digest in set(entry.blobs.values()):
            names[digest] -= 1
            if not names[digest] and digest in removable:
                total -= sizes[digest]
    return chosen


def _evict(cache: Cache, entry: Entry) -> bool:
    """Remove the entry, unless it was used, replaced or pinned since it was judged."""
    path = cache.actions.path(entry.key)
    aside = set_aside(path)
    if aside is None:
        return True
    found = aside.stat()
    is_used = found.st_mtime != entry.created_s or max(found.st_mtime, found.st_atime) > entry.last_used_s
    if is_used or entry.key in cache.pin_records.all().values():
        put_back(aside, path)
        return False
    remove_file(aside)
    return True


def _remove(cache: Cache, digests: Iterable[str]) -> list[str]:
    """Remove the blobs that nobody turns out to need; returns them."""
    aside = {digest: taken for digest in digests if (taken := set_aside(cache.blobs.path(digest))) is not None}
    needed = cache.claims.held()
    needed |= _named(cache, set())
    for digest, taken in aside.items():
        if digest in needed:
            put_back(taken, cache.blobs.path(digest))
        else:
            remove_file(taken)
    return sorted(aside.keys() - needed)


def is_abandoned(cache: Cache, path: Path, grace_s: float, now_s: float) -> bool:
    """Whether a file that some process needs for a while was left by one that is gone."""
    is_long = path.parent in (cache.claims.folder, cache.leases.folder) and not path.name.startswith(TEMPORARY_PREFIX)
    return age_s(path, now_s) >= (max(grace_s, _LONGEST_PUT_S) if is_long else grace_s)


def _named(cache: Cache, but: Collection[str]) -> set[str]:
    """All digests that entries name, but those of the keys in `but`.

    Entries that another gc has set aside count, for it may put them back.
    """
    found: set[str] = set()
    for path in cache.actions.folder.glob("??/*"):
        named = artifact_of(find_record(path))
        if named is not None and named[0] not in but:
            found.update(named[1].blobs.values())
    return found
