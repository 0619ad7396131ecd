"""From examples to token ids: the V4.1 prompt format, with a weight for each token.

Owns the rendering of conversations (specification §10.5-10.6) with marks of what the assistant says, which the
publisher's codec does not give; tests/pocket compare the ids with the codec's. Knows no task.

Weights: what the assistant produces (reasoning, `</think>`, answer, calls, end of sentence) weighs 1; the rest
weighs the example's `prompt_weight`; image spans weigh nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from deskfleet.model.config import VisionConfig
from deskfleet.model.vision import plan_image, span_token_types
from pocket import tokenizer as spelling
from pocket.batch import ImagePlacement
from pocket.data.example import Call, Example, Json, Message, PlainText

_GREY = (127, 127, 127)
_DSML_TOKEN = "｜DSML｜"

EFFORT_TEXT = (
    "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)

CALLS, INVOKE, PARAMETER = (f"{_DSML_TOKEN} {word}" for word in ("calls", "invoke", "parameter"))

_TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{CALLS}>" \
block like the following:

<{CALLS}>
<{INVOKE} name="$TOOL_NAME">
<{PARAMETER} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{PARAMETER}>
...
</{INVOKE}>
<{INVOKE} name="$TOOL_NAME2">
...
</{INVOKE}>
</{CALLS}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
)
_FORMAT_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


@dataclass(frozen=True, slots=True)
class Document:
    """One rendered example: token ids uint16 [T], `target_weight` float32 [T] of predicting each token, images."""

    task: str
    token_ids: NDArray[np.uint16]
    target_weight: NDArray[np.float32]
    images: tuple[ImagePlacement, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of one weight: plain text, or one special token, or one image."""

    text: str
    weight: float
    special: bool = False
    image: NDArray[np.uint8] | None = None


class Renderer:
    """Renders examples with one tokenizer. `vision` says how images become spans."""

    def __init__(self, tokenizer: spelling.PocketTokenizer, vision: VisionConfig) -> None:
        self._tokenizer = tokenizer
        self._vision = vision
        self._encode_fixed = lru_cache(maxsize=4096)(tokenizer.encode_text)

    def render(self, example: Example | PlainText) -> Document:
        """Return the example as a document."""
        if isinstance(example, PlainText):
            parts = [_special(spelling.BOS, 0.0), _Part(example.text, example.weight)]
            return self._document(example.task, [*parts, _special(spelling.EOS, example.weight)])
        return self._document(example.task, list(_merged(_parts(example, example.messages))))

    def render_prompt(self, example: Example) -> list[int]:
        """Return the ids of the prompt that the last message answers; one id for each image."""
        return self._flat_ids(_parts(example, example.messages[:-1]))

    def render_conversation(self, example: Example) -> list[int]:
        """Return the ids of the whole conversation; one id for each image."""
        return self._flat_ids(_parts(example, example.messages))

    def question(self, example: Example) -> Document:
        """Return the prompt that the last message answers as a document, its images as spans."""
        return self._document(example.task, list(_merged(_parts(example, example.messages[:-1]))))

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of plain text on its own."""
        return len(self._tokenizer.encode_text(text))

    def _flat_ids(self, parts: Iterator[_Part]) -> list[int]:
        return [token_id for part in _merged(parts) for token_id in self._ids(part)]

    def _ids(self, part: _Part) -> list[int]:
        if part.special:
            return [self._tokenizer.special_id(part.text)]
        return (
            self._encode_fixed(part.text) if len(part.text) < 100 else self._tokenizer.encode_text(part.text)
        )

    def _document(self, task: str, parts: list[_Part]) -> Document:
        token_ids: list[int] = []
        weights: list[NDArray[np.float32]] = []
        images: list[ImagePlacement] = []
        for part in parts:
            if part.image is None:
                ids = self._ids(part)
            else:
                placement = place_image(part.image, len(token_ids), self._vision)
                images.append(placement)
                ids = [self._tokenizer.special_id(spelling.IMAGE)] * len(placement.token_types)
            token_ids += ids
            weights.append(np.full(len(ids), part.weight, dtype=np.float32))
        return Document(task, np.array(token_ids, dtype=np.uint16), np.concatenate(weights), tuple(images))


def place_image(pixels: NDArray[np.uint8], start: int, vision: VisionConfig) -> ImagePlacement:
    """Return `pixels`, padded as the engine pads them (specification §9.1), as a span that starts at `start`."""
    height, width = pixels.shape[:2]
    grid = plan_image(width, height, vision)
    if (grid.height_px, grid.width_px) != (height, width):
        padded = ImageOps.pad(Image.fromarray(pixels), (grid.width_px, grid.height_px), color=_GREY)
        pixels = np.asarray(padded)
    return ImagePlacement(start, pixels, np.array(span_token_types(grid), dtype=np.int8))


def tools_block(tools: tuple[Json, ...]) -> str:
    """Return the text that tells the model about its tools (specification §10.6)."""
    return _TOOLS_HEAD + "\n".join(_json(tool) for tool in tools) + _TOOLS_TAIL


def calls_markup(calls: tuple[Call, ...]) -> str:
    """Return the markup of tool calls (specification §10.5)."""
    invokes = "\n".join(
        f'<{INVOKE} name="{call.name}">\n' + "\n".join(_parameters(call)) + f"\n</{INVOKE}>" for call in calls
    )
    return f"\n\n<{CALLS}>\n{invokes}\n</{CALLS}>"


def _parameters(call: Call) -> Iterator[str]:
    for name, value in call.arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else _json(value)
        yield f'<{PARAMETER} name="{name}" string="{str(is_string).lower()}">{text}</{PARAMETER}>'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _special(text: str, weight: float) -> _Part:
    return _Part(text, weight, special=True)


def _parts(example: Example, messages: tuple[Message, ...]) -> Iterator[_Part]:
    """Yield the parts of a conversation; it ends as a prompt unless the last message is the assistant's."""
    prompt = example.prompt_weight
    thinking = example.effort is not None
    yield _special(spelling.BOS, 0.0)
    system = messages[0].content if messages[0].role == "system" else ""
    turns = messages[1:] if messages[0].role == "system" else messages
    head = EFFORT_TEXT.format(effort=example.effort) if thinking else ""
    if example.tools:
        system += "\n\n" + tools_block(example.tools)
    if example.response_schema is not None:
        system += "\n\n" + _FORMAT_HEAD + _json(example.response_schema)
    if head or system or messages[0].role == "system":
        yield _special(spelling.SYSTEM, prompt)
        yield from _with_specials(head + system, prompt)
    last_user = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for is_assistant, group in groupby(enumerate(turns), lambda item: item[1].role == "assistant"):
        indexed = list(group)
        if not is_assistant:
            yield from _user_parts([turn for _, turn in indexed], prompt)
            thinks = thinking and (bool(example.tools) or indexed[-1][0] >= last_user)
            yield _special(spelling.ASSISTANT, prompt)
            yield _special(spelling.THINK if thinks else spelling.END_THINK, 0.0)
            continue
        for index, turn in indexed:
            if thinking and (example.tools or index > last_user):
                yield from _with_specials(turn.reasoning or "", 1.0)
                yield _special(spelling.END_THINK, 1.0)
            yield from _with_specials(turn.content + (calls_markup(turn.calls) if turn.calls else ""), 1.0)
            yield _special(spelling.EOS, 1.0)


def _user_parts(turns: list[Message], weight: float) -> Iterator[_Part]:
    """Yield one user turn: user messages and tool results joined by blank lines."""
    yield _special(spelling.USER, weight)
    separator = ""
    for turn in turns:
        for image in turn.images:
            if separator:
                yield _Part(separator, weight)
            yield _Part(spelling.IMAGE, 0.0, special=True, image=image)
            separator = "\n\n"
        text = f"<tool_result>{turn.content}</tool_result>" if turn.role == "tool" else turn.content
        yield _Part(separator + text, weight)
        separator = "\n\n"


_SPECIAL_IN_TEXT = (_DSML_TOKEN, spelling.THINK, spelling.END_THINK)


def _with_specials(text: str, weight: float) -> Iterator[_Part]:
    """Yield text of the codec's own, in which the marker and the thinking tags are special tokens."""
    rest = text
    while rest:
        found = min(
            ((where, token) for token in _SPECIAL_IN_TEXT if (where := rest.find(token)) >= 0), default=None
        )
        if found is None:
            break
        where, token = found
        if where:
            yield _Part(rest[:where], weight)
        yield _special(token, weight)
        rest = rest[where + len(token) :]
    if rest:
        yield _Part(rest, weight)


def _merged(parts: Iterator[_Part]) -> Iterator[_Part]:
    """Join neighbouring plain text: the codec encodes what stands between special tokens in one go."""
    for special, group in groupby(parts, lambda part: part.special):
        if special:
            yield from group
        else:
            texts = list(group)
            yield _Part("".join(part.text for part in texts), texts[0].weight)


__all__ = [
    "CALLS",
    "EFFORT_TEXT",
    "INVOKE",
    "PARAMETER",
    "Document",
    "Renderer",
    "calls_markup",
    "place_image",
    "tools_block",
]
