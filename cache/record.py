"""Small JSON files that know their own digest, so that a torn or altered one reads as absent.

A record is the digest of the rest in hex, a newline, then canonical JSON.
"""

import json
from pathlib import Path

from loadplan.cache.digest import canonical_json, digest_bytes
from loadplan.cache.write_file import make_folder, write_atomically


def write_record(path: Path, value: object) -> None:
    """Make `path` a record of `value`, atomically, with the folders above it."""
    make_folder(path.parent)
    write_atomically(path, format_record(value))


def find_record(path: Path) -> object:
    """What `write_record` wrote at `path`; None when there is nothing, or it is damaged."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return parse_record(data)


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
