"""Real servers for the tests of remotes, each a context manager: nginx, an S3 server, and one that misbehaves.

Everything listens on 127.0.0.1, on a port that the system picks.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zstandard

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

_NGINX_CONFIG = """
{user} daemon off; pid {root}/pid; error_log {root}/error.log;
events {{}}
http {{
    log_format line '$request_method $uri $status $body_bytes_sent $http_range';
    access_log {root}/access.log line;
    client_body_temp_path {root}/body; proxy_temp_path {root}/proxy; fastcgi_temp_path {root}/fastcgi;
    uwsgi_temp_path {root}/uwsgi; scgi_temp_path {root}/scgi;
    client_max_body_size 0;
    server {{
        listen 127.0.0.1:{port};
        root {root}/files;
        location /open/ {{ dav_methods PUT; create_full_put_path on; }}
        location /private/ {{
            auth_basic cache; auth_basic_user_file {root}/users;
            dav_methods PUT; create_full_put_path on;
        }}
        location /readonly/ {{ alias {root}/files/open/; }}
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Nginx:
    port: int
    root: Path

    @property
    def log(self) -> list[str]:
        """One line a request: method, path, status, bytes of the body, the Range asked for or `-`."""
        return (self.root / "access.log").read_text().splitlines()


@contextmanager
def run_nginx(root: Path) -> Iterator[Nginx]:
    """nginx over `root`/files: /open/ takes PUT, /private/ wants user:pass word, /readonly/ is /open/."""
    assert NGINX
    for name in ("files/open", "files/private"):
        (root / name).mkdir(parents=True)
    (root / "users").write_text("user:{PLAIN}pass word\n")
    user = "user root;" if os.geteuid() == 0 else ""  # else root's nginx becomes nobody, who may not write here
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (root / "nginx.conf").write_text(_NGINX_CONFIG.format(root=root, port=port, user=user))
        # nginx takes over sockets named in NGINX (its way to be replaced while running): whoever connects early waits
        # in the socket's queue, so nothing here has to ask whether it is up.
        environment = {**os.environ, "NGINX": f"{listener.fileno()};"}
        command = [NGINX, "-p", str(root), "-c", str(root / "nginx.conf"), "-e", str(root / "error.log")]
        process = subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()])
    try:
        yield Nginx(port, root)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def run_s3() -> Iterator[str]:
    """The address of an S3 server with an empty bucket `bucket`; any key and secret will do."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        import urllib3

        urllib3.request("PUT", f"http://{host}:{port}/bucket").close()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    range: str | None
    headers: dict[str, str]


@dataclass(slots=True)
class CacheServer:
    """An HTTP cache in memory that does what `misbehave` says; where that is silent, it behaves like bazel-remote.

    `misbehave` gets the request and its handler, and returns whether it has answered.
    """

    port: int = 0
    zstd: bool = False  # as bazel-remote: decodes compressed uploads, sends compressed when accepted
    checks: bool = True  # as bazel-remote: an upload must have the digest that it is filed under
    ranges: bool = True
    tls: ssl.SSLContext | None = None
    files: dict[str, bytes] = field(default_factory=dict)  # path -> bytes
    log: list[Request] = field(default_factory=list)
    sent_nbytes: int = 0  # of bodies of blobs
    misbehave: Callable[[Request, Handler], bool] = lambda request, handler: False

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def count(self, method: str, part: str) -> int:
        return sum(request.method == method and part in request.path for request in self.log)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cache: CacheServer

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):  # the client had enough
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.send_bytes(body)

    def refuse(self, status: int, body: bytes = b"") -> bool:
        self.answer(status, body)
        return True

    def send_bytes(self, body: bytes) -> None:
        self.wfile.write(body)
        if "/cas/" in self.path:
            self.cache.sent_nbytes += len(body)

    def cut(self) -> None:
        """End the connection as a crash would."""
        self.close_connection = True
        with suppress(OSError):  # the client was quicker
            self.connection.shutdown(socket.SHUT_RDWR)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _is_answered(self) -> bool:
        request = Request(self.command, self.path, self.headers.get("Range"), dict(self.headers.items()))
        self.cache.log.append(request)
        return self.cache.misbehave(request, self)

    def do_GET(self) -> None:
        if self._is_answered():
            return
        data = self.cache.files.get(self.path)
        if data is None:
            self.answer(404, b"nothing here")
            return
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if "zstd" in self.headers.get("Accept-Encoding", "") and self.cache.zstd and "/cas/" in self.path:
            self.answer(200, zstandard.compress(data), Content_Encoding="zstd")
        elif wanted and self.cache.ranges:
            start = int(wanted[1])
            self.answer(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.answer(200, data)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self.read_body()
        if self._is_answered():
            return
        if self.cache.zstd and self.headers.get("Content-Encoding") == "zstd":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
            assert self.headers["X-Digest-SizeBytes"] == str(len(data))
        name = self.path.rpartition("/")[2]
        if self.cache.checks and "/cas/" in self.path and hashlib.sha256(data).hexdigest() != name:
            self.answer(400, b"other digest")
            return
        self.cache.files[self.path] = data
        self.answer(200)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # joined at the end: no socket is left

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        for connection in self.connections:  # clients keep theirs open for the next request
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


@contextmanager
def run_cache_server(**options: Any) -> Iterator[CacheServer]:
    cache = CacheServer(**options)
    server = _Server(type("BoundHandler", (Handler,), {"cache": cache}))
    if cache.tls:
        server.socket = cache.tls.wrap_socket(server.socket, server_side=True)
    cache.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield cache
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
