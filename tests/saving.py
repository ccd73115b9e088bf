"""What the tests of saving share: whole folders as bytes, and the round trip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from builders import Raw, write_file

from loadplan.runtime.load import load_state_dict
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.save import save_checkpoint


def files_in(folder: Path) -> dict[str, bytes]:
    """All files below `folder`, by their path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()}


def load_ranks(plan: Plan, folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_state_dict(plan, folder, rank) for rank in range(plan.world_size)]


def check_restores(plan: Plan, source: Path, folder: Path) -> None:
    """What `plan` loads from `source` and saves to `folder` is `source`, file by file."""
    written = save_checkpoint(load_ranks(plan, source), plan, folder)
    assert {str(path.relative_to(folder)) for path in written} == files_in(folder).keys()
    assert files_in(folder) == files_in(source)


def save_tensors(folder: Path, tensors: Mapping[str, Raw]) -> Path:
    """A checkpoint folder of one file."""
    write_file(folder / "model.safetensors", tensors)
    return folder
