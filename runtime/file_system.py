"""What kind of file system a file lies on, and whether its bytes are in the page cache: what a loading way costs."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

from loadplan.runtime.pages import PAGE_NBYTES

# A fault on a mapped page of these waits for a server, page by page, and a server that goes away kills the process.
_NETWORK = frozenset(
    {"9p", "afs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs", "virtiofs"}
)
_PROBES = 64  # places that are looked at in a large file,
_PROBE_PAGES = 4096  # one in so many pages, for a model may have thousands of small ones
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def is_network(descriptor: int) -> bool:
    """Whether the open file lies on a server, or in a user-space file system, which may well be one."""
    kind = _mounts().get(os.fstat(descriptor).st_dev, "")
    return kind in _NETWORK or kind == "fuse" or kind.startswith("fuse.")


@lru_cache(maxsize=1)
def _mounts() -> dict[int, str]:
    """Device number -> file system type (proc(5), /proc/PID/mountinfo); empty where there is no /proc."""
    found: dict[int, str] = {}
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        major, _, minor = before.split()[2].partition(":")
        found[os.makedev(int(major), int(minor))] = after.split()[0]
    return found


def is_resident(address: int, nbytes: int) -> bool:
    """Whether nine tenths of the mapped file at `address` are in the page cache, by a sample of its pages.

    The kernel tells it only about files that the user may write or owns, and says yes for others (mincore(2)).
    """
    pages = -(-nbytes // PAGE_NBYTES)
    if not pages:
        return True
    state = ctypes.create_string_buffer(1)
    probes = range(0, pages, max(pages // _PROBES, min(_PROBE_PAGES, pages)))
    absent = 0
    for page in probes:
        absent += _LIBC.mincore(address + page * PAGE_NBYTES, PAGE_NBYTES, state) != 0 or not state.raw[0] & 1
    return absent * 10 <= len(probes)
