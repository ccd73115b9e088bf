"""The commands of trust: `key` makes and shows keys, `sign` vouches for plans and artifacts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loadplan.cache.signing import new_key, read_public_key, read_signing_key
from loadplan.runtime.artifact import PLAN_NAME
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.plan import PlanFile
from loadplan.runtime.signature_file import read_signatures, sign_plan, signature_path, write_signatures
from loadplan.runtime.source_files import FileMismatch, find_files
from loadplan.runtime.trust import digest_contents

Commands = argparse._SubParsersAction  # what `add_subparsers` gives has no public name


def add_trust_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add them to the parser."""
    verbs = commands.add_parser("key", help="make or show keys for signatures").add_subparsers(
        required=True, metavar="VERB"
    )
    command = verbs.add_parser("new", help="make a key: NAME.pem, which signs and stays secret, and NAME.pub.pem")
    command.add_argument("name", type=Path, metavar="NAME", help="path without ending; nothing is overwritten")
    command.set_defaults(run=_new)

    command = verbs.add_parser("show", help="print a public key and its short id")
    command.add_argument("file", type=Path, metavar="FILE", help="public key, or a private one to see its public key")
    command.set_defaults(run=_show)

    command = commands.add_parser("sign", help="vouch for a plan, or for converted files")
    command.add_argument("plan", type=Path, metavar="PLAN_OR_FOLDER", help="a plan, or the folder of converted files")
    command.add_argument("--key", type=Path, required=True, metavar="FILE", help="private key that signs")
    command.add_argument(
        "--checkpoint",
        metavar="CHECKPOINT",
        help="sign the contents of its files too, which a plan compiled from headers does not know; reads all of it",
    )
    command.set_defaults(run=_sign)


def _new(options: argparse.Namespace) -> int:
    key, private, public = new_key(options.name)
    print(f"{private}: signs as {key.public.short_id}; keep it secret")
    print(f"{public}: give it to those who trust you")
    return 0


def _show(options: argparse.Namespace) -> int:
    is_private = b"PRIVATE KEY" in options.file.read_bytes()
    key = read_signing_key(options.file).public if is_private else read_public_key(options.file)
    print(f"{key.short_id}\n{key.to_pem().decode()}", end="")
    return 0


def _sign(options: argparse.Namespace) -> int:
    path = options.plan / PLAN_NAME if options.plan.is_dir() else options.plan
    key = read_signing_key(options.key)
    plan = Plan(path.read_bytes(), str(path))  # whoever signs it has looked at it: no signature is asked for
    for rank in range(plan.world_size):  # nobody vouches for what is not proved, to its last part
        plan.section(rank)
    _ = plan.origin
    files = {}
    if options.checkpoint is not None:
        found = digest_contents(find_files(options.checkpoint, plan.head.files))
        refuse_others(plan.head.files, found)
        files = {file.name: found[file.name] for file in plan.head.files if not file.content_digest}
    kept = [old for old in read_signatures(path) if old.plan == plan.digest and old.key != key.public.id]
    write_signatures(path, [*kept, sign_plan(key, plan.digest, files)])
    print(f"{signature_path(path)}: plan {plan.digest[:12]} and {len(files)} files, signed by {key.public.short_id}")
    return 0


def refuse_others(expected: Sequence[PlanFile], found: dict[str, str]) -> None:
    """Refuse files that do not hold what the plan says, where it says anything. Raises `FileMismatch`."""
    for file in expected:
        if file.content_digest and found[file.name] != file.content_digest:
            raise FileMismatch(
                file.name, f"holds {found[file.name][:12]}, what was written is {file.content_digest[:12]}"
            )


def describe_signers(path: Path, plan: Plan) -> str:
    """A line that says who signed the plan in the file at `path`, or below it, and whether that was checked."""
    file = path / PLAN_NAME if path.is_dir() else path
    if plan.vouched is not None:
        return f"{path}: signed by {', '.join(key.short_id for key in plan.vouched.keys)}, trusted"
    claimed = ", ".join(sorted({signature.key[:16] for signature in read_signatures(file)}))
    return f"{path}: says it is signed by {claimed}, not checked (--trusted)" if claimed else f"{path}: is not signed"
