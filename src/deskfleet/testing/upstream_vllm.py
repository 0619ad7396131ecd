"""A vLLM server that answers from a script, as vLLM 0.32 and 0.33 do: ids in and out, or text with or without ids.

Owns the shapes, taken from answers of a real server. Owns no model and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from aiohttp import web

from deskfleet.endpoint import Constraint, GenerateRequest
from deskfleet.testing.scripted import invented_logprob
from deskfleet.testing.upstreams import (
    ScriptedServer,
    Step,
    error_body,
    image_of,
    json_response,
    sampling_params,
)


class ScriptedVllm(ScriptedServer):
    """A vLLM server. `way` is what it offers: ids in and out, text with ids, or text alone.

    `num_cached` tokens of every prompt were cached, and `drafts` were drafted and accepted, it says after the end.
    """

    def __init__(
        self, *args: Any, way: Literal["generate", "completions", "text"] = "generate", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.way = way
        self.num_cached = 0
        self.drafts: tuple[int, int] | None = None
        self.has_openapi = True

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/inference/v1/generate", self._generate),
            web.post("/v1/completions", self._completions),
            web.get("/openapi.json", self._openapi),
            web.get("/health", self._health),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _openapi(self, request: web.Request) -> web.Response:
        if not self.has_openapi:
            raise web.HTTPNotFound
        paths: dict[str, Any] = {"/v1/completions": {}}
        if self.way == "generate":
            paths["/inference/v1/generate"] = {}
        fields: dict[str, Any] = (
            {"prompt": {}} if self.way == "text" else {"prompt": {}, "return_token_ids": {}}
        )
        schemas = {"CompletionRequest": {"properties": fields}}
        return json_response({"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if self.way != "generate":
            return json_response(error_body("Scale-out endpoints are disabled.", 403), 403)
        body = await http.json()
        if "token_ids" not in body:
            return json_response(error_body("Field required", 400), 400)
        return await self._answer(http, _vllm_request(body, body["token_ids"], body["sampling_params"]))

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if not body.get("stream"):
            choice = {"index": 0, "text": "a", "finish_reason": "length"}
            choice |= {} if self.way == "text" else {"token_ids": [7]}
            return json_response({"id": "cmpl-1", "choices": [choice]})
        return await self._answer(http, _vllm_request(body, body["prompt"], body))

    def _event(
        self, request: GenerateRequest, step: Step, said: tuple[int, ...], is_nan: bool
    ) -> dict[str, Any]:
        stops = request.sampling.stop_token_ids
        matched = step.finish_reason == "stop" and said and said[-1] in stops
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": step.finish_reason,
            "stop_reason": said[-1] if matched else None,
        }
        if self.way == "generate":
            choice |= {"token_ids": step.token_ids, "routed_experts": None, "sampling_mask": None}
            choice["logprobs"] = self._logprobs(request, step, is_nan)
            event: dict[str, Any] = {
                "request_id": f"generate-tokens-{request.request_id}",
                "usage": None,
                "choices": [choice],
            }
            if request.images and step.num_before == 0:
                event["prompt_token_ids"] = [1] * (len(request.prompt_token_ids) + 3 * len(request.images))
            return event
        choice["text"] = self._text(
            said[: len(said) - len(step.token_ids)], said, hides_last=bool(step.finish_reason)
        )
        choice["logprobs"] = self._text_logprobs(request, step, is_nan)
        if self.way == "completions":
            choice["token_ids"] = step.token_ids
        return {"id": "cmpl-1", "object": "text_completion", "model": self.model, "choices": [choice]}

    def _text(self, before: tuple[int, ...], said: tuple[int, ...], *, hides_last: bool) -> str:
        """The text that a step adds. As in the engine, the token that ends an answer is not spelled out."""
        if hides_last and said and said[-1] == 1:
            said = said[:-1]
        old = self.tokenizer.decode(list(before), skip_special_tokens=False)
        new = self.tokenizer.decode(list(said), skip_special_tokens=False)
        while old.endswith("�"):
            old = old[:-1]
        if not hides_last:
            while new.endswith("�"):
                new = new[:-1]
        return new[len(old) :]

    def _logprobs(self, request: GenerateRequest, step: Step, is_nan: bool) -> dict[str, Any] | None:
        num_top = request.sampling.logprobs
        if num_top is None:
            return None
        content = []
        for token_id in step.token_ids:
            own = invented_logprob(token_id, num_top)
            ranked = [
                {"token_id": i, "logprob": logprob, "rank": rank}
                for rank, (i, logprob) in enumerate(own.top, start=1)
            ]
            ranked = ranked or [{"token_id": token_id, "logprob": own.logprob, "rank": 1}]
            value = -9999.0 if is_nan else own.logprob
            content.append(
                {
                    "token_id": token_id,
                    "logprob": value,
                    "rank": None if is_nan else 1,
                    "top_logprobs": ranked,
                }
            )
        return {"content": content}

    def _text_logprobs(self, request: GenerateRequest, step: Step, is_nan: bool) -> dict[str, Any] | None:
        num_top = request.sampling.logprobs
        if num_top is None:
            return None
        found = [invented_logprob(token_id, max(num_top, 1)) for token_id in step.token_ids]
        return {
            "tokens": [f"token_id:{entry.token_id}" for entry in found],
            "token_logprobs": [None if is_nan else entry.logprob for entry in found],
            "top_logprobs": [{f"token_id:{i}": logprob for i, logprob in entry.top} for entry in found],
        }

    def _after(self, request: GenerateRequest, said: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        num_prompt_tokens = len(request.prompt_token_ids)
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": len(said),
            "total_tokens": num_prompt_tokens + len(said),
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        event = {"request_id": request.request_id, "choices": [], "usage": usage}
        if self.drafts is not None:
            drafted, accepted = self.drafts
            counts = {"num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}
            event["metrics"] = {"speculative_decoding": counts}
        yield event

    def _metric_lines(self) -> list[str]:
        label = '{engine="0",model_name="scripted"}'
        return [
            f"vllm:num_requests_running{label} {self.num_running}",
            f"vllm:num_requests_waiting{label} 0",
            f"vllm:generation_tokens_total{label} {self.num_tokens}",
            f"vllm:iteration_tokens_total_count{label} {self.num_steps}",
            f'vllm:request_success_total{{finished_reason="stop"}} {len(self.requests) - self.num_running}',
            f'vllm:request_success_total{{finished_reason="abort"}} {self.num_cancelled}',
        ]


def _vllm_request(body: dict[str, Any], ids: list[int], sampling: dict[str, Any]) -> GenerateRequest:
    form = sampling.get("structured_outputs") or {}
    constraint = None
    for kind, name in (("json_object", "json_object"), ("json_schema", "json"), ("regex", "regex")):
        if name in form:
            constraint = Constraint(kind, "" if kind == "json_object" else form[name])  # type: ignore[arg-type]
    if "grammar" in form:
        constraint = Constraint("grammar", form["grammar"])
    images = tuple(image_of(part["url"]) for part in body.get("content_parts") or ())
    return GenerateRequest(
        body.get("request_id", ""),
        tuple(ids),
        sampling_params(
            sampling, sampling["max_tokens"], sampling.get("logprobs"), sampling.get("seed"), constraint
        ),
        images,
    )


__all__ = ["ScriptedVllm"]
