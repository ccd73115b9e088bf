"""`conv_bn`: batch normalisation in eval mode folded into the convolution before it.

A pair is fused only if it is certain that nothing else sees the convolution's result: the forward of their parent is
run once on symbols, with a recorder in the place of each child, in training and in eval mode. It must take no optional
arguments, call the convolution and the normalisation once each, and give the one's result to the other alone. Forwards
that cannot be run so (they branch on shapes, reach into their children) are left alone.

Normalisations are `BatchNorm2d`, and frozen ones: modules of four buffers that scale and shift, which is tried on numbers.
After folding, the former refuse to run in training mode. The arithmetic is that of the kernel `fold_batch_norm`, which
plans name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer

from loadplan.runtime.fold_batch_norm import BatchNorm, fold_batch_norm
from loadplan.runtime.fusion import FusionError
from loadplan.runtime.fusions.fused_class import Fused, fused_class, fused_parameter, is_plain, replace_children

_BUFFERS = BatchNorm._fields
_FROZEN_EPS = 1e-5  # of the frozen normalisations that keep it in their forward (transformers 5.24, all of them)


class FoldedBatchNorm(nn.Module):
    """Where a normalisation was that its convolution does now; hands its input on."""

    def __init__(self, eps: float, is_frozen: bool) -> None:
        super().__init__()
        self.eps = eps
        self.is_frozen = is_frozen

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and not self.is_frozen:
            raise FusionError(
                "this batch normalisation is folded into its convolution and has no statistics to train; "
                "call eval() on the model, or build it without the fusion 'conv_bn'"
            )
        return input

    def extra_repr(self) -> str:
        return f"eps={self.eps}, is_frozen={self.is_frozen}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A convolution and the normalisation after it: names of two children."""

    conv: str
    norm: str
    eps: float


class FusedConvBn(Fused):
    """A module whose convolutions do what their normalisations did."""

    fusion: ClassVar[str] = "conv_bn"

    def fuse_(self) -> None:
        for pair in find_pairs(self):
            conv, norm = cast(nn.Conv2d, self._modules[pair.conv]), cast(nn.Module, self._modules[pair.norm])
            folded = FoldedBatchNorm(pair.eps, is_frozen=type(norm) is not nn.BatchNorm2d)
            folded.train(norm.training)
            replace_children(
                self, {pair.conv: {pair.conv: _folded(conv, norm, pair.eps)}, pair.norm: {pair.norm: folded}}
            )


class ConvBnFamily:
    """The family of modules with such pairs among their children."""

    looks_for = (
        "a Conv2d child whose result goes to a BatchNorm2d or frozen batch normalisation child, and nowhere else"
    )

    def is_fusable(self, module: nn.Module) -> bool:
        return bool(find_pairs(module))

    def replaces(self, module: nn.Module) -> Sequence[str]:
        return [name for pair in find_pairs(module) for name in (pair.conv, pair.norm)]

    def describe(self, module: nn.Module) -> dict[str, object]:
        """The pairs, `eps` as Python writes it: what has a bias, what a counter of batches."""
        return {
            "pairs": [
                {
                    "bias": cast(nn.Conv2d, module._modules[pair.conv]).bias is not None,
                    "conv": pair.conv,
                    "counter": getattr(module._modules[pair.norm], "num_batches_tracked", None) is not None,
                    "eps": repr(pair.eps),
                    "norm": pair.norm,
                }
                for pair in find_pairs(module)
            ]
        }

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return fused_class(FusedConvBn, original_cls)


FAMILY = ConvBnFamily()


def find_pairs(module: nn.Module) -> tuple[Pair, ...]:
    """The pairs among the children of `module` that can be folded, in the order of the convolutions."""
    convs = [name for name, child in module._modules.items() if is_plain(child, nn.Conv2d)]
    if not convs or "forward" in module.__dict__:
        return ()
    others = {name: child for name, child in module._modules.items() if child is not None and name not in convs}
    norms = {name: eps for name, child in others.items() if (eps := _eps_of(child)) is not None}
    if not norms:
        return ()
    graphs = [_run_on_symbols(module, training) for training in (True, False)]
    pairs = []
    for conv in convs:
        followers = {_only_follower(graph, conv) for graph in graphs}
        norm = followers.pop() if len(followers) == 1 else None
        if norm in norms and _fit(cast(nn.Conv2d, module._modules[conv]), cast(nn.Module, module._modules[norm])):
            pairs.append(Pair(conv, norm, norms[norm]))
    return tuple(pairs)


def _only_follower(graph: fx.Graph | None, conv: str) -> str | None:
    """The child that alone gets the result of the child `conv`, if each is called once."""
    calls = [node for node in graph.nodes if node.op == "call_module"] if graph is not None else []
    made = [node for node in calls if node.target == conv]
    if len(made) != 1 or len(made[0].users) != 1:
        return None
    (follower,) = made[0].users
    is_alone = follower.op == "call_module" and follower.args == (made[0],) and not follower.kwargs
    return str(follower.target) if is_alone and sum(node.target == follower.target for node in calls) == 1 else None


def _fit(conv: nn.Conv2d, norm: nn.Module) -> bool:
    """Whether shapes, device and kind of number are those of one folded convolution."""
    tensors = [cast(torch.Tensor, getattr(norm, name)) for name in _BUFFERS]
    return all(
        tensor.shape == (conv.out_channels,) and tensor.device == conv.weight.device and tensor.is_floating_point()
        for tensor in tensors
    )


def _folded(conv: nn.Conv2d, norm: nn.Module, eps: float) -> nn.Conv2d:
    made = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        cast(tuple[int, int], conv.kernel_size),
        stride=cast(tuple[int, int], conv.stride),
        padding=cast("str | tuple[int, int]", conv.padding),
        dilation=cast(tuple[int, int], conv.dilation),
        groups=conv.groups,
        padding_mode=conv.padding_mode,
        device="meta",
    )
    tensors = BatchNorm(*(cast(torch.Tensor, getattr(norm, name)).detach() for name in _BUFFERS))
    bias = None if conv.bias is None else conv.bias.detach()
    weight, shift = fold_batch_norm(conv.weight.detach(), bias, tensors, eps=eps)
    made.weight, made.bias = fused_parameter(weight, conv.weight), fused_parameter(shift, conv.weight)
    made.train(conv.training)
    return made


def _eps_of(norm: nn.Module) -> float | None:
    """The epsilon of a normalisation that can be folded; None for any other module."""
    eps = getattr(norm, "eps", _FROZEN_EPS)
    if not isinstance(eps, float) or not 0 <= eps < 1 or not is_plain(norm, type(norm)):
        return None
    if type(norm) is nn.BatchNorm2d:
        return eps if all(getattr(norm, name) is not None for name in _BUFFERS) else None
    is_like = not norm._parameters and not norm._modules and set(norm._buffers) == set(_BUFFERS)
    return eps if is_like and _is_frozen_norm(norm, eps) else None


def _is_frozen_norm(norm: nn.Module, eps: float) -> bool:
    """Whether the module computes `x * scale + (bias - mean * scale)` with that epsilon, in both modes."""
    step = torch.arange(1.0, 7.0, dtype=torch.float64, device="cpu")
    values = BatchNorm(weight=step / 3 - 1, bias=step - 4, running_mean=step / 7 - 0.5, running_var=step * 1e-5)
    x = torch.linspace(-2, 2, 48, dtype=torch.float64, device="cpu").reshape(2, 6, 2, 2)
    weight, bias = fold_batch_norm(torch.ones(6, 1, 1, 1, dtype=torch.float64, device="cpu"), None, values, eps=eps)
    wanted = x * weight.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)
    for training in (True, False):
        twin = copy.copy(norm)
        twin.__dict__.update(_buffers=values._asdict(), training=training)
        try:
            with torch.no_grad():
                found = type(norm).forward(twin, x)
        except Exception:  # noqa: BLE001 - whatever a class of somebody else's raises, it is not the one that is wanted
            return False
        if not isinstance(found, torch.Tensor) or found.shape != x.shape or found.dtype != x.dtype:
            return False
        if not torch.allclose(found, wanted, rtol=1e-12, atol=1e-9):
            return False
    return True


class _Recorder(nn.Module):
    """In the place of a child: notes that it was called, and with what."""

    def __init__(self, name: str, tracer: GraphAppendingTracer) -> None:
        super().__init__()
        self.name, self.tracer = name, tracer

    def forward(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_module", self.name, args, kwargs)


def _run_on_symbols(module: nn.Module, training: bool) -> fx.Graph | None:
    """What the forward of `module` calls, on what; None if it has optional arguments or cannot be run so.

    torch's own tracer patches `nn.Module` for all threads while it runs; this changes nothing but a shallow copy.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if any(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None  # what it does may depend on them
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    try:
        twin = copy.copy(module)
        recorders = {
            name: None if child is None else _Recorder(name, tracer) for name, child in module._modules.items()
        }
        twin.__dict__.update(_modules=recorders, training=training)
        inputs = {p.name: tracer.create_proxy("placeholder", p.name, (), {}) for p in parameters}
        positional = [inputs[p.name] for p in parameters if p.kind is not p.KEYWORD_ONLY]
        keywords = {p.name: inputs[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY}
        result = type(module).forward(twin, *positional, **keywords)
        graph.create_node("output", "output", (tracer.create_arg(result),), {}, None)
    except Exception:  # noqa: BLE001 - a forward of somebody else's, on what it was not written for: anything may be raised
        return None
    return graph
