"""Modules, real and on the meta device, that get what a plan loads; and tied names that share it.

Values are compared with the bytes that were written to the file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from builders import Raw, bytes_of, filled, raw, write_file
from torch import nn

from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.runtime.execute import Mode
from loadplan.runtime.load import ModuleMismatch, load_into, load_state_dict
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan_format import PlanError
from loadplan.runtime.source_files import FileMismatch

MODES: tuple[Mode, ...] = ("auto", "read", "copy")


class Small(nn.Module):
    """A parameter, a frozen one, a buffer, a buffer that no checkpoint holds, and a slot that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2, bias=False)
        self.inner = nn.Module()
        self.inner.frozen = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
        self.inner.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(2), persistent=False)


SMALL = {"lin.weight": raw("F32", 2, 3), "inner.frozen": raw("I32", 2), "inner.count": raw("I64")}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.emb.weight


class TestLoadInto:
    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        write_file(tmp_path / "m.safetensors", SMALL)
        return compile_plan(tmp_path)

    def check(self, module: nn.Module) -> None:
        assert {name: bytes_of(tensor) for name, tensor in module.state_dict().items()} == {
            name: tensor.data for name, tensor in SMALL.items()
        }
        parameters = dict(module.named_parameters())
        assert {name: parameter.requires_grad for name, parameter in parameters.items()} == {
            "lin.weight": True,
            "inner.frozen": False,
        }
        assert set(dict(module.named_buffers())) == {"inner.count", "table"}

    @pytest.mark.parametrize("mode", [*MODES, "map"])
    def test_meta(self, tmp_path: Path, plan: Plan, mode: Mode) -> None:
        with torch.device("meta"):
            module = Small()
        module.table = torch.ones(2)
        if mode == "map":
            plan = compile_plan(write_file(tmp_path / "m.safetensors", dict(reversed(SMALL.items()))))
        assert load_into(module, plan, tmp_path, mode=mode) is module
        self.check(module)
        assert isinstance(module.lin.weight, nn.Parameter)

    @pytest.mark.parametrize("mode", MODES)
    def test_real(self, tmp_path: Path, plan: Plan, mode: Mode) -> None:
        """Overwritten where they are: whoever holds a parameter sees the new values."""
        module = Small()
        held = dict(module.named_parameters())
        places = {name: parameter.data_ptr() for name, parameter in held.items()}
        load_into(module, plan, tmp_path, mode=mode)
        self.check(module)
        for name, parameter in module.named_parameters():
            assert parameter is held[name] and parameter.data_ptr() == places[name]
        assert dict(module.named_buffers())["table"].tolist() == [1, 1]

    def test_meta_buffer_without_a_source(self, tmp_path: Path, plan: Plan) -> None:
        """B28, B31: a buffer that no checkpoint holds stays the model's, and must be real."""
        with torch.device("meta"):
            module = Small()
        with pytest.raises(ModuleMismatch, match="buffer table is on the meta device"):
            load_into(module, plan, tmp_path)
        assert module.lin.weight.is_meta

    @pytest.mark.parametrize(
        ("tensors", "says"),
        [
            ({**SMALL, "lin.bias": raw("F32", 2)}, "the plan makes lin.bias, the module has no such tensor"),  # B31
            (
                {**SMALL, "lin.weight": raw("F32", 3, 2)},
                r"lin.weight is \(2, 3\) torch.float32 in the module, F32\[3,2\]",
            ),
            ({**SMALL, "lin.weight": raw("F16", 2, 3)}, "lin.weight is .* in the module, F16"),
            ({**SMALL, "inner.frozen": raw("U32", 2)}, "inner.frozen is .* in the module, U32"),
            ({**SMALL, "table": raw("F32", 2)}, "the plan makes table, the module has no such tensor"),
            (
                {"lin.weight": SMALL["lin.weight"]},
                "the plan does not make inner.count; the plan does not make inner.frozen",
            ),
            (
                {"x": raw("F32", 1)},
                r"the plan does not make lin\.weight; the plan makes x, the module has no such tensor",
            ),
        ],
    )
    def test_mismatches_leave_the_module_alone(self, tmp_path: Path, tensors: dict[str, Raw], says: str) -> None:
        write_file(tmp_path / "m.safetensors", tensors)
        module = Small()
        before = {name: bytes_of(tensor) for name, tensor in module.state_dict().items()}
        with pytest.raises(ModuleMismatch, match=says):
            load_into(module, compile_plan(tmp_path), tmp_path)
        assert {name: bytes_of(tensor) for name, tensor in module.state_dict().items()} == before

    def test_failed_loads_leave_the_module_alone(self, tmp_path: Path, plan: Plan) -> None:
        module = Small()
        before = {name: bytes_of(tensor) for name, tensor in module.state_dict().items()}
        os.truncate(tmp_path / "m.safetensors", 40)
        with pytest.raises(FileMismatch):
            load_into(module, plan, tmp_path)
        assert {name: bytes_of(tensor) for name, tensor in module.state_dict().items()} == before

    @pytest.mark.parametrize("device", ["meta", "cpu"])
    @pytest.mark.parametrize("stored", ["emb.weight", "head.weight"])
    def test_ties(self, tmp_path: Path, stored: str, device: str) -> None:
        """One parameter under two names stays one."""
        write_file(tmp_path / "m.safetensors", {stored: raw("F32", 4, 2)})
        with torch.device(device):
            module = Tied()
        load_into(module, compile_plan(tmp_path, signature=module), tmp_path)
        assert module.head.weight is module.emb.weight
        assert isinstance(module.emb.weight, nn.Parameter)
        assert bytes_of(module.emb.weight) == raw("F32", 4, 2).data

    def test_ranks(self, tmp_path: Path) -> None:
        """A module of one rank's shapes."""
        write_file(tmp_path / "m.safetensors", {"weight": raw("F32", 4, 2)})
        plan = compile_plan(tmp_path, target=Target(tp_size=2, tp_plan={"weight": "colwise"}))
        whole = safetensors.torch.load_file(tmp_path / "m.safetensors")["weight"]
        for rank in range(2):
            module = nn.Linear(2, 2, bias=False)
            assert load_into(module, plan, tmp_path, rank) is module
            assert torch.equal(module.weight, whole[2 * rank : 2 * rank + 2])
        with pytest.raises(ModuleMismatch):
            load_into(nn.Linear(2, 4, bias=False), plan, tmp_path)
        with pytest.raises(PlanError, match="has ranks 0 to 1, not 2"):
            load_into(nn.Linear(2, 2, bias=False), plan, tmp_path, 2)


class TestEqualTies:
    """Tied names that are both stored become one tensor when their bytes are equal (B26)."""

    def load(self, folder: Path, tensors: dict[str, Raw], mode: Mode, **more: object) -> dict[str, torch.Tensor]:
        write_file(folder / "m.safetensors", tensors)
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        plan = compile_plan(folder, signature=Signature.of(kinds, ties=[sorted(tensors)]))
        assert plan.head.equal_ties == (tuple(sorted(tensors)),)
        return load_state_dict(plan, folder, mode=mode)

    @pytest.mark.parametrize("mode", [*MODES, "map"])
    @pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "BOOL", "C64", "I64"])
    def test_equal(self, tmp_path: Path, dtype: str, mode: Mode) -> None:
        loaded = self.load(tmp_path, {"a": raw(dtype, 4, 2), "b": raw(dtype, 4, 2)}, mode)
        assert loaded["a"] is loaded["b"]

    @pytest.mark.parametrize("mode", [*MODES, "map"])
    def test_nan_equals_itself(self, tmp_path: Path, mode: Mode) -> None:
        loaded = self.load(tmp_path, {"a": filled(float("nan"), 3), "b": filled(float("nan"), 3)}, mode)
        assert loaded["a"] is loaded["b"]

    @pytest.mark.parametrize("mode", [*MODES, "map"])
    def test_different(self, tmp_path: Path, mode: Mode) -> None:
        for one, other in ((1.0, 2.0), (0.0, -0.0)):
            tensors = {"a": filled(one, 2), "b": filled(other, 2)}
            loaded = self.load(tmp_path, tensors, mode)
            assert loaded["a"] is not loaded["b"]
            assert {name: bytes_of(tensor) for name, tensor in loaded.items()} == {
                name: tensor.data for name, tensor in tensors.items()
            }

    def test_three(self, tmp_path: Path) -> None:
        """Each pair that is equal is joined, wherever the odd one stands."""
        for odd in "abc":
            tensors = {name: filled(9 if name == odd else 1, 2) for name in "abc"}
            loaded = self.load(tmp_path, tensors, "read")
            first, second = (loaded[name] for name in "abc" if name != odd)
            assert first is second
            assert loaded[odd] is not first and loaded[odd].tolist() == [9, 9]
