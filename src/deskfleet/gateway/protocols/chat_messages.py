"""The shapes of `messages` and `tools` in Chat Completions, checked strictly, and their form for the publisher's
library.

Owns which message and tool fields exist. Knows nothing of prompts: the library renders what this module
passes on. It is needed because the library's own errors do not say which message is wrong, and because the
library drops what it does not know without a word.

What happens to fields the library has no use for:

* `developer` messages become `system`, as the library itself does for the Responses protocol.
* `reasoning` on an assistant message is another spelling of `reasoning_content`.
* `function_call` and `audio` on an assistant message would vanish from the prompt: refused.
* `name` and `refusal` on messages, and fields nobody here has heard of, are ignored. `name` is what many
  frameworks send on tool results, where `tool_call_id` already says everything.
* `strict` on a function is not shown to the model; `answer_form` enforces it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from deskfleet.errors import RequestError
from deskfleet.gateway.images import ImageReference, take_ticket


class ImageUrl(Struct, frozen=True):
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ImagePart(Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class SystemMessage(Struct, frozen=True, tag_field="role", tag="system"):
    content: str | list[TextPart | ImagePart]


class DeveloperMessage(Struct, frozen=True, tag_field="role", tag="developer"):
    content: str | list[TextPart | ImagePart]


class UserMessage(Struct, frozen=True, tag_field="role", tag="user"):
    content: str | list[TextPart | ImagePart]


class ToolMessage(Struct, frozen=True, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[TextPart | ImagePart]


class ReminderMessage(Struct, frozen=True, tag_field="role", tag="latest_reminder"):
    content: str


class AssistantMessage(Struct, frozen=True, tag_field="role", tag="assistant"):
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None
    function_call: None = None
    audio: None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | ReminderMessage


class Function(Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    type: Literal["function"]
    function: Function


class FunctionName(Struct, frozen=True):
    name: str


class ToolChoice(Struct, frozen=True):
    type: Literal["function"]
    function: FunctionName


def to_recipe_messages(messages: list[Message]) -> tuple[list[dict[str, Any]], list[ImageReference]]:
    """Return the messages as the publisher's library takes them, and their images in request order.

    Raises RequestError naming a message that says nothing.
    """
    plain: list[dict[str, Any]] = []
    images: list[ImageReference] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if isinstance(message, UserMessage) and isinstance(message.content, str):  # as most
            plain.append({"role": "user", "content": message.content})
            continue
        match message:
            case AssistantMessage():
                plain.append(_assistant(message, path))
            case DeveloperMessage():
                plain.append({"role": "system", "content": _content(message.content, path, images)})
            case ToolMessage():
                content = _content(message.content, path, images)
                plain.append({"role": "tool", "tool_call_id": message.tool_call_id, "content": content})
            case SystemMessage():
                plain.append({"role": "system", "content": _content(message.content, path, images)})
            case UserMessage():
                plain.append({"role": "user", "content": _content(message.content, path, images)})
            case ReminderMessage():
                plain.append({"role": "latest_reminder", "content": message.content})
    return plain, images


def _assistant(message: AssistantMessage, path: str) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RequestError("an assistant message needs content or tool_calls", param=f"{path}.content")
    plain: dict[str, Any] = {"role": "assistant"}
    if message.content is not None:
        plain["content"] = msgspec.to_builtins(message.content)
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.prefix:
        plain["prefix"] = True
    return plain


def _content(
    content: str | list[TextPart | ImagePart], path: str, images: list[ImageReference]
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
            continue
        where = f"{path}.content[{index}].image_url"
        reference = ImageReference(where, part.image_url.url, part.image_url.detail == "low")
        parts.append({"type": "image_url", "image_url": {"url": take_ticket(images, reference)}})
    return parts


__all__ = [
    "AssistantMessage",
    "Function",
    "Message",
    "Tool",
    "ToolChoice",
    "to_recipe_messages",
]
