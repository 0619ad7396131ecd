"""The fields of POST /v1/chat/completions. Owns which exist, and what must hold between them.

`parallel_tool_calls: false` ends the answer after its first call. A call that `tool_choice` asks for comes after the
thought, where the model thinks. A last assistant message with `prefix: true` is the beginning of the answer.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from deskfleet.errors import RequestError
from deskfleet.gateway.answer_form import ResponseFormat
from deskfleet.gateway.fields import (
    IGNORED,
    REFUSED,
    ConversationFields,
    Decisions,
    StopString,
    StopStrings,
    StreamOptions,
    TokenCount,
    TopLogprobs,
    read_fields,
    refuse_logprobs_alone,
)
from deskfleet.gateway.protocols.chat_messages import Message, Tool, ToolChoice


class ChatFields(ConversationFields, frozen=True, kw_only=True):
    """The fields this server honours. None means that the client said nothing."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    stop: StopString | StopStrings | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None


DECISIONS = Decisions(
    fields=ChatFields,
    refused=REFUSED
    | {
        "functions": ([], "send tools instead"),
        "function_call": ("auto", "send tool_choice instead"),
        "modalities": (["text"], "answers are text only"),
        "audio": ({}, "answers are text only"),
        "prediction": ({}, "predicted outputs are not supported"),
        "web_search_options": (None, "nothing is searched here; send a tool"),
        "verbosity": ("medium", "verbosity is not supported"),
        "store": (False, "nothing is stored here"),
        "input": (None, "send messages"),
        "system": (None, "send a message of the system"),
        "instructions": (None, "send a message of the system"),
        "max_output_tokens": (None, "send max_completion_tokens"),
        "stop_sequences": (None, "send stop"),
        "text": (None, "send response_format"),
        "output_format": (None, "send response_format"),
        "guided_json": (None, "send response_format instead"),
        "guided_regex": (None, "send response_format instead"),
        "guided_choice": (None, "send response_format instead"),
        "guided_grammar": (None, "send response_format instead"),
        "structured_outputs": (None, "send response_format instead"),
        "echo": (False, "the prompt is not repeated"),
        "chat_template": (None, "the prompt format is the model's own"),
        "documents": ([], "put documents into messages"),
        "add_generation_prompt": (True, "send a last assistant message with prefix: true"),
        "continue_final_message": (False, "send a last assistant message with prefix: true"),
    },
    ignored=IGNORED,
    choices={
        "].role": "system, developer, user, assistant, tool, latest_reminder",
        "].type": "text and image_url in user, system and tool messages, text in assistant messages",
        "thinking.type": "enabled, disabled, adaptive",
        "response_format.type": "text, json_object, json_schema, regex",
        "].image_url.detail": "auto, low, high, original",
    },
)


def read_chat(body: bytes) -> ChatFields:
    """Return the checked fields of a request body. Raises RequestError naming what is wrong."""
    return check_chat(body)


def check_chat(body: bytes | dict[str, Any]) -> ChatFields:
    """As `read_chat`, also for a body that is read already."""
    fields = read_fields(body, DECISIONS)
    refuse_logprobs_alone(fields.logprobs, fields.top_logprobs)
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    limits = (fields.max_tokens, fields.max_completion_tokens)
    if None not in limits and limits[0] != limits[1]:
        raise RequestError(
            f"max_completion_tokens is {limits[1]} but max_tokens is {limits[0]}",
            param="max_completion_tokens",
        )
    if isinstance(fields.tool_choice, str) and fields.tool_choice not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice: {fields.tool_choice!r} is not auto, none, required or a function",
            param="tool_choice",
        )
    if fields.tool_choice not in (None, "auto", "none") and not fields.tools:
        raise RequestError("tool_choice asks for a call but tools is empty", param="tool_choice")
    return fields


__all__ = ["DECISIONS", "ChatFields", "check_chat", "read_chat"]
