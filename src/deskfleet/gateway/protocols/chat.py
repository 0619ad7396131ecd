"""Chat Completions: POST /v1/chat/completions.

Owns how a chat becomes a conversation and how its answer is sent. Rendering and parsing are the publisher's library's.

An answer that a policy, not the model, brought to an end says so as `stop_reason` beside `finish_reason`, where vLLM
says it too; so does one that ends in the middle of a call (`unfinished_call`).
"""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
from deepseek_recipe import ChatCompletionChunk, ChatCompletionRequest, ChatCompletionResponse

from deskfleet.errors import RequestError
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.failures import Failure
from deskfleet.gateway.policies.contract import Caller
from deskfleet.gateway.protocol import NOBODY
from deskfleet.gateway.protocols.answer import LibraryAnswer
from deskfleet.gateway.protocols.chat_fields import ChatFields, read_chat
from deskfleet.gateway.protocols.chat_messages import AssistantMessage, Tool, ToolChoice, to_recipe_messages
from deskfleet.gateway.protocols.conversation import (
    Ask,
    Conversations,
    PreparedConversation,
    Spellings,
)
from deskfleet.gateway.settings import GatewaySettings

_SPELLINGS = Spellings(
    fields={
        "tool_choice": "tool_choice",
        "'tool_call'": "tool_choice",
        "response_format": "response_format",
        "tool name": "tools",
        "schema for function": "tools",
        "parameters schema": "tools",
        "strict tool": "tools",
        "json schema": "response_format",
    },
    otherwise="messages",
    path=re.compile(r"^\.?(messages\[\d+\][\w.\[\]]*):|'((?:messages|tools|stop)\[\d+\][\w.\[\]]*)'"),
)

_NO_COUNTS = '"usage":null}'
_ENABLED, _DISABLED = {"type": "enabled"}, {"type": "disabled"}


class ChatProtocol:
    """Chat Completions for one served checkpoint. Holds no state between requests; any thread may use it."""

    id_prefix = "chatcmpl-"

    def __init__(
        self, settings: GatewaySettings, max_model_len: int, chat_format: ChatFormat | None = None
    ) -> None:
        self._conversations = Conversations(
            settings, max_model_len, chat_format or ChatFormat.from_checkpoint(settings.checkpoint)
        )

    def prepare(self, body: bytes, request_id: str, caller: Caller = NOBODY) -> PreparedConversation:
        """Return the request in `body` as token ids. CPU-bound: run it off the event loop.

        Raises RequestError naming the field, UnknownModel, PromptTooLong with both numbers.
        """
        fields = read_chat(body)
        options = fields.stream_options
        counts_apart = options is not None and bool(options.include_usage)
        return self._conversations.prepare(self.ask(fields), body, request_id, caller, echo=counts_apart)

    def ask(self, fields: ChatFields) -> Ask:
        """Return what a chat asks for, converted. Raises as `prepare` does."""
        conversations = self._conversations
        conversations.check_model(fields.model)
        messages, images = to_recipe_messages(fields.messages)
        thought = conversations.think(fields)
        tools, choice = fields.tools or [], fields.tool_choice
        must_call = thought.on and choice not in (None, "auto", "none")
        if must_call:
            # The library refuses this in a thought; the grammar asks for the call when the thought is over.
            tools, choice = _chosen(tools, choice), "auto"
        max_tokens = _max_tokens(fields)
        body: dict[str, Any] = {
            "model": fields.model,
            "messages": messages,
            "thinking": _ENABLED if thought.on else _DISABLED,
            "stream": bool(fields.stream),
        }
        said = {
            "reasoning_effort": thought.tier,
            "tools": tools if fields.tools is not None else None,
            "tool_choice": choice,
            "response_format": fields.response_format,
            "stop": fields.stop,
            "stream_options": fields.stream_options,
            "logprobs": fields.logprobs,
            "top_logprobs": fields.top_logprobs,
            "max_tokens": max_tokens,
        }
        for name, value in said.items():
            if value is not None:  # few are: the library reads what is there only
                body[name] = msgspec.to_builtins(value)
        strict = any(tool.function.strict for tool in tools) if tools else False
        conversion = conversations.convert(
            lambda options: ChatCompletionRequest(body).convert(options), _SPELLINGS, strict
        )
        last = fields.messages[-1]
        is_begun = isinstance(last, AssistantMessage) and bool(last.prefix)
        return Ask(
            conversion=conversion,
            conversation=conversion.conversation,
            fields=fields,
            thought=thought,
            images=images,
            functions=[msgspec.to_builtins(tool.function) for tool in tools],
            must_call=must_call,
            max_calls=1 if fields.parallel_tool_calls is False else None,
            response_format=fields.response_format,
            answer_is_begun=is_begun and bool(last.content),
            max_tokens=max_tokens,
            max_tokens_param="max_tokens"
            if fields.max_completion_tokens is None
            else "max_completion_tokens",
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        )

    def parser(self, prepared: PreparedConversation) -> ChatAnswer:
        """Return the parser of this request's answer."""
        return ChatAnswer(prepared, self._conversations.settings.model_id, self._conversations.format)


class ChatAnswer(LibraryAnswer):
    """One answer as chat.completion.chunk events, or as one chat.completion."""

    def __init__(self, prepared: PreparedConversation, model_id: str, chat_format: ChatFormat) -> None:
        request_id = prepared.draft.generate.request_id
        generator = ChatCompletionRequest.chunk_generator(prepared.conversion, request_id, model_id)
        super().__init__(prepared, generator, chat_format)
        self._model_id = model_id
        self._counts_apart: bool = prepared.echo

    def encode(self, events: list[ChatCompletionChunk]) -> bytes:
        """Return events as they are sent. Called for what each `push` returned, in order."""
        sent = []
        is_plain = not self.is_amended and not self._counts_apart
        for event in events:
            text = event.to_json()
            if is_plain or (self._counts_apart and text.endswith(_NO_COUNTS)):
                sent.append(f"data: {text}\n\n".encode())
            else:
                sent += [b"data: " + each + b"\n\n" for each in self._texts(text)]
        return b"".join(sent)

    def _texts(self, text: str) -> list[bytes]:
        """A chunk that ends an answer, or two: who asks for the counts gets them in one of their own, without choices.

        So OpenAI's interface has it; the library puts them into the last choice's, where some clients do not look.
        """
        last = self.amended(text)
        if not self._counts_apart:
            return [last]
        answer = msgspec.json.decode(last)
        without = msgspec.json.encode({**answer, "usage": None})
        return [without, msgspec.json.encode({**answer, "choices": []})]

    def end(self) -> bytes:
        """Return the message that ends a stream of this protocol."""
        return f"data: {ChatCompletionResponse.sse_done_data()}\n\n".encode()

    def fail(self, failure: Failure) -> bytes:
        """Return what is sent in place of the rest when something breaks."""
        return b"data: " + failure.to_json() + b"\n\n"

    def whole_answer(self) -> WholeChatAnswer:
        """Return an empty answer to which the events of `push` can be added."""
        return WholeChatAnswer(self, self._request_id, self._model_id)

    def amended(self, text: str) -> bytes:
        """Return a chunk or an answer with what the library does not know of its end, where it ends."""
        answer: dict[str, Any] = msgspec.json.decode(text)
        for choice in answer["choices"]:
            if choice["finish_reason"] is not None and self.stop_reason is not None:
                choice["stop_reason"] = self.stop_reason
        usage = answer.get("usage")
        if usage is not None and self.late_cached is not None:
            usage["prompt_tokens_details"]["cached_tokens"] = self.late_cached
            usage["prompt_cache_hit_tokens"] = self.late_cached
            usage["prompt_cache_miss_tokens"] = usage["prompt_tokens"] - self.late_cached
        return msgspec.json.encode(answer)


class WholeChatAnswer:
    """The answer of a request that does not stream, put together from the chunks a stream would have sent."""

    def __init__(self, parser: ChatAnswer, request_id: str, model_id: str) -> None:
        # The token counts come with the last chunk.
        self._parser = parser
        self._response = ChatCompletionResponse(request_id, model_id, int(time.time()), 0, 0)

    def add(self, events: list[ChatCompletionChunk]) -> None:
        """Add what `push` returned. Consumes the events."""
        for event in events:
            self._response.accumulate(event)

    def to_json(self) -> str:
        """Return the chat.completion object."""
        text = self._response.to_json()
        return self._parser.amended(text).decode() if self._parser.is_amended else text


def _max_tokens(fields: ChatFields) -> int | None:
    return fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens


def _chosen(tools: list[Tool], choice: str | ToolChoice | None) -> list[Tool]:
    """The tools that a choice leaves. Raises RequestError when it names none of them."""
    if not isinstance(choice, ToolChoice):
        return tools
    chosen = [tool for tool in tools if tool.function.name == choice.function.name]
    if not chosen:
        raise RequestError(
            f"tool_choice: {choice.function.name!r} is not among the tools", param="tool_choice"
        )
    return chosen


__all__ = ["ChatAnswer", "ChatProtocol", "WholeChatAnswer"]
