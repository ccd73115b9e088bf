"""What must be signed before it is loaded, and the check that it is.

A requirement comes from an argument (`trusted=`) or from the environment: `LOADPLAN_REQUIRE_SIGNED=1`, with
`LOADPLAN_TRUSTED_KEYS` naming files and folders of public keys as PATH does. Both hold where both are given. Then a plan
is refused, before it is decoded, unless a trusted key signed it; and files are refused, before a tensor is made of
them, unless their whole content has the digest that was signed. That reads and hashes every byte of the files that the
rank uses once more (files side by side, each about as fast as SHA-256 on one core), so a mapped load is no longer free.
It is a check at load: whoever may write to a file that is mapped can change it later (`mode="read"` keeps no mapping).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from loadplan.cache.digest import digest_stream
from loadplan.cache.environment import says_yes
from loadplan.cache.error import LoadplanError
from loadplan.cache.signing import PublicKey, TrustedKeys
from loadplan.runtime.signature_file import PlanSignature, read_signatures
from loadplan.runtime.source_files import FileMismatch, SourceFile

if TYPE_CHECKING:
    from loadplan.runtime.open_plan import Plan

Trusted = TrustedKeys | str | Path | Sequence[str | Path] | None
"""Keys, or files and folders of them."""

REQUIRE_VARIABLE, KEYS_VARIABLE = "LOADPLAN_REQUIRE_SIGNED", "LOADPLAN_TRUSTED_KEYS"
_FALSE = ("", "0", "OFF", "NO", "FALSE")
_MAX_THREADS = 8


class UntrustedPlan(LoadplanError, PermissionError):
    """A plan must be signed by a trusted key, and is not; nothing of it was used."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class BadRequirement(LoadplanError, ValueError):
    """The environment asks for signatures in a way that says nothing."""


@dataclass(frozen=True, slots=True)
class Vouched:
    """What trusted keys said of a plan."""

    keys: tuple[PublicKey, ...]  # that signed it
    files: Mapping[str, str]  # name -> SHA-256 (hex) of the content


def find_requirements(trusted: Trusted, environ: Mapping[str, str] | None = None) -> tuple[TrustedKeys, ...]:
    """The sets of keys, of each of which one must have signed; none when nothing need be signed.

    Raises:
        BadRequirement: the environment asks for signatures and names no keys, or says neither yes nor no.
        KeyFileError, OSError, SigningLibraryMissing
    """
    return tuple(_requirements(trusted, os.environ if environ is None else environ))


def _requirements(trusted: Trusted, environ: Mapping[str, str]) -> Iterator[TrustedKeys]:
    if trusted is not None:
        yield read_trusted(trusted)
    wish = environ.get(REQUIRE_VARIABLE, "")
    if wish.upper() in _FALSE:
        return
    if not says_yes(wish):
        raise BadRequirement(f"{REQUIRE_VARIABLE}={wish!r} is neither yes nor no; set it to 1, or unset it")
    places = [place for place in environ.get(KEYS_VARIABLE, "").split(os.pathsep) if place]
    if not places:
        raise BadRequirement(f"{REQUIRE_VARIABLE} is set, and {KEYS_VARIABLE} names no key; set it to files or folders")
    yield TrustedKeys.read(places)


def read_trusted(trusted: TrustedKeys | str | Path | Sequence[str | Path]) -> TrustedKeys:
    """The keys that are meant. Raises `KeyFileError`, `OSError` and `SigningLibraryMissing`."""
    if isinstance(trusted, TrustedKeys):
        return trusted
    return TrustedKeys.read([trusted] if isinstance(trusted, str | Path) else trusted)


def verify_plan(path: Path, digest: str, trusted: Trusted) -> Vouched | None:
    """Who vouches for the plan with this digest in the file at `path`; None when nobody need.

    Raises:
        UntrustedPlan: somebody must, and does not.
        SignatureFileError: the file beside it holds no signatures.
        And what `find_requirements` raises.
    """
    requirements = find_requirements(trusted)
    if not requirements:
        return None
    signatures = read_signatures(path)
    vouched: dict[str, PublicKey] = {}
    files: dict[str, str] = {}
    for keys in requirements:
        right = list(_right_signatures(signatures, digest, keys))
        if not right:
            raise UntrustedPlan(str(path), _why_not(signatures, digest, keys))
        for key, signature in right:
            vouched[key.id] = key
            for name, content in signature.files.items():
                if files.setdefault(name, content) != content:
                    raise UntrustedPlan(
                        str(path), f"two trusted keys say different contents of {name!r}; sign it again"
                    )
    return Vouched(tuple(vouched.values()), files)


def _right_signatures(
    signatures: Sequence[PlanSignature], digest: str, trusted: TrustedKeys
) -> Iterator[tuple[PublicKey, PlanSignature]]:
    keys = {key.id: key for key in trusted.keys}
    for signature in signatures:
        if signature.key in keys and signature.plan == digest and signature.is_right(keys[signature.key]):
            yield keys[signature.key], signature


def _why_not(signatures: Sequence[PlanSignature], digest: str, trusted: TrustedKeys) -> str:
    ask = f"have one of the trusted keys ({trusted}) sign it: `loadplan sign`"
    if not signatures:
        return f"is not signed, and must be; {ask}"
    known = {key.id for key in trusted.keys}
    ours = [signature for signature in signatures if signature.key in known]
    if not ours:
        signers = ", ".join(sorted({signature.key[:16] for signature in signatures}))
        return f"is signed by {signers}, whom nobody trusts here; {ask}"
    if all(signature.plan != digest for signature in ours):
        return f"is plan {digest[:12]}, and what was signed is {ours[0].plan[:12]}; {ask}"
    return f"the signature by {ours[0].key[:16]} is not right: plan or signature were changed; {ask}"


def verify_contents(plan: Plan, files: Sequence[SourceFile], rank: int | None) -> None:
    """Compare the whole content of the files that `rank` reads, all if None, with what was signed, if anything must be.

    Raises:
        UntrustedPlan: the plan must be signed, and was not opened from a signed file; or nobody says what a file holds.
        FileMismatch: a file holds something else.
    """
    if plan.vouched is None:
        if find_requirements(None):
            raise UntrustedPlan(
                plan.name,
                f"{REQUIRE_VARIABLE} is set, and this plan was not opened from a signed file; open it from one",
            )
        return
    used = range(len(files)) if rank is None else plan.section(rank).copies.files
    wanted = {number: _signed_digest(plan, number, plan.vouched) for number in used}
    with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1, _MAX_THREADS))) as threads:
        found = threads.map(_digest, (files[number] for number in wanted))
        for (number, digest), actual in zip(wanted.items(), found, strict=True):
            if actual != digest:
                raise FileMismatch(files[number].name, f"holds {actual[:12]}, what was signed is {digest[:12]}")


def _signed_digest(plan: Plan, number: int, vouched: Vouched) -> str:
    file = plan.head.files[number]
    said = {digest for digest in (file.content_digest, vouched.files.get(file.name, "")) if digest}
    if len(said) == 1:
        return said.pop()
    if said:
        raise UntrustedPlan(plan.name, f"the plan and its signature say different contents of {file.name!r}")
    raise UntrustedPlan(
        plan.name,
        f"nobody signed what {file.name!r} holds, for the plan was compiled from headers; sign it with --checkpoint, "
        "or convert the checkpoint and sign the result",
    )


def _digest(file: SourceFile) -> str:
    """SHA-256 (hex) of the content; the file is the one that was checked, before and after."""
    with file.open() as descriptor, FileIO(descriptor, closefd=False) as source:
        digest, _ = digest_stream(source)
    file.check_unchanged()
    return digest


def digest_contents(files: Sequence[SourceFile]) -> dict[str, str]:
    """Name -> SHA-256 (hex) of each file, read whole. Raises `FileMismatch`."""
    with ThreadPoolExecutor(max(1, min(len(files), os.cpu_count() or 1, _MAX_THREADS))) as threads:
        return dict(zip((file.name for file in files), threads.map(_digest, files), strict=True))
