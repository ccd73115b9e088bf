"""HTTP requests to one server: login, redirects, proxies, and one error for each way to fail.

Redirects are followed here, not by the library, so that the login goes to the server it is meant for only. Nothing of a
body is read unless it is asked for, and each read returns with what one packet brought, so that a server that drips
cannot hold a transfer beyond its deadline.
"""

import base64
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from loadplan.cache.remotes.remote import (
    BadRemoteData,
    RemoteError,
    RemoteLibraryMissing,
    RemoteRefused,
    RemoteUnavailable,
)

if TYPE_CHECKING:
    import urllib3

MAX_REDIRECTS = 5
CONNECT_TIMEOUT_S = 10.0
MAX_DRAINED_NBYTES = 4096  # an error page up to this size is read, so that the connection can be used again
PATIENCE = 4  # times the timeout of one wait, for the whole of an answer that is read at once
CONNECTIONS = 32  # kept open at most

_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSIENT_4XX = (408, 425, 429)
_FINAL_5XX = (501, 505, 507, 508, 510, 511)  # not implemented, no space, …: the same the next time


@dataclass(frozen=True, slots=True)
class Login:
    """What goes into the Authorization header; its text never shows the secret."""

    header: str

    @classmethod
    def basic(cls, user: str, password: str) -> "Login":
        return cls("Basic " + base64.b64encode(f"{user}:{password}".encode()).decode())

    @classmethod
    def bearer(cls, token: str) -> "Login":
        return cls(f"Bearer {token}")

    def __repr__(self) -> str:
        return f"Login({self.header.partition(' ')[0]} ***)"


class HttpClient:
    """Requests below `url`, from any number of threads."""

    def __init__(self, url: str, *, login: Login | None, ca_file: Path | None, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._base = parts._replace(netloc=_host(parts), path=parts.path.rstrip("/"), query="", fragment="")
        self.name = urlunsplit(self._base)
        self._login = login
        if login is None and parts.username is not None:
            self._login = Login.basic(unquote(parts.username), unquote(parts.password or ""))
        self._pool = _make_pool(self.name, self._base, ca_file, timeout_s)
        self._patience_s = PATIENCE * timeout_s

    @contextmanager
    def send(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        open_body: Callable[[], AbstractContextManager[IO[bytes] | bytes | None]] = nullcontext,
        allowed: tuple[int, ...] = (),
    ) -> Iterator["Response"]:
        """The answer to a request, its body unread; a status that is neither 2xx nor `allowed` is an error.

        Raises:
            RemoteUnavailable, RemoteRefused, BadRemoteData
        """
        url = urlunsplit(self._base._replace(path=f"{self._base.path}/{path}"))
        for _ in range(MAX_REDIRECTS + 1):
            sent = {"User-Agent": "loadplan", "Accept-Encoding": "identity", **(headers or {})}
            if self._login and _origin(urlsplit(url)) == _origin(self._base):
                sent["Authorization"] = self._login.header
            with open_body() as body, self._errors():
                raw = self._pool.request(
                    method, url, headers=sent, body=body, preload_content=False, redirect=False, retries=False
                )
            response = Response(self.name, method, raw, self._patience_s)
            try:
                if response.status in _REDIRECTS:
                    url = self._follow(response, url, method)
                    continue
                self._check_status(response, method, allowed)
                yield response
                return
            finally:
                response.finish()
        raise RemoteRefused(self.name, f"redirected {method} more than {MAX_REDIRECTS} times")

    def close(self) -> None:
        self._pool.clear()

    def _follow(self, response: "Response", url: str, method: str) -> str:
        try:
            target = urlsplit(urljoin(url, response.headers.get("Location", "")))
            _origin(target)
        except ValueError as error:
            raise RemoteRefused(self.name, "redirected to an address that is none") from error
        if method == "PUT" and response.status not in (307, 308):
            raise RemoteRefused(self.name, f"answered a PUT with a redirect ({response.status})")
        if target.scheme not in ("http", "https") or not target.hostname:
            raise RemoteRefused(self.name, "redirected to an address that is not http")
        if target.scheme == "http" and urlsplit(url).scheme == "https":
            raise RemoteRefused(self.name, f"redirected from https to http at {target.hostname}")
        return urlunsplit(target._replace(netloc=_host(target)))

    def _check_status(self, response: "Response", method: str, allowed: tuple[int, ...]) -> None:
        status = response.status
        if 200 <= status < 300 or status in allowed:
            return
        reason = f"answered {method} with {status}{_phrase(status)}"
        if status in _TRANSIENT_4XX or (500 <= status < 600 and status not in _FINAL_5XX):
            raise RemoteUnavailable(self.name, reason, parse_retry_after(response.headers.get("Retry-After")))
        raise RemoteRefused(self.name, reason)

    def _errors(self) -> AbstractContextManager[None]:
        return http_errors(self.name)


class Response:
    """An answer whose body is read piece by piece."""

    def __init__(self, remote: str, method: str, raw: "urllib3.BaseHTTPResponse", patience_s: float) -> None:
        self._remote, self._method, self._raw, self._patience_s = remote, method, raw, patience_s
        self.status, self.headers = raw.status, raw.headers

    @property
    def content_length(self) -> int | None:
        """What the header says, in bytes; None when it says nothing that can be used."""
        text = self.headers.get("Content-Length", "")
        return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None

    @property
    def is_framed(self) -> bool:
        """Whether the end of the body is told from a lost connection."""
        return self.content_length is not None or "Transfer-Encoding" in self.headers

    def read(self, nbytes: int) -> bytes:
        """What is there, up to `nbytes`; nothing at the end of the body.

        Raises:
            RemoteUnavailable: the connection was cut.
        """
        with http_errors(self._remote):
            return self._raw.read1(nbytes, decode_content=False) or b""

    def read_all(self, max_nbytes: int) -> bytes:
        """The whole body.

        Raises:
            BadRemoteData: it is larger than `max_nbytes`.
            RemoteUnavailable: it comes too slowly.
        """
        data, end_s = bytearray(), time.monotonic() + self._patience_s
        while piece := self.read(max_nbytes + 1 - len(data)):
            data += piece
            if time.monotonic() > end_s:
                raise RemoteUnavailable(self._remote, f"no whole answer in {self._patience_s:g} s")
            if len(data) > max_nbytes:
                raise BadRemoteData(self._remote, f"answered with more than {max_nbytes} bytes")
        return bytes(data)

    def finish(self) -> None:
        """Give the connection back if its body has been read, or is short; else close it."""
        try:
            length = 0 if self._method == "HEAD" else self.content_length
            for _ in range(4):
                if length is None or length > MAX_DRAINED_NBYTES or not self.read(MAX_DRAINED_NBYTES):
                    break
        except RemoteError:
            length = None
        if length is None or length > MAX_DRAINED_NBYTES:
            self._raw.close()  # of a body that was read to its end, nothing is left to close
        self._raw.release_conn()


@contextmanager
def http_errors(remote: str) -> Iterator[None]:
    """Turn the library's errors into the remote's. Their texts hold host and port at most, and no header."""
    import urllib3.exceptions as found

    try:
        yield
    except found.SSLError as error:
        if isinstance(error.args[0], ssl.SSLCertVerificationError):
            raise RemoteRefused(remote, f"TLS: {error}") from error
        raise RemoteUnavailable(remote, f"the connection broke (TLS: {error})"[:300]) from error
    except (found.LocationValueError, UnicodeError) as error:
        raise RemoteRefused(remote, "an address that cannot be used") from error
    except (found.NewConnectionError, found.ConnectTimeoutError) as error:
        raise RemoteUnavailable(remote, f"no connection ({type(error.__cause__ or error).__name__})") from error
    except found.ReadTimeoutError as error:
        raise RemoteUnavailable(remote, "no answer in time") from error
    except found.HTTPError as error:
        raise RemoteUnavailable(remote, f"the connection broke ({type(error).__name__}: {error})"[:300]) from error


def _make_pool(name: str, base: SplitResult, ca_file: Path | None, timeout_s: float) -> "urllib3.PoolManager":
    try:
        import urllib3
    except ImportError as error:
        raise RemoteLibraryMissing(name, "urllib3", "loadplan[http]") from error
    context = None
    if base.scheme == "https":
        context = ssl.create_default_context(cafile=ca_file)
    timeout = urllib3.Timeout(connect=min(timeout_s, CONNECT_TIMEOUT_S), read=timeout_s)
    proxy = None if proxy_bypass(base.netloc) else getproxies().get(base.scheme)
    if proxy is None:
        return urllib3.PoolManager(
            maxsize=CONNECTIONS, timeout=timeout, ssl_context=context, retries=False, blocksize=1 << 20
        )
    login = urlsplit(proxy)
    headers = None
    if login.username is not None:
        basic = Login.basic(unquote(login.username), unquote(login.password or ""))
        headers = {"Proxy-Authorization": basic.header}
    return urllib3.ProxyManager(
        urlunsplit(login._replace(netloc=_host(login))),
        proxy_headers=headers,
        maxsize=CONNECTIONS,
        timeout=timeout,
        ssl_context=context,
        retries=False,
        blocksize=1 << 20,
    )


def _host(parts: SplitResult) -> str:
    """Host and port, without the login."""
    return parts.netloc.rpartition("@")[2]


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _phrase(status: int) -> str:
    """The standard words for a status; the server's own are not repeated."""
    try:
        return f" ({HTTPStatus(status).phrase})"
    except ValueError:
        return ""


def parse_retry_after(text: str | None) -> float | None:
    """Seconds from now; the header holds seconds or a date (RFC 9110, 10.2.3)."""
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (date - datetime.now(UTC)).total_seconds()) if date.tzinfo else None
