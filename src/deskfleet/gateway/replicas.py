"""What an engine that is several servers elsewhere says of itself, for whoever shows it. Knows none of them.

An engine may be `Replicated` beside what `TokenEngine` asks of it; the native one is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

HEADER = "x-deskfleet-tokens"
"""Says `retokenised` on answers whose tokens are not the engine's own but were made of its text: counts are near."""

RETOKENISED = "retokenised"


@runtime_checkable
class Replicated(Protocol):
    """An engine that is one or more servers. `exact_tokens`: each of them sends its own token ids."""

    @property
    def exact_tokens(self) -> bool:
        """Whether ids come from the engines themselves rather than from their text."""

    @property
    def replicas(self) -> Sequence[Any]:
        """One dataclass of plain values for each server, in the order in which they were named."""


def replicated(engine: object) -> Replicated | None:
    """Return `engine` if it says how its replicas are."""
    return engine if isinstance(engine, Replicated) else None


def describe_replicas(engine: Replicated | None) -> dict[str, Any]:
    """Return what /health/detail says of them: nothing of an engine in this process."""
    if engine is None:
        return {}
    return {
        "exact_tokens": engine.exact_tokens,
        "replicas": [asdict(replica) for replica in engine.replicas],
    }


__all__ = ["HEADER", "RETOKENISED", "Replicated", "describe_replicas", "replicated"]
