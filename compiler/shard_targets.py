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

    An entry that names a tensor comes before one that names its module, the target's before the recipe's. Tied names
    are one tensor, so they must agree. An entry that matches nothing is refused, for one rank only if the target has it:
    a recipe's plan is not used then.
    """
    entries = (*target.tp_plan, *recipe.tp_plan)
    names = [*matched.values, *matched.aliases]
    found = {name: _shard_of(name, entries) for name in names}
    problems = [
        unbound("tp_plan", pattern, str(shard), names)
        for pattern, shard in (entries if target.tp_size > 1 else target.tp_plan)
        if not any(matches_module_or_name(pattern, name) for name in names)
    ]
    problems += _tie_problems(matched.aliases, found)
    tensors: list[PlanTensor] = []
    for name, value in sorted(matched.values.items()):
        shard = found[name]
        aliases = [found[other] for other, of in matched.aliases.items() if of == name and found[other]]
        try:
            tensors.append(_cut(name, value, shard or (aliases[0] if aliases else None) or REPLICATED, target.tp_size))
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


def _tie_problems(aliases: Mapping[str, str], found: Mapping[str, Shard | None]) -> list[Problem]:
    return [
        Problem("shard", f"{other} and {name} are one tensor, but the plan cuts them differently", (other, name))
        for other, name in sorted(aliases.items())
        if found[other] and found[name] and found[other] != found[name]
    ]


def _cut(name: str, value: Value, shard: Shard, ranks: int) -> PlanTensor:
    cut = shard.cut(value.type.shape, ranks)
    if cut is None:
        return PlanTensor(name, value.type)
    if value.type.dtype.is_packed:
        raise ShardError(f"{value.type.dtype} elements are packed into bytes and cannot be cut")
    return PlanTensor(name, value.type, *cut)
