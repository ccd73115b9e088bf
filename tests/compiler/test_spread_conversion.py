"""Conversion on a dask cluster of real processes, one of them killed at work; equal to a conversion on one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loadplan.compiler import convert
from loadplan.compiler.spread_conversion import DaskError, spread

pytest.importorskip("distributed")

PROJECT = """
[executor]
dask = "ADDRESS"
[checkpoint.one]
source = "weights"
[checkpoint.one.variant.tp2]
recipe = "recipes.py:RECIPE"
signature = "recipe"
tp_size = 2
"""
RECIPES = """
from loadplan.recipes import Recipe
RECIPE = Recipe(tp_plan={"layers.*.a": "colwise", "layers.*.b": "rowwise"})
"""


@contextmanager
def _process(*command: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = os.environ | {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "3"}
    with (folder / "log").open("ab") as log:
        started = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=log, stderr=log, env=env)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@contextmanager
def _worker(address: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--death-timeout", "120"]
    with _process("distributed.cli.dask_worker", address, *options, folder=folder) as started:
        yield started


def _wait_for(found: object, what: str, seconds: float = 120) -> None:
    """Until `found()` is true: a process elsewhere makes it so."""
    assert callable(found)
    tick = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if found():
            return
        tick.wait(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "scheduler.json"
    options = ["--port", "0", "--host", "127.0.0.1", "--no-dashboard", "--scheduler-file", str(file)]
    with _process("distributed.cli.dask_scheduler", *options, folder=tmp_path):
        _wait_for(lambda: file.is_file() and file.stat().st_size > 0, "the scheduler starts")
        yield json.loads(file.read_text(encoding="utf-8"))["address"]


def _make_project(folder: Path, address: str) -> Path:
    (folder / "weights").mkdir(parents=True)
    numbers = torch.arange(512 * 256, dtype=torch.float32)
    tensors = {f"layers.{i}.{n}.weight": (numbers + i).view(512, 256) for i in range(24) for n in "ab"}
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "weights" / "model.safetensors")
    (folder / "recipes.py").write_text(RECIPES, encoding="utf-8")
    (folder / "loadplan.toml").write_text(PROJECT.replace("ADDRESS", address), encoding="utf-8")
    (folder / "dodo.py").write_text("from loadplan.compiler.tasks import *\n", encoding="utf-8")
    return folder


def _parts(folder: Path) -> int:
    """How many parts the store has."""
    records = (folder / ".loadplan" / "actions").glob("??/*")
    return sum(b'"kind":"part"' in path.read_bytes() for path in records if not path.name.startswith(".tmp"))


def test_a_worker_dies_and_the_result_is_that_of_one_machine(scheduler: str, tmp_path: Path) -> None:
    folder = _make_project(tmp_path / "project", scheduler)
    subprocess.run([sys.executable, "-m", "doit", "compile"], cwd=folder, check=True, capture_output=True)
    command = [sys.executable, "-m", "doit", "convert", "verify"]
    with _worker(scheduler, tmp_path) as first:
        build = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        _wait_for(lambda: _parts(folder) > 0 or build.poll() is not None, "the first part is made")
        assert build.poll() is None, build.communicate()[0] + (tmp_path / "log").read_text(encoding="utf-8")
        first.send_signal(signal.SIGKILL)
        first.wait()
        made = _parts(folder)
        assert 1 <= made < 16, "it was to die with some parts made and others not"
        with _worker(scheduler, tmp_path), _worker(scheduler, tmp_path):
            said, _ = build.communicate(timeout=300)
    assert build.returncode == 0, said + (tmp_path / "log").read_text()
    assert _parts(folder) == 16
    assert not list((folder / ".loadplan").glob(".part-*"))  # of the one that died, too
    plan = folder / "build" / "loadplan" / "one@tp2.loadplan"
    convert(plan, folder / "weights", tmp_path / "here")
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    out = folder / "build" / "loadplan" / "one@tp2.converted"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted
    assert "bit for bit" in said


def test_a_worker_that_sees_other_weights_fails_the_build(scheduler: str, tmp_path: Path) -> None:
    """What is sent names the contents; here the file changes when the build has been started."""
    from loadplan.compiler.build import Build
    from loadplan.compiler.build_file import read_project

    folder = _make_project(tmp_path / "project", scheduler)
    build = Build(read_project(folder / "loadplan.toml"))
    variant = build.project.get("one@tp2")
    build.build_plan(variant)
    tasks = build.part_tasks(variant, build.artifact_parts(variant), 2)
    path = folder / "weights" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with _worker(scheduler, tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", _SPREAD, scheduler, json.dumps([_as_json(task) for task in tasks])],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert "OtherContents" in done.stderr
    assert "make the same checkpoint visible on all machines" in done.stderr


_SPREAD = """
import json, sys
from loadplan.compiler.part_of import PartOf
from loadplan.compiler.spread_conversion import spread
spread(sys.argv[1], [PartOf(**task) for task in json.loads(sys.argv[2])])
"""


def _as_json(task: object) -> dict[str, object]:
    from dataclasses import asdict

    found: dict[str, object] = asdict(task)  # type: ignore[call-overload]
    return found


def test_no_scheduler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadplan.compiler.spread_conversion._CONNECT_S", 1)
    with pytest.raises(DaskError, match="no scheduler answers; start `dask scheduler`"):
        spread("tcp://127.0.0.1:9", [])
