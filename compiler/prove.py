"""The proof by example: what a plan and its artifact load, against the recipe on whole tensors.

The other side shares nothing with the runtime: tensors are read whole with safetensors' own reader (or torch's), run
through `reference` with torch's own ops, and cut with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

import safetensors
import torch

from loadplan.cache.error import LoadplanError
from loadplan.compiler.checkpoint import Checkpoint
from loadplan.compiler.pipeline import Resolved, resolve
from loadplan.compiler.reference import evaluate
from loadplan.runtime.artifact import Artifact
from loadplan.runtime.load import load_state_dict
from loadplan.runtime.location import folder_of, locate
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import PlanTensor

if TYPE_CHECKING:
    from loadplan.compiler.build_inputs import Sources


class ProofError(LoadplanError, AssertionError):
    """A loaded tensor is not what the recipe makes of the checkpoint."""


def prove_loads(plan: Plan, artifact: Path | None, source: str | Path, inputs: Sources) -> str:
    """Compare, bit for bit, every tensor of every rank; returns a line that says what was compared.

    Raises:
        ProofError: a tensor differs; names it, the rank and the way it was loaded.
    """
    resolved = resolve(inputs.checkpoint, inputs.recipe, inputs.signature, inputs.target)
    ways: list[tuple[str, Callable[[int], dict[str, torch.Tensor]]]] = [
        ("by plan", lambda rank: load_state_dict(plan, source, rank)),
        ("by plan, read", lambda rank: load_state_dict(plan, source, rank, mode="read")),
    ]
    if artifact is not None:
        converted = Artifact.open(artifact)
        ways.append(("from the artifact", lambda rank: load_state_dict(converted, rank=rank, mode="map")))
    compared = 0
    with _WholeTensors(inputs.checkpoint, source) as tensors:
        for rank in range(plan.world_size):
            loaded = [(way, load(rank)) for way, load in ways]
            for tensor in resolved.tensors:
                wanted = _cut(_wanted(resolved, tensor, tensors), tensor, rank)
                for way, found in loaded:
                    _compare(found, tensor, wanted, rank, way)
                    compared += 1
            _compare_aliases(plan, loaded, rank)
    return f"verified: {compared} comparisons, {len(ways)} ways of loading, {plan.world_size} ranks, bit for bit"


class _WholeTensors(Mapping[str, torch.Tensor]):
    """The stored tensors by name, read whole, one at a time, by the libraries that own the formats."""

    def __init__(self, checkpoint: Checkpoint, source: str | Path) -> None:
        self._folder = folder_of(locate(source))
        self._entries = checkpoint.entries
        self._stack = ExitStack()
        self._open: dict[str, Callable[[str], torch.Tensor]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._entries[name].file
        if file not in self._open:
            self._open[file] = self._reader(self._folder / file)
        return self._open[file](name)

    def _reader(self, path: Path) -> Callable[[str], torch.Tensor]:
        if path.suffix == ".safetensors":
            handle = self._stack.enter_context(safetensors.safe_open(path, "pt"))

            def get(name: str) -> torch.Tensor:
                tensor: torch.Tensor = handle.get_tensor(name)
                return tensor

            return get
        held = torch.load(path, weights_only=True, mmap=True)

        def find(name: str) -> torch.Tensor:
            value = held
            while isinstance(value, dict):  # nested names were joined by dots
                key = next(k for k in value if name == str(k) or name.startswith(f"{k}."))
                value, name = value[key], name[len(str(key)) + 1 :]
            assert isinstance(value, torch.Tensor)
            return value

        return find

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _wanted(resolved: Resolved, tensor: PlanTensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return evaluate(resolved.matched.values[tensor.name], tensors)


def _cut(whole: torch.Tensor, tensor: PlanTensor, rank: int) -> torch.Tensor:
    if tensor.shard_dim < 0:
        return whole
    parts = [whole.narrow(tensor.shard_dim, low, high - low) for low, high in tensor.intervals[rank]]
    return torch.cat(parts, tensor.shard_dim)


def _compare(found: Mapping[str, torch.Tensor], tensor: PlanTensor, wanted: torch.Tensor, rank: int, way: str) -> None:
    value = found.get(tensor.name)
    if value is None or value.shape != wanted.shape or value.dtype != wanted.dtype:
        raise ProofError(
            f"{tensor.name}, rank {rank}, {way}: not there, or of another type than {tensor.local_type(rank)}"
        )
    if not torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (value, wanted))):
        raise ProofError(f"{tensor.name}, rank {rank}, {way}: values differ from those the recipe makes")


def _compare_aliases(plan: Plan, loaded: list[tuple[str, dict[str, torch.Tensor]]], rank: int) -> None:
    for way, found in loaded:
        for other, name in plan.head.aliases:
            if found.get(other) is not found[name]:
                raise ProofError(f"{other}, rank {rank}, {way}: is not tied to {name}")
