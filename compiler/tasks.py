"""doit tasks that build what loadplan.toml lists; a deployment's dodo.py needs `from loadplan.compiler.tasks import *`.

doit gives the graph, parallelism (`-n`) and reporting. Whether a task is up to date is decided by `build`, from
content: doit's own check would hash whole checkpoints, and would miss a changed recipe or compiler. `doit info TASK`
shows the reasons; each is one line of the task's status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from doit.exceptions import InvalidDodoFile, TaskFailed

from loadplan.cache.error import LoadplanError
from loadplan.compiler.build import Build
from loadplan.compiler.build_file import FILE_NAME, Variant, read_project
from loadplan.compiler.build_report import collect_lines, report_lines
from loadplan.compiler.build_state import STATE_NAME

__all__ = [
    "DOIT_CONFIG",
    "task_compile",
    "task_convert",
    "task_gc",
    "task_lock",
    "task_pull",
    "task_push",
    "task_report",
    "task_verify",
]

DOIT_CONFIG = {"backend": "loadplan", "dep_file": STATE_NAME, "default_tasks": ["compile", "convert", "verify"]}

Task = dict[str, object]


@cache
def _build(path: Path) -> Build:
    return Build(read_project(path))


def _this_build() -> Build:
    try:
        return _build(Path(FILE_NAME).resolve())
    except LoadplanError as error:
        raise InvalidDodoFile(str(error)) from error


class _Reasons:
    """Whether a task is up to date, for doit; prints as why it is not, for `doit info`."""

    def __init__(self, find: Callable[[], list[str]]) -> None:
        self._find = find

    def __call__(self) -> bool:
        return not self.found()

    def found(self) -> list[str]:
        """Why the task must run."""
        try:
            return self._find()
        except (LoadplanError, OSError) as error:
            return [str(error)]  # the task itself meets it again, and fails with it

    def __repr__(self) -> str:
        return "; ".join(self.found())


def _task(name: str | None, make: Callable[[], str], reasons: _Reasons | None, **more: object) -> Task:
    """A task that prints why it runs and what it did, and fails with the message of a `LoadplanError`."""
    front = "" if name is None else f"{name}: "

    def run() -> bool | TaskFailed:
        try:
            if reasons is not None:
                print(f"{front}{', '.join(reasons.found())}", flush=True)
            print(f"{front}{make()}", flush=True)
        except (LoadplanError, OSError) as error:
            return TaskFailed(str(error))
        return True

    named = {} if name is None else {"name": name}
    checked = {} if reasons is None else {"uptodate": [reasons]}
    return {**named, "actions": [(run,)], **checked, "verbosity": 2, **more}


def _tasks(
    reasons: Callable[[Build, Variant], list[str]] | None,
    make: Callable[[Build, Variant], str],
    *needs: str,
    only_converted: bool = False,
) -> Iterator[Task]:
    """A sub-task a variant; those it `needs` come before it."""
    build = _this_build()
    for variant in build.project.variants:
        if only_converted and not variant.options.convert:
            continue
        found = None if reasons is None else _Reasons(lambda variant=variant: reasons(build, variant))  # type: ignore[misc]
        yield _task(
            variant.label,
            lambda variant=variant: make(build, variant),  # type: ignore[misc]
            found,
            task_dep=[f"{need}:{variant.label}" for need in needs if need != "convert" or variant.options.convert],
            doc=f"{variant.label}: {variant.written_source}",
        )


def task_compile() -> Iterator[Task]:
    """compile each variant of loadplan.toml into a plan"""
    yield from _tasks(Build.plan_reasons, Build.build_plan)


def task_convert() -> Iterator[Task]:
    """write each variant's weights in their runtime layout"""
    build = _this_build()
    is_here = build.project.dask is None  # a cluster divides the work itself
    for task, variant in zip(
        _tasks(Build.artifact_reasons, Build.build_artifact, "compile", only_converted=True),
        [variant for variant in build.project.variants if variant.options.convert],
        strict=True,
    ):
        ranks = range(variant.target.world_size) if is_here and variant.target.world_size > 1 else range(0)
        names = [f"{variant.label}:rank{rank:0{len(str(len(ranks) - 1))}}" for rank in ranks]
        for rank, name in zip(ranks, names, strict=True):
            yield _part_task(build, variant, rank, name)
        yield {**task, "task_dep": [f"compile:{variant.label}", *(f"convert:{name}" for name in names)]}


def _part_task(build: Build, variant: Variant, rank: int, name: str) -> Task:
    return _task(
        name,
        lambda: build.build_part(variant, rank),
        _Reasons(lambda: build.part_reasons(variant, rank)),
        task_dep=[f"compile:{variant.label}"],
        doc=f"{variant.label}: the part of rank {rank}",
    )


def task_verify() -> Iterator[Task]:
    """load each variant and compare it, bit for bit, with the recipe on whole tensors"""
    yield from _tasks(Build.proof_reasons, Build.prove, "compile", "convert")


def task_pull() -> Iterator[Task]:
    """fetch plans and converted files from cache and remotes, and build nothing"""
    yield from _tasks(Build.pull_reasons, Build.pull)


def task_push() -> Iterator[Task]:
    """give what is built, and was verified, to the remotes that may be written"""
    for task in _tasks(None, Build.push, "compile", "convert", "verify"):
        yield {**task, "setup": ["lock"]}


def task_lock() -> Task:
    """note in loadplan.lock what the checkpoints are, for machines without them"""
    build = _this_build()
    return _task(None, build.write_lock, None)


def task_report() -> Task:
    """print what is built and what is not, and why"""
    build = _this_build()
    return _task(None, lambda: "\n".join(report_lines(build)), None)


def task_gc() -> Task:
    """remove from the cache what was not used for long, down to its max_size"""
    build = _this_build()
    return _task(None, lambda: "\n".join(collect_lines(build)), None)
