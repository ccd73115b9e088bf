"""A selection of the oracle's models, one of each kind of rule and op; `doit oracle` runs all of them.

The other side is what transformers itself makes of the same files, bit for bit. The bridge, which reads transformers'
own mappings, and our library, which does not, must both come to it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from oracle.check_oracle import Outcome, check, find_variants, main, table_of

KEYS = (
    "CLIPVisionModel",  # a prefix added
    "MaskFormerDetrDecoder",  # a class that transformers keeps in another type's folder
    "MtpModel",  # layers behind the last one, as a model of their own
    "UnlimitedOcrSamVisionEncoder",  # a class that transformers does not export
    "dory",  # layers stored as blocks of their own
    "ernie4_5_vl_moe",  # one list of experts for two modalities
    "inkling2_loop",  # models in models; vocabulary, queries, shifted numbers, optional scales
    "kimi_k25",  # four kinds of ops, in three models
    "lara_mini",  # parts of unequal size
    "maskformer",  # siblings with rules of their own
    "nemotron_h",  # floats that JSON has not
    "olmo_hybrid",  # several tensors as one
    "qwen3_vl_moe",  # transposed, if need be
    "step3p7",  # a pattern that begins inside a name component
)
TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, written by a process of its own: writing forks, and changes what transformers has loaded."""
    folder = tmp_path_factory.mktemp("oracle")
    command = [sys.executable, "-m", "oracle.tiny_models", "--out", str(folder), "--only", *KEYS]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("key", KEYS)
def test_bridge_and_library_do_what_transformers_does(models: Path, key: str) -> None:
    variants = list(find_variants(models, [key]))
    if not variants:
        pytest.skip(f"{key} needs a package that is not installed")
    outcomes = [check(models, name, variant) for name, variant in variants]
    assert {outcome.name: outcome.bridge for outcome in outcomes if outcome.bridge} == {}
    assert {outcome.name: outcome.own for outcome in outcomes if outcome.own} == {}
    assert {outcome.name: outcome.saved for outcome in outcomes if outcome.saved} == {}
    assert {outcome.name: outcome.model for outcome in outcomes if outcome.model} == {}
    assert all(outcome.tensors for outcome in outcomes)


def test_a_difference_in_one_bit_is_found(models: Path) -> None:
    """The check is worth something: files of another model of the same shapes fail it, tensor by tensor."""
    name = "qwen3_vl_moe"
    path = models / name / "orig" / "model.safetensors"
    before = path.read_bytes()
    try:
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        outcome = check(models, name, "orig")
    finally:
        path.write_bytes(before)
    assert outcome.bridge.startswith("1 tensors differ: ")
    assert check(models, name, "orig").bridge == ""


def test_the_table_counts_and_gives_reasons(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.md"
    assert main(["--models", str(models), "--table", str(table), "--only", "olmo_hybrid"]) == 0
    lines = table.read_text(encoding="utf-8").splitlines()
    count = len(list(find_variants(models, ["olmo_hybrid"])))
    assert lines[0].startswith(f"{count} checkpoints: {count} load bit for bit through the bridge")
    assert sum(line.startswith("| olmo_hybrid") for line in lines) == count
    assert lines[0] in capsys.readouterr().out

    failed = table_of(
        [Outcome("a", "orig", "missing: b | c", "", "", "", 3), Outcome("d", "full", "", "x", "y", "z", 4)]
    )
    counts = "1 load bit for bit through the bridge, 1 by our own recipes, 1 are saved back as they were, 1 are the model that from_pretrained gives."
    assert failed.splitlines()[0] == f"2 checkpoints: {counts}"
    assert "| a | orig | 3 | FAIL | pass | pass | pass | missing: b \\| c |" in failed
    assert "| d | full | 4 | pass | FAIL | FAIL | FAIL | x |" in failed
