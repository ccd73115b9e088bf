"""The folder list is the architecture: what each may import, read from the source and seen in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW = {
    "cache": set[str](),
    "runtime": {"cache"},
    "compiler": {"runtime", "cache"},
    "recipes": {"compiler", "runtime", "cache"},  # the registry of fusions; of the cache, the root of all errors
}
OUTSIDE = {  # besides the standard library
    "cache": set[str](),
    "runtime": {"torch", "msgpack", "zstandard"},
    "compiler": {"torch", "safetensors", "doit", "pydantic", "transformers"},
    "recipes": set[str](),
}
OUTSIDE_FILE = {
    "bridge.py": {"torch", "transformers"},  # reads what an installed transformers has registered
    "spread_conversion.py": {"distributed"},  # when work is sent to a cluster
    "http_client.py": {"urllib3"},  # when the first http remote is opened
    "signing.py": {"cryptography"},  # when the first key is read
    "http_remote.py": {"zstandard"},  # when the first file is compressed on the wire
    "build_model.py": {"transformers"},  # makes its models; imported when one is made
    "read_with_fastsafetensors.py": {"fastsafetensors"},
    "read_with_runai.py": {"runai_model_streamer"},
}


def _sources() -> Iterator[tuple[str, Path]]:
    for folder in BELOW:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield folder, path


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize(("folder", "path"), [pytest.param(f, p, id=f"{f}/{p.name}") for f, p in _sources()])
def test_imports_point_one_way(folder: str, path: Path) -> None:
    for name in _imports(path):
        first, _, rest = name.partition(".")
        if first == "loadplan":
            assert rest.partition(".")[0] in BELOW[folder] | {folder}, f"{path.name} imports {name}"
        elif first not in sys.stdlib_module_names:
            assert first in OUTSIDE[folder] | OUTSIDE_FILE.get(path.name, set()), f"{path.name} imports {name}"


def test_layers_are_found() -> None:
    assert {folder for folder, _ in _sources()} == set(BELOW)


@pytest.mark.parametrize(
    "statement",
    [
        "from loadplan.cache import Cache",
        "from loadplan.runtime import Plan, PlanError, FileMismatch",
        "from loadplan.compiler import compile_plan, Target, Signature, CompileError, read_checkpoint",
        "from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist",
        "from loadplan.recipes import Recipe, WeightConverter, find_recipe; find_recipe('mixtral')",
        "from loadplan.recipes.fusions import FAMILIES; from loadplan.recipes import register_fusion",
        "from loadplan.recipes.bridge import bridge_recipe",
        "import loadplan.compiler.cli, loadplan.compiler.tasks",
    ],
)
def test_no_torch_before_it_is_needed(statement: str) -> None:
    code = f"import sys; {statement}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_runtime_needs_no_build_side() -> None:
    code = (
        "import sys; from loadplan.runtime import load_state_dict, load_into; "
        "print(sorted({'transformers', 'doit', 'huggingface_hub', 'pydantic', 'loadplan.compiler'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
