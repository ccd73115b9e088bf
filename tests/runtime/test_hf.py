"""`hf.from_pretrained`: finds the plan, or says which command makes one; takes no argument that it does not heed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from builders import TINY_DECODER, save_tiny
from oracle.check_oracle import differences
from torch import nn

from loadplan.compiler import Target, cli, compile_plan, convert
from loadplan.runtime import ArgumentError, Artifact, LocationError, Plan
from loadplan.runtime.hf import PlanNotFound, from_pretrained


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "llama"
    return save_tiny(folder, "LlamaForCausalLM", {**TINY_DECODER, "tie_word_embeddings": True}, "bfloat16")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "llama")
    return tmp_path / "llama"


def check(folder: Path, model: object, name: object) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    theirs.config.name_or_path = theirs.name_or_path = str(name)
    assert list(differences(theirs, model)) == []


def test_what_may_be_given(folder: Path, tmp_path: Path) -> None:
    plan = compile_plan(folder)
    plan.save(tmp_path / "some.plan")
    check(folder, from_pretrained(folder, plan=plan), folder)
    check(folder, from_pretrained(str(folder), plan=tmp_path / "some.plan", wait=False), folder)
    artifact = convert(plan, folder, tmp_path / "converted")
    for source in (artifact, tmp_path / "converted", tmp_path / "converted/artifact.loadplan"):
        check(folder, from_pretrained(source), artifact.folder)


@pytest.mark.parametrize("place", ["llama.loadplan", "llama/any.loadplan"])
def test_the_plan_is_found(folder: Path, tmp_path: Path, place: str) -> None:
    compile_plan(folder).save(tmp_path / place)
    check(folder, from_pretrained(folder), folder)


def test_the_command_that_is_named_makes_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanNotFound, match=r"no plan in it, nor llama\.loadplan beside it") as caught:
        from_pretrained(folder)
    command = str(caught.value).split("`")[1].split()
    assert command[0] == "loadplan" and cli.main(command[1:]) == 0
    check(folder, from_pretrained(folder), folder)
    capsys.readouterr()


def test_refused(folder: Path, tmp_path: Path) -> None:
    plan = compile_plan(folder)
    artifact = convert(plan, folder, tmp_path / "converted")
    with pytest.raises(LocationError):
        from_pretrained(tmp_path / "nowhere", plan=plan)
    with pytest.raises(ArgumentError, match="give the checkpoint's folder, and plan="):
        from_pretrained(plan)
    with pytest.raises(ArgumentError, match="has its own plan"):
        from_pretrained(artifact, plan=plan)
    with pytest.raises(ArgumentError, match="give its folder alone"):
        from_pretrained(folder, plan=artifact.folder)
    for name in ("a", "b"):
        plan.save(folder / f"{name}.loadplan")
    with pytest.raises(ArgumentError, match=r"holds 2 plans, a\.loadplan, b\.loadplan; give one as plan="):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ({"device_map": "auto"}, "device_map=: give device="),
        ({"torch_dtype": torch.float16}, "torch_dtype=: give dtype="),
        ({"trust_remote_code": True}, "code of a checkpoint is never run"),
        ({"quantization_config": {}}, "not supported"),
        ({"attn_implementation": "eager"}, r"set_attn_implementation\(\.\.\.\)"),
        ({"nonsense": 1}, "nonsense=: loadplan has nothing like it"),
    ],
)
def test_unknown_arguments(folder: Path, argument: dict[str, object], hint: str) -> None:
    with pytest.raises(ArgumentError, match=hint):
        from_pretrained(folder, plan=compile_plan(folder), **argument)  # type: ignore[arg-type]


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def test_what_the_plan_was_compiled_for(folder: Path) -> None:
    plan: Plan = compile_plan(folder)
    for dtype in (None, "auto", "bfloat16", torch.bfloat16):
        assert dtype_of(from_pretrained(folder, plan=plan, dtype=dtype, fusion_config={})) == torch.bfloat16
    with pytest.raises(ArgumentError, match="compiled for bfloat16; compile one with `loadplan compile --dtype"):
        from_pretrained(folder, plan=plan, dtype=torch.float32)
    with pytest.raises(ArgumentError, match="dtype='float1': 'float1' is not a torch dtype"):
        from_pretrained(folder, plan=plan, dtype="float1")
    with pytest.raises(ArgumentError, match="asks for qkv, the plan was compiled for none"):
        from_pretrained(folder, plan=plan, fusion_config={"qkv": True, "gate_up": False})
    wide = compile_plan(folder, target=Target(dtype="F32"))
    assert dtype_of(from_pretrained(folder, plan=wide, dtype=torch.float32)) == torch.float32


def test_an_artifact_is_one(folder: Path, tmp_path: Path) -> None:
    converted = convert(compile_plan(folder), folder, tmp_path / "converted")
    shutil.move(converted.folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    assert from_pretrained(Artifact.open(tmp_path / "elsewhere")).name_or_path == str(tmp_path / "elsewhere")
