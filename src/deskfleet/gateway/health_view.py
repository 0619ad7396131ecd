"""Health as JSON: what GET /health/detail says and the dashboard shows. Owns the names of the fields."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from deskfleet.gateway.admission import AdmissionState
from deskfleet.gateway.watch import HealthWatch


def describe_health(watch: HealthWatch, gateway_queue: AdmissionState | None) -> dict[str, Any]:
    """Everything that is known of the engine's health; seconds and bytes, None where not known.

    `queue` is the engine's, `gateway_queue` of those that wait for their turn before it.
    """
    report = watch.report()
    verdict, stats, canary = report.verdict, report.stats, report.canary
    queue = None
    if stats is not None:
        queue = {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "oldest_wait_s": stats.oldest_wait_s,
        }
    return {
        "state": verdict.state,
        "can_answer": verdict.can_answer,
        "reasons": list(verdict.reasons),
        "state_s": report.state_s,
        "last_token_age_s": report.token_age_s,
        "queue": queue,
        "gateway_queue": None
        if gateway_queue is None
        else {
            "num_running": gateway_queue.num_running,
            "max_running": gateway_queue.max_running,
            "num_waiting": len(gateway_queue.waiting),
            "oldest_wait_s": max((each.waited_s for each in gateway_queue.waiting), default=0.0),
            "closed": gateway_queue.closed,
        },
        "ranks": [asdict(rank) for rank in report.ranks],
        "memory": {"host_available_bytes": report.available_bytes, "floor_bytes": watch.floor_bytes},
        "canary": {
            "num_good": report.num_canaries[0],
            "num_failed": report.num_canaries[1],
            "age_s": report.canary_age_s,
            "took_s": None if canary is None else canary.took_s,
            "error": None if canary is None else canary.error,
        },
        "events": [asdict(event) for event in reversed(watch.events)],
    }


__all__ = ["describe_health"]
