"""Building what loadplan.toml lists: plans, artifacts and their proof, each only when what it is made of changed.

What a step is made of is a mapping of named parts to digests, its key their digest. A record beside each output holds
the parts it was built from; comparing them says whether to build, and why. Plans are also filed in the cache under
their key, so that an output that was lost, or built elsewhere with the same cache, is fetched. Nothing here imports
torch as long as there is nothing to do.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import loadplan.compiler
import loadplan.runtime
from loadplan.cache import Cache, canonical_json, digest_json
from loadplan.cache.digest import digest_bytes
from loadplan.cache.record import find_record, write_record
from loadplan.cache.write_file import make_folder, write_atomically
from loadplan.compiler.build_file import BuildFileError, Project, Variant
from loadplan.compiler.checkpoint import Checkpoint
from loadplan.compiler.patterns import PatternError
from loadplan.compiler.pipeline import (
    choose_recipe,
    compile_parts,
    model_dtype,
    provenance,
    signature_of_config,
    without_floats,
)
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import parse_config
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.runtime.artifact import PLAN_NAME
from loadplan.runtime.location import locate
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan_format import PlanError

_PLAN, _SIGNATURE = "plan", "signature"  # blobs of actions


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a variant's plan is made of."""

    checkpoint: Checkpoint
    recipe: Recipe
    signature: Signature | None
    target: Target
    note: str  # why there is no signature
    parts: Mapping[str, str]  # part -> digest

    @property
    def key(self) -> str:
        """The action key: equal for equal parts, wherever the files lie."""
        return digest_json(dict(self.parts))


@dataclass(frozen=True, slots=True)
class Step:
    """One output of a variant: where it lies, and the record of what it was built from."""

    output: Path
    record: Path

    def reasons(self, parts: Mapping[str, str]) -> list[str]:
        """Why it must be built; empty when it is up to date."""
        held = find_record(self.record)
        if not isinstance(held, dict) or not isinstance(held.get("parts"), dict):
            return ["not done before"]
        before = held["parts"]
        changed = sorted(part for part in {*parts, *before} if parts.get(part) != before.get(part))
        if changed:
            return [f"{part} changed" for part in changed]
        if self.output.name and _state_of(self.output) != held.get("state"):
            return [f"{self.output.name} is missing or damaged"]
        return []

    def write_record(self, parts: Mapping[str, str]) -> None:
        """Note that the output is built from `parts`."""
        make_folder(self.record.parent)
        write_record(self.record, {"parts": dict(parts), "state": _state_of(self.output)})


class Build:
    """The steps of a project. One is made for each run of the build, and reads each file once."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._cache = Cache(project.cache)
        self.inputs = cache(self._inputs)

    # -- plan ----------------------------------------------------------------------------------------------------

    def plan_step(self, variant: Variant) -> Step:
        """The plan file of `variant`."""
        return self._step(variant, f"{variant.label}.loadplan")

    def plan_reasons(self, variant: Variant) -> list[str]:
        """Why the plan must be built; empty when it is up to date."""
        return self.plan_step(variant).reasons(self.inputs(variant).parts)

    def build_plan(self, variant: Variant) -> str:
        """Fetch or compile the plan; returns a line that says what was done.

        Raises:
            CompileError: the parts do not make a plan.
        """
        inputs, step = self.inputs(variant), self.plan_step(variant)
        found = self._cache.fetch(inputs.key) or {}
        plan, how = self._usable(found.get(_PLAN)), "from the cache"
        if plan is None:
            plan, how = self._compile(variant, inputs), "compiled"
            self._cache.put(inputs.key, {_PLAN: plan.to_bytes()}, {"variant": variant.label})
        make_folder(step.output.parent)
        write_atomically(step.output, plan.to_bytes())
        step.write_record(inputs.parts)
        cost = plan.cost(0)
        return (
            f"{how}: {plan.report.sources} sources -> {plan.report.targets} targets, {plan.world_size} ranks, "
            f"rank 0 reads {cost.read_nbytes:,} bytes for {cost.target_nbytes:,}"
        )

    def _usable(self, data: bytes | None) -> Plan | None:
        try:
            return None if data is None else Plan(data)
        except PlanError:
            return None  # of another format: compile again

    def _compile(self, variant: Variant, inputs: Inputs) -> Plan:
        notes = (inputs.note,) if inputs.note else ()
        return compile_parts(inputs.checkpoint, inputs.recipe, inputs.signature, inputs.target, notes)

    def _inputs(self, variant: Variant) -> Inputs:
        options = variant.options
        checkpoint = read_checkpoint(variant.source)
        target = Target(options.dtype, options.tp_size, missing=options.missing, unexpected=options.unexpected)
        signature, note = (None, "") if options.signature == "recipe" else self._signature(checkpoint, target)
        if signature is None and options.signature == "transformers":
            raise BuildFileError(f'{variant.label}: signature = "transformers", but there is {note}')
        recipe = self._recipe(options.recipe, checkpoint, signature)
        parts = provenance(checkpoint, recipe, signature, target)
        parts |= {"signature": parts["signature"] or note, "loadplan": compiler_digest()}
        return Inputs(checkpoint, recipe, signature, target, note, parts)

    def _signature(self, checkpoint: Checkpoint, target: Target) -> tuple[Signature | None, str]:
        """What the model wants; or None, and why it is not known. Filed in the cache, so that torch is not needed again.

        Raises:
            CompileError: transformers knows the class, and cannot build it from this config.
        """
        made_of = {
            "config": without_floats(dict(checkpoint.config or {})),
            "dtype": model_dtype(checkpoint, target),
            "fusions": target.fusions,
            "transformers": _transformers_version(),
            "loadplan": compiler_digest(),
        }
        key = digest_json(made_of)
        found = self._cache.fetch(key) or {}
        if _SIGNATURE in found:
            data = json.loads(found[_SIGNATURE])
            return (None if data["signature"] is None else Signature.from_json(data["signature"])), data["note"]
        signature, note = signature_of_config(checkpoint, target)
        data = {"signature": None if signature is None else signature.to_json(), "note": note}
        self._cache.put(key, {_SIGNATURE: canonical_json(data)})
        return signature, note

    def _recipe(self, name: str, checkpoint: Checkpoint, signature: Signature | None) -> Recipe:
        path, separator, attribute = name.rpartition(":")
        if not separator:
            return choose_recipe(None if name == "auto" else name, checkpoint, signature)
        found = getattr(_load_file(self.project.folder / path), attribute, None)
        recipe = found if isinstance(found, Recipe) or not callable(found) else found(parse_config(checkpoint.config))
        if not isinstance(recipe, Recipe):
            raise BuildFileError(
                f"recipe {name!r}: {path} has no Recipe, or function that makes one, called {attribute!r}"
            )
        return recipe

    # -- artifact ------------------------------------------------------------------------------------------------

    def artifact_step(self, variant: Variant) -> Step:
        """The converted files of `variant`."""
        return self._step(variant, f"{variant.label}.converted")

    def artifact_parts(self, variant: Variant) -> dict[str, str]:
        """What the converted files are made of: the plan, and the bytes of the files it reads."""
        folder = locate(variant.source)
        folder = folder.parent if folder.is_file() else folder
        files = self.inputs(variant).checkpoint.files
        plan = find_record(self.plan_step(variant).record)
        state = plan.get("state") if isinstance(plan, dict) else None
        contents = {f"content of {file.name}": self._cache.files.digest(folder / file.name) for file in files}
        return {"plan": str(state), **contents}

    def artifact_reasons(self, variant: Variant) -> list[str]:
        """Why the files must be converted; empty when they are up to date."""
        step = self.artifact_step(variant)
        reasons = step.reasons(self.artifact_parts(variant))
        return reasons or self._damaged(step.output)

    def _damaged(self, folder: Path) -> list[str]:
        """Converted files that are not as they were written; each is hashed once and then known by its times."""
        files = Plan.open(folder / PLAN_NAME).head.files
        bad = [f.name for f in files if self._cache.files.digest(folder / f.name) != f.content_digest]
        return [f"{name} is damaged" for name in bad]

    def build_artifact(self, variant: Variant) -> str:
        """Convert; returns a line that says what was done."""
        from loadplan.compiler.conversion import convert  # imports torch

        step, parts = self.artifact_step(variant), self.artifact_parts(variant)
        if step.record.is_file() and not (step.output / PLAN_NAME).is_file():
            shutil.rmtree(step.output, ignore_errors=True)  # ours, and damaged
        artifact = convert(self.plan_step(variant).output, variant.source, step.output)
        if parts != self.artifact_parts(variant):
            raise BuildFileError(f"{variant.label}: its files changed while they were converted; run again")
        step.write_record(parts)
        files = artifact.plan.head.files
        return f"converted: {sum(file.size for file in files):,} bytes in {len(files)} files"

    # -- proof ---------------------------------------------------------------------------------------------------

    def proof_step(self, variant: Variant) -> Step:
        """The record that plan and artifact of `variant` were checked."""
        return self._step(variant, f"{variant.label}.loadplan", "verified")

    def proof_parts(self, variant: Variant) -> dict[str, str]:
        """What was checked: the plan, the source bytes, and the converted files."""
        parts = self.artifact_parts(variant)
        if variant.options.convert:
            artifact = find_record(self.artifact_step(variant).record)
            parts["artifact"] = str(artifact.get("state") if isinstance(artifact, dict) else None)
        return parts

    def proof_reasons(self, variant: Variant) -> list[str]:
        """Why the check must run; empty when it passed for what is there now."""
        return self.proof_step(variant).reasons(self.proof_parts(variant))

    def prove(self, variant: Variant) -> str:
        """Load by plan and from the artifact, and compare with the recipe on whole tensors; returns what was checked.

        Raises:
            ProofError: a tensor differs.
        """
        from loadplan.compiler.prove import prove_loads  # imports torch

        inputs = self.inputs(variant)
        artifact = self.artifact_step(variant).output if variant.options.convert else None
        plan = Plan.open(self.plan_step(variant).output)
        parts = self.proof_parts(variant)
        said = prove_loads(plan, artifact, variant.source, inputs)
        self.proof_step(variant).write_record(parts)
        return said

    def _step(self, variant: Variant, output: str, record: str = "built") -> Step:
        folder = self.project.output
        return Step(folder / output, folder / "records" / f"{output}.{record}")


def _state_of(output: Path) -> str:
    """What tells whether an output is there as it was built: the digest of a plan, or of the plan in an artifact."""
    file = output / PLAN_NAME if output.is_dir() else output
    try:
        return digest_bytes(file.read_bytes())
    except OSError:
        return ""


@cache
def compiler_digest() -> str:
    """SHA-256 (hex) of the source of everything that makes a plan: another compiler may make another."""
    folders = [Path(package.__file__ or "").parent for package in (loadplan.compiler, loadplan.runtime)]
    files = sorted(
        (folder.name, path.relative_to(folder).as_posix(), path) for folder in folders for path in folder.rglob("*.py")
    )
    return digest_json([[folder, name, digest_bytes(path.read_bytes())] for folder, name, path in files])


def _transformers_version() -> str:
    """The version that would build the model; empty without one. Asked of the installation: importing it takes seconds."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


@cache
def _load_file(path: Path) -> object:
    """The module in the file at `path`, run once."""
    spec = importlib.util.spec_from_file_location(f"loadplan_recipe_{digest_bytes(str(path).encode())[:12]}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BuildFileError(f"{path}: no such Python file; recipes are given as file.py:NAME")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (PatternError, SyntaxError, ImportError, NameError, TypeError, ValueError) as error:
        raise BuildFileError(f"{path}: {type(error).__name__}: {error}") from error
    return module
