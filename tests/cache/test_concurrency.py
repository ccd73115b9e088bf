"""Eight processes at once, same and different names, no locks (case B80: two writers end with one good entry)."""

import subprocess
import sys
from pathlib import Path

from loadplan.cache.cache import Cache
from loadplan.cache.digest import digest_bytes

WRITERS, ROUNDS = 8, 12

SCRIPT = """
import sys
from pathlib import Path
from loadplan.cache import Cache, digest_bytes, digest_json

root, writer, writers, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
cache = Cache(root)
print("ready", flush=True)
sys.stdin.readline()  # all start together
for i in range(rounds):
    shared = str(i).encode() * 20_000
    source = root.parent / f"source-{writer}"
    source.write_bytes(shared)
    assert cache.blobs.put_file(source) == cache.blobs.put_bytes(shared) == digest_bytes(shared)
    assert cache.blobs.get_bytes(digest_bytes(shared)) == shared
    own = {"own": f"{writer} {i}".encode()}
    cache.put(digest_json(["own", writer, i]), own)
    assert cache.fetch(digest_json(["own", writer, i])) == own
    cache.put(digest_json(["same", i]), {"same": shared})
    assert cache.fetch(digest_json(["same", i])) == {"same": shared}
    cache.put(digest_json("contested"), {str(n): f"{writer} {i} {n}".encode() for n in range(3)})
    found = cache.fetch(digest_json("contested"))
    assert len({data.rsplit(b" ", 1)[0] for data in found.values()}) == 1, found
    cache.files.digest(root.parent / "input")
"""


def test_eight_writers(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    (tmp_path / "input").write_bytes(b"input")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, root, str(i), str(WRITERS), str(ROUNDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(WRITERS)
    ]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
    assert [writer.returncode for writer in writers] == [0] * WRITERS

    cache = Cache(root)
    assert cache.blobs.check() == ()
    assert not list(root.rglob(".tmp-*"))
    shared = {digest_bytes(str(i).encode() * 20_000) for i in range(ROUNDS)}
    assert all(map(cache.blobs.is_good, shared))
