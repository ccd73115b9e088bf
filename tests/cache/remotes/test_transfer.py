"""Pull and push: in order, resumed, stopped, offline, from hostile places; on real servers and in real processes."""

from __future__ import annotations

import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_places import QUICK
from remote_servers import NGINX, CacheServer, Handler, Nginx, Request, run_cache_server, run_nginx

from loadplan.cache import Artifact, BadArtifact, Cache, DigestMismatch, FolderNotWritable, canonical_json, digest_bytes
from loadplan.cache.digest import digest_json
from loadplan.cache.remotes import (
    BadRemoteData,
    DirectoryRemote,
    HttpRemote,
    RemoteEntry,
    RemoteOffline,
    RemoteRefused,
    RemoteSet,
    RemoteUnavailable,
    TransferPolicy,
)
from loadplan.cache.remotes.action_result import ActionResult, OutputFile, format_action_result
from loadplan.cache.remotes.entry_format import format_entry_record
from loadplan.cache.transfer import NotBuilt, PushReport, pull, push

KEY, OTHER_KEY = digest_bytes(b"key"), digest_bytes(b"other key")
BIG = random.Random(2).randbytes(10 << 20)
CONTENTS = {"plan": b"a plan", "rank00.safetensors": BIG, "rank01.safetensors": BIG[: 1 << 20]}
DIGESTS = {digest_bytes(data) for data in CONTENTS.values()}
BIG_PATH = f"/cas/{digest_bytes(BIG)}"


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("LOADPLAN_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def source(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path / "a")
    cache.put(KEY, CONTENTS, {"note": "text"})
    return cache


@pytest.fixture
def server() -> Iterator[CacheServer]:
    with run_cache_server() as server:
        yield server


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Nginx]:
    if NGINX is None:
        pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
    with run_nginx(tmp_path / "nginx") as nginx:
        yield nginx


def _writable(server: CacheServer) -> HttpRemote:
    return HttpRemote(server.url, read_only=False)


def _folder(path: Path, *, read_only: bool = False) -> DirectoryRemote:
    path.mkdir(exist_ok=True)
    return DirectoryRemote(path, read_only=read_only)


# What goes over the wire


def test_nothing_goes_over_the_wire_twice(server: CacheServer, source: Cache, tmp_path: Path) -> None:
    source.push([KEY], _writable(server))
    assert server.count("HEAD", "/cas/") == server.count("PUT", "/cas/") == len(CONTENTS)
    assert [request.path for request in server.log][-1] == f"/ac/{KEY}"  # the entry comes last
    server.log.clear()
    assert source.push([KEY], _writable(server)) == PushReport(0, 0, 0, sum(map(len, CONTENTS.values())))
    assert server.count("PUT", "") == 0

    server.log.clear()
    target = Cache(tmp_path / "b", [HttpRemote(server.url)])
    assert target.pull(KEY) == source.find(KEY)
    assert target.fetch(KEY) == CONTENTS
    assert sorted(request.path for request in server.log) == sorted([f"/ac/{KEY}", *(f"/cas/{d}" for d in DIGESTS)])
    server.log.clear()
    assert target.pull(KEY) == source.find(KEY)
    assert server.log == []


def test_what_another_artifact_brought_is_not_fetched_again(server: CacheServer, source: Cache, tmp_path: Path) -> None:
    source.put(OTHER_KEY, {**CONTENTS, "plan": b"another plan"})
    source.push([KEY, OTHER_KEY], _writable(server))
    target = Cache(tmp_path / "b", [HttpRemote(server.url)])
    target.pull(KEY)
    server.log.clear()
    target.pull(OTHER_KEY)
    assert [r.path for r in server.log] == [f"/ac/{OTHER_KEY}", f"/cas/{digest_bytes(b'another plan')}"]


def test_a_damaged_blob_here_is_fetched_again(server: CacheServer, source: Cache, tmp_path: Path) -> None:
    source.push([KEY], _writable(server))
    target = Cache(tmp_path / "b", [HttpRemote(server.url)])
    target.pull(KEY)
    path = target.blobs.path(digest_bytes(b"a plan"))
    path.chmod(0o644)
    path.write_bytes(b"a plam")
    server.log.clear()
    assert target.pull(KEY) == source.find(KEY)
    assert target.fetch(KEY) == CONTENTS
    assert server.count("GET", "/cas/") == 1


def test_an_interrupted_pull_goes_on_where_it_was(nginx: Nginx, source: Cache, tmp_path: Path) -> None:
    """nginx's own log says which bytes were asked for, and how many it sent."""
    remote = HttpRemote(f"http://127.0.0.1:{nginx.port}/open", read_only=False)
    source.push([KEY], remote)
    target = Cache(tmp_path / "b", [remote])

    def interrupt(done_nbytes: int, _: int) -> None:
        if done_nbytes > 6_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        target.pull(KEY, progress=interrupt)
    assert target.find(KEY) is None
    (left,) = target.blobs.folder.glob(f".tmp-{digest_bytes(BIG)}-*")
    kept_nbytes = left.stat().st_size
    assert 3_000_000 < kept_nbytes < len(BIG)
    assert target.pull(KEY) == source.find(KEY)
    assert target.fetch(KEY) == CONTENTS
    assert target.blobs.check() == ()
    ranges = [line.split() for line in nginx.log if line.startswith(f"GET /open{BIG_PATH}")]
    assert ranges[-1][2:] == ["206", str(len(BIG) - kept_nbytes), f"bytes={kept_nbytes}-"]
    assert len(ranges) == 2


def test_a_blob_begun_at_one_remote_is_finished_at_another(server: CacheServer, source: Cache, tmp_path: Path) -> None:
    def cut(request: Request, handler: Handler) -> bool:
        if request.path != BIG_PATH or request.range:
            return False
        handler.answer(200, b"", Content_Length=str(len(BIG)))
        handler.send_bytes(BIG[:4_000_000])
        handler.cut()
        server.misbehave = lambda request, handler: handler.refuse(503)
        return True

    source.push([KEY], _writable(server))
    with run_cache_server(files=dict(server.files)) as second:
        server.misbehave = cut
        target = Cache(tmp_path / "b")
        remotes = RemoteSet([HttpRemote(server.url), HttpRemote(second.url)])
        assert pull(target, KEY, remotes, policy=TransferPolicy(1, 2, 0.001, 0.001)) == source.find(KEY)
        (request,) = (request for request in second.log if request.path == BIG_PATH)
        assert request.range is not None
        assert 0 < int(request.range[6:-1]) <= 4_000_000


# Order, write-back, offline


def test_the_first_that_has_it_gives_it(source: Cache, tmp_path: Path) -> None:
    empty, full, never = (_folder(tmp_path / name) for name in ("empty", "full", "never"))
    source.push([KEY], full)
    (tmp_path / "never").rmdir()  # asked, it would be reported
    remotes = RemoteSet([empty, full, never])
    assert pull(Cache(tmp_path / "b"), KEY, remotes) == source.find(KEY)
    assert list((tmp_path / "empty").iterdir()) == []


def test_write_back_fills_the_earlier_ones_that_may_be_written(
    source: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = _folder(tmp_path / "near"), _folder(tmp_path / "far")
    only_read = _folder(tmp_path / "only-read", read_only=True)
    (tmp_path / "spoiled").mkdir()
    (tmp_path / "spoiled" / "blobs").write_bytes(b"in the way")
    spoiled = _folder(tmp_path / "spoiled")
    source.push([KEY], far)
    target = Cache(tmp_path / "b")
    remotes = RemoteSet([only_read, spoiled, near, far], write_back=True)
    assert pull(target, KEY, remotes, policy=QUICK) == source.find(KEY)
    found = near.find_entry(KEY)
    assert found is not None
    assert found.artifact == source.find(KEY)
    assert list((tmp_path / "only-read").iterdir()) == []
    assert [record.name for record in caplog.records if "spoiled" in record.getMessage()] != []


@pytest.mark.parametrize("variable", ["LOADPLAN_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_contacts_nobody(
    server: CacheServer,
    source: Cache,
    tmp_path: Path,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source.push([KEY], _writable(server))
    server.log.clear()
    monkeypatch.setenv(variable, "1")
    target = Cache(tmp_path / "b", [HttpRemote(server.url)])
    with caplog.at_level(logging.INFO):
        assert target.pull(KEY) is None
        assert target.pull(KEY) is None
    assert [record.getMessage() for record in caplog.records] == [f"{variable} is set: no remote is contacted"]
    with pytest.raises(RemoteOffline, match=f"{variable} is set; unset the variable"):
        source.push([KEY], _writable(server))
    assert server.log == []
    monkeypatch.setenv(variable, "0")
    assert target.pull(KEY) == source.find(KEY)


def test_a_remote_that_is_down_is_left_alone_for_a_while(source: Cache, tmp_path: Path, server: CacheServer) -> None:
    server.misbehave = lambda request, handler: handler.refuse(503)
    remotes = RemoteSet([HttpRemote(server.url)])
    for i in range(20):
        assert pull(Cache(tmp_path / "b"), digest_bytes(bytes([i])), remotes, policy=QUICK) is None
    assert len(server.log) == QUICK.attempts


# Push


def test_what_is_not_built_is_not_pushed(source: Cache, tmp_path: Path) -> None:
    with pytest.raises(NotBuilt, match="no complete artifact in the local store; build it first") as caught:
        source.push([KEY, OTHER_KEY], _folder(tmp_path / "remote"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert list((tmp_path / "remote").iterdir()) == []


def test_a_damaged_blob_is_not_pushed(server: CacheServer, source: Cache) -> None:
    path = source.blobs.path(digest_bytes(b"a plan"))
    path.chmod(0o644)
    path.write_bytes(b"a plam")
    with pytest.raises(DigestMismatch):
        source.push([KEY], _writable(server))
    assert server.count("PUT", digest_bytes(b"a plan")) == server.count("PUT", "/ac/") == 0


def test_a_name_that_others_refuse_is_not_pushed(source: Cache, tmp_path: Path) -> None:
    source.put(OTHER_KEY, {"../plan": b"a plan"})
    with pytest.raises(BadArtifact, match=r"\.\./plan"):
        source.push([OTHER_KEY], _folder(tmp_path / "remote"))


def test_an_entry_is_not_written_before_its_blobs(server: CacheServer, source: Cache) -> None:
    server.misbehave = lambda request, handler: (
        request.method == "PUT" and request.path == BIG_PATH and handler.refuse(507)
    )
    with pytest.raises(RemoteRefused, match=r"answered PUT with 507 \(Insufficient Storage\)"):
        push(source, [KEY], _writable(server), policy=QUICK)
    assert server.count("PUT", "/ac/") == 0


def test_a_push_is_tried_again_and_counts_right(server: CacheServer, source: Cache) -> None:
    failures = [2]

    def fail(request: Request, handler: Handler) -> bool:
        if request.method != "PUT" or request.path != BIG_PATH or not failures[0]:
            return False
        failures[0] -= 1
        handler.answer(503)
        return True

    server.misbehave = fail
    told: list[tuple[int, int]] = []
    report = push(source, [KEY], _writable(server), policy=QUICK, progress=lambda *step: told.append(step))
    total = sum(map(len, CONTENTS.values()))
    assert report == PushReport(1, 3, total, 0)
    assert told[-1] == (total, total)
    assert server.files[BIG_PATH] == BIG


def test_a_server_that_only_reads_says_so(nginx: Nginx, source: Cache) -> None:
    with pytest.raises(RemoteRefused, match=r"answered PUT with 405 \(Method Not Allowed\)"):
        source.push([KEY], HttpRemote(f"http://127.0.0.1:{nginx.port}/readonly", read_only=False))
    with pytest.raises(RemoteRefused, match=r"answered HEAD with 401 \(Unauthorized\); check the address, the login"):
        source.push([KEY], HttpRemote(f"http://user:wrong@127.0.0.1:{nginx.port}/private", read_only=False))


# Hostile entries


def _entry_bytes(files: list[tuple[str, str, int]]) -> bytes:
    """An ActionResult that is right in itself, whatever it names."""
    record = {"format": 1, "key": KEY, "blobs": {name: digest for name, digest, _ in files}, "info": {}}
    note = canonical_json({"entry": digest_json(record), "info": {}})
    return format_action_result(ActionResult(tuple(OutputFile(*file) for file in files), note))


D, E = digest_bytes(b"a plan"), digest_bytes(b"e")


@pytest.mark.parametrize(
    "files",
    [
        [("../x", D, 6)],
        [("/etc/x", D, 6)],
        [("a/../../x", D, 6)],
        [("a//x", D, 6)],
        [("./x", D, 6)],
        [("x/", D, 6)],
        [("", D, 6)],
        [("a\\..\\x", D, 6)],
        [("C:x", D, 6)],
        [("a\0b", D, 6)],
        [("a\nb", D, 6)],
        [("a\x1b[2Jb", D, 6)],
        [("x" * 1025, D, 6)],
        [("x", D, -1)],
        [("x", D, (1 << 40) + 1)],
        [("x", D, (1 << 63) - 1)],
        [("x", D, 1 << 40), ("y", E, 1 << 40)],  # each may be, both do not fit
        [("x", D, 6), ("y", D, 7)],
        [("x", D, 6), ("x", E, 1)],
        [("x", D.upper(), 6)],
        [("x", "../../etc/passwd", 6)],
        [("x", "", 6)],
        [(f"f{i}", D, 6) for i in range(100_001)],
    ],
    ids=lambda files: f"{files[0][0][:10]!r}-{files[0][2]}-{len(files)}",
)
def test_a_hostile_entry_is_a_miss(server: CacheServer, tmp_path: Path, files: list[tuple[str, str, int]]) -> None:
    server.files |= {f"/ac/{KEY}": _entry_bytes(files), f"/cas/{D}": b"a plan", f"/cas/{E}": b"e"}
    target = Cache(tmp_path / "b")
    assert pull(target, KEY, RemoteSet([HttpRemote(server.url)]), policy=QUICK) is None
    assert server.count("GET", "/cas/") == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_hostile_entries_are_not_refused_for_another_reason(server: CacheServer, tmp_path: Path) -> None:
    server.files |= {f"/ac/{KEY}": _entry_bytes([("x", D, 6)]), f"/cas/{D}": b"a plan"}
    found = pull(Cache(tmp_path / "b"), KEY, RemoteSet([HttpRemote(server.url)]), policy=QUICK)
    assert found == Artifact({"x": D})


def test_a_torn_entry_is_known_even_between_two_fields(server: CacheServer, tmp_path: Path) -> None:
    """Protobuf cannot tell: what is left is a whole message."""
    good = _entry_bytes([("x", D, 6), ("y", D, 6)])
    server.files[f"/cas/{D}"] = b"a plan"
    for end in range(len(good) - len(b"\x4a\x0a\x0a\x08loadplan")):
        server.files[f"/ac/{KEY}"] = good[:end]
        with pytest.raises(BadRemoteData):
            HttpRemote(server.url).find_entry(KEY)


# A folder that is not what it should be


def test_the_folder_layout_is_that_of_a_store(source: Cache, tmp_path: Path) -> None:
    remote = _folder(tmp_path / "remote")
    source.push([KEY], remote)
    assert Cache(tmp_path / "remote").fetch(KEY) == CONTENTS
    found = DirectoryRemote(source.root).find_entry(KEY)  # and a store is a remote
    assert found is not None
    assert found.artifact == source.find(KEY)
    assert source.actions.path(KEY).read_bytes() == format_entry_record(KEY, found.artifact)
    assert all(
        path.stat().st_mode & 0o222 == 0 for path in (tmp_path / "remote" / "blobs").rglob("*") if path.is_file()
    )


def test_a_folder_that_is_not_mounted_is_down_and_not_made(source: Cache, tmp_path: Path) -> None:
    remote = DirectoryRemote(tmp_path / "not-mounted", read_only=False)
    with pytest.raises(RemoteUnavailable, match=r"the folder does not exist \(is it mounted\?\)"):
        push(source, [KEY], remote, policy=QUICK)
    assert pull(Cache(tmp_path / "b"), KEY, RemoteSet([remote]), policy=QUICK) is None
    assert not remote.root.exists()


@pytest.mark.parametrize("what", ["actions", "blobs"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "device"])
def test_things_that_are_no_files(source: Cache, tmp_path: Path, what: str, kind: str) -> None:
    source.push([KEY], _folder(tmp_path / "remote"))
    name = KEY if what == "actions" else digest_bytes(b"a plan")
    path = tmp_path / "remote" / what / name[:2] / name[2:]
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    target = Cache(tmp_path / "b")
    assert pull(target, KEY, RemoteSet([_folder(tmp_path / "remote")]), policy=QUICK) is None
    assert target.find(KEY) is None


# Here


def test_a_store_that_cannot_be_written_is_an_error(source: Cache, tmp_path: Path) -> None:
    source.push([KEY], _folder(tmp_path / "remote"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FolderNotWritable):
        Cache(tmp_path / "file" / "store", [_folder(tmp_path / "remote")]).pull(KEY)


def test_an_error_of_the_callback_is_the_callers(source: Cache, tmp_path: Path) -> None:
    source.push([KEY], _folder(tmp_path / "remote"))

    def fail(done_nbytes: int, total_nbytes: int) -> None:
        raise ZeroDivisionError

    target = Cache(tmp_path / "b", [_folder(tmp_path / "remote")])
    before = threading.active_count()  # fsspec may keep one
    with pytest.raises(ZeroDivisionError):
        target.pull(KEY, progress=fail)
    assert threading.active_count() == before
    assert target.pull(KEY) == source.find(KEY)


def test_a_transfer_has_no_more_threads_than_it_may(source: Cache, tmp_path: Path) -> None:
    most, before = [0], threading.active_count()

    def count(done_nbytes: int, total_nbytes: int) -> None:
        most[0] = max(most[0], threading.active_count())

    source.put(OTHER_KEY, {f"{i}": bytes([i]) for i in range(40)})
    push(source, [OTHER_KEY], _folder(tmp_path / "remote"), policy=TransferPolicy(threads=3), progress=count)
    assert 0 < most[0] - before <= 3


SCRIPT = """
import os, sys
from pathlib import Path
from loadplan.cache import Cache
from loadplan.cache.remotes import open_remote

root, address, key, end = sys.argv[1:]

def tell(done_nbytes, total_nbytes):
    if done_nbytes > 4_000_000:
        if end == "kill":
            os._exit(9)
        print("far enough", flush=True)

try:
    artifact = Cache(Path(root), [open_remote(address)]).pull(key, tell if end else None)
    sys.exit(0 if artifact else 3)
except KeyboardInterrupt:
    sys.exit(130)
"""


def _start(root: Path, address: str, end: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(root), address, KEY, end], stdout=subprocess.PIPE)


def test_a_killed_pull_loses_nothing(nginx: Nginx, source: Cache, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{nginx.port}/open"
    source.push([KEY], HttpRemote(address, read_only=False))
    target = Cache(tmp_path / "b", [HttpRemote(address)])
    with _start(target.root, address, "kill") as process:
        assert process.wait() == 9
    assert target.find(KEY) is None
    assert target.pull(KEY) == source.find(KEY)
    assert target.fetch(KEY) == CONTENTS
    assert target.blobs.check() == ()


def test_ctrl_c_ends_it_at_once_and_leaves_a_good_store(server: CacheServer, source: Cache, tmp_path: Path) -> None:
    source.push([KEY], _writable(server))
    release = threading.Event()

    def drip(request: Request, handler: Handler) -> bool:
        if request.path != BIG_PATH or request.range:
            return False
        handler.answer(200, b"", Content_Length=str(len(BIG)))
        handler.wfile.write(BIG[:5_000_000])
        for byte in BIG[5_000_000:]:
            if release.wait(0.01):
                break
            handler.wfile.write(bytes([byte]))
        return True

    server.misbehave = drip
    target = Cache(tmp_path / "b", [HttpRemote(server.url)])
    with _start(target.root, server.url, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"far enough\n"
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(20) == 130
    release.set()
    assert target.find(KEY) is None
    assert target.pull(KEY) == source.find(KEY)
    assert target.fetch(KEY) == CONTENTS
    assert [r.range is not None for r in server.log if r.path == BIG_PATH and r.method == "GET"] == [False, True]


def test_eight_processes_pull_into_one_store(server: CacheServer, source: Cache, tmp_path: Path) -> None:
    source.push([KEY], _writable(server))
    processes = [_start(tmp_path / "b", server.url, "") for _ in range(8)]
    for process in processes:
        with process:
            assert process.wait() == 0
    target = Cache(tmp_path / "b")
    assert target.fetch(KEY) == CONTENTS
    assert target.blobs.check() == ()


def test_an_entry_without_files_goes_round(server: CacheServer, tmp_path: Path) -> None:
    source = Cache(tmp_path / "a")
    source.put(KEY, {}, {"note": "nothing made"})
    source.push([KEY], _writable(server))
    assert Cache(tmp_path / "b", [HttpRemote(server.url)]).pull(KEY) == Artifact({}, {"note": "nothing made"})
    assert _writable(server).find_entry(KEY) == RemoteEntry(Artifact({}, {"note": "nothing made"}), {})
