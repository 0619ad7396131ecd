"""Launch gate `finish-reason`: an answer that ended says so, one that was cut says that, inside a tool call too."""

from __future__ import annotations

import json

from deskfleet.client import Reply
from deskfleet.gates.contract import Finding, Gate, failed, passed, skipped
from deskfleet.gates.puzzle import Puzzle, anything
from deskfleet.gates.questions import count_cut, timer
from deskfleet.gates.subject import Subject

_CUT = 12


async def _run(subject: Subject) -> Finding:
    whole = await subject.right(subject.questions.sums()[0])
    if whole.finish_reason != "stop":
        return failed(
            f"an answer that ended by itself finishes with {whole.finish_reason!r} instead of 'stop'"
        )
    text = await subject.ask(count_cut(subject.questions, _CUT))
    if text.reply is None:
        return text.finding()
    if text.reply.finish_reason != "length":
        return failed(
            f"a truncated text is called finished: max_tokens {_CUT}, finish reason {text.reply.finish_reason!r}"
        )
    minutes = subject.rng.randint(11, 99)
    call = await subject.right(timer(minutes, subject.spare_tokens))
    cut = Puzzle(
        "a tool call that is cut",
        timer(minutes, 0).fields,
        anything,
        max(1, call.num_completion_tokens * 2 // 3),
    )
    answered = await subject.ask(cut)
    if answered.reply is None:
        return answered.finding()
    if answered.reply.num_completion_tokens >= call.num_completion_tokens:
        return skipped(
            f"the call could not be cut: it has {call.num_completion_tokens} tokens, and "
            f"{answered.reply.num_completion_tokens} of {cut.max_tokens} came",
            cause="tool",
        )
    if answered.reply.finish_reason != "length":
        fault = f"a truncated tool call is called finished: {_calls(answered.reply)}"
        subject.remark(answered, fault)
        return failed(fault)
    return passed(f"stop, length, and length inside a call of {call.num_completion_tokens} tokens")


def _calls(reply: Reply) -> str:
    broken = [call["function"]["arguments"] for call in reply.tool_calls if not _parses(call)]
    arguments = f", arguments {broken[0]!r}" if broken else ""
    return f"finish reason {reply.finish_reason!r} after {reply.num_completion_tokens} tokens{arguments}"


def _parses(call: dict[str, dict[str, str]]) -> bool:
    try:
        json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    return True


FINISH_REASON = Gate(
    name="finish-reason",
    question="Does an answer say whether it ended or was cut, also inside a tool call?",
    protects="agents that run half a command because the call was said to be complete",
    threshold="stop where it ended, length where it was cut",
    when="launch",
    run=_run,
)

__all__ = ["FINISH_REASON"]
