"""What a variant's plan is made of, as named parts: their digest is the action key, their difference a reason.

Short values stand as they are, so that a reason can say from what to what; long ones as digests. Nothing here depends
on where a file lies, on time, user or environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loadplan.cache import canonical_json, digest_json
from loadplan.compiler.build_cache import BuildCache
from loadplan.compiler.build_code import compiler_digest, load_python_file, transformers_version
from loadplan.compiler.build_file import BuildFileError, Project, Variant
from loadplan.compiler.build_lock import Lock
from loadplan.compiler.checkpoint import Checkpoint
from loadplan.compiler.checkpoint_facts import CheckpointFacts, read_facts
from loadplan.compiler.op_code import op_code_digest
from loadplan.compiler.pipeline import choose_recipe, model_dtype, provenance, signature_of_config, without_floats
from loadplan.compiler.read_folder import read_checkpoint
from loadplan.compiler.read_index import read_json
from loadplan.compiler.recipe import Recipe, plain
from loadplan.compiler.registry import parse_config
from loadplan.compiler.signature import Signature, SignatureError
from loadplan.compiler.target import Target
from loadplan.runtime.location import LocationError
from loadplan.runtime.plan_format import FORMAT

_SIGNATURE, _OUTLINE = "signature", "outline"  # blobs of actions
_SHORT = 40  # characters that are worth showing


@dataclass(frozen=True, slots=True)
class Outline:
    """A signature as far as recipes and keys need it: without its tensors, which take long to read."""

    signature: Signature | None
    digest: str  # of the whole one; why there is none, without one
    note: str
    key: str  # where the whole one is filed

    def to_json(self) -> dict[str, object]:
        """The value as JSON, without the key."""
        found = None if self.signature is None else self.signature.to_json()
        return {"signature": found, "digest": self.digest, "note": self.note}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a variant's plan is made of."""

    facts: CheckpointFacts
    is_here: bool  # the checkpoint is on this machine; else its facts come from the lock file
    recipe: Recipe
    outline: Outline
    target: Target
    parts: Mapping[str, str]  # part -> value or digest

    @property
    def key(self) -> str:
        """The action key: equal for equal parts, wherever the files lie."""
        return digest_json({"plan": dict(self.parts)})


@dataclass(frozen=True, slots=True)
class Sources:
    """The inputs themselves, read whole: what compiling and proving take."""

    checkpoint: Checkpoint
    recipe: Recipe
    signature: Signature | None
    target: Target


class InputReader:
    """Reads the inputs of a project's variants; each checkpoint and signature once."""

    def __init__(self, project: Project, cache: BuildCache, lock: Lock) -> None:
        self._project, self._cache, self._lock = project, cache, lock
        self._facts: dict[str, tuple[CheckpointFacts, bool]] = {}
        self._outlines: dict[str, Outline] = {}
        for path in project.recipes:
            load_python_file(path)

    def read(self, variant: Variant) -> Inputs:
        """The inputs of `variant`.

        Raises:
            LocationError, CheckpointError: there is no such checkpoint, or it is damaged.
            CompileError, BuildFileError: recipe or signature cannot be had.
        """
        facts, is_here = self.facts(variant)
        outline = self._outline(variant, facts)
        recipe = self._recipe(variant.options.recipe, facts, outline.signature)
        parts = {
            "loadplan": compiler_digest(),
            "plan format": str(FORMAT),
            "recipe": recipe.digest,
            "code of ops": op_code_digest(recipe),
            "signature": outline.digest,
            **_checkpoint_parts(facts),
            **_target_parts(variant.target),
            **dict(_more_parts(facts, recipe, outline.signature, variant.target)),
        }
        return Inputs(facts, is_here, recipe, outline, variant.target, parts)

    def facts(self, variant: Variant) -> tuple[CheckpointFacts, bool]:
        """The facts of the variant's checkpoint, and whether it is on this machine."""
        if variant.checkpoint not in self._facts:
            try:
                found = read_facts(variant.source, self._cache.headers), True
            except LocationError as error:
                locked = self._lock.find(variant)
                if locked is None:
                    raise LocationError(f"{error}; and {self._lock.path.name} has no {variant.checkpoint}") from error
                found = locked.facts, False
            self._facts[variant.checkpoint] = found
        return self._facts[variant.checkpoint]

    def sources(self, variant: Variant, inputs: Inputs) -> Sources:
        """All that `inputs` are the facts of. Raises `BuildFileError` when it changed since."""
        checkpoint = read_checkpoint(variant.source)
        if CheckpointFacts.of(checkpoint) != inputs.facts:
            raise BuildFileError(f"{variant.label}: {variant.source} changed during the build; run again")
        return Sources(checkpoint, inputs.recipe, self._signature(variant, inputs), inputs.target)

    def _signature(self, variant: Variant, inputs: Inputs) -> Signature | None:
        """The whole signature that `inputs.outline` is of."""
        if inputs.outline.signature is None:
            return None
        if not inputs.outline.key:
            return self._from_file(variant.options.signature)
        data = (self._cache.fetch(inputs.outline.key) or {}).get(_SIGNATURE)
        if data is not None:
            return Signature.from_json(json.loads(data))
        signature, _ = signature_of_config(inputs.facts.outline(), inputs.target)  # filed, and gone meanwhile
        if signature is None or signature.digest != inputs.outline.digest:
            raise BuildFileError(f"{variant.label}: the model's signature changed during the build; run again")
        return signature

    def _from_file(self, name: str) -> Signature:
        return Signature.of(read_json(self._project.folder / name, name, "config"))

    def _outline(self, variant: Variant, facts: CheckpointFacts) -> Outline:
        wanted = variant.options.signature
        if wanted == "recipe":
            return Outline(None, "", "", "")
        if wanted.endswith(".json"):
            signature = self._from_file(wanted)
            return Outline(signature, signature.digest, "", "")
        outline = self._outline_of_config(facts, variant.target)
        if outline.signature is None and wanted == "transformers":
            raise BuildFileError(f'{variant.label}: signature = "transformers", but there is {outline.note}')
        return outline

    def _outline_of_config(self, facts: CheckpointFacts, target: Target) -> Outline:
        """What the model wants, or why it is not known; filed in the cache, so that torch is not needed again.

        Raises:
            CompileError: transformers knows the class, and cannot build it from this config.
        """
        checkpoint = facts.outline()
        key = signature_key(facts, target)
        if key not in self._outlines:
            found = _parse_outline(self._cache.fetch_one(key, _OUTLINE), key)
            if found is None:
                signature, note = signature_of_config(checkpoint, target)
                whole = b"" if signature is None else canonical_json(signature.to_json())
                found = _outline_of(signature, note, key)
                self._cache.put(key, {_SIGNATURE: whole, _OUTLINE: canonical_json(found.to_json())}, {})
            self._outlines[key] = found
        return self._outlines[key]

    def _recipe(self, name: str, facts: CheckpointFacts, signature: Signature | None) -> Recipe:
        path, separator, attribute = name.rpartition(":")
        if not separator:
            return choose_recipe(None if name == "auto" else name, facts.outline(), signature)
        found = getattr(load_python_file(self._project.folder / Path(path)), attribute, None)
        recipe = found if isinstance(found, Recipe) or not callable(found) else found(parse_config(facts.parsed_config))
        if not isinstance(recipe, Recipe):
            raise BuildFileError(
                f"recipe {name!r}: {path} has no Recipe, or function that makes one, called {attribute!r}"
            )
        return recipe


def signature_key(facts: CheckpointFacts, target: Target) -> str:
    """The action key of the signature that transformers gives: config, dtype and versions."""
    return digest_json(
        {
            "config": without_floats(dict(facts.parsed_config or {})),
            "dtype": model_dtype(facts.outline(), target),
            "fusions": _shown(plain(target.fusions)),
            "transformers": transformers_version(),
            "loadplan": compiler_digest(),
        }
    )


def _outline_of(signature: Signature | None, note: str, key: str) -> Outline:
    if signature is None:
        return Outline(None, note, note, key)
    outline = replace(signature, tensors=(), ties=(), computed_buffers=(), constants=())
    return Outline(outline, signature.digest, note, key)


def _parse_outline(data: bytes | None, key: str) -> Outline | None:
    if data is None:
        return None
    try:
        match json.loads(data):
            case {"signature": None, "digest": str(digest), "note": str(note)}:
                return Outline(None, digest, note, key)
            case {"signature": dict(signature), "digest": str(digest), "note": str(note)}:
                return Outline(Signature.from_json(signature), digest, note, key)
    except (ValueError, SignatureError):
        return None
    return None


def _checkpoint_parts(facts: CheckpointFacts) -> dict[str, str]:
    """A part a file and one a key of the config, so that a reason names it; notes go into the plan's report."""
    return {
        **{f"header of {f.name}": f"{f.format} {f.size} {f.header_digest}" for f in facts.files},
        **dict(facts.others),
        **{f"config.{key}": _shown(value) for key, value in (facts.parsed_config or {}).items()},
        "notes": digest_json(list(facts.notes)) if facts.notes else "",
    }


def _target_parts(target: Target) -> dict[str, str]:
    """A part an option."""
    fields: Mapping[str, object] = {name: getattr(target, name) for name in type(target).__dataclass_fields__}
    return {name: _shown(plain(value)) for name, value in fields.items()}


_SAID = {"checkpoint", "index and config", "config", "recipe", "signature", "target", "format"}


def _more_parts(
    facts: CheckpointFacts, recipe: Recipe, signature: Signature | None, target: Target
) -> Iterator[tuple[str, str]]:
    """What else the compiler writes into a plan as its provenance, beyond what the other parts say in more detail."""
    for part, digest in provenance(facts.outline(), recipe, signature, target).items():
        if part not in _SAID:
            yield f"provenance: {part}", digest


def _shown(value: object) -> str:
    text = json.dumps(without_floats(value), sort_keys=True)
    return text if len(text) <= _SHORT else digest_json(without_floats(value))
