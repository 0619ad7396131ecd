"""Gathers the facts of a situation: endpoint, a few questions, logs, this machine. Owns where each is found.

Changes nothing and needs no rights: what cannot be read stays unknown. Asks at most seven short questions.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

from deskfleet.bootfacts.sheet import read_sheet
from deskfleet.client import Client, ServerGone
from deskfleet.diagnose.situation import Answer, Health, Host, Meters, Rank, Situation
from deskfleet.errors import ConfigError, DeskfleetError, EngineError

_OVER_S = 3.0
_ANSWER_S = 30.0
_TOGETHER = 3
_LONG_LINES = 100


async def gather(
    url: str | None,
    *,
    logs: Mapping[str, str] | None = None,
    kernel_log: str | None = None,
    key: str | None = None,
    over_s: float = _OVER_S,
    answer_s: float = _ANSWER_S,
) -> Situation:
    """Return what can be known. `over_s` is how long counters are watched, `answer_s` how long a question may take."""
    texts = dict(logs or {})
    sheet = None
    if texts:
        try:
            sheet = read_sheet(texts)
        except ConfigError:
            sheet = None  # logs, but not of a boot: other rungs read them
    common: dict[str, Any] = {"logs": tuple(texts.items()), "sheet": sheet, "kernel_log": kernel_log}
    if url is None:
        return Situation(host=_host(is_server=True), **common)
    host = _host(is_server=urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1"))
    async with Client(url, key=key, silence_s=answer_s) as client:
        try:
            model = await asyncio.wait_for(client.model_id(), answer_s)
        except ServerGone as error:
            return Situation(url, "refused", error.message, host=host, health=await _health(client), **common)
        except (TimeoutError, EngineError) as error:
            message = getattr(error, "message", None) or f"no answer in {answer_s:.0f} s"
            return Situation(url, "silent", message, host=host, **common)
        except DeskfleetError as error:
            return Situation(url, "yes", error.message, host=host, health=await _health(client), **common)
        before, began = await _meters(client), time.monotonic()
        health = await _health(client)
        await asyncio.sleep(over_s)
        after, elapsed_s = await _meters(client), time.monotonic() - began
        added = {name: after[name] - before[name] for name in after if name in before}
        questions = await _questions(client, model, answer_s)
        ending = await _meters(client)
    return Situation(
        url,
        "yes",
        host=host,
        health=health,
        meters=Meters({**after, **ending}, added, elapsed_s),
        **questions,
        **common,
    )


async def _questions(client: Client, model: str, answer_s: float) -> dict[str, Any]:
    first = await ask(client, model, 19, 23, answer_s=answer_s)
    if first.error is not None:
        return {"question": first}
    again = await ask(client, model, 19, 23, answer_s=answer_s)
    pairs = [(12 + n, 30 + 3 * n) for n in range(_TOGETHER)]
    together = await asyncio.gather(*(ask(client, model, a, b, answer_s=answer_s) for a, b in pairs))
    long = await ask(client, model, 27, 14, answer_s=answer_s, is_long=True)
    return {"question": first, "again": again, "together": tuple(together), "long_question": long}


async def ask(
    client: Client, model: str, a: int, b: int, *, answer_s: float, is_long: bool = False
) -> Answer:
    """Ask for a sum, greedily. Right is an answer that holds it as a number."""
    text = f"What is {a} + {b}? Answer with the number only."
    if is_long:
        lines = [
            f"Entry {number}: the store room holds {number * 7 % 89} boxes." for number in range(_LONG_LINES)
        ]
        text = "\n".join(lines) + f"\n\nForget the list. {text}"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 32,
        "logprobs": True,
        "chat_template_kwargs": {"thinking": False},
    }
    began = time.monotonic()
    try:
        reply = await asyncio.wait_for(client.ask(body), answer_s)
    except TimeoutError:
        return Answer(error=f"timed out after {answer_s:.0f} s", seconds_s=time.monotonic() - began)
    except DeskfleetError as error:
        return Answer(error=error.message, seconds_s=time.monotonic() - began)
    numbers = re.findall(r"(?<![\d.])\d+(?![\d.]*\d)", reply.content)
    return Answer(
        text=reply.content or reply.reasoning,
        is_right=str(a + b) in numbers,
        seconds_s=reply.total_s,
        first_token_s=reply.first_token_s,
        tok_s=reply.tok_s,
        finish_reason=reply.finish_reason,
        is_finite=_finite(reply.logprobs),
    )


def _finite(logprobs: tuple[dict[str, Any], ...] | None) -> bool | None:
    """None where none came. A number that is none, null, or vLLM's stand-in for it is not finite."""
    if not logprobs:
        return None
    values = [entry.get("logprob") for entry in logprobs]
    return all(isinstance(v, int | float) and math.isfinite(v) and v > -9999.0 for v in values)


async def _meters(client: Client) -> dict[str, float]:
    totals: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(await client.get("/metrics")):
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    continue
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except (DeskfleetError, ValueError):
        return {}
    return totals


async def _health(client: Client) -> Health:
    """Read /health and, where there is one, /health/detail. A 503 carries its reason."""
    status, said = await _get(client, "/health")
    _, detail = await _get(client, "/health/detail")
    found = {**said, **detail}
    ranks = tuple(sorted(_ranks(detail), key=lambda rank: rank.rank))
    state = found.get("state") or found.get("status")
    reasons = found.get("reasons")
    told = "; ".join(map(str, reasons)) if isinstance(reasons, list) else None
    reason = told or found.get("reason") or found.get("error")
    return Health(
        status, None if state is None else str(state), None if reason is None else str(reason), ranks
    )


async def _get(client: Client, path: str) -> tuple[int | None, dict[str, Any]]:
    try:
        text = await client.get(path)
    except ServerGone as error:
        return 503, {"state": "dead" if "ended" in error.message else None, "reason": error.message}
    except DeskfleetError:
        return None, {}
    try:
        found = json.loads(text)
    except ValueError:
        return 200, {}
    return 200, found if isinstance(found, dict) else {}


def _ranks(detail: Any) -> list[Rank]:
    """Return every object in /health/detail that tells of a rank."""
    found: list[Rank] = []
    if isinstance(detail, dict):
        if isinstance(detail.get("rank"), int) and "heartbeat_age_s" in detail:
            names = [name for name in Rank.__dataclass_fields__ if name in detail]
            found.append(Rank(**{name: detail[name] for name in names}))
        detail = list(detail.values())
    if isinstance(detail, list):
        for part in detail:
            found += _ranks(part)
    return found


def _host(*, is_server: bool) -> Host:
    memory = psutil.virtual_memory()
    return Host(
        total_bytes=memory.total,
        available_bytes=memory.available,
        free_bytes=memory.free,
        swap_used_bytes=psutil.swap_memory().used,
        memory_pressure=_pressure(Path("/proc/pressure/memory")),
        load=os.getloadavg()[0],
        num_cores=len(os.sched_getaffinity(0)),
        is_server=is_server,
        earlyoom=any(process.info["name"] == "earlyoom" for process in psutil.process_iter(["name"])),
    )


def _pressure(path: Path) -> float | None:
    try:
        found = re.search(r"some avg10=\S+ avg60=([\d.]+)", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else float(found[1]) / 100


__all__ = ["ask", "gather"]
