"""Launch gate `usage`: token counts that can be relied on, and one answer whether it is streamed or whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deskfleet.errors import EngineError, RequestError
from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.garble import first_difference
from deskfleet.gates.puzzle import anything
from deskfleet.gates.questions import codes, count_cut
from deskfleet.gates.subject import Subject

_CUT = 24


async def _run(subject: Subject) -> Finding:
    """An answer that is cut has exactly max_tokens: the one count that a client knows beforehand."""
    puzzle = count_cut(subject.questions, _CUT)
    answered = await subject.ask(puzzle)
    reply = answered.reply
    if reply is None:
        return answered.finding()
    if reply.num_completion_tokens != _CUT:
        events = len(reply.arrivals_s)
        chunks = " (usage counts chunks)" if abs(reply.num_completion_tokens - events) <= 1 else ""
        fault = (
            f"an answer cut at max_tokens {_CUT} is said to have {reply.num_completion_tokens} tokens, "
            f"in {events} events{chunks}"
        )
        subject.remark(answered, fault)
        return failed(fault, measured=f"{reply.num_completion_tokens} of {_CUT}")
    short = await subject.right(replace(subject.questions.sums()[0], check=anything))
    longer = await subject.right(
        replace(codes(subject.ruler, 70, subject.rng, spare_tokens=0), check=anything, max_tokens=1)
    )
    if not 0 < short.num_prompt_tokens < longer.num_prompt_tokens:
        return failed(
            f"prompt tokens do not follow the prompt: {short.num_prompt_tokens} for a sum, "
            f"{longer.num_prompt_tokens} for a longer question"
        )
    try:
        whole = await subject.client.post("/v1/chat/completions", subject.body(puzzle))
        text, counted = _whole(whole)
    except RequestError as error:
        return failed(f"the server refuses an answer that is not streamed: {error.message}", cause="refusal")
    except EngineError as error:
        return failed(f"an answer that is not streamed: {error.message}", cause="server")
    if text != reply.content:
        return failed(f"streamed and whole answers differ: {first_difference(reply.content, text)}")
    if counted != reply.num_completion_tokens:
        return failed(f"{reply.num_completion_tokens} tokens streamed, {counted} whole, of the same answer")
    return passed(f"{_CUT} of {_CUT} tokens, streamed and whole")


def _whole(answer: dict[str, Any]) -> tuple[str, int]:
    """Return text and completion tokens of a whole answer. Raises EngineError when they are not there."""
    try:
        return answer["choices"][0]["message"]["content"] or "", int(answer["usage"]["completion_tokens"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"no text or no usage in it ({str(answer)[:80]})") from error


USAGE = Gate(
    name="usage",
    question="Are tokens counted as tokens, the same whether an answer is streamed or not?",
    protects="every rate and every bill that is computed from usage",
    threshold="an answer cut at N tokens has N; streamed equals whole",
    when="launch",
    run=_run,
)

__all__ = ["USAGE"]
