"""What an evaluation found: every answer's verdict, and the rates, lengths and speeds that follow.

Owns the shape of `deskfleet eval --json`. Knows no HTTP.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from deskfleet.client import Reply
from deskfleet.evaluation.judgement import is_right
from deskfleet.evaluation.questions import Question

Effort = int | None
"""1 to 100, or None: thinking off."""

_FAILURES_PER_TASK = 3
_QUESTION_CHARS = 300  # its end, where a long text asks
_ANSWER_CHARS = 1000


def effort_name(effort: Effort) -> str:
    """Return how an effort is written: `off` or its number."""
    return "off" if effort is None else str(effort)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One question asked once: the reply, or why there was none."""

    question: Question
    effort: Effort
    reply: Reply | None
    error: str | None = None

    @property
    def right(self) -> bool:
        """Whether there is an answer, and a right one where the question has one."""
        if self.reply is None:
            return False
        return is_right(self.question.expected, self.reply.content, self.reply.tool_calls)

    @property
    def judged(self) -> bool:
        """Whether there is a right answer."""
        return self.question.expected.kind != "none"


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts verified while a task was asked, over all its requests."""

    num_verify_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def mean_accepted(self) -> float:
        """Drafts accepted in a verification, on average; each gives one token more than that."""
        return self.num_accepted / self.num_verify_steps


@dataclass(frozen=True, slots=True)
class TaskRun:
    """One task: its outcomes, effort by effort, the seconds they took, and its drafts if the server speculates."""

    task: str
    outcomes: tuple[Outcome, ...]
    seconds_s: float
    drafts: Drafts | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole evaluation. `settings` say what was asked for."""

    url: str
    model_id: str
    settings: Mapping[str, Any]
    runs: tuple[TaskRun, ...]

    @property
    def outcomes(self) -> list[Outcome]:
        """Every question asked, in order."""
        return [outcome for run in self.runs for outcome in run.outcomes]

    @property
    def efforts(self) -> list[Effort]:
        """Every effort asked with, thinking off first."""
        return sorted({outcome.effort for outcome in self.outcomes}, key=lambda effort: effort or 0)

    def at(self, effort: Effort) -> list[Outcome]:
        """Return what was asked at one effort."""
        return [outcome for outcome in self.outcomes if outcome.effort == effort]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values. Rates are shares of the questions asked, answered or not."""
        return {
            "url": self.url,
            "model": self.model_id,
            "settings": dict(self.settings),
            "rates": rates(self.outcomes),
            "counts": counts(self.outcomes),
            "efforts": {
                effort_name(effort): {
                    "rates": rates(self.at(effort)),
                    "counts": counts(self.at(effort)),
                    "mean_reasoning_tokens": mean_reasoning_tokens(self.at(effort)),
                }
                for effort in self.efforts
            },
            "effort_rank_correlation": self.effort_rank_correlation(),
            "needle": needle_cells(self.outcomes),
            "drafts": {
                run.task: {
                    "num_verify_steps": run.drafts.num_verify_steps,
                    "num_drafted": run.drafts.num_drafted,
                    "num_accepted": run.drafts.num_accepted,
                    "mean_accepted": round(run.drafts.mean_accepted, 4),
                }
                for run in self.runs
                if run.drafts is not None
            }
            or None,
            "speed": {run.task: speed(run) for run in self.runs},
            "failures": failures(self.outcomes),
        }

    def effort_rank_correlation(self) -> float | None:
        """Return Spearman's correlation of effort and mean length of reasoning; None for fewer than three efforts."""
        means = {
            effort: mean_reasoning_tokens(self.at(effort)) for effort in self.efforts if effort is not None
        }
        pairs = [(effort, mean) for effort, mean in means.items() if mean is not None]
        return rank_correlation(pairs) if len(pairs) > 2 else None


def rates(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the share of right answers of every task that has any."""
    found = counts(outcome for outcome in outcomes if outcome.judged)
    return {task: count["right"] / count["asked"] for task, count in found.items()}


def counts(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Return how many questions of every task were asked, rightly answered, and not answered at all."""
    found: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        count = found.setdefault(outcome.question.task, Counter(asked=0, right=0, unanswered=0))
        count["asked"] += 1
        count["right"] += outcome.right and outcome.judged
        count["unanswered"] += outcome.reply is None
    return {task: dict(count) for task, count in found.items()}


def mean_reasoning_tokens(outcomes: Iterable[Outcome]) -> float | None:
    """Return the mean length of the reasoning, of the answers that say it; None when none does."""
    lengths = [
        outcome.reply.num_reasoning_tokens
        for outcome in outcomes
        if outcome.reply is not None and outcome.reply.num_reasoning_tokens is not None
    ]
    return round(statistics.fmean(lengths), 2) if lengths else None


def needle_cells(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return how many needles were found at every length and depth."""
    cells: dict[tuple[int, float], Counter[str]] = {}
    for outcome in outcomes:
        length, depth = outcome.question.num_tokens, outcome.question.depth
        if length is not None and depth is not None:
            cell = cells.setdefault((length, depth), Counter(asked=0, right=0))
            cell["asked"] += 1
            cell["right"] += outcome.right
    return [
        {"num_tokens": length, "depth": round(depth, 3), **cell}
        for (length, depth), cell in sorted(cells.items())
    ]


def speed(run: TaskRun) -> dict[str, float | None]:
    """Return tokens per second: of one stream after its first token (median), and of all together, prompts included."""
    replies = [outcome.reply for outcome in run.outcomes if outcome.reply is not None]
    of_streams = [reply.tok_s for reply in replies if reply.tok_s is not None]
    num_tokens = sum(reply.num_completion_tokens for reply in replies)
    return {
        "tok_s_per_stream": round(statistics.median(of_streams), 2) if of_streams else None,
        "tok_s_aggregate": round(num_tokens / run.seconds_s, 2) if run.seconds_s > 0 else None,
    }


def failures(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return the first few wrong answers of every task: question, answer, what was expected."""
    wrong = sorted(
        (outcome for outcome in outcomes if not outcome.right), key=lambda outcome: outcome.question.task
    )
    by_task = groupby(wrong, key=lambda outcome: outcome.question.task)
    return [_failure(outcome) for _, group in by_task for outcome in list(group)[:_FAILURES_PER_TASK]]


def _failure(outcome: Outcome) -> dict[str, Any]:
    question, reply = outcome.question, outcome.reply
    return {
        "task": question.task,
        "effort": effort_name(outcome.effort),
        "question": question.text[-_QUESTION_CHARS:],
        "expected": _expected(question),
        "answer": None if reply is None else _said(reply)[:_ANSWER_CHARS],
        "finish_reason": None if reply is None else reply.finish_reason,
        "error": outcome.error,
    }


def _expected(question: Question) -> str:
    expected = question.expected
    match expected.kind:
        case "json":
            return json.dumps(expected.value, ensure_ascii=False)
        case "calls":
            return " ".join(
                f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in expected.calls
            )
        case _:
            return expected.text


def _said(reply: Reply) -> str:
    calls = (f"{call['function']['name']}({call['function']['arguments']})" for call in reply.tool_calls)
    return " ".join(part for part in (reply.content, *calls) if part)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation of pairs; None when one side is the same everywhere."""
    first, second = (_ranks(side) for side in zip(*pairs, strict=True))
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return round(statistics.correlation(first, second), 4)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of every value; equal ones share the mean of theirs."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


__all__ = [
    "Drafts",
    "Effort",
    "Outcome",
    "Report",
    "TaskRun",
    "counts",
    "effort_name",
    "failures",
    "mean_reasoning_tokens",
    "needle_cells",
    "rank_correlation",
    "rates",
    "speed",
]
