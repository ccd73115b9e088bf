"""First pass: every source name to the target it becomes part of.

All renamings run first, in order; then the first converter that claims a name takes it (transformers_spec 2.5). With a
signature, a name that the model knows as it is wins over a changed one that it does not know, and the base model's
prefix is added or taken off where that gives a known name. Nothing is decided by position or by order of files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from loadplan.compiler.problem import Problem
from loadplan.compiler.rules import Rule, Scoped, WeightConverter, converter_of

_NAMED_HOLES = 1000  # one wrong number must not fill the memory with names
_PREFIX_DEPTH = 3  # a head around a model around a model is the deepest nesting seen (cases B10)


@dataclass(frozen=True, slots=True)
class Group:
    """The source tensors that one source pattern of a converter collected for one set of targets."""

    pattern: str
    sources: tuple[str, ...]  # by list number where the pattern has a `*`
    is_list: bool


@dataclass(frozen=True, slots=True)
class Conversion:
    """One use of a converter: its groups, in the order of its source patterns, and the targets they become."""

    rule: WeightConverter
    groups: tuple[Group, ...]
    targets: tuple[str, ...]  # a `*` in a target stands for the numbers of a list

    def sources(self) -> Iterator[str]:
        """All source names."""
        for group in self.groups:
            yield from group.sources


@dataclass(frozen=True, slots=True)
class Routing:
    """Where every source name goes."""

    plain: tuple[tuple[str, str], ...]  # source name, target name
    conversions: tuple[Conversion, ...]
    broken: tuple[Conversion, ...]  # incomplete ones; `problems` says why
    problems: tuple[Problem, ...]
    rule_uses: tuple[tuple[str, int], ...]  # rule, number of names it changed or claimed; in recipe order
    kept: tuple[tuple[str, str], ...]  # source names that kept their own name, and the name the rules would have given
    renamed: Mapping[str, tuple[int, ...]]  # source name -> numbers of the rules that changed it, in recipe order


@dataclass(slots=True)
class _Claims:
    """Claimed names of one converter and one set of targets, while they are being collected."""

    rule: WeightConverter
    targets: tuple[str, ...]
    found: dict[int, list[tuple[int | str | None, str]]] = field(default_factory=lambda: defaultdict(list))


def route_names(
    names: Sequence[str], rules: Sequence[Rule], known: Collection[str] | None, base_prefix: str = ""
) -> Routing:
    """Route `names` by `rules`; `known` are the signature's names, None without a signature."""
    uses: Counter[int] = Counter()
    changed: dict[int, set[int]] = {}  # renaming rule -> places of the names that it changed
    undone: set[int] = set()  # places of the names that went back to what they were
    renamed = list(names)
    for number, rule in enumerate(rules):
        if converter_of(rule) is not None:
            continue
        assert not isinstance(rule, WeightConverter), "told apart above"
        before, renamed = renamed, rule.rename(renamed)
        changed[number] = {at for at, (old, new) in enumerate(zip(before, renamed, strict=True)) if old != new}

    fit = _Fit(known, base_prefix)
    converters = [
        (number, rule, converter)
        for number, rule in enumerate(rules)
        if isinstance(rule, WeightConverter | Scoped) and (converter := converter_of(rule)) is not None
    ]
    plain: list[tuple[str, str]] = []
    kept: list[tuple[str, str]] = []
    claims: dict[tuple[int, tuple[str, ...]], _Claims] = {}
    for at, (source, name) in enumerate(zip(names, renamed, strict=True)):
        claimed = _claim(name, converters)
        if claimed is not None:
            number, rule, group, index, targets = claimed
            targets = tuple(map(fit, targets))
            if fit.knows(targets) or not (fit.knows((own := fit(name),)) or fit.knows((own := fit(source),))):
                uses[number] += 1
                entry = claims.setdefault((number, targets), _Claims(rule, targets))
                entry.found[group].append((index, source))
                continue
            kept.append((source, ", ".join(targets)))
            plain.append((source, own))
            undone.update(() if fit.knows((fit(name),)) else (at,))
            continue
        target = fit(name)
        if name != source and not fit.knows((target,)) and fit.knows((own := fit(source),)):
            kept.append((source, target))
            target = own
            undone.add(at)
        plain.append((source, target))

    uses.update({number: len(places - undone) for number, places in changed.items()})
    renamed_by: dict[str, tuple[int, ...]] = {}
    for number, places in changed.items():
        for at in sorted(places - undone):
            renamed_by[names[at]] = (*renamed_by.get(names[at], ()), number)
    sorted_out = [_conversion(entry) for entry in claims.values()]
    return Routing(
        tuple(plain),
        tuple(conversion for conversion, faults in sorted_out if not faults),
        tuple(conversion for conversion, faults in sorted_out if faults),
        tuple(fault for _, faults in sorted_out for fault in faults),
        tuple((str(rule), uses[number]) for number, rule in enumerate(rules)),
        tuple(kept),
        renamed_by,
    )


class _Fit:
    """Adds or takes off the base model's prefix where that turns a name into one that the model knows."""

    def __init__(self, known: Collection[str] | None, prefix: str) -> None:
        self._known = known
        self._prefix = f"{prefix}." if prefix else ""

    def __call__(self, target: str) -> str:
        """The target under a name that the model knows, if there is one; a list is judged by its number 0."""
        if self._known is None or not self._prefix or self.knows((target,)):
            return target
        shorter = longer = target
        for _ in range(_PREFIX_DEPTH):
            shorter, longer = shorter.removeprefix(self._prefix), self._prefix + longer
            for fitted in (shorter, longer):
                if self.knows((fitted,)):
                    return fitted
        return target

    def knows(self, targets: tuple[str, ...]) -> bool:
        """Whether the model knows one of the names; without a signature it knows none."""
        return self._known is not None and any(target.replace("*", "0") in self._known for target in targets)


def _claim(
    name: str, converters: Sequence[tuple[int, WeightConverter | Scoped, WeightConverter]]
) -> tuple[int, WeightConverter, int, int | str | None, tuple[str, ...]] | None:
    """The first converter that takes `name`: its number, itself, which source, which list number, which targets."""
    for number, scoped, rule in converters:
        claimed = scoped.claim(name)
        if claimed is None:
            continue
        group, found = claimed
        front, back = name[: found.start], name[found.end :]
        targets = tuple(front + target.expand(found.groups) + back for target in rule.targets)
        return number, rule, group, found.indices[0] if found.indices else None, targets
    return None


def _conversion(claims: _Claims) -> tuple[Conversion, list[Problem]]:
    """The groups in order, every list by number, and what keeps them from being complete."""
    problems: list[Problem] = []
    rule = claims.rule
    length = 1 + max(
        (index for found in claims.found.values() for index, _ in found if isinstance(index, int)), default=-1
    )
    groups: list[Group] = []
    for number, source in enumerate(rule.sources):
        found = claims.found.get(number, [])
        target = ", ".join(claims.targets)
        if not found:
            problems.append(
                Problem("missing", f"{target}: no tensor matches {source.text!r}", claims.targets, str(rule))
            )
        if source.wildcards:
            problems.extend(_list_problems(found, length, target, source.text, rule))
            found = sorted(found, key=lambda item: item[0] if isinstance(item[0], int) else -1)
        elif len(found) > 1:
            names = tuple(sorted(name for _, name in found))
            problems.append(
                Problem(
                    "duplicate",
                    f"{target}: {len(names)} tensors match {source.text!r}: {', '.join(names)}",
                    names,
                    str(rule),
                )
            )
        groups.append(Group(source.text, tuple(name for _, name in found), bool(source.wildcards)))
    return Conversion(rule, tuple(groups), claims.targets), problems


def _list_problems(
    found: Sequence[tuple[int | str | None, str]], length: int, target: str, pattern: str, rule: WeightConverter
) -> Iterator[Problem]:
    by_number: Mapping[int | str | None, list[str]] = defaultdict(list)
    for index, name in found:
        by_number[index].append(name)
    for index, names in by_number.items():
        if not isinstance(index, int):
            yield Problem(
                "rule",
                f"{target}: {names[0]} matches {pattern!r}, but {index!r} is not a number",
                tuple(names),
                str(rule),
            )
        if len(names) > 1:
            yield Problem(
                "duplicate",
                f"{target}: number {index} is there {len(names)} times: {', '.join(names)}",
                tuple(names),
                str(rule),
            )
    absent = length - sum(isinstance(index, int) for index in by_number)
    if absent and found:
        named = tuple(islice((index for index in range(length) if index not in by_number), _NAMED_HOLES))
        shown = ", ".join(map(str, named[:8])) + (", ..." if absent > 8 else "")
        yield Problem(
            "hole",
            f"{target}: {absent} of {length} numbers of {pattern!r} are not in the checkpoint: {shown}",
            tuple(pattern.replace("*", str(index)) for index in named),
            str(rule),
        )
