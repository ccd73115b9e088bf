"""An op written outside of loadplan, as the docstring of `loadplan.compiler.ops` says: compiled, loaded, saved, proved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadplan.compiler import CompileError, Target, compile_plan
from loadplan.compiler.ir import Binding, ShapeError, Spread
from loadplan.compiler.pieces import Layout, concatenate, narrow
from loadplan.recipes import Recipe, WeightConverter
from loadplan.runtime import load_state_dict, save_checkpoint
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True)
class RollRows:
    """The last rows first: `steps` rows, or as many as the config's field `roll` says."""

    spread: ClassVar[Spread] = "each"
    steps: int | None = None

    def bind(self, context: Binding, *args: TensorType) -> RollRows:
        return self if self.steps is not None else RollRows(context.config.find_int("roll"))

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if self.steps is None or not 0 <= self.steps <= args[0].shape[0]:
            raise ShapeError(f"{self} of {args[0]}: between 0 and {args[0].shape[0]} rows can be moved")
        return args

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        (arg,) = args
        rows = arg.shape[0]
        cut = rows - (self.steps or 0)
        return (concatenate([narrow(arg, 0, cut, rows), narrow(arg, 0, 0, cut)], 0),)

    def reverse(self, *args: TensorType) -> RollRows:
        return RollRows(args[0].shape[0] - (self.steps or 0))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(
        {"a.w": torch.arange(24.0).view(8, 3), "b.w": -torch.arange(12.0).view(4, 3)}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text('{"roll": 3}', encoding="utf-8")
    return folder


@pytest.mark.parametrize(("op", "steps"), [(RollRows(1), 1), (RollRows(4), 4), (RollRows(), 3)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_compiled_sliced_and_saved_back(op: RollRows, steps: int, ranks: int, checkpoint: Path) -> None:
    recipe = Recipe([WeightConverter("w", "rolled", [op])], tp_plan={"*.rolled": "colwise"})
    plan = compile_plan(checkpoint, recipe, target=Target(tp_size=ranks))
    states = [load_state_dict(plan, checkpoint, rank) for rank in range(ranks)]
    for name, stored in load_file(checkpoint / "model.safetensors").items():
        found = torch.cat([state[name.replace("w", "rolled")] for state in states])
        assert torch.equal(found, stored.roll(steps, 0))
    written = save_checkpoint(states, plan, checkpoint.parent / "saved")
    assert {path.name: path.read_bytes() for path in written} == {
        path.name: path.read_bytes() for path in checkpoint.iterdir()
    }


def test_what_it_refuses_is_a_problem_of_the_recipe(checkpoint: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_plan(checkpoint, Recipe([WeightConverter("w", "rolled", [RollRows(5)])]))
    (problem,) = caught.value.problems
    assert (problem.kind, problem.names) == ("shape", ("b.w",))
    assert "between 0 and 4 rows can be moved" in problem.message


def test_it_counts_in_the_digest() -> None:
    one, other = (Recipe([WeightConverter("w", "rolled", [RollRows(steps)])]).digest for steps in (1, 2))
    assert one != other
