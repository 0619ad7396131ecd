"""Launch gate `model`: the model that answers is the model that is listed, and the one that is wanted."""

from __future__ import annotations

from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.subject import Subject


async def _run(subject: Subject) -> Finding:
    listed = subject.session.model.id
    wanted = subject.limits.expected_model
    if wanted is not None and wanted != listed:
        return failed(f"a stale model: the server lists {listed!r}, wanted is {wanted!r}", measured=listed)
    answered = await subject.ask(subject.questions.sums()[0])
    if answered.reply is None:
        return answered.finding()
    name = answered.reply.model
    if name != listed:
        fault = f"a stale model answers: the server lists {listed!r}, the answer came from {name!r}"
        subject.remark(answered, fault)
        return failed(fault, measured=name)
    return passed(listed, model=listed)


MODEL = Gate(
    name="model",
    question="Is the model that answers the one that is listed (and the one wanted, with --model)?",
    protects="from measuring, or serving, what was left running from before",
    threshold="answers name the listed model",
    when="launch",
    run=_run,
    alone=True,
)

__all__ = ["MODEL"]
