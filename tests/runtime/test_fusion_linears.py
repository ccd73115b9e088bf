"""`Linear`s joined to one: when the slices share a product, and when they must not."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
import torch
from fusable import assert_same
from torch import nn

from loadplan.runtime import FusionError, find_fusion, find_fusions, fuse_modules
from loadplan.runtime.fusions.joined_linear import LinearSlice


class Attention(nn.Module):
    """Projects three inputs, which the test chooses."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 6, bias), nn.Linear(4, 2, bias), nn.Linear(4, 2, bias)

    def forward(self, call: Callable[[Attention], Any]) -> Any:
        return call(self)


def attention(bias: bool = True) -> tuple[Attention, Attention]:
    """An original and its fused copy, in float64."""
    torch.manual_seed(0)
    original = Attention(bias).double()
    other = copy.deepcopy(original)
    fuse_modules(other, find_fusions(other, {"qkv": True}))
    return original, other


def products(module: nn.Module) -> list[int]:
    """A list that grows by one whenever the fused `Linear` is called."""
    calls: list[int] = []
    module.get_submodule("qkv_proj").register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_one_product_serves_all_three() -> None:
    original, other = attention()
    calls = products(other)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(2):
        assert_same(
            other(lambda m: [m.query(x), m.key(x), m.value(x)]), [original.query(x), original.key(x), original.value(x)]
        )
    assert len(calls) == 2


def test_other_inputs_get_their_own_product() -> None:
    """Cross attention, and positions that are added to queries and keys only."""
    original, other = attention()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)

    def run(m: Attention) -> Any:
        return [m.query(x), m.key(y), m.value(y), m.query(y), m.key(x), m.value(x), m.query(x.clone()), m.value(x)]

    assert_same(other(run), run(original))
    assert_same(run(other), run(original))  # outside of its forward


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_changed_input_is_multiplied_again(mode: Callable[[], Any]) -> None:
    original, other = attention()

    def run(m: Attention) -> Any:
        x = torch.ones(5, 4, dtype=torch.float64)
        query = m.query(x)
        x[0] += 1
        key = m.key(x)
        x.mul_(3)
        return [query, key, m.value(x)]

    with mode():
        assert_same(other(run), run(original))


def test_a_result_is_handed_out_once() -> None:
    """Whoever changes a result in place does not change what others get."""
    original, other = attention()
    x = torch.ones(5, 4, dtype=torch.float64)

    def run(m: Attention) -> Any:
        with torch.no_grad():
            first = m.query(x).mul_(7)
            return [first, m.query(x), m.key(x), m.value(x)]

    assert_same(other(run), run(original))


def test_nothing_outlives_the_forward() -> None:
    original, other = attention()
    x = torch.ones(5, 4, dtype=torch.float64)
    other(lambda m: m.query(x))
    with torch.no_grad():
        for weight in (original.key.weight, other.key.weight):
            weight.mul_(2)  # of the fused module: a view
    assert_same(other(lambda m: m.key(x)), original.key(x))
    with pytest.raises(OSError, match="stop"):
        other(lambda m: (m.query(x), _stop()))
    with torch.no_grad():
        other.get_submodule("qkv_proj").weight.mul_(2)  # type: ignore[operator]
        original.key.weight.mul_(2)
    assert_same(other.key(x), original.key(x))


def _stop() -> object:
    raise OSError("stop")


def test_grad_mode_and_autocast_are_part_of_the_input() -> None:
    original, other = attention()
    original, other = original.float(), other.float()
    x = torch.ones(5, 4)

    def run(m: Attention) -> Any:
        with torch.no_grad():
            query = m.query(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = m.value(x)
        return [query, m.key(x), value]

    found, wanted = other(run), run(original)
    assert [(t.dtype, t.requires_grad) for t in found] == [(t.dtype, t.requires_grad) for t in wanted]
    assert_same(found, wanted, rtol=1e-6, atol=1e-6)


def test_autocast_is_part_of_the_input() -> None:
    original, other = (module.float() for module in attention())
    x = torch.ones(5, 4)

    def run(m: Attention) -> Any:
        query = m.query(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            key = m.key(x)
        with torch.autocast("cpu", dtype=torch.float16):
            return [query, key, m.value(x)]

    found, wanted = other(run), run(original)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.bfloat16, torch.float16]
    assert_same(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_module_in_anothers_forward_has_products_of_its_own() -> None:
    originals, others = zip(attention(), attention(), strict=True)
    with torch.no_grad():
        for part in (originals[1].query, originals[1].key, originals[1].value, others[1].get_submodule("qkv_proj")):
            part.weight.mul_(3)  # type: ignore[operator]
    x = torch.ones(5, 4, dtype=torch.float64)

    def run(m: tuple[Attention, ...]) -> Any:
        return [
            m[0].query(x),
            m[1].key(x),
            m[1](lambda inner: [inner.query(x), m[0].key(x)]),
            m[1].value(x),
            m[0].value(x),
        ]

    assert_same(others[0](lambda _: run(others)), run(originals))


def test_threads_run_one_module() -> None:
    """All in the midst of one forward of the same module, each with an input of its own."""
    original, other = attention()
    between = threading.Barrier(4)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            x = torch.full((5, 4), float(10 * number + turn), dtype=torch.float64)

            def run(m: Attention, x: torch.Tensor = x) -> Any:
                query = m.query(x)
                between.wait(60)
                return [query, m.key(x), m.value(x)]

            found = other(run)
            wanted = [original.query(x), original.key(x), original.value(x)]
            if not all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, wanted, strict=True)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_context_that_is_carried_off_shares_nothing_wrong() -> None:
    original, other = attention()
    x = torch.ones(5, 4, dtype=torch.float64)
    carried = other(lambda m: (m.query(x), copy_context())[1])
    with torch.no_grad():
        x.add_(1)
    assert_same(carried.run(other.key, x), original.key(x))


def test_a_context_that_is_carried_to_another_thread_shares_nothing() -> None:
    original, other = attention()
    x = torch.ones(5, 4, dtype=torch.float64)

    def run(m: Attention) -> Any:
        query, found = m.query(x), list[torch.Tensor]()
        thread = threading.Thread(target=copy_context().run, args=(lambda: found.append(m.key(x)),))
        thread.start()
        thread.join()
        counts.append(len(calls))
        return [query, *found, m.key(x), m.value(x)]

    calls, counts = products(other), list[int]()
    assert_same(other(run), [original.query(x), original.key(x), original.key(x), original.value(x)])
    assert (counts, len(calls)) == ([2], 2)  # the hook that counts makes the thread's product a whole one


def test_slices_look_like_what_they_replace() -> None:
    original, other = attention()
    for name in ("query", "key", "value"):
        part, wanted = getattr(other, name), getattr(original, name)
        assert isinstance(part, LinearSlice)
        assert part.bias is not None and torch.equal(part.bias, wanted.bias)
        assert torch.equal(part.weight, wanted.weight)
        assert part.weight.data_ptr() != wanted.weight.data_ptr()
        assert (part.in_features, part.out_features) == (wanted.in_features, wanted.out_features)
        assert list(part.parameters()) == [] and part.state_dict() == {}
    assert attention(bias=False)[1].key.bias is None
    assert "(key): LinearSlice(in_features=4, out_features=2, start=6)" in repr(other)
    assert repr(other).startswith("FusedAttention(")


def test_what_replaces_the_fused_linear_computes() -> None:
    """LoRA, quantised layers: by attribute or behind nn.Module's back, in the forward or out of it."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)  # type: ignore[no-any-return]

    x = torch.ones(5, 4, dtype=torch.float64)
    for put in (setattr, lambda module, name, new: module._modules.update({name: new})):
        original, other = attention()
        put(other, "qkv_proj", Doubled(other.get_submodule("qkv_proj")))
        wanted = [2 * original.query(x), 2 * original.value(x)]
        assert_same(other(lambda m: [m.query(x), m.value(x)]), wanted)
        assert_same([other.query(x), other.value(x)], wanted)
        assert_same(copy.deepcopy(other)(lambda m: [m.query(x), m.value(x)]), wanted)


def test_a_part_of_the_fused_linear_is_refused() -> None:
    """Of a rank, say: half of the rows are not the first rows of each part."""
    _, other = attention()
    linear = other.get_submodule("qkv_proj")
    linear.weight, linear.bias = (nn.Parameter(p[:5].detach()) for p in linear.parameters())
    x = torch.ones(5, 4, dtype=torch.float64)
    runs: list[Callable[[], Any]] = [lambda: other(lambda m: m.query(x)), lambda: other.key(x), lambda: other.key.bias]
    for run in runs:
        with pytest.raises(FusionError, match="qkv_proj has 5 rows, and its parts were fused when it had 10"):
            run()


def test_a_hook_on_the_fused_linear_always_runs() -> None:
    _, other = attention()
    calls = products(other)
    other.key(torch.ones(5, 4, dtype=torch.float64))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "key", nn.Linear(3, 2)),
        lambda m: setattr(m, "key", nn.Linear(4, 2, bias=False)),
        lambda m: setattr(m, "key", nn.Linear(4, 2, dtype=torch.float64)),
        lambda m: setattr(m, "key", nn.Linear(4, 2, device="meta")),
        lambda m: setattr(m, "key", nn.Bilinear(4, 4, 2)),
        lambda m: setattr(m, "key", type("MyLinear", (nn.Linear,), {})(4, 2)),
        lambda m: setattr(m, "key", m.query),
        lambda m: m.key.requires_grad_(False),
        lambda m: m.key.register_forward_hook(lambda *_: None),
        lambda m: m.key.register_forward_pre_hook(lambda *_: None),
        lambda m: setattr(m.key, "forward", m.key.forward),
        lambda m: delattr(m, "key"),
        lambda m: setattr(m, "qkv_proj", nn.Identity()),
        lambda m: nn.utils.parametrizations.weight_norm(m.key),
    ],
)
def test_projections_that_do_not_go_together_are_left_alone(change: Callable[[Attention], Any]) -> None:
    model = Attention()
    assert find_fusion("qkv").is_fusable(model)
    change(model)
    assert not find_fusion("qkv").is_fusable(model)


def test_a_deep_copy_frees_the_original() -> None:
    """No cycles: a fused model's memory goes when the model goes, not when the collector comes."""
    _, other = attention()
    gone = weakref.ref(other)
    gc.disable()
    try:
        del other, _
        assert gone() is None
    finally:
        gc.enable()
