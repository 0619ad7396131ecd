"""Answers that were given side by side: whether company did them harm, or the model is wrong by itself.

Owns that distinction. What is wrong beside others is asked again alone: right then, it is the server's fault; wrong
then too, it is the model's, of which a family of questions allows a share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deskfleet.gates.contract import Cause
from deskfleet.gates.subject import Answered, Subject, cause_of

_ASKED_AGAIN = 12


@dataclass(frozen=True, slots=True)
class Company:
    """What is wrong with answers given side by side, None for nothing. `num_own` are errors of the model itself."""

    fault: str | None
    cause: Cause
    num_own: int


async def judge_company(subject: Subject, answers: Sequence[Answered]) -> Company:
    """Judge answers, all of them: whether one has another's value, then the wrong ones by asking them again alone."""
    wrong = [answered for answered in answers if not answered.is_right]
    crossed = next((found for each in wrong if (found := crossed_tag(each, answers)) is not None), None)
    return await judge_wrong(subject, wrong, num_wrong=len(wrong), num_asked=len(answers), crossed=crossed)


async def judge_wrong(
    subject: Subject, wrong: Sequence[Answered], *, num_wrong: int, num_asked: int, crossed: str | None
) -> Company:
    """Judge the first of the `num_wrong` answers among `num_asked`; `crossed` says that one carries another's value."""
    unanswered = [answered for answered in wrong if answered.reply is None]
    if unanswered:
        first = unanswered[0].sentence
        return Company(
            f"{len(unanswered)} of {num_asked} were not answered: {first}", cause_of(unanswered), 0
        )
    if crossed is not None:
        return Company(crossed, "answer", 0)
    again = [await subject.ask(answered.puzzle) for answered in wrong[:_ASKED_AGAIN]]
    by_company = [each for each, alone in zip(wrong, again, strict=False) if alone.is_right]
    if by_company:
        return Company(
            f"right alone and wrong beside others: {len(by_company)} of {num_asked}; {by_company[0].sentence}",
            "answer",
            num_wrong - len(by_company),
        )
    if num_wrong > subject.questions.error_share * num_asked:
        return Company(
            f"{num_wrong} of {num_asked} wrong, and wrong alone too: {wrong[0].sentence}",
            "answer",
            num_wrong,
        )
    return Company(None, "answer", num_wrong)


def crossed_tag(wrong: Answered, others: Iterable[Answered]) -> str | None:
    """Return a sentence when a wrong answer carries the value of another question of the same time; else None."""
    said = "" if wrong.reply is None else wrong.reply.content
    for other in others:
        tag = other.puzzle.tag
        meanwhile = other.began_s < wrong.ended_s and other.ended_s > wrong.began_s
        if tag is not None and tag != wrong.puzzle.tag and meanwhile and tag in said:
            return f"streams mixed up: {wrong.puzzle.label} is answered with {tag}, which belongs to another"
    return None


def own_errors(count: int) -> str:
    """Return the remark about errors of the model itself, empty for none."""
    return f", {count} wrong by the model itself" if count else ""


__all__ = ["Company", "crossed_tag", "judge_company", "judge_wrong", "own_errors"]
