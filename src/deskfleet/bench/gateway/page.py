"""A gateway measurement as cells and as a section of the docs. Owns the layout, knows nothing of measuring."""

from __future__ import annotations

from deskfleet.bench.gateway.record import GatewayResult, GatewayRow
from deskfleet.bench.result import Spread
from deskfleet.units import format_bytes

HEAD = (
    "load, way",
    "added TTFT p50, ms",
    "added TTFT p99, ms",
    "tokens/s",
    "of upstream's",
    "tokens per CPU s",
    "times LiteLLM's rate",
)


_STARTS = (
    "Starts spread: each stream asks in its own turn of a period that leaves a step between two answers, at any moment "
    "of a step. Otherwise a stream asks again when its answer has ended, which is at a step, with whoever else ends "
    "there and with everybody's tokens: what is added then is mostly the queue of all these on one core. Late: not "
    "sent in its turn, because the answer before had not ended. "
)


def cells(row: GatewayRow) -> list[str]:
    """Return a row's cells under HEAD."""
    failed = f" [{row.num_failed} failed]" if row.num_failed else ""
    failed += f" [cut {row.num_cut}x]" if row.num_cut else ""
    failed += f" [{row.num_late} late]" if row.num_late else ""
    return [
        f"{row.load.title}: {row.way}{failed}",
        _cell(row.added_p50_ms, 2),
        _cell(row.added_p99_ms, 2),
        _cell(row.tokens_per_s, 0),
        _cell(row.kept_rate, 3),
        _cell(row.tokens_per_cpu_s, 0),
        _cell(row.times_litellm, 1),
    ]


def render_gateway(file_name: str, result: GatewayResult) -> str:
    """Return one result's section: circumstances, rows, targets."""
    from_ = result.provenance
    commit = "outside a checkout" if from_.commit is None else f"commit `{from_.commit[:12]}`"
    dirty = " with uncommitted changes" if from_.is_dirty else ""
    load = ", ".join(f"{value:.2f}" for value in from_.load_average)
    rows = [f"| {' | '.join(cells(row))} |" for row in result.rows()]
    verdicts = [
        f"| {verdict.target} | {'' if verdict.measured is None else f'{verdict.measured:.2f}'} "
        f"| {verdict.reason if verdict.met is None else 'met' if verdict.met else 'missed'} |"
        for verdict in result.verdicts()
    ]
    return "\n".join(
        [
            f"## {file_name.removesuffix('.json')}",
            "",
            f"`{from_.command}` on {from_.date[:10]}, {commit}{dirty}. {from_.cpu}, {from_.num_cores} cores, "
            f"{format_bytes(from_.memory_bytes)} of memory, load average {load} at the start; Python {from_.python}, "
            f"aiohttp {from_.packages.get('aiohttp', 'absent')}, LiteLLM {result.settings.get('litellm') or 'absent'}. "
            f"Upstream, gateways and load generator in processes of their own on the same cores. A way that took "
            f"several times as long as the load was cut there, and what came until then counts. Median of "
            f"{result.settings.get('rounds')} rounds in which all ways take turns, least and greatest in brackets; "
            f"added is what a way has more than the upstream alone in the same round. "
            f"{_STARTS if any(load.starts == 'spread' for load in result.loads()) else ''}"
            f"Raw samples: `bench/results/{file_name}`.",
            "",
            f"| {' | '.join(HEAD)} |",
            "|---|" + "---:|" * (len(HEAD) - 1),
            *rows,
            "",
            "| target | measured | |",
            "|---|---:|---|",
            *verdicts,
            "",
            *(f"{way} was not measured: {reason}.\n" for way, reason in result.absent.items()),
        ]
    )


def _cell(spread: Spread | None, digits: int) -> str:
    if spread is None:
        return ""
    return f"{spread.median:,.{digits}f} [{spread.least:,.{digits}f}-{spread.greatest:,.{digits}f}]"


__all__ = ["HEAD", "cells", "render_gateway"]
