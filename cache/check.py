"""What is wrong in a cache, and its removal: what is damaged becomes a miss, and is built again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadplan.cache.actions import parse_artifact
from loadplan.cache.digest import digest_file
from loadplan.cache.gc import is_abandoned
from loadplan.cache.record import find_record
from loadplan.cache.store import Problem, ProblemKind, nbytes_of
from loadplan.cache.write_file import TEMPORARY_PREFIX, age_s, put_back, remove_file, set_aside, temporary_files

if TYPE_CHECKING:
    from loadplan.cache.cache import Cache

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check looked at, and what it found."""

    entries: int
    blobs: int
    nbytes: int  # of blobs, read
    problems: tuple[Problem, ...]  # by path

    @property
    def is_good(self) -> bool:
        """Whether all that can be fetched is right: a temporary file harms nobody."""
        return all(problem.kind is ProblemKind.TEMPORARY for problem in self.problems)

    def to_json(self) -> dict[str, object]:
        return {
            "entries": self.entries,
            "blobs": self.blobs,
            "nbytes": self.nbytes,
            "problems": [problem.to_json() for problem in self.problems],
        }


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair removed, and what it left."""

    removed: tuple[Problem, ...]
    left: tuple[Problem, ...]  # too young to be surely abandoned, or files that are not the cache's

    @property
    def nbytes(self) -> int:
        """Bytes of what was removed."""
        return sum(problem.nbytes for problem in self.removed)

    def to_json(self) -> dict[str, object]:
        return {
            "removed": [problem.to_json() for problem in self.removed],
            "left": [problem.to_json() for problem in self.left],
            "nbytes": self.nbytes,
        }


def check_cache(cache: Cache, progress: Progress | None = None) -> CheckReport:
    """Read everything; see `Cache.check`."""
    problems = list(cache.blobs.check(progress))
    keys = list(cache.actions.all_keys())
    records = [path for path in _files(cache.actions.folder) if not path.name.startswith(TEMPORARY_PREFIX)]
    places = {cache.actions.path(key): key for key in keys}
    damaged_blobs = {problem.path for problem in problems if problem.kind is ProblemKind.DAMAGED}
    for path in records:
        kind = _record_problem(cache, places[path], damaged_blobs) if path in places else ProblemKind.MISNAMED
        if kind:
            problems.append(Problem(kind, path, nbytes_of(path)))
    others = list(cache.pin_records.damaged())
    others += [path for path in _files(cache.files.folder) if find_record(path) is None]
    problems += [
        Problem(ProblemKind.DAMAGED, path, nbytes_of(path))
        for path in others
        if not path.name.startswith(TEMPORARY_PREFIX)
    ]
    known = {problem.path for problem in problems}
    temporaries = [path for path in (*temporary_files(cache.root), *cache.claims.paths()) if path not in known]
    problems += [Problem(ProblemKind.TEMPORARY, path, nbytes_of(path)) for path in temporaries]
    blobs = list(cache.blobs.digests())
    nbytes = sum(found.st_size for _, found in blobs)
    return CheckReport(len(keys), len(blobs), nbytes, tuple(sorted(problems, key=lambda problem: problem.path)))


def _record_problem(cache: Cache, key: str, damaged_blobs: set[Path]) -> ProblemKind | None:
    artifact = cache.actions.read(key)
    if artifact is None:
        return ProblemKind.DAMAGED
    paths = list(map(cache.blobs.path, artifact.blobs.values()))
    return None if all(path.is_file() and path not in damaged_blobs for path in paths) else ProblemKind.INCOMPLETE


def repair_cache(cache: Cache, progress: Progress | None, grace_s: float, now_s: float) -> RepairReport:
    """Remove what is damaged or abandoned; see `Cache.repair`."""
    removed: list[Problem] = []
    left: list[Problem] = []
    for problem in check_cache(cache, progress).problems:  # by path: entries before blobs
        (removed if _repair(cache, problem, grace_s, now_s) else left).append(problem)
    return RepairReport(tuple(removed), tuple(left))


def _repair(cache: Cache, problem: Problem, grace_s: float, now_s: float) -> bool:
    match problem.kind:
        case ProblemKind.MISNAMED:
            return False
        case ProblemKind.TEMPORARY:
            return is_abandoned(cache, problem.path, grace_s, now_s) and remove_file(problem.path)
        case ProblemKind.INCOMPLETE if _only_misses(cache, problem.path) and age_s(problem.path, now_s) < grace_s:
            return False  # gc may be about to put the blob back
        case ProblemKind.DAMAGED | ProblemKind.INCOMPLETE:
            aside = set_aside(problem.path)  # a put may have replaced it since it was read
            if aside is None:
                return True
            if _is_good_now(cache, problem.path, aside):
                put_back(aside, problem.path)
                return False
            return remove_file(aside)


def _only_misses(cache: Cache, path: Path) -> bool:
    """Whether every blob of the entry that is there is good."""
    artifact = parse_artifact(find_record(path), "".join(path.relative_to(cache.actions.folder).parts))
    digests = () if artifact is None else artifact.blobs.values()
    return all(cache.blobs.is_good(digest) for digest in digests if cache.blobs.has(digest))


def _is_good_now(cache: Cache, path: Path, aside: Path) -> bool:
    """Whether what was at `path`, and is now `aside`, belongs there after all."""
    if path.is_relative_to(cache.blobs.folder):
        return digest_file(aside)[0] == "".join(path.relative_to(cache.blobs.folder).parts)
    if path.is_relative_to(cache.actions.folder):
        artifact = parse_artifact(find_record(aside), "".join(path.relative_to(cache.actions.folder).parts))
        return artifact is not None and all(map(cache.blobs.is_good, artifact.blobs.values()))
    return find_record(aside) is not None


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink()]
