"""Launch gate `counting`: a long answer with one right continuation at every step."""

from __future__ import annotations

from deskfleet.gates.contract import Finding, Gate, passed
from deskfleet.gates.questions import hundred
from deskfleet.gates.subject import Subject


async def _run(subject: Subject) -> Finding:
    reply = await subject.right(hundred(subject.questions))
    rate = "" if reply.tok_s is None else f", {reply.tok_s:.0f} tok/s"
    return passed(f"1 to 100 in {reply.num_completion_tokens} tokens{rate}")


COUNTING = Gate(
    name="counting",
    question="Does the model count to 100?",
    protects="from caches that go wrong after a while, drafts that are kept though refused, loops",
    threshold="100 numbers in order",
    when="launch",
    run=_run,
)

__all__ = ["COUNTING"]
