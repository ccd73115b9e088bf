"""Where each tensor of a plan comes from: source tensors, their files and bytes, the recipe's rules, the ops in order.

Derived when the plan is compiled, from the op graph that the plan is lowered from, and kept in the plan's origin, which
loading does not read. The bytes are those of the whole tensor; the ranks' copies together read exactly these. Where a
layout is too fine to be followed (`Fragmented`), or a kernel makes new values, all bytes of the op's arguments count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from math import prod

from loadplan.cache.error import LoadplanError
from loadplan.compiler import pieces
from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.ir import Node, Op, Stored, Value
from loadplan.compiler.lower_graph import Transfer, transfers
from loadplan.compiler.pieces import Fragmented, Layout, Source
from loadplan.compiler.route_names import Routing
from loadplan.compiler.show import escape
from loadplan.runtime.check_plan import Area, RunBudget, covers
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import ByteArea, PlanSource, Trace


class ProvenanceError(LoadplanError, KeyError):
    """A tensor whose provenance is not known."""

    def __str__(self) -> str:  # KeyError's own would print a repr
        return str(self.args[0])


def trace_values(
    values: Iterable[Value], entries: Mapping[str, Entry], routing: Routing, numbers: Mapping[str, int]
) -> tuple[Trace, ...]:
    """The trace of each value; `numbers` gives the number of each source."""
    tracer = _Tracer(entries)
    rules = dict(_rules_of(routing))
    return tuple(_trace(value, tracer, rules, numbers) for value in values)


def _rules_of(routing: Routing) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Per source name, the rules that took hold of it: renamings in order, then the converter."""
    converters = {name: str(c.rule) for c in routing.conversions for name in c.sources()}
    names = [rule for rule, _ in routing.rule_uses]
    for source in dict.fromkeys((*routing.renamed, *converters)):
        renamings = tuple(names[number] for number in routing.renamed.get(source, ()))
        yield source, (*renamings, *([converters[source]] if source in converters else []))


def _trace(value: Value, tracer: _Tracer, rules: Mapping[str, tuple[str, ...]], numbers: Mapping[str, int]) -> Trace:
    program, names = _program(value)
    used = tracer.reads(tracer.layout(value))
    return Trace(
        tuple(dict.fromkeys(rule for name in names for rule in rules.get(name, ()))),
        program,
        tuple((numbers[name], tuple(_simplest(used.get(name, ())))) for name in names),
    )


# -- bytes -------------------------------------------------------------------------------------------------------

_Reads = dict[str, list[ByteArea]]  # source name -> areas, from the start of its file


class _Tracer:
    """Follows values down to stored bytes, each node once."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._layouts: dict[Node, tuple[Layout, ...]] = {}
        self._barriers: list[_Reads] = []  # what is read for values that are written out first

    def layout(self, value: Value) -> Layout:
        """Where each element of `value` comes from: entries, or barriers by number."""
        if value.node not in self._layouts:
            self._layouts[value.node] = self._lower(value.node)
        return self._layouts[value.node][value.index]

    def _lower(self, node: Node) -> tuple[Layout, ...]:
        if isinstance(node.op, Stored):
            entry = self._entries[node.op.name]
            return (pieces.whole(Source(entry.name), entry.type.shape, entry.strides),)
        args = [self.layout(arg) for arg in node.args]
        if getattr(node.op, "kernel", None) is not None:  # new values: any may depend on any
            self._barriers.append(_merged(map(self.reads, args)))
            return tuple(pieces.whole(Source(len(self._barriers) - 1), kind.shape) for kind in node.types)
        try:
            return node.op.lower(*args)
        except Fragmented:
            return node.op.lower(*map(self._barrier, args))

    def _barrier(self, layout: Layout) -> Layout:
        self._barriers.append(self.reads(layout))
        return pieces.whole(Source(len(self._barriers) - 1), layout.shape)

    def reads(self, layout: Layout) -> _Reads:
        """The bytes that `layout` is made of."""
        found: list[_Reads] = []
        for copy in transfers(layout):
            key = copy.source.key
            found.append(self._barriers[key] if isinstance(key, int) else {key: [_area(copy, self._entries[key])]})
        return _merged(found)


def _merged(reads: Iterable[_Reads]) -> _Reads:
    result: _Reads = {}
    for one in reads:
        for name, areas in one.items():
            result.setdefault(name, []).extend(areas)
    return {name: _simplest(areas) for name, areas in result.items()}


def _area(copy: Transfer, entry: Entry) -> ByteArea:
    """What one copy reads, as bytes; loops that read the same again are left out, those that lie end to end joined."""
    bits = entry.type.dtype.bits
    nbytes, loops = copy.run * bits // 8, list[tuple[int, int]]()
    for extent, step in sorted(((f.extent, f.src * bits // 8) for f in copy.loops), key=lambda loop: loop[1]):
        if step == 0:
            continue
        if not loops and step <= nbytes:
            nbytes += (extent - 1) * step
        elif loops and step == loops[-1][0] * loops[-1][1]:
            loops[-1] = (loops[-1][0] * extent, loops[-1][1])
        else:
            loops.append((extent, step))
    return ByteArea(entry.offset + copy.src * bits // 8, nbytes, tuple(reversed(loops)))


def _simplest(areas: Sequence[ByteArea]) -> list[ByteArea]:
    """The same bytes in fewer areas: neighbours joined, and one range where they fill it together."""
    distinct = sorted(set(areas))
    joined: list[ByteArea] = []
    for area in (area for area in distinct if not area.loops):
        if joined and area.start <= joined[-1].start + joined[-1].nbytes:
            end = max(joined[-1].start + joined[-1].nbytes, area.start + area.nbytes)
            joined[-1] = joined[-1]._replace(nbytes=end - joined[-1].start)
        else:
            joined.append(area)
    strided = [area for area in distinct if area.loops]
    if not strided:
        return joined
    result = [*joined, *strided]
    low = min(area.start for area in result)
    total = sum(area.nbytes * prod(extent for extent, _ in area.loops) for area in result)
    shifted = [Area(area.start - low, area.nbytes, area.loops) for area in result]
    if covers(total, shifted, RunBudget()) is None:
        return [ByteArea(low, total)]
    return sorted(result)


# -- ops ---------------------------------------------------------------------------------------------------------


def _program(value: Value) -> tuple[str, list[str]]:
    """The ops that make `value`, each once, in an order in which they can run; and the sources s0, s1, ... of it."""
    sources: dict[str, int] = {}
    numbers: dict[Node, int] = {}
    lines: list[str] = []

    def visit(node: Node) -> None:
        if node in numbers:
            return
        if isinstance(node.op, Stored):
            sources.setdefault(node.op.name, len(sources))
            return
        for arg in node.args:
            visit(arg.node)
        numbers[node] = len(numbers)
        lines.append(f"%{numbers[node]} = {_op_text(node.op)} {' '.join(_references(node.args, sources, numbers))}")

    visit(value.node)
    if lines and len(value.node.types) > 1:
        lines.append(_reference(value, sources, numbers))
    return "\n".join(lines), list(sources)


def _references(args: Sequence[Value], sources: Mapping[str, int], numbers: Mapping[Node, int]) -> Iterator[str]:
    """The arguments; sources that follow each other as `s0..s7`."""
    run: list[int] = []
    for arg in args:
        op = arg.node.op
        if isinstance(op, Stored):
            number = sources[op.name]
            if run and number == run[-1] + 1:
                run.append(number)
                continue
            yield from _run_text(run)
            run = [number]
            continue
        yield from _run_text(run)
        run = []
        yield _reference(arg, sources, numbers)
    yield from _run_text(run)


def _run_text(run: Sequence[int]) -> Iterator[str]:
    if run:
        yield f"s{run[0]}" if len(run) == 1 else f"s{run[0]}..s{run[-1]}"


def _reference(value: Value, sources: Mapping[str, int], numbers: Mapping[Node, int]) -> str:
    if isinstance(value.node.op, Stored):
        return f"s{sources[value.node.op.name]}"
    number = f"%{numbers[value.node]}"
    return f"{number}.{value.index}" if len(value.node.types) > 1 else number


def _op_text(op: Op) -> str:
    given = [f"{f.name}={getattr(op, f.name)}" for f in fields(op)] if is_dataclass(op) else list[str]()
    return escape(f"{type(op).__name__}({', '.join(given)})")


# -- what people see ---------------------------------------------------------------------------------------------


def describe_provenance(plan: Plan, names: Sequence[str] = ()) -> list[dict[str, object]]:
    """The provenance of the tensors called `names` (aliases too), of all if there are none, as JSON values.

    Raises:
        ProvenanceError: there is no such tensor, or the plan does not say where its tensors come from.
    """
    origin = plan.origin
    if origin is None or (plan.head.tensors and not origin.traces):
        raise ProvenanceError(f"{plan.name}: does not say where its tensors come from; compile it again")
    numbers = {tensor.name: number for number, tensor in enumerate(plan.head.tensors)}
    aliases = dict(plan.head.aliases)
    chosen = [aliases.get(name, name) for name in names] or list(numbers)
    for name in chosen:
        if name not in numbers:
            near = ", ".join(get_close_matches(name, numbers, n=3))
            raise ProvenanceError(f"{plan.name}: has no tensor {name!r}{f'; near are {near}' if near else ''}")
    return [_described(plan, numbers[name], origin.sources, origin.traces[numbers[name]]) for name in chosen]


def _described(plan: Plan, number: int, sources: Sequence[PlanSource], trace: Trace) -> dict[str, object]:
    tensor = plan.head.tensors[number]
    return {
        "tensor": tensor.name,
        "type": str(tensor.type),
        "rules": list(trace.rules),
        "program": trace.program.splitlines(),
        "sources": [
            {
                "name": sources[source].name,
                "type": str(sources[source].type),
                "file": plan.head.files[sources[source].file].name,
                "file_sha256": plan.head.files[sources[source].file].content_digest or None,
                "bytes": [
                    {"start": area.start, "nbytes": area.nbytes, "loops": [list(loop) for loop in area.loops]}
                    for area in areas
                ],
            }
            for source, areas in trace.sources
        ],
    }


def show_provenance(plan: Plan, names: Sequence[str] = ()) -> Iterator[str]:
    """The same as lines of text. Raises `ProvenanceError`."""
    described = {str(one["tensor"]): one for one in describe_provenance(plan, names)}
    origin = plan.origin
    assert origin is not None, "described above"
    for tensor, trace in zip(plan.head.tensors, origin.traces, strict=True):
        if tensor.name not in described:
            continue
        yield f"tensor {escape(tensor.name)} : {tensor.type}"
        yield from (f"  rule {escape(rule)}" for rule in trace.rules)
        yield from (f"  {escape(line)}" for line in trace.program.splitlines())
        for place, (number, areas) in enumerate(trace.sources):
            source = origin.sources[number]
            file = plan.head.files[source.file]
            ranges = ", ".join(map(_range_text, areas)) or "nothing"
            digest = f" sha256 {file.content_digest}" if file.content_digest else ""
            yield f"  s{place} = {escape(source.name)} : {source.type} in {escape(file.name)} bytes {ranges}{digest}"


def _range_text(area: ByteArea) -> str:
    loops = "".join(f" ({extent} step {step})" for extent, step in area.loops)
    return f"{area.start}-{area.start + area.nbytes}{loops}"
