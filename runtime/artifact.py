"""A converted checkpoint: `.safetensors` files in runtime names and layout, and the plan that maps them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadplan.cache.error import LoadplanError
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan_format import Frames
from loadplan.runtime.signature_file import signature_path
from loadplan.runtime.trust import Trusted

PLAN_NAME = "artifact.loadplan"
ORIGINAL_NAME = "original.loadplan"  # the plan that the files were made by: what saving goes back through
INDEX_SUFFIX = ".safetensors.index.json"  # of a file for other tools, which says where each tensor lies


class ArtifactError(LoadplanError, FileNotFoundError):
    """A folder is no converted checkpoint."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A folder that `convert` wrote; the load functions take it in place of plan and checkpoint."""

    folder: Path
    plan: Plan

    @classmethod
    def open(cls, folder: str | Path, trusted: Trusted = None) -> Artifact:
        """The artifact in `folder`; signed, where `trusted` or the environment asks for it.

        Raises:
            ArtifactError: the folder holds none.
            And what `Plan.open` raises.
        """
        place = Path(folder)
        if not (place / PLAN_NAME).is_file():
            raise ArtifactError(f"{place}: holds no {PLAN_NAME}; give a folder that `loadplan convert` wrote")
        return cls(place, Plan.open(place / PLAN_NAME, trusted))

    @property
    def files(self) -> dict[str, Path]:
        """All that belongs to the artifact, by name: what a cache files, and what makes an artifact elsewhere."""
        names = [file.name for file in self.plan.head.files] + [PLAN_NAME]
        names += [ORIGINAL_NAME] if (self.folder / ORIGINAL_NAME).is_file() else []
        names += [path.name for path in self.folder.glob(f"*{INDEX_SUFFIX}")]
        signatures = signature_path(self.folder / PLAN_NAME)
        names += [signatures.name] if signatures.is_file() else []
        return {name: self.folder / name for name in sorted(names)}

    @property
    def original(self) -> Plan:
        """The plan that the files were made by; the artifact's plan names its digest, so whoever signs one signs both.

        Raises:
            ArtifactError: it is not there, or is not the one that this artifact was made by.
            PlanError: it is damaged.
        """
        path = self.folder / ORIGINAL_NAME
        if not path.is_file():
            raise ArtifactError(f"{self.folder}: holds no {ORIGINAL_NAME}; convert the checkpoint again")
        data = path.read_bytes()
        if dict(self.plan.head.provenance).get("plan") != Frames(data, str(path)).digest:
            raise ArtifactError(f"{path}: is not the plan that {PLAN_NAME} was made by; convert the checkpoint again")
        return Plan(data, str(path), self.plan.vouched)


def files_used(plan: Plan, rank: int) -> list[int] | None:
    """Numbers of the files that loading `rank` needs; None for all of them.

    A checkpoint is compared whole, for it is one thing. An artifact has files of each rank, and a machine need not hold
    those of ranks that run elsewhere.
    """
    if "plan" not in dict(plan.head.provenance):
        return None
    return plan.section(rank).copies.files


def open_any(plan: Plan | Artifact | str | Path, trusted: Trusted = None) -> Plan | Artifact:
    """A plan or an artifact: as it is, or the one at a path. Raises what `Artifact.open` and `Plan.open` raise."""
    if isinstance(plan, Plan | Artifact):
        return plan
    path = Path(plan)
    if path.is_dir():
        return Artifact.open(path, trusted)
    return Artifact.open(path.parent, trusted) if path.name == PLAN_NAME else Plan.open(path, trusted)
