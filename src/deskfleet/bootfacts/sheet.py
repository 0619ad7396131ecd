"""From logs to a sheet: asked beside granted, rank by rank, and what is not as it should be. Owns the judgement.

A grant that is less than what was asked is a clamp, whether or not the engine said so; another name than what was asked
for is a replacement; ranks that differ where they must not are told even when each got what it asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deskfleet.bootfacts.facts import SPECS, Fact, FactRow, FactSheet, Flag, Note, Value
from deskfleet.bootfacts.lines import engine_of, rank_in_name, read_lines
from deskfleet.units import format_bytes

_EXPECTED = {"vLLM": ("kv_tokens", "moe_backend"), "SGLang": ("kv_tokens",), "native": ("kv_bytes",)}
_READY = ("Application startup complete", "The server is fired up", "Uvicorn running", "answers at http")
_WEIGHTS_APART = 0.03
_PROCESS_OVER = 1.05


def read_sheet(logs: Mapping[str, str]) -> FactSheet:
    """Return the sheet of logs, by file name. A name such as `rank-1.log` tells whose lines they are.

    Raises ConfigError when they are of no engine known here, or of different ones.
    """
    engine = engine_of("\n".join(logs.values()))
    found = [
        each for name, text in logs.items() for each in read_lines(engine, text, rank=rank_in_name(name))
    ]
    facts = [each for each in found if isinstance(each, Fact)]
    notes = [each for each in found if isinstance(each, Note)]
    rows = tuple(row for key in SPECS if (row := _row(key, facts)) is not None)
    is_ready = any(mark in text for text in logs.values() for mark in _READY)
    return FactSheet(engine, rows, tuple(_flags(engine, rows, notes, is_ready=is_ready)))


def _row(key: str, facts: Sequence[Fact]) -> FactRow | None:
    own = [fact for fact in facts if fact.key == key]
    if not own:
        return None
    asked = [fact.value for fact in own if fact.side == "asked"]
    granted: dict[int | None, Value] = {}
    for fact in own:
        if fact.side == "granted":
            # Later lines know better: a pool is computed, then cut to whole pages. Names may be several: keep the last.
            granted[fact.rank] = fact.value
    return FactRow(key, asked[-1] if asked else None, dict(sorted(granted.items(), key=_rank_order)))


def _rank_order(entry: tuple[int | None, Value]) -> int:
    return -1 if entry[0] is None else entry[0]


def _flags(engine: str, rows: Sequence[FactRow], notes: Iterable[Note], *, is_ready: bool) -> Iterable[Flag]:
    for row in rows:
        yield from _against_asked(row)
        yield from _between_ranks(row)
    if is_ready:
        known = {row.key for row in rows if row.granted}
        for key in _EXPECTED[engine]:
            if key not in known:
                text = f"no line says {SPECS[key].meaning}, though the server is up"
                yield Flag("missing", key, text)
    seen = set()
    for note in notes:
        if note.text not in seen:
            seen.add(note.text)
            yield Flag("warned", "", note.text if note.rank is None else f"rank {note.rank}: {note.text}")


def _against_asked(row: FactRow) -> Iterable[Flag]:
    spec, asked = SPECS[row.key], row.asked
    if asked is None:
        return
    for rank, value in row.granted.items():
        whose = "" if rank is None else f"rank {rank}: "
        told = f"{whose}{spec.meaning}: asked {show(row.key, asked)}, granted {show(row.key, value)}"
        if row.key == "process_bytes":
            if isinstance(asked, int) and isinstance(value, int) and value > _PROCESS_OVER * asked:
                yield Flag(
                    "clamped", row.key, told.replace("asked", "planned").replace("granted", "measured")
                )
        elif isinstance(asked, int | float) and isinstance(value, int | float):
            if spec.least is not None and value < spec.least * asked:
                yield Flag("clamped", row.key, told)
        elif isinstance(asked, tuple) and isinstance(value, tuple):
            if missing := sorted(set(asked) - set(value)):
                yield Flag("clamped", row.key, f"{told}; without {', '.join(map(str, missing))}")
        elif isinstance(asked, str) and isinstance(value, str) and not _is_same_name(asked, value):
            yield Flag("replaced", row.key, told)


def _is_same_name(asked: str, value: str) -> bool:
    """`b12x` is granted as `B12X_MXFP4_MXFP8`: what is asked for may be the beginning of what is chosen."""
    one, other = (text.lower().replace("-", "_") for text in (asked, value))
    return one in other or other in one


def _between_ranks(row: FactRow) -> Iterable[Flag]:
    spec = SPECS[row.key]
    by_rank = {rank: value for rank, value in row.granted.items() if rank is not None}
    if len(by_rank) < 2:
        return
    values = list(by_rank.values())
    told = ", ".join(f"rank {rank} {show(row.key, value)}" for rank, value in by_rank.items())
    if spec.same_on_ranks and any(value != values[0] for value in values):
        amounts = [value for value in values if isinstance(value, int | float)]
        tail = ""
        if row.key in ("kv_bytes", "kv_tokens") and len(amounts) == len(values):
            tail = f"; the pool of all is as small as {show(row.key, min(amounts))}"
        yield Flag("ranks differ", row.key, f"{spec.meaning}: {told}{tail}")
    if row.key == "weight_bytes":
        amounts = [value for value in values if isinstance(value, int)]
        if min(amounts) < (1 - _WEIGHTS_APART) * max(amounts):
            yield Flag("ranks differ", row.key, f"{spec.meaning}: {told}")
    if row.key == "engram_rows" and len(set(values)) < len(values):
        yield Flag("ranks differ", row.key, f"{spec.meaning}: two ranks read the same rows: {told}")


def show(key: str, value: Value) -> str:
    """Return a value as people read it."""
    kind = SPECS[key].kind
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    if kind == "bytes" and isinstance(value, int):
        return format_bytes(value)
    if kind == "seconds":
        return f"{value:,.1f} s" if isinstance(value, int | float) else value
    return f"{value:,}" if isinstance(value, int) else str(value)


__all__ = ["read_sheet", "show"]
