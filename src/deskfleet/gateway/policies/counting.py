"""What policies count. Owns the numbers of one gateway, which outlive every reload of the settings.

Knows nothing of Prometheus: `Counters.read` is what a collector asks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class CounterSpec:
    """One number that only grows, there once: it is itself alone, which is quick to look up for every token.

    `name` goes into the metric's name, `labels` come after `model` and `key`.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()


class Counters:
    """Every policy's counters, by model and by the name of the caller's key. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[CounterSpec, dict[tuple[str, ...], float]] = {}

    def add(
        self, spec: CounterSpec, model_id: str, key: str | None, *labels: str, amount: float = 1.0
    ) -> None:
        """Add to the counter `spec`. `labels` are the values of its own labels, in their order.

        A caller without a key counts under the empty name.
        """
        if len(labels) != len(spec.labels):
            raise ValueError(f"{spec.name} has labels {spec.labels}, got {labels}")
        with self._lock:
            values = self._values.setdefault(spec, {})
            place = (model_id, key or "", *labels)
            values[place] = values.get(place, 0.0) + amount

    def read(self) -> Mapping[CounterSpec, Mapping[tuple[str, ...], float]]:
        """Return a copy of everything counted so far: labels' values (model, key, own ones) to number."""
        with self._lock:
            return {spec: dict(values) for spec, values in self._values.items()}

    def total(self, spec: CounterSpec) -> float:
        """Return the sum of one counter over all its labels."""
        with self._lock:
            return sum(self._values.get(spec, {}).values())


__all__ = ["CounterSpec", "Counters"]
