"""Which questions a model can be asked: those that every big model answers, or those that Pocket was trained for.

Owns the choice, its reason, and what differs: the facts, how much room an answer needs, which efforts are compared, how
many single questions may go wrong. Gates ask for questions and do not know which family they get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from deskfleet.errors import ConfigError
from deskfleet.evaluation.questions import questions
from deskfleet.gates.puzzle import Effort, Puzzle, expects, last_number, says
from deskfleet.model.embedded import POCKET

FamilyName = Literal["pocket", "general"]
FAMILIES: tuple[FamilyName, ...] = ("pocket", "general")


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """What differs between families. `reason` says why this one was chosen.

    `brief` is added to questions that are to be answered in a word. An answer may take `spare_tokens` more than a right
    one needs, and reasoning `reasoning_tokens`. `least_facts` is the share of facts that must be right, `least_quality`
    that of a suite, `error_share` the share of other questions that the model itself may get wrong; so many
    `second_tries` has a question whose kind it should master. At the high effort
    (of `high_efforts` the first that the server takes) at least `effort_ratio` times as many tokens of reasoning are
    expected as at the low one.
    """

    name: FamilyName
    reason: str
    brief: str
    spare_tokens: int
    reasoning_tokens: int
    low_effort: Effort
    high_efforts: tuple[Effort, ...]
    effort_ratio: float
    least_facts: float
    error_share: float
    second_tries: int
    least_quality: float

    def sums(self) -> tuple[Puzzle, ...]:
        """Return short questions whose prompts have at most 64 tokens."""
        return tuple(self.sum_of(left, sign, right) for left, sign, right in _SUMS)

    def sum_of(self, left: int, sign: str, right: int, *, effort: Effort = None) -> Puzzle:
        """Return a sum, a difference or a product."""
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        text = f"What is {left} {sign} {right}?{self.brief}"
        room = 24 + self.spare_tokens + (0 if effort is None else self.reasoning_tokens)
        return Puzzle(
            f"{left} {sign} {right}",
            {"messages": [{"role": "user", "content": text}]},
            last_number(value),
            room,
            effort,
        )

    def facts(self, count: int) -> tuple[Puzzle, ...]:
        """Return facts that cannot be worked out: of Pocket those that its Engram tables alone hold."""
        if self.name == POCKET:
            stored = questions("facts", thinking=False, count=count)
            return tuple(
                Puzzle(
                    _label(question.text),
                    question.request,
                    expects(question.expected),
                    question.max_tokens,
                )
                for question in stored
            )
        return tuple(
            Puzzle(
                _label(asked),
                {"messages": [{"role": "user", "content": asked + self.brief}]},
                says(answer),
                24 + self.spare_tokens,
            )
            for asked, answer in _FACTS[:count]
        )


_SUMS = ((2, "+", 2), (19, "+", 23), (7, "*", 8), (100, "-", 1), (12, "*", 12))

_FACTS = (
    ("What is the capital of Mongolia?", "Ulaanbaatar"),
    ("Who wrote the novel Moby-Dick?", "Melville"),
    ("Which chemical element has the symbol W?", "tungsten"),
    ("In which year did the Berlin Wall fall?", "1989"),
    ("What is the capital of Senegal?", "Dakar"),
    ("Who painted The Starry Night?", "Gogh"),
    ("Which planet is the largest of the solar system?", "Jupiter"),
    ("What is the capital of Iceland?", "Reykjavik"),
    ("Who developed the theory of general relativity?", "Einstein"),
    ("Which chemical element has the symbol Fe?", "iron"),
    ("In which year did the Titanic sink?", "1912"),
    ("What is the capital of Uruguay?", "Montevideo"),
)


def _label(text: str) -> str:
    return text.strip().splitlines()[-1]


def choose_family(model_id: str, wanted: str | None = None) -> QuestionSet:
    """Return the questions for a served model: those `wanted`, else by its name. Raises ConfigError for none such."""
    if wanted is not None and wanted not in FAMILIES:
        raise ConfigError(f"there are no questions {wanted!r}", hint=f"there are {', '.join(FAMILIES)}")
    is_pocket = POCKET in _words(model_id)
    name = wanted or (POCKET if is_pocket else "general")
    if wanted is not None:
        reason = "asked for"
    elif is_pocket:
        reason = f"the served model is called {model_id!r}"
    else:
        reason = f"the served model is called {model_id!r}, which is not Pocket"
    return _pocket(reason) if name == POCKET else _general(reason)


def _words(model_id: str) -> Sequence[str]:
    return model_id.lower().replace("/", "-").replace("_", "-").split("-")


def _pocket(reason: str) -> QuestionSet:
    return QuestionSet(
        name="pocket",
        reason=reason,
        brief="",
        spare_tokens=16,
        reasoning_tokens=320,
        low_effort=1,
        high_efforts=(50,),
        effort_ratio=1.3,
        least_facts=0.8,
        error_share=0.1,
        second_tries=1,
        least_quality=0.75,
    )


def _general(reason: str) -> QuestionSet:
    return QuestionSet(
        name="general",
        reason=reason,
        brief=" Answer with the result only.",
        spare_tokens=96,
        reasoning_tokens=8192,
        low_effort="low",
        high_efforts=("max", "high"),
        effort_ratio=1.1,
        least_facts=0.8,
        error_share=0.02,
        second_tries=0,
        least_quality=0.8,
    )


def of_each_family(value: Callable[[QuestionSet], str]) -> str:
    """Return what differs between families, for the threshold of a gate: `80% (Pocket), 60% (others)`."""
    return f"{value(_pocket(''))} (Pocket), {value(_general(''))} (others)"


__all__ = ["FAMILIES", "FamilyName", "QuestionSet", "choose_family", "of_each_family"]
