"""The dashboard as a browser shows it: a headless Chromium in front of a real gateway."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from browser import NO_CHROMIUM, Page, browsing, find_chromium
from chat_scripts import MODEL, ask, call_markup, ids, says, settings
from PIL import Image
from take_pictures import take

from deskfleet.endpoint import EngineHealth, EngineStats, GenerateRequest, RankHealth, TokenChunk
from deskfleet.errors import EngineError
from deskfleet.gateway.app import serving
from deskfleet.gateway.dashboard.history import History
from deskfleet.gateway.health import HealthReport, Verdict
from deskfleet.gateway.key_file import change_key_file, make_secret
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.gateway.recent import RecentRequests, RequestRecord
from deskfleet.testing.scripted import Script, ScriptedEngine

STATIC = Path(__file__).parents[2] / "src" / "deskfleet" / "gateway" / "dashboard" / "static"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
RANKS = EngineHealth(
    (
        RankHealth(
            0, "prefill", 4321, 99, 512, 0.1, 0.2, memory_bytes=100 << 20, planned_bytes=90 << 20,
            host_available_bytes=8 << 30,
        ),
        RankHealth(1, "idle", 4320, 98, 0, 0.4, 0.3, memory_bytes=90 << 20, planned_bytes=90 << 20),
    )
)  # fmt: skip
needs_chromium = pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)

Scripted = Script | Callable[[GenerateRequest], Script]


@asynccontextmanager
async def gateway(script: Scripted, **changes: Any) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(script)
    engine.rank_health = RANKS
    async with serving(engine, settings(**changes)) as endpoint:
        yield endpoint.url, engine


@asynccontextmanager
async def shown(script: Scripted, **window: Any) -> AsyncIterator[tuple[Page, str, ScriptedEngine]]:
    """The dashboard in a browser. Afterwards: nothing came from another host, and no script has failed."""
    async with gateway(script) as (url, engine), browsing() as page:
        await page.open(f"{url}/ui/", **window)
        await page.until("document.querySelector('#model').textContent")
        yield page, url, engine
        strangers = {each for each in page.requested if not each.startswith((url, "data:", "blob:"))}
        assert not strangers, "the page asks other hosts"
        assert page.errors == []


async def answered(page: Page, number: int = 1) -> None:
    """Until the answer of that number is complete."""
    await page.until(
        f"document.querySelectorAll('.turn.assistant').length === {number} && !document.querySelector('#send').disabled"
    )


# --- without a browser


async def test_the_page_is_ours_alone() -> None:
    async with gateway(says("ok")) as (url, _), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/ui", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, "ui/")
        async with session.get(f"{url}/ui") as response:
            page = await response.text()
            assert response.headers["Content-Type"] == "text/html; charset=utf-8"
            policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in re.findall(r'(?:src|href)="([\w.]+)"', page):
            async with session.get(f"{url}/ui/{name}") as response:
                assert response.status == 200, name
                tag = response.headers["ETag"]
            async with session.get(f"{url}/ui/{name}", headers={"If-None-Match": tag}) as response:
                assert response.status == 304
        for name in ("nothing.js", "..%2froutes.py", "%2e%2e/routes.py", "__init__.py"):
            async with session.get(f"{url}/ui/{name}") as response:
                assert response.status == 404, name


def test_its_files_name_no_other_host() -> None:
    for path in STATIC.iterdir():
        urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", path.read_text()))
        assert urls <= {"http://www.w3.org/2000/svg"}, path.name


async def test_the_state_has_names_and_numbers_and_no_words() -> None:
    async with gateway(says("a secret answer")) as (url, _), aiohttp.ClientSession() as session:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-secret", max_retries=0)
        await ask(client, messages=[{"role": "user", "content": "a secret question"}])
        await client.close()
        async with session.get(f"{url}/ui/state") as response:
            assert response.headers["Cache-Control"] == "no-store"
            text = await response.text()
        state = json.loads(text)
        last = state["points"][-1]["number"]
        for since, expected in (
            (str(last), 1),
            ("nonsense", last + 1),
            ("99999", last + 1),
            ("-1", last + 1),
        ):
            async with session.get(f"{url}/ui/state", params={"since": since}) as response:
                assert len((await response.json())["points"]) <= expected, since
    assert "secret" not in text
    assert state["health"]["state"] == "busy", "a rank says that it works"
    (request,) = state["recent"]
    assert (request["outcome"], request["protocol"], request["finish_reason"]) == ("ok", "chat", "stop")
    assert state["summary"]["num_generated_tokens"] == request["num_generated_tokens"] > 0
    assert state["model"] == MODEL


async def test_who_waits_is_shown_with_its_place() -> None:
    """Under the name that the client chose. One at a time runs, here for as long as the test takes."""
    places: dict[str, int | None] = {}
    async with gateway(Script(ids("a b"), delay_s=600), max_running=1) as (url, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        asked = []
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            for name in ("first", "second", "third"):
                asked.append(asyncio.create_task(ask(client, extra_headers={"x-request-id": name})))
                while name not in places:
                    async with session.get(f"{url}/ui/state") as response:
                        places = {
                            row["id"]: row["queue_position"] for row in (await response.json())["running"]
                        }
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await client.close()
    assert places == {"first": None, "second": 1, "third": 2}


def test_points_are_rates_of_the_time_between_looks() -> None:
    now_s = 100.0
    metrics, recent = GatewayMetrics(), RecentRequests()
    history = History(metrics, recent, clock=lambda: now_s)
    stats = EngineStats(
        num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=4, num_drafted=8, num_accepted=6
    )
    report = HealthReport(Verdict("busy", (), 0.0, can_answer=True), 1.0, stats=stats)
    history.add(report)
    record = RequestRecord(
        request_id="r", method="POST", path="/", began_s=100.0, began_at=0.0, protocol="chat"
    )
    recent.begin(record)
    meter = metrics.meter(record, 30, 100.5)
    for place in range(5):
        meter.chunk(TokenChunk((1, 2), None, 30), 101.0 + 0.25 * place)
    now_s = 102.0
    history.add(report)
    first, second = history.since(0)
    assert (first.tok_s, first.prompt_tok_s, first.stream_tok_s) == (0, 0, None)
    assert (second.tok_s, second.prompt_tok_s) == (5.0, 15.0)
    assert second.stream_tok_s == pytest.approx(9.0), "nine tokens in the second after the first"
    assert (second.num_running, second.num_waiting, second.kv_usage) == (2, 1, pytest.approx(0.6))
    assert [point.number for point in history.since(1)] == [2]
    assert history.since(2) == []
    record.outcome, record.ended_s = "ok", 103.0
    recent.end(record)
    summary = history.summary(stats)
    assert (summary.num_latest, summary.ttft_p50_s, summary.ttft_p95_s) == (1, 1.0, 1.0)
    assert summary.acceptance_rate == pytest.approx(0.75)
    assert summary.cache_hit_rate is None


# --- in a browser


@needs_chromium
async def test_the_overview_follows_the_server() -> None:
    script = Script(ids("a b c d e f g h"), delay_s=0.3)
    async with shown(script) as (page, url, engine):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        running = asyncio.create_task(ask(client))
        await page.until("document.querySelectorAll('#running tbody tr').length === 1")
        await page.until("document.querySelector('#running tbody').innerText.includes('runs')")
        ranks = await page.text("#ranks tbody")
        await running
        await page.until("document.querySelectorAll('#recent tbody tr').length === 1")
        recent = await page.text("#recent tbody")
        figures = await page.text("#figures")
        await page.until("document.querySelector('#running-none').checkVisibility()")
        engine.fail("rank 1 was killed by SIGKILL; the group was stopped")
        await page.until("document.querySelector('#state').innerText === 'dead'")
        reason = await page.text("#reasons")
        title = await page.run("document.title")
        events = await page.text("#events")
        await client.close()
    assert "prefill, 512 tokens" in ranks
    assert "4,321" in ranks
    assert "100 MiB of 90.0 MiB, 111%" in ranks
    assert "stop" in recent
    assert "127.0.0.1" in recent
    assert "Time to first token" in figures
    assert "median of 1" in figures
    assert "rank 1 was killed by SIGKILL" in reason
    assert title.startswith("dead")
    assert "dead: rank 1 was killed by SIGKILL" in events


@needs_chromium
async def test_a_server_that_goes_away_is_said_and_found_again() -> None:
    async with browsing() as page:
        async with gateway(says("ok")) as (url, _):
            await page.open(f"{url}/ui/")
            await page.until("document.querySelector('#state').innerText === 'busy'")
        await page.until("document.querySelector('#state').innerText === 'unreachable'")
        async with gateway(says("ok"), port=int(url.rpartition(":")[2])):
            await page.until("document.querySelector('#state').innerText === 'busy'")
            points = await page.run("document.querySelector('.spark .area').getAttribute('d')")
            assert points is not None, "a server that counts from one again is drawn from its beginning"


@needs_chromium
async def test_the_chat_shows_thoughts_calls_and_their_results() -> None:
    call = call_markup(("weather", {"city": ("Lisbon <b>", True)}))
    scripts = [
        says(f"warm words first</think>Let me look.{call}"),
        says("It is <i>warm</i>.\n```\ncode 1\n```\nDone."),
    ]
    async with shown(lambda request: scripts.pop(0)) as (page, _, engine):
        await page.run("document.querySelector('#options').open = true")
        await page.run("document.querySelector('#thinking').value = 'enabled'")
        await page.click("#sample-tool")
        await page.type("#message", "How warm is it in Lisbon?")
        await page.press("Enter", 13)
        await answered(page)
        thought = await page.run("document.querySelector('.turn.assistant details').textContent")
        is_folded = await page.run("!document.querySelector('.turn.assistant details').open")
        shown_call = await page.text(".call")
        numbers = await page.text(".turn.assistant .numbers")
        await page.run("document.querySelector('#thinking').value = 'disabled'")
        await page.type("form.turn textarea", "21 degrees")
        await page.click("form.turn button")
        await answered(page, 2)
        answer = await page.run("document.querySelectorAll('.turn.assistant .text')[3].innerHTML")
    assert "warm words first" in thought
    assert is_folded, "a finished thought makes room for the answer"
    assert "calls weather" in shown_call
    assert '"city": "Lisbon <b>"' in shown_call
    assert "tool_calls" in numbers
    assert "first token" in numbers
    assert "It is &lt;i&gt;warm&lt;/i&gt;." in answer, "what a model writes is text, never markup"
    assert "<pre>code 1\n</pre>" in answer
    assert len(engine.requests) == 2
    assert len(engine.requests[1].prompt_token_ids) > len(engine.requests[0].prompt_token_ids)


@needs_chromium
async def test_an_image_is_sent_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "pixel.png"
    path.write_bytes(PIXEL)
    async with shown(says("red")) as (page, _, engine):
        await page.upload("#file", path, path)
        await page.until("document.querySelectorAll('#images img').length === 2")
        await page.click("#images button")
        await page.until("document.querySelectorAll('#images img').length === 1")
        await page.type("#message", "Which colour?")
        await page.click("#send")
        await answered(page)
        assert await page.run("document.querySelectorAll('.turn.user img').length") == 1
        assert await page.run("document.querySelectorAll('#images img').length") == 0
    (request,) = engine.requests
    assert [image.data for image in request.images] == [PIXEL]


@needs_chromium
async def test_stop_ends_the_answer_in_the_engine_and_errors_are_read() -> None:
    scripts = [
        Script(ids("one two three"), delay_s=30.0),
        Script(ids("x"), failure=EngineError("rank 1 said no"), is_deadly=False),
        says("fine again"),
    ]
    async with shown(lambda request: scripts.pop(0)) as (page, _, engine):
        await page.type("#message", "count")
        await page.press("Enter", 13)
        await page.until("document.querySelector('.turn.assistant .text')?.innerText")
        await page.click("#stop")
        await answered(page)
        assert "stopped" in await page.text(".numbers")
        async with asyncio.timeout(5):
            while engine.num_cancelled == 0:
                await asyncio.sleep(0.01)
        await page.type("#message", "fail")
        await page.press("Enter", 13)
        await answered(page, 2)
        assert await page.text(".turn.assistant [role=alert]") == "rank 1 said no"
        page.errors.clear()  # the browser reports every 503
        await page.type("#message", "again")
        await page.press("Enter", 13)
        await answered(page, 3)
        assert "fine again" in await page.text("#log")
        await page.click("#new")
        assert "fine again" not in await page.text("#log")


@needs_chromium
async def test_with_keys_the_browsers_password_is_enough(tmp_path: Path) -> None:
    """Nothing is shown without a key; with one, page, state and chat all take what the browser was given."""
    secret = make_secret()
    path = tmp_path / "keys.toml"
    change_key_file(path, lambda file: file.with_key("laptop", secret, datetime.now(UTC)))
    guarded = PolicyStore(keys_path=path)
    async with gateway(says("for you"), policies=guarded) as (url, _), browsing() as page:
        async with aiohttp.ClientSession() as session:
            for name in ("", "main.js", "state"):
                headers = {"Accept": "text/html"} if not name else {}
                async with session.get(f"{url}/ui/{name}", headers=headers) as response:
                    assert response.status == 401, name
                    asked = response.headers["WWW-Authenticate"]
                    assert asked.startswith("Basic" if not name else "Bearer"), "a browser asks its user"
        basic = base64.b64encode(f"anyone:{secret}".encode()).decode()
        await page.send("Network.enable")
        await page.send("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {basic}"})
        await page.open(f"{url}/ui/")
        await page.until("document.querySelector('#model').textContent")
        await page.type("#message", "hello")
        await page.press("Enter", 13)
        await answered(page)
        await page.until("document.querySelector('#recent tbody').innerText.includes('laptop')")
        assert "for you" in await page.text("#log")
        assert secret not in await page.run("document.documentElement.outerHTML")
        assert page.errors == []


CONTRAST = """
(() => {
  const light = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const lum = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const back = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.99) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const e of document.body.querySelectorAll("*")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.closest(":disabled") || e.tagName === "OPTION") continue;
    const [a, b] = [lum(parse(getComputedStyle(e).color)), lum(back(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${e.tagName}.${e.className} "${e.textContent.trim().slice(0, 30)}" ${ratio.toFixed(2)}`);
  }
  return bad;
})()
"""


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_everybody_can_read_it(dark: bool) -> None:
    """Contrast of every text, names for every control, and a phone's width without scrolling sideways."""
    failing = Script(ids("x"), failure=EngineError("rank 1 said no"), is_deadly=False)
    scripts = [says("a thought</think>An answer."), failing]
    async with shown(lambda request: scripts.pop(0), dark=dark) as (page, _, _):
        await page.run("document.querySelector('#thinking').value = 'enabled'")
        for number in (1, 2):
            await page.type("#message", "hello")
            await page.press("Enter", 13)
            await answered(page, number)
        page.errors.clear()
        await page.until("document.querySelectorAll('#recent tbody tr').length === 2")
        await page.run("document.querySelector('#options').open = true")
        assert await page.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert await page.run(CONTRAST) == []
        tree = await page.send("Accessibility.getFullAXTree")
        nameless = [
            node["role"]["value"]
            for node in tree["nodes"]
            if not node.get("ignored")
            and node["role"]["value"]
            in ("button", "textbox", "combobox", "spinbutton", "link", "image", "log")
            and not node.get("name", {}).get("value")
        ]
        assert nameless == []
        await page.size(390, 800)
        width = await page.run("document.documentElement.scrollWidth")
        assert width <= 390
        # The choice of a theme stays with this browser.
        other = "light" if dark else "dark"
        await page.run(
            f"(t => {{ t.value = '{other}'; t.dispatchEvent(new Event('change')); }})(document.querySelector('#theme'))"
        )
        assert await page.run("document.documentElement.dataset.theme") == other
        assert await page.run(CONTRAST) == []


@needs_chromium
@pytest.mark.slow(reason="minutes: a trained checkpoint under load, for the pictures in docs/images")
async def test_pictures_on_pocket_under_load(tmp_path: Path) -> None:
    """The pictures of the documentation can be taken anew, and show a server that works."""
    for path in await take(tmp_path, load_s=15.0):
        assert path.stat().st_size < 200_000
        with Image.open(path) as image:
            assert image.size == (1440, 960)
            assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 30
    committed = {
        path.name for path in (Path(__file__).parents[2] / "docs" / "images").glob("dashboard-*.png")
    }
    assert committed == {"dashboard-light.png", "dashboard-dark.png"}
