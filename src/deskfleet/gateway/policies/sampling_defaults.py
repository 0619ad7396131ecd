"""How an answer is sampled where the client does not say. Owns the publisher's values; the client's always win.

Each value is looked at by itself: a request with a temperature and no top_p gets the default top_p. The defaults are
what the publisher suggests for the model, temperature 1.0 and top_p 0.95, with and without thinking. A thinking request
that asks for a temperature near 0 is served as asked, and counted: such requests are those that end in loops.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from pydantic import Field

from deskfleet.endpoint import SamplingParams
from deskfleet.gateway.policies.contract import Draft, Watcher, Wishes, with_sampling
from deskfleet.gateway.policies.counting import Counters, CounterSpec
from deskfleet.gateway.policies.section import Fraction, Section

NEAR_GREEDY = CounterSpec(
    "sampling_near_greedy",
    "Thinking requests that asked for a temperature of 0.3 or less, which invites loops",
)
COUNTERS = (NEAR_GREEDY,)

_NEAR_GREEDY = 0.3
_NUM_KEPT = 64
"""Most requests sample in one of a few ways: so many results are kept, since making one costs more than finding it."""


class SamplingValues(Section):
    """Values for requests that do not say. None leaves what the gateway would do."""

    temperature: Fraction | None = Field(default=None, ge=0, le=2, description="0 is greedy.")
    top_p: Fraction | None = Field(default=None, gt=0, le=1, description="1 is off.")
    top_k: int | None = Field(default=None, ge=0, description="0 is off.")
    min_p: Fraction | None = Field(default=None, ge=0, le=1, description="0 is off.")
    repetition_penalty: Fraction | None = Field(default=None, gt=0, le=2, description="1 is off.")
    presence_penalty: Fraction | None = Field(default=None, ge=-2, le=2, description="0 is off.")
    frequency_penalty: Fraction | None = Field(default=None, ge=-2, le=2, description="0 is off.")


_SUGGESTED = SamplingValues(temperature=1.0, top_p=0.95)


class SamplingDefaultsSettings(Section):
    """How answers are sampled where a request does not say."""

    enabled: bool = Field(default=True, description="Whether the values below are filled in.")
    thinking: SamplingValues = Field(default=_SUGGESTED, description="For requests that think.")
    not_thinking: SamplingValues = Field(default=_SUGGESTED, description="For requests that do not.")


class SamplingDefaults:
    """The policy."""

    name = "sampling_defaults"

    def __init__(self, settings: SamplingDefaultsSettings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._thinking, self._not_thinking = _said(settings.thinking), _said(settings.not_thinking)
        self._changed = lru_cache(_NUM_KEPT)(_changed)

    def shape(self, draft: Draft) -> Draft:
        """Return the request with every value filled in that the client left open."""
        if not self._settings.enabled:
            return draft
        wishes, sampling = draft.wishes, draft.generate.sampling
        if wishes.thinking and wishes.temperature is not None and wishes.temperature <= _NEAR_GREEDY:
            self._counters.add(NEAR_GREEDY, draft.model_id, draft.caller.key)
        chosen = [
            pair
            for pair in (self._thinking if wishes.thinking else self._not_thinking)
            if getattr(wishes, pair[0]) is None and getattr(sampling, pair[0]) != pair[1]
        ]
        if not chosen:
            return draft
        change = _changed if sampling.logit_bias or sampling.constraint is not None else self._changed
        return with_sampling(draft, change(sampling, tuple(chosen)))

    def watcher(self, draft: Draft) -> Watcher | None:
        """Nothing is sampled here."""
        return None


def _changed(sampling: SamplingParams, chosen: tuple[tuple[str, Any], ...]) -> SamplingParams:
    return replace(sampling, **dict(chosen))


def _said(values: SamplingValues) -> tuple[tuple[str, Any], ...]:
    """The values that are not None, by name."""
    return tuple((name, value) for name, value in values if value is not None)


_missing = set(SamplingValues.model_fields) - set(Wishes.__struct_fields__)
if _missing:
    raise TypeError(f"Wishes does not say whether a client sent {_missing}")


__all__ = ["COUNTERS", "SamplingDefaults", "SamplingDefaultsSettings", "SamplingValues"]
