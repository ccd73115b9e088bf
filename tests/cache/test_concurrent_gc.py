"""Eight processes that put, fetch, evict and collect the same few keys and blobs at once, with no grace period."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadplan.cache.cache import Cache
from loadplan.cache.digest import digest_bytes, digest_json
from loadplan.cache.store import ProblemKind

PROCESSES = 8

START = """
import hashlib, random, sys, time
from pathlib import Path
from loadplan.cache import BlobMissing, Cache, NotCached, digest_json
root, number, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
cache, chance = Cache(root), random.Random(number)
print("ready", flush=True)
sys.stdin.readline()  # all start together
"""

EVERYTHING = """
def payload(key):
    data = key.encode() + chance.randbytes(chance.choice([0, 1, 5_000, 300_000]))
    return {"data": data, "sub/digest": hashlib.sha256(data).hexdigest().encode()}

def check(key, found):
    assert found.keys() == {"data", "sub/digest"}
    assert found["data"].startswith(key.encode())
    assert hashlib.sha256(found["data"]).hexdigest().encode() == found["sub/digest"]

hits = misses = 0
for i in range(rounds):
    key, work = digest_json(chance.randrange(3)), chance.randrange(10)
    if work < 3:
        cache.put(key, payload(key))
    elif work == 3:
        files = {}
        for name, data in payload(key).items():
            files[name] = root.parent / f"made-{number}-{i}-{len(files)}"
            files[name].write_bytes(data)
        cache.put_files(key, files, are_ours=chance.random() < 0.8)
    elif work == 4:
        cache.gc(max_nbytes=chance.choice([None, 0, 400_000]), grace_s=0.0)
    elif work == 5:
        try:
            out = cache.materialize(key, root.parent / f"out-{number}", replace=True)
            check(key, {name: (out / name).read_bytes() for name in ("data", "sub/digest")})
        except (BlobMissing, NotCached):
            misses += 1
    elif work == 6:
        try:
            cache.pin(key, str(number))
        except NotCached:
            misses += 1
    elif work == 7:
        cache.check(), cache.info(), list(cache.entries()), cache.repair()
    else:
        found = cache.fetch(key)
        if found is None:
            misses += 1
        else:
            check(key, found)
            hits += 1
print(hits, misses)
"""

CLAIMS = """
payloads = [bytes([n]) * 20_000 for n in range(3)]
for i in range(rounds):
    key = digest_json([number, i])
    data = chance.choice(payloads)
    if chance.random() < 0.5:
        cache.put(key, {"x": data})
    else:
        path = root.parent / f"file-{number}"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        cache.put_files(key, {"x": path}, are_ours=chance.random() < 0.5)
    cache.gc(grace_s=0.0)
    found, end = None, time.monotonic() + 30
    while found is None and time.monotonic() < end:  # another's gc may have the blob aside for a moment
        found = cache.fetch(key)
    assert found == {"x": data}, (i, found)
    if i < rounds - 3:
        cache.actions.path(key).unlink()  # and the blob may be nobody's
"""


def run(script: str, root: Path, rounds: int) -> list[str]:
    """What eight processes print."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", START + script, root, str(number), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [process.communicate() for process in processes]
    assert [said for _, said in ended if said] == []
    assert [process.returncode for process in processes] == [0] * PROCESSES
    return [said for said, _ in ended]


@pytest.mark.parametrize("rounds", [60])
def test_what_is_fetched_is_right_or_absent(tmp_path: Path, rounds: int) -> None:
    root = tmp_path / "cache"
    said = [tuple(map(int, text.split())) for text in run(EVERYTHING, root, rounds)]
    assert sum(hits for hits, _ in said) > 0
    assert sum(misses for _, misses in said) > 0
    cache = Cache(root)
    assert {problem.kind for problem in cache.check().problems} <= {ProblemKind.INCOMPLETE}
    for number in range(3):
        cache.put(digest_json(number), {"data": b"again"})
        assert cache.fetch(digest_json(number)) == {"data": b"again"}
    assert cache.check().is_good


def test_no_put_loses_a_blob_to_gc(tmp_path: Path) -> None:
    """Nothing is evicted here: blobs are removed only because nobody names them, while others are about to."""
    root, rounds = tmp_path / "cache", 25
    run(CLAIMS, root, rounds)
    cache = Cache(root)
    for number in range(PROCESSES):
        for i in range(rounds - 3, rounds):
            found = cache.fetch(digest_json([number, i]))
            assert found is not None and digest_bytes(found["x"]) in {
                digest_bytes(bytes([n]) * 20_000) for n in range(3)
            }
    assert cache.check().problems == ()
    assert cache.info().entries == PROCESSES * 3
