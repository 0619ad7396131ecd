"""How long a thought may be. Owns the default, the limit, and the tokens that must be left for the answer.

The engine keeps the budget (`SamplingParams.thinking_budget`): after so many tokens it writes `</think>`. A request
that does not think is left alone.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from deskfleet.gateway.policies.contract import Draft, Watcher, with_sampling
from deskfleet.gateway.policies.counting import Counters, CounterSpec
from deskfleet.gateway.policies.section import Section

LOWERED = CounterSpec(
    "thinking_budget_lowered", "Requests whose thought may be shorter than they asked for or did not limit"
)
COUNTERS = (LOWERED,)


class ThinkingBudgetSettings(Section):
    """How many tokens a thought may have."""

    enabled: bool = Field(default=True, description="Whether thoughts are limited.")
    default_tokens: int | None = Field(
        default=None, ge=0, description="For requests that think and do not say. None: no limit."
    )
    max_tokens: int | None = Field(
        default=None, ge=0, description="No thought is longer, whatever the request asks for. None: no limit."
    )
    answer_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens of max_tokens that a thought leaves for the answer, at least; 0 leaves none.",
    )


class ThinkingBudget:
    """The policy. Comes after the completion cap, because a thought is part of max_tokens."""

    name = "thinking_budget"

    def __init__(self, settings: ThinkingBudgetSettings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters

    def shape(self, draft: Draft) -> Draft:
        """Return the request with its thinking budget decided."""
        settings = self._settings
        if not settings.enabled or not draft.wishes.thinking:
            return draft
        asked = draft.wishes.thinking_budget
        limits = [asked if asked is not None else settings.default_tokens, settings.max_tokens]
        if settings.answer_tokens:
            limits.append(max(draft.sampling.max_tokens - settings.answer_tokens, 0))
        budget = min((limit for limit in limits if limit is not None), default=None)
        if budget == draft.sampling.thinking_budget:
            return draft
        self._counters.add(LOWERED, draft.model_id, draft.caller.key)
        return with_sampling(draft, replace(draft.sampling, thinking_budget=budget))

    def watcher(self, draft: Draft) -> Watcher | None:
        """The engine keeps the budget."""
        return None


__all__ = ["COUNTERS", "ThinkingBudget", "ThinkingBudgetSettings"]
