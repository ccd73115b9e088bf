"""What goes wrong around a build: inputs that change meanwhile (B82), conditions that combine (B83), outputs and state
that are lost or junk (B84). The build runs as its users run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadplan.compiler.build import Build
from loadplan.compiler.build_file import read_project
from loadplan.runtime import Artifact, FileMismatch, Plan, load_state_dict

RECIPES = """
from loadplan.recipes import Recipe, WeightRenaming

RECIPE = Recipe(rules=(WeightRenaming("old", "new"),))
"""

CHANGES_ITS_INPUT = """
import os
from pathlib import Path
from loadplan.recipes import Recipe, WeightRenaming

def recipe(config):
    late = Path(__file__).parent / "late.safetensors"
    if late.exists():
        os.replace(late, Path(__file__).parent / "weights" / "model.safetensors")
    return Recipe(rules=(WeightRenaming("old", "new"),))
"""

PROJECT = """
[checkpoint.one]
source = "weights"
[checkpoint.one.variant.plain]
recipe = "recipes.py:RECIPE"
signature = "recipe"
"""


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once") / "project"
    (folder / "weights").mkdir(parents=True)
    save_file({"old.w": torch.arange(6.0)}, folder / "weights" / "model.safetensors")
    (folder / "recipes.py").write_text(RECIPES, encoding="utf-8")
    (folder / "loadplan.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "dodo.py").write_text("from loadplan.compiler.tasks import *\n", encoding="utf-8")
    _doit(folder)
    return folder


@pytest.fixture
def built(built_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(built_once, tmp_path / "built")
    return tmp_path / "built"


def _doit(folder: Path, *args: str, code: int = 0) -> str:
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "doit", *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def _ran(said: str) -> list[str]:
    return sorted(re.findall(r"^\.  (\S+)", said, re.MULTILINE))


def _everything(*tasks: str) -> list[str]:
    return [f"{task}:one@plain" for task in tasks]


# -- B82: an input changes while the task runs ----------------------------------------------------------------------


def test_a_header_that_changes_while_it_is_compiled_is_not_taken_for_the_old_one(built: Path) -> None:
    (built / "recipes.py").write_text(CHANGES_ITS_INPUT, encoding="utf-8")
    (built / "loadplan.toml").write_text(PROJECT.replace(":RECIPE", ":recipe"), encoding="utf-8")
    shutil.rmtree(built / ".loadplan")
    shutil.rmtree(built / "build")
    save_file({"old.other": torch.ones(3)}, built / "late.safetensors")
    said = _doit(built, code=1)
    assert "weights changed during the build; run again" in said
    assert not (built / "build" / "loadplan" / "one@plain.loadplan").exists()
    assert _ran(_doit(built)) == _everything("compile", "convert", "verify")
    plan = Plan.open(built / "build" / "loadplan" / "one@plain.loadplan")
    assert [tensor.name for tensor in plan.head.tensors] == ["new.other"]


def test_weights_that_change_while_they_are_converted_are_converted_again(built: Path) -> None:
    weights = built / "weights" / "model.safetensors"
    shutil.rmtree(built / "build" / "loadplan" / "one@plain.converted")
    shutil.rmtree(built / ".loadplan")
    build = Build(read_project(built / "loadplan.toml"))
    variant = build.project.get("one@plain")

    def replace(done: int, total: int) -> None:
        save_file({"old.w": torch.arange(6.0) + 1}, built / "late.safetensors")
        (built / "late.safetensors").replace(weights)

    with pytest.raises(FileMismatch, match=r"^model\.safetensors: was replaced or changed while"):
        build.build_artifact(variant, replace)
    said = _doit(built)
    assert _ran(said) == _everything("convert", "verify")
    found = load_state_dict(Artifact.open(built / "build" / "loadplan" / "one@plain.converted"))
    assert torch.equal(found["new.w"], torch.arange(6.0) + 1)


# -- B83: two conditions on one task --------------------------------------------------------------------------------


def test_two_conditions_on_one_task_are_up_to_date_together(built: Path) -> None:
    text = PROJECT + 'dtype = "float16"\nmissing = "ignore"\n'
    (built / "loadplan.toml").write_text(text, encoding="utf-8")
    said = _doit(built)
    assert 'dtype changed: null -> "F16", missing changed: "error" -> "ignore"' in said
    assert _ran(_doit(built)) == []
    (built / "loadplan.toml").write_text(text.replace("ignore", "error"), encoding="utf-8")
    said = _doit(built)
    assert 'one@plain: missing changed: "ignore" -> "error"' in said
    assert "dtype" not in said


# -- B84: what depends on a task runs iff its result changed, and outputs are looked at -----------------------------


def test_a_new_plan_of_equal_content_rebuilds_nothing_after_it(built: Path) -> None:
    """Another way to write the same: the compile task runs, its result is the same, nothing after it does."""
    text = RECIPES.replace('"old", "new"', '"old", "news"')
    (built / "recipes.py").write_text(text, encoding="utf-8")
    assert _ran(_doit(built)) == _everything("compile", "convert", "verify")
    record = built / "build" / "loadplan" / "records" / "one@plain.plan"
    record.unlink()
    said = _doit(built)
    assert _ran(said) == _everything("compile")
    assert "not done before" in said


@pytest.mark.parametrize("harm", ["junk", "truncated", "missing"])
@pytest.mark.parametrize("name", ["one@plain.loadplan", *(f"one@plain.converted/{n}" for n in ("model.safetensors", "artifact.loadplan", "original.loadplan"))])  # fmt: skip
def test_a_missing_or_junk_output_is_built_again(built: Path, name: str, harm: str) -> None:
    path = built / "build" / "loadplan" / name
    before = path.read_bytes()
    path.unlink()
    if harm == "junk":
        path.write_bytes(b"junk" * 100)
    elif harm == "truncated":
        path.write_bytes(before[: len(before) // 2])
    said = _doit(built)
    assert re.search(r"one@plain: \S+ is (missing|damaged)", said)
    assert path.read_bytes() == before
    assert _ran(_doit(built)) == []


def test_what_is_not_ours_is_left_alone(built: Path) -> None:
    path = built / "build" / "loadplan" / "one@plain.loadplan"
    path.unlink()
    path.mkdir()
    said = _doit(built, code=1)
    assert "Is a directory" in said
    assert "Traceback" not in said
    assert path.is_dir()


def test_a_folder_that_is_not_ours_is_left_alone(built: Path) -> None:
    out = built / "build" / "loadplan"
    shutil.rmtree(out / "one@plain.converted")
    (out / "records" / "one@plain.artifact").unlink()
    (out / "one@plain.converted").mkdir()
    (out / "one@plain.converted" / "mine").write_text("mine", encoding="utf-8")
    said = _doit(built, code=1)
    assert "one@plain.converted: exists and is no artifact; remove it" in said
    assert (out / "one@plain.converted" / "mine").read_text(encoding="utf-8") == "mine"


# -- state ----------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("junk", [b"", b"junk\xff\x00", None], ids=["empty", "junk", "cut off"])
def test_junk_in_every_state_file_costs_work_and_nothing_else(built: Path, junk: bytes | None) -> None:
    wanted = {path: path.read_bytes() for path in _files(built / "build") if "records" not in path.parts}
    for path in [*_files(built / ".loadplan"), *_files(built / "build" / "loadplan" / "records")]:
        data = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(data[: len(data) // 2] if junk is None else junk)
    said = _doit(built)
    assert "not done before" in said
    assert {path: path.read_bytes() for path in wanted} == wanted
    assert _ran(_doit(built)) == []


def test_no_state_at_all_costs_work_and_nothing_else(built: Path) -> None:
    shutil.rmtree(built / ".loadplan")
    shutil.rmtree(built / "build" / "loadplan" / "records")
    assert _ran(_doit(built)) == _everything("compile", "convert", "verify")
    assert _ran(_doit(built)) == []


def test_state_of_another_kind_is_no_state(built: Path) -> None:
    state = built / ".loadplan" / "doit-state"
    state.unlink()
    state.mkdir()
    assert _ran(_doit(built)) == []
    assert _ran(_doit(built, "-a")) == _everything("compile", "convert", "verify")


def test_other_tasks_of_a_dodo_keep_their_memory(built: Path) -> None:
    """doit's own checks, of tasks that are not ours, rest on the same file."""
    (built / "dodo.py").write_text(
        "from doit.tools import config_changed\n"
        "from loadplan.compiler.tasks import *\n"
        "def task_own():\n"
        "    return {'actions': ['cp recipes.py copy'], 'file_dep': ['recipes.py'], 'targets': ['copy'],\n"
        "            'uptodate': [config_changed('a')]}\n",
        encoding="utf-8",
    )
    assert _ran(_doit(built, "own")) == ["own"]
    assert _ran(_doit(built, "own")) == []
    (built / "recipes.py").write_text(RECIPES + "\n# more\n", encoding="utf-8")
    assert _ran(_doit(built, "own")) == ["own"]
    _doit(built, "forget", "own")
    assert _ran(_doit(built, "own")) == ["own"]


def test_a_torch_checkpoint_needs_torch_only_to_be_built(built: Path) -> None:
    shutil.rmtree(built / "weights")
    (built / "weights").mkdir()
    torch.save({"old.w": torch.arange(4.0)}, built / "weights" / "pytorch_model.bin")
    os.utime(built / "weights" / "pytorch_model.bin", (1, 1))  # a file of this moment is read again, to be sure
    assert _ran(_doit(built)) == _everything("compile", "convert", "verify")
    code = "import sys; from doit.doit_cmd import DoitMain; DoitMain().run([]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=built, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert _ran(done.stdout) == []
    assert torch.equal(load_file(built / "build/loadplan/one@plain.converted/model.safetensors")["new.w"], torch.arange(4.0))  # fmt: skip


# -- what doit tells ------------------------------------------------------------------------------------------------


def test_list_info_and_report_say_what_would_be_done_and_why(built: Path) -> None:
    listed = _doit(built, "list", "--all", "--status")
    assert re.search(r"U convert:one@plain +one@plain: weights", listed)
    (built / "loadplan.toml").write_text(PROJECT + "tp_size = 2\n", encoding="utf-8")
    said = _doit(built, "info", "compile:one@plain", code=1)
    assert "tp_size changed: 1 -> 2" in said
    said = _doit(built, "report")
    assert "plan: to be built: tp_size changed: 1 -> 2" in said
    assert "1 sources -> 1 targets on 1 ranks" in said


def test_reasons_name_the_key_of_a_config(built: Path) -> None:
    config = built / "weights" / "config.json"
    config.write_text('{"hidden_size": 4, "eps": 1e-05}', encoding="utf-8")
    said = _doit(built, "compile")
    assert "config.eps is new, config.hidden_size is new" in said
    config.write_text('{"hidden_size": 8, "eps": 1e-05}', encoding="utf-8")
    said = _doit(built, "compile")
    assert "one@plain: config.hidden_size changed: 4 -> 8\n" in said


def test_a_broken_build_file_is_told_in_our_words(built: Path) -> None:
    (built / "loadplan.toml").write_text(PROJECT + "tp_sise = 2\n", encoding="utf-8")
    said = _doit(built, code=3)
    assert "line 7: checkpoint.one.variant.plain.tp_sise: is not a key; did you mean 'tp_size'?" in said
    assert "Traceback" not in said
