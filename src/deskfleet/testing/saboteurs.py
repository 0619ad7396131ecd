"""Endpoints with one fault each, otherwise right: what a check of a server must find, or it checks nothing.

Owns the faults, each a few lines over `honest.HonestEndpoint`. They are taken from what went wrong in public reports:
fast, status 200, and wrong. Knows no gate; which of them must notice which fault stands in their tests.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from aiohttp import web

from deskfleet.testing.honest import Answer, Asked, HonestEndpoint, Token
from deskfleet.testing.oracle import Conversation, Said

_GERMAN = (
    "Es war einmal ein Fuchs, der jeden Morgen durch den Wald lief und nach seinen Freunden suchte, weil er sich sonst "
    "sehr einsam gefühlt hätte. Danach ging er wieder nach Hause und schlief."
)
_SALAD = "дом 的 river λόγος 山 nicht というか and бы 가 the"


class NanInMiddleLengths(HonestEndpoint):
    """Logits that are no numbers, for prompts of 65 to 4,000 tokens."""

    def _hits(self, asked: Asked) -> bool:
        return 65 <= asked.num_prompt_tokens <= 4000

    def said(self, asked: Asked) -> Said:
        return Said("!" * 40) if self._hits(asked) else super().said(asked)

    def logprob(self, asked: Asked, token: Token, index: int) -> float | None:
        return float("nan") if self._hits(asked) else super().logprob(asked, token, index)


class WrongFromThree(HonestEndpoint):
    """Wrong answers as soon as three requests run."""

    async def before(self, asked: Asked, num_cached: int) -> web.StreamResponse | None:
        await asyncio.sleep(0.02)
        return await super().before(asked, num_cached)

    def said(self, asked: Asked) -> Said:
        right = super().said(asked)
        return Said("The secret code of the red lamp is 7.") if self.num_running >= 3 else right


class ConstantToken(HonestEndpoint):
    """One token over and over."""

    def said(self, asked: Asked) -> Said:
        return Said(" the" * 40)


class WrongLanguage(HonestEndpoint):
    """Fluent text in another language; numbers and calls are right."""

    def said(self, asked: Asked) -> Said:
        right = super().said(asked)
        return Said(_GERMAN) if len(right.content.split()) > 20 and "," not in right.content[:6] else right


class WrongRows(HonestEndpoint):
    """Rank 1 reads rank 0's rows: what must be known by heart is wrong, everything else right."""

    def said(self, asked: Asked) -> Said:
        if asked.conversation.text.strip() in self.known:
            return Said("The capital of Mongolia is Bogota.")
        return super().said(asked)


class WarmSalad(HonestEndpoint):
    """Text salad when most of the prompt is found in the prefix cache."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._warm: dict[int, bool] = {}

    def cached_tokens(self, asked: Asked) -> int:
        found = super().cached_tokens(asked)
        self._warm[asked.number] = found > asked.num_prompt_tokens / 2
        return found

    def said(self, asked: Asked) -> Said:
        return Said(_SALAD) if self._warm.pop(asked.number, False) else super().said(asked)


class DroppedLastCall(HonestEndpoint):
    """The last of several tool calls vanishes."""

    def said(self, asked: Asked) -> Said:
        right = super().said(asked)
        return replace(right, calls=right.calls[:-1]) if len(right.calls) > 1 else right


class LeakedReasoning(HonestEndpoint):
    """Reasoning stands in the content, its end marked."""

    def said(self, asked: Asked) -> Said:
        right = super().said(asked)
        return (
            replace(right, content=f"{right.reasoning}</think>{right.content}", reasoning="")
            if right.reasoning
            else right
        )


class LeakedReasoningUnmarked(HonestEndpoint):
    """Reasoning stands in the content without a mark, and apart from it too."""

    def said(self, asked: Asked) -> Said:
        right = super().said(asked)
        return replace(right, content=f"{right.reasoning}\n{right.content}") if right.reasoning else right


class CountsChunks(HonestEndpoint):
    """Usage counts events of the stream as tokens."""

    def usage(self, asked: Asked, reply: Answer, num_events: int, num_cached: int) -> dict[str, Any]:
        return super().usage(asked, reply, num_events, num_cached) | {"completion_tokens": num_events}


class EmptyBody(HonestEndpoint):
    """Status 200 and nothing else."""

    async def before(self, asked: Asked, num_cached: int) -> web.StreamResponse | None:
        return web.Response(body=b"", content_type="text/event-stream")


class StaleModel(HonestEndpoint):
    """The list says one model, the answers come from the one before."""

    def served_model(self, asked: Asked) -> str:
        return "yesterday"


class RefusesHalfContext(HonestEndpoint):
    """max_model_len is half of what is listed; more is refused."""

    def longest(self) -> int:
        return self.max_model_len // 2


class TruncatesPrompts(HonestEndpoint):
    """Prompts are cut to half of the listed context, from their beginning, without a word."""

    def _read(self, body: Any) -> Asked:
        asked = super()._read(body)
        most = self.max_model_len // 2
        if len(asked.prompt) <= most:
            return asked
        messages = [dict(message) for message in asked.conversation.messages]
        messages[-1]["content"] = messages[-1]["content"][len(messages[-1]["content"]) // 2 :]
        conversation = Conversation(tuple(messages), asked.conversation.tools, asked.conversation.effort)
        return replace(asked, conversation=conversation, prompt=asked.prompt[-most:])


class Unrepeatable(HonestEndpoint):
    """Open text differs each time."""

    def said(self, asked: Asked) -> Said:
        right = super().said(asked)
        is_story = "story" in asked.conversation.text
        return Said(right.content.replace("Monday", f"Day {asked.number}")) if is_story else right


class Blind(HonestEndpoint):
    """Pictures take their tokens and are not looked at."""

    def said(self, asked: Asked) -> Said:
        return Said("The square is red.") if asked.conversation.images else super().said(asked)


class DropsImages(HonestEndpoint):
    """Pictures never reach the prompt."""

    def _read(self, body: Any) -> Asked:
        asked = super()._read(body)
        return replace(asked, prompt=tuple(piece for piece in asked.prompt if not piece.startswith("<image")))

    def said(self, asked: Asked) -> Said:
        return Said("The square is blue.") if asked.conversation.images else super().said(asked)


class EffortIgnored(HonestEndpoint):
    """The same reasoning at every effort."""

    def _read(self, body: Any) -> Asked:
        asked = super()._read(body)
        if asked.conversation.effort is None:
            return asked
        return replace(asked, conversation=replace(asked.conversation, effort=50))


class ThinksAnyway(HonestEndpoint):
    """Thinking cannot be switched off."""

    def _read(self, body: Any) -> Asked:
        asked = super()._read(body)
        effort = 10 if asked.conversation.effort is None else asked.conversation.effort
        return replace(asked, conversation=replace(asked.conversation, effort=effort))


class CutCallFinished(HonestEndpoint):
    """A tool call that was cut at max_tokens is said to be complete."""

    def cut(self, asked: Asked, tokens: tuple[Token, ...], max_tokens: int) -> Answer:
        reply = super().cut(asked, tokens, max_tokens)
        if reply.finish_reason == "length" and any(token.kind == "call" for token in reply.tokens):
            return replace(reply, finish_reason="tool_calls")
        return reply


class SlowerWithTime(HonestEndpoint):
    """Every answer is slower than the one before."""

    def pause_s(self, asked: Asked, index: int) -> float:
        return 0.002 * 1.2 ** min(asked.number, 24)


class FalseCacheHits(HonestEndpoint):
    """Part of every long prompt is taken from a cache that cannot have it."""

    def cached_tokens(self, asked: Asked) -> int:
        return max(super().cached_tokens(asked), 256 if asked.num_prompt_tokens > 500 else 0)


class NoLogprobs(HonestEndpoint):
    """Log probabilities are asked for and left out."""

    def logprob(self, asked: Asked, token: Token, index: int) -> float | None:
        return None


class StarvedStream(HonestEndpoint):
    """While three or more run, one of them hardly moves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._starved: int | None = None

    def pause_s(self, asked: Asked, index: int) -> float:
        if self._starved is None and self.num_running >= 3:
            self._starved = asked.number
        if self.num_running == 1 and asked.number != self._starved:
            self._starved = None
        return 0.03 if asked.number == self._starved else 0.001


class MixedStreams(HonestEndpoint):
    """Two requests that run together now and then get each other's answers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._latest: Said | None = None

    async def before(self, asked: Asked, num_cached: int) -> web.StreamResponse | None:
        await asyncio.sleep(0.002)
        return await super().before(asked, num_cached)

    def said(self, asked: Asked) -> Said:
        right, before = super().said(asked), self._latest
        self._latest = right
        mixes = self.num_running >= 4 and asked.number % 5 == 0 and before is not None
        return before if mixes and before is not None else right


class LosesTheMiddle(HonestEndpoint):
    """What stands in the middle of a text of more than 1,000 tokens is not read."""

    def _read(self, body: Any) -> Asked:
        asked = super()._read(body)
        if asked.num_prompt_tokens < 1000:
            return asked
        messages = [dict(message) for message in asked.conversation.messages]
        text = messages[-1]["content"]
        messages[-1]["content"] = text[: len(text) // 4] + text[-len(text) // 4 :]
        return replace(asked, conversation=replace(asked.conversation, messages=tuple(messages)))


class IgnoresSchema(HonestEndpoint):
    """A response format is taken and not obeyed."""

    def said(self, asked: Asked) -> Said:
        right = super().said(asked)
        return Said(f"Here it is: {right.content}") if right.content.startswith("{") else right


class DiesOnLongPrompt(HonestEndpoint):
    """A prompt of more than 1,500 tokens ends the engine; the port stays open."""

    dead = False

    async def before(self, asked: Asked, num_cached: int) -> web.StreamResponse | None:
        self.dead = self.dead or asked.num_prompt_tokens > 1500
        if self.dead:
            error = {"message": "rank 1 died", "type": "server_error", "code": "engine_failed"}
            return web.Response(body=json.dumps({"error": error}).encode(), status=503)
        return await super().before(asked, num_cached)


class KeepsPlaces(HonestEndpoint):
    """A client that leaves keeps its place, and every place that is kept makes all others slower."""

    kept = 0

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            return await super()._chat(request)
        except (asyncio.CancelledError, ConnectionResetError):
            self.kept += 1
            self.num_running += 1
            raise

    async def before(self, asked: Asked, num_cached: int) -> web.StreamResponse | None:
        await asyncio.sleep(0.02 * self.kept)
        return await super().before(asked, num_cached)


class Sluggish(HonestEndpoint):
    """The first token takes a minute."""

    async def before(self, asked: Asked, num_cached: int) -> web.StreamResponse | None:
        await asyncio.sleep(60)
        return await super().before(asked, num_cached)


class SlowAtDepth(HonestEndpoint):
    """Decoding behind a prompt of more than 1,000 tokens takes another, slow path."""

    def pause_s(self, asked: Asked, index: int) -> float:
        return 0.03 if asked.num_prompt_tokens > 1000 else 0.001


class OtherModel(HonestEndpoint):
    """Scores of a text are near those of the right model, and not them."""

    def score(self, piece: str, index: int) -> float:
        return super().score(piece, index) - 0.3 * (index % 3)


SABOTEURS: tuple[type[HonestEndpoint], ...] = (
    NanInMiddleLengths,
    WrongFromThree,
    ConstantToken,
    WrongLanguage,
    WrongRows,
    WarmSalad,
    DroppedLastCall,
    LeakedReasoning,
    LeakedReasoningUnmarked,
    CountsChunks,
    EmptyBody,
    StaleModel,
    RefusesHalfContext,
    TruncatesPrompts,
    Unrepeatable,
    Blind,
    DropsImages,
    EffortIgnored,
    ThinksAnyway,
    CutCallFinished,
    SlowerWithTime,
    FalseCacheHits,
    NoLogprobs,
    StarvedStream,
    MixedStreams,
    LosesTheMiddle,
    IgnoresSchema,
    DiesOnLongPrompt,
    KeepsPlaces,
    Sluggish,
    SlowAtDepth,
    OtherModel,
)
"""Every faulty endpoint."""

__all__ = ["SABOTEURS", *(kind.__name__ for kind in SABOTEURS)]
