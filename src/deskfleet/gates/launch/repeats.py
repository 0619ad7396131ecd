"""Launch gate `repeats`: a greedy question, alone, gives the same bytes each time."""

from __future__ import annotations

from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.garble import first_difference
from deskfleet.gates.puzzle import Puzzle, anything
from deskfleet.gates.questions import user
from deskfleet.gates.subject import Subject

_TIMES = 3
_TOKENS = 32


async def _run(subject: Subject) -> Finding:
    puzzle = Puzzle(
        "a story, once more", {"messages": user("Tell me a story about a fox.")}, anything, _TOKENS
    )
    answers = [await subject.ask(puzzle) for _ in range(_TIMES)]
    texts = []
    for answered in answers:
        if answered.reply is None:
            return answered.finding()
        texts.append(answered.reply.content)
    different = next((text for text in texts[1:] if text != texts[0]), None)
    if different is None:
        return passed(f"{_TIMES} of {_TIMES} equal", times=_TIMES)
    later_equal = len(set(texts[1:])) == 1
    cached = [answered.reply.num_cached_tokens for answered in answers if answered.reply]
    how = f"the first differs from later ones (cached tokens {cached})" if later_equal else "they differ"
    return failed(
        f"repeats are not deterministic: {how}, {first_difference(texts[0], different)}",
        measured=f"{len(set(texts))} different answers of {_TIMES}",
    )


REPEATS = Gate(
    name="repeats",
    question="Does the same greedy question get the same answer, alone, three times?",
    protects="from races, uninitialised memory and warm caches that are not what was cold",
    threshold="identical bytes",
    when="launch",
    run=_run,
    alone=True,
)

__all__ = ["REPEATS"]
