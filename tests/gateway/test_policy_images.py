"""Images that a request names by URL: what is fetched, and above all what is not. Takes about three seconds."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from deskfleet.gateway.image_fetch import Address, ImageFetcher, NotFetched, is_public
from deskfleet.gateway.policies.images import ImageFetchSettings, ImageSettings

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
NAME = "images.example"


@pytest.mark.parametrize(
    "address",
    [
        # this machine, this network, carriers, link-local and the addresses of clouds' metadata
        "127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255",
        "192.168.1.1", "100.64.0.1", "100.127.255.255", "169.254.169.254", "169.254.0.1",
        # documentation, benchmarks, protocols, multicast, reserved, broadcast
        "192.0.0.1", "192.0.0.170", "192.0.2.1", "198.51.100.1", "203.0.113.1", "198.18.0.1", "198.19.255.255",
        "192.88.99.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
        # the same in IPv6
        "::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd12:3456::1", "ff02::1", "ff0e::1",
        "100::1", "2001:db8::1", "3fff::1", "2001::1", "2001:10::1", "2001:20::1", "5f00::1",
        # IPv4 inside of IPv6: mapped, compatible, NAT64, 6to4, Teredo, ISATAP; of public addresses as well
        "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::808:808",
        "64:ff9b:1::7f00:1", "2002:7f00:1::1", "2002:808:808::1", "2001:0:7f00:1::1",
        "2400:cb00::5efe:10.0.0.1", "2400:cb00::200:5efe:8.8.8.8",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "93.184.215.14", "100.63.255.255", "100.128.0.1", "172.32.0.1", "169.253.0.1",
     "223.255.255.1", "2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "2400:cb00::1"],
)  # fmt: skip
def test_addresses_that_are(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_never_more_than_the_standard_library_allows(address: Address) -> None:
    if is_public(address):
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_private


# --- fetching ---------------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """A server of this machine that plays a public one, and who asked it for what."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[web.BaseRequest] = []
        self.answers: dict[str, Handler] = {}

    def url(self, path: str, host: str = NAME) -> str:
        return f"http://{host}:{self.port}{path}"

    def serve(self, path: str, body: bytes = PNG, **response: Any) -> str:
        """Serve `body` at `path`; return its URL."""

        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=body, **({"content_type": "image/png"} | response))

        self.answers[path] = answer
        return self.url(path)

    def redirect(self, path: str, target: str, status: int = 302) -> str:
        """Send whoever asks for `path` to `target`."""
        return self.serve(path, b"", status=status, headers={"Location": target})

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen.append(request)
        return await self.answers[request.path](request)  # type: ignore[arg-type]


@asynccontextmanager
async def site(address: str = "127.0.0.1") -> AsyncIterator[Site]:
    found = Site()
    runner = web.ServerRunner(web.Server(found.answer, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, 0).start()
        found.port = runner.addresses[0][1]
        yield found
    finally:
        await runner.cleanup()


def allow(*allowed: str) -> Callable[[Address], bool]:
    """Play that these addresses are public; all others are what they are."""
    return lambda address: str(address) in allowed or is_public(address)


class Names:
    """A resolver whose answers may change from one question to the next."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {NAME: [["127.0.0.1"]]} | {
            name.replace("_", "."): each for name, each in answers.items()
        }
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
        self.asked.append(host)
        answers = self.answers[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, each) for each in found]


def limits(site: Site, **fetch: Any) -> ImageSettings:
    settings = {"enabled": True, "ports": (site.port,), "timeout_s": 5.0} | fetch
    return ImageSettings(max_image_bytes=1000, fetch=ImageFetchSettings(**settings))


def chat(*urls: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return msgspec.json.encode(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, *parts]}]}
    )


async def fetch(
    url: str,
    settings: ImageSettings,
    *,
    names: Names | None = None,
    is_allowed: Callable[[Address], bool] | None = None,
) -> str:
    """Return what becomes of one image URL."""
    fetcher = ImageFetcher(is_allowed=is_allowed or allow("127.0.0.1"), resolve=names or Names())
    body = msgspec.json.decode(await fetcher.inline_images(chat(url), settings))
    return str(body["messages"][0]["content"][1]["image_url"]["url"])


async def refused(url: str, settings: ImageSettings, **how: Any) -> str:
    with pytest.raises(NotFetched) as raised:
        await fetch(url, settings, **how)
    assert raised.value.param is not None
    assert raised.value.param.startswith("messages[0].content[1].image_url")
    return raised.value.message


async def test_an_image_comes_as_a_data_url() -> None:
    async with site() as web_site:
        url = await fetch(web_site.serve("/a.png"), limits(web_site))
        assert url == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        url = await fetch(web_site.serve("/b", content_type="image/jpg"), limits(web_site))
        assert url.startswith("data:image/jpeg;base64,")
        (first, _) = web_site.seen
        assert first.headers["Host"] == f"{NAME}:{web_site.port}"
        assert not {"Authorization", "Cookie", "Referer"} & set(first.headers)


async def test_every_place_where_images_stand() -> None:
    async with site() as web_site:
        url = web_site.serve("/a.png")
        data = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
        request = {
            "model": "m",
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": url}, {"type": "image_url", "image_url": data}],
                },
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}
                    ],
                },
                # What only looks like an image: text, arguments of calls, descriptions of tools.
                {"role": "user", "content": f"see {url}"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "input": {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}}],
                },
            ],
            "tools": [{"parameters": {"type": "image_url", "image_url": "http://127.0.0.1/"}}],
        }  # fmt: skip
        fetcher = ImageFetcher(is_allowed=allow("127.0.0.1"), resolve=Names())
        body = msgspec.json.decode(
            await fetcher.inline_images(msgspec.json.encode(request), limits(web_site))
        )
        messages = body["messages"]
        assert body["input"][0]["content"][0]["image_url"] == data
        assert [part["image_url"] for part in messages[0]["content"]] == [data, data]
        assert messages[1]["content"][0]["source"] == source
        assert messages[2]["content"][0]["content"][0]["source"] == source
        assert messages[3:] == request["messages"][3:]  # type: ignore[index]
        assert body["tools"] == request["tools"]
        assert len(web_site.seen) == 4


async def test_what_is_off_or_has_no_urls_is_not_touched() -> None:
    fetcher = ImageFetcher()
    on = ImageSettings(fetch=ImageFetchSettings(enabled=True))
    odd = b'{"messages" : [ 1.50, "http" ]}'
    assert await fetcher.inline_images(odd, on) is odd
    assert await fetcher.inline_images(b"http no JSON", on) == b"http no JSON"
    assert await fetcher.inline_images(b"[" * 100_000 + b'"http', on) == b"[" * 100_000 + b'"http'
    body = chat("http://127.0.0.1/a.png")
    assert await fetcher.inline_images(body, ImageSettings()) is body


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1",
     "127.0.0.1.", "[64:ff9b::7f00:1]", "[fe80::1%25lo]", "0", "①②⑦.0.0.1", "169.254.169.254"],
)  # fmt: skip
async def test_no_spelling_of_this_machine_is_connected_to(host: str) -> None:
    """With the system's own resolver, and a server that would answer."""
    async with site() as web_site:
        web_site.serve("/a.png")
        with pytest.raises(NotFetched) as raised:
            await ImageFetcher().inline_images(chat(web_site.url("/a.png", host)), limits(web_site))
        assert "127" not in raised.value.message, "what the network looks like is not told"
        assert web_site.seen == []


async def test_a_name_with_one_address_that_is_not_public_is_refused() -> None:
    async with site() as web_site:
        url = web_site.serve("/a.png")
        for addresses in (
            ["127.0.0.1"],
            ["8.8.8.8", "127.0.0.1"],
            ["::1"],
            ["::ffff:127.0.0.1"],
            ["10.0.0.1", "8.8.8.8"],
        ):
            message = await refused(
                url, limits(web_site), names=Names(images_example=[addresses]), is_allowed=is_public
            )
            assert message.endswith("its host has no public address")
        assert web_site.seen == []


async def test_a_name_that_changes_its_address_gets_nowhere() -> None:
    """The first answer is public, every later one is this machine: the name is asked once for a connection."""
    async with site() as web_site:
        url = web_site.redirect("/a.png", "/b.png")
        names = Names(images_example=[["127.0.0.1"], ["127.0.0.2"]])
        message = await refused(url, limits(web_site), names=names)
        assert message.endswith("its host has no public address")
        assert names.asked == [NAME, NAME]
        assert [request.path for request in web_site.seen] == ["/a.png"]


async def test_the_socket_is_the_last_word() -> None:
    """Even if the resolver lets an address through, no socket is made for it."""
    calls: list[str] = []

    def is_allowed(address: Address) -> bool:
        calls.append(str(address))
        return len(calls) == 1  # the resolver's question

    async with site() as web_site:
        await refused(web_site.serve("/a.png"), limits(web_site), is_allowed=is_allowed)
        assert calls == ["127.0.0.1", "127.0.0.1"]
        assert web_site.seen == []


async def test_redirects_are_checked_one_by_one() -> None:
    async with site() as web_site, site("127.0.0.3") as inner:
        inner.serve("/secret.png")
        good = web_site.serve("/good.png")
        settings = limits(web_site, ports=(web_site.port, inner.port))
        assert (await fetch(web_site.redirect("/1", good), settings)).startswith("data:")
        assert (await fetch(web_site.redirect("/2", "good.png", 307), settings)).startswith("data:")
        inside = inner.url("/secret.png", "inner.example")
        names = Names(inner_example=[["127.0.0.3"]])
        for target, said in (
            (inside, "its host has no public address"),
            (inner.url("/secret.png", "127.0.0.3"), "its host has no public address"),
            (f"http://user:password@{NAME}:{web_site.port}/good.png", "a user name in the URL"),
            (f"http://{NAME}:22/", "port 22, which is none of"),
            ("file:///etc/passwd", "file scheme"),
            ("gopher://x/", "gopher scheme"),
            ("", "more than 3 redirects"),
            ("http://[/", "not a URL"),
        ):
            message = await refused(web_site.redirect("/bad", target), settings, names=names)
            assert said in message, target
            assert "password" not in message
        assert inner.seen == []
        web_site.redirect("/loop", "/loop")
        assert "more than 3 redirects" in await refused(web_site.url("/loop"), settings)
        assert "more than 0 redirects" in await refused(web_site.url("/1"), limits(web_site, max_redirects=0))


async def test_urls_that_are_not_tried() -> None:
    async with site() as web_site:
        settings = limits(web_site)
        for url, said in (
            (f"http://{NAME}/a.png", "port 80, which is none of"),
            (f"https://{NAME}/a.png", "port 443"),
            (f"http://a:b@{NAME}:{web_site.port}/", "a user name"),
            ("http://", "no host"),
            (f"http://{NAME}:99999/", "not a URL"),
            (web_site.url("/" + "a" * 3000), "not a URL"),
        ):
            assert said in await refused(url, settings), url
        message = "2 image URLs, more than 1"
        with pytest.raises(NotFetched, match=message):
            await ImageFetcher().inline_images(chat("http://a/", "http://b/"), limits(web_site, max_urls=1))
        assert web_site.seen == []


async def test_answers_that_are_not_taken() -> None:
    async with site() as web_site:
        settings = limits(web_site)
        huge = PNG + bytes(2000)

        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "image/png"})
            await response.prepare(request)
            while True:
                await response.write(bytes(500))

        async def silent(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(60)
            raise AssertionError

        async def trickling(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "image/png"})
            await response.prepare(request)
            for _ in range(600):
                await response.write(b"x")
                await asyncio.sleep(0.1)
            return response

        web_site.answers |= {"/endless": endless, "/silent": silent, "/trickling": trickling}
        for url, said in (
            (web_site.serve("/1", status=404), "the answer was 404"),
            (web_site.serve("/2", content_type="text/html"), "not PNG, JPEG or WebP"),
            (web_site.serve("/3", content_type="image/svg+xml"), "not PNG, JPEG or WebP"),
            (web_site.serve("/4", huge), f"has {len(huge)} bytes, more than 1000"),
            (web_site.serve("/5", headers={"Content-Encoding": "gzip"}), "compressed"),
            (web_site.url("/endless"), "more than 1000 bytes"),
        ):
            assert said in await refused(url, settings), url
        quick = limits(web_site, timeout_s=0.4)
        for path in ("/silent", "/trickling"):
            assert "not fetched within 0.4 s" in await refused(web_site.url(path), quick)


async def test_many_requests_share_few_connections() -> None:
    most, now = 0, 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        return web.Response(body=PNG, content_type="image/png")

    async with site() as web_site:
        web_site.answers["/slow"] = slow
        fetcher = ImageFetcher(is_allowed=allow("127.0.0.1"), resolve=Names(), max_at_once=3)
        body = chat(*[web_site.url("/slow")] * 4)
        await asyncio.gather(*[fetcher.inline_images(body, limits(web_site)) for _ in range(4)])
        assert len(web_site.seen) == 16
        assert most == 3


async def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as web_site, site() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        await fetch(web_site.serve("/a.png"), limits(web_site))
        assert proxy.seen == []


async def test_a_client_that_leaves_ends_the_fetching() -> None:
    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async with site() as web_site:
        web_site.answers["/silent"] = silent
        task = asyncio.ensure_future(fetch(web_site.url("/silent"), limits(web_site)))
        while not web_site.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
