"""Chat Completions in token ids: a request body becomes a prompt, an engine's tokens become protocol chunks.

Owns the use of the publisher's library for requests and answers. Knows nothing of HTTP. Rendering and parsing
are the library's alone; what is added here is what it leaves to its caller:

* **Control tokens never become text.** The library writes out every id it is given, end of sentence included.
  So the ids of `ChatFormat.hidden_token_ids`, and a client's stop token that ended the answer, are taken out
  before it sees them. They still count as completion tokens, and have no entry among the log probabilities.
* Stop strings are matched by the library, in the answer and not in the reasoning; the engine never hears of
  them. When one matches, `AnswerParser.finished` turns true before the engine is done, and the caller closes
  the engine's iterator.
* The prompt is counted with every image at its full span.
* The library knows efforts as tiers; another number takes the tier's place in the prompt (`ChatFormat.encode`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import msgspec
from deepseek_recipe import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    InferenceChunk,
    InferenceFinishReason,
    ModelVersion,
    PromptUsage,
    StreamProcessor,
)

from deskfleet.endpoint import GenerateRequest, ImageInput, SamplingParams, TokenChunk
from deskfleet.errors import EngineError, PromptTooLong, RequestError
from deskfleet.gateway.answer_form import answer_constraint
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.failures import UnknownModel
from deskfleet.gateway.fields import (
    ChatFields,
    parse_fields,
    requested_max_tokens,
    requested_thinking_budget,
    resolve_thinking,
)
from deskfleet.gateway.images import RequestImage, read_images
from deskfleet.gateway.messages import ticket_number, to_recipe_messages
from deskfleet.gateway.settings import GatewaySettings

_ANY_MAX_TOKENS = 2**32 - 1
"""The library would cap max_tokens at 393,216; here the context is the limit."""


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """One request, ready for the engine, and what its answer's parser needs."""

    generate: GenerateRequest
    conversion: ConversationRequest
    num_prompt_tokens: int
    stream: bool


class ChatProtocol:
    """Chat Completions for one served checkpoint. Holds no state between requests; any thread may use it."""

    def __init__(self, settings: GatewaySettings, max_model_len: int) -> None:
        self._settings = settings
        self._max_model_len = max_model_len
        self._format = ChatFormat.from_checkpoint(settings.checkpoint)
        self._options = (
            ConversionOptions(
                thinking_max_tokens_upper_bound=_ANY_MAX_TOKENS,
                non_thinking_max_tokens_upper_bound=_ANY_MAX_TOKENS,
            )
            .with_model_versions_by_name({settings.model_id: ModelVersion.DeepseekV41Flash})
            .with_special_tokens(self._format.special_tokens)
        )

    def prepare(self, body: bytes, request_id: str) -> PreparedChat:
        """Return the request in `body` as token ids. CPU-bound: run it off the event loop.

        Raises RequestError naming the field, UnknownModel, PromptTooLong with both numbers.
        """
        fields = parse_fields(body)
        if fields.model != self._settings.model_id:
            raise UnknownModel(fields.model, self._settings.model_id)
        messages, references = to_recipe_messages(fields.messages)
        images = read_images(references, self._format.config.vision, self._settings)
        thinking, effort = resolve_thinking(fields, default=self._settings.default_thinking)
        tier, number = (None, effort) if isinstance(effort, int) else (effort, None)
        conversion = self._convert(fields, messages, thinking, tier)
        token_ids, ordered = self._encode(conversion, number, images)
        num_prompt_tokens = len(token_ids) + sum(image.num_tokens - 1 for image in ordered)
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=self._sampling(fields, conversion, num_prompt_tokens),
            images=tuple(ImageInput(image.data) for image in ordered),
        )
        return PreparedChat(request, conversion, num_prompt_tokens, bool(fields.stream))

    def parser(self, prepared: PreparedChat) -> AnswerParser:
        """Return the parser of this request's answer."""
        return AnswerParser(prepared, self._settings.model_id, self._format)

    def _convert(
        self, fields: ChatFields, messages: list[dict[str, Any]], thinking: bool, tier: str | None
    ) -> ConversationRequest:
        body = {
            "model": fields.model,
            "messages": messages,
            "thinking": {"type": "enabled" if thinking else "disabled"},
            "reasoning_effort": tier,
            "tools": msgspec.to_builtins(fields.tools),
            "tool_choice": msgspec.to_builtins(fields.tool_choice),
            "response_format": msgspec.to_builtins(fields.response_format),
            "stop": fields.stop,
            "stream": bool(fields.stream),
            "stream_options": msgspec.to_builtins(fields.stream_options),
            "logprobs": fields.logprobs,
            "top_logprobs": fields.top_logprobs,
            "max_tokens": requested_max_tokens(fields),
        }
        try:
            return ChatCompletionRequest(body).convert(self._options)
        except (ConversionError, ValueError) as error:
            raise _name_conversion_error(error, fields) from error

    def _encode(
        self, conversion: ConversationRequest, effort: int | None, images: list[RequestImage]
    ) -> tuple[list[int], list[RequestImage]]:
        """Return the prompt's ids, and the images in the order of their placeholders."""
        token_ids = self._format.encode(conversion.conversation, effort)
        if not images:
            return token_ids, []
        rendered = self._format.encoding.render_conversation(conversion.conversation)
        ordered = [images[ticket_number(source.data_url)] for source in rendered.image_sources]
        num_placeholders = token_ids.count(self._format.config.image_token_id)
        if num_placeholders != len(images) or len(ordered) != len(images):
            raise RequestError(
                f"the prompt holds {num_placeholders} image placeholders for {len(images)} images",
                param="messages",
            )
        return token_ids, ordered

    def _sampling(
        self, fields: ChatFields, conversion: ConversationRequest, num_prompt_tokens: int
    ) -> SamplingParams:
        """Return how to sample: the client's word where it spoke, else what the library resolved."""
        resolved = conversion.inference_options
        stop_token_ids = tuple(fields.stop_token_ids or ())
        vocab_size = self._format.config.vocab_size
        logit_bias = fields.logit_bias or {}
        for name, token_ids in (("stop_token_ids", stop_token_ids), ("logit_bias", logit_bias)):
            if unknown := [token_id for token_id in token_ids if token_id >= vocab_size]:
                raise RequestError(
                    f"{name}: {unknown[0]} is not in the vocabulary of {vocab_size}", param=name
                )
        return SamplingParams(
            temperature=_first(fields.temperature, resolved.temperature, 1.0),
            top_p=_first(fields.top_p, resolved.top_p, 1.0),
            top_k=max(fields.top_k or 0, 0),
            min_p=fields.min_p or 0.0,
            seed=fields.seed,
            max_tokens=self._max_tokens(fields, conversion, num_prompt_tokens),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(fields.ignore_eos),
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            repetition_penalty=_first(fields.repetition_penalty, 1.0),
            presence_penalty=_first(fields.presence_penalty, 0.0),
            frequency_penalty=_first(fields.frequency_penalty, 0.0),
            logit_bias=tuple(logit_bias.items()),
            thinking_budget=requested_thinking_budget(fields),
            constraint=answer_constraint(fields, resolved.output_constraint, self._format.marker),
        )

    def _max_tokens(self, fields: ChatFields, conversion: ConversationRequest, num_prompt_tokens: int) -> int:
        room = self._max_model_len - num_prompt_tokens
        requested = requested_max_tokens(fields)
        if room < (requested or 1):
            # A prompt that fills the context exactly leaves no room for the one token an answer needs.
            raise PromptTooLong(
                num_prompt_tokens, requested or (1 if room == 0 else None), self._max_model_len
            )
        if requested is None and self._settings.default_max_tokens is not None:
            return min(self._settings.default_max_tokens, room)
        return conversion.resolve_max_tokens(num_prompt_tokens, self._max_model_len)


class AnswerParser:
    """One answer: engine chunks in, protocol chunks out. `finished` says that the answer is complete."""

    def __init__(self, prepared: PreparedChat, model_id: str, chat_format: ChatFormat) -> None:
        request = prepared.generate
        self._model_id = model_id
        self._request_id = request.request_id
        self._hidden = chat_format.hidden_token_ids
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        generator = ChatCompletionRequest.chunk_generator(prepared.conversion, request.request_id, model_id)
        self._processor = StreamProcessor(
            generator, prepared.conversion.parsing_options, chat_format.tokenizer
        )
        self._started = False

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: the engine finished, or a stop string matched."""
        return self._processor.finished

    def push(self, chunk: TokenChunk) -> list[ChatCompletionChunk]:
        """Return the protocol chunks that `chunk` adds, maybe none. Raises EngineError for an abort."""
        parts = self._visible_parts(chunk)
        if not self._started:
            self._started = True
            usage = PromptUsage(
                prompt_tokens=chunk.num_prompt_tokens, prompt_cache_hit_tokens=chunk.num_cached_tokens
            )
            parts = [InferenceChunk.ready(prompt_usage=usage), *parts]
        if chunk.finish_reason is not None:
            parts = [*parts, InferenceChunk.finish(_finish_reason(chunk))]
        out: list[ChatCompletionChunk] = []
        for part in parts:
            if self._processor.finished:
                break
            out += cast(list[ChatCompletionChunk], self._processor.push(part))
        return out

    def _visible_parts(self, chunk: TokenChunk) -> list[InferenceChunk]:
        """Split `chunk` into ids that become text and control tokens that are only counted."""
        token_ids = chunk.token_ids
        ended_by_stop_id = (
            chunk.finish_reason == "stop" and token_ids[-1:] and token_ids[-1] in self._stop_token_ids
        )
        if not ended_by_stop_id and self._hidden.isdisjoint(token_ids):
            return (
                [InferenceChunk.tokens(token_ids, _logprobs(chunk, range(len(token_ids))))]
                if token_ids
                else []
            )
        last = len(token_ids) - 1 if ended_by_stop_id else -1
        parts = []
        for hidden, run in groupby(
            range(len(token_ids)), lambda i: token_ids[i] in self._hidden or i == last
        ):
            indices = list(run)
            if hidden:
                parts.append(InferenceChunk.text("", len(indices)))
            else:
                parts.append(
                    InferenceChunk.tokens([token_ids[i] for i in indices], _logprobs(chunk, indices))
                )
        return parts

    def whole_answer(self) -> WholeAnswer:
        """Return an empty answer to which the chunks of `push` can be added."""
        return WholeAnswer(self._request_id, self._model_id)


class WholeAnswer:
    """The answer of a request that does not stream, put together from the chunks a stream would have sent."""

    def __init__(self, request_id: str, model_id: str) -> None:
        # The token counts come with the last chunk.
        self._response = ChatCompletionResponse(request_id, model_id, int(time.time()), 0, 0)

    def add(self, chunks: list[ChatCompletionChunk]) -> None:
        """Add what `AnswerParser.push` returned. Consumes the chunks."""
        for chunk in chunks:
            self._response.accumulate(chunk)

    def to_json(self) -> str:
        """Return the chat.completion object."""
        return self._response.to_json()


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _logprobs(
    chunk: TokenChunk, indices: Sequence[int]
) -> list[tuple[float, Sequence[tuple[int, float]]]] | None:
    if chunk.logprobs is None:
        return None
    return [(chunk.logprobs[i].logprob, chunk.logprobs[i].top) for i in indices]


def _finish_reason(chunk: TokenChunk) -> InferenceFinishReason:
    match chunk.finish_reason:
        case "stop":
            return InferenceFinishReason.Stop
        case "length":
            return InferenceFinishReason.Length
        case _:
            raise EngineError(f"the engine ended a request with {chunk.finish_reason!r}")


_PATH_IN_ERROR = re.compile(r"^\.?(messages\[\d+\][\w.\[\]]*):|'((?:messages|tools|stop)\[\d+\][\w.\[\]]*)'")
_FIELDS_IN_ERROR = {
    "tool_choice": "tool_choice",
    "'tool_call'": "tool_choice",
    "response_format": "response_format",
    "tool name": "tools",
    "schema for function": "tools",
    "parameters schema": "tools",
    "strict tool": "tools",
    "json schema": "response_format",
}
"""What a message of the library mentions -> the field it is about; otherwise it is about the messages."""

_STRICT_SCHEMA_ERRORS = ("required properties", "additionalproperties", "object with no properties")
"""What the library mentions when a strict schema, of a tool or of the answer, is not what strict means."""


def _name_conversion_error(error: ConversionError | ValueError, fields: ChatFields) -> RequestError:
    """Return the library's refusal with the field it is about, which its own `param` never says."""
    message = str(error)
    if path := _PATH_IN_ERROR.search(message):
        return RequestError(message.removeprefix("."), param=path[1] or path[2])
    lowered = message.lower()
    strict = "tools" if any(tool.function.strict for tool in fields.tools or ()) else "response_format"
    known = _FIELDS_IN_ERROR | dict.fromkeys(_STRICT_SCHEMA_ERRORS, strict)
    param = next((param for text, param in known.items() if text in lowered), "messages")
    return RequestError(message if param in message else f"{param}: {message}", param=param)


__all__ = ["AnswerParser", "ChatProtocol", "PreparedChat", "WholeAnswer"]
