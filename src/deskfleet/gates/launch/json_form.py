"""Launch gate `json`: an object of a schema, once enforced by the response format and once asked for in the prompt."""

from __future__ import annotations

from deskfleet.gates.contract import Finding, Gate, passed
from deskfleet.gates.questions import person
from deskfleet.gates.subject import Subject, first_wrong


async def _run(subject: Subject) -> Finding:
    puzzles = [person(subject.rng, subject.spare_tokens, enforced=enforced) for enforced in (True, False)]
    answers = await subject.ask_all(puzzles, len(puzzles))
    if (wrong := first_wrong(answers)) is not None:
        return wrong.finding()
    return passed("by response format and by prompt")


JSON = Gate(
    name="json",
    question="Does a schema come back as an object of it, with the right values?",
    protects="programs that parse answers",
    threshold="both objects equal what the text says",
    when="launch",
    run=_run,
)

__all__ = ["JSON"]
