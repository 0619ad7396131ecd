"""Acceptance gate `needle-ladder`: a code at every depth of prompts of every length, each prompt new to the server.

Owns which cells are asked where time is limited. A prompt that finds anything in a prefix cache has not been read, so
cached tokens must be 0; a server that does not tell them can pass everything else, but not this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from deskfleet.gates.contract import Figure, Finding, Gate, Grid, failed, passed, skipped
from deskfleet.gates.launch.context import longest_prompt, needle
from deskfleet.gates.subject import Answered, Subject

_SHORTEST = 512
_UNKNOWN_LIMIT = 8192
_LEAST_COUNTED = 0.9
_REACHED = 0.93


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt: how long it is to be, and where in it the code stands."""

    num_tokens: int
    depth: float


def plan_cells(longest: int, num_lengths: int, num_depths: int, most_tokens: float | None) -> list[Cell]:
    """Return the cells up to `longest` tokens, short ones first; together at most `most_tokens` where that is limited.

    What is too much is left out in this order: depths of the longest prompts but one, then those of all, then the
    longest prompts.
    """
    lengths = sorted({max(min(_SHORTEST, longest), longest >> step) for step in range(num_lengths)})
    depths = [step / max(num_depths - 1, 1) for step in range(num_depths)]
    at = {length: list(depths) for length in lengths}
    while most_tokens is not None and sum(length * len(kept) for length, kept in at.items()) > most_tokens:
        rich = max((length for length, kept in at.items() if len(kept) > 1), default=None)
        if rich is not None:
            at[rich].pop(len(at[rich]) // 2)
        elif len(at) > 1:
            del at[max(at)]
        else:
            break
    return [Cell(length, depth) for length in sorted(at) for depth in at[length]]


async def _run(subject: Subject) -> Finding:
    limit = subject.max_model_len
    longest = longest_prompt(limit or _UNKNOWN_LIMIT, subject.spare_tokens)
    await subject.measure_text(longest)
    most = await subject.affordable_tokens(subject.limits.ladder_s)
    cells = plan_cells(longest, subject.limits.ladder_lengths, subject.limits.ladder_depths, most)
    total, done = sum(cell.num_tokens for cell in cells), 0
    answers: list[tuple[Cell, Answered]] = []
    for cell in cells:
        answered = await subject.ask_text(partial(needle, subject, cell.depth), cell.num_tokens)
        answers.append((cell, answered))
        done += cell.num_tokens
        subject.report(done, total, "tokens")
        if answered.reply is None or subject.session.gone is not None:
            break
    whole = plan_cells(longest, subject.limits.ladder_lengths, subject.limits.ladder_depths, None)
    return _judge(subject, answers, limit, longest, num_left_out=len(whole) - len(cells))


def _judge(
    subject: Subject,
    answers: list[tuple[Cell, Answered]],
    limit: int | None,
    longest: int,
    *,
    num_left_out: int,
) -> Finding:
    figure = _figure(answers)
    found = sum(answered.is_right for _, answered in answers)
    reached = max((answered.reply.num_prompt_tokens for _, answered in answers if answered.reply), default=0)
    of_limit = "" if limit is None else f" of {limit:,}"
    measured = f"{found} of {len(answers)} found, up to {reached:,}{of_limit} tokens"
    for cell, answered in answers:
        if answered.reply is None:
            return failed(answered.sentence, figure, measured=measured, cause=answered.cause or "server")
        reply = answered.reply
        expected = subject.ruler.expected(answered.puzzle.asked_tokens or 0)
        if reply.num_cached_tokens:
            fault = (
                f"cache hits in a cold ladder: {reply.num_cached_tokens:,} cached tokens in a prompt of "
                f"{reply.num_prompt_tokens:,} that was never sent before"
            )
            subject.remark(answered, fault)
            return failed(fault, figure, measured=measured)
        if reply.num_prompt_tokens < _LEAST_COUNTED * expected:
            fault = f"a prompt was cut: {reply.num_prompt_tokens:,} tokens are counted in about {expected:,}"
            subject.remark(answered, fault)
            return failed(fault, figure, measured=measured)
        if not answered.is_right:
            where = f"at depth {cell.depth:.0%} of {reply.num_prompt_tokens:,} tokens"
            return failed(f"needle lost {where}: {answered.wrong}", figure, measured=measured)
    if any(answered.reply is None or answered.reply.num_cached_tokens is None for _, answered in answers):
        return skipped(
            "the server does not tell cached tokens, so nobody knows whether the prompts were read "
            "(vLLM: --enable-prompt-tokens-details)",
            figure,
            measured=measured,
        )
    if not num_left_out and reached < _REACHED * longest:
        return skipped(
            f"the longest prompt was to have {longest:,} tokens", figure, measured=measured, cause="tool"
        )
    if len({cell.num_tokens for cell, _ in answers}) < 2 or len({cell.depth for cell, _ in answers}) < 2:
        return skipped(
            "the time given allows no ladder: one length or one depth shows little", figure, measured=measured
        )
    limited = (
        f"; {num_left_out} prompt{'s' if num_left_out > 1 else ''} left out, for time" if num_left_out else ""
    )
    return passed(f"{measured}, none cached{limited}", figure, found=found, reached=reached)


def _figure(answers: list[tuple[Cell, Answered]]) -> Figure:
    lengths = sorted({cell.num_tokens for cell, _ in answers})
    depths = sorted({cell.depth for cell, _ in answers})
    right = {(cell.num_tokens, cell.depth): float(answered.is_right) for cell, answered in answers}
    rows = tuple(
        (f"{depth:.0%}", tuple(right.get((length, depth)) for length in lengths)) for depth in depths
    )
    return Grid(
        "Codes found, by depth and by length in tokens", tuple(f"{length:,}" for length in lengths), rows
    )


LADDER = Gate(
    name="needle-ladder",
    question="Is a code found at every depth of prompts of every length, each read anew?",
    protects="from a context that is advertised and was never read once",
    threshold="every code found, every prompt counted in full, cached tokens 0",
    when="acceptance",
    run=_run,
    alone=True,
)

__all__ = ["LADDER", "Cell", "plan_cells"]
