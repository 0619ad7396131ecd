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


class Place:
    """One counter with all its labels, for whoever adds to it again and again."""

    __slots__ = ("_labels", "_lock", "_values")

    def __init__(
        self, lock: threading.Lock, values: dict[tuple[str, ...], float], labels: tuple[str, ...]
    ) -> None:
        self._lock = lock
        self._values = values
        self._labels = labels

    def add(self, amount: float) -> None:
        """Add to it."""
        with self._lock:
            self._values[self._labels] = self._values.get(self._labels, 0.0) + amount


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
        self._check(spec, labels)
        place = (model_id, key or "", *labels)
        with self._lock:
            values = self._values.setdefault(spec, {})
            values[place] = values.get(place, 0.0) + amount

    def place(self, spec: CounterSpec, model_id: str, key: str | None, *labels: str) -> Place:
        """Return where `add` adds; nothing shows there until something has been added."""
        self._check(spec, labels)
        with self._lock:
            values = self._values.setdefault(spec, {})
        return Place(self._lock, values, (model_id, key or "", *labels))

    @staticmethod
    def _check(spec: CounterSpec, labels: tuple[str, ...]) -> None:
        if len(labels) != len(spec.labels):
            raise ValueError(f"{spec.name} has labels {spec.labels}, got {labels}")

    def read(self) -> Mapping[CounterSpec, Mapping[tuple[str, ...], float]]:
        """Return a copy of everything counted so far: labels' values (model, key, own ones) to number."""
        with self._lock:
            return {spec: dict(values) for spec, values in self._values.items() if values}

    def total(self, spec: CounterSpec) -> float:
        """Return the sum of one counter over all its labels."""
        with self._lock:
            return sum(self._values.get(spec, {}).values())


__all__ = ["CounterSpec", "Counters", "Place"]
