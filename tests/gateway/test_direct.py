"""The short way to the handlers: requests of one connection are answered in order, whichever way each goes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from chat_scripts import CHAT, HELLO, MODEL, says, settings

from deskfleet.gateway.app import serving
from deskfleet.gateway.direct import take_direct_way
from deskfleet.testing.scripted import ScriptedEngine

PATH = "/v1/chat/completions"
BODY = json.dumps({"model": MODEL, "messages": HELLO, "stream": True, **CHAT}).encode()


def request(*fields: tuple[str, str], body: bytes = BODY, line: str = f"POST {PATH} HTTP/1.1") -> bytes:
    lines = [line, "Host: h", *(f"{name}: {value}" for name, value in fields)]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


async def test_middlewares_and_handlers_see_what_they_see_on_aiohttps_own_way() -> None:
    seen: list[tuple[str, ...]] = []

    def noting(name: str) -> Any:
        @web.middleware
        async def note(asked: web.Request, handler: Handler) -> web.StreamResponse:
            seen.append((name, asked.path, str(asked.match_info.route.resource), str(asked.app is app)))
            return await handler(asked)

        return note

    async def handle(asked: web.Request) -> web.Response:
        seen.append(("handler", await asked.text(), str(asked.app is app), str(asked.config_dict.get("x"))))
        return web.Response(text="ok")

    app = web.Application(middlewares=[noting("outer"), noting("inner")])
    app.router.add_post("/a", handle)
    app.router.add_post("/b", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    take_direct_way(runner, ["/a"])
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    told: dict[str, list[tuple[str, ...]]] = {}
    try:
        for path in ("/a", "/b"):
            seen.clear()
            reader, writer = await asyncio.open_connection(*runner.addresses[0])
            writer.write(request(("Connection", "close"), body=b"text", line=f"POST {path} HTTP/1.1"))
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert answer.endswith(b"ok")
            told[path] = [tuple(part.replace(path, "PATH") for part in each) for each in seen]
    finally:
        await runner.cleanup()
    assert told["/a"] == told["/b"]
    assert [each[0] for each in told["/a"]] == ["outer", "inner", "handler"]


GET = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = request(("Transfer-Encoding", "chunked")).partition(b"Content-Length")[0] + (
    b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
)
KINDS = {
    "plain": request(("x-request-id", "plain")),
    "get": GET,
    "chunked": CHUNKED,
    "wrong": request(body=b"{}"),
}
SIGNS = {"plain": b"[DONE]", "get": b'"object":"list"', "chunked": b"[DONE]", "wrong": b"required"}


@pytest.mark.parametrize(
    "cuts", ["whole", "head and body", "every 50", "all at once", "one and a half", "byte by byte"]
)
@pytest.mark.parametrize(
    "order", [("plain", "plain", "plain"), ("plain", "get", "plain"), ("chunked", "plain", "wrong", "plain")]
)
async def test_requests_of_one_connection_are_answered_in_order_however_they_are_cut(
    cuts: str, order: tuple[str, ...]
) -> None:
    sent = [KINDS[kind] for kind in order]
    stream = b"".join(sent)
    match cuts:
        case "whole":
            pieces = sent
        case "head and body":
            pieces = [piece for each in sent for piece in each.partition(b"\r\n\r\n") if piece]
        case "every 50":
            pieces = [stream[start : start + 50] for start in range(0, len(stream), 50)]
        case "all at once":
            pieces = [stream]
        case "one and a half":
            middle = len(sent[0]) + len(sent[1]) // 2
            pieces = [stream[:middle], stream[middle:]]
        case _:
            pieces = [stream[place : place + 1] for place in range(len(stream))]
    async with serving(ScriptedEngine(says("one two")), settings()) as endpoint:
        host, port = endpoint.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        answers = b""
        async with asyncio.timeout(20):
            while (
                answers.count(b"HTTP/1.1 ") < len(order)
                or SIGNS[order[-1]] not in answers.rpartition(b"HTTP/1.1 ")[2]
            ):
                block = await reader.read(2**16)
                assert block, answers
                answers += block
        writer.close()
        await writer.wait_closed()
    told = answers.split(b"HTTP/1.1 ")[1:]
    assert len(told) == len(order)
    for kind, answer in zip(order, told, strict=True):
        assert SIGNS[kind] in answer, (kind, answer)
        assert answer.startswith(b"400" if kind == "wrong" else b"200")


async def test_who_leaves_ends_what_he_asked_for_on_the_short_way() -> None:
    engine = ScriptedEngine(says("one two three", delay_s=0.2))
    async with serving(engine, settings()) as endpoint:
        host, port = endpoint.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(KINDS["plain"])
        await writer.drain()
        async with asyncio.timeout(10):
            while not engine.requests:
                await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(10):
            while (await engine.stats()).num_running:
                await asyncio.sleep(0.01)
        assert (await engine.stats()).num_cancelled == 1


@pytest.mark.parametrize(
    ("data", "is_chunked", "says_close"),
    [
        (request(("Connection", "close")), True, True),
        (request(line=f"POST {PATH} HTTP/1.0"), False, False),
        (request(("Connection", "keep-alive"), line=f"POST {PATH} HTTP/1.0"), False, False),
    ],
)
async def test_a_stream_on_a_connection_that_does_not_stay(
    data: bytes, is_chunked: bool, says_close: bool
) -> None:
    """Before HTTP/1.1 there are no chunks: the end of the connection ends the answer, whatever the client hopes for."""
    async with serving(ScriptedEngine(says("one two")), settings()) as endpoint:
        host, port = endpoint.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        async with asyncio.timeout(20):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    lines = head.lower().split(b"\r\n")
    assert lines[0].endswith(b"200 ok")
    assert (b"transfer-encoding: chunked" in lines) == is_chunked
    assert (b"connection: close" in lines) == says_close
    assert body.endswith(b"0\r\n\r\n" if is_chunked else b"data: [DONE]\n\n")
    assert body.startswith(b"data: ") != is_chunked
