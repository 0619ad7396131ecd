"""How long a request may take. Owns the limit; the queue (admission.py) and the engine keep it.

The time begins when the request has been read, so waiting for a turn is part of it.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from deskfleet.gateway.policies.contract import Draft, Watcher, with_generate
from deskfleet.gateway.policies.section import Seconds, Section


class DeadlineSettings(Section):
    """How long a request may take, waiting included."""

    enabled: bool = Field(default=True, description="Whether requests have a deadline.")
    timeout_s: Seconds | None = Field(
        default=None, gt=0, description="Seconds until a request is given up. None: never."
    )


class Deadlines:
    """The policy."""

    name = "deadlines"

    def __init__(self, settings: DeadlineSettings) -> None:
        self._settings = settings

    def shape(self, draft: Draft) -> Draft:
        """Return the request with its deadline, or an earlier one if it has that already."""
        limit = self._settings.timeout_s
        if not self._settings.enabled or limit is None:
            return draft
        own = draft.generate.timeout_s
        timeout_s = limit if own is None else min(own, limit)
        return with_generate(draft, replace(draft.generate, timeout_s=timeout_s))

    def watcher(self, draft: Draft) -> Watcher | None:
        """The queue and the engine look at the clock."""
        return None


__all__ = ["DeadlineSettings", "Deadlines"]
