"""OpenAI Responses: POST /v1/responses.

Owns how a request becomes a conversation and how its answer is sent: events with names and sequence numbers, and a
response that says the request's settings again. Rendering and parsing are the publisher's library's.

An answer that a policy, not the model, brought to an end says so as `stop_reason` in its response.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from deepseek_recipe import (
    ConversationRequest,
    ConversionOptions,
    ResponsesEcho,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesStreamEvent,
)

from deskfleet.gateway.answer_form import JsonSchema, JsonSchemaFormat, ResponseFormat
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.failures import Failure
from deskfleet.gateway.policies.contract import Caller
from deskfleet.gateway.protocol import NOBODY
from deskfleet.gateway.protocols.answer import LibraryAnswer
from deskfleet.gateway.protocols.conversation import (
    Ask,
    Conversations,
    PreparedConversation,
    Spellings,
)
from deskfleet.gateway.protocols.responses_fields import (
    LOGPROBS,
    FunctionTool,
    ResponsesFields,
    SchemaFormat,
    read_responses,
)
from deskfleet.gateway.protocols.responses_items import choose_tools, to_recipe_input, to_recipe_tools
from deskfleet.gateway.settings import GatewaySettings
from deskfleet.gateway.thinking import Reasoning

_SPELLINGS = Spellings(
    fields={
        "tool_choice": "tool_choice",
        "text.format": "text.format",
        "response_format": "text.format",
        "custom tool": "tools",
        "tool name": "tools",
        "schema for function": "tools",
        "parameters schema": "tools",
        "strict tool": "tools",
        "json schema": "text.format",
    },
    otherwise="input",
    path=re.compile(r"^\.?((?:input|tools)\[\d+\][\w.\[\]]*):|'((?:input|tools)\[\d+\][\w.\[\]]*)'"),
)

_SNAPSHOTS = frozenset(
    {"response.created", "response.in_progress", "response.completed", "response.incomplete"}
)
"""Events that carry the whole response."""


@dataclass(frozen=True, slots=True)
class _Echo:
    """What the answer says again: what the library knows of it, and what it does not."""

    library: ResponsesEcho
    namespaces: dict[str, tuple[str, str]]
    more: dict[str, Any]


class ResponsesProtocol:
    """Responses for one served checkpoint. Holds no state between requests; any thread may use it."""

    id_prefix = "resp_"

    def __init__(self, settings: GatewaySettings, max_model_len: int, chat_format: ChatFormat) -> None:
        self._conversations = Conversations(settings, max_model_len, chat_format)

    def prepare(self, body: bytes, request_id: str, caller: Caller = NOBODY) -> PreparedConversation:
        """Return the request in `body` as token ids. CPU-bound: run it off the event loop.

        Raises RequestError naming the field, UnknownModel, PromptTooLong with both numbers.
        """
        ask, echo = self._ask(read_responses(body))
        return self._conversations.prepare(ask, body, request_id, caller, echo)

    def _ask(self, fields: ResponsesFields) -> tuple[Ask, _Echo]:
        conversations = self._conversations
        conversations.check_model(fields.model)
        items, images = to_recipe_input(fields)
        thought = conversations.think(fields)
        tools, choice, must_call = choose_tools(fields)
        text_format = fields.text.format if fields.text is not None else None
        body = {
            "model": fields.model,
            "input": items,
            "instructions": fields.instructions,
            "reasoning": {"effort": thought.tier if thought.on else "none"},
            "tools": to_recipe_tools(tools),
            # The library refuses this in a thought; the grammar asks for the call when the thought is over.
            "tool_choice": "auto" if must_call and thought.on else choice,
            "text": None if text_format is None else {"format": msgspec.to_builtins(text_format)},
            "stream": bool(fields.stream),
            "max_output_tokens": fields.max_output_tokens,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "top_logprobs": fields.top_logprobs,
            "user": fields.user,
        }
        told: list[_Echo] = []

        def convert(options: ConversionOptions) -> ConversationRequest:
            request = ResponsesRequest({key: value for key, value in body.items() if value is not None})
            told.append(_Echo(request.echo(), request.namespace_tool_map(options), _more(fields)))
            return request.convert(options)

        own = {tool.name: tool for tool in tools if isinstance(tool, FunctionTool)}
        strict = any(tool.strict for tool in own.values())
        conversion = conversations.convert(convert, _SPELLINGS, strict)
        ask = Ask(
            conversion=conversion,
            conversation=conversion.conversation,
            fields=fields,
            thought=thought,
            images=images,
            functions=[
                _function(own[tool.name])
                if tool.name in own
                else {"name": tool.name, "parameters": tool.parameters}
                for tool in conversion.conversation.tools
            ],
            must_call=must_call and thought.on,
            max_calls=1 if fields.parallel_tool_calls is False else None,
            response_format=_response_format(text_format),
            form_param="text.format",
            schema_param="text.format.schema",
            stop=fields.stop,
            max_tokens=fields.max_output_tokens,
            max_tokens_param="max_output_tokens",
            prompt_param="input",
            logprobs=fields.top_logprobs or 0
            if fields.top_logprobs or LOGPROBS in (fields.include or ())
            else None,
        )
        return ask, told[0]

    def parser(self, prepared: PreparedConversation) -> ResponsesAnswer:
        """Return the parser of this request's answer."""
        return ResponsesAnswer(prepared, self._conversations.settings.model_id, self._conversations.format)


class ResponsesAnswer(LibraryAnswer):
    """One answer as response events, or as one response."""

    def __init__(self, prepared: PreparedConversation, model_id: str, chat_format: ChatFormat) -> None:
        echo: _Echo = prepared.echo
        request_id = prepared.generate.request_id
        generator = ResponsesRequest.chunk_generator(prepared.conversion, request_id, model_id)
        generator = generator.with_echo(echo.library).with_namespace_tool_map(echo.namespaces)
        super().__init__(prepared, generator, chat_format)
        self._model_id = model_id
        self._more = echo.more
        self._snapshot: dict[str, Any] = {}
        self._latest = ""

    def encode(self, events: list[ResponsesStreamEvent]) -> bytes:
        """Return events as they are sent. Called for what each `push` returned, in order."""
        told = []
        for event in events:
            name, text = ResponsesResponse.sse_event_name(event), event.to_json()
            if name in _SNAPSHOTS:
                text = self._completed(text)
            told.append(f"event: {name}\ndata: {text}\n\n")
            self._latest = text
        return "".join(told).encode()

    def end(self) -> bytes:
        """Return nothing: the last event says that it is the last."""
        return b""

    def fail(self, failure: Failure) -> bytes:
        """Return the event that says what broke, in the place of the last one."""
        number = msgspec.json.decode(self._latest).get("sequence_number", 0) if self._latest else 0
        error = {"code": "server_error", "message": failure.message}
        response = {**self._snapshot, "status": "failed", "error": error}
        event = {"type": "response.failed", "response": response, "sequence_number": number + 1}
        return b"event: response.failed\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def whole_answer(self) -> WholeResponse:
        """Return an empty answer to which the events of `push` can be added."""
        return WholeResponse(self, self._request_id, self._model_id)

    def complete(self, response: dict[str, Any]) -> None:
        """Add to a response what the library does not know."""
        response.update(self._more)
        if isinstance(response.get("reasoning"), dict):
            response["reasoning"]["effort"] = response.pop("_effort", None)
        if self.stop_reason is not None:
            response["stop_reason"] = self.stop_reason
        if self.late_cached is not None and response.get("usage") is not None:
            response["usage"]["input_tokens_details"]["cached_tokens"] = self.late_cached

    def _completed(self, text: str) -> str:
        event: dict[str, Any] = msgspec.json.decode(text)
        self.complete(event["response"])
        self._snapshot = event["response"]
        return msgspec.json.encode(event).decode()


class WholeResponse:
    """The answer of a request that does not stream, put together from the events a stream would have sent."""

    def __init__(self, parser: ResponsesAnswer, request_id: str, model_id: str) -> None:
        self._parser = parser
        self._response = ResponsesResponse(request_id, model_id, int(time.time()), 0, 0)

    def add(self, events: list[ResponsesStreamEvent]) -> None:
        """Add what `push` returned. Consumes the events."""
        for event in events:
            self._response.accumulate(event)

    def to_json(self) -> str:
        """Return the response object."""
        response: dict[str, Any] = msgspec.json.decode(self._response.to_json())
        self._parser.complete(response)
        return msgspec.json.encode(response).decode()


def _more(fields: ResponsesFields) -> dict[str, Any]:
    """Settings that the library does not say again."""
    effort = fields.reasoning.effort if isinstance(fields.reasoning, Reasoning) else None
    said = {
        "metadata": fields.metadata or {},
        "prompt_cache_key": fields.prompt_cache_key,
        "safety_identifier": fields.safety_identifier,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": fields.presence_penalty or 0.0,
        "frequency_penalty": fields.frequency_penalty or 0.0,
        "_effort": effort if effort is not None else fields.reasoning_effort,
    }
    choice = msgspec.to_builtins(fields.tool_choice)
    return said if choice is None else {**said, "tool_choice": choice}


def _response_format(wanted: Any) -> ResponseFormat | None:
    if not isinstance(wanted, SchemaFormat):
        return wanted  # type: ignore[no-any-return]
    return JsonSchemaFormat(JsonSchema(wanted.schema, wanted.name, wanted.description, wanted.strict))


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {"name": tool.name, "parameters": tool.parameters, "strict": tool.strict}


__all__ = ["ResponsesAnswer", "ResponsesProtocol", "WholeResponse"]
