"""Compile and load the tiny checkpoints of `tiny_models.py`, and compare every tensor with what transformers made of it.

    python tests/oracle/check_oracle.py --models build/oracle [--table FILE.md] [--only KEY ...]

Each variant of each model is compiled twice from its files and config.json: with the rules that the installed
transformers has registered (`loadplan.recipes.bridge`), and with our own library. What the latter loads is saved again
and compared with the files; and as a model it is compared with what `from_pretrained` makes, also once both are saved.
The table, written to FILE.md, has one line for each.

What transformers gets wrong must not be the measure. Of the faults that are known (cases B48: the rotary permutation
of keys with fewer heads than queries), these models meet none, since their configs avoid them; the right results are
written out in `tests/recipes/test_bridge.py` and `tests/compiler/test_ops.py`, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from safetensors.torch import load_file
from torch import nn

from loadplan.cache.error import LoadplanError
from loadplan.compiler import CompileError, Signature, Target, compile_plan, read_checkpoint
from loadplan.compiler.checkpoint import Checkpoint
from loadplan.compiler.read_signature import read_pretrained
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import WeightRenaming
from loadplan.recipes.bridge import bridge_recipe
from loadplan.runtime import load_model, load_state_dict, save_checkpoint
from loadplan.runtime.build_model import build_model

VARIANTS = ("orig", "full")
_WAYS = ("bridge", "own", "saved", "model")
_SHOWN = 3  # problems, or names of tensors, in a reason
_MEASURE = (
    "The measure is the state dict that transformers makes of the same files. Where it is known to be wrong (the rotary "
    "permutation of keys with fewer heads than queries), these models do not go; `tests/recipes/test_bridge.py` compares "
    "with the right result instead. Of the 261 keys of transformers' mapping seven have no model here: `legacy`, which is "
    "for all; five that no class and no type has (`mlcd`, `mlcd_vision`, `xCLIPVisionModel`, `xCLIPTextModel`, "
    "`PPChart2TableModel`); and `timm_wrapper`, which needs timm."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one variant of one model fared; an empty reason is a pass."""

    name: str
    variant: str
    bridge: str
    own: str
    saved: str
    model: str
    tensors: int


@dataclass(frozen=True, slots=True)
class Case:
    """What is compiled, and what must come of it."""

    checkpoint: Checkpoint
    folder: Path
    signature: Signature
    recipe: Recipe  # the bridge's
    target: Target
    wanted: Mapping[str, torch.Tensor]


def find_variants(models: Path, only: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Name and variant of each tiny checkpoint in `models`; a name is a registry key, or `KEY@Class`."""
    for folder in sorted(models.iterdir()):
        chosen = not only or folder.name in only or folder.name.partition("@")[0] in only
        if chosen and (folder / "runtime").is_dir():
            yield from ((folder.name, variant) for variant in VARIANTS if (folder / variant).is_dir())


def check(models: Path, name: str, variant: str) -> Outcome:
    """Both ways of one variant."""
    wanted = load_file(models / name / "runtime" / "model.safetensors")
    try:
        case = _read_case(models / name / variant, name, wanted)
    except LoadplanError as error:
        why = _reason(error)
        return Outcome(name, variant, why, why, why, why, len(wanted))
    ways = _compare(case, case.recipe), _compare(case, None), _save(case), _compare_models(case)
    return Outcome(name, variant, *ways, len(wanted))


def _read_case(folder: Path, name: str, wanted: Mapping[str, torch.Tensor]) -> Case:
    checkpoint = read_checkpoint(folder)
    model = build_model(checkpoint.config or {})
    if name == "MtpModel":
        return _read_extra_layers(folder, checkpoint, model, wanted)
    return Case(checkpoint, folder, read_pretrained(model), bridge_recipe(model), Target(), wanted)


def _read_extra_layers(
    folder: Path, checkpoint: Checkpoint, main: nn.Module, wanted: Mapping[str, torch.Tensor]
) -> Case:
    """The layers behind the last one of `main`, as the model of their own that transformers makes of them.

    As in `MtpModel.from_pretrained`: only their tensors are read, and numbered from 0; embedding and head are `main`'s.
    """
    from transformers.modeling_layers import MtpModel

    config: Any = main.config
    config.num_mtp_layers = 1
    with torch.device("meta"):
        extra = MtpModel(main, 1)  # type: ignore[arg-type]
    first = config.num_hidden_layers
    entries = {name: entry for name, entry in checkpoint.entries.items() if name.startswith(f"model.layers.{first}.")}
    rules = (
        WeightRenaming(f"layers.{first}.", "layers.0.mtp_block."),
        *bridge_recipe(extra).rules,
        *bridge_recipe(main).rules,
    )
    signature = read_pretrained(extra)
    return Case(
        replace(checkpoint, entries=entries), folder, signature, Recipe(rules), Target(missing="ignore"), wanted
    )


def _compare(case: Case, recipe: Recipe | None) -> str:
    """Why `case` by `recipe` (None: our library's) does not give what is wanted; empty if it does."""
    try:
        plan = compile_plan(case.checkpoint, recipe, case.signature, case.target)
        loaded = load_state_dict(plan, case.folder)
    except LoadplanError as error:
        return _reason(error)
    wrong = [name for name, tensor in case.wanted.items() if not _same(loaded.get(name), tensor)]
    more = sorted(loaded.keys() - case.wanted.keys())
    return "; ".join(
        f"{len(names)} {what}: {', '.join(names[:_SHOWN])}"
        for names, what in ((wrong, "tensors differ"), (more, "tensors are not in the model"))
        if names
    )


def _save(case: Case) -> str:
    """Why what was loaded by our own recipe, saved again, is not the checkpoint; empty if it is, byte for byte.

    Where stored tensors are left out, their files are closed up, and the other tensors in them are compared.
    """
    try:
        plan = compile_plan(case.checkpoint, None, case.signature, case.target)
        stored = [file.name for file in plan.head.files]
        before = {name: tensor for file in stored for name, tensor in load_file(case.folder / file).items()}
        with tempfile.TemporaryDirectory() as folder:
            written = save_checkpoint(load_state_dict(plan, case.folder), plan, folder)
            differ = [path.name for path in written if path.read_bytes() != (case.folder / path.name).read_bytes()]
            saved = {name: tensor for file in stored for name, tensor in load_file(Path(folder, file)).items()}
    except LoadplanError as error:
        return _reason(error)
    kept = case.checkpoint.entries.keys() - set(plan.report.unused)
    if kept == before.keys() and differ:
        return f"files differ: {', '.join(differ)}"
    lost = [name for name in sorted(kept) if not _same(saved.get(name), before[name])]
    return f"{len(lost)} tensors are not restored: {', '.join(lost[:_SHOWN])}" if lost else ""


def _compare_models(case: Case) -> str:
    """How the model that our own recipe loads differs from that of `from_pretrained`; empty if in nothing.

    The layers behind the last one have no class of their own that a config could name.
    """
    if case.signature.model is None:
        return ""
    theirs: Any = type(build_model(case.checkpoint.config or {}))
    try:
        plan = compile_plan(case.checkpoint, None, case.signature, case.target)
        one, other = theirs.from_pretrained(case.folder), load_model(plan, case.folder)
        return "; ".join(differences(one, other))
    except LoadplanError as error:
        return _reason(error)


def differences(one: Any, other: Any) -> Iterator[str]:
    """In what two models of transformers differ: tensors bit for bit, ties, configs, mode, and what they save."""
    held, found = (_tensors(model) for model in (one, other))
    if held.keys() != found.keys() or type(one) is not type(other) or other.training:
        yield f"{type(other).__name__} is of another class, with other names, or training"
        return
    if wrong := [name for name, tensor in held.items() if not _same(found[name], tensor)]:
        yield f"{len(wrong)} tensors of the model differ: {', '.join(wrong[:_SHOWN])}"
    if _ties(one) != _ties(other) or one.all_tied_weights_keys != other.all_tied_weights_keys:
        yield "other names are tied"
    if one.config.to_dict() != other.config.to_dict() or one.name_or_path != other.name_or_path:
        yield "the config differs"
    if one.can_generate() and one.generation_config.to_dict() != other.generation_config.to_dict():
        yield "the generation config differs"
    if vars(one).keys() != vars(other).keys():
        yield f"attributes differ: {sorted(vars(one).keys() ^ vars(other).keys())}"
    with tempfile.TemporaryDirectory() as folder:
        one.save_pretrained(f"{folder}/one")
        other.save_pretrained(f"{folder}/other")
        written, wanted = (
            {path.name: path.read_bytes() for path in Path(folder, name).iterdir()} for name in ("other", "one")
        )
    if changed := sorted(name for name in written.keys() | wanted.keys() if written.get(name) != wanted.get(name)):
        yield f"save_pretrained writes others: {', '.join(changed)}"


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers(remove_duplicate=False))}


def _ties(model: nn.Module) -> set[frozenset[str]]:
    owners: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owners.setdefault(id(tensor), []).append(name)
    return {frozenset(names) for names in owners.values() if len(names) > 1}


def _same(loaded: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    if loaded is None or (loaded.shape, loaded.dtype) != (wanted.shape, wanted.dtype):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (loaded, wanted)))


def _reason(error: LoadplanError) -> str:
    if not isinstance(error, CompileError):
        return f"{type(error).__name__}: {error}"
    rest = len(error.problems) - _SHOWN
    return "; ".join(map(str, error.problems[:_SHOWN])) + (f"; and {rest} more" if rest > 0 else "")


def table_of(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown: the counts, then a line for each variant."""
    bridge, own, saved, model = (sum(not getattr(outcome, way) for outcome in outcomes) for way in _WAYS)
    counts = (
        f"{bridge} load bit for bit through the bridge, {own} by our own recipes, {saved} are saved back as they were, "
        f"{model} are the model that from_pretrained gives"
    )
    lines = [
        f"{len(outcomes)} checkpoints: {counts}.",
        "",
        _MEASURE,
        "",
        "| checkpoint | variant | tensors | bridge | own | saved | model | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        reasons = [getattr(outcome, way) for way in _WAYS]
        reason = next(filter(None, reasons), "")
        marks = " | ".join("FAIL" if why else "pass" for why in reasons)
        lines.append(f"| {outcome.name} | {outcome.variant} | {outcome.tensors} | {marks} | {_cell(reason)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str, length: int = 160) -> str:
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= length else flat[:length] + " ..."


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all, write the table, print its first line and the failures; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder that tiny_models.py has filled")
    parser.add_argument("--table", type=Path, help="where to write the table")
    parser.add_argument("--json", type=Path, help="where to write all reasons in full")
    parser.add_argument("--only", nargs="*", default=(), help="registry keys (default: all)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    outcomes = []
    for name, variant in find_variants(options.models, options.only):
        outcome = check(options.models, name, variant)
        outcomes.append(outcome)
        for way in _WAYS:
            if why := getattr(outcome, way):
                print(f"{name}/{variant} ({way}): {why}", flush=True)
    table = table_of(outcomes)
    print(table.partition("\n")[0], f"({time.monotonic() - started:.0f} s)")
    if options.table:
        options.table.write_text(table, encoding="utf-8")
    if options.json:
        rows = [[o.name, o.variant, *(getattr(o, way) for way in _WAYS)] for o in outcomes]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(any(getattr(outcome, way) for outcome in outcomes for way in _WAYS))


if __name__ == "__main__":
    sys.exit(main())
