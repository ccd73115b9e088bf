"""What the code itself adds to an action key, and the Python files that a project names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import loadplan.compiler
import loadplan.runtime
from loadplan.cache.digest import digest_bytes, digest_json
from loadplan.compiler.build_file import BuildFileError
from loadplan.compiler.patterns import PatternError
from loadplan.compiler.registry import RecipeNameError

_COMPILER, _RUNTIME = (Path(package.__file__ or "").parent for package in (loadplan.compiler, loadplan.runtime))

_CONVERTER = ("conversion.py", "convert_parts.py", "file_groups.py")


@cache
def compiler_digest() -> str:
    """SHA-256 (hex) of the source of everything that makes a plan: another compiler may make another."""
    return _digest(path for folder in (_COMPILER, _RUNTIME) for path in folder.rglob("*.py"))


@cache
def converter_digest() -> str:
    """SHA-256 (hex) of the source of what turns a plan into files: less than the compiler, which made the plan."""
    return _digest([*(_COMPILER / name for name in _CONVERTER), *_RUNTIME.rglob("*.py")])


def _digest(paths: Iterable[Path]) -> str:
    named = sorted((path.relative_to(_COMPILER.parent).as_posix(), path) for path in paths)
    return digest_json([[name, digest_bytes(path.read_bytes())] for name, path in named])


@cache
def transformers_version() -> str:
    """The version that would build the model; empty without one. Asked of the installation: importing it takes seconds."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


@cache
def load_python_file(path: Path) -> ModuleType:
    """The module in the file at `path`, run once. Raises `BuildFileError`."""
    spec = importlib.util.spec_from_file_location(f"loadplan_recipe_{digest_bytes(str(path).encode())[:12]}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BuildFileError(f"{path}: no such Python file; recipes are given as file.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where `inspect` looks for the source of an op, which counts
    try:
        spec.loader.exec_module(module)
    except (
        PatternError,
        RecipeNameError,
        SyntaxError,
        ImportError,
        NameError,
        AttributeError,
        TypeError,
        ValueError,
    ) as error:
        raise BuildFileError(f"{path}: {type(error).__name__}: {error}") from error
    return module
