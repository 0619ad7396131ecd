"""What a server says of itself: its model, its engine and version, and how it was set up. Owns where each engine tells.

Everything found becomes a condition, which a comparison must have equal. What a server does not tell, the user may.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deskfleet.bench.load.counters import Counters, read_counters
from deskfleet.bench.load.record import Condition
from deskfleet.client import Client, ServedModel, ServerGone
from deskfleet.errors import DeskfleetError

_SGLANG_KEYS = (
    "tp_size",
    "ep_size",
    "context_length",
    "chunked_prefill_size",
    "max_running_requests",
    "max_total_num_tokens",
    "kv_cache_dtype",
    "mem_fraction_static",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_dspark_block_size",
    "disable_radix_cache",
)


@dataclass(frozen=True, slots=True)
class Server:
    """The server at the beginning of a run."""

    model: ServedModel
    counters: Counters
    conditions: dict[str, Condition]


async def describe(client: Client) -> Server:
    """Ask the server who it is. Raises ServerGone when nobody answers, EngineError without a list of models."""
    model = (await client.models())[0]
    counters = await read_counters(client)
    conditions: dict[str, Condition] = {
        "model": model.id,
        "max_model_len": model.max_model_len,
        "engine": counters.engine,
        **{f"vllm.{key}": value for key, value in counters.config.items()},
    }
    if counters.started_at is not None:
        conditions["boot"] = round(counters.started_at)
    version = await _json(client, "/version")
    if isinstance(version.get("version"), str):
        conditions["engine_version"] = version["version"]
    if counters.engine == "SGLang":
        told = await _json(client, "/get_server_info")
        conditions |= {f"sglang.{key}": _plain(told[key]) for key in _SGLANG_KEYS if key in told}
        if isinstance(told.get("version"), str):
            conditions["engine_version"] = told["version"]
    return Server(model, counters, conditions)


async def _json(client: Client, path: str) -> dict[str, Any]:
    try:
        found = json.loads(await client.get(path))
    except ServerGone:
        raise
    except (DeskfleetError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Condition:
    return value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value)


__all__ = ["Server", "describe"]
