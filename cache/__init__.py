"""Digests, blobs filed under their digest, and action keys that say what made them. Imports no torch.

A build asks here whether it has made something before. Nothing is trusted: what is damaged, half-written or missing
reads as absent, and is built again. Read in this order:

    digest          names for bytes, files and JSON values
    write_file      files that appear whole or not at all
    place_folder    folders, too
    store           blobs by digest
    record          small JSON files that know their own digest
    signing         keys, and signatures by them
    entry_trust     who vouches for an action's entry
    actions         action key -> artifact (name -> blob)
    file_digests    digests of source files, remembered
    claims, gc      what is in use, and what can go; why no lock is needed
    pins            what stays
    lease           one builder a key, where possible
    check           what is damaged, and its removal
    cache           all of it under one root
    remotes/        places that machines share artifacts through
    transfer        pull and push
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadplan.cache.actions import ActionCache, Artifact, ArtifactIncomplete, BadArtifact
    from loadplan.cache.cache import Cache, CannotMaterialize, NotCached
    from loadplan.cache.check import CheckReport, RepairReport
    from loadplan.cache.digest import (
        NotADigest,
        NotCanonical,
        canonical_json,
        digest_bytes,
        digest_file,
        digest_json,
        is_digest,
    )
    from loadplan.cache.entries import CacheInfo, Entry, GcReport
    from loadplan.cache.entry_trust import ReservedNote
    from loadplan.cache.error import LoadplanError
    from loadplan.cache.file_digests import FileChanged, FileDigests
    from loadplan.cache.gc import PinsDamaged
    from loadplan.cache.lease import Lease
    from loadplan.cache.pins import NoSuchPin
    from loadplan.cache.place_folder import FolderExists
    from loadplan.cache.record import NotReadable
    from loadplan.cache.signing import (
        KeyExists,
        KeyFileError,
        PublicKey,
        SigningKey,
        SigningLibraryMissing,
        TrustedKeys,
        new_key,
        read_public_key,
        read_signing_key,
    )
    from loadplan.cache.store import BlobMissing, BlobStore, DigestMismatch, Problem, ProblemKind
    from loadplan.cache.write_file import FolderNotWritable, make_folder, write_atomically

__all__ = [
    "ActionCache",
    "Artifact",
    "ArtifactIncomplete",
    "BadArtifact",
    "BlobMissing",
    "BlobStore",
    "Cache",
    "CacheInfo",
    "CannotMaterialize",
    "CheckReport",
    "DigestMismatch",
    "Entry",
    "FileChanged",
    "FileDigests",
    "FolderExists",
    "FolderNotWritable",
    "GcReport",
    "KeyExists",
    "KeyFileError",
    "Lease",
    "LoadplanError",
    "NoSuchPin",
    "NotADigest",
    "NotCached",
    "NotCanonical",
    "NotReadable",
    "PinsDamaged",
    "Problem",
    "ProblemKind",
    "PublicKey",
    "RepairReport",
    "ReservedNote",
    "SigningKey",
    "SigningLibraryMissing",
    "TrustedKeys",
    "canonical_json",
    "digest_bytes",
    "digest_file",
    "digest_json",
    "is_digest",
    "make_folder",
    "new_key",
    "read_public_key",
    "read_signing_key",
    "write_atomically",
]

_HOMES = {
    "ActionCache": "actions",
    "Artifact": "actions",
    "ArtifactIncomplete": "actions",
    "BadArtifact": "actions",
    "BlobMissing": "store",
    "BlobStore": "store",
    "Cache": "cache",
    "CacheInfo": "entries",
    "CannotMaterialize": "cache",
    "CheckReport": "check",
    "DigestMismatch": "store",
    "Entry": "entries",
    "FileChanged": "file_digests",
    "FileDigests": "file_digests",
    "FolderExists": "place_folder",
    "FolderNotWritable": "write_file",
    "GcReport": "entries",
    "KeyExists": "signing",
    "KeyFileError": "signing",
    "Lease": "lease",
    "LoadplanError": "error",
    "NoSuchPin": "pins",
    "NotADigest": "digest",
    "NotCached": "cache",
    "NotCanonical": "digest",
    "NotReadable": "record",
    "PinsDamaged": "gc",
    "Problem": "store",
    "ProblemKind": "store",
    "PublicKey": "signing",
    "RepairReport": "check",
    "ReservedNote": "entry_trust",
    "SigningKey": "signing",
    "SigningLibraryMissing": "signing",
    "TrustedKeys": "signing",
    "canonical_json": "digest",
    "digest_bytes": "digest",
    "digest_file": "digest",
    "digest_json": "digest",
    "is_digest": "digest",
    "make_folder": "write_file",
    "new_key": "signing",
    "read_public_key": "signing",
    "read_signing_key": "signing",
    "write_atomically": "write_file",
}


def __getattr__(name: str) -> object:
    """Import the module that a public name lives in, when it is asked for: a loading process asks for few."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
