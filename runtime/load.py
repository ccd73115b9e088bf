"""What users call: a plan and a checkpoint, or an artifact, as tensors or inside a model."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from traceback import clear_frames

import torch
from torch import nn

from loadplan.cache.environment import says_yes
from loadplan.cache.error import LoadplanError
from loadplan.runtime.artifact import Artifact, files_used, open_any
from loadplan.runtime.collector import paused_collector
from loadplan.runtime.execute import Execution, Mode, Residency
from loadplan.runtime.loading import Progress
from loadplan.runtime.memory import allocate, memory_of
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Constant
from loadplan.runtime.readers import Backend
from loadplan.runtime.source_files import find_files
from loadplan.runtime.targets import TargetNames, Targets
from loadplan.runtime.tensor_type import TensorType
from loadplan.runtime.torch_types import torch_layout
from loadplan.runtime.trust import verify_contents

logger = logging.getLogger(__name__)


class ModuleMismatch(LoadplanError, ValueError):
    """A module's tensors are not those of the plan; nothing in it was changed."""


class ArgumentError(LoadplanError, TypeError):
    """Arguments do not go together."""


def load_state_dict(
    plan: Plan | Artifact | str | Path,
    checkpoint: str | Path | None = None,
    rank: int = 0,
    device: str | torch.device = "cpu",
    mode: Mode = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    residency: Residency = "lazy",
    *,
    backend: Backend = "preadv",
) -> dict[str, torch.Tensor]:
    """The tensors of `rank`, by target name, in name order; tied names hold one tensor.

    Args:
        plan: a plan or an artifact, or the path of one.
        checkpoint: where the files that the plan was compiled for lie; none for an artifact, which has its own.
        rank: whose tensors.
        device: where they go; to an accelerator through pinned memory, on a stream of its own.
        mode: `map` uses mapped files as memory, and refuses what is not laid out for it; `read` reads into memory of
            its own, in large pages; `copy` copies element by element from mapped files; `auto` takes the cheapest for
            each tensor and file system. Mapped tensors are private copies on write, but show changes that others make
            to the file: do not rewrite files in place under a running model, or use `read`.
        threads: at most so many read at once; None takes the cores, at most 8.
        progress: called with (bytes done, bytes in all), from the calling thread. Mapped bytes are not counted.
        residency: when mapped pages are read: `lazy` when first used (files that are not in the page cache: now),
            `read` now, `lock` now and kept in memory, together with all others.
        backend: what reads files. `preadv` needs nothing; `runai` and `fastsafetensors` are the reading libraries of
            these names, extras of this package: all bytes then go through them, nothing is mapped, `auto` means `read`,
            and `map` and `copy` are refused. How many reads `runai` has under way in each of `threads` is up to it.

    Raises:
        FileMismatch: a file is missing, or not the one that the plan was compiled for.
        ModeError: `mode` cannot load every tensor, or not with this `backend`.
        BackendError: the library of `backend` is not installed.
        ReadError: the system cannot read a part of a file.
        MemoryError: the tensors do not fit, or may not be locked.
        CastOverflow: a value is too large for the dtype that it is cast to.
        TieConflict: tied names hold different tensors, and others of the tie none.
        PlanError: the plan is damaged, or has no such rank.
        UntrustedPlan: plan and files must be signed by a trusted key, and are not (`runtime/trust.py`).
    """
    began = time.perf_counter()
    opened, location = resolve(plan, checkpoint)
    bounded = threads_for(threads)
    wanted = torch.device(device)
    with paused_collector():
        loaded = read_tensors(opened, location, rank, wanted, mode, bounded, progress, residency, backend)
        moved = None if wanted.type in ("cpu", "cuda") else wanted
        tensors = Targets(TargetNames(opened.head), moved, lambda numbers: loaded).all()
    logger.info("loaded %d tensors in %.3f s", len(tensors), time.perf_counter() - began)
    return tensors


def read_tensors(
    plan: Plan,
    location: str | Path,
    rank: int,
    device: torch.device,
    mode: Mode,
    threads: int | None,
    progress: Progress | None,
    residency: Residency,
    backend: Backend = "preadv",
) -> dict[int, torch.Tensor]:
    """All tensors of `rank` by number, on the CPU or a CUDA `device`. Whoever keeps an error keeps no file by it."""
    try:
        execution = begin_execution(plan, location, rank, device, mode, threads, residency, backend)
        return execution.run(progress=progress)
    except BaseException as error:
        clear_frames(error.__traceback__)  # they hold files and maps, as long as the error is held (cases B76)
        raise


def begin_execution(
    plan: Plan,
    location: str | Path,
    rank: int,
    device: torch.device,
    mode: Mode,
    threads: int | None,
    residency: Residency,
    backend: Backend = "preadv",
) -> Execution:
    """What loads `rank`, its files found and checked.

    Raises:
        LocationError, FileMismatch: there are no files, or others than those of the plan.
        PlanError: the plan is damaged, or has no such rank.
        UntrustedPlan: the files must be signed by a trusted key, and are not.
    """
    section = plan.section(rank)
    files = find_files(location, plan.head.files, files_used(plan, rank))
    verify_contents(plan, files, rank)
    staged = device if device.type == "cuda" else None
    return Execution(plan.head, section, rank, files, mode, threads, residency, staged, backend)


def load_into(
    module: nn.Module,
    plan: Plan | Artifact | str | Path,
    checkpoint: str | Path | None = None,
    rank: int = 0,
    mode: Mode = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """`module` with the tensors of `rank` in it.

    Tensors on the meta device are replaced by the loaded ones, tied names by one `Parameter`; others are overwritten
    where they are, on their own device. Buffers that no checkpoint holds get the values that the plan has for them if
    they are on the meta device, and stay as they are elsewhere. The module is not touched before everything is loaded.

    Raises:
        ModuleMismatch: names, shapes or dtypes differ from the plan's, a buffer that no plan makes is on the meta
            device, or names that share a tensor in the module have different ones in the checkpoint.
        And what `load_state_dict` raises.
    """
    opened, location = resolve(plan, checkpoint)
    opened.section(rank)  # a rank that there is
    check_module(module, opened, rank)
    tensors = load_state_dict(opened, location, rank, mode=mode, threads=threads, progress=progress)
    _check_ties(module, tensors)
    parameters: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for constant in opened.head.constants:
            path, _, leaf = constant.name.rpartition(".")
            if module.get_buffer(constant.name).is_meta:
                setattr(module.get_submodule(path), leaf, constant_value(constant))
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            held = getattr(owner, leaf)
            if held.device.type != "meta":
                held.copy_(tensor)
            elif isinstance(held, nn.Parameter):
                new = nn.Parameter(tensor, requires_grad=held.requires_grad)
                setattr(owner, leaf, parameters.setdefault(id(tensor), new))
            else:
                setattr(owner, leaf, tensor)
    return module


def resolve(plan: Plan | Artifact | str | Path, checkpoint: str | Path | None) -> tuple[Plan, str | Path]:
    """The plan, and where its files lie."""
    opened = open_any(plan)
    if isinstance(opened, Artifact):
        if checkpoint is not None:
            raise ArgumentError("an artifact has its own files: give no checkpoint with it")
        return opened.plan, opened.folder
    if checkpoint is None:
        raise ArgumentError("a plan needs the checkpoint that it was compiled for: give its folder")
    return opened, checkpoint


def is_sequential() -> bool:
    """Whether the environment asks for loads without threads: `LOADPLAN_SYNC`, or transformers' own word for it."""
    return any(says_yes(os.environ.get(name, "")) for name in ("LOADPLAN_SYNC", "HF_DEACTIVATE_ASYNC_LOAD"))


def threads_for(threads: int | None) -> int | None:
    """What a load uses where `threads` is asked for. Raises `ArgumentError`."""
    if threads is not None and threads < 1:
        raise ArgumentError(f"threads={threads}: at least 1")
    return 1 if is_sequential() else threads


def check_module(
    module: nn.Module, plan: Plan, rank: int, *, computed: Collection[str] = (), any_dtype: bool = False
) -> None:
    """Refuse a module whose names, shapes or dtypes are not the plan's.

    Args:
        module, plan, rank: what is loaded where.
        computed: buffers that get a value which is not the plan's.
        any_dtype: parameters and buffers of the state dict may have other dtypes than the plan's.

    Raises:
        ModuleMismatch: it is not what the plan was compiled for, or has a buffer that nothing gives a value.
    """
    held = module.state_dict(keep_vars=True)
    kinds = {tensor.name: tensor.local_type(rank) for tensor in plan.head.tensors}
    kinds |= {other: kinds[name] for other, name in plan.head.aliases}
    faults = [f"the plan makes {name}, the module has no such tensor" for name in kinds.keys() - held.keys()]
    waived = set(plan.report.missing)
    faults += [f"the plan does not make {name}" for name in held.keys() - kinds.keys() - waived]
    faults += [
        f"{name} is {tuple(held[name].shape)} {held[name].dtype} in the module, {kinds[name]} in the plan"
        for name in kinds.keys() & held.keys()
        if not (_fits(held[name], kinds[name]) or (any_dtype and tuple(held[name].shape) == kinds[name].shape))
    ]
    buffers = {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name not in held}
    constants = {constant.name: constant.type for constant in plan.head.constants}
    faults += [
        f"buffer {name} is on the meta device and its value is not known: build the module's buffers on a real device"
        for name, buffer in buffers.items()
        if buffer.is_meta and not (_fits(buffer, constants[name]) if name in constants else name in computed)
    ]
    faults += [
        f"the plan has a value for the buffer {name}, the module has none" for name in constants.keys() - buffers.keys()
    ]
    _refuse(faults)


def constant_value(constant: Constant) -> torch.Tensor:
    """The buffer that the plan has the value of."""
    tensor = allocate(constant.type)
    memory_of(tensor)[:] = constant.data
    return tensor


def _check_ties(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse two loaded tensors for what is one tensor in the module: the later would silently overwrite the other."""
    held = module.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    _refuse(
        f"{name} and {first[id(held[name])]} are one tensor in the module, the checkpoint holds two: untie them first"
        for name in tensors
        if held[name].device.type != "meta" and tensors[first.setdefault(id(held[name]), name)] is not tensors[name]
    )


def _fits(tensor: torch.Tensor, kind: TensorType) -> bool:
    return (tuple(tensor.shape), tensor.dtype) == torch_layout(kind)


def _refuse(faults: Iterable[str]) -> None:
    found = sorted(faults)
    if found:
        more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
        raise ModuleMismatch("; ".join(found[:5]) + more)
