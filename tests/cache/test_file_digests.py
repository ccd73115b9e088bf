"""A file is read once, and again whenever it may have changed."""

import hashlib
import logging
import os
import time
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.cache.digest import digest_bytes
from loadplan.cache.file_digests import FileChanged, FileDigests, FileState, parse_file_digest
from loadplan.cache.record import format_record, parse_record

STATE = FileState(device=1, inode=2, nbytes=3, mtime_ns=4, ctime_ns=5)
DIGEST = digest_bytes(b"")
GOOD = {"format": 1, "state": [1, 2, 3, 4, 5], "digest": DIGEST}


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "file-digests")


def write(path: Path, data: bytes) -> None:
    """Make `path` a file that was last written an hour ago."""
    path.write_bytes(data)
    then_ns = time.time_ns() - 3_600_000_000_000
    os.utime(path, ns=(then_ns, then_ns))


def records(digests: FileDigests) -> list[Path]:
    return [path for path in sorted(digests.folder.rglob("*")) if path.is_file()]


def forge(digests: FileDigests, path: Path) -> None:
    """Make the record of `path` say what only a reader of the record would answer."""
    (record,) = records(digests)
    value = {"format": 1, "state": astuple(FileState.of(path)), "digest": "f" * 64}
    record.write_bytes(format_record(value))


def test_the_second_answer_comes_from_the_record(digests: FileDigests, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"one")
    assert digests.digest(path) == digest_bytes(b"one")
    forge(digests, path)
    assert digests.digest(path) == "f" * 64


def test_a_link_and_a_new_name_know_the_file(digests: FileDigests, tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    write(path, b"one")
    digests.digest(path)
    forge(digests, path)
    link.symlink_to(path)
    assert digests.digest(link) == "f" * 64


def test_changes_are_seen(digests: FileDigests, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"one")
    then_ns = path.stat().st_mtime_ns
    assert digests.digest(path) == digest_bytes(b"one")
    path.write_bytes(b"two")
    os.utime(path, ns=(then_ns, then_ns))  # same size, same mtime: ctime tells
    assert digests.digest(path) == digest_bytes(b"two")
    other = tmp_path / "other"
    write(other, b"six")
    other.replace(path)
    assert digests.digest(path) == digest_bytes(b"six")


@pytest.mark.parametrize(("age_ns", "count"), [(2_000_000_000, 1), (1_999_999_999, 0), (0, 0), (-3_600_000_000_000, 0)])
def test_fresh_files_are_not_remembered(
    digests: FileDigests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_ns: int, count: int
) -> None:
    path = tmp_path / "file"
    write(path, b"one")
    now_ns = path.stat().st_mtime_ns + age_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    assert digests.digest(path) == digest_bytes(b"one")
    assert len(records(digests)) == count


@pytest.mark.parametrize("data", [b"", b"junk", format_record(GOOD)])
def test_damage_is_a_miss_and_is_mended(digests: FileDigests, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    write(path, b"one")
    digests.digest(path)
    (record,) = records(digests)
    good = record.read_bytes()
    record.write_bytes(data)
    assert digests.digest(path) == digest_bytes(b"one")
    assert record.read_bytes() == good


def test_written_to_during_the_reading(digests: FileDigests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write(path, b"one")
    sha256 = hashlib.sha256

    def append_and_hash(data: bytes = b"") -> Any:
        with path.open("ab") as file:
            file.write(b"!")
        return sha256(data)

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", append_and_hash)
        with pytest.raises(FileChanged) as caught:
            digests.digest(path)
    assert isinstance(caught.value, OSError)
    assert str(caught.value).startswith(f"{path}: changed while it was read (3 bytes before, ")
    assert records(digests) == []


def test_replaced_during_the_reading(digests: FileDigests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    write(path, b"one")
    write(other, b"two")
    sha256 = hashlib.sha256

    def replace_and_hash(data: bytes = b"") -> Any:
        if other.exists():
            other.replace(path)
        return sha256(data)

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", replace_and_hash)
        with pytest.raises(FileChanged, match="3 bytes before, 3 after"):
            digests.digest(path)
    assert digests.digest(path) == digest_bytes(b"two")


def test_a_folder_that_takes_no_records_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file"
    write(path, b"one")
    with caplog.at_level(logging.WARNING):
        assert FileDigests(path / "file-digests").digest(path) == digest_bytes(b"one")
    assert f"file digest not remembered: {path}: cannot be written" in caplog.text


def test_missing_file(digests: FileDigests, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digests.digest(tmp_path / "absent")


@pytest.mark.parametrize("name", ["device", "inode", "nbytes", "mtime_ns", "ctime_ns"])
def test_each_part_of_the_state_counts(name: str) -> None:
    assert parse_file_digest(GOOD, STATE) == DIGEST
    assert parse_file_digest(GOOD, replace(STATE, **{name: 9})) is None


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"state": [1, 2, 3, 4]}, {"state": None}, {"digest": "x"}, {"digest": 1}, {"digest": DIGEST[:63]}],
)
def test_records_that_say_something_else(change: dict[str, object]) -> None:
    assert parse_file_digest(GOOD | change, STATE) is None
    assert parse_file_digest({name: value for name, value in GOOD.items() if name not in change}, STATE) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*GOOD]) | st.text(), inner),
)


@settings(deadline=None)
@given(JSON)
def test_well_formed_records_of_anything(value: object) -> None:
    assert parse_file_digest(parse_record(format_record(value)), STATE) is None


@settings(deadline=None)
@given(st.fixed_dictionaries({"format": st.just(1), "state": JSON | st.just(GOOD["state"]), "digest": JSON}))
def test_records_of_nearly_the_right_shape(value: object) -> None:
    assert parse_file_digest(value, STATE) is None
