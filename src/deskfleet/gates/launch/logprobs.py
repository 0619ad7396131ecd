"""Launch gate `logprobs`: every generated token has a finite log probability, in short prompts and in longer ones."""

from __future__ import annotations

import math
from typing import Any

from deskfleet.client import Reply
from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.questions import codes
from deskfleet.gates.subject import Subject

_TOP = 2
_LEAST = -1000.0  # vLLM writes -9999 for what is not finite


async def _run(subject: Subject) -> Finding:
    await subject.measure_text()
    puzzles = [
        subject.questions.sums()[1],
        codes(subject.ruler, 200, subject.rng, spare_tokens=subject.spare_tokens),
    ]
    lowest, num_tokens = 0.0, 0
    for puzzle in puzzles:
        answered = await subject.ask(puzzle, logprobs=True, top_logprobs=_TOP)
        if answered.reply is None:
            return answered.finding()
        reply = answered.reply
        where = f"in the answer to a prompt of {reply.num_prompt_tokens} tokens"
        if (fault := fault_of(reply)) is not None:
            subject.remark(answered, fault)
            return failed(f"{fault} {where}")
        entries = reply.logprobs or ()
        num_tokens += len(entries)
        lowest = min([lowest, *(entry["logprob"] for entry in entries)])
    return passed(
        f"{num_tokens} tokens, all finite, lowest {lowest:.2g}", lowest=lowest, num_tokens=num_tokens
    )


def fault_of(reply: Reply) -> str | None:
    """Return what is wrong with the log probabilities of a reply that was asked for them."""
    if not reply.logprobs:
        return "log probabilities were asked for and are absent"
    for entry in reply.logprobs:
        values = [entry.get("logprob"), *(top.get("logprob") for top in entry.get("top_logprobs") or ())]
        if any(not _is_finite(value) for value in values[:1]) or any(map(_is_nan, values)):
            return f"a log probability is not finite ({values[0]}) for {entry.get('token')!r}"
    # The token that ends an answer has no text, and not every server lists it.
    if not reply.num_completion_tokens - 1 <= len(reply.logprobs) <= reply.num_completion_tokens:
        return f"{len(reply.logprobs)} log probabilities came with {reply.num_completion_tokens} tokens"
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and _LEAST < value <= 1e-6


def _is_nan(value: Any) -> bool:
    return not isinstance(value, int | float) or math.isnan(value)


LOGPROBS = Gate(
    name="logprobs",
    question="Has every token a finite log probability?",
    protects="from logits that are not numbers: text looks sound until it does not",
    threshold="as many as tokens, each a number of at most 0",
    when="launch",
    run=_run,
)

__all__ = ["LOGPROBS", "fault_of"]
