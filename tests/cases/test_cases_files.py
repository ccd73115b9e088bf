"""Cases about which file holds what, and rules that have nothing to do: against literal tensors and file bytes.

B-numbers are those of the cases, other numbers are rows of transformers_spec 9.1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Raw, raw, write_file, write_index, write_shards

from loadplan.compiler import CheckpointError, CompileError, Signature, compile_plan
from loadplan.recipes import PrefixChange, Recipe, WeightRenaming
from loadplan.runtime import load_state_dict, save_checkpoint


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("absent", [1, 2])
def test_b65_absent_files_are_all_named(count: int, absent: int, tmp_path: Path) -> None:
    files = {
        f"m-{number:05d}-of-{count:05d}.safetensors": {f"w{number}": raw("F32", 2)} for number in range(1, 1 + count)
    }
    write_shards(tmp_path, files)
    gone = sorted(files)[-absent:]
    for name in gone:
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        compile_plan(tmp_path)
    assert {problem.names[0] for problem in caught.value.problems} <= {*gone, *(f"w{n}" for n in range(1, 1 + count))}
    assert all(name in str(caught.value) for name in gone)
    assert not any(name in str(caught.value) for name in files.keys() - set(gone))


@pytest.mark.parametrize("more", [{}, {"metadata": {}}, {"metadata": {"total_size": 8}}])
def test_b65_metadata_is_optional_and_an_empty_index_is_refused(more: dict[str, object], tmp_path: Path) -> None:
    tensors = {"w": raw("F32", 2)}
    write_file(tmp_path / "one.safetensors", tensors)
    write_index(tmp_path / "model.safetensors.index.json", dict.fromkeys(tensors, "one.safetensors"), **more)
    assert sorted(load_state_dict(compile_plan(tmp_path), tmp_path)) == ["w"]
    write_index(tmp_path / "model.safetensors.index.json", {}, **more)
    with pytest.raises(CheckpointError):
        compile_plan(tmp_path)


@pytest.mark.parametrize("same", [True, False])
def test_20_one_name_in_two_files_is_refused_without_an_index(same: bool, tmp_path: Path) -> None:
    shards: dict[str, dict[str, Raw]] = {
        "m-00001-of-00002.safetensors": {"a": raw("F32", 3), "both": raw("F32", 2)},
        "m-00002-of-00002.safetensors": {"b": raw("F32", 3), "both": raw("F32", 2, seed=0 if same else 1)},
    }
    write_shards(tmp_path, shards, index=None)
    with pytest.raises(CheckpointError) as caught:
        compile_plan(tmp_path)
    assert "both" in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "stored"),
    [
        (WeightRenaming(r"embedding\.weight", "embeddings.weight"), "tok.embeddings.weight"),
        (WeightRenaming(r"^gamma$", "scale"), "scale"),
        (PrefixChange(prefix_to_remove="model"), "body.model.w"),
    ],
)
def test_b13_a_rule_without_use_does_not_run_backwards(
    rule: WeightRenaming | PrefixChange, stored: str, tmp_path: Path
) -> None:
    source = write_file(tmp_path / "a" / "model.safetensors", {stored: raw("BF16", 3, 2)})
    plan = compile_plan(source.parent, Recipe([rule]))
    assert plan.report.rules[0][1] == 0
    loaded = load_state_dict(plan, source.parent)
    assert list(loaded) == [stored]
    save_checkpoint(loaded, plan, tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("prefix", ["model", "net.inner"])
def test_b06_a_prefix_is_whole_components(prefix: str, tmp_path: Path) -> None:
    names = ("extra.w", f"{prefix}_extra.w")
    write_file(tmp_path / "model.safetensors", {name: raw("F32", 2, seed=at) for at, name in enumerate(names)})
    tensors = Signature.of(dict.fromkeys(names, ((2,), "F32"))).tensors
    plan = compile_plan(tmp_path, signature=Signature(tensors, base_model_prefix=prefix))
    assert {tensor.name for tensor in plan.head.tensors} == set(names)

    write_file(tmp_path / "model.safetensors", {f"{prefix}Xlin.w": raw("F32", 2)})
    tensors = Signature.of({"lin.w": ((2,), "F32")}).tensors
    with pytest.raises(CompileError) as caught:
        compile_plan(tmp_path, signature=Signature(tensors, base_model_prefix=prefix))
    named = {(problem.kind, problem.names) for problem in caught.value.problems if problem.names}
    assert named == {("unexpected", (f"{prefix}Xlin.w",)), ("missing", ("lin.w",))}
