"""The fields of POST /v1/messages, its content blocks and its tools. Owns which exist, and what must hold between them.

What happens to fields the publisher's library has no use for:

* `cache_control` and `citations` on blocks and tools are ignored: prefixes are found by their tokens.
* `signature` of a thought is ignored: thoughts of other models are as good as ours. `redacted_thinking` cannot be read
  and is left out. A turn without its thought is accepted.
* `is_error` on a tool result is ignored: the model is shown what the tool said.
* `thinking.display` is ignored: the whole thought is sent.
* A document that is text is told as text. Others are refused, as the library would put a note in their place.
* Tools of the vendor's own (`type: bash_...`, `web_search_...`) are refused: the model was not told what they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deskfleet.errors import RequestError
from deskfleet.gateway.fields import (
    IGNORED,
    REFUSED,
    ConversationFields,
    Decisions,
    StopStrings,
    TokenCount,
    read_fields,
    read_object,
)
from deskfleet.gateway.thinking import TokenBudget


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class Base64Source(Struct, frozen=True, tag_field="type", tag="base64"):
    media_type: str
    data: str


class UrlSource(Struct, frozen=True, tag_field="type", tag="url"):
    url: str


class PlainSource(Struct, frozen=True, tag_field="type", tag="text"):
    data: str
    media_type: str | None = None


class ContentSource(Struct, frozen=True, tag_field="type", tag="content"):
    content: str | list[TextBlock]


class ImageBlock(Struct, frozen=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource


class DocumentBlock(Struct, frozen=True, tag_field="type", tag="document"):
    source: PlainSource | ContentSource
    title: str | None = None
    context: str | None = None


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedBlock(Struct, frozen=True, tag_field="type", tag="redacted_thinking"):
    """A thought that only its own vendor can read."""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, frozen=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock
)


class Message(Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(Struct, frozen=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class MessagesToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenBudget | None = None
    display: str | None = None


class SchemaOutput(Struct, frozen=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | int | float | None = None
    format: SchemaOutput | None = None


class MessagesFields(ConversationFields, frozen=True, kw_only=True):
    """The fields this server honours. None means that the client said nothing."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    max_tokens: TokenCount | None = None
    stop_sequences: StopStrings | None = None
    thinking: bool | MessagesThinking | None = None  # type: ignore[assignment]
    output_config: OutputConfig | None = None  # type: ignore[assignment]
    output_format: SchemaOutput | None = None


DECISIONS = Decisions(
    fields=MessagesFields,
    refused=REFUSED
    | {
        "mcp_servers": ([], "no servers are called from here; send tools"),
        "container": (None, "nothing is executed here"),
        "stop": (None, "send stop_sequences"),
        "input": (None, "send messages"),
        "instructions": (None, "send system"),
        "max_output_tokens": (None, "send max_tokens"),
        "text": (None, "send output_config.format"),
        "max_completion_tokens": (None, "send max_tokens"),
        "response_format": (None, "send output_config.format"),
        "functions": ([], "send tools"),
        "logprobs": (False, "this protocol has no place for log probabilities"),
        "top_logprobs": (0, "this protocol has no place for log probabilities"),
    },
    ignored=IGNORED
    | {
        "cache_control": "prefixes are found by their tokens",
        "context_management": "the conversation is used as it is sent",
        "betas": "nothing here depends on them",
        "anthropic_version": "nothing here depends on it",
        "inference_geo": "there is one place",
        "speed": "there is one speed",
    },
    choices={
        "].role": "user, assistant, system",
        "].content": "text or blocks",
        "source.type": "base64 and url for images, text and content for documents",
        "thinking.type": "enabled, disabled, adaptive",
        "tool_choice.type": "auto, any, tool, none",
        "].type": "text, image, document, thinking, redacted_thinking, tool_use, tool_result in messages, custom "
        "in tools",
        "format.type": "json_schema",
    },
)


def read_messages(body: bytes) -> MessagesFields:
    """Return the checked fields of a request body. Raises RequestError naming what is wrong."""
    raw = read_object(body)
    for index, tool in enumerate(raw["tools"] if isinstance(raw.get("tools"), list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            param = f"tools[{index}].type"
            raise RequestError(
                f"{param}: {kind!r} is a tool of the vendor, which this model was never shown",
                param=param,
                hint="send a tool with an input_schema",
            )
    fields = read_fields(raw, DECISIONS)
    choice = fields.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not fields.tools:
        raise RequestError("tool_choice asks for a call but tools is empty", param="tool_choice")
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise RequestError("tool_choice.name: this field is required", param="tool_choice.name")
    formats = (fields.output_format, fields.output_config.format if fields.output_config else None)
    if None not in formats and formats[0] != formats[1]:
        raise RequestError(
            "output_format contradicts output_config.format",
            param="output_format",
            hint="send only output_config.format",
        )
    return fields


__all__ = [
    "DECISIONS",
    "Base64Source",
    "Block",
    "ContentSource",
    "DocumentBlock",
    "ImageBlock",
    "Message",
    "MessagesFields",
    "MessagesTool",
    "PlainSource",
    "RedactedBlock",
    "TextBlock",
    "ThinkingBlock",
    "ToolResultBlock",
    "ToolUseBlock",
    "UrlSource",
    "read_messages",
]
