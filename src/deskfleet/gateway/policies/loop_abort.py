"""Ends answers that go round in circles, while reasoning as while answering. Owns the rule and the copies' fate.

An answer has begun to repeat itself, and ends with `finish_reason` "stop" and `stop_reason` "repetition", at the token
that completes any of these:

* `ngram_copies` copies, one after the other, of `ngram_tokens` tokens or more. A shorter unit counts together with its
  copies: 31 tokens are 62 tokens four times, and so stop with their eighth copy.
* `same_tokens` equal tokens.
* `same_lines` equal lines of `line_characters` characters or more, blank lines between them not counted.

What is data rather than a loop (data_repeats.py says which) may go on until it is `data_tokens` tokens long: forty
equal rows of a table and an array of two hundred zeros come through, and still nothing goes on for hours. A line with
one word changed each time is another line, and no repetition.

A request with `ignore_eos` asks for so many tokens whatever they are, as benchmarks do, and is not watched.

One copy is kept where the others have not been sent yet. A stream cannot take back what it has sent: of a stream only
the rest of the step in which the loop was found is left out. An answer that is sent whole keeps back what may be a copy
until it is known whether it was one, and loses all copies but the first.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from pydantic import Field

from deskfleet.endpoint import TokenChunk, TokenLogprob
from deskfleet.gateway.policies.contract import Draft, Watcher
from deskfleet.gateway.policies.counting import Counters, CounterSpec
from deskfleet.gateway.policies.data_repeats import Surroundings, is_asked_for, kind_of_data, kind_of_line
from deskfleet.gateway.policies.line_runs import LineEnds, LineRun, LineRuns
from deskfleet.gateway.policies.periods import PeriodTracker, Run, RunLimits, run_limits
from deskfleet.gateway.policies.section import Section

logger = logging.getLogger(__name__)

STOP_REASON = "repetition"
"""What `TokenChunk.stop_reason` says of an answer that was ended here."""

Rule = Literal["ngram", "token", "line"]

ABORTED = CounterSpec("loop_aborts", "Answers ended because they repeated themselves, by rule", ("rule",))
EXCUSED = CounterSpec(
    "loop_excused", "Repetitions that were let through because they are data, by kind of data", ("kind",)
)
COUNTERS = (ABORTED, EXCUSED)

_PROMPT_TOKENS = 4096
"""How much of the end of a prompt is looked at for what was asked for."""

_SHOWN_TOKENS = 8
"""How many ids of a repetition are told."""

_MAX_CHARACTER_TOKENS = 4
"""A character is at most so many tokens."""


class LoopAbortSettings(Section):
    """When an answer is ended for repeating itself."""

    enabled: bool = Field(default=True, description="Whether answers are watched for repetitions.")
    ngram_tokens: int = Field(
        default=32, ge=2, le=4096, description="Tokens that a repeated unit has, at least."
    )
    ngram_copies: int = Field(default=4, ge=2, le=64, description="Copies of it that end an answer.")
    same_tokens: int = Field(default=64, ge=2, le=4096, description="Equal tokens that end an answer.")
    same_lines: int = Field(default=8, ge=2, le=4096, description="Equal lines that end an answer.")
    line_characters: int = Field(
        default=16, ge=1, le=4096, description="Characters that such a line has, at least."
    )
    max_period: int = Field(
        default=4096, ge=64, le=32768, description="Tokens that a repeated unit has, at most."
    )
    data_tokens: int = Field(
        default=4096,
        ge=0,
        le=2**20,
        description="Tokens over which data (tables, arrays, code, drawings, what the prompt asks for) may repeat; "
        "0 makes no difference between data and prose.",
    )

    def limit_of(self, period: int) -> int:
        """Return how many tokens a run of `period` has when it ends an answer."""
        if period == 1:
            return self.same_tokens
        return self.ngram_copies * math.ceil(self.ngram_tokens / period) * period


@dataclass(frozen=True, slots=True)
class Repetition:
    """What was repeated: so many tokens, so many whole times in a row, and its first few ids."""

    rule: Rule
    num_tokens: int
    count: int
    first_token_ids: tuple[int, ...]


class LoopAbort:
    """The policy."""

    name = "loop_abort"

    def __init__(self, settings: LoopAbortSettings, ends: LineEnds, counters: Counters) -> None:
        self._settings = settings
        self._ends = ends
        self._counters = counters
        self._limits = _run_limits(settings)

    def shape(self, draft: Draft) -> Draft:
        """Return the request as it is."""
        return draft

    def watcher(self, draft: Draft) -> Watcher | None:
        """Return what looks for repetitions in one answer, None where nobody wants that."""
        if not self._settings.enabled or draft.sampling.ignore_eos:
            return None
        return LoopWatcher(self._settings, self._limits, self._ends, draft, self._counters)


class LoopWatcher:
    """Looks at one answer. `repetition` says what it found once it has ended the answer."""

    def __init__(
        self,
        settings: LoopAbortSettings,
        limits: RunLimits,
        ends: LineEnds,
        draft: Draft,
        counters: Counters,
    ) -> None:
        self._settings = settings
        self._decode = ends.decode
        self._draft = draft
        self._counters = counters
        self._periods = PeriodTracker(limits)
        self._lines = LineRuns(ends)
        self._prompt: str | None = None
        self._excused_line = -1  # the token in which a run of lines begins that is data
        self._num_tokens = 0
        self._held = _Held() if not draft.is_stream else None
        self._last_sent: deque[int] = deque(maxlen=_MAX_CHARACTER_TOKENS)
        self.repetition: Repetition | None = None

    def push(self, chunk: TokenChunk) -> TokenChunk:
        """Return `chunk`, without the copies in it and as the last one when it completes a repetition."""
        for index, token_id in enumerate(chunk.token_ids):
            self._num_tokens += 1
            run = self._periods.push(token_id)
            lines = self._lines.push(token_id)
            if run is not None and self._is_loop(run):
                # The last copy may have begun only: the tokens before it are a whole one.
                unit = self._periods.tail(run.length % run.period + run.period)[: run.period]
                rule: Rule = "token" if run.period == 1 else "ngram"
                found = Repetition(rule, run.period, run.num_copies, tuple(unit[:_SHOWN_TOKENS]))
                return self._end(chunk, index + 1, found, self._num_tokens - run.length + run.period)
            if lines is not None and self._is_line_loop(lines):
                tokens = self._periods.tail(self._num_tokens - lines.first)
                size = lines.second - lines.first
                found = Repetition("line", size, lines.count, tuple(tokens[:size][:_SHOWN_TOKENS]))
                return self._end(chunk, index + 1, found, lines.second)
        if self._held is None:
            self._last_sent.extend(chunk.token_ids)
            return chunk
        self._held.add(chunk, len(chunk.token_ids))
        return self._release(chunk, 0 if chunk.finish_reason is not None else self._periods.num_repeated())

    def _is_loop(self, run: Run) -> bool:
        if run.length >= self._settings.data_tokens:
            return True
        line, in_code = self._lines.line_so_far(), self._lines.in_code()
        kind = kind_of_data(self._unit_text(run), Surroundings(line, in_code, self._prompt_end()))
        if kind is None:
            return True
        self._periods.excuse(run, self._settings.data_tokens)
        self._count(EXCUSED, kind)
        return False

    def _is_line_loop(self, lines: LineRun) -> bool:
        if lines.count < self._settings.same_lines or len(lines.line) < self._settings.line_characters:
            return False
        if self._num_tokens - lines.first >= self._settings.data_tokens:
            return True
        if lines.first == self._excused_line:
            return False
        kind = "code" if self._lines.in_code() else kind_of_line(lines.line)
        if kind is None and is_asked_for(lines.line + "\n", Surroundings(prompt=self._prompt_end())):
            kind = "asked"
        if kind is None:
            return True
        self._excused_line = lines.first
        self._count(EXCUSED, kind)
        return False

    def _unit_text(self, run: Run) -> str:
        """Return the text of one copy, begun at such a token that no character is cut, if there is one."""
        tokens = self._periods.tail(min(run.length, run.period + _MAX_CHARACTER_TOKENS))
        texts = [
            self._decode(tokens[start : start + run.period]) for start in range(len(tokens) - run.period + 1)
        ]
        return next((text for text in texts if "\ufffd" not in (text[:1], text[-1:])), texts[0])

    def _prompt_end(self) -> str:
        if self._prompt is None:
            self._prompt = self._decode(self._draft.generate.prompt_token_ids[-_PROMPT_TOKENS:])
        return self._prompt

    def _end(self, chunk: TokenChunk, size: int, found: Repetition, num_kept: int) -> TokenChunk:
        """End the answer with the first `num_kept` tokens of it, or with more where they have been sent.

        `size` is how much of `chunk` had been looked at.
        """
        self.repetition = found
        self._count(ABORTED, found.rule)
        logger.warning(
            "%s: ended after %d tokens: %d tokens %d times in a row (%s), beginning with %s",
            self._draft.generate.request_id,
            self._num_tokens,
            found.num_tokens,
            found.count,
            found.rule,
            list(found.first_token_ids),
        )
        held = self._held or _Held()
        held.add(chunk, size)
        num_sent = self._num_tokens - len(held.token_ids)
        wanted = max(num_kept - num_sent, 0)
        while wanted < len(held.token_ids) and self._cuts_character(held.token_ids[:wanted]):
            wanted += 1
        ended = replace(chunk, finish_reason="stop", stop_reason=STOP_REASON)
        self._held = held
        return self._release(ended, len(held.token_ids) - wanted)

    def _cuts_character(self, unsent: list[int]) -> bool:
        last = [*self._last_sent, *unsent][-_MAX_CHARACTER_TOKENS:]
        return bool(last) and self._decode(last).endswith("\ufffd")

    def _release(self, chunk: TokenChunk, num_held: int) -> TokenChunk:
        """Return `chunk` with everything kept back except the last `num_held` tokens."""
        assert self._held is not None
        token_ids, logprobs = self._held.take(len(self._held.token_ids) - num_held)
        self._last_sent.extend(token_ids)
        return replace(chunk, token_ids=token_ids, logprobs=None if chunk.logprobs is None else logprobs)

    def _count(self, spec: CounterSpec, label: str) -> None:
        self._counters.add(spec, self._draft.model_id, self._draft.caller.key, label)


class _Held:
    """Tokens of an answer that have not been passed on, with their log probabilities."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, chunk: TokenChunk, size: int) -> None:
        """Add the first `size` tokens of `chunk`."""
        self.token_ids += chunk.token_ids[:size]
        self._logprobs += (chunk.logprobs or ())[:size]

    def take(self, size: int) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Remove the first `size` tokens and return them."""
        taken = tuple(self.token_ids[:size]), tuple(self._logprobs[:size])
        del self.token_ids[:size], self._logprobs[:size]
        return taken


@lru_cache(maxsize=64)
def _run_limits(settings: LoopAbortSettings) -> RunLimits:
    return run_limits(settings.max_period, settings.limit_of)


__all__ = [
    "COUNTERS",
    "STOP_REASON",
    "LoopAbort",
    "LoopAbortSettings",
    "LoopWatcher",
    "Repetition",
]
