"""A gateway's door in somebody else's hand: nobody is let in, or somebody again, and requests are ended.

For whoever watches the machines that an engine runs on, and does not see its requests; who in turn is told when the
gateway gives the engine up and cannot end it. One `Intake` may be given to several gateways of one engine, one after
another; what is closed stays so in the next. What a closed door does to health and to requests is `watch.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Door(Protocol):
    """What a gateway does when it is told to."""

    def shut(self) -> None:
        """Let nobody in from now on: see `Intake.closed`."""

    def end_largest_prefill(self, sentence: str) -> bool:
        """End the request with the longest prompt of those without a token; whether there was one."""

    def end_all(self, sentence: str) -> int:
        """End every request that waits for the engine. Returns how many those are."""


class Intake:
    """Everything must be called on the gateways' event loop. `closed` is why nobody is let in, None while all are."""

    def __init__(self) -> None:
        self.closed: str | None = None
        self._doors: list[Door] = []
        self._given_up = asyncio.Event()
        self._sentence = ""

    @contextmanager
    def held(self, door: Door) -> Iterator[None]:
        """A gateway does as it is told for as long as the block runs."""
        self._doors.append(door)
        try:
            yield
        finally:
            self._doors.remove(door)

    def close(self, sentence: str) -> None:
        """Let nobody in, because of `sentence`."""
        self.closed = sentence
        for door in self._doors:
            door.shut()

    def open(self) -> None:
        """Let everybody in again: at the gateway's next look, within a second or so."""
        self.closed = None

    def end_largest_prefill(self, sentence: str) -> bool:
        """End the request with the longest prompt of those without a token, and say why; whether there was one."""
        return any(door.end_largest_prefill(sentence) for door in self._doors)

    def end_all(self, sentence: str) -> int:
        """End every request that waits for the engine, and say why. Returns how many those are."""
        return sum([door.end_all(sentence) for door in self._doors])

    def give_up(self, sentence: str) -> None:
        """A gateway says that the engine has answered nothing for too long, and that it cannot end it itself."""
        self._sentence = sentence
        self._given_up.set()

    async def given_up(self) -> str:
        """Wait until a gateway gives the engine up, and return its sentence."""
        await self._given_up.wait()
        return self._sentence


__all__ = ["Door", "Intake"]
