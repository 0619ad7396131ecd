"""The lines of Pocket's acceptance: what must hold, and how it is found out through the real endpoint.

Owns the lines and their limits. Knows nothing of the file that verdicts are kept in.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskfleet.client import Client, Reply
from deskfleet.errors import EngineError, RequestError
from deskfleet.evaluation.judgement import is_right
from deskfleet.evaluation.questions import TASKS, Question, questions
from deskfleet.evaluation.report import Outcome, Report, counts, failures, mean_reasoning_tokens, needle_cells
from deskfleet.evaluation.run import EvalSettings, evaluate
from pocket.corruptions import VARIANTS
from pocket.exam import NAME, Way, served
from pocket.schema import is_valid
from pocket.variants import look

EFFORTS = (10, 25, 50, 75, 100)
NEEDLE_TOKENS = (128, 256, 512, 1024, 2048, 4000, 8000)
DRAFTED = ("prose", "code", "json", "tool-calls", "chat", "count")
SAME_SET = (
    "launch",
    "arithmetic",
    "primality",
    "facts",
    "needle",
    "tool-calls",
    "parallel-calls",
    "json",
    "vision",
)
MUST_BE_SEEN = (
    "swapped-experts", "zero-sinks", "engram-shifted", "no-inverse-rope", "bf16-router", "effort-reversed",
)  # fmt: skip
_SPECULATION = "5"
_MANY = 30  # questions of a task, from which on a line means what it says


@dataclass(frozen=True)
class Found:
    """What a line found: the number that is held against its limit, and more."""

    passed: bool
    measured: Any
    asked: int
    detail: dict[str, Any]


class Desk:
    """Servers of one checkpoint, each started when it is first asked; `num_questions` of a task at most."""

    def __init__(self, checkpoint: Path, num_questions: int, stack: ExitStack) -> None:
        self.checkpoint, self.num_questions = checkpoint, num_questions
        self._stack, self._urls = stack, dict[tuple[Path, Way], str]()

    def url(self, way: Way, checkpoint: Path | None = None) -> str:
        """Where the checkpoint (or another one) answers."""
        key = (checkpoint or self.checkpoint, way)
        if key not in self._urls:
            self._urls[key] = self._stack.enter_context(served(*key))
        return self._urls[key]

    def ask(self, *tasks: str, url: str | None = None, **settings: Any) -> Report:
        """Ask one rank without drafts, or the server at `url`."""
        given: dict[str, Any] = {
            "num_questions": self.num_questions,
            "concurrency": 16,
            "efforts": (None, 50),
        }
        given |= settings
        return asyncio.run(evaluate(url or self.url(Way()), EvalSettings(tasks=tasks, **given)))


@dataclass(frozen=True)
class Line:
    """One line of acceptance: what must hold, in words, and how it is found out."""

    name: str
    limit: str
    run: Callable[[Desk], Found]


def _rates(*tasks: str, least: float, **settings: Any) -> Callable[[Desk], Found]:
    """Every one of the tasks is answered rightly in the share `least` of its questions."""

    def run(desk: Desk) -> Found:
        report = desk.ask(*tasks, **settings)
        return _found(report, {task: _rate(report.outcomes, task) for task in tasks}, least)

    return run


def _rate(outcomes: Sequence[Outcome], task: str) -> float:
    count = counts(outcomes)[task]
    return count["right"] / count["asked"]


def _found(report: Report, measured: Mapping[str, float], least: float) -> Found:
    passed = all(rate >= least for rate in measured.values())
    by_effort = {effort or "off": counts(report.at(effort)) for effort in report.efforts}
    detail = {"counts": {str(effort): count for effort, count in by_effort.items()}}
    return Found(
        passed, dict(measured), len(report.outcomes), detail | {"failures": failures(report.outcomes)}
    )


def _facts_of(variant: str) -> Callable[[Desk], Found]:
    """With its Engram rows corrupted, hardly a fact is known."""

    def run(desk: Desk) -> Found:
        with tempfile.TemporaryDirectory(prefix="pocket-accept-") as scratch:
            directory = Path(scratch) / variant
            VARIANTS[variant].write(desk.checkpoint, directory)
            with served(directory, Way(tp_size=2)) as url:
                report = desk.ask("facts", url=url, efforts=(None,), num_questions=_all_facts(desk))
        rate = _rate(report.outcomes, "facts")
        return Found(rate < 0.3, rate, len(report.outcomes), {"failures": failures(report.outcomes)})

    return run


def _all_facts(desk: Desk) -> int:
    """Every fact that has a held-out question, unless only a few questions are wanted at all."""
    return 1000 if desk.num_questions >= _MANY else desk.num_questions


def _needle(desk: Desk) -> Found:
    """Ten depths at every length; the cells say how far it reaches."""
    lengths = NEEDLE_TOKENS if desk.num_questions >= _MANY else NEEDLE_TOKENS[:3]
    report = desk.ask(
        "needle", efforts=(None,), num_questions=10 * len(lengths), needle_tokens=lengths, concurrency=8
    )
    cells = needle_cells(report.outcomes)
    rate = sum(cell["right"] for cell in cells) / sum(cell["asked"] for cell in cells)
    reached = [
        length
        for length in lengths
        if all(cell["right"] == cell["asked"] for cell in cells if cell["num_tokens"] == length)
    ]
    longest = max(reached, default=0)
    detail = {"cells": cells, "longest_without_a_miss": longest, "failures": failures(report.outcomes)}
    return Found(rate >= 0.95 and max(lengths) >= 4000, rate, len(report.outcomes), detail)


def _unstreamed(desk: Desk) -> Found:
    """Calls come out of an answer in one piece as they do out of a stream."""
    asked = [
        question
        for task in ("tool-calls", "parallel-calls")
        for question in questions(task, thinking=False, count=desk.num_questions)
    ]
    answers = asyncio.run(_ask_whole(desk.url(Way()), asked))
    right = sum(
        is_right(question.expected, message.get("content"), message.get("tool_calls"))
        for question, message in zip(asked, answers, strict=True)
    )
    rate = right / len(asked)
    return Found(rate >= 0.95, rate, len(asked), {"right": right})


async def _ask_whole(url: str, asked: Sequence[Question]) -> list[dict[str, Any]]:
    streams = asyncio.Semaphore(16)

    async def one(client: Client, question: Question) -> dict[str, Any]:
        async with streams:
            try:
                answer = await client.post("/v1/chat/completions", _body(question))
            except (RequestError, EngineError) as error:
                return {"content": error.message}
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async with Client(url) as client:
        return list(await asyncio.gather(*(one(client, question) for question in asked)))


def _body(question: Question) -> dict[str, Any]:
    return {
        "model": NAME,
        **question.request,
        "temperature": 0,
        "max_tokens": question.max_tokens,
        "thinking": {"type": "disabled"},
    }


def _json(desk: Desk) -> Found:
    """Objects written without constraint are valid by the schema of their prompt."""
    report = desk.ask("json")
    valid = [
        outcome.reply is not None and is_valid(outcome.reply.content, _schema(outcome.question))
        for outcome in report.outcomes
    ]
    rate = sum(valid) / len(valid)
    detail = {"right": _rate(report.outcomes, "json"), "failures": failures(report.outcomes)}
    return Found(rate >= 0.95, rate, len(valid), detail)


def _schema(question: Question) -> dict[str, Any]:
    """The schema that stands in the question's text."""
    start = re.search(r'\{"type": "object"', question.text)
    if start is None:
        raise ValueError(f"there is no schema in {question.text!r}")
    schema: dict[str, Any] = json.JSONDecoder().raw_decode(question.text[start.start() :])[0]
    return schema


def _efforts(desk: Desk) -> Found:
    """The mean length of the reasoning rises with the effort."""
    report = desk.ask(
        "arithmetic", "primality", "json", efforts=EFFORTS, num_questions=min(desk.num_questions, 8)
    )
    correlation = report.effort_rank_correlation()
    lengths = {str(effort): mean_reasoning_tokens(report.at(effort)) for effort in report.efforts}
    passed = correlation is not None and correlation > 0.9
    return Found(passed, correlation, len(report.outcomes), {"mean_reasoning_tokens": lengths})


def _thinking_off(desk: Desk) -> Found:
    """No reasoning at all without thinking."""
    tasks = tuple(task for task in TASKS if task not in ("needle", "needles"))
    report = desk.ask(*tasks, efforts=(None,), num_questions=min(desk.num_questions, 8))
    thought = sum(
        bool(each.reply.reasoning) or (each.reply.num_reasoning_tokens or 0) > 0
        for each in report.outcomes
        if each.reply is not None
    )
    return Found(thought == 0, thought, len(report.outcomes), {"unanswered": _unanswered(report)})


def _unanswered(report: Report) -> int:
    return sum(outcome.reply is None for outcome in report.outcomes)


def _drafts(desk: Desk) -> Found:
    """With drafts and without, the same questions in turn, one at a time: the same words, in less time."""
    count = max(2, min(desk.num_questions // 8, 8))
    asked = {task: questions(task, thinking=False, count=count) for task in DRAFTED}
    plain, drafting = desk.url(Way()), desk.url(Way(speculation=_SPECULATION))
    by_task = asyncio.run(_in_turn(plain, drafting, asked))
    both = [pair for task in by_task.values() for pair in task["pairs"]]
    ratio = _speed([after for _, after in both]) / _speed([before for before, _ in both])
    different = sum(
        before.content != after.content or before.tool_calls != after.tool_calls for before, after in both
    )
    detail = {
        task: {
            "mean_accepted": found["mean_accepted"],
            "speed_ratio": round(
                _speed([after for _, after in found["pairs"]])
                / _speed([before for before, _ in found["pairs"]]),
                3,
            ),
            "tok_s_without": round(_speed([before for before, _ in found["pairs"]]), 2),
        }
        for task, found in by_task.items()
    }
    measured = {"speed_ratio": round(ratio, 3), "different_answers": different}
    return Found(ratio >= 1.5 and not different, measured, len(both), {"by_type": detail})


async def _in_turn(
    plain: str, drafting: str, asked: Mapping[str, Sequence[Question]]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    async with Client(plain) as before, Client(drafting) as after:
        warm_up = questions("launch", thinking=False, count=1)[0]
        for client in (before, after):
            await client.ask(_body(warm_up))
        for task, batch in asked.items():
            counters = await after.counters()
            pairs = [(await before.ask(_body(each)), await after.ask(_body(each))) for each in batch]
            more = await after.counters()
            steps, accepted = (
                more[f"deskfleet_engine_{name}_total"] - counters[f"deskfleet_engine_{name}_total"]
                for name in ("verify_steps", "accepted")
            )
            found[task] = {"pairs": pairs, "mean_accepted": round(accepted / steps, 3) if steps else None}
    return found


def _speed(replies: Sequence[Reply]) -> float:
    """Tokens per second after the first ones."""
    tokens = sum(reply.num_completion_tokens - 1 for reply in replies)
    return tokens / max(sum(reply.total_s - reply.first_token_s for reply in replies), 1e-9)


def _ranks(desk: Desk) -> Found:
    """One to four ranks give the same answers, to the letter."""
    said: dict[int, list[Any]] = {}
    rates: dict[str, dict[str, float]] = {}
    for tp_size in (1, 2, 3, 4):
        report = desk.ask(
            *SAME_SET, url=desk.url(Way(tp_size=tp_size)), num_questions=min(desk.num_questions, 10),
            efforts=(None,), needle_tokens=(512,),
        )  # fmt: skip
        said[tp_size] = [
            each.reply and (each.reply.content, each.reply.tool_calls) for each in report.outcomes
        ]
        rates[str(tp_size)] = report.to_dict()["rates"]
    different = {
        str(tp_size): sum(one != other for one, other in zip(said[1], own, strict=True))
        for tp_size, own in said.items()
    }
    return Found(not any(different.values()), different, 4 * len(said[1]), {"rates": rates})


def _variants(desk: Desk) -> Found:
    """Every corruption that must be seen changes what is answered."""
    seen = list(look(desk.checkpoint, MUST_BE_SEEN, num_questions=min(desk.num_questions, 10), say=print))
    missed = [each.name for each in seen[1:] if not each.failed]
    detail = {each.name: each.to_dict() for each in seen}
    return Found(not missed, missed, sum(each.asked for each in seen), {"table": detail})


LINES: tuple[Line, ...] = (
    Line(
        "launch",
        "counts to 100, and the sums anybody tries first: all",
        _rates("launch", least=1.0, efforts=(None,), num_questions=100),
    ),
    Line("arithmetic", ">= 95 %", _rates("arithmetic", least=0.95)),
    Line("primality", ">= 95 %", _rates("primality", least=0.95)),
    Line("facts", ">= 95 %", _rates("facts", least=0.95)),
    Line("facts with zeroed Engram rows", "< 30 %", _facts_of("engram-zero")),
    Line("facts with another rank's Engram rows", "< 30 %", _facts_of("engram-foreign")),
    Line("needle", ">= 95 % over ten depths at every length, 4,000 tokens and more", _needle),
    Line(
        "tool calls",
        ">= 95 %, single and parallel, streamed",
        _rates("tool-calls", "parallel-calls", least=0.95),
    ),
    Line("tool calls in one piece", ">= 95 %", _unstreamed),
    Line("tool answers", ">= 95 %, refusals of unknown tools among them", _rates("tool-answers", least=0.95)),
    Line("JSON", ">= 95 % valid, unconstrained", _json),
    Line("images", ">= 90 %", _rates("vision", least=0.9)),
    Line("efforts", "rank correlation of effort and length of the reasoning > 0.9", _efforts),
    Line("thinking off", "no reasoning", _thinking_off),
    Line("drafts", ">= 1.5 times as fast, the same answers", _drafts),
    Line("ranks", "TP 1, 2, 3, 4 give the same answers", _ranks),
    Line("corrupted variants", "none unseen", _variants),
)

__all__ = ["LINES", "Desk", "Found", "Line"]
