"""What a compilation reports when it refuses: every fault found, not only the first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from loadplan.cache.error import LoadplanError


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint, recipe or target.

    `kind` is a stable word to match on (`missing`, `unexpected`, `duplicate`, `hole`, `shape`, `dtype`, `shard`,
    `rule`, `unbound`, `fusion`, `file`, `header`, `index`, `config`, `option`); `message` says the rest for a person.
    """

    kind: str
    message: str
    names: tuple[str, ...] = ()  # tensors or files concerned, source or target names
    rule: str | None = None  # the rule concerned, as the recipe spells it
    rank: int | None = None

    def __str__(self) -> str:
        place = "" if self.rank is None else f" (rank {self.rank})"
        rule = "" if self.rule is None else f" [rule: {self.rule}]"
        return f"{self.kind}: {self.message}{rule}{place}"


class CompileError(LoadplanError, ValueError):
    """The checkpoint, recipe, signature and target do not make a plan; `problems` lists every fault found."""

    _SHOWN = 50  # lines; a wrong prefix faults every tensor of a model, and the rest stays in `problems`

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [str(problem) for problem in sorted(self.problems, key=_concerns_names)]
        head = "cannot compile: 1 problem" if count == 1 else f"cannot compile: {count} problems"
        if count > self._SHOWN:
            lines = _merge_alike(lines)
            head += f" of {len(lines)} sorts (CompileError.problems has each)"
        shown = [f"  {line}" for line in lines[: self._SHOWN]]
        if len(lines) > self._SHOWN:
            shown.append(f"  ... and {len(lines) - self._SHOWN} sorts more")
        return "\n".join([head, *shown])


_NUMBER = re.compile(r"(?<=\w\.)\d+(?=\.\w)")  # a component inside a name: the number of a layer or an expert


def _concerns_names(problem: Problem) -> bool:
    """What concerns no single name comes first, for it says most."""
    return bool(problem.names)


def _merge_alike(lines: Iterable[str]) -> list[str]:
    """One line for all that differ in the numbers of layers and experts only, those as `*`."""
    sorts: dict[str, list[str]] = {}
    for line in lines:
        sorts.setdefault(_NUMBER.sub("*", line), []).append(line)
    return [alike[0] if len(alike) == 1 else f"{form} ({len(alike)} times)" for form, alike in sorts.items()]


class CheckpointError(CompileError):
    """The files of a checkpoint are damaged, incomplete or contradict each other."""

    def __str__(self) -> str:
        return super().__str__().replace("cannot compile", "cannot read the checkpoint", 1)
