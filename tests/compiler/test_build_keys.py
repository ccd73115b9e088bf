"""The change matrix: what can change an output changes its key, and nothing else does (cases B77 and B78).

Each row edits a copy of one project in one way and says which keys must differ: of the plan, of the converted files, of
the model's signature. Keys are taken as the build takes them, from the files; where the process matters, in a fresh one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import raw, write_file

import loadplan.cache
from loadplan.compiler.build import Build, artifact_key
from loadplan.compiler.build_file import BuildFileError, read_project
from loadplan.compiler.build_inputs import signature_key

RECIPES = '''
"""Recipes of this test."""
from dataclasses import dataclass
from typing import ClassVar

from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist, Transpose
from loadplan.compiler.pieces import narrow, concatenate
from loadplan.recipes import Recipe, WeightConverter, WeightRenaming


ONE = 1
UNUSED = 5


def _steps():
    return ONE


@dataclass(frozen=True)
class Roll:
    spread: ClassVar = "each"
    steps: int = 1

    def bind(self, context, *args):
        return self

    def infer(self, *args):
        return args

    def lower(self, *args):
        cut = args[0].shape[0] - self.steps * _steps()
        return (concatenate([narrow(args[0], 0, cut, args[0].shape[0]), narrow(args[0], 0, 0, cut)], 0),)

    def reverse(self, *args):
        return Roll(args[0].shape[0] - self.steps)


RECIPE = Recipe(
    rules=(
        WeightRenaming("gamma$", "weight"),
        WeightConverter("experts.*.w", "experts", [MergeModulelist(0), Transpose(1, 2)]),
        WeightConverter("rolled.w", "rolled.weight", [Roll(1)]),
    ),
    tp_plan={"lin": "colwise", "out": "rowwise"},
    dtype_plan={"norm": "float32", "lin": "bfloat16"},
    may_be_missing=("extra",),
    may_be_unused=("inv_freq",),
)
'''

SIGNATURE = {
    "norm.weight": [[4], "F32"],
    "experts": [[2, 3, 4], "F32"],
    "rolled.weight": [[4, 2], "F32"],
    "lin.weight": [[4, 4], "F32"],
    "extra": [[1], "F32"],
}

PROJECT = """
[build]
output = "out"
[checkpoint.m]
source = "weights"
[checkpoint.m.variant.v]
recipe = "recipes.py:RECIPE"
signature = "signature.json"
"""

CONFIG = {"model_type": "none", "hidden_size": 4, "rms_norm_eps": 1e-05, "layers": [1, 2]}


def _tensors() -> dict[str, object]:
    return {
        "norm.gamma": raw("F32", 4),
        "experts.0.w": raw("F32", 4, 3),
        "experts.1.w": raw("F32", 4, 3, seed=1),
        "rolled.w": raw("F32", 4, 2),
        "inv_freq": raw("F32", 2),
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "project"
    (folder / "weights").mkdir(parents=True)
    write_file(folder / "weights" / "model-1.safetensors", _tensors())  # type: ignore[arg-type]
    write_file(folder / "weights" / "model-2.safetensors", {"lin.weight": raw("F32", 4, 4)})
    names = {**dict.fromkeys(_tensors(), "model-1.safetensors"), "lin.weight": "model-2.safetensors"}
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (folder / "weights" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "weights" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "signature.json").write_text(json.dumps(SIGNATURE), encoding="utf-8")
    (folder / "recipes.py").write_text(RECIPES, encoding="utf-8")
    (folder / "loadplan.toml").write_text(PROJECT, encoding="utf-8")
    return folder


Keys = Mapping[str, str]

_PRINT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_build_keys import keys
print(json.dumps(keys(Path(sys.argv[1]))))
"""


def keys(folder: Path) -> Keys:
    """The keys of the project's only variant."""
    build = Build(read_project(folder / "loadplan.toml"))
    (variant,) = build.project.variants
    inputs = build.inputs(variant)
    return {
        "plan": inputs.key,
        "converted": artifact_key(build.artifact_parts(variant)),
        "signature": signature_key(inputs.facts, inputs.target),
    }


def keys_elsewhere(folder: Path, cwd: Path | None = None, **environment: str) -> Keys:
    """The same, in a process of its own."""
    env = os.environ | environment
    command = [sys.executable, "-c", _PRINT, str(folder), str(Path(__file__).parent)]
    env["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [environment.get("PYTHONPATH")]), str(Path(__file__).parents[1])]
    )
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Keys = json.loads(done.stdout)
    return found


@dataclass(frozen=True)
class Row:
    """One edit of the project, and the keys that it must change."""

    edit: Callable[[Path], object]
    changes: frozenset[str]


def _replace(file: str, old: str, new: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")

    return edit


def _option(line: str) -> Callable[[Path], object]:
    return _replace("loadplan.toml", 'signature = "signature.json"\n', f'signature = "signature.json"\n{line}\n')


def _weights(**changed: object) -> Callable[[Path], object]:
    """The first file written anew; None takes a tensor out."""

    def edit(folder: Path) -> None:
        tensors = {**_tensors(), **{name.replace("__", "."): value for name, value in changed.items()}}
        kept = {name: value for name, value in tensors.items() if value is not None}
        write_file(folder / "weights" / "model-1.safetensors", kept)  # type: ignore[arg-type]
        path = folder / "weights" / "model.safetensors.index.json"
        index = json.loads(path.read_text(encoding="utf-8"))
        index["weight_map"] = {**dict.fromkeys(kept, "model-1.safetensors"), "lin.weight": "model-2.safetensors"}
        path.write_text(json.dumps(index), encoding="utf-8")

    return edit


def _json(file: str, **changed: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps({**data, **changed}), encoding="utf-8")

    return edit


def _rename_file(folder: Path) -> None:
    (folder / "weights" / "model-2.safetensors").rename(folder / "weights" / "model-b.safetensors")
    _replace("weights/model.safetensors.index.json", "model-2.safetensors", "model-b.safetensors")(folder)


def _row(edit: Callable[[Path], object], *changes: str) -> Row:
    return Row(edit, frozenset(changes))


CHANGES = {
    "a tensor's name": _row(_weights(inv_freq=None, inv_freqs=raw("F32", 2)), "plan", "converted"),
    "a tensor's dtype": _row(_weights(rolled__w=raw("I32", 4, 2)), "plan", "converted"),
    "the dtype that models are built in": _row(
        _weights(experts__0__w=raw("F16", 4, 3)), "plan", "converted", "signature"
    ),
    "a tensor's shape": _row(_weights(rolled__w=raw("F32", 2, 4)), "plan", "converted"),
    "one tensor less": _row(_weights(inv_freq=None), "plan", "converted"),
    "a tensor's values": _row(_weights(rolled__w=raw("F32", 4, 2, seed=7)), "converted"),
    "a file's name": _row(_rename_file, "plan", "converted"),
    "config: a value": _row(_json("weights/config.json", hidden_size=5), "plan", "signature"),
    "config: a float's last digit": _row(_json("weights/config.json", rms_norm_eps=1.0000001e-05), "plan", "signature"),
    "config: inside a list": _row(_json("weights/config.json", layers=[2, 1]), "plan", "signature"),
    "config: an unknown key": _row(_json("weights/config.json", brand_new=True), "plan", "signature"),
    "config: a number as text": _row(_json("weights/config.json", hidden_size="4"), "plan", "signature"),
    "config: its bytes, which saving restores": _row(
        _replace("weights/config.json", '"hidden_size": 4', '"hidden_size":  4'), "plan"
    ),
    "index: its bytes, which saving restores": _row(
        _replace("weights/model.safetensors.index.json", '"total_size": 1', '"total_size": 2'), "plan"
    ),
    "a stray file, which the report notes": _row(
        lambda folder: write_file(folder / "weights" / "other.safetensors", {"x": raw("F32", 1)}), "plan"
    ),
    "recipe: a pattern": _row(_replace("recipes.py", '"gamma$"', '"gamma"'), "plan"),
    "recipe: a target": _row(_replace("recipes.py", '"experts.*.w", "experts"', '"experts.*.w", "expert"'), "plan"),
    "recipe: an op's parameter": _row(_replace("recipes.py", "Transpose(1, 2)", "Transpose(0, 1)"), "plan"),
    "recipe: an op more": _row(_replace("recipes.py", "[Roll(1)]", "[Roll(1), Roll(1)]"), "plan"),
    "recipe: an own op's parameter": _row(_replace("recipes.py", "[Roll(1)]", "[Roll(2)]"), "plan"),
    "recipe: an own op's source": _row(_replace("recipes.py", "0, cut, args[0]", "0, cut + 0, args[0]"), "plan"),
    "recipe: what an own op calls": _row(_replace("recipes.py", "return ONE\n", "return ONE + 1\n"), "plan"),
    "recipe: what that uses": _row(_replace("recipes.py", "ONE = 1\n", "ONE = 1.0\n"), "plan"),
    "recipe: its parallel plan": _row(_replace("recipes.py", '"out": "rowwise"', '"out": "colwise"'), "plan"),
    "recipe: its dtype plan": _row(_replace("recipes.py", '"norm": "float32"', '"norm": "float16"'), "plan"),
    "recipe: a waiver of a target": _row(_replace("recipes.py", '("extra",)', '("extra", "more")'), "plan"),
    "recipe: a waiver of a source": _row(_replace("recipes.py", '("inv_freq",)', '("inv_freq", "more")'), "plan"),
    "another recipe": _row(_replace("loadplan.toml", '"recipes.py:RECIPE"', '"auto"'), "plan"),
    "signature: a shape": _row(_json("signature.json", extra=[[2], "F32"]), "plan"),
    "signature: a dtype": _row(_json("signature.json", extra=[[1], "F16"]), "plan"),
    "signature: a name": _row(_json("signature.json", more=[[1], "F32"]), "plan"),
    "no signature": _row(_replace("loadplan.toml", '"signature.json"', '"recipe"'), "plan"),
    "target: dtype": _row(_option('dtype = "bfloat16"'), "plan", "signature"),
    "target: ranks": _row(_option("tp_size = 2"), "plan"),
    "target: parallel plan": _row(_option('tp_plan = { "lin" = "rowwise" }'), "plan"),
    "target: dtype plan": _row(_option('dtype_plan = { "norm" = "bfloat16" }'), "plan"),
    "target: policy on missing": _row(_option('missing = "ignore"'), "plan"),
    "target: policy on unexpected": _row(_option('unexpected = "ignore"'), "plan"),
}


def test_fusions_count(project: Path) -> None:
    """Of a model, which this project has not; so the target's part alone, where this version takes fusions."""
    _replace("loadplan.toml", '"signature.json"', '"auto"')(project)
    before = keys(project)
    _replace("loadplan.toml", '"auto"\n', '"auto"\nfusions = { qkv = true }\n')(project)
    try:
        found = keys(project)
    except BuildFileError as error:
        assert "fusions" in str(error)
        pytest.skip("this version refuses fusions")
    assert found["plan"] != before["plan"]
    assert found["signature"] != before["signature"]


def _move(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "weights").rename(folder / "deep" / "er" / "w e i g h t s")
    _replace("loadplan.toml", '"weights"', '"deep/er/w e i g h t s"')(folder)


def _link(folder: Path) -> None:
    (folder / "weights").rename(folder / "elsewhere")
    (folder / "weights").symlink_to("elsewhere")


def _link_files(folder: Path) -> None:
    """As a hub's cache has them: links to blobs with other names."""
    (folder / "blobs").mkdir()
    for number, path in enumerate(sorted((folder / "weights").iterdir())):
        path.rename(folder / "blobs" / str(number))
        path.symlink_to(Path("..", "blobs", str(number)))


def _hard_links(folder: Path) -> None:
    (folder / "weights").rename(folder / "first")
    (folder / "weights").mkdir()
    for path in (folder / "first").iterdir():
        os.link(path, folder / "weights" / path.name)


def _touch(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))


def _modes(folder: Path) -> None:
    for path in (folder / "weights").iterdir():
        path.chmod(0o400)


def _reorder(folder: Path) -> None:
    """The files written anew in another order, as a file system would list them."""
    contents = {path.name: path.read_bytes() for path in (folder / "weights").iterdir()}
    shutil.rmtree(folder / "weights")
    (folder / "weights").mkdir()
    for name in sorted(contents, reverse=True):
        (folder / "weights" / name).write_bytes(contents[name])


def _build_once(folder: Path) -> None:
    keys(folder)  # what is remembered gives the same answer


SAME: Mapping[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "path": _move,
    "a link to the folder": _link,
    "links to files": _link_files,
    "hard links": _hard_links,
    "times": _touch,
    "modes": _modes,
    "order of files on disk": _reorder,
    "asked before": _build_once,
    "a README in the folder": lambda folder: (folder / "weights" / "README.md").write_text("# words"),
    "a subfolder": lambda folder: (folder / "weights" / "onnx").mkdir(),
    "recipe: a comment": _replace("recipes.py", "RECIPE = ", "# why\n\n\nRECIPE = "),
    "recipe: a comment in an own op's module": _replace("recipes.py", "def _steps():", "def _steps():  # one"),
    "recipe: what no op uses": _replace("recipes.py", "UNUSED = 5", "UNUSED = 6"),
    "recipe: blanks": _replace("recipes.py", "[Roll(1)]", "[ Roll(steps = 1), ]"),
    "recipe: order of a mapping": _replace(
        "recipes.py", '{"lin": "colwise", "out": "rowwise"}', '{"out": "rowwise", "lin": "colwise"}'
    ),
    "recipe: order of another": _replace(
        "recipes.py", '{"norm": "float32", "lin": "bfloat16"}', '{"lin": "BF16", "norm": "F32"}'
    ),
    "recipe: its file's name": lambda folder: (
        (folder / "recipes.py").rename(folder / "mine.py"),
        _replace("loadplan.toml", "recipes.py", "mine.py")(folder),
    ),
    "signature: blanks": lambda folder: (folder / "signature.json").write_text(json.dumps(SIGNATURE, indent=3)),
    "names of checkpoint and variant": lambda folder: (folder / "loadplan.toml").write_text(
        PROJECT.replace("checkpoint.m", "checkpoint.other").replace("variant.v", "variant.w")
    ),
    "defaults written out": _option('tp_size = 1\nmissing = "error"\nunexpected = "error"'),
    "whether it is converted": _option("convert = false"),
    "output folder": _replace("loadplan.toml", '"out"', '"elsewhere"'),
    "cache and remotes": lambda folder: (folder / "loadplan.toml").write_text(
        PROJECT + '[cache]\nroot = "c"\nmax_size = "1 GiB"\n[cache.remote.r]\nurl = "shared"\n'
    ),
    "executor": lambda folder: (folder / "loadplan.toml").write_text(PROJECT + '[executor]\ndask = "tcp://h:1"\n'),
}


@pytest.fixture
def project(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "project")
    return tmp_path / "project"


@pytest.fixture(scope="module")
def base_keys(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys") / "project"
    shutil.copytree(base, folder)
    return keys(folder)


@pytest.mark.parametrize("row", CHANGES.values(), ids=CHANGES)
def test_what_can_change_an_output_changes_its_key(row: Row, project: Path, base_keys: Keys) -> None:
    row.edit(project)
    found = keys(project)
    assert {kind for kind, key in found.items() if key != base_keys[kind]} == row.changes


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_what_cannot_does_not(edit: Callable[[Path], object], project: Path, base_keys: Keys) -> None:
    edit(project)
    assert keys(project) == base_keys


def test_all_changes_give_different_keys(base: Path, tmp_path: Path, base_keys: Keys) -> None:
    found = {"nothing": base_keys["plan"]}
    for number, (what, row) in enumerate(CHANGES.items()):
        if "plan" in row.changes:
            shutil.copytree(base, tmp_path / str(number))
            row.edit(tmp_path / str(number))
            found[what] = keys(tmp_path / str(number))["plan"]
    assert len(set(found.values())) == len(found)


def test_the_matrix_is_large_enough() -> None:
    assert len(CHANGES) >= 25
    assert len(SAME) >= 20


def test_the_order_of_questions_does_not_count(project: Path, base_keys: Keys) -> None:
    """A, B, A in one process (B77)."""
    other = project.parent / "other"
    shutil.copytree(project, other)
    CHANGES["target: ranks"].edit(other)
    CHANGES["recipe: a pattern"].edit(other)
    assert keys(project) == base_keys
    assert keys(other)["plan"] != base_keys["plan"]
    assert keys(project) == base_keys


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "7", "LANG": "C", "LC_ALL": "C", "TZ": "UTC+11"},
        {"PYTHONHASHSEED": "8", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "USER": "somebody", "OMP_NUM_THREADS": "1"},
    ],
    ids=lambda environment: ",".join(environment),
)
def test_environment_user_and_folder_do_not_count(
    environment: dict[str, str], project: Path, tmp_path: Path, base_keys: Keys
) -> None:
    assert keys_elsewhere(project, cwd=tmp_path, HOME=str(tmp_path), **environment) == base_keys


def test_the_version_of_transformers_counts_in_the_signature(project: Path, tmp_path: Path, base_keys: Keys) -> None:
    """Signatures are asked for again; plans are made again only if one differs then."""
    info = tmp_path / "site" / "transformers-99.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 99.0\n", encoding="utf-8")
    found = keys_elsewhere(project, PYTHONPATH=str(info.parent))
    assert {kind for kind, key in found.items() if key != base_keys[kind]} == {"signature"}


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("compiler/ops/join.py", '"""', '"""Other. ', {"plan", "signature"}),
        ("runtime/plan_format.py", "FORMAT = ", "FORMAT = 1000 + ", {"plan", "signature", "converted"}),
        ("runtime/execute.py", '"""', '"""Other. ', {"plan", "signature", "converted"}),
        ("compiler/conversion.py", '"""', '"""Other. ', {"plan", "signature", "converted"}),
        ("recipes/gemma.py", '"""', '"""Other. ', set()),  # recipes count by their value
    ],
)
def test_the_source_of_loadplan_counts(
    file: str, old: str, new: str, changes: set[str], project: Path, tmp_path: Path, base_keys: Keys
) -> None:
    root = Path(loadplan.cache.__file__).parent.parent
    for folder in ("cache", "compiler", "recipes", "runtime"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / folder, tmp_path / "site" / "loadplan" / folder, ignore=ignored)
    assert keys_elsewhere(project, PYTHONPATH=str(tmp_path / "site")) == base_keys
    path = tmp_path / "site" / "loadplan" / file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    found = keys_elsewhere(project, PYTHONPATH=str(tmp_path / "site"))
    assert {kind for kind, key in found.items() if key != base_keys[kind]} == changes
