"""Launch gate `facts`: what a model can only know by heart, which Engram rows hold."""

from __future__ import annotations

from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.family import of_each_family
from deskfleet.gates.subject import Subject, first_wrong

_NUM_FACTS = 8


async def _run(subject: Subject) -> Finding:
    puzzles = subject.questions.facts(_NUM_FACTS)
    answers = await subject.ask_all(puzzles, 4)
    right = sum(answered.is_right for answered in answers)
    share = right / len(answers)
    measured = f"{right} of {len(answers)} right"
    wrong = first_wrong(answers)
    unanswered = next((answered for answered in answers if answered.reply is None), None)
    if unanswered is not None:
        return unanswered.finding()
    if wrong is not None and share < subject.questions.least_facts:
        return failed(
            f"facts are wrong (if sums are right: Engram rows of another rank, table or format); {wrong.sentence}",
            measured=measured,
            share=share,
        )
    return passed(measured, share=share)


FACTS = Gate(
    name="facts",
    question="Are facts right that cannot be worked out?",
    protects="from Engram rows of the wrong rank, offset or number format: fluent text, wrong facts",
    threshold=f"share right: {of_each_family(lambda questions: f'{questions.least_facts:.0%}')}",
    when="launch",
    run=_run,
)

__all__ = ["FACTS"]
