"""Launch gate `tool-calls`: one call, two in one answer, and the way back from a tool's result to a sentence."""

from __future__ import annotations

from deskfleet.gates.contract import Finding, Gate, passed
from deskfleet.gates.questions import timer, two_calls, weather_told
from deskfleet.gates.subject import Subject, first_wrong


async def _run(subject: Subject) -> Finding:
    spare, rng = subject.spare_tokens, subject.rng
    puzzles = [timer(rng.randint(2, 99), spare), two_calls(rng, spare), weather_told(rng, spare)]
    answers = await subject.ask_all(puzzles, len(puzzles))
    if (wrong := first_wrong(answers)) is not None:
        return wrong.finding()
    return passed("one call, two calls, and an answer from a result")


TOOL_CALLS = Gate(
    name="tool-calls",
    question="Do tool calls come back whole, all of them, and are their results read?",
    protects="agents, whose work ends where a call vanishes or its markup leaks into the text",
    threshold="every call with its arguments, finish reason tool_calls, no markup beside",
    when="launch",
    run=_run,
)

__all__ = ["TOOL_CALLS"]
