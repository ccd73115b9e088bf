"""The commands that write weights and projects: `convert`, `save` and `init`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loadplan.runtime.artifact import Artifact, open_any
from loadplan.runtime.open_plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

Commands = argparse._SubParsersAction  # what `add_subparsers` gives has no public name


def add_file_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add them to the parser."""
    command = commands.add_parser("convert", help="write what a plan loads as files that the runtime maps")
    command.add_argument("plan", type=Path, metavar="PLAN")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="the checkpoint that the plan was compiled for")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write; an artifact there is replaced")
    command.add_argument("--json", action="store_true", help="print the files as JSON")
    command.add_argument(
        "--rank-from-env",
        action="store_true",
        help="make only the part of this process (RANK of WORLD_SIZE, as torchrun sets them); the last joins them",
    )
    command.set_defaults(run=_convert)

    command = commands.add_parser(
        "save", help="write converted files, or tensors of a run, back in their original layout"
    )
    command.add_argument("plan", type=Path, metavar="PLAN", help="folder of converted files; with --state, or a plan")
    command.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write")
    command.add_argument(
        "--state",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="save the tensors of this .safetensors file, in runtime names; repeatable, one a rank in order",
    )
    command.add_argument("--runtime-layout", action="store_true", help="write target names and shapes instead")
    command.add_argument("--json", action="store_true", help="print the files as JSON")
    command.set_defaults(run=_save)

    command = commands.add_parser("init", help="write a first loadplan.toml from the checkpoints that are there")
    command.add_argument(
        "places",
        nargs="*",
        metavar="FOLDER_OR_CHECKPOINT",
        help="checkpoints, or folders that hold some (default: the folder to write into)",
    )
    command.add_argument(
        "--into",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="folder for loadplan.toml and dodo.py (default: this one)",
    )
    command.set_defaults(run=_init)


def _convert(options: argparse.Namespace) -> int:
    from loadplan.compiler.conversion import convert  # imports torch

    if options.rank_from_env:
        return _convert_rank(options)
    artifact = convert(options.plan, options.checkpoint, options.folder)
    _print_files(artifact, options)
    return 0


def _convert_rank(options: argparse.Namespace) -> int:
    from loadplan.compiler.convert_rank import Job, convert_rank

    job = Job.from_environment(os.environ)
    artifact = convert_rank(Plan.open(options.plan), options.checkpoint, options.folder, job)
    if artifact is None:
        print(f"rank {job.rank} of {job.world_size}: its part is made", file=sys.stderr)
    else:
        _print_files(artifact, options)
    return 0


def _print_files(artifact: Artifact, options: argparse.Namespace) -> None:
    files = artifact.plan.head.files
    if options.json:
        print(json.dumps([{"name": f.name, "nbytes": f.size, "sha256": f.content_digest} for f in files], indent=2))
    else:
        print("\n".join(f"{options.folder / file.name}: {file.size:,} bytes" for file in files))


def _save(options: argparse.Namespace) -> int:
    from loadplan.runtime.save import save_checkpoint  # imports torch

    states = _read_states(options.state) if options.state else _mapped_states(options.plan)
    written = save_checkpoint(states, options.plan, options.folder, original_format=not options.runtime_layout)
    sizes = [(path, path.stat().st_size) for path in written]
    if options.json:
        print(json.dumps([{"name": path.name, "nbytes": nbytes} for path, nbytes in sizes], indent=2))
    else:
        print("\n".join(f"{path}: {nbytes:,} bytes" for path, nbytes in sizes))
    return 0


def _mapped_states(place: Path) -> list[dict[str, torch.Tensor]]:
    """What the artifact at `place` holds, one a rank. Raises `ArtifactError` when it is a plan."""
    from loadplan.runtime.load import load_state_dict

    opened = open_any(place)
    if not isinstance(opened, Artifact):
        opened = Artifact.open(place)  # says what a plan lacks
    return [load_state_dict(opened, rank=rank) for rank in range(opened.plan.world_size)]


def _read_states(files: list[Path]) -> list[Mapping[str, torch.Tensor]]:
    import safetensors
    from safetensors.torch import load_file

    from loadplan.compiler.problem import CheckpointError, Problem

    states: list[Mapping[str, torch.Tensor]] = []
    for file in files:
        try:
            states.append(load_file(file))
        except safetensors.SafetensorError as error:
            raise CheckpointError(
                [Problem("file", f"{file}: is no safetensors file: {error}", (file.name,))]
            ) from error
    return states


def _init(options: argparse.Namespace) -> int:
    from loadplan.compiler.init_project import init_project

    for line in init_project(options.places, options.into):
        print(line)
    return 0
