"""An hour of what clients do to a gateway, and what it holds at the end: memory, open files, tasks.

    python -m tests.gateway.soak --minutes 60 --streams 64 [--result bench/results/soak]

The gateway is a process of its own with a scripted engine in it, paced so that a machine can do other work beside it.
Clients ask in every protocol, streamed and whole, with tools, thoughts and stop strings, under keys; some leave in the
middle, some are refused, some get an answer that loops and is ended. Every answer is compared with what the engine was
told to say (`soak_talks.py`). The gateway looks at itself once a second (`soak_server.py`).

What must hold: no answer is wrong or missing, and nothing grows from the first third to the last. At the end, without
clients, as many files and tasks are left as there were before them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from chat_scripts import MODEL
from soak_talks import KINDS, ROUTES, Talk

from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import Spread, result_path, write_new
from deskfleet.gateway.key_file import change_key_file, make_secret

KEYS = ("alice", "bob", "carol", "hasty")
DELAY_S = 0.35
_LONGEST_S = 180.0
_SETTLE_S = 3.0
_POLICIES = """keys_file = "keys.toml"

[admission]
drain_s = 20

[keys.hasty.key_limits]
requests_per_minute = 1
"""
_REFUSALS = {
    "no key": 401,
    "another model": 404,
    "no such effort": 400,
    "half a body": 400,
    "too often": 429,
    "beyond the context": 400,
}


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """A third of the run: spreads of what was sampled each second, and of the objects counted each minute."""

    rss_bytes: Spread
    private_bytes: Spread
    fds: Spread
    tasks: Spread
    threads: Spread
    running: Spread
    objects: Spread | None


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """One soak. `before` and `after` are the gateway without clients; `wrong` are sentences, empty when all is well."""

    name: str
    provenance: Provenance
    settings: dict[str, str | int | float | None]
    seconds: float
    cpu_s: float
    client_cpu_s: float
    answers: dict[str, int]
    """By protocol, way and kind; those that were left, and those that were refused, by why."""

    num_unanswered: int
    wrong: tuple[str, ...]
    before: dict[str, float]
    after: dict[str, float]
    thirds: tuple[Signs, Signs, Signs]
    engine: dict[str, int]
    minutes: tuple[dict[str, float], ...]
    """One sample of each minute."""

    exit_code: int
    schema: int = 1

    def leaks(self) -> list[str]:
        """Say what has grown; empty when nothing has.

        Memory may grow by a twentieth and 2 MiB from the first third to the last: allocators keep what they were
        given. Counts are of the same load at different moments, and may differ by what that load differs.
        """
        first, last = self.thirds[0], self.thirds[2]
        grown = []
        limit = first.private_bytes.median * 1.05 + 2 * 2**20
        if last.private_bytes.median > limit:
            grown.append(f"memory: {first.private_bytes.median:.0f} to {last.private_bytes.median:.0f} bytes")
        for name in ("fds", "tasks", "threads"):
            began, ended = getattr(first, name), getattr(last, name)
            if ended.median > began.median + max(3, 0.05 * began.median):
                grown.append(f"{name}: {began.median:g} to {ended.median:g}")
        if first.objects and last.objects and last.objects.median > first.objects.median * 1.05 + 5000:
            grown.append(f"objects: {first.objects.median:g} to {last.objects.median:g}")
        if self.engine.get("running") != 0:
            grown.append(f"the engine still had requests at the end: {self.engine}")
        for name in ("fds", "tasks"):
            if self.after[name] > self.before[name] + 2:
                grown.append(f"{name} without clients: {self.before[name]:g} to {self.after[name]:g}")
        return grown


class Crowd:
    """The clients, and what came of what they asked."""

    def __init__(self, url: str, keys: dict[str, str], seed: int = 0) -> None:
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_unanswered = 0
        self.num_left = 0
        self._url, self._keys, self._chance, self._number = url, keys, random.Random(seed), 0

    async def ask_until(self, end_s: float, session: aiohttp.ClientSession) -> None:
        """One client: asks, and asks again."""
        while time.monotonic() < end_s:
            self._number += 1
            try:
                async with asyncio.timeout(_LONGEST_S):
                    await (self._refused(session) if self._chance.random() < 0.06 else self._talk(session))
            except (TimeoutError, aiohttp.ClientError) as error:
                self.num_unanswered += 1
                self._blame(f"unanswered: {error!r}")

    async def _talk(self, session: aiohttp.ClientSession) -> None:
        chance = self._chance
        talk = Talk(
            protocol=chance.choice(tuple(ROUTES)),
            kind=chance.choice(KINDS),
            number=self._number,
            is_stream=chance.random() < 0.8,
            leaves_after=chance.randint(1, 6) if chance.random() < 0.15 else None,
        )
        if talk.protocol == "completions" and talk.kind not in (
            "plain",
            "characters",
            "length",
            "stop",
            "loop",
        ):
            talk = dataclasses.replace(talk, kind="plain")
        headers = self._headers(chance.choice(KEYS[:3]), talk.protocol)
        async with session.post(
            f"{self._url}{ROUTES[talk.protocol]}", json=talk.body(), headers=headers
        ) as response:
            if response.status != 200:
                return self._blame(f"{talk}: {response.status}: {await response.text()}")
            if talk.leaves_after is not None and talk.is_stream:
                return await self._leave(response, talk.leaves_after)
            sent = await response.read()
        wrong = talk.wrong(sent)
        if wrong is not None:
            return self._blame(wrong)
        self.answers[f"{talk.protocol}, {'streamed' if talk.is_stream else 'whole'}, {talk.kind}"] += 1

    async def _leave(self, response: aiohttp.ClientResponse, reads: int) -> None:
        for _ in range(reads):
            if not await response.content.readany():
                self.answers["to have been left, but it was over"] += 1
                return
        response.close()
        self.answers["left in the middle"] += 1

    async def _refused(self, session: aiohttp.ClientSession) -> None:
        why = self._chance.choice(tuple(_REFUSALS))
        talk = Talk("chat", "plain", self._number, is_stream=self._chance.random() < 0.5)
        body, headers = talk.body(), self._headers("hasty" if why == "too often" else "alice", "chat")
        data = None
        match why:
            case "no key":
                headers = {"Authorization": "Bearer sk-nobody"}
            case "another model":
                body["model"] = "gpt-4"
            case "no such effort":
                body["reasoning_effort"] = "galactic"
            case "half a body":
                data = json.dumps(body).encode()[:-9]
            case "beyond the context":
                body["messages"][0]["content"] = "soak " * 5000
        data = json.dumps(body).encode() if data is None else data
        headers |= {"Content-Type": "application/json"}
        async with session.post(f"{self._url}{ROUTES['chat']}", data=data, headers=headers) as response:
            sent = await response.read()
        if why == "too often" and response.status == 200:  # the one of this minute
            wrong = talk.wrong(sent)
            return self._blame(wrong) if wrong else self.answers.update(["within its limits"])
        if response.status != _REFUSALS[why] or not json.loads(sent)["error"]["message"]:
            return self._blame(f"refused for {why}: {response.status}: {sent[:300]!r}")
        self.answers[f"refused: {why}"] += 1
        return None

    def _headers(self, key: str, protocol: str) -> dict[str, str]:
        secret = self._keys[key]
        return {"x-api-key": secret} if protocol == "messages" else {"Authorization": f"Bearer {secret}"}

    def _blame(self, sentence: str) -> None:
        if len(self.wrong) < 200:
            self.wrong.append(sentence)
            print(sentence, file=sys.stderr, flush=True)
        self.answers["wrong"] += 1


class Gateway:
    """The process under test, and the samples it has sent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.samples: list[dict[str, float]] = []
        self.troubles: list[str] = []
        self.last: dict[str, int] = {}
        self.url = ""

    async def listen(self) -> None:
        """Read its lines until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            facts = json.loads(line)
            if "time_s" in facts:
                self.samples.append(facts)
            elif "finished" in facts:
                self.last = facts
            elif "trouble" in facts:
                self.troubles += facts["trouble"]
            else:
                self.url = facts["url"]

    async def next_sample(self) -> dict[str, float]:
        """Return one that is taken from now on."""
        count = len(self.samples)
        async with asyncio.timeout(60):
            while len(self.samples) < count + 2:
                await asyncio.sleep(0.05)
        return self.samples[-1]


@asynccontextmanager
async def gateway_process(
    directory: Path, streams: int, delay_s: float, *more: str
) -> AsyncIterator[Gateway]:
    """A gateway that listens. It is asked to end when the block ends."""
    program = str(Path(__file__).with_name("soak_server.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        program,
        str(directory),
        str(streams),
        str(delay_s),
        *more,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    gateway = Gateway(process)
    listening = asyncio.create_task(gateway.listen())
    try:
        async with asyncio.timeout(120):
            while not gateway.samples:
                if listening.done():
                    raise RuntimeError("the gateway has not started")
                await asyncio.sleep(0.05)
        yield gateway
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
            await listening
    finally:
        if process.returncode is None:
            process.kill()
        listening.cancel()


async def soak(seconds: float, streams: int, directory: Path, *more: str, delay_s: float = DELAY_S) -> Soak:
    """Let so many clients ask for so long. Keys and logs are written in `directory`; `more` is for the gateway."""
    provenance = Provenance.capture("python -m tests.gateway.soak")
    made = {name: make_secret() for name in KEYS}
    for name, secret in made.items():
        change_key_file(
            directory / "keys.toml", lambda old, n=name, s=secret: old.with_key(n, s, datetime.now(UTC))
        )
    (directory / "policies.toml").write_text(_POLICIES)
    connector = aiohttp.TCPConnector(limit=0)
    async with gateway_process(directory, streams, delay_s, *more) as gateway:
        before = await gateway.next_sample()
        began_s, cpu_began_s = time.monotonic(), time.process_time()
        crowd = Crowd(gateway.url, made)
        async with aiohttp.ClientSession(connector=connector) as session:
            first = len(gateway.samples)
            clients = [
                asyncio.create_task(crowd.ask_until(began_s + seconds, session)) for _ in range(streams)
            ]
            await asyncio.sleep(seconds)
            last = len(gateway.samples)
            await asyncio.gather(*clients)
        ended_s, cpu_ended_s = time.monotonic(), time.process_time()
        await asyncio.sleep(_SETTLE_S)
        after = await gateway.next_sample()
    during = gateway.samples[first:last]
    # The first tenth is left out: caches fill, and clients all begin at once.
    during = during[len(during) // 10 :]
    size = len(during) // 3
    return Soak(
        name="gateway-soak",
        provenance=provenance,
        settings={"streams": streams, "seconds": seconds, "delay_s": delay_s, "model": MODEL},
        seconds=ended_s - began_s,
        cpu_s=after["cpu_s"] - before["cpu_s"],
        client_cpu_s=cpu_ended_s - cpu_began_s,
        answers=dict(sorted(crowd.answers.items())),
        num_unanswered=crowd.num_unanswered,
        wrong=(*crowd.wrong, *gateway.troubles),
        before=before,
        after=after,
        thirds=(_signs(during[:size]), _signs(during[size : 2 * size]), _signs(during[2 * size :])),
        engine={name: int(value) for name, value in gateway.last.items()},
        minutes=tuple(gateway.samples[::60]),
        exit_code=gateway.process.returncode if gateway.process.returncode is not None else -1,
    )


def _signs(samples: list[dict[str, float]]) -> Signs:
    def spread(name: str) -> Spread | None:
        values = [sample[name] for sample in samples if name in sample]
        return Spread.of(values) if values else None

    told: dict[str, Any] = {name: spread(name) for name in Signs.__struct_fields__}
    return Signs(**told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--delay", type=float, default=DELAY_S, help="seconds between two steps of a stream")
    parser.add_argument(
        "--result",
        type=Path,
        help="directory of result files, bench/results/soak for those that are kept; none: print only",
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        done = asyncio.run(soak(asked.minutes * 60, asked.streams, Path(directory), delay_s=asked.delay))
    print(msgspec.json.format(msgspec.json.encode(done), indent=1).decode())
    if asked.result is not None:
        write_new(result_path(asked.result, done.name, datetime.now(UTC).date()), done)
    troubles = [*done.leaks(), *done.wrong]
    print("\n".join(troubles) or "nothing is wrong, nothing has grown", file=sys.stderr)
    sys.exit(1 if troubles or done.num_unanswered or done.exit_code else 0)


if __name__ == "__main__":
    main()
