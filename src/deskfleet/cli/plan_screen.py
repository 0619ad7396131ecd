"""How a plan looks on a terminal of 80 columns: the verdict and why, bars, a table, answers, and ways out."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from deskfleet.cli.terminal import data_console
from deskfleet.planner.budget import BudgetLine, RankBudget
from deskfleet.planner.calibration import BootFacts, Comparison
from deskfleet.planner.changes import MOST_ADDED_NODES
from deskfleet.planner.engines.registry import rules_of
from deskfleet.planner.picture import GROUPS, bar_parts
from deskfleet.planner.plan import MemoryPlan
from deskfleet.planner.search import Search
from deskfleet.planner.speed import EngramTraffic, Speed, chunks_of, speed_of
from deskfleet.units import format_bytes

_GIB = 1 << 30
_BAR_WIDTH = 50
_MOST_BARS = 4
"""More ranks than these share a bar with those that are like them."""
_MOST_COLUMNS = 4
_LEGEND_INDENT = 7
_MARKS = {
    "system": ("s", "bright_black"),
    "runtime": ("r", "yellow"),
    "weights": ("W", "blue"),
    "engram": ("E", "magenta"),
    "kv": ("K", "green"),
    "peak": ("p", "dark_orange"),
    "floor": ("-", "bright_black"),
    "free": (".", "bright_black"),
    "missing": ("!", "red"),
}
_TITLES = {
    "system": "system, others",
    "runtime": "runtime",
    "weights": "weights",
    "engram": "Engram",
    "kv": "KV and windows",
}


def print_plan(found: Search, *, explain: bool, is_why_not: bool = False) -> None:
    """Print the plan on one screen.

    `is_why_not` puts the lines that weigh in place of the table. `explain` adds every line, every choice and what lost.
    """
    console, plan = data_console(), found.best
    title = f"{plan.inventory.name} on {plan.cluster.origin}, {rules_of(plan.layout.engine).title}: "
    verdict = Text("fits", style="bold green") if plan.fits else Text("does not fit", style="bold red")
    console.print(Text(title, style="bold") + verdict)
    for reason in _reasons(plan):
        _say(reason)
    _say(_layout_text(plan))
    console.print()
    _print_bars(plan)
    console.print()
    if is_why_not:
        _print_weighty_lines(plan)
    else:
        _print_table(plan)
    if explain:
        _print_all_lines(plan.tightest)
    if plan.fits:
        _print_answers(plan, explain=explain)
    _print_notes(plan, explain=explain)
    if not plan.fits:
        _print_changes(found)
    if explain:
        _print_losers(found)


def _layout_text(plan: MemoryPlan) -> str:
    layout = plan.layout
    parts = [f"tp {layout.tp_size}"]
    if layout.ep_size > 1:
        parts.append(f"ep {layout.ep_size}")
    if layout.dcp_size > 1:
        parts.append(f"dcp {layout.dcp_size}")
    if layout.engram != "none":
        parts.append(f"Engram on {layout.engram}")
    parts += [
        f"context {layout.max_model_len:,}",
        f"chunk {layout.chunk_tokens:,}",
        _counted(layout.max_num_seqs, "request"),
        _counted(layout.num_drafts, "draft") if layout.num_drafts else "no speculation",
    ]
    return ", ".join(parts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _reasons(plan: MemoryPlan) -> Iterator[str]:
    """Why the verdict is what it is, the reason first."""
    for refusal in plan.refusals:
        yield f"{refusal.rule}: {refusal.message}; {refusal.hint}"
    budget = plan.tightest
    at_rest = budget.binding == "at rest"
    moment = "at rest" if at_rest else f"at the worst moment of {budget.binding}"
    if budget.fits:
        otherwise = "memory would do: " if plan.refusals else ""
        yield f"{otherwise}{_gib(plan.margin_bytes)} GiB to spare above the floor on rank {budget.rank}, {moment}"
        return
    held = f"{_gib(budget.held_bytes)} GiB held all the time"
    peak = "" if at_rest else f" + {_gib(budget.peak_bytes - budget.held_bytes)} of {budget.binding}"
    floor = budget.floor.rest_bytes if at_rest else budget.floor.peak_bytes
    yield f"{_gib(-plan.margin_bytes)} GiB too little on rank {budget.rank} ({budget.node}), {moment}:"
    yield f"{held}{peak} + a floor of {_gib(floor)} exceed {_gib(budget.capacity_bytes)}"
    line = budget.binding_line
    of = "what is held" if line.phase is None else line.phase
    yield f"the largest part of {of}: {line.name}, {format_bytes(line.num_bytes)}"


def _alike(budgets: Sequence[RankBudget]) -> list[list[RankBudget]]:
    """Neighbours that show the same numbers."""
    return [list(ranks) for _, ranks in groupby(budgets, key=lambda budget: [*_cells(budget, budgets)])]


def _named(ranks: Sequence[RankBudget]) -> str:
    first, last = ranks[0].rank, ranks[-1].rank
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _print_bars(plan: MemoryPlan) -> None:
    console, budgets = data_console(), plan.budgets
    bars = [[budget] for budget in budgets] if len(budgets) <= _MOST_BARS else _alike(budgets)
    width = max(len(_named(ranks)) for ranks in bars) + 1
    for ranks in bars:
        console.print(Text(_named(ranks).ljust(width)) + _bar(ranks[0]), soft_wrap=True)
    shown = {name for budget in budgets for name, _ in bar_parts(budget)}
    legend = Text(" " * _LEGEND_INDENT)
    for name, (mark, style) in _MARKS.items():
        if name in shown:
            legend.append(mark, style=style).append(f" {name}  ")
    legend.rstrip()
    console.print(legend, soft_wrap=True)


def _bar(budget: RankBudget) -> Text:
    """One rank's memory as marks, each part by its share of what there is or of what would be needed."""
    whole = max(budget.capacity_bytes, budget.peak_bytes)
    text, done, drawn = Text(), 0, 0
    for name, size in bar_parts(budget):
        done += size
        mark, style = _MARKS[name]
        end = round(_BAR_WIDTH * done / whole)
        text.append(mark * (end - drawn), style=style)
        drawn = end
    return text.append(f" {_gib(budget.peak_bytes)} of {_gib(budget.capacity_bytes)}")


def _cells(budget: RankBudget, budgets: Sequence[RankBudget]) -> Iterator[tuple[str, str]]:
    """The rows of a table with this rank's numbers; rows that are nothing on all ranks are left out."""
    for group in GROUPS:
        if any(each.group_bytes(group) for each in budgets):
            yield _TITLES[group], _gib(budget.group_bytes(group))
    yield "held all the time", _gib(budget.held_bytes)
    for phase in sorted({each.worst_phase for each in budgets if each.worst_phase is not None}):
        yield f"besides, {phase}", _gib(budget.phase_bytes.get(phase, 0))
    yield "floor at rest", _gib(budget.floor.rest_bytes)
    yield "floor at the worst moment", _gib(budget.floor.peak_bytes)
    yield "there is", _gib(budget.capacity_bytes)
    yield "to spare", _gib(budget.margin_bytes)


def _print_table(plan: MemoryPlan) -> None:
    """Groups down, ranks across; ranks that are alike share a column."""
    columns = _alike(plan.budgets)
    shown = columns[:_MOST_COLUMNS]
    cells = [list(_cells(ranks[0], plan.budgets)) for ranks in shown]
    _print_row("GiB", [_named(ranks) for ranks in shown], style="bold")
    for rows in zip(*cells, strict=True):
        name = rows[0][0]
        is_total = name in ("held all the time", "to spare")
        _print_row(name, [value for _, value in rows], style="bold" if is_total else "")
    if len(columns) > len(shown):
        _say(f"ranks {columns[len(shown)][0].rank} and above are in --json")


def _print_row(name: str, values: Sequence[str], *, style: str = "") -> None:
    data_console().print(
        Text(f"{name:<26}" + "".join(f"{value:>12}" for value in values), style=style), soft_wrap=True
    )


def _print_weighty_lines(plan: MemoryPlan) -> None:
    """The sum that decides: its lines of a hundredth of the memory and more, the others as one."""
    budget = plan.tightest
    lines = [line for line in budget.lines if line.phase is None or line.phase == budget.binding]
    weighty = [line for line in lines if line.num_bytes >= budget.capacity_bytes // 100]
    total_bytes = sum(line.num_bytes for line in lines)
    rest_bytes = total_bytes - sum(line.num_bytes for line in weighty)
    _print_lines(weighty)
    _say(f"{format_bytes(rest_bytes):>10}  {len(lines) - len(weighty)} smaller lines (see --explain)", 14)
    floor = budget.floor.rest_bytes if budget.binding == "at rest" else budget.floor.peak_bytes
    _say(f"{format_bytes(floor):>10}  floor: {budget.floor.reason}", 14)
    _say(f"{format_bytes(total_bytes + floor):>10}  in all, of {format_bytes(budget.capacity_bytes)}", 14)


def _print_all_lines(budget: RankBudget) -> None:
    console = data_console()
    console.print()
    console.print(Text(f"rank {budget.rank}, line by line", style="bold"))
    _print_lines(budget.lines)


def _print_lines(lines: Sequence[BudgetLine]) -> None:
    for line in sorted(lines, key=lambda line: -line.num_bytes):
        phase = "" if line.phase is None else f" during {line.phase}"
        size = f"{format_bytes(line.num_bytes):>10}"
        _say(f"{size}  {line.name}{phase}: {line.formula} ({line.basis}); {line.reason}", 14)


def _print_answers(plan: MemoryPlan, *, explain: bool) -> None:
    layout = plan.layout
    speed = speed_of(plan.inventory, layout, plan.cluster.kind)
    rows = {
        "KV": f"{float(plan.kv_rate.bytes_per_token):,.2f} B a token and rank ({plan.kv_rate.basis}); room for "
        f"{plan.max_kv_tokens:,} tokens, {plan.max_kv_tokens // layout.max_model_len:,} of full length",
        "context": f"{plan.largest_context:,} at most, in chunks of {plan.largest_context_chunk:,}",
        "loading": f"about {_duration(speed.load_s)} from local NVMe",
    }
    if plan.boot is not None:
        rows["boot line"] = plan.boot.line
    rows |= _speed_rows(speed)
    if explain:
        runs = chunks_of(layout)
        rows["chunks of a prompt"] = ", ".join(f"{run.num_chunks:,} of {run.chunk_tokens:,}" for run in runs)
        rows["captured batches"] = ", ".join(map(str, speed.capture_sizes)) + " rows"
    width = max(map(len, rows)) + 2
    data_console().print()
    for name, value in rows.items():
        _say(f"{name:<{width}}{value}", 2 + width)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{max(1, round(seconds))} s"


def _speed_rows(speed: Speed) -> dict[str, str]:
    rows = {}
    if speed.decode:
        points = ", ".join(
            f"{point.num_requests}: {point.aggregate_tokens_per_s:,.0f}" for point in speed.decode
        )
        rows["decode, at best"] = (
            f"step {1000 * speed.decode[0].step_s:.1f} ms; aggregate tok/s by requests {points} "
            f"(at {speed.accepted_per_step:.1f} tokens a step)"
        )
    if speed.prefill_tokens_per_s is not None:
        rows["prefill, at best"] = f"{speed.prefill_tokens_per_s:,.0f} tok/s"
    if speed.engram is not None:
        rows["Engram reads"] = _traffic_text(speed.engram)
    return rows


def _traffic_text(traffic: EngramTraffic) -> str:
    hidden = "hidden behind computing" if traffic.is_chunk_hidden else "not hidden behind computing"
    return (
        f"{traffic.rows_per_step} a step, {1000 * traffic.disk_s_per_step:.1f} ms; "
        f"{traffic.rows_per_chunk:,} a chunk, {traffic.disk_s_per_chunk:.2f} s, {hidden}"
    )


def _print_notes(plan: MemoryPlan, *, explain: bool) -> None:
    notes = [f"{_named([plan.tightest])} by source: {_basis_text(plan.tightest)}"]
    if plan.fits or explain:
        notes += [f"needs: {need}" for need in plan.needs]
    if explain:
        notes += [f"estimated: {each}" for each in plan.inventory.derived]
        notes += [f"chosen: {choice.name} {choice.value}: {choice.reason}" for choice in plan.choices]
        notes.append(f"machines: {plan.cluster.kind.source}")
    elif plan.inventory.derived:
        subjects = ", ".join(each.partition(":")[0] for each in plan.inventory.derived)
        notes.append(f"estimated: {subjects} (--explain says how)")
    notes += list(_calibration_notes(plan))
    data_console().print()
    for note in notes:
        _say(note, 4)


def _basis_text(budget: RankBudget) -> str:
    """How much of the worst moment is known in which way."""
    sizes: Counter[str] = Counter()
    for line in budget.lines:
        if line.phase is None or line.phase == budget.worst_phase:
            sizes[line.basis] += line.num_bytes
    return ", ".join(f"{_gib(size)} GiB {basis}" for basis, size in sizes.most_common())


def _calibration_notes(plan: MemoryPlan) -> Iterator[str]:
    for each in plan.calibrations:
        of = f"{each.engine} {each.engine_version} on {each.node_kind}"
        if (each.engine, each.node_kind) == (plan.layout.engine, plan.cluster.kind.name):
            yield f"calibration: measured on {_counted(len(each.sample), 'boot')} of {of}"
        else:
            yield f"calibration: not used, it is of {of}"


def _print_changes(found: Search) -> None:
    console = data_console()
    console.print()
    if not found.changes:
        tried = f"of the wishes, up to {MOST_ADDED_NODES} more nodes, a smaller checkpoint"
        _say(f"no single change would fit: {tried} were tried", 2, 0)
        return
    console.print(Text("what would fit:", style="bold"))
    for number, change in enumerate(found.changes, 1):
        _say(f"{number}. {change.title}   {change.flags}", 5)
        _say(change.cost, 5, 5)


def _print_losers(found: Search) -> None:
    if not found.losers:
        return
    console = data_console()
    console.print()
    console.print(Text("other layouts:", style="bold"))
    for each in found.losers:
        name: str = each.engine
        if each.plan is not None:
            name += f", tp {each.plan.layout.tp_size}, ep {each.plan.layout.ep_size}"
        _say(f"{name}: {each.verdict}", 4)


def print_calibration(compared: Sequence[tuple[BootFacts, Sequence[Comparison]]]) -> None:
    """Print planned and measured bytes of every line that boots measured."""
    console = data_console()
    for facts, rows in compared:
        _say(f"{facts.source}: {facts.model}, {facts.engine} {facts.engine_version}, rank {facts.rank}", 2, 0)
        header = f"{'line':<30}{'planned':>14}{'measured':>14}{'difference':>14}"
        console.print(Text(header, style="bold"), soft_wrap=True)
        for row in rows:
            planned, measured = format_bytes(row.planned_bytes), format_bytes(row.measured_bytes)
            console.print(
                f"{row.name:<30}{planned:>14}{measured:>14}{row.difference:>+14.1%}", soft_wrap=True
            )


def _say(text: str, hanging: int = 2, indent: int = 2) -> None:
    """Print a paragraph from column `indent` on, its further lines from column `hanging`; no line ends with spaces."""
    console = data_console()
    first, rest = " " * indent, " " * hanging
    console.print(
        textwrap.fill(
            text, console.width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        ),
        soft_wrap=True,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"


__all__ = ["print_calibration", "print_plan"]
