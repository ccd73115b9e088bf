"""The compiler, read aloud: read, route, build, match, shard, fuse, lower, assemble, prove."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loadplan.cache.digest import digest_bytes, digest_json
from loadplan.compiler.build_graph import build_graph
from loadplan.compiler.checkpoint import Checkpoint
from loadplan.compiler.compose_recipe import compose_recipe
from loadplan.compiler.fuse_targets import fuse_targets, rules_digest
from loadplan.compiler.lower_graph import Chains, Lowering, lower_rank
from loadplan.compiler.match_targets import Matched, match_targets
from loadplan.compiler.problem import CompileError, Problem
from loadplan.compiler.provenance import trace_values
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import find_recipe, known_recipes, parse_config
from loadplan.compiler.route_names import Conversion, Routing, route_names
from loadplan.compiler.shard_targets import shard_targets
from loadplan.compiler.signature import Signature, SignatureError, UnknownArchitecture
from loadplan.compiler.target import Target
from loadplan.runtime.check_plan import check_head, check_section
from loadplan.runtime.dtype import DType
from loadplan.runtime.fusion import FusionError
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import Head, ModelRecord, Origin, PlanFile, PlanSource, PlanTensor, Report, Section
from loadplan.runtime.plan_format import FORMAT

if TYPE_CHECKING:
    from torch import nn


def compile_plan(
    checkpoint: str | Path | Checkpoint,
    recipe: Recipe | str | None = None,
    signature: Signature | nn.Module | Mapping[str, object] | Literal["recipe"] | None = None,
    target: Target | None = None,
) -> Plan:
    """The plan that loads `checkpoint` as `recipe`, `signature` and `target` say. Reads headers only.

    Args:
        checkpoint: a folder, file, index or `pkg://PACKAGE/SUBFOLDER`, or what `read_checkpoint` gave.
        recipe: a recipe or the name of one; None finds it by the class and model type in config.json, and takes names
            as they are when there is none.
        signature: what the model wants: a `Signature`, a module (on the meta device), or name -> (shape, dtype). The
            original model, also where `target` says that modules of it are fused.
            `"recipe"` wants whatever the recipe makes. None asks transformers for the class in config.json, and is
            `"recipe"` when transformers is not installed or does not know it; the report then says so.
        target: dtype, ranks and strictness; None is one rank, dtypes as the signature declares them.

    Raises:
        LocationError: there is no checkpoint.
        CheckpointError: its files are damaged or contradict each other.
        CompileError: recipe, signature and target do not account for every tensor exactly once; lists all problems.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else read_checkpoint(checkpoint)
    wanted = target or Target()
    model, notes = _choose_signature(signature, source, wanted)
    return compile_parts(source, choose_recipe(recipe, source, model), model, wanted, notes)


def _choose_signature(
    signature: Signature | nn.Module | Mapping[str, object] | str | None, checkpoint: Checkpoint, target: Target
) -> tuple[Signature | None, tuple[str, ...]]:
    """What the model wants, and notes for the report."""
    if isinstance(signature, str):
        if signature != "recipe":
            raise CompileError([Problem("option", f"signature={signature!r}: the only text is 'recipe'")])
        return None, ()
    if isinstance(signature, Signature):
        return signature, ()
    if isinstance(signature, Mapping):
        return Signature.of(signature), ()
    if signature is not None:
        try:
            return Signature.from_module(signature, target.fusion_config), ()
        except FusionError as error:
            raise CompileError([Problem("option", str(error))]) from error
    model, note = signature_of_config(checkpoint, target)
    return model, (note,) if note else ()


def choose_recipe(recipe: Recipe | str | None, checkpoint: Checkpoint, signature: Signature | None = None) -> Recipe:
    """The recipe that is meant, for the class of `signature` where that is another one than config.json names.

    Raises:
        CompileError: no recipe has the given name.
    """
    config = parse_config(_config_for(checkpoint, signature))
    if isinstance(recipe, str):
        found = find_recipe(recipe, config=config)
        if found is None:
            near = get_close_matches(recipe, known_recipes(), n=3)
            hint = f"; near are {', '.join(near)}" if near else ""
            raise CompileError([Problem("option", f"no recipe is called {recipe!r}{hint}", (recipe,))])
        return found
    if recipe is None and signature is not None and signature.submodels:
        return compose_recipe(signature, config)
    return recipe or find_recipe(config=config) or Recipe()


def _config_for(checkpoint: Checkpoint, signature: Signature | None) -> Mapping[str, object] | None:
    """config.json as recipes see it: the class that is loaded comes before the one that was saved.

    Only a class with a base model prefix counts: it is one of transformers', whose names say how their tensors are
    called (a bare `LlamaModel` has no `model.` in front).
    """
    config = checkpoint.config
    if config is None or signature is None or not signature.base_model_prefix:
        return config
    saved = config.get("architectures")
    others = [name for name in saved if name != signature.model_class] if isinstance(saved, list) else []
    return {**config, "architectures": [signature.model_class, *others]}


def signature_of_config(checkpoint: Checkpoint, target: Target) -> tuple[Signature | None, str]:
    """What the model in config.json wants; or None, and why it is not known.

    Raises:
        CompileError: transformers knows the class, and cannot build it from this config, or not with these fusions.
    """
    if checkpoint.config is None or "architectures" not in checkpoint.config:
        return None, "no signature: no config.json names an architecture; targets are what the recipe makes"
    try:
        return Signature.from_config(checkpoint.config, model_dtype(checkpoint, target), target.fusion_config), ""
    except FusionError as error:
        raise CompileError([Problem("option", str(error))]) from error
    except UnknownArchitecture as error:
        return None, f"no signature: {error}; targets are what the recipe makes"
    except SignatureError as error:
        message = f"{error}; correct it, or pass a signature ('recipe' for what the recipe makes)"
        raise CompileError([Problem("config", message)]) from error


def model_dtype(checkpoint: Checkpoint, target: Target) -> str | None:
    """The dtype to build the model in: the target's, the config's (None), or that of the first weight stored."""
    config = checkpoint.config or {}
    if target.dtype is not None:
        return _torch_name(target.dtype)
    if config.get("dtype") or config.get("torch_dtype"):
        return None
    floats = (entry.type.dtype for _, entry in sorted(checkpoint.entries.items()) if entry.type.dtype.is_float)
    first = next(floats, None)
    return None if first is None else _torch_name(first)


def _torch_name(dtype: DType) -> str:
    return {DType.F16: "float16", DType.BF16: "bfloat16", DType.F32: "float32", DType.F64: "float64"}[dtype]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What is to be loaded: every target with its value, and how it is cut over ranks."""

    routing: Routing
    matched: Matched
    tensors: tuple[PlanTensor, ...]


def resolve(checkpoint: Checkpoint, recipe: Recipe, signature: Signature | None, target: Target) -> Resolved:
    """The front half of the compiler: names, ops, coverage, ranks. Raises `CompileError` with every problem."""
    config = parse_config(checkpoint.config)
    declared = dict(signature.tensors) if signature else {}
    prefix = signature.base_model_prefix if signature else ""
    routing = route_names(tuple(sorted(checkpoint.entries)), recipe.rules, declared if signature else None, prefix)
    products, misfits, problems = build_graph(routing, checkpoint.entries, declared, config)
    matched = match_targets(products, _targets_of((*routing.broken, *misfits), declared), signature, recipe, target)
    tensors, unsharded = shard_targets(matched, recipe, target)
    problems = [*routing.problems, *problems, *matched.problems, *unsharded]
    problems += _refused_fusions(signature, target)
    if problems:
        raise CompileError(problems)
    if signature is None or not signature.fusions:
        return Resolved(routing, matched, tuple(tensors))
    fused, made, problems = fuse_targets(matched, tensors, signature, config)
    if problems:
        raise CompileError(problems)
    return Resolved(routing, fused, made)


def _refused_fusions(signature: Signature | None, target: Target) -> list[Problem]:
    """Fusions that are asked for, and that the signature does not have."""
    asked = {name for name, value in (target.fusion_config or {}).items() if value is not False}
    found = {one.family for one in signature.fusions} if signature else set()
    if target.fusions is None or asked == found:
        return []
    if signature is None or not signature.model_class:
        why = "they are found in a model, and none is known: pass it as signature, as a module on the meta device"
    else:
        why = f"the signature was made with {sorted(found) or 'none'}: make it with these, or pass the module itself"
    return [Problem("option", f"fusions {sorted(asked)}: {why}")]


def compile_parts(
    checkpoint: Checkpoint,
    recipe: Recipe,
    signature: Signature | None,
    target: Target,
    notes: tuple[str, ...] = (),
) -> Plan:
    """As `compile_plan`, with every part given; `notes` go into the report."""
    resolved = resolve(checkpoint, recipe, signature, target)
    sections, chains = _lower(checkpoint, resolved, target)
    head = Head(
        files=tuple(
            PlanFile(file.name, file.size, file.format, file.guards, file.header_digest) for file in checkpoint.files
        ),
        tensors=resolved.tensors,
        aliases=tuple(sorted(resolved.matched.aliases.items())),
        equal_ties=tuple(resolved.matched.equal_ties),
        chains=chains,
        world_size=target.world_size,
        constants=(signature.fused or signature).constants if signature else (),
        model=_record(checkpoint, signature),
        fusions=signature.fusions if signature else (),
        provenance=tuple(provenance(checkpoint, recipe, signature, target).items()),
        report=_report(checkpoint, resolved, (*notes, *_fusion_notes(checkpoint, signature, target))),
    )
    _prove(head, sections)
    return Plan.of(head, sections, _origin(checkpoint, resolved))


def _fusion_notes(checkpoint: Checkpoint, signature: Signature | None, target: Target) -> Iterator[str]:
    """For the report: what was fused, and who asked for it."""
    families = Counter(one.family for one in signature.fusions) if signature else Counter[str]()
    asked_by = "config.json" if target.fusions is None else "the target"
    for family, count in sorted(families.items()):
        yield f"fused by {family}, as {asked_by} asks: {count} modules"
    wanted = (checkpoint.config or {}).get("fusion_config")
    if wanted and not families and target.fusions is None:
        yield f"nothing is fused, though config.json asks for {wanted}: the signature was made without fusions"


def _record(checkpoint: Checkpoint, signature: Signature | None) -> ModelRecord | None:
    """What builds the model again when it is loaded, with what the checkpoint says about generating with it."""
    if signature is None or signature.model is None:
        return None
    return replace(signature.model, generation_config=checkpoint.generation_config)


def _origin(checkpoint: Checkpoint, resolved: Resolved) -> Origin:
    files = {file.name: number for number, file in enumerate(checkpoint.files)}
    numbers = {name: number for number, name in enumerate(sorted(checkpoint.entries))}
    values = (resolved.matched.values[tensor.name] for tensor in resolved.tensors)
    return Origin(
        tuple(PlanSource(e.name, e.type, files[e.file], e.offset) for _, e in sorted(checkpoint.entries.items())),
        tuple(file.header for file in checkpoint.files),
        tuple(sorted(checkpoint.others.items())),
        trace_values(values, checkpoint.entries, resolved.routing, numbers),
    )


def _targets_of(conversions: Iterable[Conversion], declared: Mapping[str, object]) -> list[str]:
    """Target names of `conversions`, lists by all the numbers that the signature has."""
    names: list[str] = []
    for target in (target for conversion in conversions for target in conversion.targets):
        front, star, back = target.partition("*")
        names += [n for n in declared if n.startswith(front) and n.endswith(back)] if star else [target]
    return names


def _lower(
    checkpoint: Checkpoint, resolved: Resolved, target: Target
) -> tuple[tuple[Section, ...], tuple[tuple[DType, ...], ...]]:
    lowering = Lowering(checkpoint.entries)
    layouts = [(tensor, lowering.lower(resolved.matched.values[tensor.name])) for tensor in resolved.tensors]
    files = {file.name: number for number, file in enumerate(checkpoint.files)}
    chains = Chains()
    sections = tuple(
        lower_rank(rank, layouts, lowering, checkpoint.entries, files, chains) for rank in range(target.world_size)
    )
    return sections, tuple(chains.found)


def _prove(head: Head, sections: Iterable[Section]) -> None:
    """Refuse what does not prove. With a valid checkpoint this means that an op moves elements it has not."""
    problems = [Problem("proof", fault) for fault in check_head(head)]
    if not problems:
        problems = [
            Problem("proof", fault, rank=rank)
            for rank, section in enumerate(sections)
            for fault in check_section(head, section, rank)
        ]
    if problems:
        raise CompileError(problems)


def provenance(checkpoint: Checkpoint, recipe: Recipe, signature: Signature | None, target: Target) -> dict[str, str]:
    """What goes into a plan, part by part, as digests: equal parts give an equal plan."""
    beside = {"generation config": digest_bytes(checkpoint.generation_config)} if signature and signature.model else {}
    return {
        "checkpoint": digest_json([[f.name, f.size, f.format, f.header_digest] for f in checkpoint.files]),
        "index and config": digest_json({name: digest_bytes(raw) for name, raw in checkpoint.others.items()}),
        "config": digest_json(without_floats(dict(checkpoint.config or {}))),
        "recipe": recipe.digest,
        "signature": signature.digest if signature else "",
        "target": target.digest,
        **(
            {"fusions": rules_digest(signature, parse_config(checkpoint.config))}
            if signature and signature.fusions
            else {}
        ),
        **beside,
        "format": str(FORMAT),
    }


def without_floats(value: object) -> object:
    """`value` with floats as text, which canonical JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: without_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_floats(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def _report(checkpoint: Checkpoint, resolved: Resolved, notes: tuple[str, ...]) -> Report:
    matched = resolved.matched
    return Report(
        sources=len(checkpoint.entries),
        source_nbytes=sum(entry.type.nbytes for entry in checkpoint.entries.values()),
        targets=len(resolved.tensors),
        target_nbytes=sum(tensor.type.nbytes for tensor in resolved.tensors),
        unused=tuple(matched.unused),
        missing=tuple(sorted(matched.missing)),
        casts=tuple(f"{name}: {stored} -> {wanted}" for name, stored, wanted in matched.casts),
        rules=resolved.routing.rule_uses,
        kept=tuple(f"{name}: the rules would have given {other}" for name, other in resolved.routing.kept),
        notes=(*checkpoint.notes, *notes),
    )
