"""Third pass: products against the signature. Decides what is loaded, as which dtype, under which other names.

Every target gets exactly one product, every source a use; what is left over is waived by recipe or target, or refused.
Ties: one name of a group in the checkpoint gives all of them their tensor; when several are there, all are loaded, and
the runtime joins those that turn out equal (cases B26: equal ones are tied, different ones are not).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from loadplan.compiler.build_graph import Product
from loadplan.compiler.ir import ShapeError, Value, apply
from loadplan.compiler.ops.cast import Cast
from loadplan.compiler.patterns import matches_components
from loadplan.compiler.problem import Problem
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType

_MAX_FRONTS = 8  # an ending that more names share says nothing about what stands before it
_MANY = 4  # unexpected names from which on advice is worth a line
_QUANTISED = frozenset(  # last components of what GPTQ, AWQ, MLX, bitsandbytes, FP8 and compressed-tensors store
    [
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "biases",
        "absmax",
        "quant_map",
        "bitsandbytes__nf4",
        "bitsandbytes__fp4",
        "quant_weight",
        "weight_scale",
        "weight_scale_inv",
        "weight_packed",
        "weight_zero_point",
        "weight_shape",
        "input_scale",
    ]
)


@dataclass(slots=True)
class Matched:
    """What the plan will make, in target name order, and what it will not."""

    values: dict[str, Value] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # other name -> name in `values`
    equal_ties: list[tuple[str, ...]] = field(default_factory=list)  # names in `values` that are one tensor if equal
    unused: list[str] = field(default_factory=list)  # source names, waived
    missing: list[str] = field(default_factory=list)  # target names, waived
    casts: list[tuple[str, DType, DType]] = field(default_factory=list)  # target, stored dtype, dtype in the model
    problems: list[Problem] = field(default_factory=list)
    names: tuple[str, ...] = ()  # all targets, also those with a fault: what an entry of a plan may name


def match_targets(
    products: Sequence[Product], reported: Iterable[str], signature: Signature | None, recipe: Recipe, target: Target
) -> Matched:
    """Match `products`; `reported` are target names whose fault is known, and not reported again."""
    matched = Matched()
    declared = dict(signature.tensors) if signature else None
    gone = set(reported)
    made: dict[str, list[Product]] = defaultdict(list)
    strays: list[Product] = []
    for product in products:
        if declared is None:
            (strays if _waived(product, recipe) else made[product.target]).append(product)
        else:
            (made[product.target] if product.target in declared else strays).append(product)
    matched.names = tuple(sorted({*made, *gone} if declared is None else declared))
    _keep_one(made, matched)
    computed = frozenset(signature.computed_buffers) if signature else frozenset()
    unexpected = _set_aside(strays, computed, declared is not None, recipe, target, matched)
    if signature is not None:
        missing = _tie(made, signature, matched)
        missing = _report_missing([name for name in missing if name not in gone], recipe, target, matched)
        explained = _hint(unexpected, missing, matched)
        if explained * 2 < len(unexpected):
            _advise(strays, unexpected, missing, made, matched)
    for name in sorted(made):
        if made[name]:
            _settle_type(made[name][0], (declared or {}).get(name), recipe, target, matched)
    _check_plans(matched, recipe, target)
    return matched


def _waived(product: Product, recipe: Recipe) -> bool:
    return any(
        matches_components(pattern, name)
        for pattern in recipe.may_be_unused
        for name in (*product.sources, product.target)
    )


def _keep_one(made: Mapping[str, list[Product]], matched: Matched) -> None:
    for name, found in sorted(made.items()):
        if len(found) < 2:
            continue
        sources = tuple(source for product in found for source in product.sources)
        ways = "; ".join(f"{_listed(p.sources)}{f' by {p.rule}' if p.rule else ''}" for p in found)
        rule = next((product.rule for product in found if product.rule), None)
        matched.problems.append(
            Problem("duplicate", f"{name} would be written {len(found)} times: {ways}", (name, *sources), rule)
        )


def _set_aside(
    strays: Sequence[Product],
    computed: frozenset[str],
    signed: bool,
    recipe: Recipe,
    target: Target,
    matched: Matched,
) -> list[str]:
    """Products without a target in the model: waived, or unexpected (returned)."""
    unexpected: list[str] = []
    for product in strays:
        ignored = target.unexpected == "ignore" or product.target in computed or _waived(product, recipe)
        if ignored or not signed:
            matched.unused.extend(product.sources)
            continue
        unexpected.append(product.target)
        named = "" if product.sources == (product.target,) else f" (from {_listed(product.sources)})"
        matched.problems.append(
            Problem("unexpected", f"the model has no {product.target}{named}", product.sources, product.rule)
        )
    matched.unused.sort()
    return unexpected


def _tie(made: Mapping[str, list[Product]], signature: Signature, matched: Matched) -> list[str]:
    """Names without a product that no tie covers."""
    group_of = {name: group for group in signature.ties for name in group}
    for group in signature.ties:
        present = tuple(name for name in group if made.get(name))
        matched.aliases.update({name: present[0] for name in group if present and name not in present})
        if len(present) > 1:
            matched.equal_ties.append(present)
    absent = [name for name, _ in signature.tensors if not made.get(name) and name not in matched.aliases]
    return [name for name in absent if group_of.get(name, (name,))[0] == name]


def _report_missing(names: Sequence[str], recipe: Recipe, target: Target, matched: Matched) -> list[str]:
    refused: list[str] = []
    for name in names:
        if target.missing == "ignore" or any(matches_components(p, name) for p in recipe.may_be_missing):
            matched.missing.append(name)
            continue
        refused.append(name)
        matched.problems.append(Problem("missing", f"no source tensor becomes {name}", (name,)))
    return refused


def _hint(unexpected: Sequence[str], missing: Sequence[str], matched: Matched) -> int:
    """One more line when one change of prefix explains what does not fit (cases B15); the number of names it would fit."""
    fronts: dict[str, set[str]] = defaultdict(set)  # rest of a missing name -> what stands before it
    for name in missing:
        parts = name.split(".")
        for depth in range(len(parts)):
            fronts[".".join(parts[depth:])].add(".".join(parts[:depth]))
    changes: Counter[tuple[str, str]] = Counter()
    for name in unexpected:
        parts = name.split(".")
        for depth in range(len(parts)):
            old, rest = ".".join(parts[:depth]), ".".join(parts[depth:])
            found = [new for new in fronts.get(rest, ()) if "." in rest or not (old and new)]
            if found:
                changes.update((old, new) for new in found if len(found) <= _MAX_FRONTS)
                break
    if not changes:
        return 0
    (old, new), count = max(changes.items(), key=lambda item: (item[1], item[0]))
    if old and new:
        rule = f"WeightRenaming({f'^{old}.'!r}, {f'{new}.'!r})"
    else:
        rule = f"PrefixChange(prefix_to_{'remove' if old else 'add'}={old or new!r})"
    matched.problems.append(
        Problem(
            "unexpected",
            f"{len(unexpected)} names are unexpected and {len(missing)} are missing; "
            f"the rule {rule} would make {count} of them fit",
        )
    )
    return count


def _advise(
    strays: Sequence[Product],
    unexpected: Iterable[str],
    missing: Sequence[str],
    made: Mapping[str, Sequence[Product]],
    matched: Matched,
) -> None:
    """One more line on what to do about many names that do not fit: quantised, of another class, or a part too many."""
    strangers = frozenset(unexpected)
    refused = {source for product in strays if product.target in strangers for source in product.sources}
    if len(refused) < _MANY:
        return
    packed = sorted({name for name in refused if name.rpartition(".")[2] in _QUANTISED})
    if packed:
        endings = ", ".join(sorted({name.rpartition(".")[2] for name in packed}))
        message = (
            f"the checkpoint is quantised: {len(packed)} names end in {endings}, and neither the recipe nor the model's "
            "class takes them; signature='recipe' carries them as they are"
        )
    elif missing:
        message = (
            f"the checkpoint is not that of this class: {len(refused)} of its names are unexpected and {len(missing)} are "
            "missing; pass the class that it was saved from as signature (a module on the meta device), or 'recipe' to "
            "take the names as they are"
        )
    else:
        kept = {source for products in made.values() for product in products for source in product.sources}
        waivers = _waivers(refused, kept)
        if not waivers:
            return
        message = (
            f"the model takes {len(kept)} of the checkpoint's tensors, and {len(refused)} are left; if it is meant to do "
            f"without them, say so in the recipe: may_be_unused={waivers!r}"
        )
    matched.problems.append(Problem("unexpected", message))


def _waivers(refused: Iterable[str], kept: Iterable[str]) -> tuple[str, ...]:
    """Name components that all of `refused` and none of `kept` have one of; empty if there are none."""
    known = {part for name in kept for part in name.split(".")}
    left = {frozenset(part for part in name.split(".") if part not in known and not part.isdigit()) for name in refused}
    found: list[str] = []
    while left:
        counts = Counter(part for parts in left for part in parts)
        if not counts or frozenset() in left:
            return ()
        best = min(counts, key=lambda part: (-counts[part], part))
        found.append(best)
        left = {parts for parts in left if best not in parts}
    return tuple(sorted(found))


def _settle_type(
    product: Product, declared: TensorType | None, recipe: Recipe, target: Target, matched: Matched
) -> None:
    """Check the shape, cast to the dtype that is wanted, and take the product in."""
    name, value = product.target, product.value
    if declared is not None and value.type.shape != declared.shape:
        message = f"{name} is {value.type} in the checkpoint ({_listed(product.sources)}), the model has {declared}"
        matched.problems.append(Problem("shape", message, (name, *product.sources), product.rule))
        return
    stored = value.type.dtype
    wanted = _wanted_dtype(name, stored, declared, recipe, target)
    if wanted != stored:
        try:
            (value,) = apply(Cast(wanted), value)
        except ShapeError as error:
            matched.problems.append(Problem("dtype", f"{name}: {error}", (name, *product.sources), product.rule))
            return
        matched.casts.append((name, stored, wanted))
    matched.values[name] = value


def _wanted_dtype(name: str, stored: DType, declared: TensorType | None, recipe: Recipe, target: Target) -> DType:
    """Dtype plan, then the target's dtype, then the signature's; plans and targets concern floating point only."""
    final = declared.dtype if declared is not None else stored
    if not (final.is_float and stored.is_float):
        return final
    for pattern, dtype in (*target.dtype_plan, *recipe.dtype_plan):
        if matches_components(pattern, name):
            return dtype
    return target.dtype or final


def _check_plans(matched: Matched, recipe: Recipe, target: Target) -> None:
    """Refuse a dtype plan entry that concerns no tensor (cases B46): most likely it is misspelled."""
    for pattern, dtype in (*target.dtype_plan, *recipe.dtype_plan):
        if not any(matches_components(pattern, name) for name in matched.names):
            matched.problems.append(unbound("dtype_plan", pattern, str(dtype), matched.names))


def unbound(plan: str, pattern: str, value: str, names: Iterable[str]) -> Problem:
    """The problem of a plan entry that matches nothing, with the nearest names."""
    modules = {name.rpartition(".")[0] or name for name in names} | set(names)
    near = get_close_matches(pattern, sorted(modules), n=3, cutoff=0.4)
    hint = f"; near are {', '.join(near)}" if near else ""
    return Problem("unbound", f"{plan} entry {pattern!r} ({value}) matches no tensor{hint}", (pattern,))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
