"""Convolutions as `Linear`s over patches, and normalisations folded into convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusable import assert_same, pixels
from torch import nn
from torch.nn import functional

from loadplan.runtime import FusionError, find_fusion, find_fusions, fuse_modules
from loadplan.runtime.fold_batch_norm import BatchNorm, fold_batch_norm
from loadplan.runtime.fusions.patch_projection import PatchProjection
from loadplan.runtime.plan import FusedModule


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv2d(3, 5, (2, 3), stride=(2, 3)), (3, 8, 9)),
        (nn.Conv2d(1, 5, 4, stride=4, padding="valid", bias=False), (1, 9, 11)),
        (nn.Conv3d(3, 5, (2, 3, 4), stride=(2, 3, 4)), (3, 4, 6, 9)),
    ],
)
def test_patches_are_cut_as_a_convolution_cuts_them(conv: nn.Conv2d | nn.Conv3d, size: tuple[int, ...]) -> None:
    """More than one patch, sizes that do not divide, with a batch and without."""
    parent = nn.Module()
    parent.proj = conv.double()
    family = "patch_embeddings" if isinstance(conv, nn.Conv3d) else "patch_embeddings_2d"
    x = pixels(2, *size).requires_grad_()
    wanted, one = conv(x), conv(x[0])
    model = nn.ModuleDict({"patch_embed": parent})
    weight, bias = conv.weight, conv.bias
    (found,) = find_fusions(model, {family: True})
    fuse_modules(model, [found])
    made = parent.proj
    assert isinstance(made, PatchProjection)
    assert_same(made(x), wanted)
    assert_same(made(x[0]), one)
    assert torch.equal(made.weight, weight) and (bias is None) == (made.bias is None)
    assert made(x[:0]).shape == (0, *wanted.shape[1:])
    with pytest.raises(RuntimeError, match="has no patch of"):
        made(x[..., :1])
    with pytest.raises(RuntimeError, match="has no patch of"):
        made(torch.cat([x, x], 1))
    assert f"kernel_size={conv.kernel_size}" in repr(made)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 2, stride=1),
        nn.Conv2d(4, 4, (2, 3), stride=(3, 2)),
        nn.Conv2d(4, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, dilation=2),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(4, 4, 1, stride=1),
        nn.Conv3d(4, 4, 2, stride=2),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
    ],
)
def test_other_convolutions_are_left_alone(conv: nn.Module) -> None:
    parent = nn.Module()
    parent.projection = conv
    assert not find_fusion("patch_embeddings_2d").is_fusable(parent)


def test_three_dimensional_patches_are_fused_under_their_name_only() -> None:
    parent = nn.Module()
    parent.proj = nn.Conv3d(3, 4, 2, stride=2)
    assert find_fusions(nn.ModuleDict({"patch_embed": parent}), {"patch_embeddings": True})
    with pytest.raises(FusionError, match="finds nothing to fuse"):
        find_fusions(nn.ModuleDict({"patch_embedding": parent}), {"patch_embeddings": True})


class Frozen(nn.Module):
    """A frozen normalisation, as detectors have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name, value in zip(BatchNorm._fields, (1.0, 0.0, 0.0, 1.0), strict=True):
            self.register_buffer(name, torch.full((size,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, b, mean, var = (getattr(self, name).reshape(1, -1, 1, 1) for name in BatchNorm._fields)
        scale = w * (var + 1e-5).rsqrt()
        return x * scale + (b - mean * scale)  # type: ignore[no-any-return]


def test_a_normalisation_is_folded_as_the_formula_says() -> None:
    """Against the definition on whole tensors, with groups, a bias, strides and an epsilon that matters."""
    torch.manual_seed(0)
    for bias in (False, True):
        conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=bias, padding_mode="reflect").double()
        norm = nn.BatchNorm2d(6, eps=0.1).double().eval()
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            nn.init.normal_(tensor)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 1e-3, 0.1)  # type: ignore[arg-type]
        model = nn.Sequential(conv, norm, nn.ReLU())
        x = pixels(2, 4, 9, 9)
        wanted = model(x)
        fuse_modules(model, find_fusions(model, {"conv_bn": True}))
        assert list(model.state_dict()) == ["0.weight", "0.bias"]
        assert_same(model(x), wanted)
        assert_same(functional.relu(model[0](x)), wanted)


def test_folding_rounds_once() -> None:
    weight = torch.randn(3, 2, 1, 1, dtype=torch.float64)
    norm = BatchNorm(*(torch.rand(3, dtype=torch.float64) + 0.1 for _ in range(4)))
    exact = fold_batch_norm(weight.half().double(), None, BatchNorm(*(t.float().double() for t in norm)), eps=1e-3)
    found = fold_batch_norm(weight.half(), None, BatchNorm(*(t.float() for t in norm)), eps=1e-3)
    assert [t.dtype for t in found] == [torch.float16] * 2
    for a, b in zip(found, exact, strict=True):
        assert torch.equal(a, b.half())


def test_a_folded_batch_norm_refuses_to_train_and_a_frozen_one_does_not() -> None:
    x = pixels(2, 3, 4, 4).float()
    for norm, trains in ((nn.BatchNorm2d(3), False), (Frozen(3), True)):
        model = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
        fuse_modules(model, find_fusions(model, {"conv_bn": True}))
        if trains:
            model.train()(x)
        else:
            with pytest.raises(FusionError, match=r"has no statistics to train; call eval\(\)"):
                model.train()(x)
        model.eval()(x)


class Between(nn.Module):
    """A convolution and its normalisation, with what a test puts between, beside or behind them."""

    def __init__(self, norm: nn.Module | None = None, conv: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = conv or nn.Conv2d(4, 4, 1)
        self.norm = norm or nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.conv(x))


def _between(forward: Callable[..., Any]) -> nn.Module:
    return type("Other", (Between,), {"forward": forward})()  # type: ignore[no-any-return]


def _used_twice(module: Any, x: Any) -> Any:
    between = module.conv(x)
    return module.norm(between) + between


def _returned(module: Any, x: Any) -> Any:
    between = module.conv(x)
    return module.norm(between), between


class Nearly(Frozen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class OtherEpsilon(Frozen):
    eps = 1e-3  # not what its forward uses


class Noisy(Frozen):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (1 if self.training else 0)


def _no_statistics() -> nn.Module:
    return nn.BatchNorm2d(4, track_running_stats=False)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=name)
        for name, model in {
            "relu between": _between(lambda m, x: m.norm(m.conv(x).relu())),
            "used twice": _between(_used_twice),
            "returned": _between(_returned),
            "called twice": _between(lambda m, x: m.norm(m.conv(x)) + m.conv(x)),
            "norm twice": _between(lambda m, x: m.norm(m.norm(m.conv(x)))),
            "norm first": _between(lambda m, x: m.conv(m.norm(x))),
            "not called": _between(lambda m, x: m.norm(x)),
            "weights seen": _between(lambda m, x: m.norm(m.conv(x)) * m.conv.weight.sum()),
            "branches on shape": _between(lambda m, x: m.norm(m.conv(x)) if x.shape[0] > 1 else m.conv(x)),
            "optional argument": _between(
                lambda m, x, scale=None: m.norm(m.conv(x) if scale is None else m.conv(x) * scale)
            ),
            "another optional argument": _between(
                lambda m, x, scale=None: m.norm(m.conv(x).relu() if scale is None else m.conv(x))
            ),
            "keyword arguments": _between(lambda m, x, **more: m.norm(m.conv(x))),
            "mode": _between(lambda m, x: m.norm(m.conv(x)) if m.training else m.norm(m.conv(x).relu())),
            "no affine": Between(nn.BatchNorm2d(4, affine=False)),
            "no statistics": Between(_no_statistics()),
            "other channels": Between(nn.BatchNorm2d(8)),
            "one dim": Between(nn.BatchNorm1d(4)),
            "instance norm": Between(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
            "a subclass": Between(type("MyNorm", (nn.BatchNorm2d,), {})(4)),
            "a conv of its own": Between(conv=type("MyConv", (nn.Conv2d,), {})(4, 4, 1)),
            "transposed": Between(conv=nn.ConvTranspose2d(4, 4, 1)),
            "not quite frozen": Between(Nearly(4)),
            "another epsilon": Between(OtherEpsilon(4)),
            "frozen but for training": Between(Noisy(4)),
        }.items()
    ],
)
def test_what_is_not_certainly_a_pair_is_left_alone(model: nn.Module) -> None:
    assert not find_fusion("conv_bn").is_fusable(model)


def test_pairs_that_are_certain() -> None:
    described: Any = find_fusion("conv_bn")
    two = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), Frozen(4))
    assert described.describe(two) == {
        "pairs": [
            {"bias": True, "conv": "0", "counter": True, "eps": "1e-05", "norm": "1"},
            {"bias": True, "conv": "3", "counter": False, "eps": "1e-05", "norm": "4"},
        ]
    }
    for certain in (
        Between(),
        Between(Frozen(4)),
        _between(lambda m, x, residual: m.norm(m.conv(x)).relu() + residual),
        _between(lambda m, x, *, residual: m.norm(m.conv(x + residual))),
    ):
        assert described.is_fusable(certain)


def test_looking_for_pairs_changes_nothing() -> None:
    """The forward runs on symbols, with side effects on a copy only."""

    def forward(m: Any, x: Any) -> Any:
        m.seen = True
        return m.norm(m.conv(x))

    model = _between(forward)
    before = dict(model.__dict__), dict(model._modules), [dict(child.__dict__) for child in model.children()]
    assert find_fusion("conv_bn").is_fusable(model)
    assert (dict(model.__dict__), dict(model._modules), [dict(c.__dict__) for c in model.children()]) == before


def test_the_right_module_is_named_when_fusing_fails() -> None:
    with pytest.raises(FusionError, match=r"cannot fuse 'a\.b'"):
        fuse_modules(nn.ModuleDict({"a": nn.ModuleDict({"b": nn.ReLU()})}), [FusedModule("a.b", "conv_bn")])
