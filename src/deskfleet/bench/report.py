"""Result files as Markdown. Owns the tables of docs/reference/benchmarks.md; knows nothing of measuring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deskfleet.bench.result import Result, Spread
from deskfleet.units import format_bytes


def render_report(paths: Sequence[Path]) -> str:
    """Return a section with a table for each result file, latest first."""
    if not paths:
        return "Nothing has been measured yet.\n"
    ordered = sorted(paths, key=lambda path: path.name, reverse=True)
    return "\n".join(render_result(path.name, Result.read(path)) for path in ordered)


def render_result(file_name: str, result: Result) -> str:
    """Return one result's section: circumstances, then a row for each configuration."""
    rows = [
        f"| {tp_size} | {batch} | {_cell(result.aggregate(tp_size, batch))} "
        f"| {_cell(result.per_stream(tp_size, batch))} |"
        for tp_size, batch in result.configurations()
    ]
    return "\n".join(
        [
            f"## {file_name.removesuffix('.json')}",
            "",
            _circumstances(file_name, result),
            "",
            "| TP | batch | tok/s aggregate | tok/s per stream |",
            "|---:|---:|---:|---:|",
            *rows,
            "",
        ]
    )


def _circumstances(file_name: str, result: Result) -> str:
    from_, settings = result.provenance, result.settings
    commit = "outside a checkout" if from_.commit is None else f"commit `{from_.commit[:12]}`"
    dirty = " with uncommitted changes" if from_.is_dirty else ""
    load = ", ".join(f"{value:.2f}" for value in from_.load_average)
    return (
        f"`{from_.command}` on {from_.date[:10]}, {commit}{dirty}. {from_.cpu}, {from_.num_cores} cores, "
        f"{format_bytes(from_.memory_bytes)} of memory, load average {load} at the start; Python {from_.python}, "
        f"torch {from_.packages.get('torch', 'absent')}. Checkpoint `{settings.get('checkpoint')}`: "
        f"{settings.get('num_layers')} layers of width {settings.get('hidden_size')}. Median of "
        f"{settings.get('rounds')} interleaved rounds, least and greatest in brackets; "
        f"{settings.get('num_prompt_tokens')} prompt tokens, {settings.get('num_tokens')} generated per stream, "
        f"prefill not counted. Raw samples: `bench/results/{file_name}`."
    )


def _cell(spread: Spread) -> str:
    return f"{spread.median:.1f} [{spread.least:.1f}-{spread.greatest:.1f}]"


__all__ = ["render_report", "render_result"]
