"""Second pass: the routed names as an op graph, one value per target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.ir import Binding, Config, Op, ShapeError, Stored, Value, apply
from loadplan.compiler.problem import Problem
from loadplan.compiler.route_names import Conversion, Routing
from loadplan.runtime.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Product:
    """A value, the target it is for, and what made it."""

    target: str
    value: Value
    sources: tuple[str, ...]
    rule: str | None


@dataclass(frozen=True, slots=True)
class _Operands:
    """Tensors on their way through a converter's operations: one tensor, or one list."""

    name: str
    values: tuple[Value, ...]
    is_list: bool


def build_graph(
    routing: Routing, entries: Mapping[str, Entry], declared: Mapping[str, TensorType], config: Config
) -> tuple[list[Product], list[Conversion], list[Problem]]:
    """A product for each routed target, and the conversions whose ops do not fit, with the reasons."""
    stored = {name: apply(Stored(name, entry.type))[0] for name, entry in entries.items()}
    products = [Product(target, stored[source], (source,), None) for source, target in routing.plain]
    problems: list[Problem] = []
    broken: list[Conversion] = []
    for conversion in routing.conversions:
        try:
            made = convert_operands(conversion, stored, declared, config)
        except ShapeError as error:
            message = f"{', '.join(conversion.targets)}: {error}"
            broken.append(conversion)
            problems.append(Problem("shape", message, tuple(conversion.sources()), str(conversion.rule)))
            continue
        sources = tuple(conversion.sources())
        products.extend(Product(target, value, sources, str(conversion.rule)) for target, value in made)
    return products, broken, problems


def convert_operands(
    conversion: Conversion, stored: Mapping[str, Value], declared: Mapping[str, TensorType], config: Config
) -> list[tuple[str, Value]]:
    """Target names with their values. Raises `ShapeError`."""
    targets = conversion.targets
    types = tuple(declared.get(target) for target in targets)
    operands = [
        _Operands(group.pattern, tuple(stored[name] for name in group.sources), group.is_list)
        for group in conversion.groups
    ]
    for op in conversion.rule.operations:
        operands = _step(op, operands, conversion.rule.target_patterns, types, config)
    if len(operands) != len(targets):
        raise ShapeError(f"the operations leave {len(operands)} tensors for {len(targets)} targets")
    named: list[tuple[str, Value]] = []
    for target, operand in zip(targets, operands, strict=True):
        if operand.is_list != ("*" in target):
            left, wanted = ("a list", "one tensor") if operand.is_list else ("one tensor", "a list, for its `*`")
            raise ShapeError(f"the operations leave {left} for {target!r}, which takes {wanted}")
        named.extend((target.replace("*", str(index)), value) for index, value in enumerate(operand.values))
    return named


def _step(
    op: Op,
    operands: list[_Operands],
    targets: tuple[str, ...],
    types: tuple[TensorType | None, ...],
    config: Config,
) -> list[_Operands]:
    """One operation on all operands."""
    if op.spread == "all":
        values = tuple(value for operand in operands for value in operand.values)
        made = _apply(op, values, tuple(operand.name for operand in operands), targets, types, config)
        return _spread_out(op, made, targets)
    if op.spread == "list":
        for operand in operands:
            if not operand.is_list:
                raise ShapeError(f"{op} takes a list, and {operand.name!r} has no `*` that makes one")
        return [
            _Operands(operand.name, _apply(op, operand.values, (operand.name,), targets, types, config), False)
            for operand in operands
        ]
    results: list[_Operands] = []
    for operand in operands:
        made_each = [_apply(op, (value,), (operand.name,), targets, types, config) for value in operand.values]
        if all(len(made) == 1 for made in made_each) and not _makes_list(op):
            results.append(_Operands(operand.name, tuple(made[0] for made in made_each), operand.is_list))
        elif operand.is_list:
            raise ShapeError(f"{op} splits each tensor of the list {operand.name!r}; merge the list first")
        else:
            results.extend(_spread_out(op, made_each[0], targets))
    return results


def _spread_out(op: Op, made: tuple[Value, ...], targets: tuple[str, ...]) -> list[_Operands]:
    """Several results: one list, or one operand each, under the name of its target."""
    if _makes_list(op):
        return [_Operands(targets[0], made, True)]
    names = targets if len(targets) == len(made) else tuple(targets[0] for _ in made)
    return [_Operands(name, (value,), False) for name, value in zip(names, made, strict=True)]


def _makes_list(op: Op) -> bool:
    return getattr(op, "makes_list", False)


def _apply(
    op: Op,
    values: tuple[Value, ...],
    names: tuple[str, ...],
    targets: tuple[str, ...],
    types: tuple[TensorType | None, ...],
    config: Config,
) -> tuple[Value, ...]:
    bound = op.bind(Binding(names, len(targets), types, config), *(value.type for value in values))
    return apply(bound, *values)
