"""SGLang 0.5 over HTTP: how /generate is asked, and what it can do.

Its server is asked what it was started with, because much depends on it: whether it samples repeatably, which grammars
it knows, of what distribution its log probabilities are. Knows nothing of connections, deadlines or thoughts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from deskfleet.endpoint import (
    Constraint,
    EngineStats,
    GenerateRequest,
)
from deskfleet.errors import EngineError, RequestError
from deskfleet.gateway.upstream.data_url import data_url
from deskfleet.gateway.upstream.failures import UpstreamFailed, failure_of
from deskfleet.gateway.upstream.http_upstream import EventReader, HttpUpstream, WireRequest
from deskfleet.gateway.upstream.introduction import ask_model
from deskfleet.gateway.upstream.scrape import marker_from, read_rows, read_samples, stats_from
from deskfleet.gateway.upstream.sglang_events import GenerateEvent, GenerateEvents
from deskfleet.gateway.upstream.thoughts import Thought

_Known = TypeVar("_Known")

_LLGUIDANCE = "llguidance"
_ABORT_S = 5.0
_LAST_ABORTS_S = 0.5
_HEALTH_S = 25.0  # its /health generates a token and waits up to 20 s for one


class _ModelInfo(Struct):
    has_image_understanding: bool | None = None


class _ServerInfo(Struct):
    grammar_backend: str | None = None
    enable_deterministic_inference: bool | None = None
    version: str | None = None


class SglangUpstream(HttpUpstream):
    """One SGLang server."""

    engine = "sglang"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model_info = _ModelInfo()
        self._server_info = _ServerInfo()
        self._unmodified_logprobs: bool | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def _ask(self) -> int:
        self.model, max_model_len = await ask_model(self.connection, self.options)
        self._model_info = await self._look_up(("/model_info", "/get_model_info"), _ModelInfo)
        self._server_info = await self._look_up(("/server_info", "/get_server_info"), _ServerInfo)
        self._unmodified_logprobs = await self._has_unmodified_logprobs()
        return max_model_len

    async def _look_up(self, paths: tuple[str, ...], kind: type[_Known]) -> _Known:
        """Return the first of `paths` that is there, the newer name first; what none says is unknown."""
        for path in paths:
            answer = await self.connection.get(path, timeout_s=self.options.answer_s)
            if answer.status == 200:
                try:
                    return msgspec.json.decode(answer.body, type=kind)
                except msgspec.MsgspecError as error:
                    raise UpstreamFailed(f"{self.url}{path} cannot be read: {error}") from error
            if answer.status != 404:
                raise failure_of(answer.status, answer.body, self.url)
        return kind()

    async def _has_unmodified_logprobs(self) -> bool:
        """Try: SGLang gives log probabilities after temperature, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set."""
        found = []
        for temperature in (0.0, 2.0):
            body = {
                "input_ids": [self.vocabulary.bos_token_id],
                "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
                "return_logprob": True,
                "logprob_start_len": -1,
                "token_ids_logprob": [self.vocabulary.eos_token_id],
            }
            answer = await self.connection.post(
                "/generate", msgspec.json.encode(body), timeout_s=self.options.answer_s
            )
            if answer.status != 200:
                raise failure_of(answer.status, answer.body, self.url)
            try:
                event = msgspec.json.decode(answer.body, type=GenerateEvent)
            except msgspec.MsgspecError as error:
                raise UpstreamFailed(f"{self.url}/generate answered what cannot be read: {error}") from error
            self.exact_tokens = event.output_ids is not None
            rows = event.meta_info.output_token_ids_logprobs
            if not rows or not rows[0] or not isinstance(rows[0][0][0], float):
                return False
            found.append(rows[0][0][0])
        return abs(found[0] - found[1]) <= 1e-3 * max(abs(found[0]), 1.0)

    # --- what is sent ---------------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        params = request.sampling
        if request.images and not self._model_info.has_image_understanding:
            raise RequestError("this engine cannot see images", param="messages")
        if params.repetition_penalty != 1:
            raise RequestError(
                "repetition_penalty: SGLang looks at the answer only, not at the prompt as well",
                param="repetition_penalty",
                hint="leave it out, or use presence_penalty",
            )
        if params.seed is not None and params.temperature != 0:
            if not self._server_info.enable_deterministic_inference:
                raise RequestError(
                    "seed: this engine does not sample repeatably",
                    param="seed",
                    hint="leave it out, or start SGLang with --enable-deterministic-inference",
                )
            if not -(2**63) <= params.seed < 2**63:
                raise RequestError(f"seed is {params.seed}, but must be a 64-bit integer", param="seed")
        self._check_constraint(params.constraint)
        if params.logprobs is not None:
            self._check_logprobs(request)

    def _check_constraint(self, constraint: Constraint | None) -> None:
        if constraint is not None and constraint.kind == "grammar":
            backend = self._server_info.grammar_backend
            if backend != _LLGUIDANCE:
                raise RequestError(
                    f"this engine's grammars ({backend or 'unknown'}) cannot say this form",
                    param=constraint.param,
                    hint="start SGLang with --grammar-backend llguidance, or leave out strict",
                )

    def _check_logprobs(self, request: GenerateRequest) -> None:
        """Refuse where SGLang would give those of a modified distribution: after biases, forms, temperature."""
        params = request.sampling
        modifiers = {
            "logit_bias": bool(params.logit_bias),
            "presence_penalty": bool(params.presence_penalty),
            "frequency_penalty": bool(params.frequency_penalty),
            "response_format": params.constraint is not None,
            "temperature": params.temperature not in (0, 1) and not self._unmodified_logprobs,
        }
        marks = self.vocabulary.thinking
        if params.thinking_budget is not None and marks is not None:
            modifiers["thinking_budget"] = Thought.of_prompt(request.prompt_token_ids, marks).is_open
        for name, is_set in modifiers.items():
            if is_set:
                hint = "SGLANG_RETURN_ORIGINAL_LOGPROB=1 lifts this" if name == "temperature" else None
                raise RequestError(
                    f"this engine gives log probabilities after {name}, not the model's own",
                    param="logprobs",
                    hint=hint,
                )

    def _wire(self, request: GenerateRequest) -> WireRequest:
        params = request.sampling
        body: dict[str, Any] = {
            "rid": request.request_id,
            "input_ids": request.prompt_token_ids,
            "sampling_params": self._sampling(request),
            "stream": True,
        }
        if params.logprobs is not None:
            body |= {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": params.logprobs}
        if request.images:
            body["image_data"] = [data_url(image) for image in request.images]
        return WireRequest("/generate", msgspec.json.encode(body))

    def _sampling(self, request: GenerateRequest) -> dict[str, Any]:
        """All fields: what is left out, a server's preferred parameters fill."""
        params = request.sampling
        fields: dict[str, Any] = {
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "ignore_eos": params.ignore_eos,
            "skip_special_tokens": False,  # a stop string may be spelled with them
        }
        if params.seed is not None and self._server_info.enable_deterministic_inference:
            fields["sampling_seed"] = params.seed
        if params.stop:
            fields["stop"] = params.stop
        if params.stop_token_ids:
            fields["stop_token_ids"] = params.stop_token_ids
        if params.logit_bias:
            fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        if params.constraint is not None:
            fields |= self._form(params.constraint)
        return fields

    def _form(self, constraint: Constraint) -> dict[str, str]:
        match constraint.kind:
            case "json_object":
                return {"json_schema": '{"type": "object"}'}
            case "json_schema":
                return {"json_schema": self._schema(constraint.text)}
            case "regex":
                return {"regex": constraint.text}
            case "grammar":
                return {"ebnf": constraint.text}

    def _schema(self, text: str) -> str:
        """The schema; without the options that only llguidance understands, for other backends."""
        if self._server_info.grammar_backend == _LLGUIDANCE or "x-guidance" not in text:
            return text
        schema = json.loads(text)
        if isinstance(schema, dict):
            schema.pop("x-guidance", None)
        return json.dumps(schema, ensure_ascii=False)

    def _reader(self, request: GenerateRequest) -> EventReader:
        return GenerateEvents(request, self.url, self.vocabulary)

    def _cancel(self, request: GenerateRequest) -> None:
        task = asyncio.create_task(self._abort(request.request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        with suppress(EngineError):  # the closed connection aborts as well, only later
            await self.connection.post(
                "/abort_request", msgspec.json.encode({"rid": request_id}), timeout_s=_ABORT_S
            )

    async def close(self) -> None:
        """As HttpUpstream.close; aborts under way get a moment to be sent."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_LAST_ABORTS_S)
        await super().close()

    # --- how it is doing ------------------------------------------------------------------------------

    async def _marker(self) -> Hashable | None:
        answer = await self.connection.get("/metrics", timeout_s=self.options.look_s)
        if answer.status == 200:
            return marker_from(read_samples(answer.body, self.url, _MARKERS), _MARKERS)
        # Without --enable-metrics: its health check fails when nothing comes out of the engine for 20 s.
        answer = await self.connection.get("/health", timeout_s=max(_HEALTH_S, self.options.look_s))
        if answer.status != 200:
            raise failure_of(answer.status, answer.body, self.url)
        return None

    async def _engine_stats(self) -> EngineStats | None:
        answer = await self.connection.get("/metrics", timeout_s=self.options.look_s)
        if answer.status != 200:
            return None
        self.rows = read_rows(answer.body, self.url)
        return stats_from(read_samples(answer.body, self.url, _STATS.values()), _STATS)


_MARKERS = (
    "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total",
    "sglang:cuda_graph_passes_total",
    "sglang:forward_execution_seconds_total",
    "sglang:realtime_tokens_total",
    "sglang:num_requests_total",
)

_STATS = {
    "num_steps": "sglang:cuda_graph_passes_total",
    "num_running": "sglang:num_running_reqs",
    "num_waiting": "sglang:num_queue_reqs",
    "num_finished": "sglang:num_requests_total",
    "num_cancelled": "sglang:num_aborted_requests_total",
    "num_preempted": "sglang:num_retractions_total",
    "num_prompt_tokens": "sglang:prompt_tokens_total",
    "num_generated_tokens": "sglang:generation_tokens_total",
    "num_prefix_queried": "sglang:prompt_tokens_total",
    "num_prefix_hits": "sglang:cached_tokens_total",
}


__all__ = ["SglangUpstream"]
