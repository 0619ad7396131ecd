"""Content blocks of the Messages protocol, in the form the publisher's library takes them.

Owns that form. Knows nothing of prompts; `messages_fields.py` says what becomes of fields the library has no use for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deskfleet.errors import RequestError
from deskfleet.gateway.images import ImageReference, take_ticket
from deskfleet.gateway.protocols.messages_fields import (
    Base64Source,
    Block,
    DocumentBlock,
    ImageBlock,
    Message,
    MessagesTool,
    PlainSource,
    RedactedBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)


def to_recipe_messages(
    messages: Sequence[Message],
) -> tuple[list[dict[str, Any]], list[ImageReference]]:
    """Return the messages as the publisher's library takes them, and their images in request order.

    Raises RequestError naming a message that says nothing.
    """
    images: list[ImageReference] = []
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}].content"
        if isinstance(message.content, str):
            plain.append({"role": message.role, "content": message.content})
            continue
        blocks = [_block(block, f"{path}[{at}]", images) for at, block in enumerate(message.content)]
        kept = [block for block in blocks if block is not None]
        if kept:
            plain.append({"role": message.role, "content": kept})
        elif not message.content:
            raise RequestError(f"{path}: a message needs content", param=path)
    return plain, images


def to_recipe_tools(tools: Sequence[MessagesTool]) -> list[dict[str, Any]]:
    """Return the tools as the publisher's library takes them."""
    told = []
    for tool in tools:
        plain = {"name": tool.name, "input_schema": tool.input_schema}
        told.append(plain if tool.description is None else {**plain, "description": tool.description})
    return told


def _block(block: Block, path: str, images: list[ImageReference]) -> dict[str, Any] | None:
    match block:
        case TextBlock():
            return {"type": "text", "text": block.text}
        case ImageBlock():
            return _image(block, path, images)
        case DocumentBlock():
            return {"type": "text", "text": _document(block)}
        case ThinkingBlock():
            return {"type": "thinking", "thinking": block.thinking, "signature": block.signature or ""}
        case RedactedBlock():
            return None
        case ToolUseBlock():
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}
        case ToolResultBlock():
            return _result(block, path, images)


def _result(block: ToolResultBlock, path: str, images: list[ImageReference]) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": "tool_result", "tool_use_id": block.tool_use_id}
    if block.content is None:
        return plain
    if isinstance(block.content, str):
        return {**plain, "content": block.content}
    parts = [_block(part, f"{path}.content[{at}]", images) for at, part in enumerate(block.content)]
    return {**plain, "content": parts}


def _image(block: ImageBlock, path: str, images: list[ImageReference]) -> dict[str, Any]:
    source = block.source
    if isinstance(source, Base64Source):
        reference = ImageReference(f"{path}.source", f"data:{source.media_type};base64,{source.data}")
    else:
        reference = ImageReference(f"{path}.source.url", source.url)
    ticket = take_ticket(images, reference)
    media_type, _, data = ticket.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def _document(block: DocumentBlock) -> str:
    """A document of text, with its title where it has one."""
    source = block.source
    if isinstance(source, PlainSource):
        text = source.data
    elif isinstance(source.content, str):
        text = source.content
    else:
        text = "\n\n".join(part.text for part in source.content)
    return "\n\n".join(part for part in (block.title, block.context, text) if part)


def system_text(system: str | Sequence[TextBlock] | None) -> Any:
    """Return the system prompt as the publisher's library takes it."""
    return system if system is None or isinstance(system, str) else msgspec.to_builtins(system)


__all__ = ["system_text", "to_recipe_messages", "to_recipe_tools"]
