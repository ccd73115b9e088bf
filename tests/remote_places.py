"""One of each kind of remote over a real server or folder, with a back door to spoil what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from remote_servers import NGINX, run_cache_server, run_nginx, run_s3

from loadplan.cache.remotes import Remote, RemoteOptions, TransferPolicy, open_remote

KINDS = ("directory", "memory", "s3", "nginx", "nginx-login", "bazel", "bazel-zstd")

QUICK = TransferPolicy(threads=4, attempts=3, first_delay_s=0.001, max_delay_s=0.002, deadline_s=60.0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a remote keeps its things. `write` and `remove` go behind its back; `what` is "entry" or "blob"."""

    kind: str
    open: Callable[[bool], Remote]  # read_only -> remote
    write: Callable[[str, str, bytes], None]  # what, digest, data
    remove: Callable[[str, str], None]
    read: Callable[[str, str], bytes]


@contextmanager
def make_place(kind: str, folder: Path) -> Iterator[Place]:
    if kind == "directory":
        root = folder / "remote"
        root.mkdir()
        yield _make_folder_place(kind, root)
    elif kind == "memory":
        yield _make_fsspec_place(kind, f"memory://{uuid4().hex}/sub", {})
    elif kind == "s3":
        with run_s3() as endpoint:
            storage = {"key": "an-access-key", "secret": "a-secret-key", "client_kwargs": {"endpoint_url": endpoint}}
            yield _make_fsspec_place(kind, "s3://bucket/sub", storage)
    elif kind.startswith("nginx"):
        if NGINX is None:
            pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
        with run_nginx(folder / "nginx") as nginx:
            login, name = ("user:pass%20word@", "private") if kind == "nginx-login" else ("", "open")
            files = nginx.root / "files" / name
            yield _make_bazel_folder_place(kind, files, f"http://{login}127.0.0.1:{nginx.port}/{name}")
    else:
        with run_cache_server(zstd=kind == "bazel-zstd") as server:
            held = server.files

            def path(what: str, digest: str) -> str:
                return f"/{'ac' if what == 'entry' else 'cas'}/{digest}"

            yield Place(
                kind,
                lambda read_only: open_remote(server.url, RemoteOptions(read_only=read_only, zstd=server.zstd)),
                lambda what, digest, data: held.__setitem__(path(what, digest), data),
                lambda what, digest: held.__delitem__(path(what, digest)),
                lambda what, digest: held[path(what, digest)],
            )


def _make_folder_place(kind: str, root: Path) -> Place:
    def path(what: str, digest: str) -> Path:
        return root / ("actions" if what == "entry" else "blobs") / digest[:2] / digest[2:]

    return _make_path_place(kind, str(root), path)


def _make_bazel_folder_place(kind: str, root: Path, address: str) -> Place:
    return _make_path_place(kind, address, lambda what, digest: root / ("ac" if what == "entry" else "cas") / digest)


def _make_path_place(kind: str, address: str, path: Callable[[str, str], Path]) -> Place:
    def write(what: str, digest: str, data: bytes) -> None:
        path(what, digest).unlink(missing_ok=True)
        path(what, digest).parent.mkdir(parents=True, exist_ok=True)
        path(what, digest).write_bytes(data)

    return Place(
        kind,
        lambda read_only: open_remote(address, RemoteOptions(read_only=read_only)),
        write,
        lambda what, digest: path(what, digest).unlink(),
        lambda what, digest: path(what, digest).read_bytes(),
    )


def _make_fsspec_place(kind: str, address: str, storage: Mapping[str, object]) -> Place:
    files, root = fsspec.core.url_to_fs(address, use_listings_cache=False, **storage)

    def path(what: str, digest: str) -> str:
        return f"{root}/{'actions' if what == 'entry' else 'blobs'}/{digest[:2]}/{digest[2:]}"

    return Place(
        kind,
        cache(
            lambda read_only: open_remote(address, RemoteOptions(read_only=read_only, storage=storage))
        ),  # slow to open
        lambda what, digest, data: files.pipe_file(path(what, digest), data),
        lambda what, digest: files.rm_file(path(what, digest)),
        lambda what, digest: bytes(files.cat_file(path(what, digest))),
    )
