"""Launch gate `image`: the colour of a square, in two pictures that differ in nothing else."""

from __future__ import annotations

from deskfleet.gates.contract import Finding, Gate, failed, passed
from deskfleet.gates.questions import ASK_COLOUR, COLOURS, plain, square
from deskfleet.gates.subject import Subject

_LEAST_IMAGE_TOKENS = 4


async def _run(subject: Subject) -> Finding:
    colours = subject.rng.sample(sorted(COLOURS), 2)
    answers = await subject.ask_all([square(colour, subject.spare_tokens) for colour in colours], 2)
    blind = await subject.ask(plain(ASK_COLOUR, 1))
    seen = [answered.reply for answered in answers if answered.reply is not None]
    if blind.reply is None:
        return blind.finding()
    if len(seen) < len(answers):
        return next(answered for answered in answers if answered.reply is None).finding()
    more = min(reply.num_prompt_tokens for reply in seen) - blind.reply.num_prompt_tokens
    if more < _LEAST_IMAGE_TOKENS:
        return failed(f"the image is ignored: the prompt has {more} tokens more with it than without")
    wrong = [answered for answered in answers if not answered.is_right]
    if wrong:
        same = len({reply.content for reply in seen}) == 1
        ignored = f"the image is ignored: {colours[0]} and {colours[1]} get the same answer; " if same else ""
        return failed(ignored + wrong[0].sentence)
    return passed(f"{colours[0]} and {colours[1]}, {more} tokens an image", image_tokens=more)


IMAGE = Gate(
    name="image",
    question="Is an image looked at?",
    protects="from answers that are guesses because the picture never reached the model",
    threshold="both colours right, the image counted in the prompt",
    when="launch",
    run=_run,
)

__all__ = ["IMAGE"]
