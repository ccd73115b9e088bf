"""One part of a conversion, as text and numbers: what a build sends to whoever makes it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loadplan.cache.digest import digest_json


@dataclass(frozen=True, slots=True)
class PartOf:
    """Part `part` of `parts`: some of the files that a plan is converted into (`convert_parts.divide` says which)."""

    store: str  # root of the cache, as the worker sees it
    plan_key: str  # of the action whose blob `plan` is the plan
    source: str  # where the worker sees the checkpoint
    contents: Mapping[str, str]  # file of the checkpoint -> SHA-256 (hex)
    whole_key: str  # of the whole conversion
    code: str  # digest of the code that converts
    part: int
    parts: int

    @property
    def key(self) -> str:
        """The action key of this part's files."""
        return part_key(self.whole_key, self.part, self.parts)


def part_key(whole_key: str, part: int, parts: int) -> str:
    """The action key of one part of the conversion that is filed under `whole_key`."""
    return digest_json({"converted": whole_key, "part": [part, parts]})
