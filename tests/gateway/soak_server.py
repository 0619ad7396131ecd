"""The soak's other process: a gateway as `serve` runs one, with a scripted engine in it, that says how it is doing.

    python tests/gateway/soak_server.py DIR STREAMS DELAY_S [leaks]

Keys, settings and the access log are files in DIR. Prints one line of JSON when it listens, then one each second:
memory, open files, tasks, threads, processor time; each minute, and while nothing runs, also how many objects are
alive. Settings are read again every minute. Ends at SIGTERM, after draining, and says how many requests the engine
ended and saw cancelled. With `leaks` it keeps memory, a file and a task of every request, so that a test can see them
found.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from chat_scripts import MODEL, settings, text_of
from soak_talks import script_of

from deskfleet.endpoint import GenerateRequest, TokenChunk
from deskfleet.gateway.app import serving
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.policy_file import PolicyStore
from deskfleet.testing.scripted import Script, ScriptedEngine

_COUNT_EVERY = 60
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ForgetfulEngine(ScriptedEngine):
    """Keeps nothing of a request that has ended, where the scripted engine keeps all for tests to look at."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.clear()
        return self._answer(request)


class LeakyEngine(ForgetfulEngine):
    """Keeps something of everything."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: list[Any] = []

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
        descriptor = os.open(os.devnull, os.O_RDONLY)
        self.kept.append((task, descriptor, bytearray(os.urandom(2**18)), [[] for _ in range(1000)]))
        return super().generate(request)


def vital_signs() -> dict[str, float]:
    """What this process holds, and what it has used."""
    resident, _, shared = map(int, Path("/proc/self/statm").read_text().split()[1:4])
    return {
        "time_s": time.monotonic(),
        "rss_bytes": resident * _PAGE,
        "private_bytes": (resident - shared) * _PAGE,
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "cpu_s": time.process_time(),
    }


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def main(directory: Path, streams: int, delay_s: float, leaks: str = "") -> None:
    """Serve until SIGTERM."""

    def answer(request: GenerateRequest) -> Script:
        return script_of(text_of(request.prompt_token_ids), delay_s)

    engine = LeakyEngine(answer) if leaks else ForgetfulEngine(answer)
    store = PolicyStore(path=directory / "policies.toml", model_ids=[MODEL])
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    observation = ObservationSettings(access_log=str(directory / "access.log"))
    told = settings(policies=store, max_running=streams, observation=observation)
    async with serving(engine, told) as endpoint:
        say(url=endpoint.url)
        number = 0
        while not stopping.is_set():
            signs = vital_signs() | {"running": engine.num_running}
            if number % _COUNT_EVERY == 0 or not engine.num_running:
                gc.collect()
                signs["objects"] = len(gc.get_objects())
            if number % _COUNT_EVERY == 0 and (troubles := store.reload()):
                say(trouble=troubles)
            say(**signs)
            number += 1
            try:
                await asyncio.wait_for(stopping.wait(), 1.0)
            except TimeoutError:
                continue
    stats = await engine.stats()
    say(finished=stats.num_finished, cancelled=stats.num_cancelled, running=stats.num_running)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:]))
