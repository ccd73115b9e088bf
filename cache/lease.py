"""Who builds a key: one process where possible, the others wait. Advisory: two that build both put the same.

A lease is a file that is made exclusively and says who holds it. The holder renews its mtime; one that died on this
machine is noticed at once, one elsewhere when its lease has not been renewed for `ttl_s` of the watcher's own clock, so
that clocks need not agree.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from loadplan.cache.digest import NotADigest, is_digest
from loadplan.cache.record import NotReadable, find_record, format_record
from loadplan.cache.write_file import FolderNotWritable, finished_files, make_folder, put_back, set_aside

FORMAT = 1
TTL_S = 60.0  # of a holder that died on another machine, or was stopped
TIMEOUT_S = 3600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 2.0


@dataclass(frozen=True, slots=True)
class Lease:
    """What a process that asked for a lease should do."""

    key: str
    is_builder: bool  # build and put it; otherwise another process did, and it can be fetched
    waited_s: float = 0.0
    holder: str = ""  # of the lease that was waited for in vain, or that was taken over


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease."""

    host: str  # name, boot and process namespace: where `pid` means something
    pid: int
    started: str  # of the process, in ticks since boot: a pid may come again
    token: str

    def is_dead(self) -> bool:
        """Whether it is known to have ended."""
        return self.host == this_host() and _started(self.pid) != self.started


@dataclass(frozen=True, slots=True)
class Leases:
    """One file a key at `folder/<key>`."""

    folder: Path
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep

    def path(self, key: str) -> Path:
        if not is_digest(key):
            raise NotADigest(key)
        return self.folder / key

    @contextmanager
    def hold(
        self, key: str, is_done: Callable[[], bool], timeout_s: float = TIMEOUT_S, ttl_s: float = TTL_S
    ) -> Iterator[Lease]:
        """The lease of `key`, given back at the end of the block.

        Args:
            key: what is to be built.
            is_done: whether it is built and good; asked when the lease is got, for another may have held it before.
            timeout_s: how long to wait for others before building all the same.
            ttl_s: how long a lease lasts that is not renewed.
        """
        path, token, began = self.path(key), secrets.token_hex(8), self.clock()
        try:
            holder = self._acquire(path, token, began + timeout_s, ttl_s)
        except (FolderNotWritable, NotReadable):  # then nobody leases here; whoever puts will say what is wrong
            yield Lease(key, not is_done(), self.clock() - began)
            return
        waited_s = self.clock() - began
        stop = threading.Event()
        renewer = threading.Thread(target=_renew, args=(path, token, ttl_s / 4, stop), name="lease", daemon=True)
        try:
            if is_done():
                _release(path, token)
                yield Lease(key, False, waited_s, holder)
                return
            renewer.start()
            try:
                yield Lease(key, True, waited_s, holder)
            finally:
                stop.set()
                renewer.join()
        finally:
            _release(path, token)

    def _acquire(self, path: Path, token: str, deadline: float, ttl_s: float) -> str:
        """Make the lease ours, or wait in vain; returns who held it last, if it was taken over or not got."""
        seen, since, wait_s, last = "", self.clock(), _FIRST_WAIT_S, ""
        make_folder(path.parent)
        while not _create(path, token):
            state, holder = _state(path)
            if state != seen:
                seen, since = state, self.clock()
            now = self.clock()
            if (holder is not None and holder.is_dead()) or (state and now - since >= ttl_s):
                last = _describe(holder)
                _take_away(path, state)
                continue
            if now >= deadline:
                return _describe(holder)
            self.sleep(min(wait_s, max(deadline - now, 0.0), ttl_s))
            wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)
        return last

    def find(self, key: str) -> Holder | None:
        """Who holds the lease of `key`; None when nobody does."""
        return _state(self.path(key))[1]

    def paths(self) -> list[Path]:
        """Where leases lie, held or left."""
        return finished_files(self.folder)


def _create(path: Path, token: str) -> bool:
    holder = {
        "format": FORMAT,
        "host": this_host(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "token": token,
    }
    try:
        with path.open("xb", buffering=0) as file:
            file.write(format_record(holder))
    except FileExistsError:
        return False
    except OSError as error:
        raise FolderNotWritable(error.errno, error.strerror, str(path.parent)) from error
    return True


def _state(path: Path) -> tuple[str, Holder | None]:
    """What changes when the lease is renewed or goes to another, empty when there is none; and its holder, if known."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "", None
    return f"{found.st_ino} {found.st_mtime_ns}", parse_holder(find_record(path))


def _take_away(path: Path, state: str) -> None:
    """Remove the lease if it is still the one that was judged."""
    aside = set_aside(path)
    if aside is None:
        return
    if _state(aside)[0] == state:
        with suppress(OSError):
            aside.unlink()
    else:  # renewed, or another's, meanwhile
        put_back(aside, path)


def _release(path: Path, token: str) -> None:
    with suppress(OSError):
        holder = parse_holder(find_record(path))
        if holder is not None and holder.token == token:
            path.unlink()


def _renew(path: Path, token: str, every_s: float, stop: threading.Event) -> None:
    while not stop.wait(every_s):
        with suppress(OSError):
            holder = parse_holder(find_record(path))
            if holder is None or holder.token != token:
                return  # taken over: it is theirs now
            os.utime(path)


def _describe(holder: Holder | None) -> str:
    return "unknown" if holder is None else f"process {holder.pid} on {holder.host.partition(' ')[0]}"


def parse_holder(value: object) -> Holder | None:
    """The holder in a lease, or None when it says anything else: one that is being written, for instance."""
    match value:
        case {"format": 1, "host": str(host), "pid": int(pid), "started": str(started), "token": str(token)}:
            return Holder(host, pid, started, token)
        case _:
            return None


@cache
def this_host() -> str:
    """Where a pid of this process means something: machine, boot, and process namespace (a container has its own)."""
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {boot} {namespace}"


def _started(pid: int) -> str:
    """When process `pid` was started, in ticks since boot (proc(5), stat, field 22); empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]  # a zombie builds nothing
