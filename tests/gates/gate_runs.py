"""What the tests of gates share: small limits, what an honest endpoint must be told, and a run against one endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from deskfleet.evaluation.questions import questions
from deskfleet.gates.contract import Gate, Limits
from deskfleet.gates.family import choose_family
from deskfleet.gates.registry import ACCEPTANCE_GATES, LAUNCH_GATES
from deskfleet.gates.report import Report
from deskfleet.gates.run import run_gates, select
from deskfleet.testing.honest import HonestEndpoint
from deskfleet.testing.oracle import Call, Said

ALL_GATES = (*LAUNCH_GATES, *ACCEPTANCE_GATES)
SMALL = Limits(
    soak_s=1.0,
    num_churned=16,
    freed_s=0.5,
    ladder_lengths=3,
    ladder_depths=3,
    num_questions=8,
    patience_s=20.0,
    seed=7,
)
"""Every gate in seconds, on an endpoint that answers at once."""

FACTS = {
    "What is the capital of Mongolia?": "Ulaanbaatar",
    "Who wrote the novel Moby-Dick?": "Herman Melville",
    "Which chemical element has the symbol W?": "Tungsten",
    "In which year did the Berlin Wall fall?": "1989",
    "What is the capital of Senegal?": "Dakar",
    "Who painted The Starry Night?": "Vincent van Gogh",
    "Which planet is the largest of the solar system?": "Jupiter",
    "What is the capital of Iceland?": "Reykjavik",
}
"""Facts that gates ask of big models. Written down once more: a test that read them there would agree with any."""

_TASKS = ("tool-calls", "parallel-calls", "spell", "count", "json", "json-format", "arithmetic", "facts")


@cache
def known() -> dict[str, Said]:
    """Right answers that cannot be worked out: facts, and the question sets of `deskfleet eval`."""
    brief = choose_family("any").brief
    found = {asked + brief: Said(answer) for asked, answer in FACTS.items()}
    for question in (each for task in _TASKS for each in questions(task, thinking=False, count=1000)):
        expected = question.expected
        if expected.kind == "calls":
            calls = tuple(Call(call.name, call.arguments) for call in expected.calls)
            found[question.text.strip()] = Said(calls=calls)
        else:
            text = json.dumps(expected.value) if expected.kind == "json" else expected.text
            found[question.text.strip()] = Said(text)
    return found


async def ask(
    kind: type[HonestEndpoint],
    gates: Sequence[Gate] | Sequence[str],
    *,
    family: str | None = None,
    endpoint: dict[str, Any] | None = None,
    rounds: int = 1,
    **limits: Any,
) -> Report:
    """Ask gates, given as such or by name, of an endpoint of one kind."""
    names = [gate if isinstance(gate, str) else gate.name for gate in gates]
    async with kind(known=known(), **(endpoint or {})) as server:
        return await run_gates(
            server.url,
            select(ALL_GATES, names, ()),
            replace(SMALL, **limits),
            verb="verify",
            family=family,
            rounds=rounds,
        )


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


async def deskfleet(*arguments: object) -> Done:
    """Run `deskfleet ARGUMENTS` in a process of its own, while this one serves."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DESKFLEET_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from deskfleet.cli import main; sys.exit(main())",
        *map(str, arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment | {"COLUMNS": "80", "NO_COLOR": "1"},
    )
    out, err = await process.communicate()
    return Done(process.returncode or 0, out.decode(), err.decode())
