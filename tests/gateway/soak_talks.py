"""What is asked and answered in the soak: made of a kind and a number alone, so that both ends know it.

A request carries both in its prompt. The engine behind the gateway makes its script of them, the client what must come
of it. Every number makes another text: what were kept for each answer would be seen to grow.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chat_scripts import EOS, MODEL, call_markup, ids
from chat_scripts import text_of as decoded
from protocol_parsers import READERS, WHOLE_READERS, Outcome, events_of, request_body

from deskfleet.testing.scripted import Script

ROUTES = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "completions": "/v1/completions",
}
KINDS = ("plain", "characters", "thought", "call", "thought and call", "length", "stop", "loop")
"""What a model may do. `stop` is asked for in protocols that have stop strings and stops the answer there."""

_CALLS = ("call", "thought and call")
_THINKS = ("thought", "thought and call")
_STOPPING = ("chat", "completions")
_WORDS = (
    "the",
    "a",
    "of",
    "red",
    "tree",
    "stone",
    "river",
    "over",
    "under",
    "green",
    "and",
    "little",
    "bird",
    "sings",
    "at",
    "dawn",
    "while",
    "rain",
    "falls",
    "on",
    "tin",
)
_OTHERS = ("東京", "🙂", "👩‍🚀", "Größe", "naïve", "ﬁn", "Ω≈ç", "مرحبا")
_LOOPED = "I should look at this again from the start. "
_CHUNKS = ((1,), (2,), (3, 1, 2), (1, 4))
_ASKED = re.compile(r"soak (\d+) (\d+)")


@dataclass(frozen=True)
class Talk:
    """One request. `leaves_after` is how many reads a client waits for before it goes; None: it stays."""

    protocol: str
    kind: str
    number: int
    is_stream: bool
    leaves_after: int | None = None

    @property
    def text(self) -> str:
        """What the model writes."""
        return text_of(self.kind, self.number)

    @property
    def max_tokens(self) -> int | None:
        """Where the answer is cut."""
        return len(ids(self.text)) // 2 if self.kind == "length" else None

    def body(self) -> dict[str, Any]:
        """The request, as its protocol spells it."""
        prompt = f"soak {KINDS.index(self.kind)} {self.number}"
        body: dict[str, Any] = {"model": MODEL, "stream": self.is_stream}
        limit = self.max_tokens or 1500
        match self.protocol:
            case "completions":
                body |= {"prompt": prompt, "max_tokens": limit}
            case "responses":
                body |= {"input": prompt, "max_output_tokens": limit}
            case _:
                body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": limit}
        if self.kind == "stop" and self.protocol in _STOPPING:
            body["stop"] = ["never", "STOP"]
        if self.protocol == "completions":
            return body
        told = request_body(self.protocol, tools=self.kind in _CALLS, thinking=self.kind in _THINKS)
        return told | body

    def wrong(self, sent: bytes) -> str | None:
        """Say what is wrong with an answer, None when nothing is."""
        try:
            told = self._read(sent)
        except (AssertionError, KeyError, ValueError) as error:
            return f"{self}: not readable: {error!r}: {sent[-300:]!r}"
        if self.kind == "loop":
            return None if self._is_ended_loop(told) else f"{self}: the loop came as {told}"
        expected = self._expected()
        return None if told == expected else f"{self}: {told} and not {expected}"

    def _read(self, sent: bytes) -> Outcome:
        if not self.is_stream:
            answer = json.loads(sent)
            if self.protocol == "completions":
                (choice,) = answer["choices"]
                return Outcome("", choice["text"], (), choice["finish_reason"])
            return _with_parsed_calls(WHOLE_READERS[self.protocol](answer))
        if self.protocol in ("chat", "completions") and not sent.endswith(b"data: [DONE]\n\n"):
            raise ValueError("it does not end with [DONE]")
        events = list(events_of(sent))
        if self.protocol == "completions":
            choices = [choice for event in events for choice in event["choices"]]
            (ending,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
            return Outcome("", "".join(choice["text"] for choice in choices), (), ending)
        return _with_parsed_calls(READERS[self.protocol](events))

    def _expected(self) -> Outcome:
        text, thought, calls = self.text, "", ()
        if self.protocol == "completions":
            if self.kind == "stop":
                text = text.partition("STOP")[0]
            return self._as_far(Outcome("", text, (), "stop"))
        if self.kind in _THINKS:
            thought, _, text = text.partition("</think>")
        if self.kind in _CALLS:
            text = text.partition("\n\n<｜DSML｜ calls>")[0]
            calls = ((_call(self.number)[0], _sorted_json(_call(self.number)[1])),)
        if self.kind == "stop" and self.protocol in _STOPPING:
            text = text.partition("STOP")[0]
        return self._as_far(Outcome(thought, text, calls, "calls" if calls else "stop"))

    def _as_far(self, outcome: Outcome) -> Outcome:
        """The same as far as `max_tokens` allows; such texts have one byte a character, so any cut is whole."""
        if self.max_tokens is None:
            return outcome
        return Outcome("", decoded(ids(self.text)[: self.max_tokens]), (), "length")

    def _is_ended_loop(self, told: Outcome) -> bool:
        copies = told.text.count(_LOOPED.strip())
        begins = self.text.startswith(told.text)
        enough = 2 <= copies <= 8 if self.is_stream else copies == 1
        return begins and enough and told.ending == "stop" and not told.calls


def script_of(prompt: str, delay_s: float) -> Script:
    """What the engine says to a prompt, of which it may have seen anything: a canary's is one token."""
    asked = _ASKED.search(prompt)
    if asked is None:
        return Script(ids("ok" + EOS))
    kind, number = KINDS[int(asked[1])], int(asked[2])
    chunks = _CHUNKS[number % len(_CHUNKS)]
    return Script(ids(text_of(kind, number) + EOS), chunks, first_delay_s=delay_s, delay_s=delay_s)


def text_of(kind: str, number: int) -> str:
    """What the model writes in the `number`th answer of a kind."""
    chance = random.Random(f"{kind} {number}")
    said = " ".join(chance.choices(_WORDS, k=chance.randint(6, 18)))
    match kind:
        case "characters":
            return " ".join(chance.choices((*_WORDS, *_OTHERS), k=14))
        case "thought":
            return f"{said}.</think>{number} {said[:20]}"
        case "call":
            return f"I look.{_markup(number)}"
        case "thought and call":
            return f"{said}.</think>{_markup(number)}"
        case "stop":
            return f"{said} STOP and on {said[:20]}"
        case "loop":
            return f"{said}: {_LOOPED * 60}"
    return said


def _call(number: int) -> tuple[str, Mapping[str, Any]]:
    if number % 2:
        return "weather", {"city": f"a < {number} && b > c"}
    return "add", {"a": number, "b": -3}


def _markup(number: int) -> str:
    name, values = _call(number)
    return call_markup((name, {key: (str(value), isinstance(value, str)) for key, value in values.items()}))


def _with_parsed_calls(outcome: Outcome) -> Outcome:
    calls = tuple((name, _sorted_json(json.loads(arguments))) for name, arguments in outcome.calls)
    return Outcome(outcome.thought, outcome.text, calls, outcome.ending)


def _sorted_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


__all__ = ["KINDS", "ROUTES", "Talk", "script_of", "text_of"]
