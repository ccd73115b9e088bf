"""`loadplan convert --rank-from-env`: processes as torchrun starts them, some of which die; equal to one conversion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loadplan.compiler import Target, compile_plan, convert
from loadplan.recipes import Recipe
from loadplan.runtime import Artifact, Plan

RANKS = 4


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    numbers, norm = torch.arange(64.0), torch.arange(16.0)
    save_file({"a.w": numbers.view(8, 8), "b.w": -numbers.view(8, 8), "norm": norm}, folder / "model.safetensors")
    return folder


@pytest.fixture
def plan(weights: Path, tmp_path: Path) -> Path:
    recipe = Recipe(tp_plan={"a": "colwise", "b": "rowwise"})
    compile_plan(weights, recipe, "recipe", Target(tp_size=RANKS)).save(tmp_path / "plan")
    return tmp_path / "plan"


def _start(plan: Path, weights: Path, folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadplan.compiler", "convert", str(plan), str(weights), str(folder)]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | environment
    return subprocess.Popen(
        [*command, "--rank-from-env"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said = "".join(process.communicate(timeout=300))
    return process.returncode, said


def _ranks(plan: Path, weights: Path, folder: Path, ranks: range) -> list[tuple[int, str]]:
    started = [_start(plan, weights, folder, RANK=str(rank), WORLD_SIZE=str(RANKS)) for rank in ranks]
    return [_finish(process) for process in started]


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_ranks_at_once_make_what_one_process_makes(plan: Path, weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "artifact"
    done = _ranks(plan, weights, folder, range(RANKS))
    assert [code for code, _ in done] == [0] * RANKS, done
    assert sum("its part is made" in said for _, said in done) == RANKS - 1
    convert(plan, weights, tmp_path / "whole")
    assert _contents(folder) == _contents(tmp_path / "whole")
    (lock,) = {path.name for path in folder.parent.iterdir()} - {"artifact"}  # nothing else is left
    assert lock.endswith(".lock")
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    ((code, said),) = _ranks(plan, weights, folder, range(1))  # one that comes late, or once more
    assert code == 0, said
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    assert len(list(folder.parent.iterdir())) == 2


def test_one_that_fails_holds_up_nobody_and_is_made_up_for(plan: Path, weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "artifact"
    assert [code for code, _ in _ranks(plan, weights, folder, range(RANKS - 1))] == [0] * (RANKS - 1)
    assert not folder.exists()
    (parts,) = folder.parent.glob("*.parts")
    made = {path.name: path.stat().st_ino for path in parts.glob("*.safetensors")}
    damaged = next(path for path in sorted(parts.glob("*.safetensors")) if "rank-1" in path.name)
    damaged.write_bytes(damaged.read_bytes()[:-1])  # cut off with the machine
    done = _ranks(plan, weights, folder, range(RANKS))
    assert [code for code, _ in done] == [0] * RANKS, done
    convert(plan, weights, tmp_path / "whole")
    assert _contents(folder) == _contents(tmp_path / "whole")
    kept = {path.name for path in folder.iterdir() if made.get(path.name) == path.stat().st_ino}
    assert damaged.name not in kept
    assert kept >= {name for name in made if "rank-0" in name}


def test_parts_of_other_weights_are_not_taken(plan: Path, weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "artifact"
    _ranks(plan, weights, folder, range(RANKS - 1))
    numbers, norm = torch.arange(64.0) + 1, torch.arange(16.0)
    save_file({"a.w": numbers.view(8, 8), "b.w": -numbers.view(8, 8), "norm": norm}, weights / "model.safetensors")
    ((code, said),) = _ranks(plan, weights, folder, range(RANKS - 1, RANKS))
    assert code == 1
    assert "saw files of different times or sizes" in said
    assert not folder.exists()
    assert [code for code, _ in _ranks(plan, weights, folder, range(RANKS))].count(0) >= 1
    convert(plan, weights, tmp_path / "whole")
    assert _contents(folder) == _contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "RANK and WORLD_SIZE not set; start the processes with torchrun"),
        ({"RANK": "0"}, "WORLD_SIZE not set"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "are no numbers"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not from 0 to 3"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the plan is for 4 ranks, WORLD_SIZE is 2; start 4 processes, or compile with --tp-size 2"),
    ],
)  # fmt: skip
def test_wrong_environments(
    environment: dict[str, str], message: str, plan: Path, weights: Path, tmp_path: Path
) -> None:
    code, said = _finish(_start(plan, weights, tmp_path / "out" / "artifact", **environment))
    assert code == 1
    assert message in said
    assert not (tmp_path / "out").exists()


def test_torchrun_itself(plan: Path, weights: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.run")
    folder = tmp_path / "out" / "artifact"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    arguments = ["-m", "loadplan.compiler", "convert", str(plan), str(weights), str(folder), "--rank-from-env"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Artifact.open(folder).original.digest == Plan.open(plan).digest
