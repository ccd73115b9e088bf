"""Modules that wait for their own weights: nothing unfinished is ever seen, and nothing is left of an ended load.

What loads here is a gate that the test opens, so that each state lasts as long as it is looked at.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest
import torch
from torch import nn

from loadplan.runtime import LoadCancelled, wait_for
from loadplan.runtime.waiting import Wait, WaitingSlots


class Gate:
    """A load whose tensors, numbered as the modules are, become complete when the test says so."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open: set[int] = set()
        self.waiting = threading.Event()
        self.error: BaseException | None = None
        self.cancelled = 0

    def ready(self, number: int) -> bool:
        return number in self.open

    def cancel(self) -> None:
        self.cancelled += 1

    def let(self, *numbers: int) -> None:
        with self.changed:
            self.open.update(numbers)
            self.changed.notify_all()

    def fetch(self, number: int) -> Mapping[str, torch.Tensor]:
        with self.changed:
            while number not in self.open:
                if self.error is not None:
                    raise self.error
                self.waiting.set()
                self.changed.wait()
        return {"weight": nn.Parameter(torch.full((2, 2), float(number))), "bias": nn.Parameter(torch.zeros(2))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


def build(gate: Gate) -> Net:
    with torch.device("meta"):
        model = Net()
    model.steps = torch.tensor(3)
    wait = Wait(gate, range(3))
    for number, layer in enumerate(model.layers):
        WaitingSlots(layer, "_parameters", wait, partial(gate.fetch, number))
    return model


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def model(gate: Gate) -> Net:
    return build(gate)


def is_plain(module: nn.Module) -> bool:
    return all(type(m.__dict__[slots]) is dict for m in module.modules() for slots in ("_parameters", "_buffers"))


def in_thread(run: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    return thread, found


def test_the_first_layers_run_while_the_last_ones_load(gate: Gate, model: Net) -> None:
    gate.let(0, 1)
    with torch.no_grad():
        assert torch.equal(model.layers[1](model.layers[0](torch.ones(2))), torch.zeros(2))
    assert [is_plain(layer) for layer in model.layers] == [True, True, False]
    thread, found = in_thread(lambda: model(torch.ones(2)).detach())
    gate.waiting.wait()
    assert not found
    gate.let(2)
    thread.join()
    (values,) = found
    assert isinstance(values, torch.Tensor) and torch.equal(values, torch.zeros(2))
    assert is_plain(model)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: model.state_dict()["layers.2.weight"],
        lambda model: model.to(torch.float32).layers[2].weight,
        lambda model: list(model.parameters())[4],
        lambda model: dict(model.named_parameters())["layers.2.weight"],
        lambda model: model.get_parameter("layers.2.weight"),
        lambda model: model.layers[2].weight,
        lambda model: copy.deepcopy(model).layers[2].weight,
        lambda model: copy.copy(model.layers[2]).weight,
        lambda model: pickle.loads(pickle.dumps(model)).layers[2].weight,
        lambda model: model.requires_grad_(False).layers[2].weight,
        lambda model: model.apply(lambda module: None).layers[2]._parameters.copy()["weight"],
        lambda model: wait_for(model).layers[2].weight,
    ],
)
def test_whoever_asks_for_a_weight_waits_for_it(gate: Gate, model: Net, ask: Callable[[Net], torch.Tensor]) -> None:
    gate.let(0, 1)
    thread, found = in_thread(lambda: ask(model))
    gate.waiting.wait()
    assert not found
    gate.let(2)
    thread.join()
    (weight,) = found
    assert isinstance(weight, torch.Tensor) and torch.equal(weight, torch.full((2, 2), 2.0))
    assert is_plain(model)


def test_what_is_no_weight_is_there_at_once(model: Net) -> None:
    model.train()
    assert [name for name, _ in model.named_modules()] == ["", "layers", "layers.0", "layers.1", "layers.2"]
    assert model.steps == 3
    assert list(model.layers[0]._parameters) == ["weight", "bias"] and len(model.layers[0]._parameters) == 2
    assert "weight" in model.layers[0]._parameters and "other" not in model.layers[0]._parameters
    assert "being loaded: weight, bias" in repr(model.layers[0]._parameters)
    assert not hasattr(model.layers[0], "other")
    assert not is_plain(model)


def test_what_is_set_stays_set(gate: Gate, model: Net) -> None:
    gate.let(0, 1, 2)
    slots = model.layers[0]._parameters
    mine = nn.Parameter(torch.ones(2, 2))
    model.layers[0].weight = mine
    assert slots["weight"] is mine is model.layers[0].weight, "also for who held the mapping before"
    del slots["bias"]
    assert "bias" not in model.layers[0].state_dict()


def test_modules_that_are_never_used_keep_no_trace(gate: Gate, model: Net) -> None:
    gate.let(0, 1, 2)
    assert model.layers[0].weight is not None
    assert is_plain(model)


def test_an_empty_place_is_not_waited_for(gate: Gate) -> None:
    with torch.device("meta"):
        layer = nn.Linear(2, 2, bias=False)
    WaitingSlots(layer, "_parameters", Wait(gate, [0]), partial(gate.fetch, 0))
    assert layer.bias is None


class TestEnds:
    def test_a_failure_is_raised_each_time(self, gate: Gate, model: Net) -> None:
        gate.let(0)
        gate.error = OSError("weights.bin: cannot be read at byte 7")
        lengths = []
        for ask in (
            lambda: model(torch.ones(2)),
            model.state_dict,
            lambda: wait_for(model),
            lambda: model(torch.ones(2)),
        ):
            with pytest.raises(OSError, match="cannot be read at byte 7") as caught:
                ask()
            assert caught.value is gate.error
            lengths.append(len(caught.traceback))
        with pytest.raises(OSError, match="at byte 7") as caught:
            model(torch.ones(2))
        assert len(caught.traceback) <= lengths[0] + 1, "the traceback does not grow with each"
        assert gate.cancelled == 1

    def test_a_layer_that_came_is_not_enough(self, gate: Gate, model: Net) -> None:
        """After a failure no weight comes any more, though it may be complete: the model would be half loaded."""
        gate.error = OSError("gone")
        with pytest.raises(OSError, match="gone"):
            model.layers[0](torch.ones(2))
        gate.let(0, 1, 2)
        with pytest.raises(OSError, match="gone"):
            model.layers[1](torch.ones(2))

    def test_an_interrupt_ends_the_load(self, gate: Gate, model: Net) -> None:
        gate.error = KeyboardInterrupt()  # as a signal raises it in the wait
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2))
        assert gate.cancelled == 1
        for _ in range(2):
            with pytest.raises(LoadCancelled, match=r"was interrupted \(KeyboardInterrupt\); load it again"):
                model(torch.ones(2))

    def test_dropping_the_model_ends_the_load(self, gate: Gate) -> None:
        model = build(gate)
        gone = weakref.ref(model)
        gate.let(0)
        assert model.layers[0].weight is not None
        assert gate.cancelled == 0
        del model
        assert gone() is None, "nothing of the load holds the model, so no collector is needed"
        assert gate.cancelled == 1

    def test_a_fork_refuses_to_wait_for_ever(self, model: Net) -> None:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                model(torch.ones(2))
            except LoadCancelled as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with os.fdopen(read) as pipe:
            assert pipe.read().startswith("the process was forked while the model was loading")


def test_threads_get_the_same_tensors(gate: Gate, model: Net) -> None:
    asked = [in_thread(lambda: model.layers[1].weight) for _ in range(8)]
    gate.waiting.wait()
    gate.let(0, 1, 2)
    for thread, _ in asked:
        thread.join()
    assert len({id(found[0]) for _, found in asked}) == 1


@pytest.fixture(autouse=True)
def _no_garbage() -> Iterator[None]:
    yield
    gc.collect()
