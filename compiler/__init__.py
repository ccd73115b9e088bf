"""Checkpoint + recipe + target -> plan. Reads headers only; the runtime does the rest.

Read in the order in which a plan is made:

    checkpoint, read_folder          files -> entries (read_header, read_index, read_torch: one a format)
    recipe, rules, patterns, shard   what to turn into what; `registry` finds recipes by name
    signature, target                what the model wants; for which ranks
    ir, ops                          the op graph and the ops that rules are written in
    compose_recipe                   the recipes of a model made of models, as one
    route_names                      source names -> targets
    build_graph                      targets -> typed op graph
    match_targets                    products against the signature: coverage, ties, dtypes, waivers
    shard_targets                    which part of each target a rank holds
    fuse_targets, cut_through        the targets of a model with fused modules, and their parts
    pieces, lower_graph              op chains -> strided copies
    pipeline                         all of it in order; the proof is `loadplan.runtime.check_plan`
    conversion                       a plan's result as files that the runtime maps
    reference                        the same recipe on whole tensors with torch, to check against

and around it `cli`, `build_file`, `build` and `tasks`. Nothing here imports torch when it is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadplan.compiler.conversion import convert
    from loadplan.compiler.pipeline import compile_plan
    from loadplan.compiler.problem import CheckpointError, CompileError, Problem
    from loadplan.compiler.read_folder import read_checkpoint
    from loadplan.compiler.signature import Signature, SignatureError
    from loadplan.compiler.target import Target

__all__ = [
    "CheckpointError",
    "CompileError",
    "Problem",
    "Signature",
    "SignatureError",
    "Target",
    "compile_plan",
    "convert",
    "read_checkpoint",
]

_HOMES = {
    "CheckpointError": "problem",
    "CompileError": "problem",
    "Problem": "problem",
    "Signature": "signature",
    "SignatureError": "signature",
    "Target": "target",
    "compile_plan": "pipeline",
    "convert": "conversion",
    "read_checkpoint": "read_folder",
}


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in, when it is asked for: most uses need few of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
