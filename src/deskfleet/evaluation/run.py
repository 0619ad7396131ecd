"""Asks the question sets: task by task, effort by effort, some questions at the same time. Greedy decoding throughout.

Owns the order and what counts as having asked. Prints nothing; the caller is told of every batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deskfleet.client import Client, ServerGone
from deskfleet.errors import ConfigError, EngineError, RequestError
from deskfleet.evaluation.questions import NEEDLE_TOKENS, TASKS, Question, questions
from deskfleet.evaluation.report import Drafts, Effort, Outcome, Report, TaskRun, effort_name


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """What to ask. `num_questions` is the most of a task at one effort; `max_tokens` None is what each question needs.

    `seed` chooses the questions where there are more. Raises ConfigError for what cannot be asked.
    """

    tasks: tuple[str, ...] = TASKS
    efforts: tuple[Effort, ...] = (None, 50, 75)
    num_questions: int = 20
    seed: int = 0
    concurrency: int = 4
    max_tokens: int | None = None
    needle_tokens: tuple[int, ...] = NEEDLE_TOKENS

    def __post_init__(self) -> None:
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise ConfigError(f"there is no task {unknown[0]!r}", hint=f"tasks are {', '.join(TASKS)}")
        for effort in self.efforts:
            if effort is not None and not 1 <= effort <= 100:
                raise ConfigError(f"effort {effort} is not between 1 and 100")
        for name in ("tasks", "efforts", "needle_tokens"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} {values} must be different, and at least one")
        counts = {"num_questions": self.num_questions, "concurrency": self.concurrency}
        counts |= {"max_tokens": 1 if self.max_tokens is None else self.max_tokens}
        for name, count in {**counts, "needle_tokens": min(self.needle_tokens)}.items():
            if count < 1:
                raise ConfigError(f"{name} {count} is less than 1")


@dataclass(frozen=True, slots=True)
class Batch:
    """The questions of one task at one effort, asked and judged; `position` of `total` such batches."""

    task: str
    effort: Effort
    outcomes: tuple[Outcome, ...]
    seconds_s: float
    position: int
    total: int

    @property
    def num_right(self) -> int | None:
        """How many were answered rightly; None for a task without right answers."""
        judged = [outcome for outcome in self.outcomes if outcome.judged]
        return sum(outcome.right for outcome in judged) if judged else None

    @property
    def num_unanswered(self) -> int:
        """How many were not answered."""
        return sum(outcome.reply is None for outcome in self.outcomes)


def _ignore(batch: Batch) -> None:
    """Take a batch and do nothing."""


async def evaluate(
    url: str, settings: EvalSettings, *, on_batch: Callable[[Batch], None] = _ignore
) -> Report:
    """Ask the server at `url` and return what came back.

    A question that is refused, or whose answer cannot be read, is a wrong one. Raises EngineError when nobody answers
    there, and when the engine ends on the way; what the first question met when not a single one was answered;
    ConfigError when the settings leave nothing to ask.
    """
    asked = what_is_asked(settings)
    async with Client(url) as client:
        examination = _Examination(client, await client.model_id(), settings, on_batch, total=len(asked))
        runs = [
            await examination.run(task, {key[1]: batch for key, batch in asked.items() if key[0] == task})
            for task in settings.tasks
            if any(key[0] == task for key in asked)
        ]
    if not examination.any_answered:
        raise examination.first_error or EngineError(f"{url} answered nothing")
    return Report(client.url, examination.model_id, as_values(settings), tuple(runs))


def what_is_asked(settings: EvalSettings) -> dict[tuple[str, Effort], list[Question]]:
    """Return the questions of every task at every effort, of those that have any.

    Raises ConfigError when the settings leave nothing to ask.
    """
    asked = {
        (task, effort): questions(
            task,
            thinking=effort is not None,
            count=settings.num_questions,
            seed=settings.seed,
            needle_tokens=settings.needle_tokens,
        )
        for task in settings.tasks
        for effort in settings.efforts
    }
    asked = {key: batch for key, batch in asked.items() if batch}
    if not asked:
        raise ConfigError(
            f"{', '.join(settings.tasks)} is not asked at effort {', '.join(map(effort_name, settings.efforts))}",
            hint="add off to the efforts",
        )
    return asked


class _Examination:
    """The questions put to one server."""

    def __init__(
        self,
        client: Client,
        model_id: str,
        settings: EvalSettings,
        on_batch: Callable[[Batch], None],
        *,
        total: int,
    ) -> None:
        self.model_id = model_id
        self.any_answered = False
        self.first_error: RequestError | EngineError | None = None
        self._client = client
        self._settings = settings
        self._on_batch = on_batch
        self._streams = asyncio.Semaphore(settings.concurrency)
        self._position, self._total = 0, total

    async def run(self, task: str, batches: Mapping[Effort, Sequence[Question]]) -> TaskRun:
        """Ask one task at every effort. The server's counters before and after say what its drafts were worth."""
        before = await self._client.counters()
        outcomes: list[Outcome] = []
        seconds_s = 0.0
        for effort, batch in batches.items():
            begin = time.monotonic()
            answered = await self._ask_all(batch, effort)
            elapsed_s = time.monotonic() - begin
            outcomes += answered
            seconds_s += elapsed_s
            self._position += 1
            self._on_batch(Batch(task, effort, answered, elapsed_s, self._position, self._total))
        drafts = _drafts(before, await self._client.counters())
        return TaskRun(task, tuple(outcomes), seconds_s, drafts)

    async def _ask_all(self, batch: Sequence[Question], effort: Effort) -> tuple[Outcome, ...]:
        try:
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(self._ask(question, effort)) for question in batch]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # all met the same end
        return tuple(each.result() for each in asking)

    async def _ask(self, question: Question, effort: Effort) -> Outcome:
        body: dict[str, Any] = {
            "model": self.model_id,
            **question.request,
            "temperature": 0,
            "max_tokens": self._settings.max_tokens or question.max_tokens,
            "thinking": {"type": "disabled" if effort is None else "enabled"},
        }
        if effort is not None:
            body["reasoning_effort"] = effort
        async with self._streams:
            try:
                reply = await self._client.ask(body)
            except ServerGone:
                raise
            except (RequestError, EngineError) as error:
                self.first_error = self.first_error or error
                return Outcome(question, effort, None, error.message)
        self.any_answered = True
        return Outcome(question, effort, reply)


def _drafts(before: Mapping[str, float], after: Mapping[str, float]) -> Drafts | None:
    """Return the drafts between two readings of a server's counters; None where it verified none or does not say."""
    names = [f"deskfleet_engine_{name}_total" for name in ("verify_steps", "drafted", "accepted")]
    if not all(name in before and name in after for name in names):
        return None
    num_verify_steps, num_drafted, num_accepted = (round(after[name] - before[name]) for name in names)
    return Drafts(num_verify_steps, num_drafted, num_accepted) if num_verify_steps > 0 else None


def as_values(settings: EvalSettings) -> dict[str, Any]:
    """Return settings as a report keeps them."""
    return asdict(settings) | {
        "efforts": [effort_name(effort) for effort in settings.efforts],
        "temperature": 0,
    }


__all__ = ["Batch", "EvalSettings", "as_values", "evaluate", "what_is_asked"]
