"""What /metrics says, read with Prometheus' own parser; and what counting costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import hypothesis
import openai
import pytest
from chat_scripts import HELLO, MODEL, ask, ask_streaming, ids, says, settings
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deskfleet.endpoint import EngineHealth, EngineStats, EngramStats, RankHealth, TokenChunk
from deskfleet.errors import EngineError
from deskfleet.gateway.app import serving
from deskfleet.gateway.health import HealthReport, Verdict
from deskfleet.gateway.metric_names import CATALOGUE, REQUESTS, TTFT_S, MetricSpec
from deskfleet.gateway.metrics import GatewayMetrics, Histogram
from deskfleet.gateway.policies.counting import Counters, CounterSpec
from deskfleet.gateway.recent import RequestRecord
from deskfleet.testing.scripted import Script, ScriptedEngine

VLLM = {"model_name": MODEL, "engine": "0"}


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {each.name: each for each in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The one sample of that name with exactly these labels."""
        found = [sample.value for sample in self._samples if sample.name == name and sample.labels == labels]
        assert len(found) == 1, f"{len(found)} samples {name}{labels}"
        return found[0]


@asynccontextmanager
async def scraped(script: Any, **engine: Any) -> AsyncIterator[tuple[Any, ScriptedEngine, Any]]:
    """A client, the engine, and a function that scrapes."""
    scripted = ScriptedEngine(script, **engine)
    async with (
        serving(scripted, settings()) as endpoint,
        aiohttp.ClientSession() as session,
        openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="unused", max_retries=0) as client,
    ):

        async def scrape() -> Scrape:
            async with session.get(f"{endpoint.url}/metrics") as response:
                assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return Scrape(await response.text())

        yield client, scripted, scrape


async def test_every_number_of_a_request_is_where_vllm_has_it() -> None:
    script = Script(ids("one two three four five six"), chunk_sizes=(1, 2), delay_s=0.02, first_delay_s=0.05)
    num_tokens, num_chunks = len(script.token_ids), len(script.chunks(1000))
    async with scraped(script) as (client, engine, scrape):
        await ask_streaming(client)
        await ask(client)
        with pytest.raises(openai.BadRequestError):
            await ask(client, temperature=9)
        seen = await scrape()
    num_prompt = sum(len(request.prompt_token_ids) for request in engine.requests)
    chat = {**VLLM, "protocol": "chat"}
    assert seen.value("vllm:prompt_tokens_total", **VLLM) == num_prompt
    assert seen.value("vllm:generation_tokens_total", **VLLM) == 2 * num_tokens
    assert seen.value("vllm:request_success_total", **VLLM, finished_reason="stop") == 2
    assert seen.value("vllm:time_to_first_token_seconds_count", **chat) == 2
    assert 0.1 <= seen.value("vllm:time_to_first_token_seconds_sum", **chat) < 2
    assert seen.value("vllm:time_to_first_token_seconds_bucket", **chat, le="0.04") == 0
    assert seen.value("vllm:inter_token_latency_seconds_count", **chat) == 2 * (num_chunks - 1)
    assert 2 * (num_chunks - 1) * 0.02 <= seen.value("vllm:inter_token_latency_seconds_sum", **chat) < 3
    assert seen.value("vllm:request_time_per_output_token_seconds_count", **chat) == 2
    assert seen.value("vllm:e2e_request_latency_seconds_count", **chat, outcome="ok") == 2
    assert seen.value("vllm:e2e_request_latency_seconds_count", **chat, outcome="refused") == 1
    assert seen.value("vllm:request_prompt_tokens_sum", **chat, outcome="ok") == num_prompt
    assert seen.value("vllm:request_generation_tokens_sum", **chat, outcome="ok") == 2 * num_tokens
    assert seen.value("deskfleet_requests_total", protocol="chat", outcome="ok") == 2
    assert seen.value("deskfleet_requests_total", protocol="chat", outcome="refused") == 1
    assert seen.value("deskfleet_running_requests") == 0
    assert seen.value("deskfleet_gateway_wait_seconds_count", protocol="chat") == 2
    assert seen.value("deskfleet_engine_finished_total") == 2


async def test_what_goes_wrong_is_told_apart() -> None:
    failing = Script(ids("a b c"), failure=EngineError("no"), is_deadly=False, fail_after=1)
    script = {"failing": failing, "slow": Script(ids("abcdef"), delay_s=60.0)}
    async with scraped(lambda request: script[wanted]) as (client, engine, scrape):
        wanted = "failing"
        with pytest.raises(openai.APIError):
            await ask_streaming(client)
        wanted = "slow"
        stream = await ask(client, stream=True)
        await anext(aiter(stream))
        running = await scrape()
        await stream.close()
        async with asyncio.timeout(5):
            while engine.num_running:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        seen = await scrape()
    assert running.value("deskfleet_running_requests") == 1
    assert running.value("vllm:num_requests_running", **VLLM) == 1
    assert seen.value("deskfleet_running_requests") == 0
    assert seen.value("deskfleet_requests_total", protocol="chat", outcome="failed") == 1
    assert seen.value("deskfleet_requests_total", protocol="chat", outcome="cancelled") == 1
    assert "ok" not in {sample.labels["outcome"] for sample in seen.families["deskfleet_requests"].samples}


async def test_health_is_a_metric_and_stays_one_when_the_engine_is_dead() -> None:
    async with scraped(says("ok")) as (_, engine, scrape):
        engine.rank_health = EngineHealth((RankHealth(0, num_steps=5, memory_bytes=100, planned_bytes=90),))
        async with asyncio.timeout(5):
            while (
                "deskfleet_rank_steps" not in (seen := await scrape()).families
                or not seen.families["deskfleet_rank_steps"].samples
            ):
                await asyncio.sleep(0.05)
        engine.fail("gone")
        dead = await scrape()
    assert seen.value("deskfleet_rank_steps_total", rank="0") == 5
    assert seen.value("deskfleet_rank_memory_bytes", rank="0") == 100
    assert seen.value("deskfleet_rank_planned_memory_bytes", rank="0") == 90
    assert seen.value("deskfleet_health_state", state="ready") == 1
    assert seen.value("deskfleet_health_state", state="stuck") == 0
    assert seen.value("deskfleet_can_answer") == 1
    assert seen.value("deskfleet_engine_up") == 1
    assert dead.value("deskfleet_engine_up") == 0
    assert "vllm:num_requests_running" not in dead.families, (
        "what a dead engine last said is not shown as now"
    )


def everything() -> str:
    """Every metric there is, each with at least one sample."""
    policies = Counters()
    policies.add(CounterSpec("aborted_loops", "Answers cut"), MODEL, "laptop")
    metrics = GatewayMetrics(MODEL, policies)
    record = RequestRecord(
        request_id="r", method="POST", path="/v1/messages", began_s=1.0, began_at=0.0, protocol="messages", key="laptop"
    )  # fmt: skip
    metrics.begin(record)
    meter = metrics.meter(record, 7, 1.5)
    meter.chunk(TokenChunk((5,), None, 7, num_cached_tokens=4, queued_s=0.25), 2.0)
    meter.chunk(TokenChunk((6, 7), None, 7, "length", num_drafted=4, num_accepted=1), 3.0)
    meter.end()
    record.ended_s, record.outcome = 3.5, "ok"
    metrics.end(record)
    stats = EngineStats(
        num_blocks=10, num_free_blocks=4, num_not_finite=2, engram=EngramStats(errors={"checksum": 3})
    )
    rank = RankHealth(
        0, "decode", 5, heartbeat_age_s=0.1, last_step_age_s=0.2, memory_bytes=1, planned_bytes=2,
        host_available_bytes=3,
    )  # fmt: skip
    verdict = Verdict("busy", (), 0.0, can_answer=True)
    report = HealthReport(verdict, 1.0, (rank,), stats, num_entered={"busy": 1}, available_bytes=5)
    return metrics.render(stats, report).decode()


def test_the_catalogue_is_what_is_exposed() -> None:
    """Names, kinds, labels and help, in both directions; the rest are the process's own numbers."""
    seen = Scrape(everything())
    exposed = {name for name in seen.families if not name.startswith(("process_", "deskfleet_policy_"))}
    # A counter is called by its samples' name in this format.
    assert exposed == set(CATALOGUE)
    for name, spec in CATALOGUE.items():
        family = seen.families[name]
        assert (family.type, family.documentation) == (spec.kind, spec.help), name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels), name
            assert sample.name in spec.sample_names
    assert seen.value("deskfleet_policy_aborted_loops_total", model=MODEL, key="laptop") == 1


def test_values_of_one_request() -> None:
    seen = Scrape(everything())
    messages = {**VLLM, "protocol": "messages"}
    assert seen.value("vllm:request_queue_time_seconds_sum", **messages) == 0.25
    assert seen.value("vllm:time_to_first_token_seconds_sum", **messages) == 1.0
    assert seen.value("vllm:inter_token_latency_seconds_sum", **messages) == 1.0
    assert seen.value("vllm:request_time_per_output_token_seconds_sum", **messages) == 0.5
    assert seen.value("vllm:e2e_request_latency_seconds_sum", **messages, outcome="ok") == 2.5
    assert seen.value("vllm:request_success_total", **VLLM, finished_reason="length") == 1
    assert seen.value("deskfleet_gateway_wait_seconds_sum", protocol="messages") == 0.5
    assert seen.value("deskfleet_cached_prompt_tokens_total") == 4
    assert seen.value("deskfleet_key_requests_total", key="laptop", outcome="ok") == 1
    assert seen.value("deskfleet_key_prompt_tokens_total", key="laptop") == 7
    assert seen.value("deskfleet_key_generation_tokens_total", key="laptop") == 3
    assert seen.value("vllm:kv_cache_usage_perc", **VLLM) == pytest.approx(0.6)
    assert seen.value("vllm:corrupted_requests_total", **VLLM) == 2
    assert seen.value("deskfleet_engram_errors_total", kind="checksum") == 3
    assert seen.value("deskfleet_rank_busy", rank="0") == 1


@hypothesis.settings(deadline=None)
@given(st.lists(st.one_of(st.floats(0, 3000), st.sampled_from(TTFT_S)), max_size=50))
def test_histograms_count_as_prometheus_does(values: list[float]) -> None:
    own = Histogram(TTFT_S)
    registry = CollectorRegistry()
    theirs = PrometheusHistogram("x", "x", buckets=TTFT_S, registry=registry)
    for value in values:
        own.observe(value)
        theirs.observe(value)

    def expected() -> Iterator[float]:
        for sample in next(iter(theirs.collect())).samples:
            if sample.name == "x_bucket":
                yield sample.value

    assert [count for _, count in own.buckets()] == list(expected())
    assert own.total == pytest.approx(sum(values))


def test_bounds_rise() -> None:
    specs: list[MetricSpec] = [spec for spec in REQUESTS.values() if spec.kind == "histogram"]
    assert specs
    for spec in specs:
        assert sorted(set(spec.bounds)) == list(spec.bounds), spec.name


def test_a_chunk_costs_a_microsecond_or_so(record_property: Any) -> None:
    """Of a stream's chunk, in the best of several rounds; the bound is many times that, since machines are shared."""
    metrics = GatewayMetrics(MODEL)
    record = RequestRecord(
        request_id="r", method="POST", path="/", began_s=0.0, began_at=0.0, protocol="chat"
    )
    meter = metrics.meter(record, 10, 0.0)
    chunk = TokenChunk((5,), None, 10)
    best_s = min(_seconds_of(meter, chunk) for _ in range(5))
    record_property("measured", f"metrics: {best_s * 1e6:.2f} us per streamed chunk")
    assert best_s < 10e-6


def _seconds_of(meter: Any, chunk: TokenChunk, number: int = 20_000) -> float:
    begin = time.perf_counter()
    for place in range(number):
        meter.chunk(chunk, place * 0.01)
    return (time.perf_counter() - begin) / number


async def test_hello_is_not_in_the_metrics() -> None:
    """Neither prompts nor answers are labels."""
    async with scraped(says("a secret answer")) as (client, _, scrape):
        await ask(client, messages=[{"role": "user", "content": "a secret question"}], user="someone")
        text = repr((await scrape()).families)
    assert "secret" not in text
    assert HELLO[0]["content"] not in text
