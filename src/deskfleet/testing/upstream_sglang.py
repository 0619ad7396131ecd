"""An SGLang server that answers from a script: `/generate` as SGLang 0.5.23 has it.

Owns the shapes. Owns no model and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiohttp import web

from deskfleet.endpoint import Constraint, GenerateRequest
from deskfleet.testing.scripted import invented_logprob
from deskfleet.testing.upstreams import (
    ScriptedServer,
    Step,
    image_of,
    json_response,
    sampling_params,
)


class ScriptedSglang(ScriptedServer):
    """An SGLang server. `is_incremental`: each event holds what is new, else everything so far.

    `server_info` is what it says of itself; `aborted` holds the ids of requests it was told to give up.
    """

    def __init__(self, *args: Any, is_incremental: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_incremental = is_incremental
        self.sends_ids = True
        self.server_info: dict[str, Any] = {
            "grammar_backend": "llguidance",
            "enable_deterministic_inference": True,
            "version": "0.5.23",
        }
        self.has_images = True
        self.scales_logprobs = False
        self.aborted: list[str] = []

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
            web.get("/health", self._health),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.is_stuck else 200)

    async def _model_info(self, request: web.Request) -> web.Response:
        return json_response({"model_path": "/models/scripted", "has_image_understanding": self.has_images})

    async def _server_info(self, request: web.Request) -> web.Response:
        return json_response(self.server_info)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        if not body.get("stream"):  # the upstream's look at what distribution log probabilities are of
            temperature = body["sampling_params"]["temperature"]
            logprob = -2.0 / temperature if self.scales_logprobs and temperature else -2.0
            rows = [[[logprob, token_id, None] for token_id in body["token_ids_logprob"]]]
            meta = {"prompt_tokens": 1, "completion_tokens": 1, "output_token_ids_logprobs": rows}
            return json_response(
                {"text": "a", "meta_info": meta} | ({"output_ids": [7]} if self.sends_ids else {})
            )
        return await self._answer(http, _sglang_request(body))

    def _event(
        self, request: GenerateRequest, step: Step, said: tuple[int, ...], is_nan: bool
    ) -> dict[str, Any]:
        shown = step.token_ids if self.is_incremental else said
        meta: dict[str, Any] = {
            "id": request.request_id,
            "finish_reason": self._finish(request, step, said),
            "prompt_tokens": len(request.prompt_token_ids) + 3 * len(request.images),
            "completion_tokens": len(said),
            "cached_tokens": 0,
            "weight_version": "default",
        }
        num_top = request.sampling.logprobs
        if num_top is not None:
            found = [invented_logprob(token_id, num_top) for token_id in shown]
            meta["output_token_logprobs"] = [[None if is_nan else e.logprob, e.token_id, None] for e in found]
            meta["input_token_logprobs"] = []
            if num_top:
                meta["output_top_logprobs"] = [[[lp, i, None] for i, lp in e.top] for e in found]
        shown_text = shown[:-1] if step.finish_reason == "stop" and shown and shown[-1] == 1 else shown
        text = self.tokenizer.decode(list(shown_text), skip_special_tokens=False)
        event: dict[str, Any] = {"text": text if step.finish_reason else text.rstrip("\ufffd")}
        if self.sends_ids:
            event["output_ids"] = shown
        event["meta_info"] = meta
        return event

    @staticmethod
    def _finish(request: GenerateRequest, step: Step, said: tuple[int, ...]) -> dict[str, Any] | None:
        match step.finish_reason:
            case None:
                return None
            case "abort":
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            case "stop" if len(said) < request.sampling.max_tokens:
                return {"type": "stop", "matched": said[-1] if said else None}
            case _:  # the length is looked at first
                return {"type": "length", "length": request.sampling.max_tokens}

    def _after(self, request: GenerateRequest, said: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        return iter(())

    def _metric_lines(self) -> list[str]:
        label = '{model_name="scripted"}'
        return [
            f"sglang:num_running_reqs{label} {self.num_running}",
            f"sglang:generation_tokens_total{label} {self.num_tokens}",
            f"sglang:cuda_graph_passes_total{label} {self.num_steps}",
        ]


def _sglang_request(body: dict[str, Any]) -> GenerateRequest:
    sampling = body["sampling_params"]
    constraint = None
    for kind, name in (("json_schema", "json_schema"), ("regex", "regex"), ("grammar", "ebnf")):
        if name in sampling:
            constraint = Constraint(kind, sampling[name])  # type: ignore[arg-type]
    logprobs = body["top_logprobs_num"] if body.get("return_logprob") else None
    seed = sampling.get("sampling_seed")
    params = sampling_params(sampling, sampling["max_new_tokens"], logprobs, seed, constraint)
    images = tuple(map(image_of, body.get("image_data") or ()))
    return GenerateRequest(body["rid"], tuple(body["input_ids"]), params, images)


__all__ = ["ScriptedSglang"]
