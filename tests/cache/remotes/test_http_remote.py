"""A server that cuts, lies, drips, redirects and refuses; each as a real peer over a real socket."""

from __future__ import annotations

import base64
import logging
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from remote_places import QUICK
from remote_servers import CacheServer, Handler, Request, run_cache_server

from loadplan.cache import Cache, digest_bytes
from loadplan.cache.remotes import (
    BadRemoteData,
    HttpRemote,
    Login,
    RemoteError,
    RemoteOptions,
    RemoteRefused,
    RemoteSet,
    RemoteUnavailable,
    TransferPolicy,
    open_remote,
)
from loadplan.cache.remotes.http_client import parse_retry_after
from loadplan.cache.remotes.http_remote import TRIAL
from loadplan.cache.transfer import pull, push

KEY = digest_bytes(b"key")
DATA = random.Random(1).randbytes(5 << 20)
BLOB = f"/cas/{digest_bytes(DATA)}"
SECRET = "a-very-secret-token"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CacheServer]:
    """A server that has the artifact of KEY, one file of 5 MiB; its log is empty."""
    with run_cache_server() as server:
        source = Cache(tmp_path / "a")
        source.put(KEY, {"data": DATA})
        push(source, [KEY], _open(server, read_only=False))
        server.log.clear()
        yield server


def _open(server: CacheServer, **options: object) -> HttpRemote:
    remote = open_remote(server.url, RemoteOptions(**{"timeout_s": 5.0, **options}))  # type: ignore[arg-type]
    assert isinstance(remote, HttpRemote)
    return remote


def _pull(server: CacheServer, tmp_path: Path, policy: TransferPolicy = QUICK) -> bytes | None:
    """What a new store gets; None for a miss, after which the store holds nothing wrong."""
    cache = Cache(tmp_path / "b")
    artifact = pull(cache, KEY, RemoteSet([_open(server)]), policy=policy)
    if artifact is None:
        assert cache.find(KEY) is None
        assert not cache.blobs.has(digest_bytes(DATA))
        return None
    found = cache.fetch(KEY)
    assert found is not None
    return found["data"]


def _first(count: int, act: Callable[[Request, Handler], None]) -> Callable[[Request, Handler], bool]:
    """`act` for the first so many requests of the blob."""
    done = [0]

    def misbehave(request: Request, handler: Handler) -> bool:
        if request.path != BLOB or done[0] >= count:
            return False
        done[0] += 1
        act(request, handler)
        return True

    return misbehave


def _send(handler: Handler, body: bytes, length: int | None, status: int = 200, **headers: str) -> None:
    """An answer of `body` whose header says `length`."""
    handler.answer(status, b"", Content_Length="" if length is None else str(length), **headers)
    handler.send_bytes(body)


def test_a_cut_transfer_goes_on_where_it_was(server: CacheServer, tmp_path: Path) -> None:
    def cut(request: Request, handler: Handler) -> None:
        start = int(request.range[6:-1]) if request.range else 0
        headers = {"Content_Range": f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"} if start else {}
        _send(handler, DATA[start : start + 1_500_000], len(DATA) - start, 206 if start else 200, **headers)
        handler.cut()

    server.misbehave = _first(3, cut)
    server.sent_nbytes = 0
    assert _pull(server, tmp_path) == DATA
    starts = [int(request.range[6:-1]) if request.range else 0 for request in server.log if request.path == BLOB]
    assert len(starts) == 4
    assert starts == sorted(set(starts))
    assert server.sent_nbytes == len(DATA) + sum(1_500_000 * (i + 1) - start for i, start in enumerate(starts[1:]))
    assert server.sent_nbytes <= len(DATA) + 3 * (1 << 20)  # what a cut loses: bytes that were on the wire


def test_a_server_without_ranges_starts_anew(server: CacheServer, tmp_path: Path) -> None:
    def cut(_: Request, handler: Handler) -> None:
        _send(handler, DATA[:2_000_000], len(DATA))
        handler.cut()

    server.ranges = False
    server.misbehave = _first(1, cut)
    assert _pull(server, tmp_path) == DATA


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 520])
def test_what_may_pass_is_tried_again(server: CacheServer, tmp_path: Path, status: int) -> None:
    server.misbehave = _first(2, lambda _, handler: handler.answer(status, b"not now"))
    assert _pull(server, tmp_path) == DATA
    assert server.count("GET", BLOB) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 418, 501, 505, 507])
def test_what_will_not_pass_is_not_tried_again(server: CacheServer, tmp_path: Path, status: int) -> None:
    server.misbehave = _first(99, lambda _, handler: handler.answer(status, b"no"))
    assert _pull(server, tmp_path) is None
    assert server.count("GET", BLOB) == 1


def test_it_ends_at_some_time(server: CacheServer, tmp_path: Path) -> None:
    server.misbehave = _first(99, lambda _, handler: handler.answer(503))
    assert _pull(server, tmp_path) is None
    assert server.count("GET", BLOB) == QUICK.attempts


def test_retry_after_is_kept_unless_it_is_later_than_the_end(server: CacheServer, tmp_path: Path) -> None:
    server.misbehave = _first(1, lambda _, handler: handler.answer(429, Retry_After="0"))
    assert _pull(server, tmp_path) == DATA
    server.log.clear()
    server.misbehave = _first(1, lambda _, handler: handler.answer(429, Retry_After="3600"))
    assert _pull(server, tmp_path / "c") is None  # and it did not wait
    assert server.count("GET", BLOB) == 1


def test_retry_after_is_seconds_or_a_date() -> None:
    assert parse_retry_after(None) is None
    assert parse_retry_after("17") == 17.0
    assert parse_retry_after("soon") is None
    assert parse_retry_after(format_datetime(datetime(2001, 1, 1, tzinfo=UTC), usegmt=True)) == 0.0
    later = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True))
    assert later is not None
    assert 90 < later <= 100


@pytest.mark.parametrize(
    "lie",
    [
        lambda handler: _send(handler, DATA[:-1] + b"?", len(DATA)),
        lambda handler: _send(handler, DATA[:-1], len(DATA) - 1),
        lambda handler: _send(handler, DATA + b"?", len(DATA) + 1),
        lambda handler: _send(handler, DATA, len(DATA), 206, Content_Range=f"bytes 5-{len(DATA) + 4}/{len(DATA) + 5}"),
        lambda handler: _send(handler, DATA, len(DATA), Content_Encoding="gzip"),
        lambda handler: _send(handler, zstandard.compress(DATA), None, Content_Encoding="zstd", Connection="close"),
        lambda handler: handler.answer(204),
    ],
    ids=["last byte", "shorter", "longer", "another range", "gzip", "zstd", "no content"],
)
def test_a_lie_is_a_miss(server: CacheServer, tmp_path: Path, lie: Callable[[Handler], None]) -> None:
    def answer(_: Request, handler: Handler) -> None:
        lie(handler)
        handler.close_connection = True

    server.misbehave = _first(99, answer)
    assert _pull(server, tmp_path) is None
    assert server.count("GET", BLOB) == 1


def test_an_endless_body_ends(server: CacheServer, tmp_path: Path) -> None:
    sent = [0]

    def pour(_: Request, handler: Handler) -> None:
        handler.answer(200, Content_Length="", Connection="close")
        handler.close_connection = True
        while True:  # until the client hangs up, which raises here
            handler.wfile.write(bytes(100_000))
            sent[0] += 100_000

    server.misbehave = _first(99, pour)
    assert _pull(server, tmp_path) is None
    assert sent[0] < 4 * len(DATA) + (16 << 20)  # its size, and what sockets hold
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 3 * len(DATA)


def test_an_endless_entry_ends(server: CacheServer, tmp_path: Path) -> None:
    def pour(request: Request, handler: Handler) -> bool:
        handler.answer(200, Content_Length="", Connection="close")
        handler.close_connection = True
        while True:
            handler.wfile.write(bytes(1 << 20))

    server.misbehave = pour
    with pytest.raises(BadRemoteData, match="more than 16777216 bytes"):
        _open(server).find_entry(KEY)


def test_a_zstd_bomb_does_not_go_off(server: CacheServer, tmp_path: Path) -> None:
    bomb = zstandard.compress(bytes(1 << 30), 3)
    server.zstd = True
    server.misbehave = _first(99, lambda _, handler: _send(handler, bomb, len(bomb), Content_Encoding="zstd"))
    cache = Cache(tmp_path / "b")
    assert pull(cache, KEY, RemoteSet([_open(server, zstd=True)]), policy=QUICK) is None
    assert cache.blobs.check() == ()


def test_a_silent_server_is_left_after_the_timeout(server: CacheServer, tmp_path: Path) -> None:
    release = threading.Event()

    def wait(request: Request, handler: Handler) -> bool:
        release.wait(30)
        handler.cut()
        return True

    server.misbehave = wait
    remote = _open(server, timeout_s=0.05)
    try:
        with pytest.raises(RemoteUnavailable, match="no answer in time"):
            remote.find_entry(KEY)
    finally:
        release.set()


@pytest.mark.parametrize("encoding", ["identity", "zstd"])
def test_a_dripping_server_is_left_at_the_deadline(server: CacheServer, tmp_path: Path, encoding: str) -> None:
    release = threading.Event()
    packed = zstandard.compress(DATA) if encoding == "zstd" else DATA

    def drip(_: Request, handler: Handler) -> None:
        handler.answer(200, Content_Length=str(len(packed)), Content_Encoding=encoding)
        for byte in packed:
            if release.wait(0.01):
                return
            handler.wfile.write(bytes([byte]))  # raises when the client has hung up

    server.misbehave = _first(1, drip)
    remotes = RemoteSet([_open(server, zstd=True)])
    try:
        assert pull(Cache(tmp_path / "b"), KEY, remotes, policy=TransferPolicy(deadline_s=1.0)) is None
    finally:
        release.set()
    assert len(server.log) == 2


def test_a_dripping_entry_is_left(server: CacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadplan.cache.remotes.http_client.PATIENCE", 0.01)

    def drip(_: Request, handler: Handler) -> bool:
        handler.answer(200, Content_Length="1000000")
        while True:
            handler.wfile.write(b"x")  # raises when the client has hung up

    server.misbehave = drip
    with pytest.raises(RemoteUnavailable, match=r"no whole answer in 0\.05 s"):
        _open(server, timeout_s=5.0).find_entry(KEY)


def test_a_server_that_is_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    remotes = RemoteSet([open_remote(f"http://127.0.0.1:{port}/cache")])
    for _ in range(3):
        assert pull(Cache(tmp_path / "b"), KEY, remotes, policy=QUICK) is None
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("loadplan")]
    assert message.startswith(f"remote http://127.0.0.1:{port}/cache: no connection (")


def test_a_host_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RemoteUnavailable, match="no connection"):
        open_remote("http://no-such-host.invalid/").find_entry(KEY)


def test_nothing_but_http_is_spoken(tmp_path: Path) -> None:
    """A peer that answers in another language."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RemoteUnavailable, match="the connection broke"):
            open_remote(f"http://127.0.0.1:{listener.getsockname()[1]}/").find_entry(KEY)
        thread.join()


ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Encoding: identity\r\n\r\nhello",
    b"HTTP/1.1 206 Partial\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
)


@given(st.sampled_from(ANSWERS), st.booleans(), st.data())
def test_fuzz_of_answers(answer: bytes, is_head: bool, data: st.DataObject) -> None:
    """Whatever a peer says, it becomes one of our errors, or an answer of the right kind."""
    spoiled = bytearray(answer)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(spoiled)))
        spoiled[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3) | st.just(b"\r\n"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_all() -> None:
            with suppress(OSError):  # the listener has been shut down
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(10_000)
                        connection.sendall(spoiled)

        thread = threading.Thread(target=answer_all)
        thread.start()
        remote = open_remote(f"http://127.0.0.1:{listener.getsockname()[1]}/", RemoteOptions(timeout_s=5.0))
        try:
            assert remote.has_blob(KEY, 5) in (True, False) if is_head else remote.find_entry(KEY) is None
        except RemoteError:
            pass
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            remote.close()


# Redirects and logins


def _redirect(to: str, status: int = 307) -> Callable[[Request, Handler], bool]:
    def misbehave(request: Request, handler: Handler) -> bool:
        handler.answer(status, Location=to.format(path=request.path))
        return True

    return misbehave


def test_a_redirect_is_followed_without_the_login(server: CacheServer) -> None:
    with run_cache_server() as front:
        front.misbehave = _redirect(server.url + "{path}")
        remote = HttpRemote(front.url, login=Login.bearer(SECRET))
        assert remote.find_entry(KEY) is not None
        assert front.log[-1].headers["Authorization"] == f"Bearer {SECRET}"
        assert server.count("GET", "/ac/") == 1
        assert "Authorization" not in server.log[-1].headers


def test_a_redirect_on_the_same_server_keeps_the_login(server: CacheServer) -> None:
    def misbehave(request: Request, handler: Handler) -> bool:
        return not request.path.startswith("/ac/") and _redirect(f"/ac/{KEY}")(request, handler)

    server.misbehave = misbehave
    assert HttpRemote(f"{server.url}/elsewhere", login=Login.bearer(SECRET)).find_entry(KEY) is not None
    assert [request.headers["Authorization"] for request in server.log] == [f"Bearer {SECRET}"] * 2


def test_an_upload_is_redirected_with_its_body(server: CacheServer, tmp_path: Path) -> None:
    source = Cache(tmp_path / "c")
    source.put(KEY, {"x": b"another"})
    with run_cache_server() as front:
        front.misbehave = lambda request, handler: (
            request.method == "PUT" and _redirect(server.url + "{path}")(request, handler)
        )
        push(source, [KEY], _open(front, read_only=False), policy=QUICK)
    assert server.files[f"/cas/{digest_bytes(b'another')}"] == b"another"


@pytest.mark.parametrize(
    ("to", "status", "reason"),
    [
        ("/ac/x", 302, "more than 5 times"),
        ("file:///etc/passwd", 302, "not http"),
        ("", 302, "more than 5 times"),
        ("gopher://127.0.0.1/", 302, "not http"),
        ("http://[::1/", 302, "an address that is none"),
        ("http://127.0.0.1:99999999/", 302, "an address that is none"),
        ("http://127.0.0.1:x/", 302, "an address that is none"),
        ("http://user:secret@/x", 302, "not http"),
    ],
)
def test_redirects_that_lead_nowhere(server: CacheServer, to: str, status: int, reason: str) -> None:
    server.misbehave = _redirect(to, status)
    with pytest.raises(RemoteRefused, match=reason):
        _open(server).find_entry(KEY)
    assert len(server.log) <= 6


def test_a_put_is_not_turned_into_something_else(server: CacheServer, tmp_path: Path) -> None:
    server.misbehave = lambda request, handler: request.method == "PUT" and _redirect("/x", 302)(request, handler)
    source = Cache(tmp_path / "c")
    source.put(KEY, {"x": b"another"})
    with pytest.raises(RemoteRefused, match=r"answered a PUT with a redirect \(302\)"):
        push(source, [KEY], _open(server, read_only=False), policy=QUICK)


def test_logins_are_sent_and_never_shown(server: CacheServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"CACHE_TOKEN": SECRET, "CACHE_LOGIN": f"user:{SECRET}"}
    host = server.url.removeprefix("http://")
    remotes = [
        open_remote(server.url, RemoteOptions(token_env="CACHE_TOKEN"), environ),
        open_remote(server.url, RemoteOptions(login_env="CACHE_LOGIN"), environ),
        open_remote(f"http://user:{SECRET}@{host}/"),
    ]
    basic = base64.b64encode(f"user:{SECRET}".encode()).decode()
    for remote, wanted in zip(remotes, (f"Bearer {SECRET}", f"Basic {basic}", f"Basic {basic}"), strict=True):
        server.misbehave = lambda request, handler: False
        assert remote.find_entry(KEY) is not None
        assert server.log[-1].headers["Authorization"] == wanted
        server.misbehave = lambda request, handler: handler.refuse(401, SECRET.encode())
        with caplog.at_level(logging.DEBUG):
            assert pull(Cache(tmp_path / "b"), KEY, RemoteSet([remote]), policy=QUICK) is None
        with pytest.raises(RemoteRefused, match="401") as caught:
            remote.find_entry(KEY)
        assert SECRET not in f"{caught.value}{caught.value!r}{remote.name}{caplog.text}"
        assert basic not in caplog.text
    assert SECRET not in repr(Login.bearer(SECRET))


# zstd


def test_zstd_is_used_where_the_server_knows_it(tmp_path: Path) -> None:
    source = Cache(tmp_path / "a")
    source.put(KEY, {"zeros": bytes(1 << 20), "text": b"text"})
    with run_cache_server(zstd=True) as server:
        push(source, [KEY], _open(server, read_only=False, zstd=True), policy=QUICK)
        uploads = [request for request in server.log if request.method == "PUT" and "/cas/" in request.path]
        assert {request.headers.get("Content-Encoding") for request in uploads} == {"zstd"}
        target = Cache(tmp_path / "b")
        assert pull(target, KEY, RemoteSet([_open(server, zstd=True)]), policy=QUICK) is not None
        assert target.fetch(KEY) == source.fetch(KEY)
        assert server.sent_nbytes < 10_000
        server.log.clear()
        assert pull(Cache(tmp_path / "c"), KEY, RemoteSet([_open(server)]), policy=QUICK) is not None
        assert {request.headers["Accept-Encoding"] for request in server.log} == {"identity"}


@pytest.mark.parametrize("checks", [True, False], ids=["refuses", "files anything"])
def test_a_plain_server_never_keeps_compressed_bytes(
    tmp_path: Path, checks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = Cache(tmp_path / "a")
    source.put(KEY, {"zeros": bytes(1 << 20), "text": b"text"})
    with run_cache_server(zstd=False, checks=checks) as server:
        push(source, [KEY], _open(server, read_only=False, zstd=True), policy=QUICK)
        for path, data in server.files.items():
            assert not path.startswith("/cas/") or path == f"/cas/{digest_bytes(data)}"
        assert server.files.get(f"/cas/{digest_bytes(TRIAL)}", TRIAL) == TRIAL
        assert caplog.text.count("does not take zstd") == 1
        target = Cache(tmp_path / "b")
        assert pull(target, KEY, RemoteSet([_open(server, zstd=True)]), policy=QUICK) is not None
        assert target.fetch(KEY) == source.fetch(KEY)


def test_a_compressed_transfer_that_is_cut_goes_on_uncompressed(server: CacheServer, tmp_path: Path) -> None:
    packed = zstandard.compress(DATA)

    def cut(_: Request, handler: Handler) -> None:
        _send(handler, packed[: len(packed) // 2], len(packed), Content_Encoding="zstd")
        handler.cut()

    server.zstd = True
    server.misbehave = _first(1, cut)
    cache = Cache(tmp_path / "b")
    assert pull(cache, KEY, RemoteSet([_open(server, zstd=True)]), policy=QUICK) is not None
    assert cache.fetch(KEY) == {"data": DATA}
    assert [request.range is not None for request in server.log if request.path == BLOB] == [False, True]


# TLS


def test_a_certificate_is_checked_and_a_cut_is_no_bad_certificate(server: CacheServer, tmp_path: Path) -> None:
    certificate, key = _make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with run_cache_server(tls=context, files=server.files) as secure:
        with pytest.raises(RemoteRefused, match=r"TLS: .*certificate"):
            open_remote(secure.url).find_entry(KEY)
        trusting = open_remote(secure.url, RemoteOptions(ca_file=certificate))
        assert trusting.find_entry(KEY) is not None

        def cut(_: Request, handler: Handler) -> None:
            _send(handler, DATA[:3_000_000], len(DATA))
            handler.wfile.flush()
            handler.cut()  # without TLS's own goodbye

        secure.misbehave = _first(1, cut)
        cache = Cache(tmp_path / "b")
        assert pull(cache, KEY, RemoteSet([trusting]), policy=QUICK) is not None
        assert cache.fetch(KEY) == {"data": DATA}
        assert secure.count("GET", BLOB) == 2
        secure.misbehave = _redirect(server.url + "{path}")
        with pytest.raises(RemoteRefused, match="redirected from https to http at 127"):
            trusting.find_entry(KEY)
        trusting.close()


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    start = datetime.now(UTC).replace(tzinfo=None) - timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), start)
        .not_valid_after(start + timedelta(days=3))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"
