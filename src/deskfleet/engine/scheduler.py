"""Who runs in the next step. Owns waiting and running requests and the cache slots; knows nothing of tensors.

First come, first served: running requests first (one token each while decoding, a chunk while in their
prompt), then waiting ones while slots and the token budget last. A request leaves the batch the moment it ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deskfleet.engine.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`num_tokens` next tokens of one request."""

    request: Request
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether every known token is computed afterwards, so that a next one can be sampled."""
        return self.num_tokens == self.request.num_uncomputed_tokens


class Scheduler:
    """Continuous batching over `max_num_seqs` slots and `max_num_batched_tokens` rows a step."""

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        """The live request of that id."""
        return next((r for r in (*self.running, *self.waiting) if r.request_id == request_id), None)

    def schedule(self) -> list[Scheduled]:
        """Choose the next step's work; admits waiting requests, one slot each."""
        budget = self.max_num_batched_tokens
        scheduled = []
        # Decoding rows first: a long prompt must not take the whole budget from streams that are under way.
        for request in sorted(self.running, key=lambda r: r.num_uncomputed_tokens > 1):
            count = min(request.num_uncomputed_tokens, budget)
            if count > 0:
                scheduled.append(Scheduled(request, count))
                budget -= count
        while self.waiting and self._free_slots and budget > 0:
            request = self.waiting.popleft()
            request.slot = self._free_slots.pop()
            request.status = RequestStatus.running
            self.running.append(request)
            count = min(request.num_uncomputed_tokens, budget)
            scheduled.append(Scheduled(request, count))
            budget -= count
        return scheduled

    def remove(self, request: Request) -> None:
        """Finish a request and free its slot."""
        if request.slot is not None:
            self._free_slots.append(request.slot)
            self.running.remove(request)
            request.slot = None
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status = RequestStatus.finished


__all__ = ["Scheduled", "Scheduler"]
