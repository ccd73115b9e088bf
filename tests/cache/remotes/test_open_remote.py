"""Addresses and options; what each kind needs installed; the errors of the folder."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from remote_servers import run_cache_server

import loadplan.cache.remotes as remotes_module
from loadplan.cache import Artifact, Cache, LoadplanError, NotADigest, digest_bytes
from loadplan.cache.remotes import (
    BadActionResult,
    BadRemoteAddress,
    BadRemoteData,
    DeadlinePassed,
    DirectoryRemote,
    FsspecRemote,
    HttpRemote,
    RemoteEntry,
    RemoteError,
    RemoteLibraryMissing,
    RemoteOffline,
    RemoteOptions,
    RemoteReadOnly,
    RemoteRefused,
    RemoteUnavailable,
    open_remote,
)
from loadplan.cache.remotes.remote_set import find_offline_variable

KEY = digest_bytes(b"key")
ERRORS = (
    BadActionResult("field number 0"),
    BadRemoteAddress("ftp", "no"),
    BadRemoteData("here", "torn"),
    DeadlinePassed("here", "not done in 3 s"),
    RemoteError("here", "odd"),
    RemoteLibraryMissing("here", "s3fs", "loadplan[s3]"),
    RemoteOffline("here", "X is set"),
    RemoteReadOnly("here", "opened for reading only"),
    RemoteRefused("here", "403"),
    RemoteUnavailable("here", "503", 7.0),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
    assert isinstance(error, LoadplanError)
    assert len(type(error).__mro__) > len(LoadplanError.__mro__) + 1  # also a built-in error


def test_every_error_is_tried_here() -> None:
    exported = {getattr(remotes_module, name) for name in remotes_module.__all__}
    errors = {found for found in exported if isinstance(found, type) and issubclass(found, Exception)}
    assert errors == {type(error) for error in ERRORS}
    assert remotes_module.__all__ == sorted(remotes_module.__all__)


@pytest.mark.parametrize(
    ("address", "kind", "name"),
    [
        (Path("/srv/cache"), DirectoryRemote, "/srv/cache"),
        ("/srv/cache", DirectoryRemote, "/srv/cache"),
        ("file:///srv/the%20cache", DirectoryRemote, "/srv/the cache"),
        ("http://host:8080/cache/", HttpRemote, "http://host:8080/cache"),
        ("https://user:secret@host/", HttpRemote, "https://host"),
        ("memory://x/y", FsspecRemote, "memory://x/y"),
    ],
)
def test_which_address_is_which_kind(address: str | Path, kind: type, name: str) -> None:
    remote = open_remote(address)
    assert isinstance(remote, kind)
    assert remote.name == name
    assert remote.read_only
    assert not open_remote(address, RemoteOptions(read_only=False)).read_only


def test_a_relative_folder_is_of_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_remote("cache").name == str(tmp_path / "cache")


@pytest.mark.parametrize(
    ("address", "options", "reason"),
    [
        ("nosuch://x", {}, "Protocol not known"),
        ("simplecache::s3://x", {}, "chained URLs"),
        ("file://elsewhere/x", {}, r"file:// with a host \(elsewhere\)"),
        ("file://", {}, "without a path"),
        ("", {}, "no address"),
        ("http:///x", {}, "no host"),
        ("http://user:secret@host:port/x", {}, "remote host:port/x: Port could not be cast"),
        ("http://user:secret@[::1/x", {}, "Invalid IPv6 URL"),
        ("http://host/x?y=z", {}, "or a query"),
        ("/srv/cache", {"zstd": True, "token_env": "X"}, "no option token_env, zstd for this kind"),
        ("memory://x", {"ca_file": Path("x")}, "no option ca_file"),
        ("http://host", {"storage": {"key": "x"}}, "no option storage"),
        ("http://host", {"token_env": "UNSET"}, "the environment variable UNSET is not set"),
        ("http://host", {"token_env": "TWO_LINES"}, "TWO_LINES holds more than printable ASCII"),
        ("http://host", {"login_env": "TOKEN"}, "TOKEN is not user:password"),
        ("http://host", {"login_env": "TOKEN", "token_env": "TOKEN"}, "both token_env and login_env"),
        ("https://host", {"ca_file": Path("/nowhere.pem")}, r"ca_file /nowhere\.pem: No such file"),
    ],
)
def test_what_is_no_remote(address: str, options: dict[str, Any], reason: str) -> None:
    environ = {"TOKEN": "hidden-secret", "TWO_LINES": "hidden\r\nX-Header: secret"}
    with pytest.raises(BadRemoteAddress, match=reason) as caught:
        open_remote(address, RemoteOptions(**options), environ)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "package", "message"),
    [
        ("http://host", "urllib3", r"remote http://host: needs urllib3, .* run pip install 'loadplan\[http\]'"),
        ("s3://bucket/x", "s3fs", r"remote s3://bucket/x: needs s3fs, .* run pip install 'loadplan\[s3\]'"),
    ],
)
def test_what_must_be_installed(address: str, package: str, message: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"  # as Python marks what cannot be imported
        "from loadplan.cache.remotes import RemoteLibraryMissing, open_remote\n"
        f"try: open_remote({address!r})\n"
        "except RemoteLibraryMissing as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.match(message, found.stdout)


def test_nothing_of_the_network_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys; from loadplan.cache.remotes import open_remote; import loadplan.cache.transfer\n"
        "open_remote('/srv/cache'); print(sorted({'urllib3', 'fsspec', 'zstandard', 's3fs', 'torch'} & set(sys.modules)))\n"
        "import loadplan.cache"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_cache_without_remotes_imports_none() -> None:
    code = "import sys, loadplan.cache; print('loadplan.cache.remotes' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_proxy_is_used_where_the_environment_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with run_cache_server() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("://", "://user:pass@"))
        assert open_remote("http://cache.invalid/x").find_entry(KEY) is None
        assert proxy.log[-1].path == f"http://cache.invalid/x/ac/{KEY}"
        assert proxy.log[-1].headers["Proxy-Authorization"].startswith("Basic ")
        proxy.log.clear()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with run_cache_server() as server:
            assert open_remote(server.url).find_entry(KEY) is None
        assert proxy.log == []


class _Failing(fsspec.spec.AbstractFileSystem):  # type: ignore[misc]
    """A file system whose library fails with any error, and says too much."""

    protocol = "failing"
    error: Exception = OSError()

    def __init__(self, password: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.password = password

    def info(self, path: str, **options: Any) -> Any:
        raise type(self.error)(f"cannot log in with {self.password} to {path}")


class _NoCredentialsError(Exception):
    pass


_NoCredentialsError.__name__ = "NoCredentialsError"  # botocore's


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(), RemoteRefused),
        (_NoCredentialsError(), RemoteRefused),
        (ConnectionResetError(), RemoteUnavailable),
        (TimeoutError(), RemoteUnavailable),
        (RuntimeError(), RemoteUnavailable),
        (KeyError(), RemoteUnavailable),
    ],
)
def test_errors_of_libraries_become_ours_without_the_secrets(
    error: Exception, kind: type[RemoteError], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("failing", _Failing, clobber=True)
    monkeypatch.setattr(_Failing, "error", error)
    remote = open_remote("failing://place/x", RemoteOptions(storage={"password": "hidden-secret"}))
    with pytest.raises(kind, match=r"cannot log in with \*\*\* to") as caught:
        remote.find_entry(KEY)
    assert "hidden-secret" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_on_a_file_system_that_shows_files_as_they_grow_a_move_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's own local files, under another name; ours for file:// is `DirectoryRemote`."""
    remote = FsspecRemote(f"local://{tmp_path}/remote", read_only=False)
    artifact = Artifact({"plan": digest_bytes(b"a plan")})
    source = Cache(tmp_path / "a")
    source.put(KEY, {"plan": b"a plan"})
    assert source.push([KEY], remote).entries == 1
    assert remote.find_entry(KEY) == RemoteEntry(artifact, {digest_bytes(b"a plan"): 6})
    assert Cache(tmp_path / "remote").find(KEY) == artifact
    assert list((tmp_path / "remote").rglob(".tmp-*")) == []
    remote.put_entry(KEY, RemoteEntry(Artifact({}), {}))
    assert Cache(tmp_path / "remote").find(KEY) == Artifact({})
    monkeypatch.setattr(type(remote._fs), "mv", lambda *_: 1 / 0)
    with pytest.raises(RemoteUnavailable, match="ZeroDivisionError"):
        remote.put_entry(KEY, RemoteEntry(artifact, {}))
    assert list((tmp_path / "remote").rglob(".tmp-*")) == []


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "memory://x", "/tmp"])
def test_no_text_leads_elsewhere(address: str) -> None:
    with pytest.raises(NotADigest):
        open_remote(address).find_entry("../" + "0" * 61)
    with pytest.raises(NotADigest):
        open_remote(address).has_blob("../" + "0" * 61, 3)


def test_offline_variables_are_read_as_the_hub_reads_them() -> None:
    assert find_offline_variable({}) is None
    for text in ("1", "on", "YES", "True"):
        assert find_offline_variable({"HF_HUB_OFFLINE": text}) == "HF_HUB_OFFLINE"
    for text in ("", "0", "off", "no", "2"):
        assert find_offline_variable({"LOADPLAN_OFFLINE": text}) is None
