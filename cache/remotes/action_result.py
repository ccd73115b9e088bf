"""The `ActionResult` message of Bazel's remote execution protocol, as far as loadplan's entries need it.

Source: build/bazel/remote/execution/v2/remote_execution.proto of bazelbuild/remote-apis. Fields used:

    ActionResult   output_files = 2, exit_code = 4, stdout_raw = 5, execution_metadata = 9
    OutputFile     path = 1, digest = 2, is_executable = 4
    Digest         hash = 1, size_bytes = 2
    ExecutedActionMetadata   worker = 1

Everything else is skipped, as protobuf asks, except outputs that an entry of loadplan never has (folders, links, a
failed action): those are refused. Servers may rewrite a message (bazel-remote adds a worker), so order is free; but a
field that may be there once is there once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loadplan.cache.error import LoadplanError

WORKER = "loadplan"  # bazel-remote fills in the client's address when it is empty

# Wire types: protobuf.dev/programming-guides/encoding, "Message Structure".
_VARINT, _BYTES = 0, 2
_FIXED_NBYTES = {1: 8, 5: 4}
_FOREIGN = {3: "folders", 6: "a stdout blob", 10: "links", 11: "links", 12: "links"}


class BadActionResult(LoadplanError, ValueError):
    """Bytes that are no ActionResult, or not one that loadplan writes."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"not an ActionResult of loadplan: {self.reason}; push the artifact again"


@dataclass(frozen=True, slots=True)
class OutputFile:
    path: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ActionResult:
    files: tuple[OutputFile, ...]
    stdout: bytes


def format_action_result(result: ActionResult) -> bytes:
    """The bytes of the message, fields in the order of their numbers."""
    files = b"".join(_field(2, _format_file(file)) for file in result.files)
    return files + _field(5, result.stdout) + _field(9, _field(1, WORKER.encode()))


def parse_action_result(data: bytes) -> ActionResult:
    """The message in `data`; its values are texts and numbers from outside, not yet checked.

    Raises:
        BadActionResult
    """
    files: list[OutputFile] = []
    stdout: bytes | None = None
    for number, value in _iter_fields(data):
        match number, value:
            case 2, bytes():
                files.append(_parse_file(value))
            case 5, bytes() if stdout is None:
                stdout = value
            case 4, 0:
                pass
            case ((2 | 5), _):
                raise BadActionResult(f"field {number} of the result is there twice or of another type")
            case 4, _:
                raise BadActionResult(f"the action ended with {value!r}")
            case ((3 | 6 | 10 | 11 | 12), _):
                raise BadActionResult(f"it has {_FOREIGN[number]}")
    return ActionResult(tuple(files), stdout or b"")


def _format_file(file: OutputFile) -> bytes:
    digest = _field(1, file.digest.encode()) + (_number(2, file.nbytes) if file.nbytes else b"")
    return _field(1, file.path.encode()) + _field(2, digest)


def _parse_file(data: bytes) -> OutputFile:
    path: str | None = None
    digest: tuple[str, int] | None = None
    for number, value in _iter_fields(data):
        match number, value:
            case 1, bytes() if path is None:
                path = _text(value)
            case 2, bytes() if digest is None:
                digest = _parse_digest(value)
            case ((1 | 2), _):
                raise BadActionResult(f"field {number} of an output file is there twice or of another type")
    if path is None or digest is None:
        raise BadActionResult("an output file has no path or no digest")
    return OutputFile(path, *digest)


def _parse_digest(data: bytes) -> tuple[str, int]:
    digest: str | None = None
    nbytes: int | None = None
    for number, value in _iter_fields(data):
        match number, value:
            case 1, bytes() if digest is None:
                digest = _text(value)
            case 2, int() if nbytes is None:
                nbytes = value if value < 1 << 63 else value - (1 << 64)  # int64 is sent as two's complement
            case ((1 | 2), _):
                raise BadActionResult(f"field {number} of a digest is there twice or of another type")
    return digest or "", nbytes or 0


def _iter_fields(data: bytes) -> Iterator[tuple[int, int | bytes | None]]:
    """Each field's number with its value: an int for a varint, None for a fixed-width number, which we have none of."""
    at = 0
    while at < len(data):
        tag, at = _parse_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 1 <= number < 1 << 29:
            raise BadActionResult(f"field number {number}")
        if kind == _VARINT:
            value, at = _parse_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            nbytes, at = _parse_varint(data, at)
        elif kind in _FIXED_NBYTES:
            nbytes = _FIXED_NBYTES[kind]
        else:
            raise BadActionResult(f"wire type {kind} of field {number}")
        if nbytes > len(data) - at:
            raise BadActionResult(f"field {number} ends after the message")
        yield number, data[at : at + nbytes] if kind == _BYTES else None
        at += nbytes


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if value >= 1 << 64:
                break
            return value, at + i + 1
    raise BadActionResult(f"no number at byte {at}")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadActionResult(f"{data[:40]!r} is not UTF-8") from error


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value & (1 << 64) - 1)  # below 0: two's complement


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)
