"""doit tasks that build what loadplan.toml lists; a deployment's dodo.py needs `from loadplan.compiler.tasks import *`.

doit gives the graph, parallelism (`-n`) and reporting. Whether a task is up to date is decided by `build`, from
content: doit's own check would hash whole checkpoints, and would miss a changed recipe or compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from doit.exceptions import TaskFailed

from loadplan.cache.error import LoadplanError
from loadplan.compiler.build import Build
from loadplan.compiler.build_file import FILE_NAME, Variant, read_project

__all__ = ["task_compile", "task_convert", "task_verify"]

Task = dict[str, object]


@cache
def _build(path: Path) -> Build:
    return Build(read_project(path))


def _tasks(
    needs: tuple[str, ...],
    reasons: Callable[[Build, Variant], list[str]],
    make: Callable[[Build, Variant], str],
    wanted: Callable[[Variant], bool] = lambda variant: True,
) -> Iterator[Task]:
    build = _build(Path(FILE_NAME).resolve())
    variants = [variant for variant in build.project.variants if wanted(variant)]
    for variant in variants:

        def is_up_to_date(variant: Variant = variant) -> bool:
            return not _reasons(variant)

        def run(variant: Variant = variant) -> bool | TaskFailed:
            try:
                print(f"{variant.label}: {', '.join(_reasons(variant))}", flush=True)
                print(f"{variant.label}: {make(build, variant)}", flush=True)
            except LoadplanError as error:
                return TaskFailed(str(error))
            return True

        def _reasons(variant: Variant) -> list[str]:
            try:
                return reasons(build, variant)
            except (LoadplanError, OSError) as error:
                return [str(error)]  # the task itself meets it again, and fails with it

        yield {
            "name": variant.label,
            "actions": [(run,)],
            "uptodate": [is_up_to_date],
            "task_dep": [f"{need}:{variant.label}" for need in needs if need != "convert" or variant.options.convert],
            "verbosity": 2,
        }


def task_compile() -> Iterator[Task]:
    """compile each variant of loadplan.toml into a plan"""
    yield from _tasks((), Build.plan_reasons, Build.build_plan)


def task_convert() -> Iterator[Task]:
    """write each variant's weights in their runtime layout"""
    yield from _tasks(
        ("compile",), Build.artifact_reasons, Build.build_artifact, lambda variant: variant.options.convert
    )


def task_verify() -> Iterator[Task]:
    """load each variant and compare it, bit for bit, with the recipe on whole tensors"""
    yield from _tasks(("compile", "convert"), Build.proof_reasons, Build.prove)
