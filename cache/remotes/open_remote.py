"""From an address and options to a remote: the one place that knows which kind is which."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from loadplan.cache.error import LoadplanError
from loadplan.cache.remotes.directory import DirectoryRemote
from loadplan.cache.remotes.fsspec_remote import FsspecRemote
from loadplan.cache.remotes.http_client import Login
from loadplan.cache.remotes.http_remote import HttpRemote
from loadplan.cache.remotes.remote import Remote


class BadRemoteAddress(LoadplanError, ValueError):
    """An address or option that no kind of remote takes."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address, self.reason = address, reason

    def __str__(self) -> str:
        return f"remote {self.address}: {self.reason}; give a folder, an http(s):// URL, or a URL that fsspec knows"


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How to reach a remote. Secrets are named, not given: `token_env` and `login_env` are environment variables."""

    read_only: bool = True  # a machine that serves only pulls; those that push say so
    timeout_s: float = 30.0  # for each wait on the network
    token_env: str | None = None  # http: holds a bearer token
    login_env: str | None = None  # http: holds user:password
    ca_file: Path | None = None  # https: certificates to trust instead of the system's
    zstd: bool = False  # http: compress on the wire where the server can (bazel-remote)
    storage: Mapping[str, Any] = field(default_factory=dict)  # fsspec: options of the file system


_COMMON = {"read_only"}
_HTTP = _COMMON | {"timeout_s", "token_env", "login_env", "ca_file", "zstd"}
_FSSPEC = _COMMON | {"timeout_s", "storage"}


def open_remote(
    address: str | Path, options: RemoteOptions | None = None, environ: Mapping[str, str] | None = None
) -> Remote:
    """The remote at `address`; nothing is contacted yet.

    A path or file:// URL is a folder, http(s):// speaks Bazel's cache protocol, and any other URL is fsspec's.

    Raises:
        BadRemoteAddress: no remote, an option that this kind does not have, or a variable that is not set.
        RemoteLibraryMissing: the package for this kind is not installed.
    """
    options = options or RemoteOptions()
    environ = os.environ if environ is None else environ
    text = str(address)
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - looks whether it is a number
    except ValueError as error:
        raise BadRemoteAddress(text.rpartition("@")[2], str(error)) from error
    if not text:
        raise BadRemoteAddress("''", "no address")
    if isinstance(address, Path) or "://" not in text:
        _check_options(text, options, _COMMON)
        return DirectoryRemote(Path(address).absolute(), read_only=options.read_only)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "::" in text:
        raise BadRemoteAddress(shown, "chained URLs cache or rewrite what they read")
    if parts.scheme == "file":
        _check_options(shown, options, _COMMON)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise BadRemoteAddress(shown, f"file:// with a host ({parts.netloc}) or without a path")
        return DirectoryRemote(Path(unquote(parts.path)), read_only=options.read_only)
    if parts.scheme in ("http", "https"):
        _check_options(shown, options, _HTTP)
        if not parts.hostname or parts.query or parts.fragment:
            raise BadRemoteAddress(shown, "no host, or a query")
        try:
            return HttpRemote(
                text,
                read_only=options.read_only,
                login=_find_login(shown, options, environ),
                ca_file=options.ca_file,
                timeout_s=options.timeout_s,
                zstd=options.zstd,
            )
        except OSError as error:  # nothing else is opened yet; ssl's errors are OSErrors
            raise BadRemoteAddress(shown, f"ca_file {options.ca_file}: {error.strerror}") from error
    _check_options(shown, options, _FSSPEC)
    try:
        return FsspecRemote(text, read_only=options.read_only, timeout_s=options.timeout_s, storage=options.storage)
    except ValueError as error:  # fsspec: an unknown protocol, or options that it does not take
        raise BadRemoteAddress(shown, f"fsspec: {error}"[:200]) from error


def _check_options(address: str, options: RemoteOptions, taken: set[str]) -> None:
    """That no option is given which would be ignored."""
    plain = RemoteOptions()
    given = {f.name for f in fields(options) if getattr(options, f.name) != getattr(plain, f.name)}
    if given - taken:
        raise BadRemoteAddress(address, f"no option {', '.join(sorted(given - taken))} for this kind of remote")


def _find_login(address: str, options: RemoteOptions, environ: Mapping[str, str]) -> Login | None:
    if options.token_env and options.login_env:
        raise BadRemoteAddress(address, "both token_env and login_env")
    name = options.token_env or options.login_env
    if name is None:
        return None
    secret = environ.get(name, "").strip()
    if not secret:
        raise BadRemoteAddress(address, f"the environment variable {name} is not set")
    if not secret.isascii() or not secret.isprintable():
        raise BadRemoteAddress(address, f"the environment variable {name} holds more than printable ASCII")
    if options.token_env:
        return Login.bearer(secret)
    user, colon, password = secret.partition(":")
    if not colon:
        raise BadRemoteAddress(address, f"the environment variable {name} is not user:password")
    return Login.basic(user, password)
