"""Small JSON files that know their own digest, so that a torn or altered one reads as absent.

A record is the digest of the rest in hex, a newline, then canonical JSON.
"""

import json
import os
from io import FileIO
from pathlib import Path

from loadplan.cache.digest import canonical_json, digest_bytes
from loadplan.cache.error import LoadplanError
from loadplan.cache.write_file import make_folder, write_atomically


class NotReadable(LoadplanError, PermissionError):
    """A file of the cache that may not be read, so that nobody can say what it holds."""

    def __init__(self, number: int | None, reason: str | None, filename: str) -> None:
        super().__init__(number, reason, filename)

    def __str__(self) -> str:
        return (
            f"{self.filename}: cannot be read ({self.strerror}); "
            "change the permissions of the cache, or choose another folder"
        )


def write_record(path: Path, value: object, *, is_durable: bool = True) -> None:
    """Make `path` a record of `value`, atomically, with the folders above it; if not durable, a power cut may undo it."""
    make_folder(path.parent)
    write_atomically(path, format_record(value), is_durable=is_durable)


def find_record(path: Path) -> object:
    """What `write_record` wrote at `path`; None when there is nothing, or it is damaged.

    The access time stays, where the system lets us: it says when the entry was last used.

    Raises:
        NotReadable: there may be a record, but we may not look.
    """
    try:
        with FileIO(path, opener=_open_quietly) as file:
            data = file.readall()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError as error:
        raise NotReadable(error.errno, error.strerror, str(path)) from error
    return parse_record(data)


def _open_quietly(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only the owner may
        return os.open(path, flags)


def format_record(value: object) -> bytes:
    body = canonical_json(value)
    return digest_bytes(body).encode() + b"\n" + body


def parse_record(data: bytes) -> object:
    """The value of a record, or None when the bytes are not a whole record."""
    head, _, body = data.partition(b"\n")
    if head != digest_bytes(body).encode():
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):  # right digest, yet not JSON, not UTF-8, or nested without end
        return None
