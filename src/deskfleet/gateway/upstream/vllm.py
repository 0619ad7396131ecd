"""vLLM 0.30 and later over HTTP: how it is asked, what it answers, what it can do.

Three ways in, the first that the server offers: `/inference/v1/generate` (ids in, ids out; `--enable-scale-out`),
`/v1/completions` with `return_token_ids` (ids in, ids and text out), and `/v1/completions` alone, where text comes
back and is cut into ids again, which is not exact. Knows nothing of connections, deadlines or thoughts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, Literal

import msgspec
from msgspec import Struct

from deskfleet.endpoint import (
    Constraint,
    EngineStats,
    GenerateRequest,
    SamplingParams,
)
from deskfleet.errors import RequestError
from deskfleet.gateway.upstream.data_url import data_url
from deskfleet.gateway.upstream.failures import UpstreamFailed, failure_of
from deskfleet.gateway.upstream.http_upstream import EventReader, HttpUpstream, WireRequest
from deskfleet.gateway.upstream.introduction import ask_model
from deskfleet.gateway.upstream.retokenise import Retokeniser
from deskfleet.gateway.upstream.scrape import marker_from, read_rows, read_samples, stats_from
from deskfleet.gateway.upstream.vllm_events import CompletionsReader, GenerateReader, TextEvent

Way = Literal["generate", "completions", "text"]

_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"


class _Schema(Struct):
    paths: dict[str, msgspec.Raw]


class VllmUpstream(HttpUpstream):
    """One vLLM server. After connecting, `way` says how it is asked."""

    engine = "vllm"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.way: Way = "generate"

    async def _ask(self) -> int:
        self.model, max_model_len = await ask_model(self.connection, self.options)
        self.way = await self._find_way()
        self.exact_tokens = self.way != "text"
        return max_model_len

    async def _find_way(self) -> Way:
        """Read it from the server's own description; where there is none, try."""
        answer = await self.connection.get("/openapi.json", timeout_s=self.options.answer_s)
        if answer.status == 200:
            try:
                paths = msgspec.json.decode(answer.body, type=_Schema).paths
            except msgspec.MsgspecError as error:
                raise UpstreamFailed(f"{self.url}/openapi.json cannot be read: {error}") from error
            if _GENERATE in paths:
                return "generate"
            return "completions" if b'"return_token_ids"' in answer.body else "text"
        tried = await self.connection.post(_GENERATE, b"{}", timeout_s=self.options.answer_s)
        if tried.status in (400, 422):  # it is there, and misses its fields
            return "generate"
        body = {
            "model": self.model,
            "prompt": [self.vocabulary.bos_token_id],
            "max_tokens": 1,
            "return_token_ids": True,
        }
        tried = await self.connection.post(
            _COMPLETIONS, msgspec.json.encode(body), timeout_s=self.options.answer_s
        )
        if tried.status != 200:
            raise failure_of(tried.status, tried.body, self.url)
        choices = msgspec.json.decode(tried.body, type=TextEvent).choices
        return "completions" if choices and choices[0].token_ids is not None else "text"

    # --- what is sent ---------------------------------------------------------------------------------

    def _check(self, request: GenerateRequest) -> None:
        if request.images and self.way != "generate":
            raise RequestError(
                "this engine takes images only with token ids in and out",
                param="messages",
                hint="start vLLM with --enable-scale-out",
            )
        seed = request.sampling.seed
        if seed is not None and not 0 <= seed < 2**63:
            raise RequestError(f"seed is {seed}, but must be 0 to 2**63 - 1", param="seed")

    def _wire(self, request: GenerateRequest) -> WireRequest:
        if self.way == "generate":
            return WireRequest(_GENERATE, msgspec.json.encode(self._generate_body(request)))
        return WireRequest(_COMPLETIONS, msgspec.json.encode(self._completions_body(request)))

    def _generate_body(self, request: GenerateRequest) -> dict[str, Any]:
        params = request.sampling
        sampling = _sampling(params) | {"detokenize": bool(params.stop)}
        if params.logprobs is not None:
            sampling["logprobs"] = params.logprobs
        body: dict[str, Any] = {
            "request_id": request.request_id,
            "model": self.model,
            "token_ids": request.prompt_token_ids,
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.constraint is not None:
            body["reasoning_ended"] = True  # thoughts are requests of their own: see `thoughts`
        if request.images:
            # The first event then says how long the prompt is with its images.
            body |= {
                "content_parts": [{"type": "image_url", "url": data_url(image)} for image in request.images],
                "return_token_ids": True,
            }
        return body

    def _completions_body(self, request: GenerateRequest) -> dict[str, Any]:
        params = request.sampling
        body: dict[str, Any] = _sampling(params) | {
            "request_id": request.request_id,
            "model": self.model,
            "prompt": request.prompt_token_ids,
            "add_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.way == "completions":
            body["return_token_ids"] = True
        if params.logprobs is not None:
            body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
        return body

    def _reader(self, request: GenerateRequest) -> EventReader:
        if self.way == "generate":
            return GenerateReader(request, self.url)
        retokeniser = Retokeniser(self.vocabulary) if self.way == "text" else None
        return CompletionsReader(request, self.url, retokeniser, self.vocabulary.eos_token_id)

    # --- how it is doing ------------------------------------------------------------------------------

    async def _marker(self) -> Hashable | None:
        answer = await self.connection.get("/metrics", timeout_s=self.options.look_s)
        if answer.status != 200:
            return None
        return marker_from(read_samples(answer.body, self.url, _MARKERS), _MARKERS)

    async def _engine_stats(self) -> EngineStats | None:
        answer = await self.connection.get("/metrics", timeout_s=self.options.look_s)
        if answer.status != 200:
            return None
        samples = read_samples(answer.body, self.url, _STATS.values(), labels=("finished_reason",))
        self.rows = read_rows(answer.body, self.url)
        cancelled = int(samples.get("vllm:request_success_total{finished_reason=abort}", 0))
        stats = stats_from(samples, _STATS)
        return replace(stats, num_finished=stats.num_finished - cancelled, num_cancelled=cancelled)


_MARKERS = (
    "vllm:iteration_tokens_total_count",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
)

_STATS = {
    "num_steps": "vllm:iteration_tokens_total_count",
    "num_running": "vllm:num_requests_running",
    "num_waiting": "vllm:num_requests_waiting",
    "num_finished": "vllm:request_success_total",
    "num_preempted": "vllm:num_preemptions_total",
    "num_prompt_tokens": "vllm:prompt_tokens_total",
    "num_generated_tokens": "vllm:generation_tokens_total",
    "num_prefix_queried": "vllm:prefix_cache_queries_total",
    "num_prefix_hits": "vllm:prefix_cache_hits_total",
    "num_verify_steps": "vllm:spec_decode_num_drafts_total",
    "num_drafted": "vllm:spec_decode_num_draft_tokens_total",
    "num_accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The fields that have the same name everywhere. All are sent: what is left out, a server's own defaults fill."""
    fields: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,  # a stop string may be spelled with them
    }
    if params.seed is not None:
        fields["seed"] = params.seed
    if params.stop:
        fields["stop"] = params.stop
    if params.stop_token_ids:
        fields["stop_token_ids"] = params.stop_token_ids
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if params.constraint is not None:
        fields["structured_outputs"] = _structured(params.constraint)
    return fields


def _structured(constraint: Constraint) -> dict[str, Any]:
    match constraint.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": constraint.text}
        case "regex":
            return {"regex": constraint.text}
        case "grammar":
            return {"grammar": constraint.text}


__all__ = ["VllmUpstream"]
