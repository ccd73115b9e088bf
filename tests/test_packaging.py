"""pyproject.toml against what is on disk: a forgotten package is silently missing from a wheel."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import loadplan.cache
import loadplan.compiler
import loadplan.recipes
import loadplan.runtime

ROOT = Path(__file__).parent.parent
FOLDERS = ("cache", "compiler", "recipes", "runtime")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed() -> None:
    found = {
        ".".join(("loadplan", *path.parent.relative_to(ROOT).parts))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_folder_is_typed() -> None:
    assert [folder for folder in FOLDERS if not (ROOT / folder / "py.typed").is_file()] == []


def test_loadplan_is_a_namespace() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_public_names_are_sorted_and_there() -> None:
    for package in (loadplan.cache, loadplan.compiler, loadplan.recipes, loadplan.runtime):
        assert package.__all__ == sorted(package.__all__)
        missing = [name for name in package.__all__ if not hasattr(package, name)]
        assert missing == []


def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    """Built from a copy, without isolation, so that neither stale files nor a registry take part."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    names = files or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    copy = tmp_path / "copy"
    for name in names:
        if name.startswith((*(f"{folder}/" for folder in FOLDERS), "pyproject", "README", "LICENSE")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        str(copy),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".py", "py.typed"))}
    assert packed == {
        f"loadplan/{path.relative_to(copy).as_posix()}"
        for folder in FOLDERS
        for path in (copy / folder).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
