"""Building what loadplan.toml lists: plans, artifacts and their proof, each only when what it is made of changed.

What a step is made of is a mapping of named parts, its key their digest. A record beside each output holds the parts it
was built from; comparing them says whether to build, and why. What was built is also filed in the cache under its key,
so that an output that was lost, or built elsewhere with the same cache or a remote, is fetched. Nothing here imports
torch as long as there is nothing to do.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from math import ceil
from pathlib import Path

from loadplan.cache.digest import digest_json
from loadplan.cache.write_file import make_folder, write_atomically
from loadplan.compiler.build_cache import BuildCache, Progress
from loadplan.compiler.build_code import compiler_digest, converter_digest
from loadplan.compiler.build_file import BuildFileError, Project, Variant
from loadplan.compiler.build_inputs import InputReader, Inputs
from loadplan.compiler.build_lock import LOCK_NAME, Lock, Locked
from loadplan.compiler.build_step import Step
from loadplan.compiler.part_of import PartOf, part_key
from loadplan.compiler.pipeline import compile_parts
from loadplan.runtime.artifact import PLAN_NAME, Artifact
from loadplan.runtime.location import folder_of, locate
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan_format import PlanError

_PLAN = "plan"  # the blob of an action
_LEAST_PARTS = 16  # of a conversion on a cluster: fewer would leave workers idle


class NotAvailable(BuildFileError):
    """Something is to be fetched that neither the cache nor a remote has, or built without its checkpoint."""


class Build:
    """The steps of a project. One is made for each run of the build, and reads each file once."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.cache = BuildCache(project.cache)
        self.lock = Lock(project.folder / LOCK_NAME)
        self._reader = InputReader(project, self.cache, self.lock)
        self._inputs: dict[str, Inputs] = {}

    def inputs(self, variant: Variant) -> Inputs:
        """What the variant's plan is made of."""
        if variant.label not in self._inputs:
            self._inputs[variant.label] = self._reader.read(variant)
        return self._inputs[variant.label]

    # -- plan ----------------------------------------------------------------------------------------------------

    def plan_step(self, variant: Variant) -> Step:
        """The plan file of `variant`."""
        return self._step(variant, "", "plan")

    def plan_path(self, variant: Variant) -> Path:
        """Where it lies."""
        return self.project.output / f"{variant.label}.loadplan"

    def plan_reasons(self, variant: Variant) -> list[str]:
        """Why the plan must be built; empty when it is up to date."""
        return self.plan_step(variant).reasons(self.inputs(variant).parts, self.cache.files)

    def build_plan(self, variant: Variant) -> str:
        """Fetch or compile the plan; returns a line that says what was done.

        Raises:
            CompileError: the parts do not make a plan.
            NotAvailable: the plan is nowhere, and the checkpoint not here.
        """
        inputs = self.inputs(variant)
        with self.cache.local.lease(inputs.key):  # whoever builds it now, others wait for
            plan, how = self._find_plan(inputs), "from the cache"
            if plan is None:
                plan, how = self._compile(variant, inputs), "compiled"
                self.cache.put(inputs.key, {_PLAN: plan.to_bytes()}, {"kind": "plan", "label": variant.label})
        self._write_plan(variant, inputs, plan)
        cost = plan.cost(0)
        return (
            f"{how}: {plan.report.sources} sources -> {plan.report.targets} targets, {plan.world_size} ranks, "
            f"rank 0 reads {cost.read_nbytes:,} bytes for {cost.target_nbytes:,}"
        )

    def _find_plan(self, inputs: Inputs) -> Plan | None:
        data = self.cache.fetch_one(inputs.key, _PLAN)
        try:
            return None if data is None else Plan(data)
        except PlanError:
            return None  # of another format: compile again

    def _open_plan(self, variant: Variant) -> Plan:
        """The plan that was built. Raises `NotAvailable` when what lies there is another."""
        path, record = self.plan_path(variant), self.plan_step(variant).find_record()
        plan = Plan.open(path) if path.is_file() else None
        if plan is None or record is None or plan.digest != record.info.get("plan"):
            raise NotAvailable(f"{path}: is not the plan that was built; run `doit compile:{variant.label}`")
        return plan

    def _write_plan(self, variant: Variant, inputs: Inputs, plan: Plan) -> None:
        path = self.plan_path(variant)
        make_folder(path.parent)
        write_atomically(path, plan.to_bytes())
        self.plan_step(variant).write_record(inputs.parts, [path.name], {"plan": plan.digest}, self.cache.files)

    def _compile(self, variant: Variant, inputs: Inputs) -> Plan:
        if not inputs.is_here:
            raise NotAvailable(
                f"{variant.label}: {variant.source} is not on this machine, and neither cache nor remotes have its plan; "
                "run `doit push` where it is"
            )
        sources = self._reader.sources(variant, inputs)
        notes = (inputs.outline.note,) if inputs.outline.note else ()
        return compile_parts(sources.checkpoint, sources.recipe, sources.signature, sources.target, notes)

    # -- artifact ------------------------------------------------------------------------------------------------

    def artifact_step(self, variant: Variant) -> Step:
        """The converted files of `variant`."""
        return self._step(variant, f"{variant.label}.converted", "artifact")

    def artifact_parts(self, variant: Variant) -> dict[str, str]:
        """What the converted files are made of: the plan, the bytes of the files it reads, and our code."""
        record = self.plan_step(variant).find_record()
        plan = "" if record is None else record.info.get("plan", "")
        contents = {f"content of {name}": digest for name, digest in self.contents(variant).items()}
        return {"plan": plan, "loadplan's conversion": converter_digest(), **contents}

    def contents(self, variant: Variant) -> Mapping[str, str]:
        """The digest of each file of the checkpoint."""
        inputs = self.inputs(variant)
        if not inputs.is_here:
            locked = self.lock.find(variant)
            return {} if locked is None else locked.contents
        folder = folder_of(locate(variant.source))
        return {file.name: self.cache.files.digest(folder / file.name) for file in inputs.facts.files}

    def artifact_reasons(self, variant: Variant) -> list[str]:
        """Why the files must be converted; empty when they are up to date."""
        return self.artifact_step(variant).reasons(self.artifact_parts(variant), self.cache.files)

    def build_artifact(self, variant: Variant, progress: Progress | None = None) -> str:
        """Fetch the converted files, or convert; returns a line that says what was done.

        Raises:
            NotAvailable: they are nowhere, and the checkpoint not here.
            BuildFileError: the checkpoint changed meanwhile.
        """
        parts = self.artifact_parts(variant)
        with self.cache.local.lease(artifact_key(parts)):
            if self._fetch_artifact(variant, parts):
                return f"from the cache: {self._said(variant)}"
            self._convert(variant, parts, progress)
            return f"converted: {self._said(variant)}"

    def _fetch_artifact(self, variant: Variant, parts: Mapping[str, str]) -> bool:
        """Lay out the files that were converted before, here or elsewhere; whether there are any."""
        found = self.cache.find(artifact_key(parts))
        if found is None:
            return False
        self._make_room(variant)
        self.cache.local.materialize(found, self.artifact_step(variant).folder, replace=True)
        self._note_artifact(variant, parts)
        return True

    def _convert(self, variant: Variant, parts: Mapping[str, str], progress: Progress | None) -> None:
        step, plan = self.artifact_step(variant), self._open_plan(variant)
        self._refuse_absent(variant)
        self._make_room(variant)
        if self.project.dask is not None or plan.world_size > 1:
            self._convert_parts(variant, plan, parts, progress)
        else:
            from loadplan.compiler.conversion import convert  # imports torch

            convert(plan, variant.source, step.folder, progress)
            self._refuse_changed(variant, parts)
            files = {path.name: path for path in sorted(step.folder.iterdir())}
            self.cache.put_files(artifact_key(parts), files, {"kind": "converted files", "label": variant.label})
        self._note_artifact(variant, parts)

    def _convert_parts(self, variant: Variant, plan: Plan, parts: Mapping[str, str], progress: Progress | None) -> None:
        """Make the parts that are not made, here or on the workers of the cluster, and lay the whole out."""
        from loadplan.compiler.convert_parts import convert_part, join_parts
        from loadplan.compiler.spread_conversion import spread

        if self.project.dask is None:
            tasks = self.part_tasks(variant, parts, plan.world_size)
            for task in tasks:
                convert_part(task)
        else:
            tasks = self.part_tasks(variant, parts, plan.world_size * ceil(_LEAST_PARTS / plan.world_size))
            spread(self.project.dask, tasks, progress)
        self._refuse_changed(variant, parts)
        blobs = join_parts(self.cache.local, plan, tasks)
        made = self.cache.put_blobs(artifact_key(parts), blobs, {"kind": "converted files", "label": variant.label})
        self.cache.local.materialize(made, self.artifact_step(variant).folder, replace=True)

    def part_tasks(self, variant: Variant, parts: Mapping[str, str], count: int) -> list[PartOf]:
        """The conversion of `variant` in `count` parts; the plan is filed where they find it."""
        plan = self._open_plan(variant)
        key = digest_json({"plan": plan.digest})
        if self.cache.local.fetch(key) is None:
            self.cache.local.put(key, {_PLAN: plan.to_bytes()}, {"kind": "plan", "label": variant.label})
        store, contents = str(self.project.cache.root.resolve()), self.contents(variant)
        return [
            PartOf(store, key, variant.source, contents, artifact_key(parts), converter_digest(), part, count)
            for part in range(count)
        ]

    def part_reasons(self, variant: Variant, rank: int) -> list[str]:
        """Why the part of `rank` must be made for the whole; empty when it, or the whole, is there."""
        reasons = self.artifact_reasons(variant)
        key = artifact_key(self.artifact_parts(variant))
        keys = (key, part_key(key, rank, variant.target.world_size))
        return [] if any(self.cache.local.actions.find(key) is not None for key in keys) else reasons

    def build_part(self, variant: Variant, rank: int) -> str:
        """Make the part of `rank`, unless the whole can be had; returns a line that says what was done."""
        parts = self.artifact_parts(variant)
        with self.cache.local.lease(artifact_key(parts)):  # if it is to be pulled, once
            if self.cache.find(artifact_key(parts)) is not None:
                return "the whole is in the cache"
        from loadplan.compiler.convert_parts import convert_part  # imports torch

        self._refuse_absent(variant)
        plan = self._open_plan(variant)
        convert_part(self.part_tasks(variant, parts, plan.world_size)[rank])
        return "its part is made"

    def _make_room(self, variant: Variant) -> None:
        """Remove what was converted before and lost its plan; anything that is not ours is left alone."""
        step = self.artifact_step(variant)
        if not step.folder.is_dir() or (step.folder / PLAN_NAME).is_file() or not any(step.folder.iterdir()):
            return
        if not step.path.is_file():
            raise BuildFileError(f"{step.folder}: exists and is no artifact; remove it, or choose another build.output")
        shutil.rmtree(step.folder)

    def _refuse_absent(self, variant: Variant) -> None:
        if not self.inputs(variant).is_here:
            raise NotAvailable(
                f"{variant.label}: {variant.source} is not on this machine, and neither cache nor remotes have its "
                "converted files; run `doit push` where it is"
            )

    def _refuse_changed(self, variant: Variant, parts: Mapping[str, str]) -> None:
        if parts != self.artifact_parts(variant):
            raise BuildFileError(f"{variant.label}: its files changed while they were converted; run again")

    def _note_artifact(self, variant: Variant, parts: Mapping[str, str]) -> None:
        step = self.artifact_step(variant)
        names = sorted(path.name for path in step.folder.iterdir())
        step.write_record(parts, names, {}, self.cache.files)

    def _said(self, variant: Variant) -> str:
        files = Artifact.open(self.artifact_step(variant).folder).plan.head.files
        return f"{sum(file.size for file in files):,} bytes in {len(files)} files"

    # -- proof ---------------------------------------------------------------------------------------------------

    def proof_step(self, variant: Variant) -> Step:
        """The record that plan and artifact of `variant` were checked."""
        return self._step(variant, "", "proof")

    def proof_parts(self, variant: Variant) -> dict[str, str]:
        """What was checked: the plan, the source bytes, the converted files, and what checked them."""
        parts = {**self.artifact_parts(variant), "loadplan": compiler_digest()}
        if variant.options.convert:
            parts["converted files"] = self._converted_digest(variant)
        return parts

    def _converted_digest(self, variant: Variant) -> str:
        """What the converted files hold now, whatever was written."""
        step = self.artifact_step(variant)
        if not step.folder.is_dir():
            return ""
        return digest_json({path.name: self.cache.files.digest(path) for path in sorted(step.folder.iterdir())})

    def proof_reasons(self, variant: Variant) -> list[str]:
        """Why the check must run; empty when it passed for what is there now."""
        return self.proof_step(variant).reasons(self.proof_parts(variant), self.cache.files)

    def prove(self, variant: Variant) -> str:
        """Load by plan and from the artifact, and compare with the recipe on whole tensors; returns what was checked.

        Raises:
            ProofError: a tensor differs.
            NotAvailable: it was never checked, and the checkpoint is not here.
        """
        parts = self.proof_parts(variant)
        found = self.cache.find(proof_key(parts))
        said = "" if found is None else f"checked before: {found.info.get('said', '')}"
        if found is None:
            said = self._prove(variant, parts)
            self.cache.put(proof_key(parts), {}, {"kind": "proof", "label": variant.label, "said": said})
        self.proof_step(variant).write_record(parts, [], {}, self.cache.files)
        return said

    def _prove(self, variant: Variant, parts: Mapping[str, str]) -> str:
        from loadplan.compiler.prove import prove_loads  # imports torch

        inputs = self.inputs(variant)
        if not inputs.is_here:
            raise NotAvailable(
                f"{variant.label}: {variant.source} is not on this machine, and nobody pushed that these files were "
                "checked; run `doit verify push` where it is"
            )
        artifact = self.artifact_step(variant).folder if variant.options.convert else None
        said = prove_loads(self._open_plan(variant), artifact, variant.source, self._reader.sources(variant, inputs))
        if parts != self.proof_parts(variant):
            raise BuildFileError(f"{variant.label}: its files changed while they were checked; run again")
        return said

    # -- sharing -------------------------------------------------------------------------------------------------

    def write_lock(self) -> str:
        """Note what the checkpoints are, for machines without them; returns a line that says what was done."""
        found: dict[str, Locked] = {}
        for variant in self.project.variants:
            inputs = self.inputs(variant)
            found[variant.checkpoint] = Locked(variant.written_source, inputs.facts, self.contents(variant))
        changed = self.lock.write(found)
        return f"{LOCK_NAME}: {len(found)} checkpoints, {'written' if changed else 'as it was'}"

    def keys(self, variant: Variant) -> dict[str, str]:
        """The action keys of what is built of `variant`, by kind."""
        inputs = self.inputs(variant)
        found = {"signature": inputs.outline.key} if inputs.outline.key else {}
        found["plan"] = inputs.key
        if variant.options.convert:
            found["converted files"] = artifact_key(self.artifact_parts(variant))
        if not self.proof_reasons(variant):
            found["proof"] = proof_key(self.proof_parts(variant))
        return found

    def push(self, variant: Variant, progress: Progress | None = None) -> str:
        """Give all that is built of `variant` to the remotes that may be written; returns a line that says what went.

        Raises:
            BuildFileError, RemoteError, NotBuilt: as `BuildCache.push`.
        """
        sent = self.cache.push(self.keys(variant).values(), progress)
        return "; ".join(
            f"to {name}: {report.blobs} blobs, {report.nbytes:,} bytes; {report.known_nbytes:,} bytes were there"
            for name, report in sent.items()
        )

    def pull_reasons(self, variant: Variant) -> list[str]:
        """Why something of `variant` is to be fetched; empty when all of it is here."""
        return self.plan_reasons(variant) or (self.artifact_reasons(variant) if variant.options.convert else [])

    def pull(self, variant: Variant) -> str:
        """Lay out plan and converted files from cache or remotes, and build nothing.

        Raises:
            NotAvailable: they have not got them.
        """
        inputs = self.inputs(variant)
        plan = self._find_plan(inputs)
        if plan is None:
            raise NotAvailable(
                f"{variant.label}: neither cache nor remotes have its plan; run `doit push` where it is built"
            )
        self._write_plan(variant, inputs, plan)
        if not variant.options.convert:
            return f"pulled the plan, {plan.report.targets} targets"
        if not self._fetch_artifact(variant, self.artifact_parts(variant)):
            raise NotAvailable(
                f"{variant.label}: neither cache nor remotes have its converted files; run `doit push` where it is built"
            )
        return f"pulled: {self._said(variant)}"

    def _step(self, variant: Variant, folder: str, kind: str) -> Step:
        output = self.project.output
        return Step(output / folder, output / "records" / f"{variant.label}.{kind}")


def artifact_key(parts: Mapping[str, str]) -> str:
    """The action key of converted files."""
    return digest_json({"converted": dict(parts)})


def proof_key(parts: Mapping[str, str]) -> str:
    """The action key of a proof."""
    return digest_json({"proof": dict(parts)})
