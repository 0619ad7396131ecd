"""What GET /metrics says: counts of requests, and what engine and ranks say of themselves when they are asked.

Owns the numbers of one gateway; their names are in `metric_names.py`. Counting is adding plain numbers, without locks
or Prometheus objects, since it is done for every chunk of every stream; families are made of them when somebody
scrapes. Everything runs in the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deskfleet.endpoint import EngineStats, EngramStats, TokenChunk
from deskfleet.gateway.engram_rows import RankRows, row_families
from deskfleet.gateway.health import STATES, HealthReport
from deskfleet.gateway.metric_names import (
    ENGINE,
    ENGINE_AS_VLLM,
    ENGRAM,
    ENGRAM_ERRORS,
    ENGRAM_LOOKUPS,
    HEALTH,
    REQUESTS,
    MetricSpec,
)
from deskfleet.gateway.policies.counting import Counters
from deskfleet.gateway.recent import RequestRecord

Values = Mapping[tuple[str, ...], float]


class Histogram:
    """Counts of values by bound, as plain numbers."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value under the first bound that is not less."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds as Prometheus writes them, with the number of values up to each."""
        names = [*(str(bound) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Meter:
    """Counts one generation while it comes: every chunk goes into the record and the histogram of gaps.

    `chunk` is called for every chunk of every stream: it is written for speed, without calls that can be avoided.
    """

    __slots__ = ("_cached", "_gaps", "_last_s", "_latest", "_metrics", "_record")

    def __init__(self, metrics: GatewayMetrics, record: RequestRecord, gaps: Histogram) -> None:
        self._metrics = metrics
        self._record = record
        self._gaps = gaps
        self._last_s: float | None = None
        self._latest: TokenChunk | None = None
        self._cached = 0

    def chunk(self, chunk: TokenChunk, now_s: float) -> None:
        """Take in one chunk of the engine."""
        record = self._record
        if self._latest is None:
            self._cached = chunk.num_cached_tokens
            record.num_cached_tokens += self._cached
            record.queued_s = chunk.queued_s
        self._latest = chunk
        num_tokens = len(chunk.token_ids)
        if not num_tokens:
            return
        if self._last_s is not None:
            gaps, gap_s = self._gaps, now_s - self._last_s
            gaps.counts[bisect_left(gaps.bounds, gap_s)] += 1
            gaps.total += gap_s
        elif record.first_token_s is None:
            record.first_token_s = now_s
        self._last_s = record.last_token_s = now_s
        record.num_generated_tokens += num_tokens
        self._metrics.num_generated_tokens += num_tokens

    def end(self) -> None:
        """The generation is over, whoever ended it."""
        if self._latest is not None:
            self._record.watch(self._latest)
            # Some engines tell of cached tokens at the end only.
            self._record.num_cached_tokens += max(self._latest.num_cached_tokens - self._cached, 0)
            self._record.num_drafted += self._latest.num_drafted
            self._record.num_accepted += self._latest.num_accepted
            self._record.num_verify_steps += self._latest.num_verify_steps
            self._record.num_wasted_rows += self._latest.num_wasted_rows


class GatewayMetrics:
    """Numbers of one gateway that serves `model_id`. `policies` are what its policies count."""

    def __init__(self, model_id: str = "", policies: Counters | None = None) -> None:
        self._model_id = model_id
        self._policies = policies
        self._counters: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        self._histograms_given: dict[str, tuple[Histogram, Histogram]] = {}
        self._registry = CollectorRegistry()
        self._collector = _Collector(self)
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        self.num_running = 0
        self.num_waiting = 0  # of those, as whoever scrapes knows it
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_log_lines_dropped = 0

    # --- counting -------------------------------------------------------------------------------------

    def begin(self, record: RequestRecord) -> None:
        """A request that generates something has arrived."""
        self.num_running += 1

    def meter(self, record: RequestRecord, num_prompt_tokens: int, now_s: float) -> Meter:
        """The engine is given one generation of the request."""
        waits, gaps = self._given(record.protocol or "")
        if record.given_s is None:
            record.given_s = now_s
            waits.observe(now_s - record.began_s)
        record.num_prompt_tokens += num_prompt_tokens
        self.num_prompt_tokens += num_prompt_tokens
        return Meter(self, record, gaps)

    def _given(self, protocol: str) -> tuple[Histogram, Histogram]:
        """What is observed of a request that an engine is given: the wait before, and the gaps between its tokens."""
        found = self._histograms_given.get(protocol)
        if found is None:
            waits = self._histogram("gateway_wait_seconds", protocol)
            gaps = self._histogram("inter_token_latency_seconds", protocol)
            found = self._histograms_given[protocol] = waits, gaps
        return found

    def end(self, record: RequestRecord) -> None:
        """The request is over; its outcome is set."""
        self.num_running -= 1
        protocol, outcome = record.protocol or "", record.outcome or "failed"
        self._count("requests", protocol, outcome)
        for kind in record.repairs:
            self._count("answer_repairs", protocol, kind)
        if record.key is not None:
            self._count("key_requests", record.key, outcome)
            self._count("key_prompt_tokens", record.key, by=record.num_prompt_tokens)
            self._count("key_generation_tokens", record.key, by=record.num_generated_tokens)
        self._observe("e2e_request_latency_seconds", record.duration_s, protocol, outcome)
        if record.given_s is None:
            return
        if outcome == "ok":
            self._count("request_success", record.finish_reason or "stop")
            self._count("cached_prompt_tokens", by=record.num_cached_tokens)
        self._observe("time_to_first_token_seconds", record.ttft_s, protocol)
        self._observe("request_time_per_output_token_seconds", record.tpot_s, protocol)
        self._observe("request_queue_time_seconds", record.queued_s, protocol)
        self._observe("request_prompt_tokens", float(record.num_prompt_tokens), protocol, outcome)
        self._observe("request_generation_tokens", float(record.num_generated_tokens), protocol, outcome)

    def _count(self, name: str, *labels: str, by: float = 1.0) -> None:
        values = self._counters.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + by

    def _histogram(self, name: str, *labels: str) -> Histogram:
        by_labels = self._histograms.setdefault(name, {})
        if labels not in by_labels:
            by_labels[labels] = Histogram(REQUESTS[name].bounds)
        return by_labels[labels]

    def _observe(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._histogram(name, *labels).observe(value)

    # --- showing --------------------------------------------------------------------------------------

    def render(
        self, stats: EngineStats | None, health: HealthReport | None = None, rows: Sequence[RankRows] = ()
    ) -> bytes:
        """Return the exposition text, with `stats` as the engine's; None while it is dead. `rows` are of engines
        elsewhere, whose ranks tell of Engram rows themselves."""
        self._collector.stats, self._collector.health, self._collector.rows = stats, health, rows
        return generate_latest(self._registry)

    def _request_families(self) -> Iterator[Metric]:
        plain = {
            "prompt_tokens": self.num_prompt_tokens,
            "generation_tokens": self.num_generated_tokens,
            "running_requests": self.num_running,
            "waiting_requests": self.num_waiting,
            "access_log_dropped": self.num_log_lines_dropped,
        }
        for name, spec in REQUESTS.items():
            common = self._common_labels(spec)
            if spec.kind == "histogram":
                family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
                for labels, histogram in self._histograms.get(name, {}).items():
                    family.add_metric([*common, *labels], histogram.buckets(), histogram.total)
                yield family
            elif name in plain:
                yield _family(spec, {tuple(common): plain[name]})
            else:
                values = self._counters.get(name, {})
                yield _family(spec, {(*common, *labels): value for labels, value in values.items()})

    def _policy_families(self) -> Iterator[Metric]:
        if self._policies is None:
            return
        for counter, values in self._policies.read().items():
            labels = ("model", "key", *counter.labels)
            yield _family(
                MetricSpec(f"deskfleet_policy_{counter.name}", "counter", counter.help, labels), values
            )

    def _common_labels(self, spec: MetricSpec) -> tuple[str, ...]:
        return (self._model_id, "0") if spec.labels[:2] == ("model_name", "engine") else ()

    def families(
        self, stats: EngineStats | None, health: HealthReport | None, rows: Sequence[RankRows]
    ) -> Iterator[Metric]:
        """Everything, in the order of the catalogue."""
        yield from self._request_families()
        yield from self._policy_families()
        yield from _health_families(stats, health)
        if stats is None:
            return
        for name, value in _vllm_values(stats).items():
            spec = ENGINE_AS_VLLM[name]
            yield _family(spec, {self._common_labels(spec): value})
        yield from _stats_families(ENGINE, stats)
        if rows:
            yield from row_families(rows)
            return
        yield from _stats_families(ENGRAM, stats.engram)
        yield _family(ENGRAM_ERRORS, {(kind,): count for kind, count in stats.engram.errors.items()})
        yield _family(ENGRAM_LOOKUPS, {})


class _Collector(Collector):
    """Gives the registry what the latest scrape knew."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self.stats: EngineStats | None = None
        self.health: HealthReport | None = None
        self.rows: Sequence[RankRows] = ()

    def describe(self) -> Iterable[Metric]:
        return ()  # or registering would collect

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families(self.stats, self.health, self.rows)


def _health_families(stats: EngineStats | None, health: HealthReport | None) -> Iterator[Metric]:
    yield _family(HEALTH["engine_up"], {(): 0.0 if stats is None else 1.0})
    if health is None:
        return
    ranks = {(str(rank.rank),): rank for rank in health.ranks}
    num_good, num_bad = health.num_canaries
    values: dict[str, Mapping[tuple[str, ...], float | None]] = {
        "health_state": {(state,): float(state == health.verdict.state) for state in STATES},
        "can_answer": {(): float(health.verdict.can_answer)},
        "health_changes": {(state,): count for state, count in health.num_entered.items()},
        "canaries": {("ok",): num_good, ("failed",): num_bad},
        "canary_seconds": {(): None if health.canary is None else health.canary.took_s},
        "token_age_seconds": {(): health.token_age_s},
        "rank_steps": {labels: rank.num_steps for labels, rank in ranks.items()},
        "rank_busy": {
            labels: float(rank.state not in ("idle", "loading", "ended")) for labels, rank in ranks.items()
        },
        "rank_heartbeat_age_seconds": {labels: rank.heartbeat_age_s for labels, rank in ranks.items()},
        "rank_last_step_age_seconds": {labels: rank.last_step_age_s for labels, rank in ranks.items()},
        "rank_memory_bytes": {labels: rank.memory_bytes for labels, rank in ranks.items()},
        "rank_planned_memory_bytes": {labels: rank.planned_bytes for labels, rank in ranks.items()},
        "rank_host_available_bytes": {labels: rank.host_available_bytes for labels, rank in ranks.items()},
        "available_memory_bytes": {(): health.available_bytes},
    }
    for name, by_labels in values.items():
        known = {labels: value for labels, value in by_labels.items() if value is not None}
        yield _family(HEALTH[name], known)


def _vllm_values(stats: EngineStats) -> dict[str, float]:
    num_held = stats.num_blocks - stats.num_free_blocks
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": num_held / stats.num_blocks if stats.num_blocks else 0.0,
        "prefix_cache_queries": stats.num_prefix_queried,
        "prefix_cache_hits": stats.num_prefix_hits,
        "num_preemptions": stats.num_preempted,
        "corrupted_requests": stats.num_not_finite,
        "spec_decode_num_drafts": stats.num_verify_steps,
        "spec_decode_num_draft_tokens": stats.num_drafted,
        "spec_decode_num_accepted_tokens": stats.num_accepted,
    }


def _stats_families(specs: Mapping[str, MetricSpec], stats: EngineStats | EngramStats) -> Iterator[Metric]:
    for name, spec in specs.items():
        yield _family(spec, {(): getattr(stats, name)})


def _family(spec: MetricSpec, values: Values) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(spec.name, spec.help, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


__all__ = ["GatewayMetrics", "Histogram", "Meter"]
