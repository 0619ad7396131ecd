"""The fields of POST /v1/responses, its input items and its tools. Owns which exist, and what must hold between them.

Nothing is stored here, so a request carries its whole conversation: `previous_response_id`, `conversation`, `prompt`,
`background` and references to items are refused, and so is `store: true`. Answers are never stored, and say so.

* Thoughts of earlier turns are items with `content`; without it, sealed or summarised, they are another model's and say
  nothing here. `reasoning.summary` is ignored: the thought itself is sent.
* Tools that search the web are not shown to the model, and their items in the history are left out.
* `include` may name what an answer here never has.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from deskfleet.errors import RequestError
from deskfleet.gateway.answer_form import JsonObjectFormat, RegexFormat, TextFormat
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
    read_object,
)

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

_INCLUDES = (
    LOGPROBS,
    ENCRYPTED,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What `include` may hold. All but the first ask for what an answer here holds anyway, or never does."""


class InputText(Struct, frozen=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class InputImage(Struct, frozen=True, tag_field="type", tag="input_image"):
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


class MessageItem(Struct, frozen=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | InputImage | RefusalPart]


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionOutputItem(Struct, frozen=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[InputText | InputImage]


class CustomCallItem(Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    call_id: str
    name: str
    input: str


class CustomOutputItem(Struct, frozen=True, tag_field="type", tag="custom_tool_call_output"):
    call_id: str
    output: str | list[InputText | InputImage]


class ReasoningText(Struct, frozen=True):
    text: str


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """A thought of an earlier turn. Its `content` is read; a summary or sealed content is another model's."""

    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class WebSearchItem(Struct, frozen=True, tag_field="type", tag="web_search_call"):
    """A search of another server, without its results: nothing to tell the model."""


Item = (
    MessageItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | ReasoningItem
    | WebSearchItem
)


class FunctionTool(Struct, frozen=True, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Struct, frozen=True, tag_field="type", tag="custom"):
    """`apply_patch` is the one the publisher's library knows."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Struct, frozen=True, tag_field="type", tag="namespace"):
    name: str
    tools: list[FunctionTool | CustomTool]
    description: str | None = None


class WebSearchTool(Struct, frozen=True, tag_field="type", tag="web_search"):
    """Not shown to the model: nothing is searched here."""


class WebSearchPreviewTool(Struct, frozen=True, tag_field="type", tag="web_search_preview"):
    """The same by an older name."""


ToolItem = FunctionTool | CustomTool | NamespaceTool | WebSearchTool | WebSearchPreviewTool


class FunctionChoice(Struct, frozen=True, tag_field="type", tag="function"):
    name: str


class CustomChoice(Struct, frozen=True, tag_field="type", tag="custom"):
    name: str


class AllowedTool(Struct, frozen=True):
    name: str
    type: Literal["function", "custom"] = "function"


class AllowedTools(Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class SchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | RegexFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesFields(ConversationFields, frozen=True, kw_only=True):
    """The fields this server honours. None means that the client said nothing."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[ToolItem] | None = None
    tool_choice: str | FunctionChoice | CustomChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: TokenCount | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    stop: StopString | StopStrings | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


_STORED = "nothing is stored here; send the whole conversation as input"

DECISIONS = Decisions(
    fields=ResponsesFields,
    refused=REFUSED
    | {
        "previous_response_id": (None, _STORED),
        "conversation": (None, _STORED),
        "prompt": (None, "prompts are not stored here; send instructions and input"),
        "store": (False, "nothing is stored here"),
        "background": (False, "answers are given while the client waits"),
        "truncation": ("disabled", "prompts are never shortened"),
        "max_tool_calls": (None, "the limit is for tools of the vendor; see parallel_tool_calls"),
        "context_management": (None, "the conversation is used as it is sent"),
        "logprobs": (None, f"send include: ['{LOGPROBS}']"),
        "max_tokens": (None, "send max_output_tokens"),
        "max_completion_tokens": (None, "send max_output_tokens"),
        "messages": (None, "send input"),
        "system": (None, "send instructions"),
        "stop_sequences": (None, "send stop"),
        "output_format": (None, "send text.format"),
        "response_format": (None, "send text.format"),
    },
    ignored={name: why for name, why in IGNORED.items() if name == "service_tier"},
    choices={
        "].role": "user, assistant, system, developer",
        "].content": "text or parts of type input_text, input_image, output_text, refusal",
        "].output": "text or parts of type input_text, input_image",
        "text.format.type": "text, json_object, json_schema, regex",
        "text.verbosity": "medium",
        "].detail": "auto, low, high, original",
    },
)

_ITEM_TYPES = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning, "
    "web_search_call"
)
_PART_TYPES = "input_text, input_image, output_text, refusal"
_TOOL_TYPES = "function, custom, namespace, web_search"


def read_responses(body: bytes) -> ResponsesFields:
    """Return the checked fields of a request body. Raises RequestError naming what is wrong."""
    raw = read_object(body)
    if isinstance(raw.get("input"), list):
        raw["input"] = [_with_type(item, index) for index, item in enumerate(raw["input"])]
    try:
        fields = read_fields(raw, DECISIONS)
    except RequestError as error:
        raise _with_types(error) from error
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    for index, name in enumerate(fields.include or ()):
        if name not in _INCLUDES:
            param = f"include[{index}]"
            raise RequestError(f"{param}: {name!r} is not one of {', '.join(_INCLUDES)}", param=param)
    if isinstance(fields.tool_choice, str) and fields.tool_choice not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice: {fields.tool_choice!r} is not auto, none, required or an object",
            param="tool_choice",
        )
    if fields.tool_choice not in (None, "auto", "none") and not fields.tools:
        raise RequestError("tool_choice asks for a call but tools is empty", param="tool_choice")
    return fields


def _with_type(item: Any, index: int) -> Any:
    """A message may leave out that it is one."""
    if not isinstance(item, dict):
        return item
    if item.get("type") == "item_reference":
        param = f"input[{index}].type"
        raise RequestError(f"{param}: {_STORED}", param=param)
    return {"type": "message", **item} if "role" in item and item.get("type") is None else item


def _with_types(error: RequestError) -> RequestError:
    """An error about a type with the types that are known there."""
    param = error.param or ""
    if not param.endswith("].type"):
        return error
    if param.startswith("tools["):
        known = _TOOL_TYPES
    else:
        known = _PART_TYPES if param.count("[") > 1 else _ITEM_TYPES
    return RequestError(f"{error.message}, known are {known}", param=error.param)


__all__ = [
    "DECISIONS",
    "LOGPROBS",
    "AllowedTools",
    "CustomCallItem",
    "CustomChoice",
    "CustomOutputItem",
    "CustomTool",
    "FunctionCallItem",
    "FunctionChoice",
    "FunctionOutputItem",
    "FunctionTool",
    "InputImage",
    "InputText",
    "Item",
    "MessageItem",
    "NamespaceTool",
    "OutputText",
    "ReasoningItem",
    "RefusalPart",
    "ResponsesFields",
    "SchemaFormat",
    "ToolItem",
    "read_responses",
]
