"""Forty requests of all kinds, each with what an engine says to it, for the same answer from every engine.

Scripts are token ids, as a model would make them, end of sentence included. `asks` are the fields of a chat request.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

from chat_scripts import CHAT, EOS, HELLO, THINK, TOOLS, call_markup, ids, strict_format, strict_tool
from PIL import Image

from deskfleet.testing.scripted import Script

END = ids(EOS)
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
ASKS_JSON = [{"role": "user", "content": "answer in json"}]
SCHEMA = {"response_format": strict_format({"a": {"type": "integer"}, "b": {"type": "string"}}, ["a", "b"])}
STREAM: dict[str, Any] = {"stream": True}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
EMOJI = "a 🙂👩‍🚀 b 東京 Größe ﬁn"
CALL = call_markup(("weather", {"city": ("Oslo", True)}))
CALLS = call_markup(
    ("weather", {"city": ("a < b && c > d", True)}), ("add", {"a": ("1", False), "b": ("-2", False)})
)
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "weather in Oslo?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "they ask for weather",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3 degrees"},
]


def image_part() -> dict[str, Any]:
    """A small PNG as Chat Completions takes it."""
    file = io.BytesIO()
    Image.new("RGB", (28, 28), (200, 30, 30)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True)
class Case:
    """One request and what the engine says. `num_parts`: how many requests an engine behind HTTP gets for it."""

    name: str
    text: str
    asks: dict[str, Any]
    num_parts: int = 1
    chunk_sizes: tuple[int, ...] = (1,)
    ends: bool = True

    @property
    def script(self) -> Script:
        """What the engine says."""
        return Script(ids(self.text) + (END if self.ends else ()), self.chunk_sizes)


CASES = [
    Case("plain", "Hello there.", CHAT),
    Case("plain, streamed", "Hello there.", CHAT | STREAM),
    Case("streamed with usage", "Hello there.", CHAT | USAGE),
    Case(
        "several tokens a step", "Hello there, this is a longer answer.", CHAT | USAGE, chunk_sizes=(1, 3, 2)
    ),
    Case("only the end", "", CHAT),
    Case("only the end, streamed", "", CHAT | USAGE),
    Case("characters over tokens", EMOJI, CHAT),
    Case("characters over tokens, streamed", EMOJI, CHAT | STREAM),
    Case("characters over tokens and steps", EMOJI, CHAT | STREAM, chunk_sizes=(2, 1)),
    Case("line ends and escapes", 'a\r\n\tb "c" \\ d data: [DONE]\n\n', CHAT | STREAM),
    Case("length", "one two three four five six", CHAT | {"max_tokens": 3}),
    Case("length, streamed", "one two three four five six", CHAT | USAGE | {"max_tokens": 3}),
    Case("length in a character", "a 🙂", CHAT | {"max_tokens": len(ids("a 🙂")) - 1}),
    Case("length at the end itself", "one", CHAT | {"max_tokens": len(ids("one")) + 1}),
    Case("stop string", "one two STOP three", CHAT | {"stop": "STOP"}),
    Case("stop string, streamed", "one two STOP three", CHAT | USAGE | {"stop": ["never", "STOP"]}),
    Case("stop token", "one two", CHAT | {"stop_token_ids": [ids("one two")[-1]]}, ends=False),
    Case(
        "stop token, streamed", "one two", CHAT | USAGE | {"stop_token_ids": [ids("one two")[-1]]}, ends=False
    ),
    Case("past the end", "one" + EOS + "two", CHAT | {"ignore_eos": True, "max_tokens": 5}, ends=False),
    Case("log probabilities", "Hello", CHAT | {"logprobs": True, "temperature": 1}),
    Case("rivals", "Hello", CHAT | {"logprobs": True, "top_logprobs": 5, "temperature": 1}),
    Case("rivals, streamed", EMOJI, CHAT | USAGE | {"logprobs": True, "top_logprobs": 2, "temperature": 0}),
    Case("thought", "I think.</think>So.", THINK),
    Case("thought, streamed", "I think.</think>So.", THINK | USAGE),
    Case("effort", "Hm.</think>Yes.", THINK | {"reasoning_effort": 37}),
    Case("thought cut by length", "I think and think", THINK | USAGE | {"max_tokens": 4}),
    Case("thought within its budget", "I think.</think>So.", THINK | {"thinking_budget": 50}, num_parts=2),
    Case("form after a thought", 'Hm.</think>{"a":1}', THINK | JSON | {"messages": ASKS_JSON}, num_parts=2),
    Case(
        "form after a thought, streamed",
        'Hm.</think>{"a":1}',
        THINK | USAGE | JSON | {"messages": ASKS_JSON},
        2,
    ),
    Case("call", f"Let me see.{CALL}", CHAT | {"tools": TOOLS}),
    Case("call, streamed", f"Let me see.{CALL}", CHAT | USAGE | {"tools": TOOLS}),
    Case("two calls, streamed", CALLS, CHAT | STREAM | {"tools": TOOLS}, chunk_sizes=(1, 3, 2)),
    Case("call after a thought", f"Hm.</think>{CALL}", THINK | USAGE | {"tools": TOOLS}),
    Case("looks like a call", "if 2 < 3 and <tag> then </tag>", CHAT | STREAM | {"tools": TOOLS}),
    Case(
        "strict tool",
        call_markup(("strictly", {"city": ("Oslo", True)})),
        CHAT | {"tools": [strict_tool({"city": {"type": "string"}}, ["city"])]},
    ),
    Case("json", '{"a": [1, 2.5, null]}', CHAT | JSON | {"messages": ASKS_JSON}),
    Case("schema, streamed", '{"a": 1, "b": "x"}', CHAT | USAGE | SCHEMA | {"messages": ASKS_JSON}),
    Case("regex", "abbb", CHAT | {"response_format": {"type": "regex", "regex": "ab+"}}),
    Case(
        "every way to sample",
        "Hello",
        CHAT
        | {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.05,
            "seed": 2**62,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": {"5": 2.5, "7": -100},
        },
    ),
    Case("long history", "It is cold.", CHAT | {"messages": HISTORY, "tools": TOOLS}),
]

IMAGE = Case("image", "Red.", CHAT | {"messages": [{"role": "user", "content": [image_part()]}]})


def body(case: Case, model: str) -> dict[str, Any]:
    """The whole request."""
    return {"model": model, "messages": HELLO, **case.asks}
