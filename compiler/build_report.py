"""What `doit report` and `doit gc` print: the state of each variant, and what went from the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from loadplan.cache.error import LoadplanError
from loadplan.compiler.build import Build
from loadplan.compiler.build_file import Variant
from loadplan.compiler.show_cache import gc_lines
from loadplan.runtime.open_plan import Plan


def report_lines(build: Build) -> Iterator[str]:
    """A paragraph a variant: what is built, what is not and why, and what a person should know about it."""
    for variant in build.project.variants:
        yield f"{variant.label}: {variant.written_source}"
        steps: list[tuple[str, Callable[[Variant], list[str]]]] = [("plan", build.plan_reasons)]
        steps += [("converted files", build.artifact_reasons)] if variant.options.convert else []
        for name, reasons in (*steps, ("proof", build.proof_reasons)):
            yield f"  {name}: {_state(variant, reasons)}"
        yield from _plan_lines(build, variant)


def _state(variant: Variant, reasons: Callable[[Variant], list[str]]) -> str:
    try:
        found = reasons(variant)
    except (LoadplanError, OSError) as error:
        return f"cannot be built: {error}"
    return f"to be built: {', '.join(found)}" if found else "up to date"


def _plan_lines(build: Build, variant: Variant) -> Iterator[str]:
    path = build.plan_path(variant)
    if not path.is_file():
        return
    try:
        plan = Plan.open(path)
    except LoadplanError as error:
        yield f"  {error}"
        return
    report, cost = plan.report, plan.cost(0)
    yield (
        f"  {report.sources} sources -> {report.targets} targets on {plan.world_size} ranks; rank 0 holds "
        f"{cost.target_nbytes:,} bytes and reads {cost.read_nbytes:,}"
    )
    for what, names in (("unused", report.unused), ("missing", report.missing), ("cast", report.casts)):
        if names:
            yield f"  {what}: {len(names)} ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
    for note in report.notes:
        yield f"  {note}"


def collect_lines(build: Build) -> list[str]:
    """Bring the cache below its `max_size`, without what is pinned or was used within the grace; says what went."""
    spec = build.project.cache
    report = build.cache.local.gc(max_nbytes=spec.max_nbytes, grace_s=spec.grace_s)
    return gc_lines(report, time.time())
