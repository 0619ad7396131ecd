"""The name, kind and meaning of every metric. Owns the catalogue; counts nothing.

A metric has vLLM's name (`vllm:...`, labels `model_name` and `engine`) where it means the same there, so that boards
and scrapers made for it work; labels of our own may stand beside those. All others are `deskfleet_...`.
docs/reference/metrics.md is made from CATALOGUE.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from deskfleet.endpoint import EngineStats, EngramStats
from deskfleet.gateway.health import STATES
from deskfleet.gateway.recent import OUTCOMES

Kind = Literal["counter", "gauge", "histogram"]

TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
WAIT_S = (0.001, 0.005, *REQUEST_S)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))[:-2]
"""1 to 1,000,000."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One family. Of counters the name is without `_total`, which their samples have. `bounds` are of histograms."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names that queries use."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def _vllm(
    kind: Kind, name: str, text: str, *own: str, bounds: tuple[float, ...] = ()
) -> tuple[str, MetricSpec]:
    return name, MetricSpec(f"vllm:{name}", kind, text, ("model_name", "engine", *own), bounds)


def _own(
    kind: Kind, name: str, text: str, *labels: str, bounds: tuple[float, ...] = ()
) -> tuple[str, MetricSpec]:
    return name, MetricSpec(f"deskfleet_{name}", kind, text, labels, bounds)


REQUESTS: dict[str, MetricSpec] = dict(
    (
        _vllm("counter", "prompt_tokens", "Prompt tokens given to the engine, images at their full span"),
        _vllm("counter", "generation_tokens", "Tokens received from the engine"),
        _vllm("counter", "request_success", "Requests answered to the end, by what ended them", "finished_reason"),
        _vllm(
            "histogram", "time_to_first_token_seconds", "From a request's arrival to its first token", "protocol",
            bounds=TTFT_S,
        ),
        _vllm(
            "histogram", "inter_token_latency_seconds",
            "Between two chunks of one answer; a chunk has several tokens when drafts are accepted", "protocol",
            bounds=TOKEN_S,
        ),
        _vllm(
            "histogram", "request_time_per_output_token_seconds",
            "Per token after the first, one value for each request", "protocol", bounds=TOKEN_S,
        ),
        _vllm(
            "histogram", "e2e_request_latency_seconds", "From a request's arrival to its end", "protocol", "outcome",
            bounds=REQUEST_S,
        ),
        _vllm(
            "histogram", "request_queue_time_seconds",
            "In the engine before the first row is run, where the engine says it", "protocol", bounds=WAIT_S,
        ),
        _vllm(
            "histogram", "request_prompt_tokens", "Prompt sizes of requests that are over", "protocol", "outcome",
            bounds=TOKENS,
        ),
        _vllm(
            "histogram", "request_generation_tokens", "Answer sizes of requests that are over", "protocol", "outcome",
            bounds=TOKENS,
        ),
        _own(
            "histogram", "gateway_wait_seconds",
            "From a request's arrival until the engine has it: reading, rendering, admission", "protocol",
            bounds=WAIT_S,
        ),
        _own("counter", "requests", "Requests that are over", "protocol", "outcome"),
        _own(
            "counter", "answer_repairs",
            "Answers in which the model's markup had to be put right, by what was wrong", "protocol", "kind",
        ),
        _own("gauge", "running_requests", "Requests being answered, those that wait included"),
        _own("gauge", "waiting_requests", "Requests that wait in the gateway for their turn"),
        _own("counter", "cached_prompt_tokens", "Prompt tokens of answered requests that did not have to be run"),
        _own("counter", "key_requests", "Requests of a key that are over, by the key's name", "key", "outcome"),
        _own("counter", "key_prompt_tokens", "Prompt tokens of a key's requests", "key"),
        _own("counter", "key_generation_tokens", "Tokens generated for a key", "key"),
        _own("counter", "access_log_dropped", "Lines of the access log that could not be written"),
    )
)  # fmt: skip
"""What the gateway counts itself, whatever engine stands behind it."""

ENGINE_AS_VLLM: dict[str, MetricSpec] = dict(
    (
        _vllm("gauge", "num_requests_running", "Requests in the engine's running batch"),
        _vllm("gauge", "num_requests_waiting", "Requests that wait to join it"),
        _vllm(
            "gauge",
            "kv_cache_usage_perc",
            "Share of the blocks of compressed KV that running requests hold, 0-1",
        ),
        _vllm("counter", "prefix_cache_queries", "Tokens looked up in the prefix cache"),
        _vllm("counter", "prefix_cache_hits", "Of those, tokens that were found"),
        _vllm("counter", "num_preemptions", "Times a running request gave its blocks to others"),
        _vllm("counter", "corrupted_requests", "Requests failed because their logits were not finite"),
        _vllm("counter", "spec_decode_num_drafts", "Verifications of a request's drafts"),
        _vllm("counter", "spec_decode_num_draft_tokens", "Drafts verified"),
        _vllm("counter", "spec_decode_num_accepted_tokens", "Drafts accepted"),
    )
)
"""What the engine counts and vLLM has a name for."""

HEALTH: dict[str, MetricSpec] = dict(
    (
        _own("gauge", "engine_up", "1 while the engine lives"),
        _own("gauge", "health_state", f"1 for the state it is in: {', '.join(STATES)}", "state"),
        _own("gauge", "can_answer", "1 while GET /health says 200"),
        _own("counter", "health_changes", "Times a state was entered", "state"),
        _own("counter", "canaries", "Generations made to see whether the engine answers", "outcome"),
        _own("gauge", "canary_seconds", "How long the latest of them took"),
        _own("gauge", "token_age_seconds", "Seconds since the latest token of any request"),
        _own("counter", "rank_steps", "Forward passes a rank has run", "rank"),
        _own("gauge", "rank_busy", "1 while a rank's main thread works, 0 while it waits", "rank"),
        _own("gauge", "rank_heartbeat_age_seconds", "Seconds since a rank was last heard", "rank"),
        _own("gauge", "rank_last_step_age_seconds", "Seconds since a rank's latest pass ended", "rank"),
        _own("gauge", "rank_memory_bytes", "Resident bytes of a rank's process", "rank"),
        _own("gauge", "rank_planned_memory_bytes", "What they were planned to be", "rank"),
        _own("gauge", "rank_host_available_bytes", "Memory that a rank's machine could still give", "rank"),
        _own("gauge", "available_memory_bytes", "Memory that the gateway's machine could still give"),
    )
)
"""How engine and ranks are."""

ENGRAM_ERRORS = MetricSpec(
    "deskfleet_engram_errors", "counter", "Faults met while reading Engram rows, repaired ones included", ("kind",)
)  # fmt: skip


ENGRAM_LOOKUPS = MetricSpec(
    "deskfleet_engram_lookups", "counter",
    "Lookups of Engram rows, each of one layer and one step: of engines elsewhere, all of whose Engram metrics have "
    "these two labels", ("upstream", "rank"),
)  # fmt: skip


def stats_specs(
    prefix: str, stats: type[EngineStats] | type[EngramStats]
) -> Iterator[tuple[str, MetricSpec]]:
    """A metric for every field that says what kind it is: the field's name, and its spec."""
    for each in fields(stats):
        if "kind" in each.metadata:
            name = each.name.removeprefix("num_").replace("wait_s", "wait_seconds")
            yield each.name, MetricSpec(f"{prefix}_{name}", each.metadata["kind"], each.metadata["help"])


ENGINE: dict[str, MetricSpec] = dict(stats_specs("deskfleet_engine", EngineStats))
ENGRAM: dict[str, MetricSpec] = dict(stats_specs("deskfleet_engram", EngramStats))

SECTIONS: tuple[tuple[str, tuple[MetricSpec, ...]], ...] = (
    ("Requests, as the gateway sees them", tuple(REQUESTS.values())),
    ("Health", tuple(HEALTH.values())),
    ("The engine, by vLLM's names", tuple(ENGINE_AS_VLLM.values())),
    ("The engine, by its own names", tuple(ENGINE.values())),
    ("Engram rows", (*ENGRAM.values(), ENGRAM_ERRORS, ENGRAM_LOOKUPS)),
)

CATALOGUE: dict[str, MetricSpec] = {spec.name: spec for _, specs in SECTIONS for spec in specs}


__all__ = [
    "CATALOGUE",
    "ENGINE",
    "ENGINE_AS_VLLM",
    "ENGRAM",
    "ENGRAM_ERRORS",
    "ENGRAM_LOOKUPS",
    "HEALTH",
    "OUTCOMES",
    "REQUESTS",
    "SECTIONS",
    "MetricSpec",
]
