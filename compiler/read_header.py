"""What lies where in one safetensors file, read strictly from its first bytes.

The rules are those of the safetensors README, "Format". Where it is silent, the crate `safetensors` 0.8.0 decides: what
is accepted here it accepts too, and reads alike. It accepts more, and is not followed, in these places:

- blanks before the `{` that the README says a header MUST begin with;
- a key given twice, also as `a` and `\\u0061`: it keeps the last one, other parsers the first;
- an entry given as an array, and fields besides dtype, shape and data_offsets: no writer is known to make either, and
  to skip a field is to break whatever it promises;
- shapes that torch or numpy cannot hold: over 64 dims, a dim of 2**63, or dims around a 0 that multiply to that.

Names are never changed or folded: `é` in one code point and in two are two tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from reprlib import Repr
from typing import TypeGuard

from loadplan.compiler.checkpoint import Entry
from loadplan.compiler.problem import CheckpointError, Problem
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType

_MAX_HEADER_NBYTES = 100_000_000  # crate `safetensors`, MAX_HEADER_SIZE
_MAX_NDIM = 64  # numpy 2, NPY_MAXDIMS
_MAX_SIZE = 2**63 - 1  # torch keeps sizes and strides in an int64, Linux file offsets too
_SNIFFED_NBYTES = 512  # enough for a git-lfs pointer, which is under 200 bytes

_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_DTYPES = {dtype.value: (dtype, dtype.bits) for dtype in DType}
_BLANKS = " \n\t\r"  # RFC 8259, section 2

_REPAIR = "download it again, or have its writer repaired"
_SHORT = Repr()
_SHORT.maxstring = 200

_Place = tuple[int, int, str, TensorType]  # begin and end in bytes of the data, name, type; sorts in file order


@dataclass(frozen=True, slots=True)
class Header:
    """The entries of one file, in the order of their data: by offset, a zero-size tensor before the others there, then by name."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]  # `__metadata__`, free text; empty when there is none
    nbytes: int  # of the file before the data: 8 and the JSON
    raw: bytes = field(repr=False)  # those bytes


class _Fault(ValueError):
    """One broken rule, worded to follow the name of the file or tensor that breaks it."""


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Stands for a JSON object that gives these keys more than once."""

    keys: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(map(_show, self.keys))


def read_header(path: Path, *, name: str) -> tuple[Header, str]:
    """The header of a file, and the SHA-256 (hex) of its `Header.nbytes` bytes; no data is read.

    Args:
        path: the file.
        name: what to call it in entries and messages.

    Raises:
        CheckpointError: the file cannot be read, or is no safetensors file; lists every fault found.
    """
    try:
        with path.open("rb", buffering=0) as file:  # a buffer would read ahead into the data
            size = os.fstat(file.fileno()).st_size
            raw = file.read(8)
            if not _is_frame(raw, size):
                raw += file.read(_SNIFFED_NBYTES)
            raw += file.read(frame_length(raw, name=name, size=size))
    except OSError as error:
        raise CheckpointError([_problem(name, _unreadable(path, error))]) from error
    return parse_header(raw, name=name, size=size), hashlib.sha256(raw).hexdigest()


def frame_length(prefix: bytes, *, name: str, size: int) -> int:
    """The length of the JSON in bytes, checked against the limit of the format, then against the file's size.

    Args:
        prefix: the first 8 bytes of the file; more of them lets the message tell what the file is instead.
        name: what to call the file in messages.
        size: of the whole file, in bytes.

    Raises:
        CheckpointError: the file does not begin as a safetensors file does, or ends inside its header.
    """
    if not _is_frame(prefix, size):
        raise CheckpointError([_problem(name, _wrong_frame(prefix, size))])
    return _length(prefix)


def parse_header(raw: bytes, *, name: str, size: int) -> Header:
    """The header that `raw` holds.

    Args:
        raw: the first 8 + `frame_length` bytes of the file.
        name: what to call the file in entries and messages.
        size: of the whole file, in bytes.

    Raises:
        CheckpointError: lists every fault found: of entries in header order, then of the layout in file order.
    """
    nbytes = 8 + frame_length(raw, name=name, size=size)
    if len(raw) != nbytes:
        fault = f"has a header of {nbytes} bytes, {len(raw)} could be read: leave the file alone, then try again"
        raise CheckpointError([_problem(name, fault)])
    try:
        tree = _parse_json(raw[8:])
    except _Fault as fault:
        raise CheckpointError([_problem(name, str(fault))]) from fault.__cause__
    if isinstance(tree, _Repeated):
        twice = ((key, f"has {_show(key)} twice in its header: {_REPAIR}") for key in tree.keys)
        raise CheckpointError(_problem(name, fault, key) for key, fault in twice)

    problems: list[Problem] = []
    metadata: dict[str, str] = {}
    try:
        metadata = _parse_metadata(tree.pop("__metadata__", None))
    except _Fault as fault:
        problems.append(_problem(name, str(fault)))
    places: list[_Place] = []
    for tensor in tuple(tree):  # popped, so that the gc has less to walk: 0.88 s, not 1.08 s, for 90,000 entries
        try:
            places.append(_parse_entry(tensor, tree.pop(tensor)))
        except _Fault as fault:
            problems.append(_tensor_problem(name, str(fault), tensor))
    places.sort()
    problems += _check_layout(places, name, size=size, start=nbytes, is_whole=not problems)
    if problems:
        raise CheckpointError(problems)
    return Header(
        tuple(Entry(key, type_, name, nbytes + begin) for begin, _, key, type_ in places), metadata, nbytes, raw
    )


def _length(prefix: bytes) -> int:
    return int.from_bytes(prefix[:8], "little")


def _is_frame(prefix: bytes, size: int) -> bool:
    return len(prefix) >= 8 and 0 < _length(prefix) <= min(_MAX_HEADER_NBYTES, size - 8)


def _wrong_frame(prefix: bytes, size: int) -> str:
    """What is wrong with a file whose first bytes are no frame; only such a file is looked at for another format."""
    if size == 0:
        return "is empty (0 bytes): download it again"
    if min(size, len(prefix)) < 8:
        return f"is truncated: has {min(size, len(prefix))} bytes, not even the 8 of a header length: download it again"
    length = _length(prefix)
    if length == 0:
        return "has a header length of 0, as a file of zeros that was allocated and never written: download it again"
    if prefix.startswith(b"PK\x03\x04"):
        return "is a zip archive, as torch.save writes, not a safetensors file: let its name end in .bin or .pt"
    if length <= _MAX_HEADER_NBYTES:  # before the next formats, for 640 begins as a pickle does, and 60 is a `<`
        return f"is truncated inside its header: has {size} bytes of at least {8 + length}: download it again"
    if pointer := re.match(rb"version https://git-lfs\.github\.com/spec/.*?\nsize (\d{1,20})\b", prefix, re.DOTALL):
        real = int(pointer[1])
        return f"is a git-lfs pointer of {size} bytes, not the {real} bytes it stands for: run `git lfs pull`"
    if re.match(rb"\x80[\x02-\x05]", prefix):
        return "is a pickle, not a safetensors file: let its name end in .bin or .pt"
    if prefix.lstrip().startswith(b"<"):
        return "is an HTML or XML page, not a safetensors file: check the link and the login, then download it again"
    if re.match(rb"[\t\n\r -~]{8}", prefix):
        return f"is text that begins with {prefix[:8]!r}, not a safetensors file: read it, then download the file again"
    swapped = int.from_bytes(prefix[:8], "big")
    order = f" (big-endian it would be {swapped})" if swapped <= size - 8 else ""
    return f"has a header length of {length}{order}, over the limit of {_MAX_HEADER_NBYTES} bytes: {_REPAIR}"


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"is a link to {_show(str(path.readlink()))}, which does not exist: finish the download"
    return f"cannot be read: {error.strerror or error}"


def _parse_json(raw: bytes) -> dict[str, object] | _Repeated:
    if not raw.startswith(b"{"):
        raise _Fault(f"has a header that begins with {raw[:1]!r}, not with '{{': {_REPAIR}")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _Fault(f"has a header that is not UTF-8 at byte {8 + error.start}: {_REPAIR}") from error
    # json makes -0 the integer 0; to look at each integer costs time, so it is done only where one may be -0.
    decoder = json.JSONDecoder(object_pairs_hook=_parse_object, parse_int=_parse_int if "-0" in text else None)
    try:
        tree, end = decoder.raw_decode(text)
    except json.JSONDecodeError as error:
        place = 8 + len(text[: error.pos].encode())
        raise _Fault(f"has a header that is not JSON: {error.msg} at byte {place}: {_REPAIR}") from error
    except RecursionError:
        raise _Fault(f"has a header that nests too deep to be read: {_REPAIR}") from None
    except ValueError as error:  # int() stops at sys.get_int_max_str_digits(), by default 4300
        raise _Fault(f"has a header with a number of thousands of digits: {_REPAIR}") from error
    rest = text[end:].strip(_BLANKS)
    if rest.startswith(',"__metadata__"') and not tree:  # safetensors#466; 0.8.0 still does so for empty metadata
        raise _Fault("has the broken header that safetensors writes for a file without tensors: leave the file out")
    if rest:
        raise _Fault(f"has {_show(rest)} after its header's closing brace, where only blanks may stand: {_REPAIR}")
    assert isinstance(tree, dict | _Repeated)  # it began with `{`
    return tree


def _parse_object(pairs: list[tuple[str, object]]) -> dict[str, object] | _Repeated:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    return _Repeated(tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))


def _parse_int(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _parse_metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, _Repeated):
        raise _Fault(f"has {value} twice in __metadata__: {_REPAIR}")
    if not isinstance(value, dict):
        raise _Fault(f"has a __metadata__ that is {_show(value)}, not an object of strings: {_REPAIR}")
    for key, text in value.items():
        if not isinstance(text, str):
            raise _Fault(f"has a value in __metadata__ that is {_show(text)}, not a string, at {_show(key)}: {_REPAIR}")
        if not (_is_unicode(key) and _is_unicode(text)):
            raise _Fault(f"has a lone surrogate in __metadata__ at {_show(key)}, which is not Unicode: {_REPAIR}")
    return value


def _parse_entry(name: str, fields: object) -> _Place:
    if not _is_unicode(name):
        raise _Fault("has a lone surrogate in its name, which is not Unicode")
    if isinstance(fields, _Repeated):
        raise _Fault(f"has {fields} twice")
    if not isinstance(fields, dict):
        raise _Fault(f"is {_show(fields)}, not an object of dtype, shape and data_offsets")
    if fields.keys() != _FIELDS:
        wrong = [f"no {field}" for field in sorted(_FIELDS - fields.keys())]
        wrong += [f"the unknown field {_show(field)}" for field in sorted(fields.keys() - _FIELDS)]
        raise _Fault(f"has {', '.join(wrong)}")
    begin, end = _parse_range(fields["data_offsets"])
    return begin, end, name, _parse_type(fields["dtype"], fields["shape"], end - begin)


def _parse_range(offsets: object) -> tuple[int, int]:
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise _Fault(f"has data_offsets that are {_show(offsets)}, not an array of 2: begin and end")
    begin, end = offsets
    if not (_is_size(begin) and _is_size(end)):
        raise _Fault(f"has data_offsets [{_show(begin)}, {_show(end)}], not integers from 0 to {_MAX_SIZE}")
    if begin > end:
        raise _Fault(f"has data_offsets [{begin}, {end}] that end before they begin")
    return begin, end


def _parse_type(word: object, shape: object, nbytes: int) -> TensorType:
    if not isinstance(word, str) or word not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise _Fault(f"has the unknown dtype {_show(word)}, not one of {known}; a newer loadplan may know it")
    if not isinstance(shape, list):
        raise _Fault(f"has a shape that is {_show(shape)}, not an array")
    if len(shape) > _MAX_NDIM:
        raise _Fault(f"has {len(shape)} dims, over the limit of {_MAX_NDIM}")
    if not all(map(_is_size, shape)):
        raise _Fault(f"has the shape [{', '.join(map(_show, shape))}], not integers from 0 to {_MAX_SIZE}")
    dtype, bits = _DTYPES[word]
    type_ = TensorType(tuple(shape), dtype)
    numel = prod(shape)
    # The dims around a 0 count too: torch multiplies them into strides, and other parsers stop at the overflow.
    if (numel or prod(extent or 1 for extent in shape)) > _MAX_SIZE:
        raise _Fault(f"has the type {type_}, whose dims multiply to more than {_MAX_SIZE}")
    if numel * bits % 8:
        raise _Fault(f"has the type {type_} of {numel * bits} bits, which do not end at a byte")
    if numel * bits != nbytes * 8:
        raise _Fault(f"has the type {type_} of {numel * bits // 8} bytes, its data_offsets span {nbytes}")
    return type_


def _check_layout(places: list[_Place], file: str, *, size: int, start: int, is_whole: bool) -> Iterator[Problem]:
    """Overlaps, holes, and a wrong end of the data; `is_whole` says that no faulty entry is left out."""
    reached, holder, holder_begin = 0, "", 0
    for begin, end, name, _ in places:
        if begin < reached:
            fault = f"has data_offsets [{begin}, {end}], inside tensor {_show(holder)} at [{holder_begin}, {reached}]"
            yield _tensor_problem(file, f"{fault}: no two may share bytes", name, holder)
        elif begin > reached and is_whole:
            fault = f"has data_offsets [{begin}, {end}] after a hole: bytes {reached} to {begin} belong to no tensor"
            yield _tensor_problem(file, fault, name)
        if end > reached:
            reached, holder, holder_begin = end, name, begin
    need = start + reached
    if size < need:
        yield _problem(file, f"is truncated: has {size} of {need} bytes, {need - size} are missing: download it again")
    elif size > need and is_whole:
        extra = f"has {size - need} bytes after its last tensor: has {size} bytes, its header accounts for {need}"
        yield _problem(file, f"{extra}: download it again")


def _problem(file: str, fault: str, *tensors: str) -> Problem:
    shown = file if file.isprintable() else _show(file)
    return Problem("header", f"{shown}: {fault}", (file, *filter(_is_unicode, tensors)))


def _tensor_problem(file: str, fault: str, tensor: str, *others: str) -> Problem:
    return _problem(file, f"tensor {_show(tensor)} {fault}: {_REPAIR}", tensor, *others)


def _show(value: object) -> str:
    """A JSON value in a message: strings escaped and cut, never more than the size of a container."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict | _Repeated):
        return "an object"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return _SHORT.repr(value)


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
