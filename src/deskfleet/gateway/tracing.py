"""OpenTelemetry traces, off by default: one span for each request that generates, made when it is over.

Owns the span's name, attributes and times. The libraries are an extra (`pip install 'deskfleet[otel]'`) and are
imported only when a collector is named. A span has counts and names, never a word of a prompt or an answer.
"""

from __future__ import annotations

from deskfleet import __version__
from deskfleet.errors import ConfigError
from deskfleet.gateway.recent import RequestRecord

_NS = 1_000_000_000
_SEND_S = 3.0  # a collector that takes longer is not waited for, also not at the end


class Tracer:
    """Sends spans to a collector, in batches and from a thread of its own."""

    def __init__(self, endpoint: str, *, service: str = "deskfleet") -> None:
        """`endpoint` takes OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces.

        Raises ConfigError when the extra is not installed or the endpoint is no URL.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"the trace collector {endpoint!r} is no URL",
                hint="write e.g. http://127.0.0.1:4318/v1/traces",
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"traces need a library that is not there: {error.name}",
                hint="pip install 'deskfleet[otel]'",
            ) from error
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S)
        resource = Resource.create({"service.name": service, "service.version": __version__})
        # Its own provider: a program that embeds a gateway keeps its global one.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("deskfleet.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: RequestRecord) -> None:
        """Make the span of a request that is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {} if record.trace_parent is None else {"traceparent": record.trace_parent}

        def at(moment_s: float) -> int:
            """Nanoseconds since 1970 of a moment on the record's own clock."""
            return int((record.began_at + moment_s - record.began_s) * _NS)

        span = self._tracer.start_span(
            f"chat {record.model}" if record.model else "chat",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=at(record.began_s),
            attributes=_attributes(record),
        )
        if record.given_s is not None:
            span.add_event("given to the engine", timestamp=at(record.given_s))
        if record.first_token_s is not None:
            span.add_event("first token", timestamp=at(record.first_token_s))
        if record.outcome == "failed":
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(at(record.began_s if record.ended_s is None else record.ended_s))

    def close(self) -> None:
        """Send what is left; blocks for as long as that takes."""
        self._provider.shutdown()


def _attributes(record: RequestRecord) -> dict[str, str | int | float]:
    """OpenTelemetry's own names where it has any (gen_ai, http), and deskfleet's."""
    known: dict[str, str | int | float | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_generated_tokens,
        "http.request.method": record.method,
        "http.route": record.path,
        "http.response.status_code": record.status,
        "client.address": record.client,
        "deskfleet.request_id": record.request_id,
        "deskfleet.protocol": record.protocol,
        "deskfleet.key": record.key,
        "deskfleet.outcome": record.outcome,
        "deskfleet.cached_tokens": record.num_cached_tokens,
        "deskfleet.queued_s": record.queued_s,
        "deskfleet.ttft_s": record.ttft_s,
        "deskfleet.tok_s": record.tok_s,
        "deskfleet.finish_reason": record.finish_reason,
        "deskfleet.stop_reason": record.stop_reason,
        "deskfleet.accepted": record.num_accepted,
        "deskfleet.drafted": record.num_drafted,
        "deskfleet.verify_steps": record.num_verify_steps,
        "deskfleet.wasted_rows": record.num_wasted_rows,
    }
    return {name: value for name, value in known.items() if value is not None}


__all__ = ["Tracer"]
