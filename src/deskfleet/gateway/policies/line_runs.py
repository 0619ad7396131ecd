"""Equal lines in a stream of tokens. Owns incremental decoding into lines, and the knowledge of being inside code.

Tokens are decoded a line at a time: whether a token ends one is known per token id, so that a line of twenty tokens
costs one decoding. Knows nothing of requests or of what a run of equal lines means.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
"""Tokens to text, special tokens included. Text of a cut after a whole character is the cut of the text."""

_MAX_LINE_TOKENS = 4096
"""Lines longer than this equal no other."""

_NOWHERE = sys.maxsize

_FENCE = re.compile(r"\s*(?:[-*+>]\s+|\d+[.)]\s+)?(```|~~~)")
_ARGUMENT = re.compile(r"<(/?)｜DSML｜ ?parameter\b[^>]*>")


class LineEnds(dict[int, bool]):
    """Whether a token holds the end of a line. One for all streams of a tokenizer; ids are looked at when they come.

    A dictionary, since it is asked for every token of every stream.
    """

    def __init__(self, decode: Decode) -> None:
        super().__init__()
        self.decode = decode

    def __missing__(self, token_id: int) -> bool:
        known = self[token_id] = "\n" in self.decode([token_id])
        return known


@dataclass(frozen=True, slots=True)
class LineRun:
    """`count` equal lines one after the other, blank ones between them left out. Places are tokens since the start.

    The first of the lines begins within token `first` and ends within the token before `second`.
    """

    line: str
    count: int
    first: int
    second: int


class LineRuns:
    """Watches one stream. A line is what stands between two ends of lines, white space around it removed."""

    def __init__(self, ends: LineEnds) -> None:
        self._ends = ends
        self._tokens: list[int] = []  # since the last end of a line that could be decoded
        self._carry = ""  # text of the line under way that stands within the last such token
        self._begins_in = 0  # the token in which that line begins
        self._ended_in = _NOWHERE  # the first token since then that holds the end of a line
        self._num_tokens = 0
        self._run = LineRun("", 0, 0, 0)
        self._in_fence = False
        self._in_argument = False

    def push(self, token_id: int) -> LineRun | None:
        """Add a token. Returns a run when the token ended a line that belongs to one of two or more, the longest."""
        self._tokens.append(token_id)
        self._num_tokens += 1
        if self._ends[token_id]:
            self._ended_in = min(self._ended_in, self._num_tokens - 1)
        elif len(self._tokens) < _MAX_LINE_TOKENS:
            return None
        found = self._end_lines()
        if not self._tokens:
            self._ended_in = _NOWHERE
        return found

    def line_so_far(self) -> str:
        """Return the text of the line under way."""
        return (self._carry + self._ends.decode(self._tokens)).rpartition("\n")[2]

    def in_code(self) -> bool:
        """Whether the line under way stands in a fenced block or in the arguments of a tool call."""
        return self._in_fence or self._argument_after(self.line_so_far())

    def _end_lines(self) -> LineRun | None:
        text = self._carry + self._ends.decode(self._tokens)
        if text.endswith("\ufffd") and len(self._tokens) < _MAX_LINE_TOKENS:
            return None  # the token after the end of the line stops within a character
        *lines, carry = text.split("\n")
        found: LineRun | None = None
        for line in lines:
            run = self._add_line(line)
            found = run if found is None or (run is not None and run.count > found.count) else found
            self._begins_in = self._ended_in
        self._tokens.clear()
        if lines:
            self._carry = carry
        else:
            self._carry = "\ufffd"  # too long to be compared; what it began with is forgotten
        return found

    def _add_line(self, line: str) -> LineRun | None:
        stripped = line.strip()
        was_in_argument = self._in_argument
        self._in_argument = self._argument_after(line)
        if not (was_in_argument and self._in_argument) and _FENCE.match(line):
            self._in_fence = not self._in_fence
        if "</think>" in line:
            self._in_fence = False
        if not stripped:
            return None
        run = self._run
        if stripped == run.line:
            self._run = LineRun(stripped, run.count + 1, run.first, run.second)
            return self._run
        self._run = LineRun(stripped, 1, self._begins_in, self._num_tokens)
        return None

    def _argument_after(self, line: str) -> bool:
        marks = _ARGUMENT.findall(line)
        return marks[-1] == "" if marks else self._in_argument


__all__ = ["Decode", "LineEnds", "LineRun", "LineRuns"]
