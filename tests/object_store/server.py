"""A real S3 server on this machine, and a proxy before it that fails on purpose.

    def test_of_something(object_store: ObjectStore) -> None:
        url = object_store.url("runs")                       # s3://bucket/runs-1: nobody else's prefix
        with object_store.failing("cut", methods="PUT"):     # the proxy breaks off every PUT in its middle
            ...
        assert object_store.count("GET", url) == 3           # requests that reached the proxy

The environment of the tests has the endpoint (the proxy's) and the credentials, so fsspec, s3fs and every process that
is started find them. Ranks of a forkserver that was there before are given `object_store.environment`. The server
(moto) keeps its objects in memory.
"""

import http.client
import itertools
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import unquote, urlsplit

BUCKET = "bucket"
How = Literal["refuse", "hang", "delay", "cut", "truncate", "corrupt", 403, 500, 503]
CODES = {403: "InvalidAccessKeyId", 500: "InternalError", 503: "SlowDown"}
CHECKSUMS = ("x-amz-checksum", "x-amz-sdk-checksum", "content-md5")
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Fault:
    """What the proxy does to a request.

    refuse: reset the connection before anything is read. hang: never answer. delay: answer after `seconds`. cut: break
    off in the middle, an upload's or an answer's. truncate: lose the second half of an upload, and answer well; answer
    with half of the body as if it were all. corrupt: one bit of an upload or an answer is another. A number: that
    status, in S3's words (403: the credentials are gone).
    """

    how: How
    methods: str = "*"  # "PUT", "GET|HEAD"
    keys: str = "*"  # a pattern over "bucket/key", without the query
    seconds: float = 0.5
    times: float = float("inf")  # how often it strikes
    struck: int = 0

    def strikes(self, method: str, key: str) -> bool:
        fits = self.methods == "*" or method in self.methods.split("|")
        if not fits or self.struck >= self.times or not fnmatchcase(key, self.keys):
            return False
        self.struck += 1
        return True


@dataclass
class ObjectStore:
    """The server and its proxy. `requests`: (method, "bucket/key", bytes of the body), as the proxy received them."""

    server: tuple[str, int]
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)  # of hanging requests
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _proxy: "Proxy | None" = None
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        keys = {"AWS_ACCESS_KEY_ID": "megalite", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1", **keys}

    def url(self, name: str = "runs", bucket: str = BUCKET) -> str:
        """A prefix that nobody else uses."""
        return f"s3://{bucket}/{name}-{next(self._numbers)}"

    def count(self, methods: str = "*", url: str = "") -> int:
        """Requests of these methods for keys that begin with the path of the URL."""
        begins = url.partition("://")[2]
        of_these = [one for one in self.requests if methods == "*" or one[0] in methods.split("|")]
        return sum(key.startswith(begins) for _, key, _ in of_these)

    def contents(self, prefix: str) -> dict[str, bytes]:
        """What the server holds below "bucket/prefix", read past the proxy."""
        from moto.s3.models import s3_backends

        bucket, _, begins = prefix.partition("/")
        keys = next(iter(s3_backends.values()))["global"].buckets[bucket].keys.items()
        return {f"{bucket}/{name}": key.value for name, key in keys if name.startswith(begins)}

    @contextmanager
    def failing(self, how: How, **which: str | float) -> Iterator[Fault]:
        """Meanwhile requests fail in this way; see Fault."""
        self.faults.append(fault := Fault(how, **which))  # type: ignore[arg-type]
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    @contextmanager
    def dead(self) -> Iterator[None]:
        """Meanwhile nobody listens: connections are refused by the system. What the server holds stays."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def start(self) -> None:
        self.ended.clear()
        self._proxy = Proxy(self)
        self.port = self._proxy.server_address[1]
        threading.Thread(target=self._proxy.serve_forever, args=[0.05], name="proxy", daemon=True).start()

    def stop(self) -> None:
        assert self._proxy is not None
        self.ended.set()
        self._proxy.shutdown()
        self._proxy.server_close()
        for connection in [*self._proxy.connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Proxy(ThreadingHTTPServer):
    """Listens where the one before it did."""

    daemon_threads, block_on_close = True, False

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.connections = store, set[socket.socket]()
        super().__init__(("127.0.0.1", store.port), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def handle_any(self) -> None:
        store, key = self.server.store, unquote(urlsplit(self.path).path).lstrip("/")
        fault = next((one for one in [*store.faults] if one.strikes(self.command, key)), None)
        how = None if fault is None else fault.how
        if how == "refuse":
            return self.hang_up()
        length = int(self.headers.get("Content-Length", 0))
        if how == "cut" and length:
            self.rfile.read(length // 2)
            return self.hang_up()
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        body = b"".join(self.chunks()) if chunked else self.rfile.read(length)
        store.requests.append((self.command, key, len(body)))
        if how == "hang":
            store.ended.wait()
            return self.hang_up()
        if how == "delay" and fault is not None:
            store.ended.wait(fault.seconds)
        if isinstance(how, int):
            words = f"<Error><Code>{CODES[how]}</Code><Message>on purpose</Message></Error>"
            return self.answer(how, {"Content-Type": "application/xml"}, words.encode())
        status, headers, answer = self.forward(hurt(body, how), how)
        if how == "cut":
            self.answer(status, headers, answer, sent=len(answer) // 2)
            return self.hang_up()
        return self.answer(status, headers, answer if body else hurt(answer, how))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass

    def forward(self, body: bytes, how: How | None) -> tuple[int, dict[str, str], bytes]:
        left = CHECKSUMS if how in ("truncate", "corrupt") else ()  # what is lost in silence, no checksum covers

        def kept(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
            names = ((name, value) for name, value in headers if name.lower() not in HOP_BY_HOP)
            return {name: value for name, value in names if not name.lower().startswith(left)}

        server = http.client.HTTPConnection(*self.server.store.server)
        server.request(self.command, self.path, body, {**kept(self.headers.items()), "Content-Length": str(len(body))})
        response = server.getresponse()
        headers = kept(response.getheaders())
        if self.command == "HEAD":
            headers["Content-Length"] = response.headers.get("Content-Length", "0")
        answer = response.read()
        server.close()
        return response.status, headers, answer

    def answer(self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if sent is None else body[:sent])

    def hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def hurt(content: bytes, how: How | None) -> bytes:
    if how == "truncate":
        return content[: len(content) // 2]
    if how == "corrupt" and content:
        at = len(content) // 2
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    return content


@contextmanager
def running() -> Iterator[ObjectStore]:
    """The server with one empty bucket, for as long as the context lasts."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    store = ObjectStore(moto.get_host_and_port())
    store.start()
    create_bucket(store, BUCKET)
    try:
        yield store
    finally:
        store.stop()
        moto.stop()


def create_bucket(store: ObjectStore, name: str) -> None:
    server = http.client.HTTPConnection(*store.server)
    host = {"Host": f"127.0.0.1:{store.server[1]}", "Authorization": "AWS megalite:signed"}
    server.request("PUT", f"/{name}", headers=host)
    assert server.getresponse().status == 200
    server.close()


if __name__ == "__main__":  # for a try by hand
    with running() as found:
        print("\n".join(f"export {name}={value}" for name, value in found.environment.items()), flush=True)
        with suppress(KeyboardInterrupt):
            time.sleep(float("1e6"))
