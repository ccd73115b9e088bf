"""The doit build, run as its users run it: what is rebuilt, why, and what is not. Weights are made with safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from many_variants import make_project
from safetensors.torch import load_file, save_file

from loadplan.runtime import Artifact, load_state_dict

RECIPES = '''
"""Recipes of this test."""
from loadplan.recipes import Recipe, WeightConverter, WeightRenaming
from loadplan.compiler.ops import Concatenate, MergeModulelist

EXPERTS = Recipe(
    rules=(
        WeightRenaming("old.", "new."),
        WeightConverter("new.expert.*.w", "new.experts", [MergeModulelist(0)]),
    ),
    tp_plan={"new.lin": "colwise"},
)

def other(config):
    return Recipe(rules=(WeightRenaming("old.", "renamed."),))
'''

PROJECT = """
[checkpoint.one]
source = "weights"
[checkpoint.one.variant.whole]
recipe = "recipes.py:EXPERTS"
signature = "recipe"
[checkpoint.one.variant.halves]
recipe = "recipes.py:EXPERTS"
signature = "recipe"
tp_size = 2
[checkpoint.one.variant.other]
recipe = "recipes.py:other"
signature = "recipe"
convert = false
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with nothing built."""
    return _make_project(tmp_path / "project")


def _make_project(folder: Path) -> Path:
    (folder / "weights").mkdir(parents=True)
    _write_weights(folder / "weights" / "model.safetensors", seed=0)
    (folder / "recipes.py").write_text(RECIPES, encoding="utf-8")
    (folder / "loadplan.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "dodo.py").write_text("from loadplan.compiler.tasks import *\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _make_project(tmp_path_factory.mktemp("once") / "project")
    _doit(folder)
    return folder


@pytest.fixture
def built(built_once: Path, tmp_path: Path) -> Path:
    """A project with all built: a copy, since keys are made of contents."""
    shutil.copytree(built_once, tmp_path / "built", symlinks=True)
    return tmp_path / "built"


def _write_weights(path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"old.expert.{i}.w": torch.randn(3, 2, generator=generator) for i in range(12)}
    tensors["old.lin.weight"] = torch.randn(4, 6, generator=generator)
    save_file(tensors, path)


def _doit(folder: Path, *args: str, check: bool = True) -> str:
    """What doit printed; output of imports goes along, so that a run can show that it imported no torch."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-X", "importtime", "-m", "doit", *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, check=False)
    said = done.stdout + "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    if check:
        assert done.returncode == 0, said
    else:
        assert done.returncode != 0, said
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))
    return said + f"\nimported torch: {'torch' in imported}"


def _ran(said: str) -> list[str]:
    return sorted(re.findall(r"^\.  (\S+)", said, re.MULTILINE))


def test_first_run_builds_and_second_does_nothing(project: Path) -> None:
    first = _doit(project)
    assert _ran(first) == [
        "compile:one@halves", "compile:one@other", "compile:one@whole",
        "convert:one@halves", "convert:one@halves:rank0", "convert:one@halves:rank1", "convert:one@whole",
        "verify:one@halves", "verify:one@other", "verify:one@whole",
    ]  # fmt: skip
    assert "not done before" in first
    second = _doit(project)
    assert _ran(second) == []
    assert "imported torch: False" in second


def test_what_is_built_loads(built: Path) -> None:
    stored = load_file(built / "weights" / "model.safetensors")
    stack = torch.stack([stored[f"old.expert.{i}.w"] for i in range(12)])
    out = built / "build" / "loadplan"
    whole = load_state_dict(out / "one@whole.loadplan", built / "weights")
    assert torch.equal(whole["new.experts"], stack)
    artifact = Artifact.open(out / "one@halves.converted")
    for rank in range(2):
        found = load_state_dict(artifact, rank=rank)
        assert torch.equal(found["new.experts"], stack)
        assert torch.equal(found["new.lin.weight"], stored["old.lin.weight"][2 * rank : 2 * rank + 2])


def test_a_comment_rebuilds_nothing_and_a_pattern_its_own_plans(built: Path) -> None:
    recipes = built / "recipes.py"
    text = recipes.read_text(encoding="utf-8")
    recipes.write_text("# a comment\n" + text.replace("Recipes of this test", "Other words"), encoding="utf-8")
    assert _ran(_doit(built)) == []
    recipes.write_text(text.replace('"renamed."', '"called."'), encoding="utf-8")
    said = _doit(built)
    assert _ran(said) == ["compile:one@other", "verify:one@other"]
    assert "one@other: recipe changed" in said
    recipes.write_text(text.replace('"new.experts"', '"new.stack"'), encoding="utf-8")
    said = _doit(built)
    assert {"compile:one@halves", "compile:one@whole", "convert:one@halves", "convert:one@whole"} <= set(_ran(said))
    assert "one@whole: plan changed" in said


def test_changed_weights_of_equal_layout_convert_again_but_compile_nothing(built: Path) -> None:
    _write_weights(built / "weights" / "model.safetensors", seed=1)
    said = _doit(built)
    assert _ran(said) == [
        "convert:one@halves", "convert:one@halves:rank0", "convert:one@halves:rank1", "convert:one@whole",
        "verify:one@halves", "verify:one@other", "verify:one@whole",
    ]  # fmt: skip
    assert "content of model.safetensors changed" in said
    found = load_state_dict(Artifact.open(built / "build" / "loadplan" / "one@whole.converted"))
    assert torch.equal(found["new.experts"][3], load_file(built / "weights" / "model.safetensors")["old.expert.3.w"])


@pytest.mark.parametrize("harm", ["remove", "junk"])
@pytest.mark.parametrize(
    "name", ["one@whole.loadplan", "one@whole.converted/model.safetensors", "one@whole.converted/artifact.loadplan"]
)
def test_a_lost_or_damaged_output_is_built_again(built: Path, name: str, harm: str) -> None:
    path = built / "build" / "loadplan" / name
    before = path.read_bytes()
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    said = _doit(built)
    assert any(task.endswith("one@whole") for task in _ran(said))
    assert re.search("is missing|is damaged", said)
    assert path.read_bytes() == before
    assert _ran(_doit(built)) == []


def test_a_moved_project_compiles_nothing_with_its_cache(project: Path, tmp_path: Path) -> None:
    _doit(project, "compile")
    moved = tmp_path / "elsewhere" / "deep"
    moved.mkdir(parents=True)
    for name in ("weights", "recipes.py", "loadplan.toml", "dodo.py", ".loadplan"):
        os.rename(project / name, moved / name)  # noqa: PTH104
    said = _doit(moved, "compile")
    assert said.count("from the cache") == 3
    old, new = (root / "build" / "loadplan" / "one@halves.loadplan" for root in (project, moved))
    assert old.read_bytes() == new.read_bytes()


def test_a_fault_fails_the_task_and_leaves_nothing(project: Path) -> None:
    text = (project / "recipes.py").read_text(encoding="utf-8")
    (project / "recipes.py").write_text(text.replace("MergeModulelist(0)", "MergeModulelist(7)"), encoding="utf-8")
    said = _doit(project, "compile:one@whole", check=False)
    assert "cannot compile: 1 problem" in said
    assert "new.experts" in said
    assert not (project / "build" / "loadplan" / "one@whole.loadplan").exists()
    (project / "recipes.py").write_text(text, encoding="utf-8")
    assert _ran(_doit(project, "compile:one@whole")) == ["compile:one@whole"]


def test_wrong_values_do_not_verify(built: Path) -> None:
    """A converted file that is well-formed, recorded as good, and wrong in one element."""
    out = built / "build" / "loadplan"
    artifact = out / "one@whole.converted"
    tensors = load_file(artifact / "model.safetensors")
    tensors = {name: value.clone() for name, value in tensors.items()}
    tensors["new.experts"][11, 2, 1] += 1
    raw = bytearray((artifact / "model.safetensors").read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin, end = header["new.experts"]["data_offsets"]
    start = 8 + int.from_bytes(raw[:8], "little") + begin
    raw[start : start + end - begin] = tensors["new.experts"].numpy().tobytes()
    (artifact / "model.safetensors").write_bytes(raw)
    for record in (out / "records").glob("one@whole.proof"):
        record.unlink()
    said = _doit(built, "-s", "verify:one@whole", check=False)
    assert "new.experts, rank 0, from the artifact: values differ" in said


def test_tasks_run_in_parallel(project: Path) -> None:
    said = _doit(project, "-n", "2")
    assert said.count("bit for bit") == 3
    assert _ran(_doit(project)) == []


def test_tasks_are_listed(project: Path) -> None:
    said = _doit(project, "list", "--all")
    assert "compile:one@halves" in said
    assert "compile each variant of loadplan.toml into a plan" in said


def test_eighty_variants_with_nothing_to_do_need_no_torch(tmp_path: Path) -> None:
    """Every fourth checkpoint is a torch file. How long it takes is measured in tests/bench/bench_noop.py."""
    folder = make_project(tmp_path / "many", checkpoints=20, tensors=3)
    assert len(_ran(_doit(folder))) == 3 * 80 + 2 * 40  # one more for each rank of two
    said = _doit(folder)
    assert _ran(said) == []
    assert said.count("-- verify:") == 80
    assert "imported torch: False" in said
