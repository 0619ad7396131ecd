"""What a server counts itself, read from its metrics page: deskfleet's, vLLM's and SGLang's names.

Owns which metric means what. The engine's own counters go before the gateway's: they are what usage is checked against.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from deskfleet.bench.load.record import ServerCount
from deskfleet.client import Client
from deskfleet.errors import DeskfleetError

_NAMES: dict[str, tuple[str, ...]] = {
    "num_generated_tokens": (
        "deskfleet_engine_generated_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
    ),
    "num_prompt_tokens": (
        "deskfleet_engine_prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
    ),
    "num_cached_tokens": (
        "deskfleet_engine_prefix_hits_total",
        "vllm:prefix_cache_hits_total",
        "sglang:cached_tokens_total",
    ),
    "num_finished": (
        "deskfleet_engine_finished_total",
        "vllm:request_success_total",
        "sglang:num_requests_total",
    ),
    "num_verify_steps": ("deskfleet_engine_verify_steps_total", "vllm:spec_decode_num_drafts_total"),
    "num_drafted": ("deskfleet_engine_drafted_total", "vllm:spec_decode_num_draft_tokens_total"),
    "num_accepted": ("deskfleet_engine_accepted_total", "vllm:spec_decode_num_accepted_tokens_total"),
}
_ENGINES = {"deskfleet_": "deskfleet", "vllm:": "vLLM", "sglang:": "SGLang"}
_CONFIG_INFO = "vllm:cache_config_info"
_CONFIG_KEYS = ("block_size", "cache_dtype", "enable_prefix_caching")
_LAG_S = 1.0
_LOOKS = 2


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading. `engine` is whose page it is, None where there is none; `config` what it tells of its cache."""

    count: ServerCount = field(default_factory=ServerCount)
    engine: str | None = None
    config: dict[str, str] = field(default_factory=dict)
    started_at: float | None = None

    def since(self, before: Counters) -> ServerCount:
        """Return what was counted between two readings; nothing of a counter that went backwards, as on a restart."""
        found = {}
        for name in _NAMES:
            old, new = getattr(before.count, name), getattr(self.count, name)
            if old is not None and new is not None and new >= old:
                found[name] = new - old
        return ServerCount(**found)


async def read_counters(client: Client) -> Counters:
    """Read the metrics page. A server without one, or with one that cannot be read, counts nothing."""
    try:
        return parse_counters(await client.get("/metrics"))
    except (DeskfleetError, ValueError):
        return Counters()


async def read_settled(client: Client, before: Counters, *, num_tokens: int) -> Counters:
    """Read the page once it has caught up with `num_tokens` generated: some engines update it seconds late."""
    for look in range(_LOOKS):
        after = await read_counters(client)
        counted = after.since(before).num_generated_tokens
        if counted is None or counted >= num_tokens or look == _LOOKS - 1:
            return after
        await asyncio.sleep(_LAG_S)
    return after


def parse_counters(text: str) -> Counters:
    """Return what the text of a metrics page says, summed over labels. Raises ValueError when it cannot be read."""
    totals: defaultdict[str, float] = defaultdict(float)
    config: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] += sample.value
            if sample.name == _CONFIG_INFO:
                config = {key: sample.labels[key] for key in _CONFIG_KEYS if key in sample.labels}
    count = {}
    for name, spellings in _NAMES.items():
        known = next((spelling for spelling in spellings if spelling in totals), None)
        if known is not None:
            count[name] = round(totals[known])
    engine = next(
        (name for prefix, name in _ENGINES.items() if any(each.startswith(prefix) for each in totals)), None
    )
    return Counters(ServerCount(**count), engine, config, totals.get("process_start_time_seconds"))


__all__ = ["Counters", "parse_counters", "read_counters", "read_settled"]
