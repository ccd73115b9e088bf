"""The signatures beside a plan, in `PLAN.sig`: who vouches for it, and for which contents of the files it reads.

    file      ::= {"format": 1, "signatures": [signature*]}                       -- JSON
    signature ::= {"key": id, "plan": digest, "files": {name: sha256}, "signature": hex}

A signature is of the purpose "loadplan plan v1" and the canonical JSON of `plan` and `files`. The digest of a plan
covers everything in it. An artifact's plan has the digest of each file, so `files` is empty there; a plan compiled from
headers has none, and `files` says what the checkpoint held when it was signed. Signatures lie beside the plan, not in it:
a plan is the same for everyone, and several may vouch for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadplan.cache.digest import NotCanonical, canonical_json, is_digest
from loadplan.cache.error import LoadplanError
from loadplan.cache.signing import PublicKey, SigningKey, parse_signature
from loadplan.cache.write_file import write_atomically

PURPOSE = "loadplan plan v1"
SUFFIX = ".sig"
_MAX_NBYTES = 16 << 20  # 100,000 files in one signature
_MAX_SIGNATURES = 64  # each costs a verification


class SignatureFileError(LoadplanError, ValueError):
    """A signature file that is not one."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}; remove it and sign again"


@dataclass(frozen=True, slots=True)
class PlanSignature:
    """What one key says."""

    key: str  # id of the key
    plan: str  # digest of the plan
    files: Mapping[str, str]  # name -> SHA-256 (hex) of what the plan itself has no digest of
    signature: bytes

    def is_right(self, key: PublicKey) -> bool:
        """Whether `key` made it. Raises `SigningLibraryMissing`."""
        return key.verifies(PURPOSE, _message(self.plan, self.files), self.signature)


def sign_plan(key: SigningKey, plan: str, files: Mapping[str, str]) -> PlanSignature:
    """The signature by `key` of the plan with digest `plan` and of `files`."""
    return PlanSignature(key.public.id, plan, dict(files), key.sign(PURPOSE, _message(plan, files)))


def signature_path(plan: Path) -> Path:
    """Where the signatures of the plan file lie."""
    return plan.with_name(plan.name + SUFFIX)


def read_signatures(plan: Path) -> tuple[PlanSignature, ...]:
    """The signatures beside the plan file, right or not; none if there is no such file. Raises `SignatureFileError`."""
    path = signature_path(plan)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_NBYTES + 1)
    except FileNotFoundError:
        return ()
    try:
        return parse_signatures(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise SignatureFileError(path, f"is no signature file ({error})") from error


def write_signatures(plan: Path, signatures: Iterable[PlanSignature]) -> None:
    """Write the file beside the plan file, whole or not at all."""
    rows = [
        {"key": s.key, "plan": s.plan, "files": dict(s.files), "signature": s.signature.hex()}
        for s in sorted(signatures, key=lambda signature: signature.key)
    ]
    write_atomically(signature_path(plan), canonical_json({"format": 1, "signatures": rows}) + b"\n")


def parse_signatures(data: bytes) -> tuple[PlanSignature, ...]:
    """The signatures in the bytes of a file. Raises ValueError, TypeError or RecursionError."""
    if len(data) > _MAX_NBYTES:
        raise ValueError(f"it is larger than {_MAX_NBYTES} bytes")
    match json.loads(data, object_pairs_hook=_unique):
        case {"format": version} if type(version) is not int or version != 1:
            raise ValueError(f"it has format {version!r:.40}, this loadplan reads 1")
        case {"format": _, "signatures": list(rows), **rest} if not rest:
            if len(rows) > _MAX_SIGNATURES:
                raise ValueError(f"it has {len(rows)} signatures, at most {_MAX_SIGNATURES} are read")
            return tuple(map(_parse_row, rows))
        case _:
            raise ValueError("it has other fields than format and signatures")


def _parse_row(row: object) -> PlanSignature:
    match row:
        case {"key": str(key), "plan": str(plan), "files": dict(files), "signature": str(text), **rest} if not rest:
            signature = parse_signature(text)
            if signature is None or not all(map(is_digest, (key, plan, *files.values()))):
                raise ValueError("a signature has a digest or a signature that is none")
            try:
                _message(plan, files)
            except NotCanonical as error:
                raise ValueError(str(error)) from error
            return PlanSignature(key, plan, files, signature)
        case _:
            raise ValueError("a signature has other fields than key, plan, files and signature")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def _message(plan: str, files: Mapping[str, str]) -> bytes:
    return canonical_json({"plan": plan, "files": dict(files)})
