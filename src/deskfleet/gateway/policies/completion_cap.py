"""How long an answer may be. Owns the default where the client says nothing, and the limit where it says much.

A client that sends no max_tokens would otherwise fill the whole context, for hours. What max_tokens becomes:

    not sent, or null       `default_max_tokens`, else the gateway's default; at most `max_tokens` and the room left
    1 and more              as asked, at most `max_tokens`; with that limit set also at most the room left
    more than the room      with `max_tokens` set: the room. Without it: refused (400, both numbers)
    0, negative, no number  refused (400), before this policy is asked
    two different spellings refused (400), before this policy is asked

What it has become is in the response header `x-deskfleet-max-tokens`.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from deskfleet.gateway.policies.contract import Draft, Watcher, with_sampling
from deskfleet.gateway.policies.counting import Counters, CounterSpec
from deskfleet.gateway.policies.section import Section

HEADER = "x-deskfleet-max-tokens"

DEFAULTED = CounterSpec("max_tokens_defaulted", "Requests without max_tokens that got the default")
CLAMPED = CounterSpec("max_tokens_clamped", "Requests whose max_tokens was lowered to the limit")
COUNTERS = (DEFAULTED, CLAMPED)


class CompletionCapSettings(Section):
    """How many tokens an answer may have."""

    enabled: bool = Field(default=True, description="Whether answers are limited.")
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="For requests that do not say. None: 8,192 without thinking, 65,536 with, 131,072 at effort max.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="No answer is longer, whatever it asks for. None: the context is the limit.",
    )


class CompletionCap:
    """The policy."""

    name = "completion_cap"

    def __init__(self, settings: CompletionCapSettings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters

    def shape(self, draft: Draft) -> Draft:
        """Return the request with its max_tokens decided."""
        settings = self._settings
        if not settings.enabled:
            return draft
        asked = draft.wishes.max_tokens
        current = draft.generate.sampling.max_tokens
        if asked == current and settings.max_tokens is None:
            return draft  # as most: asked for, and no limit but the context
        wanted = current if asked is None else asked
        if asked is None and settings.default_max_tokens is not None:
            wanted = settings.default_max_tokens
        if asked is None or settings.max_tokens is not None:
            room = draft.max_model_len - draft.num_prompt_tokens
            allowed = min(wanted, room, settings.max_tokens or wanted)
        else:
            allowed = wanted
        if asked is None:
            self._counters.add(DEFAULTED, draft.model_id, draft.caller.key)
        elif allowed < asked:
            self._counters.add(CLAMPED, draft.model_id, draft.caller.key)
        allowed = max(allowed, 1)
        if allowed == current:
            return draft
        return with_sampling(draft, replace(draft.sampling, max_tokens=allowed))

    def watcher(self, draft: Draft) -> Watcher | None:
        """Engines count tokens themselves."""
        return None


__all__ = ["COUNTERS", "HEADER", "CompletionCap", "CompletionCapSettings"]
