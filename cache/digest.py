"""SHA-256 digests, in lowercase hex, of bytes, files and JSON values: the only names that the cache knows."""

import hashlib
import io
import json
import re
from pathlib import Path
from typing import BinaryIO

from loadplan.cache.error import LoadplanError

CHUNK_NBYTES = 4 << 20  # large enough that the Python loop costs nothing next to the hashing

_DIGEST = re.compile(r"[0-9a-f]{64}")


class NotCanonical(LoadplanError, TypeError):
    """A value that has no single JSON text, so that its digest would mean nothing."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.where, self.what = where, what

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.what} has no canonical JSON text; "
            "use None, bool, int, well-formed str, list, tuple, or dict with str keys"
        )


class NotADigest(LoadplanError, ValueError):
    """A text that is not 64 lowercase hex digits."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"{self.text[:80]!r} ({len(self.text)} characters) is not a digest: give 64 lowercase hex digits"


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> tuple[str, int]:
    """The digest and nbytes of what `path` holds, streamed."""
    with path.open("rb", buffering=0) as file:
        return digest_stream(file)


def digest_stream(source: io.FileIO, sink: BinaryIO | None = None) -> tuple[str, int]:
    """The digest and nbytes of the rest of `source`; each chunk is also written to `sink`.

    What is written is exactly what is digested, even when somebody changes the source meanwhile.
    """
    hasher, nbytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK_NBYTES))
    while count := source.readinto(buffer):
        hasher.update(buffer[:count])
        nbytes += count
        if sink is not None:
            sink.write(buffer[:count])
    return hasher.hexdigest(), nbytes


def digest_json(value: object) -> str:
    return digest_bytes(canonical_json(value))


def canonical_json(value: object) -> bytes:
    """The one text of `value`: sorted keys, no blanks, UTF-8, tuples as lists.

    Raises:
        NotCanonical: a float (no one text), a key that is not a str, a lone surrogate, or another type.
    """
    _check(value, "value")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NotCanonical("value", f"the lone surrogate {error.object[error.start]!r} in a str") from error


def _check(value: object, where: str) -> None:
    match value:
        case None | int() | str():  # a bool is an int
            return
        case list() | tuple():
            for i, item in enumerate(value):
                _check(item, f"{where}[{i}]")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise NotCanonical(where, f"the {type(key).__name__} key {key!r}")
                _check(item, f"{where}[{key!r}]")
        case _:
            raise NotCanonical(where, f"the {type(value).__name__} {value!r}")
