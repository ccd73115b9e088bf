"""Where a checkpoint lies: a path, or `pkg://PACKAGE/SUBFOLDER` for files inside an installed Python package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from loadplan.cache.error import LoadplanError


class LocationError(LoadplanError, FileNotFoundError):
    """There is no checkpoint at a location, or its kind is not known."""


def locate(location: str | Path) -> Path:
    """The folder or file on this machine that `location` stands for.

    Raises:
        LocationError: it does not exist, or cannot be reached from here.
    """
    text = str(location)
    scheme, separator, rest = text.partition("://")
    if isinstance(location, Path) or not separator:
        path = Path(location).expanduser()
    elif scheme == "pkg":
        path = _in_package(text, rest)
    elif scheme == "hf":
        raise LocationError(
            f"{text}: this version reads local files; run `hf download {rest.partition('@')[0]}` and give the folder"
        )
    else:
        raise LocationError(f"{text}: not a location; give a path or pkg://PACKAGE/SUBFOLDER")
    if not path.exists():
        raise LocationError(f"{text}: no such file or folder")
    return path


def folder_of(path: Path) -> Path:
    """The checkpoint's folder: what `locate` gave, or where that lies if it is one of the files."""
    return path if path.is_dir() else path.parent


def _in_package(text: str, rest: str) -> Path:
    package, *parts = PurePosixPath(rest).parts or ("",)
    if not package.isidentifier() or ".." in parts:
        raise LocationError(f"{text}: give pkg://PACKAGE/SUBFOLDER with the package's import name")
    spec = find_spec(package)  # of a top-level package, so nothing is imported
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise LocationError(f"{text}: the Python package {package!r} is not installed here")
    return Path(folders[0], *parts)
