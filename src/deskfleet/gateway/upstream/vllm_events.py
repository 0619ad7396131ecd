"""What vLLM answers: the events of its two ways in, as token chunks. Knows nothing of how it was asked or of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from msgspec import Struct

from deskfleet.endpoint import FinishReason, GenerateRequest, TokenChunk, TokenLogprob
from deskfleet.gateway.upstream.failures import UpstreamFailed
from deskfleet.gateway.upstream.retokenise import Retokeniser

_LOWEST_LOGPROB = -9999.0
"""What vLLM sends for a log probability that is not finite."""


class _Entry(Struct, gc=False):
    token_id: int
    logprob: float | None
    rank: int | None = None


class _Position(Struct, gc=False):
    token_id: int
    logprob: float | None
    top_logprobs: list[_Entry] = []


class _Logprobs(Struct, gc=False):
    content: list[_Position] | None = None


class _Choice(Struct, gc=False):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _CachedTokens(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Drafts(Struct):
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


class _Metrics(Struct):
    speculative_decoding: _Drafts | None = None


class _Event(Struct, gc=False):
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    metrics: _Metrics | None = None


class _TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = []


class _TextChoice(Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _TextLogprobs | None = None


class TextEvent(Struct):
    """One event, or the whole answer, of /v1/completions."""

    choices: list[_TextChoice]
    usage: _Usage | None = None
    metrics: _Metrics | None = None


_EVENTS = msgspec.json.Decoder(_Event)
_TEXT_EVENTS = msgspec.json.Decoder(TextEvent)


class _Ending:
    """What both ways in say of an answer's end, and of the prompt."""

    def __init__(self, request: GenerateRequest, url: str) -> None:
        self._num_top = request.sampling.logprobs
        self._url = url
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_cached_tokens = self._num_drafted = self._num_accepted = 0

    def finish(self, last: TokenChunk) -> TokenChunk:
        """Return the last chunk with the counts of the usage event, which comes after it."""
        if not (self._num_cached_tokens or self._num_drafted or self._num_accepted):
            return last  # it has none yet
        return replace(
            last,
            num_cached_tokens=self._num_cached_tokens,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
        )

    def _take_usage(self, usage: _Usage | None, metrics: _Metrics | None) -> None:
        if usage is not None and usage.prompt_tokens_details is not None:
            self._num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if metrics is not None and metrics.speculative_decoding is not None:
            self._num_drafted = metrics.speculative_decoding.num_draft_tokens
            self._num_accepted = metrics.speculative_decoding.num_accepted_draft_tokens

    def _reason(self, reason: str | None) -> FinishReason | None:
        match reason:
            case None:
                return None
            case "stop" | "repetition":
                return "stop"
            case "length":
                return "length"
            case _:
                raise UpstreamFailed(f"{self._url} ended a request with {reason!r}")

    def _finite(self, logprob: float | None) -> float:
        if logprob is None or not logprob > _LOWEST_LOGPROB:
            raise UpstreamFailed(f"{self._url} gave a log probability that is not finite")
        return logprob


class GenerateReader(_Ending):
    """Events of /inference/v1/generate."""

    def push(self, payload: bytes) -> TokenChunk | None:
        """Return what an event says (see EventReader)."""
        event = _EVENTS.decode(payload)
        if event.prompt_token_ids is not None:
            self._num_prompt_tokens = len(event.prompt_token_ids)
        if not event.choices:
            self._take_usage(event.usage, event.metrics)
            return None
        choice = event.choices[0]
        token_ids = tuple(choice.token_ids or ())
        return TokenChunk(
            token_ids,
            None if self._num_top is None else self._logprobs(choice, len(token_ids)),
            self._num_prompt_tokens,
            None if choice.finish_reason is None else self._reason(choice.finish_reason),
            stop_reason="repetition" if choice.finish_reason == "repetition" else None,
        )

    def _logprobs(self, choice: _Choice, num_tokens: int) -> tuple[TokenLogprob, ...]:
        content = (choice.logprobs.content if choice.logprobs is not None else None) or []
        if len(content) != num_tokens:
            raise UpstreamFailed(f"{self._url} sent {len(content)} log probabilities for {num_tokens} tokens")
        return tuple(
            TokenLogprob(position.token_id, self._finite(position.logprob), self._top(position))
            for position in content
        )

    def _top(self, position: _Position) -> tuple[tuple[int, float], ...]:
        """The likeliest, in order. vLLM lists the chosen one first, whether or not it is among them.

        If it is, its own rank is no place: of equal tokens it counts all. Its place is the one that is left free.
        """
        num_top = self._num_top or 0
        entries = position.top_logprobs
        others = sorted(
            (entry for entry in entries if entry.token_id != position.token_id),
            key=lambda entry: entry.rank or num_top + 1,
        )
        ordered = [(entry.token_id, self._floor(entry.logprob)) for entry in others]
        if len(others) < len(entries) <= num_top:
            ranks = {entry.rank for entry in others}
            place = next(rank for rank in range(1, num_top + 1) if rank not in ranks)
            ordered.insert(place - 1, (position.token_id, self._floor(position.logprob)))
        return tuple(ordered[:num_top])

    @staticmethod
    def _floor(logprob: float | None) -> float:
        return _LOWEST_LOGPROB if logprob is None else logprob


class CompletionsReader(_Ending):
    """Events of /v1/completions, with ids or, with a retokeniser, without."""

    def __init__(
        self, request: GenerateRequest, url: str, retokeniser: Retokeniser | None, eos_token_id: int
    ) -> None:
        super().__init__(request, url)
        self._retokeniser = retokeniser
        self._eos_token_id = eos_token_id

    def push(self, payload: bytes) -> TokenChunk | None:
        """Return what an event says (see EventReader)."""
        event = _TEXT_EVENTS.decode(payload)
        if not event.choices:
            self._take_usage(event.usage, event.metrics)
            return None
        choice = event.choices[0]
        token_ids = self._token_ids(choice)
        if not token_ids and choice.finish_reason is None:
            return None
        return TokenChunk(
            token_ids,
            None if self._num_top is None else self._logprobs(choice, token_ids),
            self._num_prompt_tokens,
            self._reason(choice.finish_reason),
            stop_reason="repetition" if choice.finish_reason == "repetition" else None,
        )

    def _token_ids(self, choice: _TextChoice) -> tuple[int, ...]:
        if self._retokeniser is None:
            if choice.token_ids is None:
                raise UpstreamFailed(f"{self._url} sent text without token ids")
            return tuple(choice.token_ids)
        token_ids = self._retokeniser.push(choice.text)
        if choice.finish_reason is not None:
            token_ids += self._retokeniser.finish()
        if choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str):
            # Text does not show the token that ended it: the one named, else the end of the sentence.
            token_ids += (self._eos_token_id if choice.stop_reason is None else choice.stop_reason,)
        return token_ids

    def _logprobs(self, choice: _TextChoice, token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        found = choice.logprobs or _TextLogprobs([], [])
        if len(found.token_logprobs) != len(token_ids):
            raise UpstreamFailed(
                f"{self._url} sent {len(found.token_logprobs)} log probabilities for {len(token_ids)} tokens"
            )
        tops = found.top_logprobs or [None] * len(token_ids)
        return tuple(
            TokenLogprob(token_id, self._finite(logprob), self._top(top, token_id))
            for token_id, logprob, top in zip(token_ids, found.token_logprobs, tops, strict=True)
        )

    def _top(self, top: dict[str, float] | None, chosen: int) -> tuple[tuple[int, float], ...]:
        """The likeliest, in order; keys are `token_id:N`. The chosen one comes first, among them or in addition."""
        num_top = self._num_top or 0
        pairs = [(int(key.removeprefix("token_id:")), logprob) for key, logprob in (top or {}).items()]
        if len(pairs) > num_top:
            pairs = [pair for pair in pairs if pair[0] != chosen]
        pairs.sort(key=lambda pair: -pair[1])
        return tuple(pairs[:num_top])


__all__ = ["CompletionsReader", "GenerateReader", "TextEvent"]
