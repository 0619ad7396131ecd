"""Writes the question sets of `deskfleet eval`, with
`python -m pocket.data.questions --write src/deskfleet/evaluation/pocket`.

Owns which questions are asked, how many of each kind, and how long a right answer is. The form of the files is
`deskfleet.evaluation.questions`'s. Always the same files for the same generators and tokenizer.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from deskfleet.evaluation.questions import TASKS, StoredNeedle, StoredQuestion
from pocket.data import needle
from pocket.data.evaluate import chat_request, expected, fact_set, launch_set, prompt_set
from pocket.data.example import Example, draw, num_checks
from pocket.data.render import Renderer
from pocket.data.stream import VISION
from pocket.tokenizer import load_tokenizer

NUM_QUESTIONS = 60
"""Of every task, for each of thinking off and on. There are as many cells of length and depth for needles."""

_FEWER = {"world": 15}
"""Where not so many are held out."""

_HARD = 50  # efforts from here on tell best how long the reasoning of effort 100 is

Lines = list[StoredQuestion] | list[StoredNeedle]
_Choice = tuple[str, Callable[[Example], bool]]


def _any(example: Example) -> bool:
    return True


_DRAWN: dict[str, _Choice] = {
    "count": ("count", _any),
    "spell": ("spell", _any),
    "arithmetic": ("arithmetic", _any),
    "primality": ("primality", _any),
    "tool-calls": ("tools", lambda example: len(example.expect.calls) == 1),
    "parallel-calls": ("tools", lambda example: len(example.expect.calls) > 1),
    "tool-answers": ("tools", lambda example: example.expect.kind == "exact"),
    "json": ("json", lambda example: example.response_schema is None),
    "json-format": ("json", lambda example: example.response_schema is not None),
    "facts": ("facts", _any),
    "practice-facts": ("practice facts", _any),
    "world": ("world", _any),
    "vision": ("vision", _any),
    "chat": ("chat", _any),
    "prose": ("prose", _any),
    "code": ("code", _any),
}
"""Task of `deskfleet eval` -> generator, and which of its examples belong there."""


def sets() -> Iterator[tuple[str, Lines]]:
    """Yield the name and the questions of every set."""
    renderer = Renderer(load_tokenizer(), VISION)
    for task in TASKS:
        if task == "needle":
            yield task, [*_needles(renderer, 1, thinking=False), *_needles(renderer, 1, thinking=True)]
        elif task == "needles":
            yield task, [*_needles(renderer, 4, thinking=False), *_needles(renderer, 4, thinking=True)]
        else:
            yield task, [_stored(renderer, example) for example in _examples(task)]


def filler() -> tuple[str, ...]:
    """Return the sentences between which needles are hidden."""
    return needle.filler()


def write(directory: Path) -> None:
    """Write every set and the filler into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    encoder = msgspec.json.Encoder()
    for name, lines in sets():
        (directory / f"{name}.jsonl").write_bytes(b"".join(encoder.encode(line) + b"\n" for line in lines))
    (directory / "filler.txt").write_text("\n".join(filler()) + "\n", encoding="utf-8")


def _examples(task: str) -> Iterator[Example]:
    """Yield the examples of a set: thinking off, then on (of prose and code not).

    Thinking off, every fact that has a held-out wording is asked once.
    """
    if task == "launch":
        yield from launch_set()
        return
    generator, belongs = _DRAWN[task]
    count = _FEWER.get(task, NUM_QUESTIONS)
    if task == "facts":
        yield from fact_set("book")
    elif task == "practice-facts":
        yield from fact_set("practice")[:count]
    else:
        yield from prompt_set(generator, count, effort=None, where=belongs)
    if task in ("prose", "code"):
        return
    yield from prompt_set(
        generator, count, where=lambda example: (example.effort or 0) >= _HARD and belongs(example)
    )


def _stored(renderer: Renderer, example: Example) -> StoredQuestion:
    request = chat_request(example)
    del request["thinking"]
    request.pop("reasoning_effort", None)
    answer_tokens, reasoning_tokens = _lengths(renderer, example)
    return StoredQuestion(
        thinking=example.effort is not None,
        request=request,
        expected=expected(example.expect),
        answer_tokens=answer_tokens,
        reasoning_tokens=reasoning_tokens,
    )


def _needles(renderer: Renderer, most: int, *, thinking: bool) -> Iterator[StoredNeedle]:
    """Yield needles with up to `most` statements (at least two, if more than one), some or all of them asked for."""
    rng = Random(f"pocket needle questions {most} {thinking}")
    for _ in range(NUM_QUESTIONS):
        count = rng.randint(min(2, most), most)
        generate = partial(
            needle.example,
            num_tokens=0,
            depths=[index / count for index in range(count)],
            num_asked=rng.randint(1, count),
            effort=100 if thinking else None,
        )
        example = draw(generate, rng, "eval")
        if not isinstance(example, Example):
            raise TypeError("needles are conversations")
        *head, statements, question = example.messages[0].content.split("\n\n")
        answer_tokens, reasoning_tokens = _lengths(renderer, example)
        yield StoredNeedle(
            thinking=thinking,
            head="".join(head),
            statements=tuple(statements.replace(". ", ".\n").split("\n")),
            question=question,
            answer=example.expect.text,
            answer_tokens=answer_tokens,
            reasoning_tokens=reasoning_tokens,
        )


def _lengths(renderer: Renderer, example: Example) -> tuple[int, int]:
    """Return the tokens of the right answer, and of its reasoning as it would be at effort 100."""
    num_said = len(renderer.render_conversation(example)) - len(renderer.render_prompt(example))
    if example.effort is None:
        return num_said, 0
    num_thought = renderer.num_tokens(example.messages[-1].reasoning or "")
    return num_said - num_thought, math.ceil(num_thought * num_checks(100) / num_checks(example.effort))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pocket.data.questions", description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="DIR", help="directory of the sets")
    write(parser.parse_args().write)


if __name__ == "__main__":
    main()
