"""A process killed before any line of a pull or push leaves both sides good, and the same again succeeds (case B80).

A forked child ends by `os._exit` the first time it comes to a line, so no `finally` and no flush runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadplan.cache import Cache, ProblemKind, digest_bytes
from loadplan.cache.remotes import DirectoryRemote

SCRIPT = """
import os, sys, threading
from pathlib import Path
import loadplan.cache.transfer
from loadplan.cache import Cache
from loadplan.cache.remotes import DirectoryRemote, RemoteSet, TransferPolicy

root, source, key, work = sys.argv[1:]
files = ("transfer.py", "blob_streams.py", "directory.py")  # the rest is killed in test_kill.py
policy = TransferPolicy(threads=1)

def run(place):
    if work == "pull":
        remotes = RemoteSet([DirectoryRemote(Path(source))])
        assert loadplan.cache.transfer.pull(Cache(place), key, remotes, policy=policy)
    else:
        loadplan.cache.transfer.push(Cache(Path(source)), [key], DirectoryRemote(place, read_only=False), policy=policy)

def trace_lines(act):
    def trace(frame, event, argument):
        name = frame.f_code.co_filename
        if os.path.basename(name) not in files or "loadplan" not in frame.f_globals["__name__"]:
            return None
        if event == "line":
            act(name, frame.f_lineno)
        return trace
    threading.settrace(trace)  # the transfer's own threads
    sys.settrace(trace)

def fork(place, act):
    place.mkdir()
    child = os.fork()
    if child == 0:
        try:
            trace_lines(act)
            run(place)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

with open(Path(root, "whole.lines"), "a+", buffering=1) as file:
    assert fork(Path(root, "whole"), lambda name, line: print(f"{name}:{line}", file=file)) == 0
    file.seek(0)
    lines = list(dict.fromkeys(file.read().split()))
os.unlink(file.name)

def kill_at(wanted):
    def act(name, line):
        if f"{name}:{line}" == wanted:
            os._exit(9)
    return act

for i, wanted in enumerate(lines):
    assert fork(Path(root, str(i)), kill_at(wanted)) == 9, wanted
print(len(lines))
"""
KEY = digest_bytes(b"key")
CONTENTS = {"plan": b"a plan", "data": bytes(5000)}


@pytest.mark.parametrize("work", ["pull", "push"])
def test_a_kill_before_any_line(tmp_path: Path, work: str) -> None:
    source, places = Cache(tmp_path / "source"), tmp_path / "places"
    source.put(KEY, CONTENTS)
    places.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(places), str(source.root), KEY, work]
    killed = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert killed > 40
    wholes = 0
    for place in sorted(places.iterdir()):
        cache = Cache(place, [DirectoryRemote(source.root)])
        assert {problem.kind for problem in cache.blobs.check()} <= {ProblemKind.TEMPORARY}
        wholes += cache.find(KEY) is not None
        assert cache.fetch(KEY) in (None, CONTENTS)
        if work == "pull":
            assert cache.pull(KEY) is not None
            assert len(list(cache.blobs.folder.glob(f".tmp-{digest_bytes(CONTENTS['data'])}-*"))) == 0
        else:
            source.push([KEY], DirectoryRemote(place, read_only=False))
        assert cache.fetch(KEY) == CONTENTS
    assert 1 <= wholes < killed  # the run that was not killed, and those killed at the very end
