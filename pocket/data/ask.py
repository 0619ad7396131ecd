"""Questions of `deskfleet eval` as examples, and what a model says to them as a reply: no gateway is needed.

Owns the two conversions, for machines that have a training model and no server. Rendering is `render.py`'s, which gives
the publisher's ids; what a right answer is decides `deskfleet.evaluation`.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deskfleet.client import Reply
from deskfleet.evaluation.questions import Question
from pocket import tokenizer as spelling
from pocket.data.example import Call, Example, Json, Message
from pocket.data.render import CALLS, INVOKE, PARAMETER


def as_example(question: Question, effort: int | None) -> Example:
    """Return a question as an example whose last message is still to be said."""
    request = question.request
    schema = request.get("response_format", {}).get("json_schema", {}).get("schema")
    return Example(
        task=question.task,
        key="",
        messages=(*map(_message, request["messages"]), Message("assistant")),
        effort=effort,
        tools=tuple(tool["function"] for tool in request.get("tools", ())),
        response_schema=schema,
    )


def _message(message: Mapping[str, Any]) -> Message:
    content, images = message.get("content") or "", list[NDArray[np.uint8]]()
    if not isinstance(content, str):
        images = [_pixels(part["image_url"]["url"]) for part in content if part["type"] == "image_url"]
        content = "".join(part["text"] for part in content if part["type"] == "text")
    calls = tuple(
        Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    )
    return Message(message["role"], content, message.get("reasoning_content"), calls, tuple(images))


def _pixels(url: str) -> NDArray[np.uint8]:
    data = base64.b64decode(url.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def as_reply(token_ids: Sequence[int], *, thinking: bool, seconds_s: float) -> Reply:
    """Return what was generated as a server would answer; the end of the sentence may be missing."""
    tokenizer = spelling.load_tokenizer()
    ids = list(token_ids)
    ended = bool(ids) and ids[-1] == tokenizer.special_id(spelling.EOS)
    said = ids[:-1] if ended else ids
    thought: list[int] = []
    if thinking:
        end = tokenizer.special_id(spelling.END_THINK)
        where = said.index(end) if end in said else len(said)
        thought, said = said[:where], said[where + 1 :]
    content, calls = _split_calls(tokenizer.decode(said))
    return Reply(
        content=content,
        reasoning=tokenizer.decode(thought),
        tool_calls=calls,
        finish_reason="length" if not ended else "tool_calls" if calls else "stop",
        num_completion_tokens=len(ids),
        num_reasoning_tokens=len(thought),
        first_token_s=0.0,
        total_s=seconds_s,
    )


_BLOCK = re.compile(rf"\s*<{CALLS}>(.*)</{CALLS}>\s*", re.DOTALL)
_EACH_CALL = re.compile(rf'<{INVOKE} name="([^"]*)">(.*?)</{INVOKE}>', re.DOTALL)
_EACH_PARAMETER = re.compile(
    rf'<{PARAMETER} name="([^"]*)" string="(true|false)">(.*?)</{PARAMETER}>', re.DOTALL
)


def _split_calls(text: str) -> tuple[str, tuple[Json, ...]]:
    """Return the text before a block of calls, and the calls; a block that does not end stays text."""
    found = _BLOCK.search(text)
    if found is None:
        return text, ()
    calls = []
    for name, inside in _EACH_CALL.findall(found[1]):
        members = [
            f"{json.dumps(key)}: {json.dumps(value) if is_text == 'true' else value}"
            for key, is_text, value in _EACH_PARAMETER.findall(inside)
        ]
        calls.append(
            {"type": "function", "function": {"name": name, "arguments": "{" + ", ".join(members) + "}"}}
        )
    return text[: found.start()], tuple(calls)


__all__ = ["as_example", "as_reply"]
