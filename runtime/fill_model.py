"""`load_model`: the model that a plan is for, with its tensors in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import ref

import torch
from torch import nn

from loadplan.runtime.artifact import Artifact, open_any
from loadplan.runtime.build_model import ModelError, build_recorded, compute_buffers
from loadplan.runtime.execute import Mode, Residency
from loadplan.runtime.finish_model import SaveFused, finish_model, forget_ties, is_pretrained, mark_initialized
from loadplan.runtime.load import (
    ArgumentError,
    ModuleMismatch,
    begin_execution,
    check_module,
    constant_value,
    is_sequential,
    read_tensors,
    resolve,
    threads_for,
)
from loadplan.runtime.loading import Loading, Progress
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.targets import TargetNames, Targets
from loadplan.runtime.waiting import Wait, WaitingSlots

logger = logging.getLogger(__name__)


def load_model(
    plan: Plan | Artifact | str | Path,
    checkpoint: str | Path | None = None,
    rank: int = 0,
    device: str | torch.device = "cpu",
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    mode: Mode = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    residency: Residency = "lazy",
    wait: bool = True,
) -> nn.Module:
    """The model that `plan` is for, with the tensors of `rank` in it, in evaluation mode.

    A transformers model is as `from_pretrained` gives it: it computes, generates and is saved alike. Parameters require
    gradients as its class has it (`from_pretrained` turns them on for all).

    Args:
        plan, checkpoint, rank, device, mode: as of `load_state_dict`.
        model: a module on the meta device, or what makes one; None builds the class that the plan names, which must be
            one of transformers'. Its tensors on the meta device are replaced; others that the plan makes are refused.
        threads, progress, residency: as of `load_state_dict`; `progress`, and `residency="lock"`, need `wait`.
        wait: False returns as soon as the model is built, while weights come, lower layers first, and each module waits
            for its own when they are first asked for, in a forward or any other way (`loadplan.runtime.waiting`). `wait_for(model)`
            waits for all. `LOADPLAN_SYNC=1` and `HF_DEACTIVATE_ASYNC_LOAD=1` in the environment make it True, with one
            thread.

    Raises:
        ModelError: the plan names no model, or transformers cannot build it.
        ModuleMismatch: the model's names or shapes are not the plan's, or some of its tensors would be left without
            values.
        And what `load_state_dict` raises; with `wait=False`, what is found while reading is raised by the first that
        needs a weight, again each time, and by `wait_for`.
    """
    began = time.perf_counter()
    source = open_any(plan)
    opened, location = resolve(source, checkpoint)
    bounded = threads_for(threads)
    if not wait and (progress is not None or residency == "lock"):
        raise ArgumentError(
            "progress= is called, and memory locked, while load_model waits: leave it out with wait=False"
        )
    opened.section(rank)  # a rank that there is
    place = torch.device(device)
    moved = None if place.type in ("cpu", "cuda") else place
    names = TargetNames(opened.head)
    loading = None
    if not (wait or is_sequential()):  # bytes come while the model is built, about in its order
        execution = begin_execution(opened, location, rank, place, mode, bounded, residency)
        loading = execution.start(sorted(names.numbers.values(), key=lambda n: _natural(opened.head.tensors[n].name)))
    try:
        module = _make(opened, model)
        values = _buffer_values(module, opened)
        _check(module, opened, rank, names, values, is_recorded=model is None)
        slots = list(_slots(module, names))
        if loading is None:
            loaded = read_tensors(opened, location, rank, place, mode, bounded, progress, residency)
            fill = _Fill(module, Targets(names, moved, lambda numbers: loaded))
            ready = [
                (slot, fill.tensors(slot.attribute, slot.names, slot.trained)) for slot in slots
            ]  # all, before the model is touched
            _complete(module, source, opened, location, place, values, is_recorded=model is None)
            for slot, tensors in ready:
                slot.owner.__dict__[slot.attribute].update(tensors)
        else:
            _complete(module, source, opened, location, place, values, is_recorded=model is None)
            _let_wait(module, loading, names, moved, slots)
    except BaseException:
        if loading is not None:
            loading.cancel()
        raise
    logger.info("model with %d modules that hold tensors, in %.3f s", len(slots), time.perf_counter() - began)
    return module


def _natural(name: str) -> list[tuple[int, str]]:
    """What sorts names as people count: layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _let_wait(
    module: nn.Module, loading: Loading, names: TargetNames, device: torch.device | None, slots: Sequence[_Slot]
) -> None:
    """Have `slots` wait for the load."""
    order = names.order(name for slot in slots for name in slot.names.values())
    fill = _Fill(module, Targets(names, device, loading.wait))
    wait = Wait(loading, order)
    for slot in slots:
        fetch = partial(fill.tensors, slot.attribute, slot.names, slot.trained)
        WaitingSlots(slot.owner, slot.attribute, wait, fetch)


def _make(plan: Plan, given: nn.Module | Callable[[], nn.Module] | None) -> nn.Module:
    """The model, without its tensors."""
    record = plan.head.model
    if given is None and record is None:
        raise ModelError(
            "the plan does not say what builds its model: pass model= a module on the meta device, or what makes one, "
            "or compile from a checkpoint whose config.json names a class of transformers"
        )
    if given is None and any(tensor.shard_dim >= 0 for tensor in plan.head.tensors):
        raise ModelError(
            f"the plan cuts tensors for {plan.world_size} ranks, and transformers' own modules compute with whole ones: "
            "pass model= a module with the shapes of the rank"
        )
    if isinstance(given, nn.Module):
        module = given
    elif given is not None:
        module = given()
    else:
        assert record is not None, "refused above"
        module = build_recorded(record)
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"model= made a {type(module).__name__}, a torch.nn.Module is needed")
    if plan.head.fusions:
        from loadplan.runtime.fusion import fuse_modules

        fuse_modules(module, plan.head.fusions)
    return module


def _buffer_values(module: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    """The values of the buffers on the meta device that no checkpoint holds: the plan's, else what the model computes."""
    state = module.state_dict(keep_vars=True).keys()
    empty = {name for name, buffer in module.named_buffers() if buffer.is_meta and name not in state}
    values = {constant.name: constant_value(constant) for constant in plan.head.constants if constant.name in empty}
    if left := empty - values.keys():
        values |= compute_buffers(module, left)
    return values


def _check(
    module: nn.Module,
    plan: Plan,
    rank: int,
    names: TargetNames,
    values: Mapping[str, torch.Tensor],
    *,
    is_recorded: bool,
) -> None:
    """Refuse a module that is not the plan's, or would be left with tensors without values.

    What is built from the plan may have other dtypes: the plan has those that the class keeps apart.
    """
    check_module(module, plan, rank, computed=values, any_dtype=is_recorded)
    tensors = module.state_dict(keep_vars=True)
    real = sorted(name for name, tensor in tensors.items() if name in names and not tensor.is_meta)
    if real and not is_recorded:  # some classes of transformers make a parameter on the CPU wherever they are built
        raise ModuleMismatch(
            f"{real[0]} and {len(real) - 1} more tensors of the model are on {tensors[real[0]].device}, not on the meta "
            "device: load_into overwrites tensors where they are"
        )
    if empty := sorted(name for name, tensor in tensors.items() if name not in names and tensor.is_meta):
        raise ModuleMismatch(
            f"no values for {', '.join(empty[:5])} ({len(empty)} tensors): the plan was compiled to leave out what the "
            "checkpoint lacks; pass model= a module that has them on a real device"
        )


def _slots(module: nn.Module, names: TargetNames) -> Iterator[_Slot]:
    """What each module holds itself of the plan's tensors, in the order of the modules."""
    for path, owner in module.named_modules():
        for attribute in ("_parameters", "_buffers"):
            held = {leaf: tensor for leaf, tensor in owner.__dict__[attribute].items() if tensor is not None}
            found = {leaf: f"{path}.{leaf}" if path else leaf for leaf in held}
            found = {leaf: name for leaf, name in found.items() if name in names}
            if found:
                yield _Slot(owner, attribute, found, frozenset(leaf for leaf in found if held[leaf].requires_grad))


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """The parameters or the buffers that one module holds itself."""

    owner: nn.Module
    attribute: str  # "_parameters" or "_buffers"
    names: Mapping[str, str]  # name there -> name in the model
    trained: frozenset[str]  # names there of what requires gradients


class _Fill:
    """Makes what the modules hold of the plan's tensors: one parameter for tied ones."""

    def __init__(self, model: nn.Module, targets: Targets) -> None:
        self._model, self._targets = ref(model), targets
        self._marks = is_pretrained(model)
        self._parameters: dict[int, nn.Parameter] = {}  # by what they hold

    def tensors(self, attribute: str, names: Mapping[str, str], trained: Collection[str]) -> dict[str, torch.Tensor]:
        """As a `_Slot` describes them, by their names in the module. Raises what loading raises."""
        tensors: dict[str, torch.Tensor] = {}
        for leaf, name in names.items():  # no comprehension: what it closes over, an error that is kept would keep
            tensors[leaf] = self._targets.get(name)
        if attribute == "_parameters":
            tensors = {leaf: self._parameter(tensor, leaf in trained) for leaf, tensor in tensors.items()}
        if self._marks:
            for tensor in tensors.values():
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        if self._targets.untied and (model := self._model()) is not None:
            forget_ties(model, self._targets.untied)
        return tensors

    def _parameter(self, tensor: torch.Tensor, trained: bool) -> nn.Parameter:
        if id(tensor) not in self._parameters:  # the targets keep the tensor, so that no other gets its number
            trained &= tensor.is_floating_point() or tensor.is_complex()
            self._parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=trained)
        return self._parameters[id(tensor)]


def _complete(
    module: nn.Module,
    source: Plan | Artifact,
    plan: Plan,
    location: str | Path,
    device: torch.device,
    values: Mapping[str, torch.Tensor],
    *,
    is_recorded: bool,
) -> None:
    """Everything but the plan's tensors."""
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path)._buffers[leaf] = value.to(device)
    if is_pretrained(module):
        mark_initialized(module)
    if is_recorded:
        assert plan.head.model is not None, "it was built from it"
        finish_model(module, plan.head.model, str(location), partial(_source_names, source))
        if plan.head.fusions:
            module.save_pretrained = SaveFused(module, source)  # type: ignore[assignment]
    module.eval()


def _source_names(source: Plan | Artifact) -> list[str]:
    """The names in the checkpoint that the plan was compiled for."""
    plan = source.original if isinstance(source, Artifact) else source
    origin = plan.origin
    if origin is None:
        raise ModelError("the plan does not say what the checkpoint looked like: save with save_original_format=False")
    return [entry.name for entry in origin.sources]
