"""The server as one gate sees it: asks puzzles, judges the answers, keeps them as evidence, and knows what was learnt.

Owns what tells a wrong answer, a refusal, a failing server and lost patience apart, and what all gates of a run share:
how many tokens the server counts in a text, and how fast it reads. Knows no particular gate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any

from deskfleet.client import Client, Reply, ServedModel, ServerGone
from deskfleet.errors import EngineError, RequestError
from deskfleet.gates.contract import Cause, Decided, Finding, Limits, failed
from deskfleet.gates.family import QuestionSet
from deskfleet.gates.puzzle import Effort, Puzzle
from deskfleet.gates.questions import codes
from deskfleet.gates.ruler import TokenRuler

_LEARNT_TOKENS = 2500  # texts up to here teach the ruler; a server that cuts prompts does it beyond
_NEAR = 0.1  # longer ones do when they are as long as was thought
_FIRST_TEXT, _MEASURED_TEXT, _PARTS = 160, 800, (100, 12)
_SLOWING = 0.75
_SLOWEST_TOK_S = 50.0  # how fast prompts are read while nothing is known
_KEPT_RIGHT, _KEPT_WRONG = 12, 60
_TIMES_PATIENT = 5
_SHORTER = (0.96, 0.92)


@dataclass(frozen=True, slots=True)
class Answered:
    """A puzzle that was asked. `wrong` says what is wrong with the answer or why there is none, with its cause.

    Times count from the beginning of the run; `num_pieces` had arrived when it ended, whichever way.
    """

    puzzle: Puzzle
    body: Mapping[str, Any]
    reply: Reply | None
    wrong: str | None
    cause: Cause | None
    began_s: float
    ended_s: float
    num_pieces: int

    @property
    def is_right(self) -> bool:
        """Whether there is an answer and nothing is wrong with it."""
        return self.wrong is None

    @property
    def sentence(self) -> str:
        """What was asked and what is wrong, in one line."""
        return f"{self.puzzle.label}: {self.wrong or 'right'}"

    @property
    def read_tok_s(self) -> float | None:
        """How fast the prompt was read; None where nobody knows."""
        if self.reply is None or self.reply.first_token_s <= 0:
            return None
        return (self.reply.num_prompt_tokens - (self.reply.num_cached_tokens or 0)) / self.reply.first_token_s

    def finding(self) -> Finding:
        """Return the failure of a gate that rests on this answer."""
        return failed(self.sentence, cause=self.cause or "answer")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long gate is. `done` of `total` of a unit; `eta_s` is None before anything is done."""

    gate: str
    done: float
    total: float
    unit: str
    elapsed_s: float

    @property
    def rate(self) -> float:
        """Units a second so far."""
        return self.done / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this rate."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None


def ignore(progress: Progress) -> None:
    """Take a progress and do nothing."""


@dataclass(slots=True)
class Session:
    """What the gates of one run share. `gone` is the sentence of the server that went away."""

    client: Client
    model: ServedModel
    questions: QuestionSet
    limits: Limits
    seed: int
    on_progress: Callable[[Progress], None] = ignore
    ruler: TokenRuler = field(default_factory=TokenRuler)
    gone: str | None = None
    read_tok_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    learning: asyncio.Lock = field(default_factory=asyncio.Lock)


class Subject:
    """The server, asked by one gate. `evidence` is what was asked and answered: what was wrong, some that was not."""

    def __init__(self, session: Session, gate: str, number: int = 0) -> None:
        """`number` is which time the gate is asked: each time its values are others."""
        self.session = session
        self.gate = gate
        self.rng = Random(f"{session.seed} {gate} {number}")
        self.evidence: list[Answered] = []
        self.num_asked = 0
        self._began = time.monotonic()

    @property
    def client(self) -> Client:
        """The connection, for what is no puzzle."""
        return self.session.client

    @property
    def questions(self) -> QuestionSet:
        """The family of questions."""
        return self.session.questions

    @property
    def limits(self) -> Limits:
        """How patient and how thorough to be."""
        return self.session.limits

    @property
    def ruler(self) -> TokenRuler:
        """What is known of how the server counts."""
        return self.session.ruler

    @property
    def spare_tokens(self) -> int:
        """How much longer than a right one an answer may be."""
        return self.questions.spare_tokens

    @property
    def max_model_len(self) -> int | None:
        """The longest prompt plus answer, where the server tells it."""
        return self.session.model.max_model_len

    async def ask(self, puzzle: Puzzle, **fields: Any) -> Answered:
        """Ask one puzzle and judge the answer. `fields` go into the body beside the puzzle's own."""
        body = self.body(puzzle) | fields
        began, num_pieces = self._now(), 0
        reply: Reply | None = None
        wrong: str | None = None
        cause: Cause | None = None
        patience_s = self._patience_s(puzzle)
        try:
            async with _Patience(patience_s) as clock, aclosing(self.client.stream(body)) as stream:
                async for piece in stream:
                    if isinstance(piece, Reply):
                        reply = piece
                    else:
                        num_pieces += 1
                        clock.extend(self.limits.patience_s)
        except TimeoutError:
            came = f"though {num_pieces} pieces of it came" if num_pieces else "and not one token of it"
            waited_s = self._now() - began
            wrong, cause = f"no whole answer in {waited_s:.1f} s, {came} (see --patience)", "time"
        except RequestError as error:
            wrong, cause = f"the server refuses: {error.message}", "refusal"
        except ServerGone as error:
            wrong, cause = f"the server is gone: {error.message}", "server"
            self.session.gone = self.session.gone or error.message
        except EngineError as error:
            wrong, cause = error.message, "server"
        if reply is not None:
            wrong = puzzle.check(reply)
            cause = None if wrong is None else "answer"
            self._learn(puzzle, reply)
        answered = Answered(puzzle, body, reply, wrong, cause, began, self._now(), num_pieces)
        self.num_asked += 1
        self._keep(answered)
        return answered

    async def right(self, puzzle: Puzzle, **fields: Any) -> Reply:
        """Return the reply of a puzzle that was answered rightly; any other answer decides the gate."""
        answered = await self.ask(puzzle, **fields)
        if answered.reply is None or answered.wrong is not None:
            raise Decided(answered.finding())
        return answered.reply

    async def ask_text(self, make: Callable[[int], Puzzle], num_tokens: int) -> Answered:
        """Ask what `make` makes of about so many tokens, and others of the kind when that does not do.

        A refusal may be the ruler's fault: a little less is tried. A family that is known to slip is asked anew when
        the answer is wrong; what a server gets wrong, it gets wrong each time. The first right answer counts, or the
        first of all.
        """
        first = await self.ask(make(num_tokens))
        for shorter in _SHORTER:
            if first.cause == "refusal":
                first = await self.ask(make(int(num_tokens * shorter)))
        for _ in range(self.questions.second_tries):
            if first.cause != "answer":
                break
            another = await self.ask(make(num_tokens))
            if another.is_right:
                return another
        return first

    async def ask_all(self, puzzles: Sequence[Puzzle], at_once: int, **fields: Any) -> list[Answered]:
        """Ask puzzles, at most `at_once` at the same time; answers in the order of the puzzles."""
        streams = asyncio.Semaphore(at_once)

        async def one(puzzle: Puzzle) -> Answered:
            async with streams:
                return await self.ask(puzzle, **fields)

        return list(await asyncio.gather(*map(one, puzzles)))

    async def measure_text(self, up_to: int = 0) -> None:
        """See that the ruler knows this server, for texts of `up_to` tokens, by asking shorter ones.

        An answer that does not come decides the gate; whether it is right does not matter.
        """
        async with self.session.learning:
            for num_tokens in (_FIRST_TEXT, *(up_to // part for part in _PARTS)):
                longest = max((asked for asked, _ in self.ruler.pairs), default=0)
                if longest >= num_tokens / 2:
                    continue
                puzzle = codes(self.ruler, num_tokens, self.rng, spare_tokens=0, label="a text to measure by")
                answered = await self.ask(puzzle)
                if answered.reply is None:
                    raise Decided(answered.finding())

    async def affordable_tokens(self, time_s: float | None) -> float | None:
        """Return how many tokens of prompts can be read in a time, alone; None for any number where time is no limit.

        One text is asked to find out; no answer decides the gate.
        """
        if time_s is None:
            return None
        answered = await self.ask(codes(self.ruler, _MEASURED_TEXT, self.rng, spare_tokens=0))
        if answered.read_tok_s is None:
            raise Decided(answered.finding())
        # Reading slows down as the prefix grows; some of the time is kept for that.
        return answered.read_tok_s * time_s * _SLOWING

    def body(self, puzzle: Puzzle) -> dict[str, Any]:
        """Return the Chat Completions body of a puzzle: greedy, thinking said in the ways that servers understand."""
        limit = self.max_model_len
        return {
            "model": self.session.model.id,
            **puzzle.fields,
            "temperature": 0,
            "max_tokens": puzzle.max_tokens if limit is None else min(puzzle.max_tokens, max(limit // 2, 1)),
            **thinking(puzzle.effort),
        }

    def report(self, done: float, total: float, unit: str) -> None:
        """Tell how far this gate is."""
        self.session.on_progress(Progress(self.gate, done, total, unit, time.monotonic() - self._began))

    def remark(self, answered: Answered, wrong: str) -> None:
        """Keep an answer as evidence of something that only the gate could see."""
        self.evidence.append(
            Answered(
                answered.puzzle,
                answered.body,
                answered.reply,
                wrong,
                "answer",
                answered.began_s,
                answered.ended_s,
                answered.num_pieces,
            )
        )

    def _keep(self, answered: Answered) -> None:
        same = sum(kept.is_right == answered.is_right for kept in self.evidence)
        if same < (_KEPT_RIGHT if answered.is_right else _KEPT_WRONG):
            self.evidence.append(answered)

    def _learn(self, puzzle: Puzzle, reply: Reply) -> None:
        if puzzle.asked_tokens is None:
            return
        expected = self.ruler.expected(puzzle.asked_tokens)
        is_near = abs(reply.num_prompt_tokens - expected) <= _NEAR * expected
        if puzzle.asked_tokens <= _LEARNT_TOKENS or is_near:
            self.ruler.observe(puzzle.asked_tokens, reply.num_prompt_tokens)
        read = reply.num_prompt_tokens - (reply.num_cached_tokens or 0)
        if read >= 100 and reply.first_token_s > 0:
            # The slowest seen: prompts that are read beside others, and longer ones, take longer.
            rate = read / reply.first_token_s
            self.session.read_tok_s = min(rate, self.session.read_tok_s or rate)

    def _patience_s(self, puzzle: Puzzle) -> float:
        reading = 0.0
        if puzzle.asked_tokens is not None:
            rate = self.session.read_tok_s or _SLOWEST_TOK_S
            reading = 3 * self.ruler.expected(puzzle.asked_tokens) / rate
        return self.limits.patience_s + reading

    def _now(self) -> float:
        return time.monotonic() - self.session.began


class _Patience:
    """Waits so long for the first piece, and `extend` for each later one; in all at most a few times as long.

    An answer that arrives slowly is slow, one that stands still is none.
    """

    def __init__(self, first_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + _TIMES_PATIENT * first_s
        self._clock = asyncio.timeout(first_s)

    async def __aenter__(self) -> _Patience:
        await self._clock.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._clock.__aexit__(kind, error, trace)

    def extend(self, patience_s: float) -> None:
        """Begin to wait anew."""
        self._clock.reschedule(min(self._loop.time() + patience_s, self._end))


def thinking(effort: Effort) -> dict[str, Any]:
    """Return the fields that switch thinking: deskfleet's, and those of chat templates that other servers read."""
    on = effort is not None
    fields: dict[str, Any] = {
        "thinking": {"type": "enabled" if on else "disabled"},
        "chat_template_kwargs": {"thinking": on, "enable_thinking": on},
    }
    return fields | ({"reasoning_effort": effort} if on else {})


def first_wrong(answers: Sequence[Answered]) -> Answered | None:
    """Return the first answer with which something is wrong."""
    return next((answered for answered in answers if not answered.is_right), None)


def cause_of(answers: Sequence[Answered]) -> Cause:
    """Return whose fault the first wrong answer is."""
    wrong = first_wrong(answers)
    return "answer" if wrong is None or wrong.cause is None else wrong.cause


__all__ = ["Answered", "Progress", "Session", "Subject", "cause_of", "first_wrong", "ignore", "thinking"]
