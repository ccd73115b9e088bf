r"""The rules of a recipe: frozen values that say how source names become target names, and through which ops.

Renaming rules look at all names at once and give each its new name; converters claim names and say which ops turn the
claimed tensors into targets. All pattern semantics are in `patterns.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from loadplan.compiler.ir import Op
from loadplan.compiler.patterns import (
    Match,
    PatternError,
    SourcePattern,
    TargetPattern,
    compile_source,
    compile_target,
)

_ANY = 99  # capture groups: more than a pattern can have
_MAX_DIGITS = 9  # of a number to reckon with; longer ones are text


class Rename(Protocol):
    """A rule that only changes names."""

    def rename(self, names: Sequence[str]) -> list[str]:
        """The new name of each, in order; a name that the rule does not concern stays."""


@dataclass(frozen=True)
class WeightRenaming:
    r"""The matched text replaced by the target; capture groups (`\1`, `\2`, ...) and what `*` matched are carried over.

    Several sources share one target; the longest source that matches is used. Each name is changed once at most.
    """

    source_patterns: tuple[str, ...]
    target_patterns: tuple[str, ...]

    def __init__(self, source_patterns: str | Iterable[str], target_patterns: str | Iterable[str]) -> None:
        object.__setattr__(self, "source_patterns", _texts(source_patterns))
        object.__setattr__(self, "target_patterns", _texts(target_patterns))
        if len(self.target_patterns) not in (1, len(self.source_patterns)):
            raise PatternError(f"{self}: give one target, or one for each of the {len(self.source_patterns)} sources")
        _ = self._pairs

    def rename(self, names: Sequence[str]) -> list[str]:
        return [_replace(name, self._pairs) for name in names]

    @cached_property
    def _pairs(self) -> list[tuple[SourcePattern, TargetPattern]]:
        targets = self.target_patterns * (len(self.source_patterns) if len(self.target_patterns) == 1 else 1)
        return _paired(self.source_patterns, targets)

    def __str__(self) -> str:
        return f"WeightRenaming({_shown(self.source_patterns)} -> {_shown(self.target_patterns)})"


@dataclass(frozen=True)
class GroupWeightRename:
    """Pairs of names renamed together, where targets of some pairs are sources of others (norm0 -> norm1 -> norm2).

    The pairs apply at once, not one after the other, and place by place. The guard is the first source that no pair
    makes: in a module where it exists, all pairs apply; where it does not, the checkpoint already has the new names,
    and none does. A place is what comes before the match, together with what the guard's groups and `*` matched (a
    layer's number).
    """

    source_patterns: tuple[str, ...]
    target_patterns: tuple[str, ...]

    def __init__(self, source_patterns: Iterable[str], target_patterns: Iterable[str]) -> None:
        object.__setattr__(self, "source_patterns", _texts(source_patterns))
        object.__setattr__(self, "target_patterns", _texts(target_patterns))
        if len(self.source_patterns) != len(self.target_patterns):
            raise PatternError(f"{self}: each source needs its own target")
        guard = self._guard
        for source, _ in self._pairs:
            if len(source.captures) < len(guard.captures) or len(source.wildcards) < len(guard.wildcards):
                raise PatternError(f"{self}: {source.text!r} lacks a group of {guard.text!r}, which tells places apart")

    def rename(self, names: Sequence[str]) -> list[str]:
        guard = self._guard
        active = {_place(name, found, guard) for name in names if (found := guard.search(name))}
        return [_replace(name, self._pairs, lambda name, found: _place(name, found, guard) in active) for name in names]

    @cached_property
    def _pairs(self) -> list[tuple[SourcePattern, TargetPattern]]:
        return _paired(self.source_patterns, self.target_patterns)

    @cached_property
    def _guard(self) -> SourcePattern:
        made = {_spelled(text) for text in self.target_patterns}
        return compile_source(
            next((s for s in self.source_patterns if _spelled(s) not in made), self.source_patterns[0])
        )

    def __str__(self) -> str:
        return f"GroupWeightRename({_shown(self.source_patterns)} -> {_shown(self.target_patterns)})"


@dataclass(frozen=True)
class PrefixChange:
    """Whole components added to, or removed from, the front of names, behind `model_prefix` if given.

    Adding is skipped for a name that has the prefix already; removing for one that does not.
    """

    prefix_to_add: str | None = None
    prefix_to_remove: str | None = None
    model_prefix: str | None = None

    def __post_init__(self) -> None:
        if (self.prefix_to_add is None) == (self.prefix_to_remove is None):
            raise PatternError(f"{self}: give prefix_to_add or prefix_to_remove, not both")
        for prefix in (self.prefix_to_add, self.prefix_to_remove, self.model_prefix or None):
            if prefix is not None and not all(prefix.split(".")):
                raise PatternError(f"{self}: {prefix!r} is not made of whole components")

    def rename(self, names: Sequence[str]) -> list[str]:
        return [self._rename_one(name) for name in names]

    def _rename_one(self, name: str) -> str:
        front = f"{self.model_prefix}." if self.model_prefix else ""
        if not name.startswith(front):
            return name
        rest = name[len(front) :]
        changed = f"{self.prefix_to_add or self.prefix_to_remove}."
        if self.prefix_to_add:
            return name if rest.startswith(changed) else front + changed + rest
        return front + rest.removeprefix(changed)

    def __str__(self) -> str:
        verb = f"add {self.prefix_to_add}" if self.prefix_to_add else f"remove {self.prefix_to_remove}"
        return f"PrefixChange({verb}{f' behind {self.model_prefix}' if self.model_prefix else ''})"


@dataclass(frozen=True)
class IndexShift:
    r"""A number in the name raised by `offset` on the way: for lists that begin at another layer than the model's.

    The source has one capture group, around the number, and the target says with `\1` where it goes. A number that
    would become negative leaves the name as it is.
    """

    source_pattern: str
    target_pattern: str
    offset: int

    def __post_init__(self) -> None:
        _ = self._pair

    def rename(self, names: Sequence[str]) -> list[str]:
        return [self._rename_one(name) for name in names]

    def _rename_one(self, name: str) -> str:
        source, target = self._pair
        number = _number_in(found) if (found := source.search(name)) else None
        if found is None or number is None or number + self.offset < 0:
            return name
        return name[: found.start] + target.expand((str(number + self.offset),)) + name[found.end :]

    @cached_property
    def _pair(self) -> tuple[SourcePattern, TargetPattern]:
        return _numbered(self, self.source_pattern), _numbering(self, self.target_pattern)

    def __str__(self) -> str:
        return f"IndexShift({self.source_pattern} -> {self.target_pattern} by {self.offset:+d})"


@dataclass(frozen=True)
class IndexFold:
    r"""Numbers `k * n`, `k * n + 1`, ... as one number `n` with `k` names: for layers stored as blocks of their own.

    The source has one capture group, around the number `i`. The target that is used is number `i % k` of the `k`, and
    its `\1` is `i // k`: `layers.5.mixer` becomes `layers.2.mlp` by the targets `layers.\1.self_attn, layers.\1.mlp`.
    A target may be there twice, where the name alone says which block it belongs to.
    """

    source_pattern: str
    target_patterns: tuple[str, ...]

    def __init__(self, source_pattern: str, target_patterns: Iterable[str]) -> None:
        object.__setattr__(self, "source_pattern", source_pattern)
        object.__setattr__(self, "target_patterns", _texts(target_patterns))
        _ = self._source, self._targets

    def rename(self, names: Sequence[str]) -> list[str]:
        return [self._rename_one(name) for name in names]

    def _rename_one(self, name: str) -> str:
        number = _number_in(found) if (found := self._source.search(name)) else None
        if found is None or number is None:
            return name
        folded, block = divmod(number, len(self._targets))
        return name[: found.start] + self._targets[block].expand((str(folded),)) + name[found.end :]

    @cached_property
    def _source(self) -> SourcePattern:
        return _numbered(self, self.source_pattern)

    @cached_property
    def _targets(self) -> tuple[TargetPattern, ...]:
        return tuple(_numbering(self, text) for text in self.target_patterns)

    def __str__(self) -> str:
        return f"IndexFold({self.source_pattern} -> {_shown(self.target_patterns)})"


@dataclass(frozen=True)
class WeightConverter:
    """Tensors whose names match the sources, through `operations`, into the targets.

    A source with `*` collects a list, by the number that `*` matches. The operations get one group of tensors per
    source, in the order of the sources; each operation's results are the next one's arguments, and the last one must
    leave one tensor (or one list, for a target with `*`) per target.
    """

    source_patterns: tuple[str, ...]
    target_patterns: tuple[str, ...]
    operations: tuple[Op, ...] = field(default=())

    def __init__(
        self,
        source_patterns: str | Iterable[str],
        target_patterns: str | Iterable[str],
        operations: Iterable[Op] = (),
    ) -> None:
        object.__setattr__(self, "source_patterns", _texts(source_patterns))
        object.__setattr__(self, "target_patterns", _texts(target_patterns))
        object.__setattr__(self, "operations", tuple(operations))
        if not self.operations:
            raise PatternError(f"{self}: a converter needs operations; use WeightRenaming to change a name only")
        for operation in self.operations:
            if not isinstance(operation, Op):
                raise PatternError(f"{self}: {operation!r} is not an operation (see loadplan.compiler.ops)")
        _ = self.targets
        for source in self.sources:
            if len(source.wildcards) > 1:
                raise PatternError(
                    f"{self}: {source.text!r} has {len(source.wildcards)} numbers; only one can be a list's, capture the others"
                )

    @cached_property
    def sources(self) -> tuple[SourcePattern, ...]:
        """The compiled sources, in order."""
        return tuple(map(compile_source, self.source_patterns))

    @cached_property
    def targets(self) -> tuple[TargetPattern, ...]:
        """The compiled targets, in order."""
        captures = min(len(source.captures) for source in self.sources)
        return tuple(compile_target(text, captures) for text in self.target_patterns)

    def claim(self, name: str) -> tuple[int, Match] | None:
        """The source that takes `name` (the longest that matches, by number) and where; None if none does."""
        for number, source in self._longest_first:
            if found := source.search_tensor(name):
                return number, found
        return None

    @cached_property
    def _longest_first(self) -> list[tuple[int, SourcePattern]]:
        return sorted(enumerate(self.sources), key=lambda item: -len(item[1].text))

    def __str__(self) -> str:
        return f"WeightConverter({_shown(self.source_patterns)} -> {_shown(self.target_patterns)})"


@dataclass(frozen=True)
class Scoped:
    """A rule for the names below one module, which sees them without the path to it.

    Names may or may not have the whole model's base prefix in front (transformers_spec 2.3). Rules of a sub-model are
    written for its own names, so that one list serves the model alone and inside others (cases B08).

    Args:
        rule: any other rule.
        path: of the module, below the base model; empty for the base model itself.
        base_prefix: of the whole model; may be empty.
    """

    rule: WeightRenaming | GroupWeightRename | PrefixChange | IndexShift | IndexFold | WeightConverter
    path: str
    base_prefix: str = ""

    def rename(self, names: Sequence[str]) -> list[str]:
        assert not isinstance(self.rule, WeightConverter), "converters claim"
        renamed = list(names)
        inside = [(at, *cut) for at, name in enumerate(names) if (cut := self._cut(name))]
        for (at, front, _), rest in zip(inside, self.rule.rename([rest for _, _, rest in inside]), strict=True):
            renamed[at] = front + rest
        return renamed

    def claim(self, name: str) -> tuple[int, Match] | None:
        """As `WeightConverter.claim`, below the module; the match lies in the whole of `name`."""
        assert isinstance(self.rule, WeightConverter), "renamings rename"
        cut = self._cut(name)
        claimed = self.rule.claim(cut[1]) if cut else None
        if cut is None or claimed is None:
            return None
        group, found = claimed
        moved = len(cut[0])
        return group, replace(found, start=found.start + moved, end=found.end + moved)

    def _cut(self, name: str) -> tuple[str, str] | None:
        """`name` as the path to the module and the rest; None if it lies elsewhere."""
        inner = f"{self.path}." if self.path else ""
        outer = f"{self.base_prefix}.{inner}" if self.base_prefix else inner
        for front in (outer, inner):
            if name.startswith(front):
                return front, name[len(front) :]
        return None

    def __str__(self) -> str:
        return f"{self.rule} in {self.path or self.base_prefix or 'the model'}"


def converter_of(rule: Rule) -> WeightConverter | None:
    """The converter that `rule` is, or scopes; None for a renaming."""
    inner = rule.rule if isinstance(rule, Scoped) else rule
    return inner if isinstance(inner, WeightConverter) else None


Rule = WeightRenaming | GroupWeightRename | PrefixChange | IndexShift | IndexFold | WeightConverter | Scoped


def _texts(patterns: str | Iterable[str]) -> tuple[str, ...]:
    texts = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise PatternError(f"patterns are one text or several, not {patterns!r}")
    return texts


def _numbered(rule: object, text: str) -> SourcePattern:
    """The source of a rule that reckons with the number that its only group captures."""
    source = compile_source(text)
    if len(source.captures) != 1 or source.wildcards:
        raise PatternError(f"{rule}: {text!r} needs one capture group, around the number, and no `*`")
    return source


def _numbering(rule: object, text: str) -> TargetPattern:
    target = compile_target(text, 1)
    if target.stars or target.parts.count(1) != 1:
        raise PatternError(rf"{rule}: {text!r} must say once where the number goes, as \1")
    return target


def _number_in(found: Match) -> int | None:
    """What the only group captured; None if it is not a number."""
    text = found.groups[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def _paired(sources: tuple[str, ...], targets: tuple[str, ...]) -> list[tuple[SourcePattern, TargetPattern]]:
    """Compiled pairs, the longest source first: the one that says most decides."""
    compiled = [compile_source(text) for text in sources]
    pairs = [
        (source, compile_target(target, len(source.captures))) for source, target in zip(compiled, targets, strict=True)
    ]
    for source, target in pairs:
        if target.stars > len(source.wildcards):
            raise PatternError(
                f"target {target.text!r} has {target.stars} `*`, {source.text!r} {len(source.wildcards)}"
            )
    return sorted(pairs, key=lambda pair: -len(pair[0].text))


def _replace(
    name: str,
    pairs: Sequence[tuple[SourcePattern, TargetPattern]],
    applies: Callable[[str, Match], bool] = lambda name, found: True,
) -> str:
    for source, target in pairs:
        found = source.search(name)
        if found is not None and applies(name, found):
            return name[: found.start] + target.expand(found.groups, found.stars) + name[found.end :]
    return name


def _spelled(text: str) -> tuple[str | int, ...]:
    """A source or target as what both may spell: literal text, groups by number, `*`."""
    bare = text.removeprefix("^").removeprefix("\\").removeprefix(".")
    try:
        return compile_target(bare, _ANY).parts
    except PatternError:
        return (text,)  # a regular expression that no target can spell


def _place(name: str, found: Match, guard: SourcePattern) -> tuple[object, ...]:
    """Where in the model `found` lies, as far as the guard of a group can tell."""
    before = name[: found.start].removesuffix(".")
    return before, found.groups[: len(guard.captures)], found.stars[: len(guard.wildcards)]


def _shown(patterns: tuple[str, ...]) -> str:
    return ", ".join(patterns)
