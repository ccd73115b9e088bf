"""Sixth pass, for models with fused modules: their targets made of those of the original modules.

Names, ops, coverage and cuts are settled for the original model first, as without fusions; so every proof of that holds,
and recipes, plans and waivers are written for the names that everybody knows. Then each fused module's rules turn its
original targets into fused ones. Of the fused model, every target must be made exactly once; of the original one, every
target must be used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

from loadplan.cache.digest import digest_json
from loadplan.compiler.build_graph import convert_operands
from loadplan.compiler.cut_through import Cut, cut_through
from loadplan.compiler.ir import Config, Node, ShapeError, Value
from loadplan.compiler.match_targets import Matched
from loadplan.compiler.problem import Problem
from loadplan.compiler.recipe import plain
from loadplan.compiler.route_names import Routing, route_names
from loadplan.compiler.rules import Rule, WeightConverter
from loadplan.compiler.shard import ShardError
from loadplan.compiler.signature import Signature
from loadplan.runtime.fusion import FusionError, fusion_rules
from loadplan.runtime.plan import FusedModule, PlanTensor
from loadplan.runtime.tensor_type import TensorType


@dataclass(slots=True)
class _Fusing:
    """What is known while modules are fused one after the other."""

    matched: Matched
    signature: Signature
    fused: Signature
    config: Config
    cuts: Mapping[str, Cut]  # of the original targets
    original: dict[str, TensorType]
    declared: dict[str, TensorType]  # of the fused model
    values: dict[str, Value] = field(default_factory=dict)  # of fused targets
    made_cuts: dict[str, Cut] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)  # fused targets all of whose parts are waived
    used: set[str] = field(default_factory=set)  # original targets that are part of fused ones
    problems: list[Problem] = field(default_factory=list)

    def find(self, name: str) -> Value | None:
        """The value of an original target, under whichever name of its tie it was stored."""
        return self.matched.values.get(self.matched.aliases.get(name, name))


def fuse_targets(
    matched: Matched, tensors: Sequence[PlanTensor], signature: Signature, config: Config
) -> tuple[Matched, tuple[PlanTensor, ...], list[Problem]]:
    """The targets of the fused model and their cuts, in name order, from those of the original one."""
    assert signature.fused is not None, "asked for fused ones only"
    cuts: dict[str, Cut] = {t.name: None if t.shard_dim < 0 else (t.shard_dim, t.intervals) for t in tensors}
    work = _Fusing(
        matched, signature, signature.fused, config, cuts, dict(signature.tensors), dict(signature.fused.tensors)
    )
    names = sorted({*work.original, *work.declared})
    for one in signature.fusions:
        front = f"{one.path}." if one.path else ""
        _fuse(one, front, _below(names, front), work)
    if work.problems:  # what else is amiss follows from them
        return matched, (), work.problems
    result = _settle(work)
    made = tuple(
        PlanTensor(name, value.type, *(work.made_cuts[name] or ())) for name, value in sorted(result.values.items())
    )
    return result, made, work.problems


def _below(names: Sequence[str], front: str) -> list[str]:
    """Those of the sorted `names` that begin with `front`."""
    first = bisect_left(names, front)
    return list(takewhile(lambda name: name.startswith(front), islice(names, first, None)))


def rules_digest(signature: Signature, config: Config) -> str:
    """SHA-256 (hex) of the rules of all fused modules: what a plan is made of besides its signature.

    Raises:
        FusionError: a family is unknown, or has no rules.
    """
    return digest_json([[one.path, [plain(rule) for rule in _rules(one, config)]] for one in signature.fusions])


def _rules(one: FusedModule, config: Config) -> list[Rule]:
    rules = fusion_rules(one, dict(config.fields))
    for rule in rules:
        if not isinstance(rule, Rule):
            raise FusionError(f"fusion {one.family!r} of {one.path!r}: {rule!r} is not a rule")
    return [rule for rule in rules if isinstance(rule, Rule)]


def _fuse(one: FusedModule, front: str, below: Sequence[str], work: _Fusing) -> None:
    """Make the fused targets of one module; `below` are all names that begin with `front`."""
    inside = {name.removeprefix(front): work.original[name] for name in below if name in work.original}
    wanted = {name.removeprefix(front): work.declared[name] for name in below if name in work.declared}
    try:
        rules = _rules(one, work.config)
    except FusionError as error:
        work.problems.append(Problem("option", str(error), (one.path,)))
        return
    kept = [rule for rule in rules if not isinstance(rule, WeightConverter) or _binds(rule, inside)]
    routing = route_names(tuple(inside), kept, wanted)
    work.problems += [
        replace(problem, names=tuple(front + name for name in problem.names)) for problem in routing.problems
    ]
    for sources, targets, values in _products(routing, inside, wanted, front, work):
        work.used.update(sources)
        absent = [name for name in sources if work.find(name) is None]
        if absent:
            _note_absent(absent, sources, targets, work)
            continue
        for name, value in zip(targets, values, strict=True):
            _take(name, value, sources, work)


def _binds(rule: WeightConverter, names: Mapping[str, TensorType]) -> bool:
    """Whether each source has a name: rules of parts that a module does not have, such as biases, are not meant."""
    return all(any(source.search_tensor(name) for name in names) for source in rule.sources)


def _products(
    routing: Routing, inside: Mapping[str, TensorType], wanted: Mapping[str, TensorType], front: str, work: _Fusing
) -> Iterator[tuple[list[str], list[str], list[Value]]]:
    """Original names, the fused names that they become, and the values of these (none when a part is absent)."""
    for source, target in routing.plain:
        if target != source:
            value = work.find(front + source)
            yield [front + source], [front + target], [] if value is None else [value]
    for conversion in routing.conversions:
        sources = list(conversion.sources())
        found = {name: work.find(front + name) for name in sources}
        values = {name: value for name, value in found.items() if value is not None}
        targets = list(conversion.targets)
        if len(values) == len(found):
            try:
                made = convert_operands(conversion, values, wanted, work.config)
            except ShapeError as error:
                message = f"{', '.join(front + target for target in targets)}: {error}"
                names = tuple(front + name for name in sources)
                work.problems.append(Problem("fusion", message, names, str(conversion.rule)))
                work.used.update(names)
                continue
            yield [front + name for name in sources], [front + name for name, _ in made], [value for _, value in made]
        else:
            yield [front + name for name in sources], [front + name for name in targets], []


def _note_absent(absent: Sequence[str], sources: Sequence[str], targets: Sequence[str], work: _Fusing) -> None:
    """Parts that nothing makes: waived if all are, for what is missing then is the whole target."""
    if len(absent) == len(sources):
        work.missing.update(targets)
        return
    message = f"{', '.join(targets)}: nothing makes {', '.join(absent)}, and the other parts alone are not enough"
    work.problems.append(Problem("missing", message, tuple(absent)))


def _take(name: str, value: Value, sources: Sequence[str], work: _Fusing) -> None:
    """Take in one fused target: its type, and its cut."""
    declared = work.declared.get(name)
    if declared is None or name in work.values:
        why = "would be written twice" if name in work.values else "is not in the fused model"
        work.problems.append(Problem("fusion", f"{name} {why}", (name, *sources)))
        return
    parts = {source: part for source in sources if (part := work.find(source)) is not None}
    as_declared = all(part.type.dtype == work.original[source].dtype for source, part in parts.items())
    if value.type.shape != declared.shape or (as_declared and value.type.dtype != declared.dtype):
        message = f"{name} is made as {value.type}, the fused model has {declared}"
        work.problems.append(Problem("fusion", message, (name, *sources)))
        return
    aliases = work.matched.aliases
    try:
        cut = _cut_of(value, {part: work.cuts[aliases.get(source, source)] for source, part in parts.items()})
    except ShardError as error:
        work.problems.append(Problem("shard", f"{name}, of {', '.join(sources)}: {error}", (name, *sources)))
        return
    work.values[name], work.made_cuts[name] = value, cut


def _cut_of(value: Value, parts: Mapping[Value, Cut]) -> Cut:
    """How `value` is cut when the `parts` that it is made of are. Raises `ShardError`."""
    done: dict[Node, tuple[Cut, ...]] = {}

    def cut(value: Value) -> Cut:
        if value in parts:
            return parts[value]
        if value.node not in done:
            args = value.node.args
            done[value.node] = cut_through(value.node.op, tuple(arg.type for arg in args), tuple(map(cut, args)))
        return done[value.node][value.index]

    return cut(value)


def _settle(work: _Fusing) -> Matched:
    """The targets of the fused model: made ones, those that stay, other names; and what is left over or lacking."""
    before = work.matched
    used = work.used | {name for group in work.signature.ties if work.used.intersection(group) for name in group}
    values, aliases, missing = dict(work.values), dict[str, str](), set(work.missing)
    remade = set(work.fused.remade)  # a name that stays does not mean that the tensor does
    for name in work.declared:
        value = before.values.get(name)
        if name in used or name in values or name in remade:
            continue
        if value is not None:
            values[name], work.made_cuts[name] = value, work.cuts[name]
        elif name in before.missing:
            missing.add(name)
    group_of = {name: group for group in work.fused.ties for name in group}
    for name in work.declared:
        group = group_of.get(name, (name,))
        present = next((other for other in group if other in values), None)
        if name in values or name in missing:
            continue
        if present is not None:
            aliases[name] = present
        elif not missing.intersection(group):
            work.problems.append(Problem("missing", f"nothing makes {name} of the fused model", (name,)))
    for name in work.original:
        if name not in used and (name not in work.declared or name in remade):
            message = f"the fused model has no {name} of the original, and no fusion takes it"
            work.problems.append(Problem("unexpected", message, (name,)))
    for group in before.equal_ties:
        if used.intersection(group):
            message = (
                f"{' and '.join(group)} are one tensor in the model and two in the checkpoint: they cannot be fused"
            )
            work.problems.append(Problem("fusion", message, group))
    return replace(
        before,
        values=dict(sorted(values.items())),
        aliases=aliases,
        equal_ties=[group for group in before.equal_ties if not used.intersection(group)],
        missing=sorted(missing),
        names=tuple(work.declared),
    )
