"""Plans and their execution: what a serving process imports. Needs torch, msgpack, zstandard and nothing else.

    plan, plan_format, check_plan    the values, their bytes, their proof
    open_plan                        `Plan`: opened, proved, saved
    signature_file, trust            who vouches for a plan and its files, where somebody must
    location, source_files           where a checkpoint lies; its files, compared with the plan
    schedule                         the copies of one rank, sorted by the way they can go
    compose, copy_strided, to_device the ways: pages mapped side by side, elements, an accelerator
    readers, read_with_*             what moves the bytes: preadv, or a reading library that is installed
    execute, loading                 the ways taken, on threads, in order
    order, kernels, compute          what comes after what; what makes new values, tile by tile (fold_batch_norm)
    load, targets                    `load_state_dict`, `load_into`; ties
    build_model, fill_model          `load_model`: the model with its tensors (finish_model: the rest of it)
    waiting                          modules that wait for their own weights
    hf                               `from_pretrained`, in one line
    save                             `save_checkpoint`: the same copies, backwards
    artifact, write_safetensors      converted checkpoints
    fusion, fusions                  modules of a model that compute the same from weights in another layout
    patching                         classes built as others, inside a block

The plan modules import no torch, so that the compiler and the build need none; torch comes with the load functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadplan.runtime.artifact import Artifact, ArtifactError
    from loadplan.runtime.build_model import ModelError
    from loadplan.runtime.cast import CastOverflow
    from loadplan.runtime.execute import ModeError
    from loadplan.runtime.fill_model import load_model
    from loadplan.runtime.fusion import (
        FusionError,
        FusionFamily,
        find_fusion,
        find_fusions,
        fuse_modules,
        register_fusion,
        unregister_fusion,
    )
    from loadplan.runtime.load import ArgumentError, ModuleMismatch, load_into, load_state_dict
    from loadplan.runtime.loading import LoadCancelled
    from loadplan.runtime.location import LocationError
    from loadplan.runtime.open_plan import Plan
    from loadplan.runtime.patching import (
        PatchError,
        apply_patches,
        register_patch_mapping,
        unregister_patch_mapping,
    )
    from loadplan.runtime.plan_format import PlanError
    from loadplan.runtime.readers import BackendError
    from loadplan.runtime.save import SaveError, save_checkpoint
    from loadplan.runtime.signature_file import SignatureFileError
    from loadplan.runtime.source_files import FileMismatch, ReadError
    from loadplan.runtime.targets import TieConflict
    from loadplan.runtime.trust import BadRequirement, UntrustedPlan
    from loadplan.runtime.waiting import wait_for

__all__ = [
    "ArgumentError",
    "Artifact",
    "ArtifactError",
    "BackendError",
    "BadRequirement",
    "CastOverflow",
    "FileMismatch",
    "FusionError",
    "FusionFamily",
    "LoadCancelled",
    "LocationError",
    "ModeError",
    "ModelError",
    "ModuleMismatch",
    "PatchError",
    "Plan",
    "PlanError",
    "ReadError",
    "SaveError",
    "SignatureFileError",
    "TieConflict",
    "UntrustedPlan",
    "apply_patches",
    "find_fusion",
    "find_fusions",
    "fuse_modules",
    "load_into",
    "load_model",
    "load_state_dict",
    "register_fusion",
    "register_patch_mapping",
    "save_checkpoint",
    "unregister_fusion",
    "unregister_patch_mapping",
    "wait_for",
]

_HOMES = {
    "ArgumentError": "load",
    "Artifact": "artifact",
    "ArtifactError": "artifact",
    "BackendError": "readers",
    "BadRequirement": "trust",
    "CastOverflow": "cast",
    "FileMismatch": "source_files",
    "FusionError": "fusion",
    "FusionFamily": "fusion",
    "LoadCancelled": "loading",
    "LocationError": "location",
    "ModeError": "execute",
    "ModelError": "build_model",
    "ModuleMismatch": "load",
    "PatchError": "patching",
    "Plan": "open_plan",
    "PlanError": "plan_format",
    "ReadError": "source_files",
    "SaveError": "save",
    "TieConflict": "targets",
    "apply_patches": "patching",
    "find_fusion": "fusion",
    "find_fusions": "fusion",
    "fuse_modules": "fusion",
    "SignatureFileError": "signature_file",
    "UntrustedPlan": "trust",
    "load_into": "load",
    "load_model": "fill_model",
    "load_state_dict": "load",
    "register_fusion": "fusion",
    "register_patch_mapping": "patching",
    "save_checkpoint": "save",
    "unregister_fusion": "fusion",
    "unregister_patch_mapping": "patching",
    "wait_for": "waiting",
}


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in, when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
