"""The HTTP client of upstreams against servers that send whatever bytes they like, in whatever pieces.

Every test runs on both loops: asyncio's, and uvloop's where it is installed.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from deskfleet.errors import ConfigError
from deskfleet.gateway.upstream import http_client
from deskfleet.gateway.upstream.connection import Connection, parse_url
from deskfleet.gateway.upstream.failures import UpstreamFailed, UpstreamLost, UpstreamUnreachable
from deskfleet.gateway.upstream.http_client import MAX_OTHER_BYTES, HttpClient, Response
from deskfleet.gateway.upstream.options import UpstreamOptions

Run = Callable[[Coroutine[Any, Any, None]], None]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = HEAD + b"Content-Length: 5\r\n\r\nhello"
ENDINGS = {
    "length": WHOLE,
    "chunks": CHUNKED + b"2\r\nhe\r\n3;why=not\r\nllo\r\n0\r\nX-Trailer: t\r\n\r\n",
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
    "close": HEAD + b"Connection: close\r\n\r\nhello",
    "old": b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\nhello",
}


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop

    def run_within(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(main, 20))

    return run_within


class Peer:
    """A server. Answers each request with the next of `answers`, in pieces of `size` bytes, then keeps listening.

    An answer that comes with False closes the connection. Notes what arrives and when a connection ends.

    Accepts by itself, so that each socket is known from its first moment and `peer` can wait until all are closed.
    asyncio's server in Python 3.11, once closed, drops what it has accepted and not given a transport yet.
    """

    def __init__(self, answers: Sequence[tuple[bytes, bool]] = (), size: int = 0) -> None:
        self.answers = list(answers)
        self.size = size
        self.requests: list[bytes] = []
        self.num_connections = self.num_ended = 0
        self.url = ""
        self._accepted: list[tuple[socket.socket, asyncio.Task[None]]] = []

    @property
    def has_closed_all(self) -> bool:
        """Whether no socket is open that was ever accepted."""
        return all(connection.fileno() < 0 for connection, _ in self._accepted)

    def accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        with suppress(BlockingIOError):
            connection, _ = listener.accept()
            self._accepted.append((connection, asyncio.ensure_future(self._serve(connection, tls))))

    async def _serve(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
        except OSError:  # of a handshake
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), b":0"
                )
                self.requests.append(head + await reader.readexactly(int(length.partition(b":")[2])))
                if not self.answers:
                    continue
                answer, goes_on = self.answers.pop(0)
                await self._send(writer, answer)
                if not goes_on:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_ended += 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _send(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        size = self.size or len(answer) or 1
        for start in range(0, len(answer), size):
            writer.write(answer[start : start + size])
            await writer.drain()
            if self.size:
                await asyncio.sleep(0.0005)


@asynccontextmanager
async def peer(
    *answers: tuple[bytes, bool], size: int = 0, tls: ssl.SSLContext | None = None, host: str = "localhost"
) -> AsyncIterator[tuple[Peer, HttpClient]]:
    """A server with these answers, and a client of it."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    there = Peer(answers, size)
    there.url = f"{'https' if tls else 'http'}://{host}:{listener.getsockname()[1]}"
    client = HttpClient(there.url, {"Authorization": "Bearer k"}, 2.0)
    loop.add_reader(listener, there.accept, listener, tls)
    try:
        yield there, client
    finally:
        await client.close()
        loop.remove_reader(listener)
        listener.close()  # which ends what nobody has accepted
        await until(lambda: there.has_closed_all)


async def until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end_s, "it never came to that"
        await asyncio.sleep(0.002)


async def ask(client: HttpClient, body: bytes | None = b"{}", timeout_s: float = 10.0) -> bytes:
    response = await client.request("POST", "/v1/x", body, timeout_s=timeout_s)
    with closing(response):
        assert (response.status, response.content_type) == (200, "text/event-stream")
        return await read_all(response)


async def read_all(response: Response) -> bytes:
    found = b""
    while data := await response.read():
        found += data
    return found


async def failing(asked: Awaitable[Any], kind: type[BaseException], says: str | None = None) -> None:
    with pytest.raises(kind, match=says) as caught:
        await asked
    assert type(caught.value) is kind


@pytest.mark.parametrize("size", [1, 2, 7, 0])
@pytest.mark.parametrize("name", ENDINGS)
def test_an_answer_is_the_same_however_it_ends_and_is_cut(run: Run, name: str, size: int) -> None:
    """Whoever may go on is asked again on the same connection, whoever may not on a new one."""
    goes_on = name not in ("close", "old")

    async def main() -> None:
        async with peer(*[(ENDINGS[name], goes_on)] * 3, size=size) as (there, client):
            assert [await ask(client), await ask(client), await ask(client, None)] == [b"hello"] * 3
            assert there.num_connections == (1 if goes_on else 3)
            first, _, last = there.requests
            assert first.startswith(b"POST /v1/x HTTP/1.1\r\nHost: localhost:")
            assert b"\r\nAuthorization: Bearer k\r\n" in first
            assert first.endswith(b"\r\nContent-Length: 2\r\n\r\n{}")
            assert b"Content-Length" not in last

    run(main())


LONG_LINE = b"x" * (MAX_OTHER_BYTES + 1)


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"", UpstreamLost, "closed the connection"),
        (HEAD, UpstreamLost, "closed the connection"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", UpstreamLost, "closed the connection"),
        (WHOLE[:-1], UpstreamFailed, "broke off in the middle of its answer"),
        (CHUNKED, UpstreamFailed, "broke off in the middle of its answer"),
        (CHUNKED + b"5\r\nhello\r\n", UpstreamFailed, "broke off in the middle of its answer"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", UpstreamFailed, "does not speak HTTP/1.1"),
        (CHUNKED + b"lots\r\n", UpstreamFailed, "does not speak HTTP/1.1"),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", UpstreamFailed, "does not speak"),
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", UpstreamFailed, "does not speak"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
            UpstreamFailed,
            "something other than HTTP/1.1",
        ),
        (HEAD + b"X: " + LONG_LINE, UpstreamFailed, "more than 65536 bytes"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 4000, UpstreamFailed, "more than 65536 bytes"),
        (CHUNKED + b"5;" + LONG_LINE, UpstreamFailed, "more than 65536 bytes"),
        (CHUNKED + b"0\r\nX: " + LONG_LINE, UpstreamFailed, "more than 65536 bytes"),
        (
            HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n",
            UpstreamFailed,
            "Content-Encoding gzip",
        ),
    ],
)
def test_what_is_no_answer_is_one_clean_error(
    run: Run, answer: bytes, kind: type[BaseException], says: str
) -> None:
    async def main() -> None:
        async with peer((answer, len(answer) > MAX_OTHER_BYTES), (WHOLE, True)) as (there, client):
            await failing(ask(client), kind, says)
            assert await ask(client) == b"hello", "the next request goes through another connection"
            assert there.num_connections == 2

    run(main())


def test_what_came_before_the_end_is_read_first(run: Run) -> None:
    async def main() -> None:
        async with peer((CHUNKED + b"5\r\nhello\r\n", False)) as (there, client):
            response = await client.request("GET", "/", None, timeout_s=5)
            await until(lambda: there.num_ended == 1)
            await asyncio.sleep(0.05)
            assert await response.read() == b"hello"
            await failing(response.read(), UpstreamFailed, "broke off")
            response.close()

    run(main())


def test_nobody_takes_what_was_not_asked_for(run: Run) -> None:
    """Bytes after an answer, with it or later, never become the next one's."""

    async def main() -> None:
        async with peer((WHOLE + WHOLE.replace(b"hello", b"wrong"), True), (WHOLE, True)) as (there, client):
            assert [await ask(client), await ask(client)] == [b"hello", b"hello"]
            assert there.num_connections == 2
        async with peer((WHOLE, True), (WHOLE, True), (WHOLE, True)) as (there, client):
            await ask(client)
            original, there.answers = there.answers, []
            await failing(ask(client, timeout_s=0.2), TimeoutError)
            there.answers = original
            assert await ask(client) == b"hello"
            assert there.num_connections == 2, "an answer that comes too late has no connection any more"

    run(main())


def test_connections_that_are_old_or_closed_are_not_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_KEEPALIVE_S", 0.1)

    async def main() -> None:
        async with peer((WHOLE, True), (WHOLE, False), (WHOLE, True)) as (there, client):
            await ask(client)
            await until(lambda: there.num_ended == 1)  # closed by us, since nobody needed it
            await ask(client)
            await until(lambda: there.num_ended == 2)  # closed by the server
            await asyncio.sleep(0.01)
            await ask(client)
            assert there.num_connections == 3

    run(main())


def test_a_look_up_that_met_a_closing_connection_is_made_again_and_nothing_else_is(run: Run) -> None:
    async def main() -> None:
        async with peer((b"", False), (WHOLE, True), (b"", False), (WHOLE, True)) as (there, _):
            connection = Connection(there.url, UpstreamOptions())
            await connection.open()
            assert (await connection.get("/health", timeout_s=5)).body == b"hello"
            await failing(connection.post("/tokenize", b"{}", timeout_s=5), UpstreamLost)
            assert len(there.requests) == 3
            await connection.close()
            await failing(connection.get("/health", timeout_s=5), UpstreamFailed, "is closed")

    run(main())


@pytest.mark.parametrize("answer", [b"", HEAD, CHUNKED, CHUNKED + b"5\r\nhello\r\n"])
def test_whoever_leaves_closes_the_connection(run: Run, answer: bytes) -> None:
    """Wherever the task waits when it is cancelled; and nothing is left that would keep `close` waiting."""

    async def main() -> None:
        async with peer((answer, True)) as (there, client):
            asking = asyncio.ensure_future(ask(client))
            await until(lambda: bool(there.requests))
            await asyncio.sleep(0.02)
            asking.cancel()
            await failing(asking, asyncio.CancelledError)
            await until(lambda: there.num_ended == 1)

    run(main())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_leaving_while_connecting(run: Run, host: str) -> None:
    """In every turn of the loop until the request is there: while a name is looked up, or an address connected to."""

    async def main() -> None:
        for num_turns in itertools.count():
            async with peer(host=host) as (there, client):
                asking = asyncio.ensure_future(ask(client))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                has_arrived = bool(there.requests)
                asking.cancel()
                await failing(asking, asyncio.CancelledError)
            if has_arrived:
                break

    run(main())


def test_closing_the_client_fails_what_is_under_way(run: Run) -> None:
    async def main() -> None:
        async with peer((b"", True), (CHUNKED + b"5\r\nhello\r\n", True)) as (there, client):
            waiting = asyncio.ensure_future(ask(client))
            await until(lambda: len(there.requests) == 1)
            streaming = asyncio.ensure_future(ask(client))
            await until(lambda: len(there.requests) == 2)
            await asyncio.sleep(0.02)
            await client.close()
            await failing(waiting, UpstreamLost, "closed the connection")
            await failing(streaming, UpstreamFailed, "broke off")
            await failing(ask(client), UpstreamLost)

    run(main())


def test_limits_of_time(run: Run) -> None:
    async def main() -> None:
        async with peer((b"", True), (HEAD, True), (CHUNKED + b"2\r\nhe\r\n", True)) as (_, client):
            await failing(ask(client, timeout_s=0.2), TimeoutError)
            await failing(ask(client, timeout_s=0.2), TimeoutError)
            response = await client.request("POST", "/", b"{}", timeout_s=5)
            with closing(response):
                assert await response.read() == b"he"
                reading = asyncio.ensure_future(response.read())
                await asyncio.sleep(0)
                response.fail(UpstreamFailed("given up"))
                await failing(reading, UpstreamFailed, "given up")

    run(main())


def test_a_reader_that_is_slow_is_not_run_over(run: Run) -> None:
    """What it has not read waits in the server, and all of it comes."""
    body = bytes(range(256)) * 2**16  # 16 MiB

    async def main() -> None:
        answer = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        async with peer((answer, True), (WHOLE, True)) as (there, client):
            response = await client.request("GET", "/", None, timeout_s=5)
            await asyncio.sleep(0.2)
            assert sum(map(len, response.parts)) < 2**20
            found = [await response.read()]
            for _ in range(3):
                await asyncio.sleep(0.01)
                found.append(await response.read())
            found.append(await read_all(response))
            assert b"".join(found) == body
            assert await ask(client) == b"hello"
            assert there.num_connections == 1

    run(main())


def test_a_refusal_in_the_middle_of_a_long_request_is_read(run: Run) -> None:
    """As with many images. The server has not read the rest, so its connection is not used again."""

    async def main() -> None:
        ended = asyncio.Event()

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await writer.drain()
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await reader.read(2**16):
                    await asyncio.sleep(0.001)
            writer.close()
            ended.set()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, 2.0)
        response = await client.request("POST", "/", bytes(32 * 2**20), timeout_s=10)
        assert (response.status, await response.read(), await response.read()) == (413, b"big", b"")
        await asyncio.wait_for(ended.wait(), 10)
        await client.close()
        server.close()
        await server.wait_closed()

    run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "no-such-host.invalid"])
def test_where_nothing_answers(run: Run, host: str, unused_tcp_port: int) -> None:
    async def main() -> None:
        client = HttpClient(f"http://{host}:{unused_tcp_port}", {}, 2.0)
        await failing(
            client.request("GET", "/", None, timeout_s=10), UpstreamUnreachable, "^nothing answers at"
        )
        await client.close()

    run(main())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_server_with_a_certificate(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's authorities count: one that is among them is believed, for its own name, and no other."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def main() -> None:
        async with peer((WHOLE, True), tls=tls) as (_, client):
            await failing(ask(client), UpstreamUnreachable, "certificate")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with peer((WHOLE, True), (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", True), tls=tls) as (
            there,
            client,
        ):
            assert [await ask(client), await ask(client)] == [b"hello", b"hello"]
            assert there.num_connections == 1
            other = HttpClient(there.url.replace("localhost", "127.0.0.1"), {}, 2.0)
            await failing(ask(other), UpstreamUnreachable, "certificate")
            await other.close()

    run(main())


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.1:8000",
        "ftp://a",
        "http://",
        "http://a:0",
        "http://a:99999",
        "http://a..b",
        f"http://{'x' * 64}",
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of an engine"):
        parse_url(url)
    assert parse_url("https://[::1]:8000/engine/v1/") == "https://[::1]:8000/engine"
