"""Cases B76: loads that are interrupted or fail half-way leave no thread, no open file, no map, no half-loaded module."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from builders import Raw, bytes_of, write_file
from torch import nn

from loadplan.compiler import Target, compile_plan
from loadplan.runtime import CastOverflow, FileMismatch, Plan, load_into, load_model, wait_for

PART = 1 << 20  # elements of a float32 tensor: several of them are several reads
NAMES = [f"part{number}.weight" for number in range(24)]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            part = nn.Module()
            part.weight = nn.Parameter(torch.full((PART,), 7.0))
            self.add_module(name.partition(".")[0], part)


def build(device: str = "meta") -> Parts:
    with torch.device(device):
        return Parts()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    write_file(tmp_path / "model.safetensors", {name: Raw("F32", (PART,), bytes(4 * PART)) for name in NAMES})
    return compile_plan(tmp_path)


def check_nothing_is_left(folder: Path) -> None:
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loadplan")] == []
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - names, of which one is gone when it is looked at
    assert [link for link in links if str(folder) in str(os.path.realpath(link))] == []
    assert str(folder) not in Path("/proc/self/maps").read_text()


class Stop(Exception):
    pass


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_that_is_cut_off_under_the_load(tmp_path: Path, plan: Plan, threads: int, device: str) -> None:
    """Kept exceptions keep nothing else (transformers 5.24: three kept exceptions, three maps)."""
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    kept = []
    for _ in range(3):
        module = build(device)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with pytest.raises(FileMismatch, match=r"^model\.safetensors: ") as caught:
            load_into(
                module,
                plan,
                tmp_path,
                mode="read",
                threads=threads,
                progress=lambda done, total: os.truncate(path, len(whole) // 2),
            )
        kept.append(caught.value)
        after = module.state_dict()
        assert all(after[name].is_meta == tensor.is_meta for name, tensor in before.items())
        assert device == "meta" or all(torch.equal(after[name], tensor) for name, tensor in before.items())
        check_nothing_is_left(tmp_path)
        path.write_bytes(whole)
    load_into(build(), compile_plan(tmp_path), tmp_path)


@pytest.mark.parametrize("threads", [1, 4])
def test_control_c(tmp_path: Path, plan: Plan, threads: int) -> None:
    module = build()
    with pytest.raises(KeyboardInterrupt):
        load_model(
            plan,
            tmp_path,
            model=module,
            mode="read",
            threads=threads,
            progress=lambda done, total: os.kill(os.getpid(), signal.SIGINT),
        )
    assert all(tensor.is_meta for tensor in module.state_dict().values())
    check_nothing_is_left(tmp_path)
    assert not load_model(plan, tmp_path, model=module).get_parameter("part3.weight").any()


@pytest.mark.parametrize("where", [0, 23])
def test_a_tensor_that_cannot_be_loaded(tmp_path: Path, where: int) -> None:
    """In the background: the error is raised where a weight is needed, each time, and by `wait_for`."""
    tensors = {name: Raw("F32", (PART,), bytes(4 * PART)) for name in NAMES}
    tensors[NAMES[where]] = Raw("F32", (PART,), bytes_of(torch.full((PART,), 1e30)))
    write_file(tmp_path / "model.safetensors", tensors)
    plan = compile_plan(tmp_path, target=Target(dtype="F16"))
    module = build().to(torch.float16)
    model = load_model(plan, tmp_path, model=module, wait=False)
    for _ in range(2):
        with pytest.raises(CastOverflow, match=NAMES[where]):
            model.state_dict()
        with pytest.raises(CastOverflow, match=NAMES[where]) as kept:
            wait_for(model)
    assert kept.value is not None
    check_nothing_is_left(tmp_path)


def test_a_model_that_is_dropped(tmp_path: Path, plan: Plan) -> None:
    model = load_model(plan, tmp_path, model=build, mode="read", wait=False)
    del model
    gc.collect()
    check_nothing_is_left(tmp_path)


def test_files_are_checked_before_anything_is_begun(tmp_path: Path, plan: Plan) -> None:
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(FileMismatch, match="has 1000 bytes, the plan expects"):
        load_model(plan, tmp_path, model=build, wait=False)
    check_nothing_is_left(tmp_path)


SCRIPT = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[3])
from test_cases_interrupted import build
from loadplan.runtime import load_model
model = load_model(sys.argv[1], sys.argv[2], model=build, mode="read", wait=False)
{rest}
"""


@pytest.mark.parametrize(
    ("rest", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise OSError('mine')", 1, "OSError: mine"),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("signal.raise_signal(signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_the_interpreter_ends_while_a_model_loads(tmp_path: Path, plan: Plan, rest: str, code: int, says: str) -> None:
    """Ends with the exit code and the message that it would have had, and leaves no file."""
    plan.save(tmp_path / "plan")
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(rest=rest), tmp_path / "plan", tmp_path, Path(__file__).parent],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.strip().endswith(says) and ("Traceback" in done.stderr) is bool(says), done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("variable", ["LOADPLAN_SYNC", "HF_DEACTIVATE_ASYNC_LOAD"])
def test_no_threads_where_none_are_wanted(
    tmp_path: Path, plan: Plan, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is there when the call returns, and no other thread had a part in it."""
    monkeypatch.setenv(variable, "1")
    seen: set[str] = set()
    threading.setprofile(lambda frame, event, argument: seen.add(threading.current_thread().name))
    try:
        model = load_model(plan, tmp_path, model=build, wait=False, threads=4)
        load_into(build(), plan, tmp_path, threads=4)
    finally:
        threading.setprofile(None)
    assert seen == set()
    assert all(type(module._parameters) is dict for module in model.modules())
