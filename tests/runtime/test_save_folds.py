"""Saving what kernels made: equivalent tensors under the original names, and what cannot be given back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from saving import load_ranks
from torch import nn

from loadplan.compiler.ir import Op
from loadplan.compiler.ops import Cast, FoldBatchNorm, Reshape, Slice
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import WeightConverter
from loadplan.compiler.shard import Shard
from loadplan.compiler.target import Target
from loadplan.runtime.dtype import DType
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.save import SaveError, save_checkpoint

NORM = ("weight", "bias", "running_mean", "running_var")
SOURCES = ("conv.weight", *(f"norm.{name}" for name in NORM), "conv.bias", "norm.num_batches_tracked")


class Pair(nn.Module):
    """A convolution and its normalisation."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2, dtype=dtype)
        self.norm = nn.BatchNorm2d(4, dtype=dtype)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, tensor in self.state_dict(keep_vars=True).items():
                tensor.copy_(torch.rand(tensor.shape) * 9 if name != SOURCES[-1] else torch.tensor(5))
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.conv(x))
        return found


def write(model: nn.Module, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def fold(*more: Op) -> Recipe:
    return Recipe([WeightConverter([f"^{name}$" for name in SOURCES], ["w", "b"], [FoldBatchNorm(1e-5), *more])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_equivalent_normalisation(
    dtype: torch.dtype, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Original names, types and file layout; outputs agree to roundings; folding again gives the same (rounded) bits."""
    model = Pair(dtype)
    folder = write(model, tmp_path / "a")
    rows = Shard(-4, one_dim=True)
    target = Target(tp_size=ranks, tp_plan={"w": rows, "b": rows})
    plan = compile_plan(folder, fold(), "recipe", target)
    states = load_ranks(plan, folder)
    with caplog.at_level(logging.WARNING):
        save_checkpoint(states, plan, tmp_path / "b")
    (record,) = caplog.records
    assert "1 batch normalisations were folded into their convolutions" in record.getMessage()

    saved = load_file(tmp_path / "b" / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert [(k, t.shape, t.dtype) for k, t in saved.items()] == [(k, t.shape, t.dtype) for k, t in stored.items()]
    assert torch.equal(saved["conv.weight"], torch.cat([state["w"] for state in states]))
    assert torch.equal(saved["norm.bias"], torch.cat([state["b"] for state in states]))
    assert not saved["conv.bias"].any() and not saved["norm.running_mean"].any()
    assert saved["norm.num_batches_tracked"] == 0
    again = Pair(dtype)
    again.load_state_dict(saved)
    x = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    with torch.no_grad():
        found, right = again(x).double(), model(x).double()
    assert torch.allclose(
        found, right, rtol=32 * torch.finfo(dtype).eps, atol=32 * torch.finfo(dtype).eps * float(right.abs().max())
    )
    twice = load_ranks(compile_plan(tmp_path / "b", fold(), "recipe", target), tmp_path / "b")
    for state, other in zip(states, twice, strict=True):
        assert torch.allclose(state["w"].double(), other["w"].double(), rtol=max(1e-5, torch.finfo(dtype).eps), atol=0)
        if dtype is torch.float32:
            assert torch.equal(state["w"], other["w"]) and torch.equal(state["b"], other["b"])


def test_a_result_that_was_cast(tmp_path: Path) -> None:
    folder = write(Pair(), tmp_path / "a")
    plan = compile_plan(folder, fold(Cast(DType.F64)), "recipe")
    state = load_state_dict(plan, folder)
    assert state["w"].dtype == torch.float64
    save_checkpoint(state, plan, tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(saved["conv.weight"], state["w"].float()) and torch.equal(saved["norm.bias"], state["b"].float())


def test_a_changed_model(tmp_path: Path) -> None:
    """What is saved is what the model has now."""
    folder = write(Pair(), tmp_path / "a")
    plan = compile_plan(folder, fold(), "recipe")
    state = {"w": torch.rand(4, 3, 2, 2), "b": torch.rand(4)}
    save_checkpoint(state, plan, tmp_path / "b")
    assert all(torch.equal(t, state[k]) for k, t in load_state_dict(plan, tmp_path / "b").items())


def test_what_ranks_hold_in_different_parts_cannot_be_given_back(tmp_path: Path) -> None:
    """The bias whole on each rank, the weight in parts: the file's tensors would be written twice."""
    folder = write(Pair(), tmp_path / "a")
    target = Target(tp_size=2, tp_plan={"w": Shard(-4)})
    plan = compile_plan(folder, fold(), "recipe", target)
    states = load_ranks(plan, folder)
    with pytest.raises(SaveError, match="cannot be run backwards"):
        save_checkpoint(states, plan, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    save_checkpoint(states, plan, tmp_path / "b", original_format=False)
    assert torch.equal(load_file(next((tmp_path / "b").glob("rank-1*")))["w"], states[1]["w"])


def test_a_result_that_is_used_in_part_cannot_be_given_back(tmp_path: Path) -> None:
    folder = write(Pair(), tmp_path / "a")
    plan = compile_plan(folder, fold(Slice(0, 1, 3)), "recipe")
    state = load_state_dict(plan, folder)
    with pytest.raises(SaveError, match=r"conv\.bias cannot be restored: 2 elements are written, it has 4"):
        save_checkpoint(state, plan, tmp_path / "b")


def test_a_result_in_another_shape(tmp_path: Path) -> None:
    folder = write(Pair(), tmp_path / "a")
    plan = compile_plan(folder, fold(Reshape((-1,))), "recipe")
    state = load_state_dict(plan, folder)
    save_checkpoint(state, plan, tmp_path / "b")
    assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")["conv.weight"].flatten(), state["w"])
