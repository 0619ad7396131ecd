"""Keys: how they are kept, sent, recognised, and never shown. Takes about five seconds."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from deskfleet.errors import ConfigError
from deskfleet.gateway.failures import describe_failure
from deskfleet.gateway.key_file import KeyFile, change_key_file, check_secret, make_secret, read_key_file
from deskfleet.gateway.keys import KeyRing, require_key
from deskfleet.gateway.policies.contract import Caller
from deskfleet.gateway.redaction import HIDDEN, KeyRedaction, redact
from deskfleet.gateway.refusals import NotAuthenticated

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
COMMAND = (sys.executable, "-c", "import sys; from deskfleet.cli import main; sys.exit(main())", "keys")
CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)
BROUGHT = "abcdefghijklmnopqrstuvwxyz0123456789"


def keys_command(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )


# --- the file and the command -----------------------------------------------------------------------------


def test_the_command_shows_a_key_once_and_keeps_a_digest(tmp_path: Path) -> None:
    made = keys_command("new", "alice", cwd=tmp_path)
    assert made.returncode == 0
    secret = made.stdout.strip()
    assert secret.startswith("dfk_")
    assert len(secret) == 4 + 43, "256 bits"
    assert secret not in made.stderr
    as_json = json.loads(keys_command("new", "bob", "--json", cwd=tmp_path).stdout)
    assert as_json["name"] == "bob"
    file = tmp_path / "keys.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert secret not in text
    assert as_json["key"] not in text
    assert KeyRing(read_key_file(file)).name_of(secret) == "alice"

    revoked = keys_command("revoke", "alice", "--json", cwd=tmp_path)
    assert json.loads(revoked.stdout)["revoked"] is not None
    ring = KeyRing(read_key_file(file))
    assert (ring.name_of(secret), ring.name_of(as_json["key"])) == (None, "bob")
    listed = [json.loads(line) for line in keys_command("list", "--json", cwd=tmp_path).stdout.splitlines()]
    assert [(key["name"], key["revoked"] is None) for key in listed] == [("alice", False), ("bob", True)]
    again = keys_command("new", "alice", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert "there is a key 'alice' already" in again.stderr
    assert "alice" in keys_command("list", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "brought",
    ["-abc", "a\\b", f"{BROUGHT}\nsecond", f"{BROUGHT}\x0b", f"-{BROUGHT}", "a" * 40, f"{BROUGHT} x", ""],
)
def test_keys_that_cannot_work_are_refused_and_not_repeated(tmp_path: Path, brought: str) -> None:
    refused = keys_command("new", "eve", "--from-stdin", "--json", cwd=tmp_path, stdin=brought)
    assert refused.returncode == 2
    assert not brought or brought not in refused.stdout + refused.stderr
    assert not (tmp_path / "keys.toml").exists(), "nothing is left behind"


def test_a_key_may_end_its_line(tmp_path: Path) -> None:
    done = keys_command("new", "eve", "--from-stdin", cwd=tmp_path, stdin=f"{BROUGHT}\r\n")
    assert (done.returncode, done.stdout) == (0, "")
    assert BROUGHT not in done.stderr
    assert KeyRing(read_key_file(tmp_path / "keys.toml")).name_of(BROUGHT) == "eve"
    twice = keys_command("new", "other", "--from-stdin", cwd=tmp_path, stdin=BROUGHT)
    assert "under another name" in twice.stderr
    assert BROUGHT not in twice.stderr


def test_many_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    def add(number: int) -> None:
        change_key_file(path, lambda old: old.with_key(f"key{number}", make_secret(), NOW))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    assert sorted(read_key_file(path).names) == sorted(f"key{number}" for number in range(40))
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"], "no temporary file is left"


SALT, DIGEST = "ab" * 32, "cd" * 32
ENTRY = f'name = "x"\ndigest = "{DIGEST}"\ncreated = 2026-11-30T12:00:00Z\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'salt = "{SALT}"\n[[keys]]\nname = "x"\nsecret = "-abc"\n', "keys.0.digest: field required"),
        (
            f'salt = "{SALT}"\n[[keys]]\n{ENTRY}secret = "s3cr3t-value"\n',
            "keys.0.secret: there is no such entry",
        ),
        (
            f'salt = "{SALT}"\n[[keys]]\nname = "x"\ndigest = "s3cr3t-value"\n',
            "keys.0.digest: not as it should",
        ),
        ("s3cr3t-value = a\\b", "is not TOML, line 1"),
        ('salt = "s3cr3t-value', "is not TOML"),
        ("", "salt: field required"),
        (f'salt = "{SALT}"\n[[keys]]\n{ENTRY}[[keys]]\n{ENTRY}', "two keys of one name"),
    ],
)
def test_a_wrong_file_is_refused_without_repeating_it(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as raised:
        read_key_file(path)
    assert said in str(raised.value)
    # The trace too: whatever is chained to an error is printed with it.
    stream = io.StringIO()
    logging.StreamHandler(stream).emit(
        logging.LogRecord("x", 40, "", 0, "failed", (), (ConfigError, raised.value, raised.tb))
    )
    trace = "".join(part for part in stream.getvalue().split("keys.toml"))
    for secret in ("-abc", "s3cr3t-value", "a\\b"):
        assert secret not in str(raised.value)
        assert secret not in trace


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    change_key_file(path, lambda old: old.with_key("alice", make_secret(), NOW))
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="written by others"):
        read_key_file(path)
    path.chmod(0o644)
    assert read_key_file(path).names == ("alice",)
    with pytest.raises(ConfigError, match="cannot read"):
        read_key_file(tmp_path / "nothing")


def test_equal_keys_have_different_digests_in_different_files() -> None:
    first, second = (KeyFile(os.urandom(32)).with_key("x", BROUGHT, NOW) for _ in range(2))
    assert first.keys[0].digest != second.keys[0].digest
    assert check_secret(f"{BROUGHT}\n") == BROUGHT


def test_nothing_about_a_ring_shows_a_key() -> None:
    ring = KeyRing(KeyFile(bytes(32)).with_key("alice", BROUGHT, NOW))
    assert ring.name_of(BROUGHT) == "alice"
    assert BROUGHT not in repr(ring) + repr(vars(ring))


# --- the door ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def guarded(ring: list[KeyRing | None]) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A server behind the door, whose boundary answers as the gateway's does."""

    @web.middleware
    async def boundary(request: web.Request, handler: object) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[operator, no-any-return]
        except NotAuthenticated as error:
            failure = describe_failure(error)
            return web.Response(body=failure.to_json(), status=error.status, headers=error.headers)

    async def whoami(request: web.Request) -> web.Response:
        return web.json_response({"key": request[CALLER].key, "address": request[CALLER].address})

    app = web.Application(middlewares=[boundary, require_key(lambda: ring[0], CALLER)])
    for path in ("/health/live", "/health", "/metrics", "/ui", "/v1/models", "/tokenize"):
        app.router.add_get(path, whoami)
    for path in ("/v1/chat/completions", "/v1/messages", "/health/live"):
        app.router.add_post(path, whoami)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            yield session, url
    finally:
        await runner.cleanup()


RING = KeyRing(KeyFile(bytes(32)).with_key("alice", BROUGHT, NOW).with_key("bob", BROUGHT[::-1], NOW))


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"Authorization": f"Bearer {BROUGHT}"}, "alice"),
        ({"Authorization": f"bearer  {BROUGHT[::-1]} "}, "bob"),
        ({"x-api-key": BROUGHT}, "alice"),
        ({"X-API-Key": BROUGHT, "Authorization": "Bearer placeholder"}, "alice"),
        ({"Authorization": basic(BROUGHT)}, "alice"),
        ({}, None),
        ({"Authorization": "Bearer"}, None),
        ({"Authorization": "Bearer -abc"}, None),
        ({"Authorization": BROUGHT}, None),
        ({"Authorization": f"Bearer {BROUGHT}x"}, None),
        ({"Authorization": f"Bearer {BROUGHT[:-1]}"}, None),
        ({"Authorization": f"Bearer {BROUGHT}\\b"}, None),
        ({"Authorization": "Basic ///"}, None),
        ({"x-api-key": "\u00e9" * 40}, None),
        ({"x-api-key": "a" * 7000}, None),
        ({"Cookie": f"key={BROUGHT}"}, None),
    ],
)
async def test_ways_to_send_a_key(headers: dict[str, str], name: str | None) -> None:
    async with (
        guarded([RING]) as (session, url),
        session.get(f"{url}/v1/models", headers=headers) as response,
    ):
        if name is None:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == 'Bearer realm="deskfleet"'
            text = await response.text()
            for value in headers.values():
                sent = value.split(" ")[-1][:20]
                assert sent in ("Bearer", "") or sent not in text
        else:
            assert response.status == 200
            assert await response.json() == {"key": name, "address": "127.0.0.1"}


async def test_nothing_but_liveness_is_open() -> None:
    async with guarded([RING]) as (session, url):
        for method, path, status in (
            ("GET", "/health/live", 200),
            ("HEAD", "/health/live", 200),
            ("POST", "/health/live", 401),
            ("GET", "/health/live/", 401),
            ("GET", "//health/live", 401),
            ("GET", "/health/live%2F..%2F..%2Fmetrics", 401),
            ("GET", "/health", 401),
            ("GET", "/metrics", 401),
            ("GET", "/ui", 401),
            ("GET", "/v1/models", 401),
            ("GET", "/tokenize", 401),
            ("POST", "/v1/chat/completions", 401),
            ("POST", "/v1/messages", 401),
            ("GET", "/nowhere", 401),
            ("OPTIONS", "/v1/models", 401),
            ("DELETE", "/v1/models", 401),
        ):
            async with session.request(method, f"{url}{path}") as response:
                assert response.status == status, (method, path)
            headers = {"Authorization": f"Bearer {BROUGHT}"}
            async with session.request(method, f"{url}{path}", headers=headers) as response:
                assert response.status != 401, (method, path)
    async with guarded([None]) as (session, url), session.get(f"{url}/v1/models") as response:
        assert await response.json() == {"key": None, "address": "127.0.0.1"}


async def test_a_browser_is_asked_and_protected() -> None:
    async with guarded([RING]) as (session, url):
        async with session.get(f"{url}/ui", headers={"Accept": "text/html,*/*"}) as response:
            assert response.headers["WWW-Authenticate"] == 'Basic realm="deskfleet"'
        password = {"Authorization": basic(BROUGHT)}
        chat = f"{url}/v1/chat/completions"
        for origin, status in ((url, 200), (None, 200), ("https://evil.example", 401), ("null", 401)):
            headers = password | ({} if origin is None else {"Origin": origin})
            async with session.post(chat, headers=headers) as response:
                assert response.status == status, origin
        # A program on another page's behalf has to know the key, and then may.
        headers = {"Authorization": f"Bearer {BROUGHT}", "Origin": "https://front.example"}
        async with session.post(chat, headers=headers) as response:
            assert response.status == 200


async def test_a_revoked_key_is_out_at_once() -> None:
    ring: list[KeyRing | None] = [RING]
    headers = {"x-api-key": BROUGHT}
    async with guarded(ring) as (session, url):
        async with session.get(f"{url}/v1/models", headers=headers) as response:
            assert response.status == 200
        ring[0] = KeyRing(KeyFile(bytes(32)).with_key("alice", BROUGHT, NOW).without("alice", NOW))
        async with session.get(f"{url}/v1/models", headers=headers) as response:
            assert response.status == 401
        assert len(ring[0]) == 0


def test_a_thousand_keys_cost_no_time() -> None:
    file = KeyFile(bytes(32))
    secrets = [make_secret() for _ in range(1000)]
    for number, secret in enumerate(secrets):
        file = file.with_key(f"key{number}", secret, NOW) if number < 5 else file
    import dataclasses

    from deskfleet.gateway.key_file import Key

    many = KeyRing(
        dataclasses.replace(
            file, keys=tuple(Key(f"key{n}", file.digest(s), NOW) for n, s in enumerate(secrets))
        )
    )
    one = KeyRing(KeyFile(bytes(32)).with_key("x", secrets[0], NOW))

    def cost_s(ring: KeyRing) -> float:
        start = time.perf_counter()
        for secret in secrets:
            ring.name_of(secret)
        return (time.perf_counter() - start) / len(secrets)

    assert [many.name_of(secret) for secret in secrets[:3]] == ["key0", "key1", "key2"]
    with_many, with_one = min(cost_s(many) for _ in range(5)), min(cost_s(one) for _ in range(5))
    assert with_many < 50e-6
    assert with_many < 5 * with_one


# --- what is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer {}",
        "authorization: bearer {}",
        "b'Authorization: Bearer {}\\r\\n'",
        "headers=<CIMultiDictProxy('Host': 'x', 'Authorization': 'Bearer {}')>",
        "(b'x-api-key', b'{}')",
        "'x-api-key': '{}', 'next': 1",
        "X-API-Key={}",
        "sent bearer {} to us",
        '"Authorization": "Basic {}"',
        "Proxy-Authorization: Basic {}",
    ],
)
@pytest.mark.parametrize("secret", [BROUGHT, "-abc-def", "a\\b\\c\\d", "dfk_" + "Ab-_" * 10])
def test_keys_are_hidden_however_they_are_written(line: str, secret: str) -> None:
    hidden = redact(line.format(secret))
    assert secret not in hidden
    assert HIDDEN in hidden


def test_ordinary_lines_stay() -> None:
    for line in ("the bearer of bad news", "401 no key was sent", "x-api-keys", 'Bearer realm="deskfleet"'):
        assert redact(line).replace(HIDDEN, "") == line or "bearer of" in line
    assert redact("made dfk_abcdefghijkl just now") == f"made {HIDDEN} just now"


def test_records_lose_keys_in_arguments_and_traces() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(KeyRedaction())
    log = logging.getLogger("test.redaction")
    log.propagate = False
    log.addHandler(handler)
    try:
        raise ValueError(f"bad header: Authorization: Bearer {BROUGHT}")
    except ValueError:
        log.exception("from %s with %r", "x-api-key: -abc-secret", {"Authorization": f"Bearer {BROUGHT}"})
    text = stream.getvalue()
    assert "ValueError" in text
    assert BROUGHT not in text
    assert "-abc-secret" not in text


async def test_what_the_http_library_logs_has_no_key(caplog: pytest.LogCaptureFixture) -> None:
    """A broken header line is logged by aiohttp with its bytes."""
    secret = "dfk_" + "s3cr3t" * 8
    with caplog.at_level(logging.DEBUG):
        async with guarded([RING]) as (_, url):
            port = int(url.rpartition(":")[2])
            for head in (
                f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\x00\r\n\r\n",
                f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthor ization: Bearer {secret}\r\n\r\n",
                f"GET /v1/models HTTP/9.1\r\nx-api-key: {secret}\r\n\r\n",
                f"{secret}\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head.encode())
                await reader.read()
                writer.close()
    written = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert secret not in written
