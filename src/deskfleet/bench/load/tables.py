"""Load results as tables: cells for a terminal, Markdown in the columns of llama-benchy, sections of the docs.

Owns layouts. A row that was refused says so in place of numbers; labels follow the table, by kind, with their meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

from deskfleet.bench.load.caveats import KINDS
from deskfleet.bench.load.record import LoadResult
from deskfleet.bench.load.summary import Percentiles, RowSummary, summarise
from deskfleet.bench.result import Spread
from deskfleet.units import format_bytes

RATES_HEAD = ("what", "tok/s per stream", "tok/s aggregate", "prefill tok/s", "tokens a step", "memory low")
TIMES_HEAD = ("p50/p90/p99, ms", "TTFT", "TPOT", "ITL", "streams")
BENCHY_HEAD = (
    "model",
    "test",
    "t/s (total)",
    "t/s (req)",
    "peak t/s",
    "peak t/s (req)",
    "ttfr (ms)",
    "est_ppt (ms)",
    "e2e_ttft (ms)",
)


def rate_rows(result: LoadResult) -> list[list[str]]:
    """Return the cells under RATES_HEAD, a row for each set-up."""
    return [_rates(row) for row in summarise(result)]


def time_rows(result: LoadResult) -> list[list[str]]:
    """Return the cells under TIMES_HEAD, a row for each set-up that may be believed."""
    return [
        [row.setup.title, _times(row.ttft), _times(row.tpot), _times(row.itl), str(row.num_streams)]
        for row in summarise(result)
        if row.num_batches
    ]


def _rates(row: RowSummary) -> list[str]:
    if not row.num_batches:
        return [row.setup.title, f"refused: {', '.join(row.refusals)}", *[""] * (len(RATES_HEAD) - 2)]
    marks = "".join(f" [{kind}]" for kind in row.labels)
    lowest = min(row.low_water_bytes.values(), default=None)
    is_prefill = row.setup.part == "prefill"
    return [
        row.setup.title + marks,
        "" if is_prefill else _spread(row.stream_tok_s),
        "" if is_prefill else _spread(row.aggregate_tok_s),
        _spread(row.prefill_tok_s, 0),
        "" if is_prefill or row.tokens_per_step is None else f"{row.tokens_per_step:.2f}",
        "" if lowest is None else format_bytes(lowest),
    ]


def footnotes(result: LoadResult) -> list[str]:
    """Return a line for each refusal, label and thing left out."""
    lines = [f"refused, {setup.title}: {caveat.kind}: {caveat.text}" for setup, caveat in result.refusals()]
    lines += [f"[{label.kind}] {KINDS.get(label.kind, '')} ({label.text})" for label in result.all_labels()]
    return lines + [f"left out: {text}" for text in result.skipped]


def benchy_table(result: LoadResult) -> str:
    """Return a Markdown table with llama-benchy's columns: mean and standard deviation over runs.

    `pp` rows are cold prefill, `tg` rows decode; `@ d` is the context before, `(c)` the streams at the same time. ttfr,
    est_ppt and e2e_ttft are all our TTFT: an event without text is no response here, and the network's share, which
    est_ppt would take off, is not measured apart. Peaks need tokens by second, which usage does not tell: left empty.
    """
    model = str(result.conditions.get("model", ""))
    rows = []
    for row in summarise(result):
        setup = row.setup
        if not row.num_batches or setup.part == "mixed":
            continue
        streams = "" if setup.concurrency == 1 else f" (c{setup.concurrency})"
        ttft = "" if row.ttft is None else f"{row.ttft.mean_ms:.2f} ± {row.ttft.std_ms:.2f}"
        if setup.part == "prefill":
            label = f"pp{setup.context}{' filler' if setup.case == 'filler' else ''}"
            rates = _mean(result, row, "prefill_tok_s"), _mean(result, row, "prefill_tok_s")
            rows.append([model, label, *rates, "", "", ttft, ttft, ttft])
        else:
            depth = f" @ d{setup.context}" if setup.context else ""
            kind = "" if setup.sampling == "greedy" else f" {setup.sampling}"
            label = f"tg{result.conditions.get('num_tokens', '')}{depth}{streams} {setup.case}{kind}"
            rates = _mean(result, row, "aggregate_tok_s"), _stream_mean(result, row)
            rows.append([model, label, *rates, "", "", "", "", ""])
    lines = [_line(BENCHY_HEAD), "|:---|" + "---:|" * (len(BENCHY_HEAD) - 1), *map(_line, rows)]
    return "\n".join([*lines, "", *footnotes(result), ""])


def _mean(result: LoadResult, row: RowSummary, name: str) -> str:
    values = [value for batch in result.of(row.setup) if (value := getattr(batch, name)) is not None]
    return _plus_minus(values)


def _stream_mean(result: LoadResult, row: RowSummary) -> str:
    streams = [stream.tok_s for batch in result.of(row.setup) for stream in batch.answered]
    return _plus_minus([value for value in streams if value is not None])


def _plus_minus(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    return f"{mean:.2f} ± {deviation:.2f}"


def markdown_rows(result: LoadResult) -> list[str]:
    """Return the lines of the docs' tables."""
    lines = []
    for head, rows in ((RATES_HEAD, rate_rows(result)), (TIMES_HEAD, time_rows(result))):
        lines += [_line(head), "|---|" + "---:|" * (len(head) - 1), *map(_line, rows), ""]
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(spread: Spread | None, digits: int = 1) -> str:
    if spread is None:
        return ""
    if spread.num_samples == 1:
        return f"{spread.median:,.{digits}f}"
    return f"{spread.median:,.{digits}f} [{spread.least:,.{digits}f}-{spread.greatest:,.{digits}f}]"


def _times(times: Percentiles | None) -> str:
    return "" if times is None else f"{times.p50_ms:,.1f}/{times.p90_ms:,.1f}/{times.p99_ms:,.1f}"


__all__ = [
    "BENCHY_HEAD",
    "RATES_HEAD",
    "TIMES_HEAD",
    "benchy_table",
    "footnotes",
    "markdown_rows",
    "rate_rows",
    "time_rows",
]
