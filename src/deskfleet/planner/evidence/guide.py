"""How to read a plan, as text: how lines add up, what differs by engine, the JSON of boots and corrections.

Owns the wording; names, sizes and defaults come from the types and rules that it describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

import msgspec

from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.calibration import BootFacts, Calibration, calibrate
from deskfleet.planner.cluster import GIB
from deskfleet.planner.engines.registry import rules_of
from deskfleet.planner.engines.stock import StockRules
from deskfleet.planner.evidence.layouts import EXL3_MODEL, USUAL, budget_of, plan_of
from deskfleet.planner.evidence.markdown import fenced, table
from deskfleet.planner.plan import DEVICE_FLOOR, UNIFIED_FLOOR, MemoryPlan

FACT_FIELDS: Mapping[str, str] = {
    "engine": "`native`, `vllm`, `sglang` or `exl3`, as in `--engine`",
    "engine_version": "as the engine reports it; boots of two versions do not make one correction",
    "node_kind": "name of the kind of machine, e.g. `spark`",
    "model": "name of the checkpoint, for the reader",
    "tp_size": "ranks of that boot",
    "rank": "the rank that was measured, from 0",
    "lines": "bytes by the name of a line, as `--explain` prints it, or of a whole group without its temporaries, e.g. "
    "`group:weights`; a name that the plan does not have is an error",
    "source": "where it was read, for messages",
}
CALIBRATION_FIELDS: Mapping[str, str] = {
    "engine": "the plans that it applies to: of this engine",
    "engine_version": "the version that was measured",
    "node_kind": "and on this kind of machine",
    "corrections": "bytes by line or group, measured less planned; of several boots the largest. A group's goes to its "
    "largest line",
    "sample": "the facts that it was made from",
}


EXAMPLE_WISHES = replace(USUAL, max_num_seqs=16)
EXAMPLE_COMMAND = (
    "deskfleet plan --engine sglang --nodes 4xspark --context 32768 --max-num-seqs 16 "
    "--calibrate facts.json --write-calibration corrections.json"
)
"""The plan of `EXAMPLE_WISHES`."""


def example_facts() -> BootFacts:
    """A boot of four Sparks as published: M-25, its GB read as GiB."""
    return BootFacts(
        engine="sglang",
        engine_version="0.5.23",
        node_kind="spark",
        model="v4.1-flash",
        tp_size=4,
        rank=0,
        lines={"group:weights": int(73.11 * GIB), "window pool": int(0.67 * GIB)},
        source="boot log of rank 0",
    )


def example_calibration() -> Calibration:
    """What follows from that boot."""
    return calibrate([(list(budget_of("sglang", 4, wishes=EXAMPLE_WISHES).lines), example_facts())])


def adding_up() -> str:
    """How lines make a verdict."""
    unified, device = UNIFIED_FLOOR, DEVICE_FLOOR
    return f"""## How lines add up

A plan gives each rank a list of lines. A line has a name, bytes, the formula behind them and a reason.

* `persistent` and `reserved` lines are held all the time, and add. `reserved` is what others hold: the system,
  a margin.
* `temporary` lines live in a phase: `load`, `prefill`, `decode` or `capture`. Lines of one phase add. Phases exclude
  each other, so only the largest counts.
* At rest, held lines and the rest floor must stay within the node's memory; at the worst moment, held lines, the
  largest phase and the peak floor. The smaller margin decides, and the plan names it: `at rest`, or the phase.
* The floors are {unified.rest_bytes / 1e9:.0f} GB and {unified.peak_bytes / GIB:g} GiB where CPU and accelerator share
  memory, {device.rest_bytes / GIB:g} GiB and {device.peak_bytes / GIB:g} GiB on a card with its own; never more than a
  twentieth of the memory at rest, and half of that at the peak.
* Each line says where its number comes from: `computed` from shapes, `measured`, `published` by others, `assumed`.
"""


def engines() -> str:
    """What the engines' rules differ in."""
    plans = {
        "vLLM": plan_of("vllm", 4),
        "SGLang": plan_of("sglang", 4),
        "EXL3": plan_of("exl3", 2, EXL3_MODEL),
    }
    rows = [_rules_row(plan) for plan in plans.values()]
    names = sorted({line.name for plan in plans.values() for line in _other_lines(plan)})
    shown = [[f"`{name}`", *_line_cells(name, list(plans.values()))] for name in names]
    return "\n".join(
        [
            "## What differs by engine\n",
            "How an engine cuts, what a token costs it and how it sizes its pool are its own rules,\none file each in "
            "`deskfleet.planner.engines`. Here on Sparks, with as many ranks as recipes use.\n",
            table(
                [
                    "engine",
                    "heads that do not divide",
                    "expert width",
                    "padded to",
                    "KV of a token, B",
                    "held by its processes",
                ],
                rows,
            ),
            "vLLM and EXL3 start only if `gpu-memory-utilization` x total is free; SGLang's pool is what "
            "`mem-fraction-static` leaves after\nloading. The native engine holds whole experts, FP4 as "
            "stored and FP8 as bf16; lines of its arrays are exact, its process\nwas measured.\n",
            "Lines beside weights, and where their numbers come from. `system` is a node's total less what is "
            "free before the start:\nthat of its kind, unless --available, a fleet file or a probe says otherwise.\n",
            table(["line", "group", "kind", *plans], shown),
        ]
    )


def _rules_row(plan: MemoryPlan) -> list[str]:
    rules = rules_of(plan.layout.engine)
    if not isinstance(rules, StockRules):
        raise TypeError(f"{rules.name} has no rules of cutting")
    cuts, runtime = rules.cut_rules(plan.cluster), rules.runtime
    held = runtime.context_bytes + runtime.process_bytes + runtime.graph_bytes + runtime.slack_bytes
    return [
        rules.title,
        "whole groups" if cuts.head_rule == "group" else f"next {cuts.head_rule}",
        "any" if cuts.width_multiple == 1 else f"a multiple of {cuts.width_multiple}",
        str(cuts.width_pad),
        f"{float(plan.kv_rate.bytes_per_token):,.2f}",
        f"{held / GIB:.1f} GiB, {runtime.source}",
    ]


def _other_lines(plan: MemoryPlan) -> list[BudgetLine]:
    return [line for line in plan.budgets[0].lines if line.group != "weights"]


def _line_cells(name: str, plans: Iterable[MemoryPlan]) -> list[str]:
    found = [{line.name: line for line in _other_lines(plan)}.get(name) for plan in plans]
    line = next(line for line in found if line is not None)
    kind = line.kind if line.phase is None else f"{line.kind}, {line.phase}"
    return [line.group, kind, *("" if each is None else each.basis for each in found)]


def boots() -> str:
    """The JSON of what a boot measured, and of corrections."""
    return "\n".join(
        [
            "## Facts of a boot\n",
            "What a boot measured, one file a rank; all fields are needed. Numbers are bytes.\n",
            _field_table(BootFacts, FACT_FIELDS),
            fenced(_json(example_facts()), "json"),
            f"Compare a plan with it, line by line, and keep the differences:\n\n    {EXAMPLE_COMMAND}\n",
            "Plan what was booted, with the context and requests of then, or lines differ for other reasons.\n",
            "## Corrections\n",
            "What `--write-calibration` writes and `--calibration` reads. Corrected lines count as measured.\n",
            _field_table(Calibration, CALIBRATION_FIELDS),
            fenced(_json(example_calibration()), "json"),
        ]
    )


def _field_table(kind: type[BootFacts] | type[Calibration], meanings: Mapping[str, str]) -> str:
    return table(["field", "meaning"], [[f"`{field.name}`", meanings[field.name]] for field in fields(kind)])


def _json(value: BootFacts | Calibration) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


__all__ = [
    "CALIBRATION_FIELDS",
    "FACT_FIELDS",
    "adding_up",
    "boots",
    "engines",
    "example_calibration",
    "example_facts",
]
