"""`from_pretrained` by plan: one line changed in a program that serves models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from loadplan.cache.error import LoadplanError
from loadplan.runtime.artifact import PLAN_NAME, Artifact, open_any
from loadplan.runtime.execute import Mode, Residency
from loadplan.runtime.fill_model import load_model
from loadplan.runtime.load import ArgumentError
from loadplan.runtime.loading import Progress
from loadplan.runtime.location import folder_of, locate
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.torch_types import torch_dtype_named

_SUFFIX = ".loadplan"
_INSTEAD = {  # what `from_pretrained` of transformers takes, and who does it here
    "attn_implementation": "call model.set_attn_implementation(...) on the result",
    "config": "the plan has the config: compile it from a checkpoint with the one that is meant",
    "device_map": "give device=, one for the whole model",
    "distributed_config": "compile with tp_size=, and give rank= and load_model(model=...)",
    "key_mapping": "give the recipe of `loadplan compile` renaming rules",
    "load_in_4bit": "quantisation on load is not supported",
    "load_in_8bit": "quantisation on load is not supported",
    "low_cpu_mem_usage": "leave it out: no more memory is used than the model takes",
    "quantization_config": "quantisation on load is not supported",
    "state_dict": "call load_into with a module, or load its state dict",
    "torch_dtype": "give dtype=, and compile with --dtype",
    "tp_plan": "compile with tp_size=, and give rank= and load_model(model=...)",
    "tp_size": "compile with tp_size=, and give rank= and load_model(model=...)",
    "trust_remote_code": "code of a checkpoint is never run: give load_model(model=...) what makes the module",
    "use_safetensors": "leave it out: the plan names its files",
    "variant": "compile from the files that are meant",
}


class PlanNotFound(LoadplanError, FileNotFoundError):
    """A checkpoint has no plan that could be found; the message has the command that makes one."""


def from_pretrained(
    source: str | Path | Plan | Artifact,
    *,
    plan: Plan | str | Path | None = None,
    rank: int = 0,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    fusion_config: Mapping[str, object] | None = None,
    mode: Mode = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    residency: Residency = "lazy",
    wait: bool = True,
    **others: object,
) -> nn.Module:
    """The model in `source`, loaded by its plan; otherwise as `load_model`.

    Args:
        source: a converted checkpoint (`loadplan convert`), or the folder of a checkpoint, `pkg://PACKAGE/FOLDER`.
        plan: the plan of a checkpoint's folder. None finds it: the one `.loadplan` file in the folder, else the file
            beside it of the same name and that suffix.
        rank, device, mode, threads, progress, residency, wait: as of `load_model`.
        dtype, fusion_config: what the plan must have been compiled for; None takes it as it is.
        others: refused; the message says what does the same here.

    Raises:
        PlanNotFound: the checkpoint has no plan.
        ArgumentError: the plan was compiled for something else, or an argument has no meaning here.
        And what `load_model` raises.
    """
    for name in others:
        raise ArgumentError(f"{name}=: {_INSTEAD.get(name, 'loadplan has nothing like it; leave it out')}")
    if isinstance(source, Plan):
        raise ArgumentError("a plan says nothing of where its files lie: give the checkpoint's folder, and plan=")
    found, checkpoint = _find(source, plan)
    opened = found.plan if isinstance(found, Artifact) else found
    _check_dtype(opened, dtype)
    _check_fusions(opened, fusion_config)
    return load_model(
        found, checkpoint, rank, device, mode=mode, threads=threads, progress=progress, residency=residency, wait=wait
    )


def _find(source: str | Path | Artifact, plan: Plan | str | Path | None) -> tuple[Plan | Artifact, str | Path | None]:
    """The plan or artifact, and the checkpoint that a plan needs."""
    if isinstance(source, Artifact):
        if plan is not None:
            raise ArgumentError("a converted checkpoint has its own plan: leave out plan=")
        return source, None
    folder = locate(source)
    if folder.name == PLAN_NAME or (folder / PLAN_NAME).is_file():
        return _find(Artifact.open(folder_of(folder)), plan)
    if plan is not None:
        opened = open_any(plan)
        if isinstance(opened, Artifact):
            raise ArgumentError("plan= is a converted checkpoint: give its folder alone")
        return opened, source
    folder = folder_of(folder)
    inside = sorted(folder.glob(f"*{_SUFFIX}"))
    beside = folder.with_name(folder.name + _SUFFIX)
    if len(inside) > 1:
        raise ArgumentError(
            f"{folder}: holds {len(inside)} plans, {', '.join(p.name for p in inside)}; give one as plan="
        )
    for path in (*inside, beside):
        if path.is_file():
            return Plan.open(path), source
    raise PlanNotFound(
        f"{folder}: there is no plan in it, nor {beside.name} beside it; make one with "
        f"`loadplan compile {source} -o {beside}`, or give one as plan="
    )


def _check_dtype(plan: Plan, dtype: str | torch.dtype | None) -> None:
    record = plan.head.model
    if dtype is None or dtype == "auto" or record is None:
        return
    try:
        wanted = torch_dtype_named(str(dtype))
    except ValueError as error:
        raise ArgumentError(f"dtype={dtype!r}: {error}") from error
    if wanted != torch_dtype_named(record.dtype):
        raise ArgumentError(
            f"dtype={dtype}: the plan was compiled for {record.dtype}; compile one with `loadplan compile --dtype {wanted}`"
        )


def _check_fusions(plan: Plan, fusion_config: Mapping[str, object] | None) -> None:
    if fusion_config is None:
        return
    wanted = sorted(name for name, options in fusion_config.items() if options)
    held = sorted({fused.family for fused in plan.head.fusions})
    if wanted != held:
        raise ArgumentError(
            f"fusion_config asks for {', '.join(wanted) or 'no fusions'}, the plan was compiled for "
            f"{', '.join(held) or 'none'}: compile one with that fusion_config"
        )
