"""Work on threads: all of it once, the first error ends it, and nothing of it is left however it ends."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from threading import Event

import pytest
import torch

from loadplan.runtime.loading import LoadCancelled, Loading, Task

TENSORS = {number: torch.tensor(number) for number in range(6)}


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loadplan")]


def tasks(run: Callable[[int], None], count: int = 6) -> list[Task]:
    return [Task(10, (number,), lambda number=number: run(number)) for number in range(count)]  # type: ignore[misc]


@pytest.mark.parametrize("threads", [0, 1, 3, 20])
def test_each_task_once_then_the_last(threads: int) -> None:
    done: list[int] = []
    said: list[tuple[int, int]] = []
    loading = Loading(TENSORS, tasks(done.append), threads, lambda: done.append(99), late=[5])
    result = loading.result(lambda nbytes, total: said.append((nbytes, total)))
    assert result == TENSORS
    assert sorted(done[:-1]) == list(range(6))
    assert done[-1] == 99
    assert said == sorted(said)
    assert said[-1] == (60, 60)
    assert ours() == []


@pytest.mark.parametrize("threads", [0, 2])
def test_nothing_to_do(threads: int) -> None:
    assert Loading(TENSORS, [], threads).result() == TENSORS
    ran: list[bool] = []
    assert Loading({}, [], threads, lambda: ran.append(True)).result() == {}
    assert ran == [True]


def test_buffers_are_ready_one_by_one() -> None:
    gates = [Event() for _ in range(4)]
    loading = Loading(TENSORS, tasks(lambda number: _pass(gates[number]), 4), 1, late=[3])
    assert not loading.ready(0)
    assert loading.ready(5)  # nothing writes to it
    gates[0].set()
    assert loading.wait([0]) == {0: TENSORS[0]}
    assert not loading.ready(1)
    for gate in gates:
        gate.set()
    assert set(loading.wait([3, 1])) == {1, 3}
    loading.result()
    assert ours() == []


def _pass(gate: Event) -> None:
    assert gate.wait(60)


def test_the_error_reaches_all_who_wait() -> None:
    gate = Event()

    def fail(number: int) -> None:
        if number == 1:
            _pass(gate)
            raise OSError(5, "disk")

    loading = Loading(TENSORS, tasks(fail), 1)
    assert loading.wait([0])
    gate.set()
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            loading.wait([4])
    with pytest.raises(OSError, match="disk"):
        loading.result()
    assert loading.wait([0]) == {0: TENSORS[0]}  # complete before
    assert ours() == []


def test_cancel_waits_for_what_runs() -> None:
    started, gate, done = Event(), Event(), []

    def run(number: int) -> None:
        started.set()
        _pass(gate)
        done.append(number)

    loading = Loading(TENSORS, tasks(run), 1)
    _pass(started)
    canceller = threading.Thread(target=loading.cancel)
    canceller.start()
    with pytest.raises(LoadCancelled, match="load again"):
        loading.wait([5])
    assert canceller.is_alive()
    gate.set()
    canceller.join(60)
    assert done == [0]
    assert ours() == []
    with pytest.raises(LoadCancelled):
        loading.result()


def test_dropping_it_stops_the_work() -> None:
    started, gate, done = Event(), Event(), []

    def run(number: int) -> None:
        started.set()
        _pass(gate)
        done.append(number)

    loading = Loading(TENSORS, tasks(run), 1)
    (thread,) = (thread for thread in threading.enumerate() if thread.name.startswith("loadplan"))
    _pass(started)
    del loading
    gc.collect()
    gate.set()
    thread.join(60)
    assert not thread.is_alive()
    assert done == [0]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_interrupt_of_the_wait(threads: int) -> None:
    def run(number: int) -> None:
        if number == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Loading(TENSORS, tasks(run), threads).result(lambda done, total: None)
    for thread in threading.enumerate():  # one that hears of it between two steps of ours ends by itself
        if thread.name.startswith("loadplan"):
            thread.join(60)
    assert ours() == []


def test_progress_may_raise() -> None:
    def say(done: int, total: int) -> None:
        raise RuntimeError("enough")

    for threads in (0, 2):
        with pytest.raises(RuntimeError, match="enough"):
            Loading(TENSORS, tasks(lambda number: None), threads).result(say)
        assert ours() == []


def test_the_interpreter_ends_when_the_main_thread_does() -> None:
    """Also with work left: it is not waited for, beyond the tasks that run."""
    code = """
import threading, torch
from loadplan.runtime.loading import Loading, Task
started, gate = threading.Event(), threading.Event()
def run(number):
    print(number, flush=True)
    started.set()
    threading.main_thread().join()
loading = Loading({0: torch.zeros(1)}, [Task(1, (0,), lambda n=n: run(n)) for n in range(50)], 1)
started.wait()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["0"]
    assert found.stderr == ""
