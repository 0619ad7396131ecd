"""Input items and tools of the Responses protocol, in the form the publisher's library takes them.

Owns that form. Knows nothing of prompts. A refusal in the history is told as text, and a search of another server left
out; the library would refuse the one and drop the other without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deskfleet.errors import RequestError
from deskfleet.gateway.images import ImageReference, take_ticket
from deskfleet.gateway.protocols.responses_fields import (
    AllowedTools,
    CustomCallItem,
    CustomOutputItem,
    CustomTool,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputImage,
    InputText,
    Item,
    MessageItem,
    NamespaceTool,
    OutputText,
    ReasoningItem,
    RefusalPart,
    ResponsesFields,
    ToolItem,
)

_Part = InputText | OutputText | InputImage | RefusalPart


def to_recipe_input(fields: ResponsesFields) -> tuple[str | list[dict[str, Any]], list[ImageReference]]:
    """Return the input as the publisher's library takes it, and its images in request order.

    Raises RequestError for an image where the model takes none.
    """
    if isinstance(fields.input, str):
        return fields.input, []
    images: list[ImageReference] = []
    plain = [_item(item, f"input[{index}]", images) for index, item in enumerate(fields.input)]
    return [item for item in plain if item is not None], images


def to_recipe_tools(tools: Sequence[ToolItem]) -> list[dict[str, Any]]:
    """Return the tools that are shown to the model, as the publisher's library takes them."""
    shown = [tool for tool in tools if isinstance(tool, FunctionTool | CustomTool | NamespaceTool)]
    plain: list[dict[str, Any]] = [msgspec.to_builtins(tool) for tool in shown]
    return [{key: value for key, value in tool.items() if value is not None} for tool in plain]


def choose_tools(fields: ResponsesFields) -> tuple[list[ToolItem], str | dict[str, Any] | None, bool]:
    """Return the tools that `tool_choice` leaves, the choice among them, and whether a call must come.

    Raises RequestError when it names a tool that is not there.
    """
    tools, choice = list(fields.tools or ()), fields.tool_choice
    if choice is None or isinstance(choice, str):
        return tools, choice, choice == "required"
    if isinstance(choice, AllowedTools):
        names, must_call = [tool.name for tool in choice.tools], choice.mode == "required"
    else:
        names, must_call = [choice.name], True
    for name in names:
        if not any(getattr(tool, "name", None) == name for tool in tools):
            raise RequestError(f"tool_choice: {name!r} is not among the tools", param="tool_choice")
    kept = [tool for tool in tools if getattr(tool, "name", None) in names]
    return kept, "required" if must_call else "auto", must_call


def _item(item: Item, path: str, images: list[ImageReference]) -> dict[str, Any] | None:
    match item:
        case MessageItem():
            content = _content(item.content, f"{path}.content", images)
            return {"type": "message", "role": item.role, "content": content}
        case FunctionCallItem():
            plain = {"type": "function_call", "call_id": item.call_id, "name": item.name}
            more = {} if item.namespace is None else {"namespace": item.namespace}
            return {**plain, "arguments": item.arguments, **more}
        case CustomCallItem():
            plain = {"type": "custom_tool_call", "call_id": item.call_id, "name": item.name}
            return {**plain, "input": item.input}
        case FunctionOutputItem() | CustomOutputItem():
            kind = (
                "function_call_output" if isinstance(item, FunctionOutputItem) else "custom_tool_call_output"
            )
            output = _content(item.output, f"{path}.output", images)
            return {"type": kind, "call_id": item.call_id, "output": output}
        case ReasoningItem():
            texts = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            return {"type": "reasoning", "summary": [], "content": texts}
        case _:
            return None


def _content(
    content: str | Sequence[_Part], path: str, images: list[ImageReference]
) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{path}[{index}]", images) for index, part in enumerate(content)]


def _part(part: _Part, path: str, images: list[ImageReference]) -> dict[str, Any]:
    match part:
        case InputImage():
            reference = ImageReference(f"{path}.image_url", part.image_url, part.detail == "low")
            return {"type": "input_image", "image_url": take_ticket(images, reference)}
        case OutputText():
            return {"type": "output_text", "text": part.text}
        case RefusalPart():
            return {"type": "output_text", "text": part.refusal}
        case InputText():
            return {"type": "input_text", "text": part.text}


__all__ = ["choose_tools", "to_recipe_input", "to_recipe_tools"]
