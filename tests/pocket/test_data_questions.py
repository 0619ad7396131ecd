"""The stored question sets of `deskfleet eval`: what the generators give, held out, and as long as they say."""

from __future__ import annotations

import base64
import io
import re
from importlib.resources import files
from itertools import permutations
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from deskfleet.evaluation.questions import NEEDLE_TOKENS, TASKS, StoredNeedle, hide, questions
from pocket import tokenizer as spelling
from pocket.data import needle
from pocket.data.example import Example, Expect, Message, split_of
from pocket.data.questions import filler, sets
from pocket.data.render import Renderer
from pocket.data.stream import VISION

STORED = files("deskfleet.evaluation") / "pocket"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(spelling.load_tokenizer(), VISION)


def with_pixels(value: Any) -> Any:
    """The value with its pictures decoded: the same picture may be compressed to other bytes."""
    if isinstance(value, dict):
        return {name: with_pixels(each) for name, each in value.items()}
    if isinstance(value, list):
        return [with_pixels(each) for each in value]
    if isinstance(value, str) and value.startswith("data:image/png;base64,"):
        image = Image.open(io.BytesIO(base64.b64decode(value.partition(",")[2])))
        return np.asarray(image).tobytes(), image.size
    return value


def test_the_stored_sets_are_those_of_the_generators() -> None:
    """Renew them with `python -m pocket.data.questions --write src/deskfleet/evaluation/pocket`."""
    made = dict(sets())
    assert list(made) == list(TASKS)
    for name, lines in made.items():
        stored = [msgspec.json.decode(line) for line in (STORED / f"{name}.jsonl").read_bytes().splitlines()]
        assert with_pixels(stored) == with_pixels(msgspec.json.decode(msgspec.json.encode(lines))), name
    assert tuple((STORED / "filler.txt").read_text("utf-8").splitlines()) == filler()
    assert {path.name for path in STORED.iterdir()} == {"filler.txt", *(f"{name}.jsonl" for name in made)}


def test_the_stored_sets_are_small() -> None:
    assert sum(len(path.read_bytes()) for path in STORED.iterdir()) < 2_000_000


@pytest.mark.parametrize("task", TASKS)
def test_questions_are_different_and_enough(task: str) -> None:
    for thinking in (False, True):
        found = questions(task, thinking=thinking, count=1000)
        least = {"launch": 8, "world": 15}.get(task, 60)
        if task in ("launch", "prose", "code") and thinking:
            least = 0
        assert len(found) >= least
        assert len({repr(question.request) for question in found}) == len(found)


def stored_needles(name: str) -> list[StoredNeedle]:
    lines = (STORED / name).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StoredNeedle) for line in lines]


@pytest.mark.parametrize("name", ["needle.jsonl", "needles.jsonl"])
def test_needles_are_held_out_and_their_answers_follow_from_what_is_stated(name: str) -> None:
    for stored in stored_needles(name):
        pairs = dict(re.search(r"code of (.+) is (.+)\.$", each).groups() for each in stored.statements)  # type: ignore[union-attr]
        assert len(pairs) == len(stored.statements)
        asked = [
            key
            for key in pairs
            if re.search(rf"code(s)? of .*\b{key}\b|code does {key} have", stored.question)
        ]
        said = dict(re.findall(r"The secret code of ([\w ]+?) is ([\w ]+)\.", stored.answer))
        assert said == {key: pairs[key] for key in asked}
        # The key of an example names its values in the order in which they were drawn.
        keys = [" ".join(order) for order in permutations(pairs.values())]
        assert any(split_of(Example(needle.TASK, key, (), Expect())) == "eval" for key in keys)


@pytest.mark.parametrize("num_tokens", NEEDLE_TOKENS)
@pytest.mark.parametrize("thinking", [False, True])
def test_texts_are_as_long_as_they_say(num_tokens: int, thinking: bool, renderer: Renderer) -> None:
    """Prompt and right answer, in Pocket's tokens; a thought alone may be longer than a short text."""
    for stored in [each for each in stored_needles("needle.jsonl") if each.thinking == thinking][:5]:
        question = hide(stored, num_tokens, [0.5], Random(num_tokens))
        messages = (Message("user", question.request["messages"][0]["content"]), Message("assistant"))
        prompt = renderer.render_prompt(Example("needle", "", messages, effort=100 if thinking else None))
        total = len(prompt) + stored.answer_tokens + stored.reasoning_tokens
        shortest = 60 + stored.answer_tokens + stored.reasoning_tokens
        assert total == pytest.approx(max(num_tokens, shortest), rel=0.04, abs=70)


def test_a_needle_lies_at_its_depth() -> None:
    stored = stored_needles("needle.jsonl")[0]
    for depth in (0.0, 0.25, 1.0):
        text = hide(stored, 2000, [depth], Random(1)).text
        body = text.removeprefix(stored.head).removesuffix(stored.question).strip()
        where = body.index(stored.statements[0]) / (len(body) - len(stored.statements[0]))
        assert where == pytest.approx(depth, abs=0.03)
