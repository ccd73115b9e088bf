"""A server that speaks Bazel's HTTP cache protocol: bazel-remote, nginx with WebDAV, or any plain file server to read.

`{url}/ac/{action key}` holds an `ActionResult`, `{url}/cas/{sha256}` a blob; GET, HEAD, PUT (bazel.build/remote/caching,
"HTTP Caching Protocol").

**zstd** on the wire is off unless asked for. Reading it is safe anywhere: a server that does not know it sends plain
bytes. Writing is not: a plain file server files the compressed bytes under the digest of the others. So before the
first upload a small blob of our own goes out compressed and is read back: only if it comes back as it was, others are
sent so. Whatever a reader gets is verified in any case.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, cast

from loadplan.cache.digest import NotADigest, digest_bytes, is_digest
from loadplan.cache.remotes.blob_streams import IncomingBlob, OutgoingBlob
from loadplan.cache.remotes.entry_format import format_entry_message, parse_entry_message
from loadplan.cache.remotes.http_client import HttpClient, Login, Response
from loadplan.cache.remotes.remote import MAX_ENTRY_NBYTES, BadRemoteData, RemoteEntry, RemoteRefused

logger = logging.getLogger(__name__)

READ_NBYTES = 1 << 20
# RFC 8878 lets a frame ask for terabytes of memory; compressors at their usual levels ask for 8 MiB at most.
MAX_ZSTD_WINDOW_NBYTES = 128 << 20

TRIAL = b"loadplan asks whether zstd is understood here\n" * 64

_ABSENT = (404, 410)
_NO_HEAD = (405, 501)


class HttpRemote:
    """Artifacts below `url`. `login` wins over user and password in the URL."""

    def __init__(
        self,
        url: str,
        *,
        read_only: bool = True,
        login: Login | None = None,
        ca_file: Path | None = None,
        timeout_s: float = 30.0,
        zstd: bool = False,
    ) -> None:
        self._client = HttpClient(url, login=login, ca_file=ca_file, timeout_s=timeout_s)
        self.name, self.read_only = self._client.name, read_only
        self._reads_zstd = zstd
        self._writes_zstd: bool | None = None if zstd else False  # None: the first upload will tell
        self._lock = threading.Lock()

    def find_entry(self, key: str) -> RemoteEntry | None:
        with self._client.send("GET", _path("ac", key), allowed=_ABSENT) as response:
            if response.status in _ABSENT:
                return None
            self._check_encoding(response, "identity")
            return parse_entry_message(self.name, key, response.read_all(MAX_ENTRY_NBYTES))

    def put_entry(self, key: str, entry: RemoteEntry) -> None:
        data = format_entry_message(key, entry)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
        with self._client.send("PUT", _path("ac", key), headers=headers, open_body=lambda: nullcontext(data)):
            pass

    def has_blob(self, digest: str, nbytes: int) -> bool:
        with self._client.send("HEAD", _path("cas", digest), allowed=(*_ABSENT, *_NO_HEAD)) as response:
            return 200 <= response.status < 300 and response.content_length in (None, nbytes)

    def fetch_blob(self, blob: IncomingBlob) -> None:
        headers = {}
        if blob.offset:
            headers["Range"] = f"bytes={blob.offset}-"  # of the plain bytes: no encoding is asked for
        elif self._reads_zstd:
            headers["Accept-Encoding"] = "zstd"
        with self._client.send("GET", _path("cas", blob.digest), headers=headers, allowed=(*_ABSENT, 416)) as response:
            if response.status in (*_ABSENT, 416):
                what = "is not there" if response.status in _ABSENT else f"has no byte {blob.offset}"
                raise BadRemoteData(self.name, f"blob {blob.digest[:12]} {what}")
            if blob.offset and response.status != 206:
                blob.restart()  # it does not know ranges, and sends the whole
            self._check_range(response, blob)
            for piece in self._iter_body(response, headers.get("Accept-Encoding", "identity"), blob):
                blob.write(piece)
            if blob.offset < blob.nbytes and response.is_framed:
                what = f"blob {blob.digest[:12]} ends after {blob.offset} of {blob.nbytes} bytes"
                raise BadRemoteData(self.name, what)

    def put_blob(self, blob: OutgoingBlob) -> None:
        if self._can_write_zstd():
            # bazel-remote wants the size of what it will file, beside that of what is sent.
            headers = {"Content-Encoding": "zstd", "X-Digest-SizeBytes": str(blob.nbytes)}
            self._put(blob.digest, headers, lambda: _open_compressed(blob))
        else:
            self._put(blob.digest, {"Content-Length": str(blob.nbytes)}, blob.open)

    def close(self) -> None:
        self._client.close()

    def _can_write_zstd(self) -> bool:
        with self._lock:
            if self._writes_zstd is None:
                self._writes_zstd = self._try_zstd()
                if not self._writes_zstd:
                    logger.warning("remote %s does not take zstd: files are sent as they are", self.name)
            return self._writes_zstd

    def _try_zstd(self) -> bool:
        """Whether the server files what it gets compressed as what it was; on a plain one the trial is undone."""
        import zstandard

        digest = digest_bytes(TRIAL)
        compressed = zstandard.compress(TRIAL)
        headers = {
            "Content-Encoding": "zstd",
            "Content-Length": str(len(compressed)),
            "X-Digest-SizeBytes": str(len(TRIAL)),
        }
        try:
            self._put(digest, headers, lambda: nullcontext(compressed))
        except RemoteRefused as error:
            logger.debug("%s", error)
            return False
        with self._client.send("GET", _path("cas", digest), allowed=_ABSENT) as response:
            if response.read_all(MAX_ENTRY_NBYTES) == TRIAL:
                return True
        self._put(digest, {"Content-Length": str(len(TRIAL))}, lambda: nullcontext(TRIAL))
        return False

    def _put(
        self, digest: str, headers: dict[str, str], open_body: Callable[[], AbstractContextManager[IO[bytes] | bytes]]
    ) -> None:
        headers = {"Content-Type": "application/octet-stream", **headers}
        with self._client.send("PUT", _path("cas", digest), headers=headers, open_body=open_body):
            pass

    def _check_range(self, response: Response, blob: IncomingBlob) -> None:
        """That what comes is what is missing."""
        if response.status == 206:
            wanted = f"bytes {blob.offset}-{blob.nbytes - 1}/"
            found = response.headers.get("Content-Range", "")
            if not blob.offset or not found.startswith(wanted):
                raise BadRemoteData(self.name, f"asked for {wanted!r} of a blob, answered with {found[:60]!r}")
        elif "Content-Encoding" not in response.headers and response.content_length not in (None, blob.nbytes):
            what = f"blob {blob.digest[:12]} has {response.content_length} bytes, not the {blob.nbytes} of its entry"
            raise BadRemoteData(self.name, what)

    def _check_encoding(self, response: Response, *accepted: str) -> str:
        found = response.headers.get("Content-Encoding", "identity").strip().lower()
        if found not in (*accepted, "identity"):
            raise BadRemoteData(self.name, f"sent the encoding {found[:20]!r}, which was not asked for")
        return found

    def _iter_body(self, response: Response, accepted: str, blob: IncomingBlob) -> Iterator[bytes]:
        if self._check_encoding(response, accepted) == "identity":
            while piece := response.read(READ_NBYTES):
                yield piece
            return
        import zstandard

        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_NBYTES)
        source = cast("IO[bytes]", _Dripping(response, blob))
        # Read in steps of a bounded size: a bomb meets the blob's own limit after one of them.
        with decompressor.stream_reader(source, read_across_frames=True, closefd=False) as reader:
            while True:
                try:
                    piece = reader.read(READ_NBYTES)
                except zstandard.ZstdError as error:
                    raise BadRemoteData(self.name, f"sent bytes that are not zstd ({error})") from error
                if not piece:
                    return
                yield piece


class _Dripping:
    """What a decompressor reads from: it may need many reads for one piece, so the deadline is looked at before each."""

    def __init__(self, response: Response, blob: IncomingBlob) -> None:
        self._response, self._blob = response, blob

    def read(self, nbytes: int) -> bytes:
        self._blob.write(b"")
        return self._response.read(nbytes)


def _path(kind: str, digest: str) -> str:
    if not is_digest(digest):
        raise NotADigest(digest)
    return f"{kind}/{digest}"


@contextmanager
def _open_compressed(blob: OutgoingBlob) -> Iterator[IO[bytes]]:
    import zstandard

    with blob.open() as reader:
        yield zstandard.ZstdCompressor().stream_reader(reader, size=blob.nbytes, closefd=False)  # it calls read only
