"""A plan's targets by name, as they become ready: ties made one tensor, on their device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations

import torch

from loadplan.cache.error import LoadplanError
from loadplan.runtime.memory import same_bytes
from loadplan.runtime.plan import Head

Fetch = Callable[[Collection[int]], Mapping[int, torch.Tensor]]  # numbers of tensors -> these, final


class TieConflict(LoadplanError, ValueError):
    """Tied names have different tensors in the checkpoint, and others of the same tie have none of their own."""


class TargetNames:
    """The names that a plan makes tensors for, and the numbers of these."""

    def __init__(self, head: Head) -> None:
        self.aliases = dict(head.aliases)
        self.groups = {name: group for group in head.equal_ties for name in group}
        self.numbers = {tensor.name: number for number, tensor in enumerate(head.tensors)}

    def __contains__(self, name: str) -> bool:
        return name in self.numbers or name in self.aliases

    def order(self, names: Iterable[str]) -> list[int]:
        """The tensors that `names` need, those that they may be tied to among them, in the order of their first use."""
        targets = (self.aliases.get(name, name) for name in names)
        members = (member for target in targets for member in self.groups.get(target, (target,)))
        return list(dict.fromkeys(self.numbers[member] for member in members))


class Targets:
    """The tensors by name, aliases included. Tied names have one tensor; each is moved to the device once."""

    def __init__(self, names: TargetNames, device: torch.device | None, fetch: Fetch) -> None:
        """What `fetch` gives, moved to `device`; None leaves it where it is."""
        self._names, self._device, self._fetch = names, device, fetch
        self._ready: dict[str, torch.Tensor] = {}  # by target, aliases not among them
        self.untied: set[frozenset[str]] = set()  # pairs of names that should be tied, and differ

    def all(self) -> dict[str, torch.Tensor]:
        """All tensors, in name order; waits for all. Raises what `get` raises."""
        fetched = self._fetch(self._names.numbers.values())
        tensors = {name: fetched[number] for name, number in self._names.numbers.items()}
        if self._device is not None:
            tensors = {name: self._moved(tensor) for name, tensor in tensors.items()}
        for group in set(self._names.groups.values()):
            tensors |= self._join(group)
        if not self._names.aliases:
            return tensors  # in the plan's order, which is that of names
        return dict(sorted((tensors | {other: tensors[name] for other, name in self._names.aliases.items()}).items()))

    def get(self, name: str) -> torch.Tensor:
        """The tensor of `name`; waits for it.

        Raises:
            TieConflict: tied names hold different tensors, and others of the tie none.
            And what loading it raises.
        """
        target = self._names.aliases.get(name, name)
        if target in self._names.groups and target not in self._ready:
            self._ready |= self._join(self._names.groups[target])
        elif target not in self._ready:
            number = self._names.numbers[target]
            self._ready[target] = self._moved(self._fetch((number,))[number])
        return self._ready[target]

    def _join(self, group: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors of `group`, one for those that are equal."""
        fetched = self._fetch([self._names.numbers[name] for name in group])
        tensors = {name: fetched[self._names.numbers[name]] for name in group}
        for count, name in enumerate(group):
            equal = (tensors[other] for other in group[:count] if same_bytes(tensors[other], tensors[name]))
            tensors[name] = next(equal, tensors[name])
        self._refuse_open_tie(group, tensors)
        self.untied |= {frozenset(pair) for pair in combinations(group, 2) if tensors[pair[0]] is not tensors[pair[1]]}
        moved = {id(tensor): self._moved(tensor) for tensor in tensors.values()}
        return {name: moved[id(tensor)] for name, tensor in tensors.items()}

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None else tensor.to(self._device)

    def _refuse_open_tie(self, group: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse to choose for a name between different tensors (cases B25): any choice could be the wrong matrix."""
        open_names = sorted(other for other, name in self._names.aliases.items() if name in group)
        different = [name for name in group if tensors[name] is not tensors[group[0]]]
        if open_names and different:
            raise TieConflict(
                f"{', '.join(open_names)} should be tied to {' and '.join(group)}, but {different[0]} differs from "
                f"{group[0]} in this checkpoint: say which is meant by a rule that renames it, or correct the ties"
            )
