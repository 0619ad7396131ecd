"""What no client would send, over real sockets: each is answered or dropped within the limits, and nobody else notices.

All attacks run at once, beside one stream whose chunks must go on coming. Takes about seven seconds.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from chat_scripts import CHAT, HELLO, MODEL, ask, chatting, joined, says
from openai import AsyncOpenAI

from deskfleet.gateway.policy_file import PolicySettings, PolicyStore
from deskfleet.testing.scripted import ScriptedEngine

LIMIT_S = 1.0
"""For headers as for bodies; the defaults are a minute and more."""
PATIENCE_S = LIMIT_S + 4.0
"""By then everything must be over: the limit, what aiohttp still reads of a body, and a busy machine."""
MAX_GAP_CPU_S, MAX_GAP_S = 0.4, 3.0
"""Between two chunks of the stream that goes on beside, which come every 10 ms: seconds of this process, attackers
included, and by the clock, on a machine with other work.
"""
MAX_BODY = 2**20


def limits() -> PolicyStore:
    return PolicyStore(
        PolicySettings.model_validate(
            {
                "request_limits": {
                    "header_timeout_s": LIMIT_S,
                    "body_timeout_s": LIMIT_S,
                    "unread_timeout_s": LIMIT_S,
                    "max_body_bytes": MAX_BODY,
                }
            }
        )
    )


BODY = json.dumps({"model": MODEL, "messages": HELLO, **CHAT}).encode()


def post(body: bytes = b"", *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """A request as bytes; without a length among `headers`, its own."""
    lines = [f"POST {path} HTTP/1.1", "Host: h", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


@dataclass
class Raw:
    """One connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Send as much as the server takes."""
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def trickle(self, pieces: Sequence[bytes], every_s: float = 0.05) -> None:
        """Send pieces for as long as the server listens."""
        for piece in itertools.islice(itertools.cycle(pieces), 10_000):
            if self.writer.is_closing() or self.reader.at_eof():
                return
            await self.send(piece)
            await asyncio.sleep(every_s)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        data = bytearray()
        with suppress(ConnectionError):
            while block := await self.reader.read(65536):
                data += block
        return bytes(data)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


Attack = Callable[[Raw], Coroutine[Any, Any, bytes]]


def sends(data: bytes) -> Attack:
    """Send all of it, then read to the end."""

    async def attack(raw: Raw) -> bytes:
        await raw.send(data)
        return await raw.rest()

    return attack


def trickles(first: bytes, *pieces: bytes) -> Attack:
    """Send the beginning, then piece after piece for ever, and read beside."""

    async def attack(raw: Raw) -> bytes:
        await raw.send(first)
        more = asyncio.create_task(raw.trickle(pieces))
        try:
            return await raw.rest()
        finally:
            more.cancel()

    return attack


def half_closes(data: bytes) -> Attack:
    async def attack(raw: Raw) -> bytes:
        await raw.send(data)
        raw.writer.write_eof()
        return await raw.rest()

    return attack


async def stops_in_the_second_header(raw: Raw) -> bytes:
    await raw.send(b"GET /health/live HTTP/1.1\r\nHost: h\r\n\r\n")
    head = await raw.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    await raw.send(b"GET /health/live HTTP/1.1\r\nHos")
    return await raw.rest()


async def breaks_a_later_chunk(raw: Raw) -> bytes:
    await raw.send(post(b"", "Transfer-Encoding: chunked") + chunked(b'{"a":'))
    await asyncio.sleep(0.1)
    await raw.send(b"zz\r\n")
    return await raw.rest()


BOMB = gzip.compress(bytes(64 * MAX_BODY))
DEEP = b'{"messages": ' + b"[" * 400_000
BOUNDARY = b"\r\n0\r\n\r\n"

DROPPED = frozenset({0})
"""Closed without a word."""
CUT = DROPPED | {400}
"""Answered at once, though a client that is still sending may lose the answer to the end of the connection."""

ATTACKS: dict[str, tuple[Attack, set[int] | frozenset[int]]] = {
    "nothing at all": (sends(b""), DROPPED),
    "half a request line": (sends(b"POST /v1/chat"), DROPPED),
    "half a header": (sends(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-A"), DROPPED),
    "a header that trickles": (
        trickles(b"POST /v1/chat/completions HTTP/1.1\r\nX-A: ", b"a"),
        DROPPED,
    ),
    "headers without end": (
        trickles(b"POST /v1/chat/completions HTTP/1.1\r\n", b"X-A: b\r\n"),
        CUT,
    ),
    "half a header after an answer": (stops_in_the_second_header, DROPPED),
    "half a header, half closed": (half_closes(b"GET / HTTP/1.1\r\nHo"), CUT),
    "half a body, half closed": (
        half_closes(post(BODY[:9], f"Content-Length: {len(BODY)}")),
        CUT,
    ),
    "a header of 64 KiB": (sends(post(BODY, f"X-A: {'a' * 65536}")), CUT),
    "2,000 headers": (sends(post(BODY, *(f"X-{n}: a" for n in range(2000)))), CUT),
    "a path of 64 KiB": (sends(post(BODY, path="/" + "a" * 65536)), CUT),
    "no HTTP": (sends(bytes(range(256)) * 16), {400}),
    "a TLS greeting": (sends(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300)), CUT),
    "HTTP/2": (sends(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), {400, 404, 405}),
    "a line break in a header": (sends(b"GET /health HTTP/1.1\r\nHost: h\r\nX: a\rb\r\n\r\n"), {400}),
    "two lengths": (sends(post(BODY, "Content-Length: 5", f"Content-Length: {len(BODY)}")), {400}),
    "a length below zero": (sends(post(BODY, "Content-Length: -1")), {400}),
    "a length and chunks": (
        sends(post(chunked(BODY) + BOUNDARY, "Content-Length: 5", "Transfer-Encoding: chunked")),
        {400},
    ),
    "a chunk that says what it is not": (sends(post(b"zz\r\nabc\r\n", "Transfer-Encoding: chunked")), {400}),
    "a later chunk that is none": (breaks_a_later_chunk, {400, 408}),
    "a body that is announced too large": (sends(post(b"", f"Content-Length: {MAX_BODY + 1}")), {413}),
    "a length of 30 digits": (sends(post(b"", f"Content-Length: {10**30}")), {400, 413}),
    "chunks without end": (
        trickles(post(b"", "Transfer-Encoding: chunked"), chunked(b"a" * 200_000)),
        {413},
    ),
    "a body that trickles": (trickles(post(b"", f"Content-Length: {len(BODY)}"), b" "), {408}),
    "chunks that trickle": (trickles(post(b"", "Transfer-Encoding: chunked"), chunked(b" ")), {408}),
    "a body that never comes": (sends(post(b"", f"Content-Length: {len(BODY)}")), {408}),
    "a gzip bomb": (sends(post(BOMB, "Content-Encoding: gzip")), {413}),
    "no gzip": (sends(post(BODY, "Content-Encoding: gzip")), {400}),
    "JSON 400,000 levels deep": (sends(post(DEEP)), {400}),
    "no text": (sends(post(b"\xff\xfe{}" + bytes(1000))), {400}),
    "a number without end": (sends(post(b'{"model": "m", "seed": ' + b"9" * 500_000 + b"}")), {400}),
    "the same again and again": (sends(post(b"", "Content-Length: 2") + b"{}" + post(b"{}") * 200), {400}),
}


def status_of(answer: bytes) -> int:
    """The status of the first answer, 0 where there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


async def attack_with(port: int, attack: Attack) -> tuple[int, float]:
    """The status of what came back, and how long the connection lived."""
    begun = time.monotonic()
    async with connected(port) as raw, asyncio.timeout(PATIENCE_S + 2.0):
        # A connection that is answered is kept open, and closed when nothing comes for as long as a header may take.
        answer = await attack(raw)
    return status_of(answer), time.monotonic() - begun


async def stream_beside(client: AsyncOpenAI, times: list[tuple[float, float]]) -> str:
    chunks = []
    async for chunk in await ask(client, stream=True):
        times.append((time.monotonic(), time.process_time()))
        chunks.append(chunk)
    return joined(chunks, "content")


async def test_hostile_connections_while_a_stream_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    text = " ".join(str(number) for number in range(180))
    engine = ScriptedEngine(says(text, delay_s=0.01))
    caplog.set_level(logging.ERROR)
    async with chatting(engine, policies=limits()) as (client, _):
        port = client.base_url.port
        assert port is not None
        times: list[tuple[float, float]] = []
        stream = asyncio.create_task(stream_beside(client, times))
        await asyncio.sleep(0.2)
        found = await asyncio.gather(*(attack_with(port, attack) for attack, _ in ATTACKS.values()))
        for (name, (_, expected)), (status, took_s) in zip(ATTACKS.items(), found, strict=True):
            assert status in expected, (name, status)
            assert took_s < PATIENCE_S, (name, took_s)
        num_during = len(times)
        assert num_during > 20, "it did not wait for them"
        assert await asyncio.wait_for(stream, 60) == text
        for clock, most_s in enumerate((MAX_GAP_S, MAX_GAP_CPU_S)):
            assert max(later[clock] - earlier[clock] for earlier, later in itertools.pairwise(times)) < most_s
        assert len(engine.requests) == 1, "nothing of it came as far as the engine"
        assert (await client.models.list()).data
    assert [record.getMessage() for record in caplog.records] == [], "nobody fills the log from outside"


async def test_a_client_that_half_closes_after_asking_is_gone() -> None:
    """Who shuts the way to the server down while it waits for an answer is taken for gone: its request ends."""
    engine = ScriptedEngine(says(" ".join(str(number) for number in range(300)), delay_s=0.01))
    async with chatting(engine, policies=limits()) as (client, _):
        async with connected(client.base_url.port or 0) as raw, asyncio.timeout(PATIENCE_S):
            await raw.send(post(json.dumps({"model": MODEL, "messages": HELLO, "stream": True}).encode()))
            await raw.reader.readuntil(b"data: ")
            raw.writer.write_eof()
            await raw.rest()
        async with asyncio.timeout(PATIENCE_S):
            while engine.num_running:
                await asyncio.sleep(0.01)
        assert engine.num_cancelled == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux ends such connections")
async def test_a_client_that_does_not_read_is_gone_after_a_while() -> None:
    """Its answer does not fit on the way; it keeps the connection alive and reads nothing of it."""
    text = " ".join(str(number) for number in range(700))
    body = {"model": MODEL, "messages": HELLO, **CHAT, "stream": True, "logprobs": True, "top_logprobs": 20}
    engine = ScriptedEngine(says(text), max_model_len=20_000)
    async with chatting(engine, policies=limits()) as (client, _):
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", client.base_url.port))
            lazy.sendall(post(json.dumps(body).encode()))
            async with asyncio.timeout(30):
                while not (engine.requests and await running_requests(client) == 1):
                    await asyncio.sleep(0.05)
                begun = time.monotonic()
                while await running_requests(client):
                    await asyncio.sleep(0.1)
            assert time.monotonic() - begun > LIMIT_S / 2, "it was given time"
        assert (engine.num_running, engine.num_cancelled) == (0, 1)


async def running_requests(client: AsyncOpenAI) -> int:
    """As the server counts them."""
    url = client.base_url.join("/metrics")
    async with aiohttp.ClientSession() as session, session.get(str(url)) as response:
        text = await response.text()
    (line,) = [line for line in text.splitlines() if line.startswith("deskfleet_running_requests ")]
    return int(float(line.split()[1]))


async def test_connections_without_requests_are_let_go_by_hundreds() -> None:
    """Three hundred slow headers at once: all are dropped in time, while requests are answered at once."""
    async with chatting(says("Hello.")) as (_, engine), chatting(engine, policies=limits()) as (client, _):
        port = client.base_url.port or 0
        header = sends(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-A: ")
        attacks = [asyncio.create_task(attack_with(port, header)) for _ in range(300)]
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        assert (await ask(client)).choices[0].message.content == "Hello."
        assert time.monotonic() - begun < LIMIT_S
        found = await asyncio.gather(*attacks)
        assert {status for status, _ in found} == {0}
        assert max(took_s for _, took_s in found) < PATIENCE_S
