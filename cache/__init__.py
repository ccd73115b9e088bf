"""Digests, blobs filed under their digest, and action keys that say what made them. Imports no torch.

A build asks here whether it has made something before. Nothing is trusted: what is damaged, half-written or missing
reads as absent, and is built again. Read in this order:

    digest          names for bytes, files and JSON values
    write_file      files that appear whole or not at all
    store           blobs by digest
    record          small JSON files that know their own digest
    actions         action key -> artifact (name -> blob)
    file_digests    digests of source files, remembered
    cache           the three under one root
    remotes/        places that machines share artifacts through
    transfer        pull and push
"""

from loadplan.cache.actions import ActionCache, Artifact, ArtifactIncomplete, BadArtifact
from loadplan.cache.cache import Cache
from loadplan.cache.digest import (
    NotADigest,
    NotCanonical,
    canonical_json,
    digest_bytes,
    digest_file,
    digest_json,
    is_digest,
)
from loadplan.cache.error import LoadplanError
from loadplan.cache.file_digests import FileChanged, FileDigests
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
    "DigestMismatch",
    "FileChanged",
    "FileDigests",
    "FolderNotWritable",
    "LoadplanError",
    "NotADigest",
    "NotCanonical",
    "Problem",
    "ProblemKind",
    "canonical_json",
    "digest_bytes",
    "digest_file",
    "digest_json",
    "is_digest",
    "make_folder",
    "write_atomically",
]
