"""An entry as bytes: the store's own record, and the `ActionResult` of Bazel's protocol.

Both carry the digest of what they say, so that a torn or altered one is known, and neither names a path.
"""

import json
from collections.abc import Callable

from loadplan.cache.actions import FORMAT, Artifact, parse_artifact
from loadplan.cache.digest import canonical_json, digest_json
from loadplan.cache.record import format_record, parse_record
from loadplan.cache.remotes.action_result import (
    ActionResult,
    BadActionResult,
    OutputFile,
    format_action_result,
    parse_action_result,
)
from loadplan.cache.remotes.remote import BadRemoteData, RemoteEntry, check_entry


def format_entry_record(key: str, artifact: Artifact) -> bytes:
    """The bytes that `ActionCache.put` writes."""
    return format_record(_record(key, artifact))


def parse_entry_record(remote: str, key: str, data: bytes, find_nbytes: Callable[[str], int | None]) -> RemoteEntry:
    """The entry in a record of the store; a record has no sizes, so `find_nbytes` looks them up by digest.

    Raises:
        BadRemoteData: it is damaged, of another key, or names blobs that are not there.
    """
    artifact = parse_artifact(parse_record(data), key)
    if artifact is None:
        raise BadRemoteData(remote, f"the entry of {key[:12]} is damaged, or of another format")
    sizes: dict[str, int] = {}
    for digest in dict.fromkeys(artifact.blobs.values()):
        nbytes = find_nbytes(digest)
        if nbytes is None:
            raise BadRemoteData(remote, f"the entry of {key[:12]} names blob {digest[:12]}, which is not there")
        sizes[digest] = nbytes
    return check_entry(
        remote, ((name, digest, sizes[digest]) for name, digest in artifact.blobs.items()), artifact.info
    )


def format_entry_message(key: str, entry: RemoteEntry) -> bytes:
    """The ActionResult of an entry: its files, and in `stdout_raw` the notes and the digest of all of it."""
    artifact = entry.artifact
    files = tuple(OutputFile(name, digest, entry.nbytes[digest]) for name, digest in artifact.blobs.items())
    note = {"entry": digest_json(_record(key, artifact)), "info": artifact.info}
    return format_action_result(ActionResult(files, canonical_json(note)))


def parse_entry_message(remote: str, key: str, data: bytes) -> RemoteEntry:
    """The entry in an ActionResult.

    Raises:
        BadRemoteData: it is not one that loadplan wrote under this key, or not all of it.
    """
    try:
        result = parse_action_result(data)
    except BadActionResult as error:
        raise BadRemoteData(remote, f"the entry of {key[:12]} is {error}") from error
    digest, info = _parse_note(result.stdout)
    entry = check_entry(remote, ((file.path, file.digest, file.nbytes) for file in result.files), info)
    if digest != digest_json(_record(key, entry.artifact)):
        raise BadRemoteData(remote, f"the entry of {key[:12]} is torn, of another key, or not written by loadplan")
    return entry


def _record(key: str, artifact: Artifact) -> dict[str, object]:
    return {"format": FORMAT, "key": key, "blobs": artifact.blobs, "info": artifact.info}


def _parse_note(data: bytes) -> tuple[str, dict[str, str]]:
    """The digest and the notes in `stdout_raw`; a digest of nothing when it says anything else."""
    try:
        note = json.loads(data)
    except (ValueError, RecursionError):
        return "", {}
    match note:
        case {"entry": str(digest), "info": dict(info)}:
            return digest, info
        case _:
            return "", {}
