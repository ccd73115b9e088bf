"""Compute ops in plans: compiled, cut over ranks and run, against the recipe on whole tensors with torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from loadplan.compiler import pieces
from loadplan.compiler.build_inputs import Sources
from loadplan.compiler.conversion import convert
from loadplan.compiler.ir import Binding, Op, ShapeError, Spread
from loadplan.compiler.ops import Cast, Chunk, Concatenate, FoldBatchNorm, Interleave, Reshape, Slice, Transpose
from loadplan.compiler.pieces import Layout
from loadplan.compiler.pipeline import compile_plan, resolve
from loadplan.compiler.prove import ProofError, prove_loads
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.reference import evaluate, register_reference
from loadplan.compiler.rules import WeightConverter
from loadplan.compiler.shard import Shard
from loadplan.compiler.show import show_plan
from loadplan.compiler.target import Target
from loadplan.runtime import compute
from loadplan.runtime.artifact import Artifact
from loadplan.runtime.dtype import DType
from loadplan.runtime.execute import Execution
from loadplan.runtime.kernels import KernelError, Options, Rows, register_kernel
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.save import SaveError, save_checkpoint
from loadplan.runtime.source_files import find_files
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True)
class Double:
    """Twice each value: an op of a user's, with a kernel of a user's that is undone exactly."""

    spread: ClassVar[Spread] = "each"
    kernel: ClassVar[str] = "test_double"
    options: ClassVar[str] = "{}"

    def bind(self, context: Binding, *args: TensorType) -> Double:
        return self

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return args

    def lower(self, *args: Layout) -> tuple[Layout, ...]:
        raise TypeError("computed")

    def reverse(self, *args: TensorType) -> Op:
        raise ShapeError("computed")


class DoubleKernel:
    """Rows of one input become rows of one output."""

    def infer(self, types: Sequence[TensorType], options: Options) -> tuple[TensorType, ...]:
        if len(types) != 1:
            raise KernelError("one input")
        return tuple(types)

    def pull(self, low: int, high: int, types: Sequence[TensorType], options: Options) -> tuple[Rows, ...]:
        return ((low, high),)

    def row_nbytes(self, types: Sequence[TensorType], options: Options) -> int:
        return 0

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], options: Options, names: Sequence[str]
    ) -> None:
        torch.mul(inputs[0], 2, out=outputs[0])

    def reverse(
        self, outputs: Sequence[torch.Tensor], types: Sequence[TensorType], options: Options
    ) -> tuple[torch.Tensor, ...]:
        return (outputs[0] / 2,)


register_kernel("test_double", DoubleKernel())
register_reference(Double, lambda op, tensor: tensor * 2)

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
        files = find_files(folder, plan.head.files)
        staged = Execution(plan.head, plan.section(rank), rank, files, device=torch.device("cpu")).run()
        ways.append({plan.head.tensors[number].name: tensor for number, tensor in staged.items()})
        late = Execution(plan.head, plan.section(rank), rank, files, threads=2).start()
        ways.append({plan.head.tensors[number].name: tensor for number, tensor in late.result().items()})
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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.sampled_from([((4, 6), (2, 6)), ((4, 2, 3), (4, 2, 3)), ((8,), (4,))]),
    ops=st.lists(
        st.sampled_from(["double", "transpose", "join", "shape", "cast", "interleave"]), min_size=1, max_size=6
    ),
    ranks=st.sampled_from([1, 2]),
    dim=st.integers(-2, -1),
    most_pieces=st.sampled_from([2, 65_536]),
    staging_nbytes=st.sampled_from([1, 50, 64 << 20]),
)
def test_chains_of_computes_and_layouts(
    tmp_path: Path,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    ops: list[str],
    ranks: int,
    dim: int,
    most_pieces: int,
    staging_nbytes: int,
) -> None:
    """Temporaries of temporaries, staged and whole ones, on every rank; and back into the same file, byte for byte."""
    folder = tmp_path / str(shapes)
    if not folder.exists():
        checkpoint(folder, {name: torch.randn(shape) for name, shape in zip("ab", shapes, strict=True)})
    kind, chain, joined = shapes[0], list[Op](), False
    for name in ops:
        if name == "join" and not joined:
            chain.append(Concatenate(0))
            kind, joined = (shapes[0][0] + shapes[1][0], *kind[1:]), True
        elif not joined and name != "double":
            continue  # what both must stay fit for
        elif name == "transpose" and len(kind) > 1:
            chain.append(Transpose(0, -1))
            kind = (kind[-1], *kind[1:-1], kind[0])
        elif name == "shape":
            kind = (2, prod(kind) // 2)
            chain.append(Reshape(kind))
        elif name == "cast":
            chain.append(Cast(DType.F64))
        elif name == "interleave" and kind[0] % 2 == 0:
            chain.append(Interleave(0))
        elif name == "double":
            chain.append(Double())
    if not joined:
        chain.append(Concatenate(0))
        kind = (shapes[0][0] + shapes[1][0], *kind[1:])
    cut = dim if len(kind) > 1 and kind[dim] % ranks == 0 else None
    target = Target(tp_size=ranks, tp_plan={"c": Shard(cut)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "STAGING_NBYTES", staging_nbytes)
        patch.setattr(pieces, "MAX_PIECES", most_pieces)
        plan = check(folder, Recipe([WeightConverter(["^a$", "^b$"], "c", chain)]), target)
        if chain.count(Double()):
            assert plan.section(0).computes
        states = [load_state_dict(plan, folder, rank) for rank in range(ranks)]
        (tmp_path / "back" / "model.safetensors").unlink(missing_ok=True)
        try:
            save_checkpoint(states, plan, tmp_path / "back")
        except SaveError as error:  # a rank's columns of a result are made of whole rows, which others make too
            assert ranks == 2 and "run backwards" in str(error)
            return
        assert (tmp_path / "back" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_rows_that_differ_from_reader_to_reader(tmp_path: Path) -> None:
    """A result that a rank needs whole for one target, and in part for what is computed for another."""
    checkpoint(tmp_path, {"a": torch.randn(8, 2)})
    recipe = Recipe([WeightConverter("^a$", ["x", "y"], [Double(), Chunk(1, 2), Cast(DType.F64), Double()])])
    for plan in ({"x": Shard(-2)}, {"y": Shard(-2)}, {"x": Shard(-2), "y": Shard(-2)}, {}):
        made = check(tmp_path, recipe, Target(tp_size=2, tp_plan=plan))
        assert len(made.section(0).computes) == 3


def test_a_proof_by_example_covers_them(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", conv_and_norm(4, 3))
    target = Target(tp_size=2, tp_plan={"weight": Shard(-2)})
    plan = compile_plan(folder, fold(), "recipe", target)
    artifact = convert(plan, folder, tmp_path / "converted")
    inputs = Sources(read_checkpoint(folder), fold(), None, target)
    said = prove_loads(plan, artifact.folder, folder, inputs)
    assert said == "verified: 12 comparisons, 3 ways of loading, 2 ranks, bit for bit"
    wrong = replace(inputs, recipe=Recipe([WeightConverter(NAMES, ["weight", "bias"], [FoldBatchNorm(0.1)])]))
    with pytest.raises(ProofError, match="values differ from those the recipe makes"):
        prove_loads(plan, artifact.folder, folder, wrong)
