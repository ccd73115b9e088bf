"""One builder a key: with a clock of the test's own, and with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadplan.cache.cache import Cache
from loadplan.cache.digest import NotADigest, digest_bytes
from loadplan.cache.lease import Leases, parse_holder, this_host
from loadplan.cache.record import find_record, format_record

KEY = digest_bytes(b"key")


@dataclass
class Time:
    """A clock that only waiting moves; `events` happen when it has come so far."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)
    events: dict[float, Callable[[], object]] = field(default_factory=dict)

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        for when in sorted(when for when in self.events if when <= self.now):
            self.events.pop(when)()


def leases(folder: Path, time: Time) -> Leases:
    return Leases(folder, lambda: time.now, time.sleep)


def foreign(path: Path, token: str = "t") -> None:
    """A lease of a process on another machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(format_record({"format": 1, "host": "elsewhere x y", "pid": 7, "started": "9", "token": token}))


def test_the_first_builds_at_once(tmp_path: Path) -> None:
    time = Time()
    found = leases(tmp_path / "leases", time)
    with found.hold(KEY, lambda: False) as lease:
        assert (lease.is_builder, lease.waited_s, lease.holder) == (True, 0.0, "")
        holder = found.find(KEY)
        assert holder is not None
        assert (holder.pid, holder.host, holder.is_dead()) == (os.getpid(), this_host(), False)
        assert threading.active_count() > 1  # it is renewed
    assert found.paths() == []
    assert time.waits == []
    assert not [thread for thread in threading.enumerate() if thread.name == "lease"]


def test_who_comes_when_it_is_done_need_not_build(tmp_path: Path) -> None:
    with leases(tmp_path, Time()).hold(KEY, lambda: True) as lease:
        assert not lease.is_builder
        assert list(tmp_path.iterdir()) == []  # nobody waits for us


def test_waiting_for_another(tmp_path: Path) -> None:
    """Who waits looks ever less often, and finds that the other one has built it."""
    time, done = Time(), list[bool]()
    found = leases(tmp_path, time)
    foreign(found.path(KEY))

    def finish() -> None:
        done.append(True)
        found.path(KEY).unlink()

    time.events = {30.0: finish}
    with found.hold(KEY, lambda: bool(done)) as lease:
        assert not lease.is_builder
        assert 30.0 <= lease.waited_s <= 32.0
    assert time.waits == sorted(time.waits)
    assert len(time.waits) < 35
    assert max(time.waits) <= 2.0


def test_a_holder_elsewhere_that_shows_no_sign(tmp_path: Path) -> None:
    time = Time()
    found = leases(tmp_path, time)
    foreign(found.path(KEY))
    with found.hold(KEY, lambda: False, ttl_s=60) as lease:
        assert lease.is_builder
        assert 60 <= lease.waited_s <= 62
        assert lease.holder == "process 7 on elsewhere"
        holder = found.find(KEY)
        assert holder is not None and holder.pid == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_renews_is_waited_for(tmp_path: Path) -> None:
    time = Time()
    found = leases(tmp_path, time)
    foreign(found.path(KEY))
    time.events = {at: lambda at=at: os.utime(found.path(KEY), (at, at)) for at in (50.0, 100.0, 150.0)}  # type: ignore[misc]
    with found.hold(KEY, lambda: False, ttl_s=60) as lease:
        assert lease.is_builder
        assert 210 <= lease.waited_s <= 214


def test_after_the_timeout_everybody_builds(tmp_path: Path) -> None:
    time = Time()
    found = leases(tmp_path, time)
    foreign(found.path(KEY), "theirs")
    with found.hold(KEY, lambda: False, timeout_s=10) as lease:
        assert lease.is_builder
        assert lease.waited_s == pytest.approx(10)
        assert lease.holder == "process 7 on elsewhere"
    holder = found.find(KEY)
    assert holder is not None and holder.token == "theirs"  # which is not ours to give back


@pytest.mark.parametrize("junk", [b"", b"half", format_record({"format": 2})])
def test_a_lease_that_says_nothing_expires(tmp_path: Path, junk: bytes) -> None:
    time = Time()
    found = leases(tmp_path, time)
    found.path(KEY).write_bytes(junk)
    with found.hold(KEY, lambda: False, ttl_s=5) as lease:
        assert lease.is_builder and lease.holder == "unknown"
    assert 5 <= time.now <= 7


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_dead_holder_on_this_machine(tmp_path: Path) -> None:
    """Ended, and waiting to be collected by its parent; and a later process of the same number."""
    code = (
        "import os, sys; from pathlib import Path; from loadplan.cache.cache import Cache; "
        f"held = Cache(Path(sys.argv[1])).lease({KEY!r}); held.__enter__(); print('held', flush=True); sys.stdin.read(); os._exit(9)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    assert process.stdout.readline() == "held\n"
    time = Time()
    found = leases(Cache(tmp_path).leases.folder, time)
    with found.hold(KEY, lambda: False, timeout_s=3) as lease:
        assert lease.waited_s == pytest.approx(3)  # it lives, so we waited
        assert lease.holder.startswith(f"process {process.pid} on ")
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    waits = len(time.waits)
    with found.hold(KEY, lambda: False) as lease:
        assert lease.is_builder and lease.holder.startswith(f"process {process.pid} on ")
    process.stdout.close()
    process.wait()
    record = {"format": 1, "host": this_host(), "pid": os.getpid(), "started": "1", "token": "t"}
    found.path(KEY).write_bytes(format_record(record))
    with found.hold(KEY, lambda: False) as lease:
        assert lease.is_builder
    assert len(time.waits) == waits


def test_where_no_lease_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for is_done in (True, False):
        with leases(tmp_path / "file" / "leases", Time()).hold(KEY, lambda done=is_done: done) as lease:  # type: ignore[misc]
            assert lease.is_builder != is_done


def test_an_error_gives_the_lease_back(tmp_path: Path) -> None:
    found = leases(tmp_path, Time())
    with pytest.raises(ZeroDivisionError), found.hold(KEY, lambda: False):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), found.hold(KEY, lambda: bool(1 // 0)):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotADigest):
        found.path("../x")


def test_eight_processes_build_once(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from loadplan.cache import Cache
cache = Cache(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
with cache.lease({KEY!r}) as lease:
    if lease.is_builder:
        cache.put({KEY!r}, {{"x": b"x" * 1_000_000}})
        print("built")
assert cache.fetch({KEY!r}) == {{"x": b"x" * 1_000_000}}
"""
    command = [sys.executable, "-c", code, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(8)]  # type: ignore[call-overload]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    said = [process.communicate("go\n")[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert sorted(said) == [""] * 7 + ["built\n"]
    assert Cache(tmp_path).leases.paths() == []


@given(st.binary(max_size=80) | st.just(b"").map(lambda _: format_record({"format": 1, "host": 1})))
def test_records_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "lease"
    path.write_bytes(data)
    assert parse_holder(find_record(path)) is None
