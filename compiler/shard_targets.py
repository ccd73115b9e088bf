"""Fourth pass: which part of each target each rank holds, from the parallel plan."""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Value
from loadplan.compiler.match_targets import Matched, unbound
from loadplan.compiler.patterns import matches_module_or_name
from loadplan.compiler.problem import Problem
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.shard import REPLICATED, Shard, ShardError
from loadplan.compiler.target import Target
from loadplan.runtime.plan import PlanTensor


def shard_targets(matched: Matched, recipe: Recipe, target: Target) -> tuple[list[PlanTensor], list[Problem]]:
    """The plan's tensors, in name order.

    The target's entries come before the recipe's; of either, one that names a tensor before one that names its module.
    Tied names are one tensor, so they must agree. An entry that matches nothing is refused, for one rank only if the
    target has it: a recipe's plan is not used then.
    """
    plans = (target.tp_plan, recipe.tp_plan) if target.tp_size > 1 else (target.tp_plan,)
    problems = [
        unbound("tp_plan", pattern, str(shard), matched.names)
        for plan in plans
        for pattern, shard in plan
        if not any(matches_module_or_name(pattern, name) for name in matched.names)
    ]
    names = (*matched.values, *matched.aliases)
    found = {name: shard for name in names for plan in reversed(plans) if (shard := _shard_of(name, plan))}
    ties = _ties(matched)
    problems += _tie_problems(ties, found)
    tensors: list[PlanTensor] = []
    for name, value in sorted(matched.values.items()):
        shard = next((found[other] for other in (name, *ties.get(name, ())) if other in found), REPLICATED)
        try:
            tensors.append(_cut(name, value, shard, target.tp_size))
        except ShardError as error:
            problems.append(Problem("shard", f"{name}: {error} (tp_size={target.tp_size})", (name,)))
    return tensors, problems


def _shard_of(name: str, entries: tuple[tuple[str, Shard], ...]) -> Shard | None:
    of_module: Shard | None = None
    for pattern, shard in entries:
        if not matches_module_or_name(pattern, name):
            continue
        if pattern.count(".") == name.count("."):
            return shard
        of_module = of_module or shard
    return of_module


def _ties(matched: Matched) -> dict[str, tuple[str, ...]]:
    """For each tied name, all names of its tensor, in order."""
    groups: dict[str, set[str]] = {}
    for tied in (*matched.equal_ties, *matched.aliases.items()):
        joined = {name for one in tied for name in groups.get(one, {one})}
        groups.update(dict.fromkeys(joined, joined))
    return {name: tuple(sorted(group)) for name, group in groups.items()}


def _tie_problems(ties: Mapping[str, tuple[str, ...]], found: Mapping[str, Shard]) -> list[Problem]:
    return [
        Problem("shard", f"{' and '.join(group)} are one tensor, but the plan cuts them differently", group)
        for group in sorted(set(ties.values()))
        if len({found[name] for name in group if name in found}) > 1
    ]


def _cut(name: str, value: Value, shard: Shard, ranks: int) -> PlanTensor:
    cut = shard.cut(value.type.shape, ranks)
    if cut is None:
        return PlanTensor(name, value.type)
    if value.type.dtype.is_packed:
        raise ShardError(f"{value.type.dtype} elements are packed into bytes and cannot be cut")
    return PlanTensor(name, value.type, *cut)
