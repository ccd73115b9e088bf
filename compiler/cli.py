"""The command line: results on stdout, all else on stderr; exit 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from difflib import unified_diff
from pathlib import Path

from loadplan.cache.digest import digest_file
from loadplan.cache.error import LoadplanError
from loadplan.compiler.cli_cache import add_cache_commands
from loadplan.compiler.cli_files import add_file_commands
from loadplan.compiler.cli_trust import add_trust_commands, describe_signers
from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.problem import CompileError, Problem
from loadplan.compiler.provenance import describe_provenance, show_provenance
from loadplan.compiler.show import show_plan
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.runtime.artifact import Artifact, open_any
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.source_files import FileMismatch, find_files
from loadplan.runtime.trust import verify_contents


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (LoadplanError, OSError) as error:
        if options.verbose:
            raise
        print(f"loadplan: error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loadplan", description="compile checkpoints into load plans")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("compile", help="compile a checkpoint into a plan, reading headers only")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="folder, file, index, or pkg://PACKAGE/SUBFOLDER")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="PLAN", help="plan file to write")
    command.add_argument("--recipe", metavar="NAME", help="name of a recipe (default: by config.json)")
    command.add_argument("--signature", metavar="JSON", type=Path, help="file with name -> [shape, dtype] of the model")
    command.add_argument("--dtype", metavar="DTYPE", help="of floating point tensors (default: as the model has it)")
    command.add_argument("--tp-size", type=int, default=1, metavar="RANKS", help="tensor-parallel ranks (default: 1)")
    command.add_argument(
        "--fusion",
        action="append",
        type=_fusion,
        metavar="NAME[=JSON]",
        help="fuse modules by this family, NAME=false: do not; repeatable (default: as config.json asks)",
    )
    command.add_argument("--allow-missing", action="store_true", help="leave out what no source makes, and report it")
    command.add_argument(
        "--allow-unexpected", action="store_true", help="do not load what the model lacks, and report it"
    )
    command.add_argument("--json", action="store_true", help="print digest, report and costs as JSON")
    command.set_defaults(run=_compile)

    command = commands.add_parser("show", help="print a plan as text")
    command.add_argument("plan", type=Path, metavar="PLAN")
    parts = command.add_mutually_exclusive_group()
    parts.add_argument("--rank", type=int, action="append", metavar="RANK", help="only this rank's copies; repeatable")
    parts.add_argument(
        "--provenance",
        nargs="*",
        metavar="NAME",
        help="where these tensors come from instead (default: all): sources, bytes, rules, ops",
    )
    command.add_argument("--json", action="store_true", help="print digest, report and costs as JSON instead")
    command.set_defaults(run=_show)

    command = commands.add_parser("cost", help="print what loading each rank takes")
    command.add_argument("plan", type=Path, metavar="PLAN")
    command.add_argument("--json", action="store_true", help="print it as JSON")
    command.set_defaults(run=_cost)

    command = commands.add_parser("diff", help="print what differs between two plans; exit 1 if anything does")
    command.add_argument("old", type=Path, metavar="OLD")
    command.add_argument("new", type=Path, metavar="NEW")
    command.set_defaults(run=_diff)

    command = commands.add_parser("check", help="prove a plan again, and compare files with it")
    command.add_argument("plan", type=Path, metavar="PLAN", help="a plan, or the folder of converted files")
    command.add_argument(
        "checkpoint", nargs="?", metavar="CHECKPOINT", help="compare its sizes and headers with the plan"
    )
    command.add_argument(
        "--trusted",
        action="append",
        metavar="KEY",
        help="one of these must have signed it; file or folder of public keys, repeatable",
    )
    command.set_defaults(run=_check)

    add_file_commands(commands)
    add_cache_commands(commands)
    add_trust_commands(commands)
    return parser


def _fusion(text: str) -> tuple[str, object]:
    """The name of a fusion family and its options, from `NAME` or `NAME=JSON`."""
    name, separator, options = text.partition("=")
    try:
        return name, json.loads(options) if separator else True
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{options!r} is not JSON: {error}") from error


def _only_once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CompileError([Problem("option", f"--fusion {', '.join(twice)}: given more than once")])
    return dict(pairs)


def _compile(options: argparse.Namespace) -> int:
    target = Target(
        options.dtype,
        options.tp_size,
        fusions=None if options.fusion is None else _only_once(options.fusion),
        missing="ignore" if options.allow_missing else "error",
        unexpected="ignore" if options.allow_unexpected else "error",
    )
    signature = None if options.signature is None else _read_signature(options.signature)
    plan = compile_plan(options.checkpoint, options.recipe, signature, target)
    plan.save(options.output)
    if options.json:
        print(json.dumps(_summary(plan), indent=2))
    else:
        report = plan.report
        print(f"{options.output}: {report.sources} sources -> {report.targets} targets, {plan.world_size} ranks")
        for line in (
            *(f"unused: {n}" for n in report.unused),
            *(f"missing: {n}" for n in report.missing),
            *report.notes,
        ):
            print(line, file=sys.stderr)
    return 0


def _read_signature(path: Path) -> Signature:
    from loadplan.compiler.read_index import read_json

    return Signature.of(read_json(path, str(path), "config"))


def _show(options: argparse.Namespace) -> int:
    if options.provenance is not None:
        return _show_provenance(options)
    plan = Plan.open(options.plan)
    if options.json:
        print(json.dumps(_summary(plan), indent=2))
    else:
        for line in show_plan(plan, None if options.rank is None else tuple(options.rank)):
            print(line)
    return 0


def _show_provenance(options: argparse.Namespace) -> int:
    opened = open_any(options.plan)
    plan = opened.original if isinstance(opened, Artifact) else opened
    if options.json:
        print(json.dumps(describe_provenance(plan, options.provenance), indent=2))
    else:
        for line in show_provenance(plan, options.provenance):
            print(line)
    return 0


def _cost(options: argparse.Namespace) -> int:
    plan = Plan.open(options.plan)
    costs = [plan.cost(rank) for rank in range(plan.world_size)]
    if options.json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return 0
    print(
        f"{'rank':>4} {'tensor bytes':>16} {'bytes read':>16} {'ratio':>7} {'reads':>9} {'copies':>9} {'peak bytes':>16}"
    )
    for c in costs:
        print(
            f"{c.rank:>4} {c.target_nbytes:>16,} {c.read_nbytes:>16,} {c.amplification:>7.3f} "
            f"{c.reads:>9,} {c.copies:>9,} {c.peak_nbytes:>16,}"
        )
    return 0


def _diff(options: argparse.Namespace) -> int:
    old, new = (list(show_plan(Plan.open(path))) for path in (options.old, options.new))
    lines = list(unified_diff(old, new, str(options.old), str(options.new), lineterm="", n=0))
    for line in lines:
        print(line)
    return int(bool(lines))


def _check(options: argparse.Namespace) -> int:
    opened = open_any(options.plan, options.trusted)
    plan = opened.plan if isinstance(opened, Artifact) else opened
    costs = [plan.cost(rank) for rank in range(plan.world_size)]
    print(f"{options.plan}: proved, {len(plan.head.tensors)} tensors, {len(costs)} ranks")
    if isinstance(opened, Artifact):
        for file in plan.head.files:
            found, _ = digest_file(opened.folder / file.name)
            if found != file.content_digest:
                raise FileMismatch(file.name, f"holds {found[:12]}, what was written is {file.content_digest[:12]}")
        print(f"{options.plan}: {len(plan.head.files)} files hold what was written")
    print(describe_signers(options.plan, plan))
    if options.checkpoint is not None:
        files = find_files(options.checkpoint, plan.head.files)
        print(f"{options.checkpoint}: {len(plan.head.files)} files have the sizes and headers of the plan")
        if plan.vouched is not None:
            verify_contents(plan, files, None)
            print(f"{options.checkpoint}: {len(files)} files hold what was signed")
    return 0


def _summary(plan: Plan) -> dict[str, object]:
    return {
        "digest": plan.digest,
        "world_size": plan.world_size,
        "provenance": dict(plan.head.provenance),
        "report": asdict(plan.report),
        "cost": [asdict(plan.cost(rank)) for rank in range(plan.world_size)],
    }
