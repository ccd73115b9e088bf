"""Compute ops in plans: compiled, cut over ranks and run, against the recipe on whole tensors with torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from loadplan.compiler.conversion import convert
from loadplan.compiler.ir import Op
from loadplan.compiler.ops import Cast, FoldBatchNorm, Slice
from loadplan.compiler.pipeline import compile_plan, resolve
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.reference import evaluate
from loadplan.compiler.rules import WeightConverter
from loadplan.compiler.shard import Shard
from loadplan.compiler.show import show_plan
from loadplan.compiler.target import Target
from loadplan.runtime import compute
from loadplan.runtime.artifact import Artifact
from loadplan.runtime.dtype import DType
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.open_plan import Plan

NAMES = ("conv.weight", "norm.weight", "norm.bias", "norm.mean", "norm.var")


def conv_and_norm(channels: int, *inner: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(channels)
    tensors = {name: torch.randn(channels, generator=random) for name in NAMES[1:]}
    tensors["norm.var"] = tensors["norm.var"] ** 2
    return {"conv.weight": torch.randn(channels, *inner, generator=random).to(dtype), **tensors}


def checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def check(folder: Path, recipe: Recipe, target: Target | None = None) -> Plan:
    """Every rank, loaded in every way, has the bits that torch computes on whole tensors."""
    target = target or Target()
    plan = compile_plan(folder, recipe, "recipe", target)
    source = read_checkpoint(folder)
    resolved = resolve(source, recipe, None, target)
    stored = load_state_dict(compile_plan(folder, Recipe(), "recipe"), folder)
    artifact = convert(plan, folder, folder / "converted")
    for rank in range(plan.world_size):
        ways = [load_state_dict(plan, folder, rank, mode=mode) for mode in ("auto", "read", "copy")]
        ways.append(load_state_dict(Artifact.open(artifact.folder), rank=rank))
        for tensor in resolved.tensors:
            whole = evaluate(resolved.matched.values[tensor.name], stored)
            if tensor.shard_dim >= 0:
                spans = [whole.narrow(tensor.shard_dim, low, high - low) for low, high in tensor.intervals[rank]]
                whole = torch.cat(spans, tensor.shard_dim)
            for found in ways:
                assert found[tensor.name].dtype == whole.dtype
                assert torch.equal(found[tensor.name], whole), tensor.name
    return plan


def fold(*more: Op) -> Recipe:
    return Recipe([WeightConverter(NAMES, ["weight", "bias"], [FoldBatchNorm(1e-5), *more])])


def test_results_are_made_in_their_place_from_the_mapped_file(tmp_path: Path) -> None:
    plan = check(checkpoint(tmp_path, conv_and_norm(6, 3, 2, 2)), fold())
    section = plan.section(0)
    assert [(c.kernel, c.outputs, c.options) for c in section.computes] == [
        ("fold_batch_norm", (1, 0), '{"eps":"1e-05"}')  # bias comes before weight
    ]
    assert len(section.temporaries) == 5 and all(copy.source >= 0 for copy in section.copies)
    assert plan.cost(0).temporary_nbytes == 0 and plan.cost(0).peak_nbytes == plan.cost(0).target_nbytes
    assert 'compute weight, bias <- fold_batch_norm t0 t1 t2 t3 t4 {"eps":"1e-05"}' in list(show_plan(plan))


def test_a_cast_after_and_ops_before_and_behind(tmp_path: Path) -> None:
    checkpoint(tmp_path, conv_and_norm(6, 4, dtype=torch.float64))
    plan = check(tmp_path, fold(Cast(DType.BF16)))
    assert plan.cost(0).temporary_nbytes > 0
    check(tmp_path, fold(), Target(dtype="float16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "STAGING_NBYTES", 1)
        check(tmp_path, fold(Cast(DType.BF16)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    channels=st.sampled_from([2, 4, 6, 12]),
    ranks=st.sampled_from([1, 2]),
    whole_bias=st.booleans(),
    whole_weight=st.booleans(),
    dtype=st.sampled_from([None, "bfloat16"]),
    staging_nbytes=st.sampled_from([1, 200, 64 << 20]),
)
def test_slices_over_ranks_go_through(
    tmp_path: Path,
    channels: int,
    ranks: int,
    whole_bias: bool,
    whole_weight: bool,
    dtype: str | None,
    staging_nbytes: int,
) -> None:
    folder = checkpoint(tmp_path / f"{channels}", conv_and_norm(channels, 3, 2))
    rows = Shard(-3, one_dim=True)
    plan = {} if whole_bias else {"bias": rows}
    plan |= {} if whole_weight else {"weight": rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "STAGING_NBYTES", staging_nbytes)
        made = check(folder, fold(), Target(dtype=dtype, tp_size=ranks, tp_plan=plan))
    if ranks == 2 and not (whole_bias or whole_weight):
        read = [made.cost(rank).read_nbytes for rank in range(2)]
        assert read[0] == read[1] == sum(t.numel() * 4 for t in conv_and_norm(channels, 3, 2).values()) // 2


def test_a_result_with_several_uses_is_computed_once(tmp_path: Path) -> None:
    tensors = {**conv_and_norm(4, 2), "other": torch.randn(3)}
    checkpoint(tmp_path, tensors)
    plan = check(tmp_path, Recipe([WeightConverter(NAMES, ["a", "b"], [FoldBatchNorm(1e-3), Slice(0, 1, 3)])]))
    assert len(plan.section(0).computes) == 1 and plan.cost(0).read_nbytes < sum(
        t.numel() * 4 for t in tensors.values()
    )


def test_folds_of_several_layers_and_of_joined_weights(tmp_path: Path) -> None:
    tensors = {
        f"layers.{layer}.{name}": tensor
        for layer in range(3)
        for name, tensor in conv_and_norm(4 + 2 * layer, 3).items()
    }
    checkpoint(tmp_path, tensors)
    names = [rf"layers\.(\d+)\.{name}" for name in NAMES]
    plan = check(tmp_path, Recipe([WeightConverter(names, [r"l.\1.weight", r"l.\1.bias"], [FoldBatchNorm(1e-5)])]))
    assert len(plan.section(0).computes) == 3


def test_empty_tensors_are_not_computed(tmp_path: Path) -> None:
    plan = check(checkpoint(tmp_path, conv_and_norm(0, 3)), fold())
    assert plan.section(0).computes == ()
    plan = check(checkpoint(tmp_path / "inner", conv_and_norm(2, 0)), fold())
    assert len(plan.section(0).computes) == 1
