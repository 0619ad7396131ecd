"""Traces as a collector receives them, over OTLP; and that nothing of OpenTelemetry is there while they are off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import openai
import pytest
from aiohttp import web
from chat_scripts import MODEL, ask, ask_streaming, ids, settings

from deskfleet.errors import ConfigError, EngineError
from deskfleet.gateway.app import serving
from deskfleet.gateway.observation import ObservationSettings
from deskfleet.gateway.tracing import Tracer
from deskfleet.testing.scripted import Script, ScriptedEngine

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_nothing_is_imported_while_traces_are_off() -> None:
    script = "import sys, deskfleet.gateway.app; print(*[m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"deskfleet\[otel\]"):
        Tracer("http://127.0.0.1:4318/v1/traces")


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="no URL"):
        Tracer("localhost:4318")


async def test_a_collector_gets_one_span_per_request() -> None:
    reason = "OpenTelemetry's SDK is not installed: pip install 'deskfleet[otel]'"
    pytest.importorskip("opentelemetry.sdk", reason=reason)
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason=reason)
    received: list[Any] = []

    async def collect(request: web.Request) -> web.Response:
        received.append(service.ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(body=service.ExportTraceServiceResponse().SerializeToString())

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    scripts = [
        Script(ids("one two three"), first_delay_s=0.1, delay_s=0.01),
        Script(ids("a b"), failure=EngineError("rank 1 said no"), is_deadly=False, fail_after=1),
    ]
    num_tokens = len(scripts[0].token_ids)
    began = time.time()
    try:
        observation = ObservationSettings(traces=f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces")
        engine = ScriptedEngine(lambda request: scripts.pop(0))
        async with serving(engine, settings(observation=observation)) as endpoint:
            client = openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="unused", max_retries=0)
            async with client:
                parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
                await ask_streaming(client, extra_headers=parent)
                with pytest.raises(openai.APIError):
                    await ask(client, messages=[{"role": "user", "content": "a secret question"}])
        # What is left is sent on leaving.
        async with asyncio.timeout(5):
            while sum(len(scope.spans) for scope in scopes(received)) < 2:
                await asyncio.sleep(0.02)
    finally:
        await runner.cleanup()
    first, second = [span for scope in scopes(received) for span in scope.spans]
    assert (first.name, first.trace_id.hex(), first.parent_span_id.hex()) == (f"chat {MODEL}", TRACE, PARENT)
    assert second.trace_id.hex() != TRACE
    known = values(first)
    assert known["gen_ai.usage.output_tokens"] == num_tokens
    assert (known["http.response.status_code"], known["deskfleet.outcome"]) == (200, "ok")
    assert known["deskfleet.finish_reason"] == "stop"
    assert began - 1 < first.start_time_unix_nano / 1e9 < began + 5
    assert first.end_time_unix_nano - first.start_time_unix_nano > 0.1e9
    events = {event.name: event.time_unix_nano for event in first.events}
    assert first.start_time_unix_nano < events["given to the engine"] < events["first token"]
    assert events["first token"] < first.end_time_unix_nano
    assert (second.status.code, second.status.message) == (2, "rank 1 said no")
    assert "secret" not in str(received)
    resource = {a.key: a.value.string_value for a in received[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "deskfleet"


def scopes(received: list[Any]) -> list[Any]:
    return [scope for each in received for spans in each.resource_spans for scope in spans.scope_spans]


def values(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
