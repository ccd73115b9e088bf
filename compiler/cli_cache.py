"""`loadplan cache ...`: what is kept, for people and for machines; looking after it; sharing it.

The cache is that of the loadplan.toml here, with its remotes and bounds, or the one at `--root`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from loadplan.cache import Cache
from loadplan.cache.entries import Entry
from loadplan.cache.error import LoadplanError
from loadplan.cache.gc import GRACE_S
from loadplan.compiler.build_cache import BuildCache
from loadplan.compiler.build_file import FILE_NAME, CacheSpec, RemoteSpec, read_project
from loadplan.compiler.build_tables import parse_size, parse_span
from loadplan.compiler.show_cache import SHOWN_DIGITS, gc_lines, printable, show_size, table

Commands = argparse._SubParsersAction  # what `add_subparsers` gives has no public name


class NoSuchEntry(LoadplanError, LookupError):
    """No entry of the cache, or more than one, has a key or label that was given."""


class NoCache(LoadplanError, FileNotFoundError):
    """It is not said which cache is meant."""


def add_cache_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add `cache` and what is below it to the parser."""
    parser = commands.add_parser("cache", help="look at, look after and share what was built")
    below = parser.add_subparsers(required=True, metavar="COMMAND")
    entries = "key, the first digits of one, or a label as NAME@VARIANT, which means all of its entries"

    command = _add(below, "ls", "list what is kept, last used first", _list)
    command.add_argument("entries", nargs="*", metavar="ENTRY", help=entries)
    _add(below, "info", "print how much is kept and shared", _info)
    _add(below, "check", "read everything and report what is damaged; exit 1 if anything is", _check)
    command = _add(below, "repair", "remove what is damaged, so that it is built or pulled again", _repair)
    command.add_argument("-n", "--dry-run", action="store_true", help="only say what would be done")

    command = _add(below, "gc", "remove what was not used for long, and what nothing names", _gc)
    command.add_argument("-n", "--dry-run", action="store_true", help="only say what would be done")
    command.add_argument(
        "--max-size",
        type=_size,
        metavar="SIZE",
        help='bound, as "200 GiB" (default: max_size of loadplan.toml, or none)',
    )
    command.add_argument(
        "--max-age", type=_span, metavar="SPAN", help='remove what was not used for so long, as "30 days"'
    )
    command.add_argument(
        "--grace",
        type=_span,
        metavar="SPAN",
        help="keep what was used since (default: grace of loadplan.toml, or 1 day)",
    )

    command = _add(below, "pin", "keep an entry whatever its age", _pin)
    command.add_argument("entries", nargs="+", metavar="ENTRY", help=entries)
    command.add_argument("--name", metavar="NAME", help="what to call the pin (default: label and kind of the entry)")
    command = _add(below, "unpin", "let an entry go when it is old", _unpin)
    command.add_argument("names", nargs="+", metavar="NAME", help="name of a pin, as `loadplan cache ls` prints it")

    for name, what, run in (
        ("push", "give entries to the remotes that may be written", _push),
        ("pull", "fetch entries from the remotes", _pull),
    ):
        command = _add(below, name, what, run)
        command.add_argument("entries", nargs="+" if name == "pull" else "*", metavar="ENTRY", help=entries)
        command.add_argument(
            "--remote", metavar="URL", help="folder or URL to use instead of the remotes of loadplan.toml"
        )
        command.add_argument("-n", "--dry-run", action="store_true", help="only say what would be asked for")


def _add(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    what: str,
    run: Callable[[BuildCache, argparse.Namespace], int],
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=what)
    command.add_argument("--root", type=Path, metavar="FOLDER", help="the cache (default: that of loadplan.toml here)")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=lambda options: run(_open(options), options))
    return command


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error


def _span(text: str) -> float:
    try:
        return parse_span(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error


def _open(options: argparse.Namespace) -> BuildCache:
    """The cache that is meant, with its remotes. Raises `NoCache` and `BuildFileError`."""
    remote = getattr(options, "remote", None)
    if options.root is not None:
        spec = CacheSpec(options.root, None, GRACE_S, "auto", "never", ())
    elif Path(FILE_NAME).exists():
        spec = read_project(FILE_NAME).cache
    else:
        raise NoCache(f"{FILE_NAME}: not in this folder; give the cache with --root FOLDER")
    if remote is None:
        return BuildCache(spec)
    given = RemoteSpec(remote, remote, False, 30.0, None, None, None, False, {})
    return BuildCache(CacheSpec(spec.root, spec.max_nbytes, spec.grace_s, "auto", "never", (given,), spec.trust))


# -- which entries -----------------------------------------------------------------------------------------------


def select(cache: Cache, wanted: Sequence[str]) -> list[Entry]:
    """The entries that are meant, last used first; all of them when none is named. Raises `NoSuchEntry`."""
    entries = sorted(cache.entries(), key=lambda entry: (-entry.last_used_s, entry.key))
    if not wanted:
        return entries
    chosen: dict[str, Entry] = {}
    for word in wanted:
        found = [entry for entry in entries if entry.info.get("label") == word or word in entry.pins]
        found = found or [entry for entry in entries if entry.key.startswith(word)]
        keys = {entry.key for entry in found}
        if not found:
            known = sorted({entry.info["label"] for entry in entries if "label" in entry.info})
            near = get_close_matches(word, known, n=1) or known[:5]
            hint = f"; labels are {', '.join(near)}" if near else ""
            raise NoSuchEntry(f"{cache.root}: nothing is called {word!r}{hint}; `loadplan cache ls` lists all")
        if len(keys) > 1 and all(entry.info.get("label") != word for entry in found):
            raise NoSuchEntry(f"{cache.root}: {len(keys)} keys begin with {word!r}; give more digits")
        chosen |= {entry.key: entry for entry in found}
    return list(chosen.values())


# -- commands ----------------------------------------------------------------------------------------------------


def _list(cache: BuildCache, options: argparse.Namespace) -> int:
    entries = select(cache.local, options.entries)
    if options.json:
        print(json.dumps([entry.to_json() for entry in entries], indent=2))
        return 0
    for line in table(entries, time.time()):
        print(line)
    return 0


def _info(cache: BuildCache, options: argparse.Namespace) -> int:
    info = cache.local.info()
    if options.json:
        print(json.dumps(info.to_json(), indent=2))
        return 0
    bound = "no bound" if cache.spec.max_nbytes is None else f"bound {show_size(cache.spec.max_nbytes)}"
    print(
        f"{info.root}: {info.entries} entries, {info.pins} pins, {info.blobs} blobs, {show_size(info.nbytes)} ({bound})"
    )
    print(f"entries hold {show_size(info.entry_nbytes)}; stored for them {info.sharing:.0%} of that")
    print(f"named by no entry: {show_size(info.unused_nbytes)}; temporary: {show_size(info.temporary_nbytes)}")
    for spec in cache.spec.remotes:
        print(f"remote {spec.name}: {spec.url} ({'read only' if spec.read_only else 'may be written'})")
    return 0


def _check(cache: BuildCache, options: argparse.Namespace) -> int:
    report = cache.local.check()
    problems = [{"kind": str(problem.kind), "path": str(problem.path)} for problem in report.problems]
    if options.json:
        body = {"entries": report.entries, "blobs": report.blobs, "nbytes": report.nbytes, "problems": problems}
        print(json.dumps(body, indent=2))
    else:
        for problem in problems:
            print(f"{problem['kind']}: {printable(problem['path'])}")
        print(
            f"{report.entries} entries, {report.blobs} blobs, {show_size(report.nbytes)} read: {len(problems)} problems"
        )
    return int(bool(problems))


def _repair(cache: BuildCache, options: argparse.Namespace) -> int:
    if options.dry_run:
        return _check(cache, options) and 0
    report = cache.local.repair(grace_s=cache.spec.grace_s)
    removed, left = (
        [{"kind": str(p.kind), "path": str(p.path)} for p in found] for found in (report.removed, report.left)
    )
    if options.json:
        print(json.dumps({"removed": removed, "left": left}, indent=2))
        return 0
    for what, found in (("removed", removed), ("left", left)):
        for problem in found:
            print(f"{what}: {problem['kind']}: {printable(problem['path'])}")
    print(f"{len(removed)} removed, {len(left)} left as they are")
    return 0


def _gc(cache: BuildCache, options: argparse.Namespace) -> int:
    report = cache.local.gc(
        max_nbytes=cache.spec.max_nbytes if options.max_size is None else options.max_size,
        max_age_s=options.max_age,
        grace_s=cache.spec.grace_s if options.grace is None else options.grace,
        dry_run=options.dry_run,
    )
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
        return 0
    for line in gc_lines(report, time.time()):
        print(line)
    return 0


def _pin(cache: BuildCache, options: argparse.Namespace) -> int:
    entries = select(cache.local, options.entries)
    made: dict[str, str] = {}
    for entry in entries:
        own = " ".join(filter(None, [entry.info.get("label"), entry.info.get("kind")])) or entry.key[:SHOWN_DIGITS]
        name = own if options.name is None else options.name if len(entries) == 1 else f"{options.name} {own}"
        cache.local.pin(entry.key, name)
        made[name] = entry.key
    return _print_names(made, options, "pinned")


def _unpin(cache: BuildCache, options: argparse.Namespace) -> int:
    pins = cache.local.pins()
    for name in options.names:
        cache.local.unpin(name)
    return _print_names({name: pins[name] for name in options.names}, options, "unpinned")


def _print_names(names: Mapping[str, str], options: argparse.Namespace, what: str) -> int:
    if options.json:
        print(json.dumps(names, indent=2))
    else:
        for name, key in names.items():
            print(f"{what}: {printable(name)} ({key[:SHOWN_DIGITS]})")
    return 0


def _push(cache: BuildCache, options: argparse.Namespace) -> int:
    entries = [entry for entry in select(cache.local, options.entries) if entry.is_complete]
    if options.dry_run:
        return _print_keys([entry.key for entry in entries], options)
    sent = cache.push([entry.key for entry in entries])
    body = {
        name: {"entries": r.entries, "blobs": r.blobs, "nbytes": r.nbytes, "known_nbytes": r.known_nbytes}
        for name, r in sent.items()
    }
    if options.json:
        print(json.dumps(body, indent=2))
        return 0
    for name, r in sent.items():
        print(
            f"{name}: {r.entries} entries and {r.blobs} blobs sent, {show_size(r.nbytes)}; "
            f"{show_size(r.known_nbytes)} were there"
        )
    return 0


def _pull(cache: BuildCache, options: argparse.Namespace) -> int:
    """Remotes know keys only: labels and short keys are those of entries here, complete or not."""
    known = {entry.key for word in options.entries if len(word) < 64 for entry in select(cache.local, [word])}
    keys = sorted(known | {word for word in options.entries if len(word) == 64})
    if options.dry_run:
        return _print_keys(keys, options)
    found = {key: cache.find(key) is not None for key in keys}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for key, is_here in found.items():
            print(f"{key[:SHOWN_DIGITS]}: {'here' if is_here else 'not found'}")
    return int(not all(found.values()))


def _print_keys(keys: Sequence[str], options: argparse.Namespace) -> int:
    print(json.dumps(list(keys), indent=2) if options.json else "\n".join(keys))
    return 0
