"""Cases about dtypes: casts over several steps and on ranks, against torch's casts of the same literal tensors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from builders import BITS, Raw, bytes_of, raw, write_file
from safetensors.torch import save_file

from loadplan.compiler import Target, compile_plan
from loadplan.compiler.ops import Cast, Transpose
from loadplan.recipes import Recipe, WeightConverter
from loadplan.runtime import CastOverflow, load_state_dict, save_checkpoint
from loadplan.runtime.dtype import DType


@pytest.mark.parametrize(
    ("stored", "step", "wanted", "value"),
    [
        ("float32", "F16", "F32", 1e5),
        ("bfloat16", "F16", "F32", -7e4),
        ("float64", "F32", "F64", 1e39),
        ("float64", "BF16", "F32", 1e39),
        ("float32", "BF16", "F64", 3.4e38),
    ],
)
def test_b34_an_overflow_half_way_is_found(stored: str, step: str, wanted: str, value: float, tmp_path: Path) -> None:
    """A number that is lost in the middle of a chain of casts is lost, however wide the last one is."""
    tensor = torch.ones(3, 5, dtype=getattr(torch, stored))
    save_file({"mid.weight": tensor}, tmp_path / "model.safetensors")
    recipe = Recipe([WeightConverter("mid.weight", "mid.weight", [Cast(DType(step)), Transpose(0, 1)])])
    target = Target(dtype=wanted)
    loaded = load_state_dict(compile_plan(tmp_path, recipe, target=target), tmp_path)
    assert torch.equal(loaded["mid.weight"], torch.ones(5, 3, dtype=loaded["mid.weight"].dtype))

    tensor[1, 4] = value
    save_file({"mid.weight": tensor}, tmp_path / "model.safetensors")
    plan = compile_plan(tmp_path, recipe, target=target)
    with pytest.raises(CastOverflow, match=r"mid\.weight: 1 finite values"):
        load_state_dict(plan, tmp_path)


@pytest.mark.parametrize("style", ["colwise", "rowwise"])
def test_b34_a_rank_answers_for_its_own_part(style: str, tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    tensor[5, 3] = 1e6
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    plan = compile_plan(tmp_path, target=Target(dtype="F16", tp_size=2, tp_plan={"w": style}))
    first = tensor[:3] if style == "colwise" else tensor[:, :2]
    assert torch.equal(load_state_dict(plan, tmp_path, 0)["w"], first.half())
    with pytest.raises(CastOverflow, match="w: 1 finite values"):
        load_state_dict(plan, tmp_path, 1)


@pytest.mark.parametrize("stored", ["F32", "F64", "BF16"])
def test_b34_small_numbers_are_rounded_as_torch_rounds(stored: str, tmp_path: Path) -> None:
    """The loss of small numbers is rounding, not overflow; what rounds to the largest number is kept."""
    dtype = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}[stored]
    tensor = torch.tensor([1e-8, -1e-8, 6e-8, 65504.0 if stored != "BF16" else 65280.0, -0.0], dtype=dtype)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    loaded = load_state_dict(compile_plan(tmp_path, target=Target(dtype="F16")), tmp_path)["w"]
    assert torch.equal(loaded.view(torch.int16), tensor.half().view(torch.int16))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(dtype, shape, id=f"{dtype}{list(shape)}")
        for dtype, bits in BITS.items()
        for shape in ((), (0,), (0, 4), (4,), (3, 8))
        if math.prod(shape) * bits % 8 == 0  # a file holds whole bytes
    ],
)
def test_b36_each_dtype_of_the_format_comes_through(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Planned from the header, loaded bit for bit although the rest is cast, and saved as it was."""
    target = Target(dtype=None if DType(dtype).is_float else "BF16")
    tensor = raw(dtype, *shape)
    other = Raw("F32", (2,), bytes_of(torch.ones(2)))
    source = write_file(tmp_path / "a" / "model.safetensors", {"kept": tensor, "other": other})
    plan = compile_plan(source.parent, target=target)
    loaded = load_state_dict(plan, source.parent)
    assert bytes_of(loaded["kept"]) == tensor.data
    save_checkpoint(loaded, plan, tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == source.read_bytes()
