"""The folder's public names, and errors that survive the way back from another process."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import loadplan.cache
from loadplan.cache import error as error_module

ERRORS = (
    loadplan.cache.ArtifactIncomplete("0" * 64, ("a", "b"), 3),
    loadplan.cache.BadArtifact("a", "b"),
    loadplan.cache.BlobMissing(Path("a"), "0" * 64),
    loadplan.cache.CannotMaterialize("a: is there"),
    loadplan.cache.DigestMismatch(Path("a"), "0" * 64, "1" * 64),
    loadplan.cache.FileChanged(Path("a"), 1, 2),
    loadplan.cache.FolderExists(Path("a")),
    loadplan.cache.FolderNotWritable(13, "Permission denied", "a"),
    loadplan.cache.NoSuchPin("a", ("b",)),
    loadplan.cache.KeyExists(Path("a")),
    loadplan.cache.KeyFileError(Path("a"), "is no key"),
    loadplan.cache.NotADigest("a"),
    loadplan.cache.NotCached("0" * 64, Path("a")),
    loadplan.cache.NotCanonical("a", "b"),
    loadplan.cache.NotReadable(13, "Permission denied", "a"),
    loadplan.cache.PinsDamaged((Path("a"),)),
    loadplan.cache.ReservedNote("signature:a"),
    loadplan.cache.SigningLibraryMissing(),
)


def test_names_are_sorted_and_exist() -> None:
    assert loadplan.cache.__all__ == sorted(loadplan.cache.__all__)
    assert all(hasattr(loadplan.cache, name) for name in loadplan.cache.__all__)


def test_every_error_is_tried_here() -> None:
    exported = {getattr(loadplan.cache, name) for name in loadplan.cache.__all__}
    errors = {found for found in exported if isinstance(found, type) and issubclass(found, Exception)}
    assert errors - {error_module.LoadplanError} == {type(error) for error in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert isinstance(error, error_module.LoadplanError)
    assert len(type(error).__mro__) > len(error_module.LoadplanError.__mro__) + 1  # also a built-in error


def test_imports_the_standard_library_only() -> None:
    script = (
        "import sys; from loadplan.cache import *; Cache, read_public_key; "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "numpy", "msgpack", "zstandard", "pydantic", "doit", "cryptography"}.isdisjoint(loaded)
