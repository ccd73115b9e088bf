"""Whatever fsspec reaches as a remote (s3://, gs://, az://, hf://, sftp://, memory://), in the store's own layout."""

import errno
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from loadplan.cache.digest import NotADigest, is_digest
from loadplan.cache.remotes.blob_streams import IncomingBlob, OutgoingBlob
from loadplan.cache.remotes.entry_format import format_entry_record, parse_entry_record
from loadplan.cache.remotes.remote import (
    MAX_ENTRY_NBYTES,
    BadRemoteData,
    RemoteEntry,
    RemoteError,
    RemoteLibraryMissing,
    RemoteRefused,
    RemoteUnavailable,
)
from loadplan.cache.write_file import TEMPORARY_PREFIX

READ_NBYTES = 8 << 20  # one range request: large beside its latency, small beside a lost connection
MIN_SECRET_LENGTH = 4  # shorter option values are words such as "us" that messages need

# An object shows only when all of it has been uploaded. Elsewhere a file grows under its name: there, a temporary name
# and a move come first.
_WHOLE_OBJECTS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "hf"}
_NO = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# Of the libraries below fsspec: nobody is logged in, or the place does not exist.
_REFUSALS = {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "GatedRepoError"}


class FsspecRemote:
    """Artifacts below an fsspec URL; `storage` goes to the file system's own constructor (keys, endpoint, profile).

    `timeout_s` is for s3, where it bounds each wait for the server; elsewhere the file system's own options say it.
    """

    def __init__(
        self,
        url: str,
        *,
        read_only: bool = True,
        timeout_s: float = 30.0,
        storage: Mapping[str, Any] | None = None,
    ) -> None:
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        self.read_only = read_only
        self._secrets = [parts.password or "", *_iter_texts(storage or {})]
        try:
            fsspec = import_module("fsspec")
            # Listings and file systems are remembered by fsspec; what another machine pushed would not be seen.
            options = {"use_listings_cache": False, "skip_instance_cache": True, **(storage or {})}
            if parts.scheme in ("s3", "s3a"):
                options.setdefault("config_kwargs", {"connect_timeout": timeout_s, "read_timeout": timeout_s})
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            package = "s3fs" if parts.scheme in ("s3", "s3a") else f"the fsspec package for {parts.scheme}://"
            install = "loadplan[s3]" if parts.scheme in ("s3", "s3a") else "fsspec"
            raise RemoteLibraryMissing(self.name, package, install) from error
        self._root = root.rstrip("/")
        self._is_atomic = parts.scheme in _WHOLE_OBJECTS

    def find_entry(self, key: str) -> RemoteEntry | None:
        path = self._path("actions", key)
        nbytes = self._find_nbytes(path)
        if nbytes is None:
            return None
        if nbytes > MAX_ENTRY_NBYTES:
            raise BadRemoteData(self.name, f"the entry of {key[:12]} is larger than {MAX_ENTRY_NBYTES} bytes")
        data = self._read(path, 0, nbytes)
        if data is None:
            return None
        return parse_entry_record(self.name, key, data, lambda digest: self._find_nbytes(self._path("blobs", digest)))

    def put_entry(self, key: str, entry: RemoteEntry) -> None:
        path = self._path("actions", key)
        with self._errors(), self._placed(path) as place:
            self._fs.pipe_file(place, format_entry_record(key, entry.artifact))

    def has_blob(self, digest: str, nbytes: int) -> bool:
        return self._find_nbytes(self._path("blobs", digest)) == nbytes

    def fetch_blob(self, blob: IncomingBlob) -> None:
        path = self._path("blobs", blob.digest)
        while blob.offset < blob.nbytes:
            data = self._read(path, blob.offset, min(blob.offset + READ_NBYTES, blob.nbytes))
            if not data:
                what = "is not there" if data is None else f"ends after {blob.offset} of {blob.nbytes} bytes"
                raise BadRemoteData(self.name, f"blob {blob.digest[:12]} {what}")
            blob.write(data)

    def put_blob(self, blob: OutgoingBlob) -> None:
        with self._errors(), self._placed(self._path("blobs", blob.digest)) as place:
            self._fs.put_file(str(blob.path), place)
        blob.count(blob.nbytes)

    def close(self) -> None:
        pass

    def _path(self, kind: str, digest: str) -> str:
        if not is_digest(digest):
            raise NotADigest(digest)
        return f"{self._root}/{kind}/{digest[:2]}/{digest[2:]}"

    def _find_nbytes(self, path: str) -> int | None:
        with self._errors():
            try:
                found = self._fs.info(path)
            except FileNotFoundError:
                return None
        nbytes = found.get("size")
        return nbytes if found.get("type") == "file" and isinstance(nbytes, int) else None

    def _read(self, path: str, start: int, stop: int) -> bytes | None:
        with self._errors():
            try:
                data = self._fs.cat_file(path, start=start, end=stop)
            except FileNotFoundError:
                return None
        assert isinstance(data, bytes)
        return data

    @contextmanager
    def _placed(self, path: str) -> Iterator[str]:
        """Where to write what is to be at `path`; it gets there at the end, as whole as the file system can."""
        folder, _, name = path.rpartition("/")
        if self._is_atomic:
            yield path
            return
        self._fs.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/{TEMPORARY_PREFIX}{name[:12]}-{secrets.token_hex(8)}"
        try:
            yield temporary
            with suppress(FileNotFoundError):
                self._fs.rm_file(path)  # some file systems (sftp) do not move onto a file; readers see a miss meanwhile
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn whatever the libraries below raise into the remote's errors, without the secrets it may show."""
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:  # noqa: BLE001 - botocore, aiohttp, paramiko, hub: they have no common root
            is_no = isinstance(error, PermissionError | FileNotFoundError) or type(error).__name__ in _REFUSALS
            is_no = is_no or (isinstance(error, OSError) and error.errno in _NO)
            kind = RemoteRefused if is_no else RemoteUnavailable
            raise kind(self.name, self._redact(f"{type(error).__name__}: {error}")[:300]) from None

    def _redact(self, text: str) -> str:
        for secret in self._secrets:
            if len(secret) >= MIN_SECRET_LENGTH:
                text = text.replace(secret, "***")
        return text


def _iter_texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for item in value.values():
                yield from _iter_texts(item)
        case list() | tuple():
            for item in value:
                yield from _iter_texts(item)
