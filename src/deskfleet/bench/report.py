"""Result files as Markdown. Owns the tables of docs/reference/benchmarks.md; knows nothing of measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from deskfleet.bench.gateway.page import render_gateway
from deskfleet.bench.gateway.record import GatewayResult, is_gateway_result
from deskfleet.bench.gpu_page import is_gpu_result, read_gpu_result, render_gpu
from deskfleet.bench.load.record import LoadResult, is_load_result
from deskfleet.bench.load.tables import footnotes, markdown_rows
from deskfleet.bench.provenance import Provenance
from deskfleet.bench.result import Result, Spread
from deskfleet.bench.serving import PREFIX, WaysResult, is_ways_result
from deskfleet.errors import ConfigError
from deskfleet.units import format_bytes

PROOF = "-engram-proof-"
"""What the names of files hold that `python -m deskfleet_vllm prove` and its like wrote."""


class _Proof(msgspec.Struct):
    """deskfleet_engram.proof writes it, where this package is not installed."""

    command: list[str]
    date: str
    python: str
    versions: dict[str, str]
    said: list[str]


def render_report(paths: Sequence[Path]) -> str:
    """Return a section with a table for each result file, latest first."""
    if not paths:
        return "Nothing has been measured yet.\n"
    ordered = sorted(paths, key=lambda path: path.name, reverse=True)
    return "\n".join(map(_render, ordered))


def _render(path: Path) -> str:
    if PROOF in path.name:
        return render_proof(path)
    if is_gateway_result(path):
        return render_gateway(path.name, GatewayResult.read(path))
    if is_gpu_result(path):
        return render_gpu(path.name, read_gpu_result(path))
    if is_load_result(path):
        return render_load(path.name, LoadResult.read(path))
    if is_ways_result(path):
        return render_ways(path.name, WaysResult.read(path))
    return render_result(path.name, Result.read(path))


def render_proof(path: Path) -> str:
    """Return what a proof of the engines' plug-ins said on a device. Raises ConfigError when the file is none."""
    try:
        proof = msgspec.json.decode(path.read_bytes(), type=_Proof)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the proof {path}: {error}") from error
    versions = ", ".join(f"{name} {version}" for name, version in proof.versions.items())
    return "\n".join(
        [
            f"## {path.stem}",
            "",
            f"`python3 -m {' '.join(proof.command)}` on {proof.date[:10]}, Python {proof.python}, {versions}. All "
            f"samples: `bench/results/{path.name}`. It said:",
            "",
            *(f"* {line}" for line in proof.said),
            "",
        ]
    )


def render_load(file_name: str, result: LoadResult) -> str:
    """Return the section of one endpoint: circumstances and conditions, rates, times, and every caveat."""
    conditions = "; ".join(
        f"{name} {value}" for name, value in result.conditions.items() if value is not None
    )
    return "\n".join(
        [
            f"## {file_name.removesuffix('.json')}",
            "",
            f"{_circumstances_of(result.provenance)}. Conditions: {conditions}. Median of "
            f"{result.settings.get('rounds')} rounds, least and greatest in brackets. Tokens are the server's usage, "
            f"checked against its own counters. Raw samples: `bench/results/{file_name}`.",
            "",
            *markdown_rows(result),
            *(f"* {line}" for line in footnotes(result)),
            "",
        ]
    )


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


def render_ways(file_name: str, result: WaysResult) -> str:
    """Return the section of one comparison: circumstances, then a row for each way."""
    settings = result.settings
    if result.name == PREFIX:
        what = (
            f"a prompt of {settings.get('num_prompt_tokens')} tokens and a new turn of "
            f"{settings.get('num_turn_tokens')}; but for the cold start, all before the turn is known from an earlier "
            "request. Of the tokens found, those of a lost window are run again: one window, or exactly, as many "
            "windows as the model has layers."
        )
    elif num_questions := settings.get("num_questions"):
        what = (
            f"one stream, {num_questions} questions in turn, one a round, answered greedily without thinking in at "
            f"most {settings.get('num_tokens')} tokens, the same in every row; prefill not counted. How many drafts "
            "are accepted is the checkpoint's doing and the text's: the brackets hold what differs between questions."
        )
    else:
        what = (
            f"one stream, {settings.get('num_prompt_tokens')} prompt tokens, {settings.get('num_tokens')} generated "
            "greedily, the same in every row; prefill not counted. How many drafts are accepted is the checkpoint's "
            "doing: one of `make-tiny` has its likeliest next tokens built in, for its drafts as well, and random "
            "weights without such habits get nearly none right. Neither says anything about a trained model."
        )
    head = ways_head(result)
    return "\n".join(
        [
            f"## {file_name.removesuffix('.json')}",
            "",
            f"{_place(result.provenance, settings)}; {what} Raw samples: `bench/results/{file_name}`.",
            "",
            _row(head),
            _row(["---", *["---:"] * (len(head) - 1)]),
            *(_row(row) for row in ways_rows(result)),
            "",
        ]
    )


def ways_head(result: WaysResult) -> list[str]:
    """Return the names of a comparison's columns."""
    if result.name == PREFIX:
        return ["", "first token, ms", "times as fast", "found", "run again"]
    return ["", "tok/s", "times as fast", "tokens a step", "drafts accepted"]


def ways_rows(result: WaysResult) -> list[list[str]]:
    """Return the cells of a comparison's rows, in the order in which the ways took turns."""
    rows = []
    for way in result.ways():
        if result.name == PREFIX:
            time = _cell(result.milliseconds(way), 0)
            counts = [f"{result.mean(way, name):.0f}" for name in ("num_prefix_hits", "num_replayed_tokens")]
        else:
            time = _cell(result.rate(way))
            steps, drafted, accepted = (
                result.mean(way, name) for name in ("num_verify_steps", "num_drafted", "num_accepted")
            )
            counts = [f"{1 + accepted / steps:.2f}", f"{accepted / drafted:.1%}"] if steps else ["1.00", "-"]
        rows.append([way, time, _cell(result.speedup(way), 2), *counts])
    return rows


def _circumstances(file_name: str, result: Result) -> str:
    settings = result.settings
    return (
        f"{_place(result.provenance, settings)}; {settings.get('num_prompt_tokens')} prompt tokens, "
        f"{settings.get('num_tokens')} generated per stream, prefill not counted. "
        f"Raw samples: `bench/results/{file_name}`."
    )


def _place(from_: Provenance, settings: Mapping[str, object]) -> str:
    """Where, when and on what a suite was run, and how its numbers are summed up."""
    return (
        f"{_circumstances_of(from_)}. Checkpoint `{settings.get('checkpoint')}`: "
        f"{settings.get('num_layers')} layers of width {settings.get('hidden_size')}. Median of "
        f"{settings.get('rounds')} interleaved rounds, least and greatest in brackets"
    )


def _circumstances_of(from_: Provenance) -> str:
    commit = "outside a checkout" if from_.commit is None else f"commit `{from_.commit[:12]}`"
    dirty = " with uncommitted changes" if from_.is_dirty else ""
    load = ", ".join(f"{value:.2f}" for value in from_.load_average)
    return (
        f"`{from_.command}` on {from_.date[:10]}, {commit}{dirty}. {from_.cpu}, {from_.num_cores} cores, "
        f"{format_bytes(from_.memory_bytes)} of memory, load average {load} at the start; Python {from_.python}, "
        f"torch {from_.packages.get('torch', 'absent')}"
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(spread: Spread, digits: int = 1) -> str:
    return f"{spread.median:.{digits}f} [{spread.least:.{digits}f}-{spread.greatest:.{digits}f}]"


__all__ = [
    "render_load",
    "render_proof",
    "render_report",
    "render_result",
    "render_ways",
    "ways_head",
    "ways_rows",
]
