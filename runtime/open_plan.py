"""`Plan`: a compiled plan in memory, opened from a file or just made, proved before it is used."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from loadplan.cache.write_file import make_folder, write_atomically
from loadplan.runtime.check_plan import check_head, check_origin, check_section
from loadplan.runtime.collector import paused_collector
from loadplan.runtime.order import staged
from loadplan.runtime.plan import Cost, Head, Origin, Report, Section
from loadplan.runtime.plan_format import Frames, PlanError, encode
from loadplan.runtime.trust import Trusted, Vouched, verify_plan


class Plan:
    """For each rank, which bytes of which file land where. Immutable; equal digests are equal plans."""

    def __init__(self, data: bytes, name: str = "plan", vouched: Vouched | None = None) -> None:
        """The plan that `data` encodes; `name` is for messages, `vouched` says who signed it.

        Raises:
            PlanError: it is damaged, of another format, or not a proved plan.
        """
        self._data, self.name, self.vouched = data, name, vouched
        self._frames = Frames(data, name)
        with paused_collector():
            self.head: Head = self._frames.head()
            self._refuse_if(list(check_head(self.head)))
        self.section = lru_cache(maxsize=None)(self._section)

    @classmethod
    def of(cls, head: Head, sections: tuple[Section, ...], origin: Origin | None = None) -> Plan:
        """The plan of the given parts. Raises `PlanError` when they do not prove."""
        return cls(encode(head, sections, origin)[0])

    @classmethod
    def open(cls, path: str | Path, trusted: Trusted = None) -> Plan:
        """The plan in the file at `path`; signed, where `trusted` or the environment asks for it (`runtime/trust.py`).

        Raises:
            UntrustedPlan: it must be signed by a trusted key, and is not.
            And `PlanError`, `OSError`, and what `verify_plan` raises.
        """
        data = Path(path).read_bytes()
        vouched = verify_plan(Path(path), Frames(data, str(path)).digest, trusted)
        return cls(data, str(path), vouched)

    def save(self, path: str | Path) -> None:
        """Write the plan file, whole or not at all."""
        target = Path(path)
        make_folder(target.parent)
        write_atomically(target, self._data)

    def to_bytes(self) -> bytes:
        """The bytes of the plan file."""
        return self._data

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the plan's content; the same on every machine."""
        return self._frames.digest

    @property
    def report(self) -> Report:
        """What a person should know about the compilation."""
        return self.head.report

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.head.world_size

    @property
    def origin(self) -> Origin | None:
        """What the checkpoint looked like, None if the plan does not say. Raises `PlanError`."""
        origin = self._frames.origin(self.world_size)
        if origin is not None:
            self._refuse_if(list(check_origin(self.head, origin)))
        return origin

    def _section(self, rank: int) -> Section:
        """The proved section of `rank`, decoded once. Raises `PlanError`."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"{self.name}: has ranks 0 to {self.world_size - 1}, not {rank}")
        with paused_collector():
            section = self._frames.section(rank)
            self._refuse_if([f"rank {rank}: {fault}" for fault in check_section(self.head, section, rank)])
        return section

    def _refuse_if(self, faults: list[str]) -> None:
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise PlanError(f"{self.name}: not a proved plan: {faults[0]}{more}")

    def cost(self, rank: int = 0) -> Cost:
        """What loading `rank` takes: bytes, reads, copies, memory. Raises `PlanError`."""
        section = self.section(rank)
        read = reads = 0
        end = (-1, -1)  # file and byte where the last stretch ended
        for copy in section.copies:
            if copy.source < 0:
                break
            nbytes = copy.numel * self.head.chains[copy.chain][0].bits // 8
            read += nbytes
            runs = 1
            for loop in copy.loops:
                runs *= loop.extent
            reads += runs - (runs == 1 and (copy.source, copy.src) == end)
            end = (copy.source, copy.src + nbytes) if runs == 1 else (-1, -1)
        wanted = sum(tensor.local_type(rank).nbytes for tensor in self.head.tensors)
        tiled = staged(section.copies, section.computes)
        numbered = enumerate(section.temporaries, start=len(self.head.tensors))
        temporary = sum(kind.nbytes for number, kind in numbered if number not in tiled)
        return Cost(rank, wanted, read, reads, len(section.copies), temporary, wanted + temporary)

    def __reduce__(self) -> tuple[object, ...]:
        return Plan, (self._data, self.name, self.vouched)

    def __repr__(self) -> str:
        return f"Plan({self.name!r}, {len(self.head.tensors)} tensors, {self.world_size} ranks, {self.digest[:12]})"
