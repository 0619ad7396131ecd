"""Anthropic Messages: POST /v1/messages.

Owns how a request becomes a conversation and how its answer is sent. Rendering and parsing are the publisher's
library's. Beyond what it does:

* A last message of the assistant is the beginning of the answer, as it is for the vendor; the library would close it.
* `output_config.format` is shown to the model and enforced.
* `tool_choice` any and tool hold while thinking, too.
* A call that the answer was cut in is left out of an answer sent whole, where the library would show one without
  arguments.

`stop_reason` has the vendor's values. What a policy says more is told beside it as `stop_detail`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from deepseek_recipe import (
    AssistantMessage,
    Conversation,
    MessagesChunkGenerator,
    MessagesRequest,
    MessagesResponse,
    MessagesStreamEvent,
)

from deskfleet.errors import RequestError
from deskfleet.gateway.answer_form import JsonSchema, JsonSchemaFormat
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
from deskfleet.gateway.protocols.messages_blocks import system_text, to_recipe_messages, to_recipe_tools
from deskfleet.gateway.protocols.messages_fields import (
    Message,
    MessagesFields,
    MessagesTool,
    SchemaOutput,
    TextBlock,
    read_messages,
)
from deskfleet.gateway.settings import GatewaySettings

_SPELLINGS = Spellings(
    fields={
        "tool_choice": "tool_choice",
        "response_format": "output_config.format",
        "tool name": "tools",
        "schema for function": "tools",
        "parameters schema": "tools",
        "strict tool": "tools",
        "temperature": "temperature",
    },
    otherwise="messages",
    path=re.compile(r"((?:messages|tools|stop_sequences)(?:\.\d+|\[\d+\])(?:\.content(?:\.\d+|\[\d+\]))?)"),
)


class MessagesProtocol:
    """Messages for one served checkpoint. Holds no state between requests; any thread may use it."""

    id_prefix = "msg_"

    def __init__(self, settings: GatewaySettings, max_model_len: int, chat_format: ChatFormat) -> None:
        self._conversations = Conversations(settings, max_model_len, chat_format)

    def prepare(self, body: bytes, request_id: str, caller: Caller = NOBODY) -> PreparedConversation:
        """Return the request in `body` as token ids. CPU-bound: run it off the event loop.

        Raises RequestError naming the field, UnknownModel, PromptTooLong with both numbers.
        """
        ask = self.ask(read_messages(body))
        return self._conversations.prepare(ask, body, request_id, caller, echo=ask.starts_in_content)

    def ask(self, fields: MessagesFields) -> Ask:
        """Return what a request asks for, converted. Raises as `prepare` does."""
        conversations = self._conversations
        conversations.check_model(fields.model)
        messages, images = to_recipe_messages(fields.messages)
        thought = conversations.think(fields)
        tools, choice, must_call = _choose_tools(fields)
        body = {
            "model": fields.model,
            "messages": messages,
            "system": system_text(fields.system),
            "max_tokens": fields.max_tokens,
            "thinking": {"type": "enabled" if thought.on else "disabled"},
            "output_config": None if thought.tier is None else {"effort": thought.tier},
            "tools": to_recipe_tools(tools),
            # The library takes `any` for `auto`; in a thought the grammar asks for the call when it is over.
            "tool_choice": {"type": "auto"} if must_call else choice,
            "stop_sequences": fields.stop_sequences,
            "stream": bool(fields.stream),
        }
        conversion = conversations.convert(
            lambda options: MessagesRequest(
                {key: value for key, value in body.items() if value is not None}
            ).convert(options),
            _SPELLINGS,
            any(tool.strict for tool in tools),
        )
        wanted = fields.output_format or (fields.output_config.format if fields.output_config else None)
        is_begun = _is_begun(fields.messages[-1])
        conversation = _completed(
            conversion.conversation, wanted, is_begun=is_begun, must_call=must_call and not thought.on
        )
        disabled = fields.tool_choice is not None and fields.tool_choice.disable_parallel_tool_use
        return Ask(
            conversion=conversion,
            conversation=conversation,
            fields=fields,
            thought=thought,
            images=images,
            functions=[
                {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict} for tool in tools
            ],
            must_call=must_call and thought.on,
            max_calls=1 if disabled else None,
            response_format=None
            if wanted is None
            else JsonSchemaFormat(JsonSchema(wanted.schema, strict=True)),
            form_param="output_config.format",
            schema_param="output_config.format.schema",
            answer_is_begun=is_begun,
            starts_in_content=is_begun,
            max_tokens=fields.max_tokens,
        )

    def parser(self, prepared: PreparedConversation) -> MessagesAnswer:
        """Return the parser of this request's answer."""
        return MessagesAnswer(prepared, self._conversations.settings.model_id, self._conversations.format)


class MessagesAnswer(LibraryAnswer):
    """One answer as message events, or as one message."""

    def __init__(self, prepared: PreparedConversation, model_id: str, chat_format: ChatFormat) -> None:
        request_id = prepared.generate.request_id
        starts_in_content: bool = prepared.echo
        generator = (
            MessagesChunkGenerator(request_id, model_id, False)
            if starts_in_content
            else MessagesRequest.chunk_generator(prepared.conversion, request_id, model_id)
        )
        super().__init__(prepared, generator, chat_format)
        self._model_id = model_id

    def encode(self, events: list[MessagesStreamEvent]) -> bytes:
        """Return events as they are sent. Called for what each `push` returned, in order."""
        told = []
        for event in events:
            name, text = MessagesResponse.sse_event_name(event), event.to_json()
            if self.is_amended and name == "message_delta":
                text = self._amended(text)
            told.append(f"event: {name}\ndata: {text}\n\n")
        return "".join(told).encode()

    def end(self) -> bytes:
        """Return nothing: the last event says that it is the last."""
        return b""

    def fail(self, failure: Failure) -> bytes:
        """Return what is sent in place of the rest when something breaks."""
        return b"event: error\ndata: " + failure.to_json("anthropic", self._request_id) + b"\n\n"

    def whole_answer(self) -> WholeMessage:
        """Return an empty answer to which the events of `push` can be added."""
        return WholeMessage(self, self._request_id, self._model_id)

    def amend(self, usage: dict[str, Any]) -> None:
        """Put the cached tokens that were told late into a usage; the vendor's input tokens are those without them."""
        if self.late_cached is not None:
            both = usage["input_tokens"] + usage["cache_read_input_tokens"]
            usage["input_tokens"], usage["cache_read_input_tokens"] = (
                both - self.late_cached,
                self.late_cached,
            )

    def _amended(self, text: str) -> str:
        event: dict[str, Any] = msgspec.json.decode(text)
        if self.stop_reason is not None:
            event["delta"]["stop_detail"] = self.stop_reason
        self.amend(event["usage"])
        return msgspec.json.encode(event).decode()


class WholeMessage:
    """The answer of a request that does not stream, put together from the events a stream would have sent."""

    def __init__(self, parser: MessagesAnswer, request_id: str, model_id: str) -> None:
        self._parser = parser
        self._response = MessagesResponse(request_id, model_id, int(time.time()), 0, 0)

    def add(self, events: list[MessagesStreamEvent]) -> None:
        """Add what `push` returned. Consumes the events."""
        for event in events:
            self._response.accumulate(event)

    def to_json(self) -> str:
        """Return the message object."""
        parser = self._parser
        text = self._response.to_json()
        if not parser.is_amended and not parser.has_cut_call:
            return text
        message: dict[str, Any] = msgspec.json.decode(text)
        content = message["content"]
        if parser.has_cut_call and content and content[-1]["type"] == "tool_use":
            content.pop()
        if parser.stop_reason is not None:
            message["stop_detail"] = parser.stop_reason
        parser.amend(message["usage"])
        return msgspec.json.encode(message).decode()


def _is_begun(last: Message) -> bool:
    """Whether the last message is the beginning of the answer."""
    if last.role != "assistant":
        return False
    content = last.content
    return bool(content) and (isinstance(content, str) or isinstance(content[-1], TextBlock))


def _choose_tools(fields: MessagesFields) -> tuple[Sequence[MessagesTool], dict[str, Any] | None, bool]:
    """The tools that `tool_choice` leaves, the choice among them, and whether a call must come."""
    tools, choice = fields.tools or [], fields.tool_choice
    if choice is None:
        return tools, None, False
    if choice.type == "tool":
        tools = [tool for tool in tools if tool.name == choice.name]
        if not tools:
            raise RequestError(f"tool_choice: {choice.name!r} is not among the tools", param="tool_choice")
        return tools, {"type": "any"}, True
    return tools, {"type": choice.type}, choice.type == "any"


def _completed(
    conversation: Conversation, wanted: SchemaOutput | None, *, is_begun: bool, must_call: bool
) -> Conversation:
    """The conversation with what the library's conversion leaves out: schema and beginning of the answer, `any`."""
    if wanted is None and not is_begun and not must_call:
        return conversation
    messages = list(conversation.messages)
    if is_begun and messages and messages[-1].role == "assistant":
        last = messages.pop()
        messages.append(AssistantMessage(last.content, last.reasoning_content, last.tool_calls, prefix=True))
    return Conversation(
        messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice="required" if must_call else conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
        response_schema=None if wanted is None else wanted.schema,
    )


__all__ = ["MessagesAnswer", "MessagesProtocol", "WholeMessage"]
