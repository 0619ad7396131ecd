"""What the dashboard draws: one point per second of the last minutes, and figures of the latest requests.

Owns a ring of points and the arithmetic of rates. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deskfleet.endpoint import EngineStats
from deskfleet.gateway.health import HealthReport
from deskfleet.gateway.metrics import GatewayMetrics
from deskfleet.gateway.recent import RecentRequests, RequestRecord

_NUM_POINTS = 300
_NUM_LATEST = 100


@dataclass(frozen=True, slots=True)
class Point:
    """One second. `number` counts points; rates are per second, over all streams unless they say otherwise.

    `stream_tok_s` is that of one stream, over running ones that have two tokens or more, None without any.
    `num_waiting` are requests that wait in the gateway or in the engine.
    """

    number: int
    at: float
    tok_s: float
    prompt_tok_s: float
    stream_tok_s: float | None
    num_running: int
    num_waiting: int
    kv_usage: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures over the latest requests that are over (at most 100), and over all since start. None where unknown."""

    num_latest: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    stream_tok_s: float | None
    cache_hit_rate: float | None
    acceptance_rate: float | None
    tokens_per_verification: float | None
    num_prompt_tokens: int
    num_generated_tokens: int


class History:
    """Points, one for each look at the engine."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        recent: RecentRequests,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._recent = recent
        self._clock = clock
        self._points: deque[Point] = deque(maxlen=_NUM_POINTS)
        self._number = 0
        self._last: tuple[float, int, int] | None = None

    def add(self, report: HealthReport) -> None:
        """Take the point of a look."""
        now_s = self._clock()
        totals = (now_s, self._metrics.num_generated_tokens, self._metrics.num_prompt_tokens)
        before, self._last = self._last, totals
        elapsed_s = 0.0 if before is None else now_s - before[0]
        rates = (0.0, 0.0)
        if before is not None and elapsed_s > 0:
            rates = ((totals[1] - before[1]) / elapsed_s, (totals[2] - before[2]) / elapsed_s)
        stats = report.stats
        num_held = sum(record.given_s is None for record in self._recent.running())
        self._number += 1
        self._points.append(
            Point(
                number=self._number,
                at=time.time(),
                tok_s=rates[0],
                prompt_tok_s=rates[1],
                stream_tok_s=_stream_tok_s(self._recent.running()),
                num_running=self._metrics.num_running if stats is None else stats.num_running,
                num_waiting=num_held + (0 if stats is None else stats.num_waiting),
                kv_usage=_kv_usage(stats),
            )
        )

    def since(self, number: int) -> list[Point]:
        """Points after that of `number`; all that are kept when it is not known any more."""
        if not 0 < number <= self._number:
            return list(self._points)
        return [point for point in self._points if point.number > number]

    def summary(self, stats: EngineStats | None) -> Summary:
        """Figures of now."""
        ended = [record for record in self._recent.ended(_NUM_LATEST) if record.given_s is not None]
        ttfts = sorted(record.ttft_s for record in ended if record.ttft_s is not None)
        queried = 0 if stats is None else stats.num_prefix_queried
        drafted = 0 if stats is None else stats.num_drafted
        return Summary(
            num_latest=len(ended),
            ttft_p50_s=_quantile(ttfts, 0.5),
            ttft_p95_s=_quantile(ttfts, 0.95),
            stream_tok_s=_stream_tok_s(ended),
            cache_hit_rate=stats.num_prefix_hits / queried if stats is not None and queried else None,
            acceptance_rate=stats.num_accepted / drafted if stats is not None and drafted else None,
            tokens_per_verification=(
                stats.num_verify_tokens / stats.num_verify_steps
                if stats is not None and stats.num_verify_steps
                else None
            ),
            num_prompt_tokens=self._metrics.num_prompt_tokens,
            num_generated_tokens=self._metrics.num_generated_tokens,
        )


def _stream_tok_s(records: Iterable[RequestRecord]) -> float | None:
    """Tokens after the first over the time they took, all streams together: one that has just begun counts little."""
    begun = [record for record in records if record.decoding_s is not None]
    elapsed_s = sum(record.decoding_s or 0.0 for record in begun)
    return sum(record.num_generated_tokens - 1 for record in begun) / elapsed_s if begun else None


def _kv_usage(stats: EngineStats | None) -> float | None:
    if stats is None or not stats.num_blocks:
        return None
    return 1.0 - stats.num_free_blocks / stats.num_blocks


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all are not above."""
    if not ordered:
        return None
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


__all__ = ["History", "Point", "Summary"]
