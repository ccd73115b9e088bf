"""What a compilation reports when it refuses: every fault found, not only the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loadplan.cache.error import LoadplanError


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a checkpoint, recipe or target.

    `kind` is a stable word to match on (`missing`, `unexpected`, `duplicate`, `hole`, `shape`, `dtype`, `shard`,
    `rule`, `unbound`, `file`, `header`, `index`, `config`, `option`); `message` says the rest for a person.
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

    _SHOWN = 50  # a wrong prefix faults every tensor of a model; the rest stays in `problems`

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        lines = [f"  {problem}" for problem in self.problems[: self._SHOWN]]
        if count > self._SHOWN:
            lines.append(f"  ... and {count - self._SHOWN} more (CompileError.problems has them all)")
        return "\n".join([f"cannot compile: {head}", *lines])


class CheckpointError(CompileError):
    """The files of a checkpoint are damaged, incomplete or contradict each other."""

    def __str__(self) -> str:
        return super().__str__().replace("cannot compile", "cannot read the checkpoint", 1)
