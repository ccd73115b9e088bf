"""The README's Python, run as it stands, in order, in a fresh interpreter; its commands, against what CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Cost(rank=0, ")


def test_both_commands_are_there_as_ci_looks_for_them() -> None:
    lines = README.splitlines()
    assert [line for line in lines if "&& doit" in line] == ["pip install -e '.[demo]' && doit"]
    assert [line for line in lines if "python -m pytest" in line] == [
        "pip install -e '.[test]' && python -m pytest -n auto"
    ]


def test_every_folder_is_in_the_table() -> None:
    for folder in ("recipes", "compiler", "runtime", "cache", "tests"):
        assert f"| `{folder}/` |" in README
