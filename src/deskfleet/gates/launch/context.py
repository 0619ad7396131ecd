"""Launch gates of the context: `context` (max_model_len is granted as listed) and `needle` (and is really read)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

from deskfleet.client import Reply
from deskfleet.errors import EngineError, RequestError
from deskfleet.gates.contract import Decided, Finding, Gate, failed, passed, skipped
from deskfleet.gates.puzzle import Puzzle, anything
from deskfleet.gates.questions import codes, count_cut, user
from deskfleet.gates.subject import Answered, Subject

_FIRST_TEXT = 800
_LEAST_COUNTED = 0.9
_NEAR = 0.9
_DEPTH = 0.1  # far from the end: what a server cuts off silently is the beginning


async def _promise(subject: Subject) -> Finding:
    """Ask for every token that the listing promises, then for a prompt that is longer than all of them."""
    limit = subject.max_model_len
    if limit is None:
        return skipped("the server lists no max_model_len")
    short = await subject.ask(count_cut(subject.questions, 1))
    if short.reply is None:
        return short.finding()
    room = limit - short.reply.num_prompt_tokens
    refusal = await _begin(subject, room)
    if refusal is not None:
        return failed(
            f"max_model_len is smaller than advertised: {limit:,} tokens are listed, but "
            f"{short.reply.num_prompt_tokens} of prompt and {room:,} of answer are refused ({refusal})",
            measured=f"less than {limit:,}",
        )
    too_long = Puzzle("a prompt longer than the context", {"messages": user(_words(limit))}, anything, 1)
    over = await subject.ask(too_long)
    if over.cause == "refusal":
        return passed(f"{limit:,} tokens granted, more refused", max_model_len=limit)
    if over.reply is not None:
        return failed(
            f"a prompt longer than {limit:,} tokens is taken, and {over.reply.num_prompt_tokens:,} tokens of it are "
            "counted: it was cut, or the limit is another one",
        )
    return failed(
        f"a prompt longer than the context is not refused: {over.wrong}", cause=over.cause or "server"
    )


async def _begin(subject: Subject, max_tokens: int) -> str | None:
    """Ask for an answer of up to `max_tokens`, and leave at its first token. Return the refusal, None when it began."""
    body = subject.body(count_cut(subject.questions, max_tokens))
    try:
        async with (
            asyncio.timeout(subject.limits.patience_s),
            aclosing(subject.client.stream(body)) as stream,
        ):
            async for piece in stream:
                if isinstance(piece, Reply) or piece.text:
                    return None
    except RequestError as error:
        return error.message
    except (EngineError, TimeoutError) as error:
        reason = str(error) or f"nothing came in {subject.limits.patience_s:.0f} s"
        raise Decided(
            failed(f"an answer of up to {max_tokens:,} tokens: {reason}", cause="server")
        ) from error
    return None


def _words(num_tokens: int) -> str:
    """Return a text of more than `num_tokens` in any vocabulary: numbers, no two alike."""
    return " ".join(str(100_000 + 7919 * index % 899_999) for index in range(num_tokens + 64))


CONTEXT = Gate(
    name="context",
    question="Is max_model_len granted as listed, and is more refused at once?",
    protects="from a limit on paper: silent clamps, truncated prompts, a hang where a refusal belongs",
    threshold="the listed tokens granted, a longer prompt answered with status 400",
    when="launch",
    run=_promise,
)


async def _needle(subject: Subject) -> Finding:
    """Find a code in the longest prompt that a launch has time for, at the rate at which a shorter one was read."""
    limit = subject.max_model_len
    most = longest_prompt(limit or _FIRST_TEXT * 4, subject.spare_tokens)
    await subject.measure_text()
    first = await _find(subject, min(_FIRST_TEXT, most))
    if not first.is_right or first.reply is None:
        return first.finding()
    # Reading slows down as the prefix grows; some of the time is kept for that.
    affordable = int((first.read_tok_s or 0) * subject.limits.long_prompt_s * 0.75)
    wanted = min(most, max(affordable, _FIRST_TEXT))
    answered = first if wanted <= _FIRST_TEXT * 1.25 else await _find(subject, wanted)
    of_limit = "" if limit is None else f" of {limit:,}"
    if answered.reply is None:
        return answered.finding()
    counted, expected = (
        answered.reply.num_prompt_tokens,
        subject.ruler.expected(answered.puzzle.asked_tokens or 0),
    )
    if counted < _LEAST_COUNTED * expected:
        fault = (
            f"a prompt was cut: {counted:,} tokens are counted in a text of about {expected:,}, "
            f"max_model_len is smaller than advertised ({limit or 0:,})"
        )
        subject.remark(answered, fault)
        return failed(fault, measured=f"{counted:,}{of_limit} tokens")
    if not answered.is_right:
        return failed(f"lost in a prompt of {counted:,}{of_limit} tokens: {answered.wrong}")
    why = (
        ""
        if limit and counted >= _NEAR * limit
        else f"; a launch spends {subject.limits.long_prompt_s:.0f} s on it"
    )
    return passed(
        f"found in {counted:,}{of_limit} tokens{why}", num_prompt_tokens=counted, max_model_len=limit
    )


def longest_prompt(limit: int, spare_tokens: int) -> int:
    """Return how long a prompt may be meant to be: room for the answer, and for what the ruler may be wrong by."""
    return limit - 64 - spare_tokens - limit // 24


def needle(subject: Subject, depth: float, num_tokens: int) -> Puzzle:
    """Return a prompt of about so many tokens with a code at a depth."""
    return codes(
        subject.ruler,
        num_tokens,
        subject.rng,
        depths=(depth,),
        spare_tokens=subject.spare_tokens,
        label=f"a code at depth {depth:.0%} of {num_tokens:,} tokens",
    )


async def _find(subject: Subject, num_tokens: int) -> Answered:
    return await subject.ask_text(partial(needle, subject, _DEPTH), num_tokens)


NEEDLE = Gate(
    name="needle",
    question="Is a value found in a prompt near the limit (or as long as a launch has time for)?",
    protects="from long prompts that are cut, misread or fatal though short ones pass",
    threshold="the value found, the prompt counted in full by the server",
    when="launch",
    run=_needle,
    alone=True,
)

__all__ = ["CONTEXT", "NEEDLE", "longest_prompt", "needle"]
