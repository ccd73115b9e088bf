"""Kernels and their tiles: copies clipped to rows, and the same bits however rows are shared out."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from by_hand import Numbers, run_copy
from hypothesis import given
from hypothesis import strategies as st
from strategies import FLOATS, tilings
from torch.nn.utils.fusion import fuse_conv_bn_weights

from loadplan.runtime import compute
from loadplan.runtime.cast import CastOverflow
from loadplan.runtime.compute import clip, run_compute
from loadplan.runtime.dtype import DType
from loadplan.runtime.kernels import KernelError, find_kernel, parse_options, register_kernel
from loadplan.runtime.plan import Compute, Copy, Loop
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_dtype

FOLD = find_kernel("fold_batch_norm")
EPS = {"eps": "1e-05"}


@given(tiling=tilings(), casts=st.sampled_from([(DType.F32,), (DType.F32, DType.F64)]), data=st.data())
def test_clipped_copies_are_the_copies(
    tiling: tuple[int, list[tuple[int, int, tuple[tuple[int, int], ...]]]],
    casts: tuple[DType, ...],
    data: st.DataObject,
) -> None:
    """Tile by tile, each in a buffer of its own, against the whole copy element by element."""
    numel, areas = tiling
    stored, final = casts[0].itemsize, casts[-1].itemsize
    file = np.arange(1, 4 * numel + 1, dtype=np.float32).view(np.uint8)
    copies = [
        Copy(
            0,
            0,
            stored * data.draw(st.integers(0, numel)),
            start * final,
            run,
            0,
            tuple(Loop(extent, data.draw(st.integers(0, 1)) * stored, step * final) for extent, step in loops),
        )
        for start, run, loops in areas
    ]
    whole, written = np.zeros(numel * final, np.uint8), np.zeros(numel * final, np.int64)
    for copy in copies:
        run_copy(copy, casts, file, whole, written)
    bounds = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
    tiles = []
    for low, high in pairwise(bounds):
        tile: Numbers = np.zeros((high - low) * final, np.uint8)
        times = np.zeros(tile.size, np.int64)
        for copy in copies:
            for part in clip(copy, casts, low * final, high * final):
                run_copy(part, casts, file, tile, times)  # type: ignore[arg-type]
        assert (times == 1).all()
        tiles.append(tile)
    assert np.array_equal(np.concatenate(tiles), whole)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def norm(channels: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Weight, bias, mean and variance of a normalisation."""
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(channels, generator=random, dtype=torch.float64) for _ in range(4)]
    return [*(tensor.to(dtype) for tensor in made[:3]), (made[3] ** 2 + 1e-3).to(dtype)]


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(FLOATS),
    biased=st.booleans(),
    counter=st.booleans(),
    staging_nbytes=st.sampled_from([1, 100, 500, 3000, 1 << 20]),
    staged=st.sets(st.integers(0, 6)),
    data=st.data(),
)
def test_tiles_give_the_same_bits(
    shape: list[int],
    dtype: DType,
    biased: bool,
    counter: bool,
    staging_nbytes: int,
    staged: set[int],
    data: st.DataObject,
) -> None:
    """Of any size, with inputs in memory or brought in by copies (here from one dense "file")."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(*shape, generator=random).to(torch_dtype(dtype))
    inputs = [weight, *norm(shape[0], torch_dtype(data.draw(st.sampled_from(FLOATS))), 2)]
    inputs += [torch.randn(shape[0], generator=random)] if biased else []
    inputs += [torch.tensor(7)] if counter else []
    kinds = [TensorType(tuple(t.shape), next(d for d in DType if torch_dtype(d) is t.dtype)) for t in inputs]
    outputs = [torch.empty_like(weight), torch.empty(shape[0], dtype=weight.dtype)]
    FOLD.run(inputs, outputs, EPS, ["w", "b"])

    count = len(inputs)
    step = Compute("fold_batch_norm", tuple(range(count)), (count, count + 1), '{"eps":"1e-05"}')
    made = [torch.empty_like(output) for output in outputs]
    buffers = {n: t for n, t in enumerate([*inputs, *made]) if n not in staged or n >= count}
    sources = {n: [Copy(n, n, 0, 0, inputs[n].numel(), n, ())] for n in range(count) if n not in buffers}

    def fill(copies: list[Copy] | tuple[Copy, ...], into: dict[int, torch.Tensor]) -> None:
        for copy in copies:
            size = inputs[copy.buffer].element_size()
            taken = inputs[copy.buffer].flatten()[copy.src // size :][: copy.run]
            into[copy.buffer].flatten()[copy.dst // size :][: copy.run].copy_(taken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "STAGING_NBYTES", staging_nbytes)
        run_compute(
            step,
            [*kinds, *FOLD.infer(kinds, EPS)],
            buffers,
            sources,
            [(kind.dtype,) for kind in kinds],
            fill,  # type: ignore[arg-type]
            ["w", "b"],
        )
    assert [bits(t) for t in made] == [bits(t) for t in outputs]


@pytest.mark.parametrize("transposed", [False, True])
def test_folding_is_that_of_torch(transposed: bool) -> None:
    """`fuse_conv_bn_weights` in float64; the kernel rounds its float64 values once."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 4, 3, 3, generator=random)
    if transposed:
        weight = weight.transpose(2, 3)
    gamma, beta, mean, var = norm(6, torch.float32, 4)
    bias = torch.randn(6, generator=random)
    made = torch.empty(6, 4, 3, 3), torch.empty(6)
    FOLD.run([weight, gamma, beta, mean, var, bias], made, EPS, ["w", "b"])
    wide = [tensor.double() for tensor in (weight, bias, mean, var, gamma, beta)]
    wanted = fuse_conv_bn_weights(wide[0], wide[1], wide[2], wide[3], 1e-5, wide[4], wide[5])
    for found, right in zip(made, wanted, strict=True):
        assert torch.allclose(found.double(), right, rtol=2**-23, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_the_reverse_is_an_equivalent_pair(dtype: torch.dtype, biased: bool) -> None:
    """In float32 and float64 the scale is exactly 1: folding again gives the same bits; else within eps."""
    ours = next(d for d in DType if torch_dtype(d) is dtype)
    vector = TensorType((3,), ours)
    types = [TensorType((3, 2, 1), ours), *[vector] * (5 if biased else 4), TensorType((), DType.I64)]
    outputs = torch.randn(3, 2, 1).to(dtype), torch.randn(3).to(dtype)
    parts = FOLD.reverse(outputs, types, EPS)
    assert [(tuple(part.shape), part.dtype) for part in parts] == [(k.shape, torch_dtype(k.dtype)) for k in types]
    layer = torch.nn.BatchNorm1d(3, eps=1e-5, dtype=dtype).eval()
    with torch.no_grad():
        for tensor, part in zip(
            (layer.weight, layer.bias, layer.running_mean, layer.running_var), parts[1:5], strict=True
        ):
            assert tensor is not None
            tensor.copy_(part)
        seen = layer(torch.ones(1, 3, 1, dtype=dtype)) - layer(torch.zeros(1, 3, 1, dtype=dtype))
    assert torch.allclose(seen.double(), torch.ones_like(seen).double(), atol=4 * torch.finfo(dtype).eps)
    again = torch.empty_like(outputs[0]), torch.empty_like(outputs[1])
    FOLD.run(parts, again, EPS, ["w", "b"])
    for one, other in zip(outputs, again, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=max(1e-5 * 0.51, torch.finfo(dtype).eps), atol=1e-12)
    if dtype is torch.float32:
        assert bits(layer(outputs[0][:, :, 0].T.unsqueeze(2))) == bits(
            outputs[0][:, :, 0].T.unsqueeze(2) + parts[2].view(3, 1)
        )


def test_a_weight_that_grows_too_large_is_refused() -> None:
    parts = [torch.full((1, 1), 60000.0), torch.ones(1), torch.zeros(1), torch.zeros(1), torch.full((1,), 0.01)]
    inputs = [parts[0].half(), *parts[1:]]
    with pytest.raises(CastOverflow, match=r"^conv\.weight: 1 finite values of torch.float64 are too large"):
        FOLD.run(inputs, [torch.empty(1, 1).half(), torch.empty(1).half()], EPS, ["conv.weight", "conv.bias"])


@pytest.mark.parametrize("text", ["", "[", "[1]", "[" * 4000, '"' + "a" * 5000 + '"', "null"])
def test_options_are_a_small_json_object(text: str) -> None:
    with pytest.raises(KernelError, match="options"):
        parse_options(text)


@pytest.mark.parametrize(
    "options", [{}, {"eps": 1e-5}, {"eps": "nan"}, {"eps": "-1"}, {"eps": "x"}, {"eps": "0", "b": 1}]
)
def test_a_fold_needs_its_eps(options: dict[str, object]) -> None:
    kinds = [TensorType((2, 2), DType.F32), *[TensorType((2,), DType.F32)] * 4]
    with pytest.raises(KernelError, match="a text from 0 to below 1, and nothing else"):
        FOLD.infer(kinds, options)


def test_kernels_have_names_of_their_own() -> None:
    with pytest.raises(KernelError, match="a kernel is called 'fold_batch_norm' already"):
        register_kernel("fold_batch_norm", FOLD)
    with pytest.raises(KernelError, match="no kernel is called 'nope'; known are fold_batch_norm"):
        find_kernel("nope")


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), low=st.integers(0, 5), size=st.integers(0, 5))
def test_rows_of_outputs_need_the_same_rows(shape: list[int], low: int, size: int) -> None:
    high = min(low + size, shape[0])
    low = min(low, high)
    kinds = [TensorType(tuple(shape), DType.F32), *[TensorType((shape[0],), DType.F32)] * 4, TensorType((), DType.I64)]
    assert FOLD.pull(low, high, kinds, EPS) == ((low, high),) * 5 + ((0, 1),)
    assert FOLD.row_nbytes(kinds, EPS) >= 8 * prod(shape[1:])
