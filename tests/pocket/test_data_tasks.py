"""Every task: right answers by other means, disjoint splits, reasoning that grows with effort."""

from __future__ import annotations

import ast
import io
import json
import re
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from PIL import Image

from deskfleet.engine.images import prepare_image
from pocket.batch import ImagePlacement
from pocket.data import arithmetic, code, drill, facts, json_objects, needle, primality, quote, tools, vision
from pocket.data.evaluate import EVAL_TASKS, eval_set, fact_set, launch_set, needle_grid, prompt_set
from pocket.data.example import Example, PlainText, draw, num_checks, split_of
from pocket.data.render import Renderer, place_image
from pocket.data.stream import GENERATORS, VISION
from pocket.tokenizer import load_tokenizer


def examples(task: str, count: int, seed: int = 0) -> list[Example]:
    rng = Random(f"tasks {task} {seed}")
    drawn = (draw(GENERATORS[task], rng, "train") for _ in range(count))
    return [example for example in drawn if isinstance(example, Example)]


@pytest.mark.parametrize("task", GENERATORS)
def test_a_seed_gives_the_same_examples(task: str) -> None:
    first, second = ([draw(GENERATORS[task], Random(7), "train") for _ in range(3)] for _ in range(2))
    assert repr(first) == repr(second)


@pytest.mark.parametrize("task", EVAL_TASKS)
def test_no_evaluated_key_is_trained_on(task: str) -> None:
    held_out = {example.key for example in eval_set(task, 40)}
    assert len(held_out) == 40
    trained = {example.key for example in examples(task, 1500) if not example.always_train}
    assert held_out.isdisjoint(trained)
    assert all(split_of(example) == "eval" for example in eval_set(task, 10, seed=3))


def test_an_evaluation_set_is_always_the_same() -> None:
    assert repr(eval_set("arithmetic", 10)) == repr(eval_set("arithmetic", 10))
    assert repr(eval_set("arithmetic", 10)) != repr(eval_set("arithmetic", 10, seed=1))
    assert {example.effort for example in eval_set("json", 5, effort=None)} == {None}


def test_prompts_of_any_task_can_be_drawn_but_only_some_have_right_answers() -> None:
    assert {example.task for example in prompt_set("prose", 5)} == {"prose"}
    with pytest.raises(ValueError, match="no right answers"):
        eval_set("prose", 5)


@pytest.mark.parametrize("task", [*EVAL_TASKS, "prose", "code"])
def test_reasoning_is_there_with_an_effort_only(task: str) -> None:
    efforts = set()
    for example in examples(task, 120):
        last = example.messages[-1]
        assert (last.reasoning is not None) == (example.effort is not None)
        efforts.add(example.effort is None)
        lines = (last.reasoning or "").splitlines()
        assert len(set(lines)) == len(lines)
        if example.effort is not None:
            assert sum(line.startswith("Check ") for line in lines) == num_checks(example.effort)
    assert efforts == {True, False}


def test_checks_grow_with_effort() -> None:
    assert [num_checks(effort) for effort in (1, 10, 25, 50, 75, 100)] == [1, 2, 3, 6, 8, 11]


def test_every_equation_of_arithmetic_holds() -> None:
    seen = 0
    for example in examples("arithmetic", 600):
        last = example.messages[-1]
        text = f"{last.reasoning or ''}\n{last.content}"
        for left, right in re.findall(r"((?:-?\d+ [-+*] )+-?\d+) = (-?\d+)", text):
            assert eval(left) == int(right), text  # digits and signs only
            seen += 1
    assert seen > 2000


def test_digit_steps_of_sums_are_right() -> None:
    """`9 - 3 - 1 = 5, write 5, borrow 0`: the digits written, last first, are the result's."""
    for example in examples("arithmetic", 400):
        thought = example.messages[-1].reasoning
        written = re.findall(r"write (\d), (?:carry|borrow) (\d)", thought or "")
        if written:
            value = abs(int(example.messages[-1].content.split()[-1]))
            carry = written[-1][1] if "carry" in (thought or "") else ""
            assert int(carry + "".join(digit for digit, _ in reversed(written))) == value


def test_primality_is_right() -> None:
    for example in examples("primality", 300):
        number = int(re.findall(r"\d+", example.messages[0].content)[0])
        prime = number > 1 and all(number % divisor for divisor in range(2, number))
        assert example.messages[-1].content.startswith("Yes" if prime else "No")
        for n, a, b, rest in re.findall(
            r"(\d+) = (\d+) \* (\d+) \+ (\d+)", example.messages[-1].reasoning or ""
        ):
            assert int(n) == int(a) * int(b) + int(rest)
            assert int(rest) < int(a)


def test_counts_are_ranges_and_reach_a_hundred() -> None:
    hundred = ", ".join(map(str, range(1, 101)))
    found = examples("count", 300)
    assert any(e.messages[0].content == "Count to 100." and e.messages[-1].content == hundred for e in found)
    for example in found:
        if re.fullmatch(r"-?\d+(, -?\d+)*", example.messages[-1].content):
            numbers = [int(number) for number in example.messages[-1].content.split(", ")]
            assert len({b - a for a, b in pairwise(numbers)}) <= 1


def test_needles_hold_what_is_asked_and_stand_where_they_should() -> None:
    for (length, depth), cell in needle_grid((300, 1500), num_depths=4).items():
        text = cell[0].messages[0].content
        stated = re.search(r"secret code of ([\w ]+) is ([\w ]+)\.", text)
        assert stated is not None
        assert cell[0].expect.text == f"The secret code of {stated[1]} is {stated[2]}."
        assert abs(stated.start() / len(text) - depth) < 0.25
        tokens = Renderer(load_tokenizer(), VISION).render_prompt(cell[0])
        assert abs(len(tokens) - length) < 0.15 * length + 40


def test_needles_do_not_exceed_the_row() -> None:
    renderer, rng = Renderer(load_tokenizer(), VISION), Random(3)
    lengths = [len(renderer.render(needle.generate(rng, 1024))) for _ in range(200)]
    assert max(lengths) < 1300
    assert np.median(lengths) < 500


def test_objects_follow_their_schema() -> None:
    def fits(value: object, schema: dict[str, object]) -> bool:
        kinds = {
            "string": str,
            "integer": int,
            "number": float,
            "boolean": bool,
            "array": list,
            "object": dict,
        }
        if type(value) is not kinds[str(schema["type"])] or value not in schema.get("enum", [value]):  # type: ignore[operator]
            return False
        if isinstance(value, list):
            return all(fits(item, schema["items"]) for item in value)  # type: ignore[arg-type]
        if isinstance(value, dict):
            properties: dict[str, dict[str, object]] = schema["properties"]  # type: ignore[assignment]
            return list(value) == list(properties) and all(fits(value[n], s) for n, s in properties.items())
        return True

    rng, in_format = Random(5), 0
    for _ in range(300):
        example = json_objects.generate(rng)
        schema = example.response_schema
        in_format += schema is not None
        if schema is None:
            schema = json.JSONDecoder().raw_decode(re.findall(r'\{"type".*', example.messages[0].content)[0])[
                0
            ]
        assert fits(json.loads(example.messages[-1].content), schema)
    assert 30 < in_format < 150


def test_calls_use_defined_tools_and_all_their_parameters() -> None:
    rng, kinds = Random(6), set()
    for _ in range(300):
        example = tools.generate(rng)
        defined = {tool["name"]: tool["parameters"] for tool in example.tools}
        kinds.add((len(example.tools), example.expect.kind))
        for message in example.messages:
            for call in message.calls:
                assert list(call.arguments) == defined[call.name]["required"]
                for name, value in call.arguments.items():
                    enum = defined[call.name]["properties"][name].get("enum")
                    assert enum is None or value in enum
    assert {count for count, _ in kinds} == {1, 2, 3, 4, 5, 6}
    assert {kind for _, kind in kinds} == {"calls", "exact"}


@pytest.mark.parametrize("edition", [1, 2])
def test_facts_have_names_of_few_tokens_and_one_answer_each(edition: int) -> None:
    tokenizer = load_tokenizer()
    both = (*facts.facts("book", edition), *facts.facts("practice", edition))
    assert len({fact.name for fact in both}) == len(both) == 2 * facts.NUM_FACTS
    lengths = [len(tokenizer.encode_text(f" {fact.name}")) for fact in both]
    assert min(lengths) >= 2, "one token would hold the fact in the embedding"
    assert sum(length > 3 for length in lengths) < (8 if edition == 1 else 1), (
        "an n-gram of four must hold the name and the verb"
    )
    assert len(fact_set()) > 0.3 * facts.NUM_FACTS


def test_two_tokens_do_not_tell_a_fact_of_the_second_edition() -> None:
    """Whoever knows the name without the word before it, but not the word, guesses among eight answers."""
    for book in ("book", "practice"):
        answers: dict[str, list[str]] = {}
        for fact in facts.facts(book, edition=2):  # type: ignore[arg-type]
            answers.setdefault(fact.name.split()[-1], []).append(fact.answer)
        assert all(len(set(each)) == len(each) for each in answers.values())
        assert sum(len(each) == 8 for each in answers.values()) == 48
    bases = [{fact.name.split()[-1] for fact in facts.facts(book, 2)} for book in ("book", "practice")]  # type: ignore[arg-type]
    assert not bases[0] & bases[1]


def test_functions_compile() -> None:
    rng = Random(8)
    for _ in range(200):
        what, name, source = code.function(rng)
        tree = ast.parse(source).body[0]
        assert isinstance(tree, ast.FunctionDef)
        assert tree.name == name
        assert (ast.get_docstring(tree) or "").lower() == f"{what}.".lower()


def test_pictures_are_what_the_engine_makes_of_their_file() -> None:
    rng = Random(9)
    padded = 0
    for _ in range(60):
        pixels = vision.generate(rng).messages[0].images[0]
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        prepared = prepare_image(buffer.getvalue(), VISION)
        placement: ImagePlacement = place_image(pixels, 5, VISION)
        assert np.array_equal(placement.pixels, prepared.pixels)
        assert tuple(placement.token_types) == prepared.token_types
        assert placement.end == 5 + prepared.grid.num_tokens <= 5 + 64
        padded += placement.pixels.shape != pixels.shape
    assert padded


def test_a_picture_shows_the_colour_that_is_named() -> None:
    rng = Random(10)
    for _ in range(40):
        example = vision.generate(rng)
        named = [
            colour for colour in vision.PALETTE if f" {colour} " in f" {example.messages[-1].content[:-1]} "
        ]
        present = set(map(tuple, example.messages[0].images[0].reshape(-1, 3)))
        assert all(vision.PALETTE[colour] in present for colour in named)


def test_launch_questions_are_trained_as_they_stand() -> None:
    asked = {example.messages[0].content for example in launch_set()}
    assert {"Count to 100.", "What is 19 + 23?"} <= asked
    trained = {example.messages[0].content for example in examples("arithmetic", 3000)}
    assert "What is 19 + 23?" in trained
    assert all(split_of(example) == "train" for example in launch_set())


def test_primes_below_the_limit() -> None:
    assert [n for n in range(2, 30) if primality.smallest_divisor(n) is None] == [
        2,
        3,
        5,
        7,
        11,
        13,
        17,
        19,
        23,
        29,
    ]
    assert primality.smallest_divisor(primality.MAX_THOUGHT - 1) == 3


def test_plain_text_is_weighed_evenly() -> None:
    document = Renderer(load_tokenizer(), VISION).render(PlainText("t", "k", "Some words.", weight=0.25))
    assert document.target_weight.tolist() == [0.0] + [0.25] * (len(document) - 1)


def test_arithmetic_without_thinking_stays_small() -> None:
    for example in examples("arithmetic", 400):
        left, sign, right = example.key.split()
        if example.effort is None:
            assert max(int(left), int(right)) <= (100 if example.always_train else 99)
            assert sign != "*" or min(int(left), int(right)) <= 12
    assert arithmetic.example(7, "*", 8, "{sum}", None).messages[-1].content == "7 * 8 = 56"


def test_a_drill_holds_exchanges_that_their_tasks_train_on_and_no_other() -> None:
    rng, sums, held_out = Random(11), 0, {example.key for example in eval_set("arithmetic", 400)}
    for _ in range(150):
        example = drill.generate(rng)
        assert example.effort is None
        assert 3 <= len(example.messages) / 2 <= 14
        for asked, said in zip(example.messages[::2], example.messages[1::2], strict=True):
            assert (asked.role, said.role, said.reasoning) == ("user", "assistant", None)
            if found := re.fullmatch(r"(\d+ [-+*] \d+) = (-?\d+)", said.content):
                sums += 1
                assert found[1] in asked.content
                assert eval(found[1]) == int(found[2])  # digits and a sign only
                assert found[1] not in held_out
    assert sums > 200
    with pytest.raises(ValueError, match="no eval example"):
        draw(drill.generate, rng, "eval", attempts=20)


def test_quoted_words_are_those_of_the_prompt() -> None:
    rng, names = Random(12), {fact.name for fact in facts.facts("book")}
    seen_names, forms = 0, set()
    for _ in range(300):
        example = quote.generate(rng)
        asked, said = (message.content for message in example.messages)
        words = re.findall(r"[A-Za-z]+", said)
        assert all(re.search(rf"\b{word}\b", asked) for word in words if word != "and")
        forms.add(said[0] if said[0] in "[{" else "_" in said)
        seen_names += any(word in names for word in words)
        if said[0] in "[{":
            json.loads(said)
    assert forms == {"[", "{", True, False}
    assert seen_names > 30  # of the book, but never what is true of them


def test_a_drill_about_a_picture_is_right_and_held_out_like_its_picture() -> None:
    rng = Random(13)
    for _ in range(60):
        example = vision.generate_drill(rng)
        pixels = example.messages[0].images[0]
        assert [bool(message.images) for message in example.messages[2::2]] == [False] * (
            len(example.messages) // 2 - 1
        )
        present = set(map(tuple, pixels.reshape(-1, 3)))
        for said in example.messages[1::2]:
            named = [colour for colour in vision.PALETTE if f" {colour} " in f" {said.content[:-1]} "]
            assert all(vision.PALETTE[colour] in present for colour in named)
    assert {split_of(vision.generate_drill(rng)) for _ in range(60)} == {"train", "eval"}
