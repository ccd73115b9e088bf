"""The build of this repository: `doit` compiles, converts and verifies what loadplan.toml lists; `doit list` has more."""

from pathlib import Path

from loadplan.compiler.tasks import *

ROOT = Path(__file__).parent
FOLDERS = ("cache", "compiler", "recipes", "runtime")
TREE = ROOT / "build" / "ns" / "loadplan"


def _link_folders() -> None:
    TREE.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = TREE / folder
        link.unlink(missing_ok=True)
        link.symlink_to(Path("..", "..", "..", folder), target_is_directory=True)


def task_link():
    """lay out build/ns, where type checkers find loadplan.*"""
    return {"actions": [_link_folders], "uptodate": [lambda: all((TREE / folder).is_dir() for folder in FOLDERS)]}


def task_lint():
    """check style with ruff"""
    return {"actions": ["ruff check .", "ruff format --check ."], "verbosity": 2}


def task_types():
    """check types with mypy"""
    return {"actions": ["mypy"], "task_dep": ["link"], "verbosity": 2}


def task_bench():
    """measure load times beside transformers and other loaders, on 2.6 GB, 50,000 small tensors and a tiny model"""
    cases = ("moe", "small", "flat", "tiny")
    return {"actions": [f"python tests/bench/bench_load.py --case {case}" for case in cases], "verbosity": 2}


def task_oracle():
    """check every kind of checkpoint that transformers converts (makes 280 MB in build/oracle; minutes the first time)"""
    return {
        "actions": [
            "cd tests && python -m oracle.tiny_models --out ../build/oracle",
            "cd tests && python -m oracle.check_oracle --models ../build/oracle --table ../build/oracle.md",
        ],
        "verbosity": 2,
    }


def task_tests():
    """run the tests"""
    return {"actions": ["python -m pytest -n auto"], "verbosity": 2}
