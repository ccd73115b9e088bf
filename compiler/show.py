"""The text form of a plan: everything in it, one thing a line, in a fixed order, so that two can be compared.

tensor NAME : DTYPE[SHAPE]                                    | cut: the dim and each rank's positions
NAME[BYTE] <- fN[BYTE] RUN DTYPE (EXTENT src STEP dst STEP)*  | one copy; tN is a temporary; > is a cast
compute NAME, NAME <- KERNEL tN tN OPTIONS                    | new values, made of temporaries
"""

from __future__ import annotations

from collections.abc import Iterator

from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Compute, Copy, Head, PlanTensor
from loadplan.runtime.plan_format import FORMAT


def show_plan(plan: Plan, ranks: tuple[int, ...] | None = None) -> Iterator[str]:
    """The lines of `plan`; of all ranks if `ranks` is None. Raises `PlanError` for a rank it has not."""
    head, report = plan.head, plan.report
    yield f"plan {plan.digest} format {FORMAT} ranks {plan.world_size}"
    yield from (f"made of {part} {digest or '-'}" for part, digest in head.provenance)
    yield f"sources {report.sources} ({report.source_nbytes} bytes), targets {report.targets} ({report.target_nbytes} bytes)"
    yield from (f"rule {escape(rule)} : {uses} names" for rule, uses in report.rules)
    yield from (f"unused {escape(name)}" for name in report.unused)
    yield from (f"missing {escape(name)}" for name in report.missing)
    yield from (f"cast {escape(text)}" for text in report.casts)
    yield from (f"kept {escape(text)}" for text in report.kept)
    yield from (f"note {escape(text)}" for text in report.notes)
    for number, file in enumerate(head.files):
        yield f"file f{number} {escape(file.name)} {file.size} bytes {file.format} header {file.header_digest[:16]}"
    yield from (_tensor(tensor) for tensor in head.tensors)
    yield from (f"alias {escape(other)} = {escape(name)}" for other, name in head.aliases)
    yield from (f"fused {escape(one.path)} by {escape(one.family)} {escape(one.options)}" for one in head.fusions)
    yield from (f"tied if equal {' = '.join(map(escape, names))}" for names in head.equal_ties)
    for rank in range(plan.world_size) if ranks is None else ranks:
        section, cost = plan.section(rank), plan.cost(rank)
        yield (
            f"rank {rank}: reads {cost.read_nbytes} bytes in {cost.reads} stretches for {cost.target_nbytes}, "
            f"{cost.copies} copies, {cost.temporary_nbytes} bytes of temporaries"
        )
        for number, kind in enumerate(section.temporaries):
            yield f"temporary t{number} : {kind}"
        yield from (_copy(copy, head) for copy in section.copies)
        yield from (_compute(compute, head) for compute in section.computes)


def escape(text: str) -> str:
    """`text` with control characters escaped: names come from files, and a terminal obeys them."""
    return text if text.isprintable() else repr(text)[1:-1]


def _tensor(tensor: PlanTensor) -> str:
    line = f"tensor {escape(tensor.name)} : {tensor.type}"
    if tensor.shard_dim < 0:
        return line
    cuts = (" ".join(f"{low}-{high}" for low, high in spans) for spans in tensor.intervals)
    return f"{line} | dim {tensor.shard_dim}: {', '.join(cuts)}"


def _copy(copy: Copy, head: Head) -> str:
    source = f"f{copy.source}" if copy.source >= 0 else _buffer(-1 - copy.source, head)
    chain = ">".join(head.chains[copy.chain])
    loops = "".join(f" ({loop.extent} src {loop.src} dst {loop.dst})" for loop in copy.loops)
    return f"{_buffer(copy.buffer, head)}[{copy.dst}] <- {source}[{copy.src}] {copy.run} {chain}{loops}"


def _compute(compute: Compute, head: Head) -> str:
    made = ", ".join(_buffer(number, head) for number in compute.outputs)
    read = " ".join(_buffer(number, head) for number in compute.inputs)
    return f"compute {made} <- {compute.kernel} {read} {escape(compute.options)}"


def _buffer(number: int, head: Head) -> str:
    count = len(head.tensors)
    return escape(head.tensors[number].name) if number < count else f"t{number - count}"
