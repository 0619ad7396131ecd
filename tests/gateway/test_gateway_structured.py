"""Structured answers through the OpenAI client: what the engine is asked for, and what comes of it.

`improvise` answers as a model of random logits would under what it was asked for, so whatever holds for its answers is
held by the constraint alone. The real engine answers at the end of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from chat_scripts import (
    CHAT,
    CHECKPOINT,
    EOS_ID,
    THINK,
    TOKENIZER,
    TOOLS,
    ask,
    chatting,
    ids,
    says,
    settings,
    strict_format,
    strict_tool,
)
from openai import AsyncOpenAI

from deskfleet.endpoint import Constraint, GenerateRequest
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.constraints import ConstraintCompiler, check_constraint
from deskfleet.engine.sampler import SamplingState
from deskfleet.gateway.answer_form import Marker, tool_grammar
from deskfleet.gateway.app import serving
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.tokenizer import ThinkingTokens
from deskfleet.testing.scripted import Script, ScriptedEngine
from tests.engine.sampling import draw

VOCAB = 512
THINKING = ThinkingTokens(*ids("<think></think>"))
MARKER = Marker(*ids("｜DSML｜"), "｜DSML｜")
JSON_HELLO = [{"role": "user", "content": "hello in json"}]
PERSON = {
    "name": {"type": "string", "maxLength": 10},
    "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "tags": {"type": "array", "items": {"enum": ["a", "b"], "type": "string"}, "maxItems": 3},
}


def is_person(value: Any) -> bool:
    return (
        list(value) == list(PERSON)
        and isinstance(value["name"], str)
        and len(value["name"]) <= 10
        and type(value["age"]) is int
        and 0 <= value["age"] <= 130
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
    )


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(TOKENIZER, VOCAB, EOS_ID)


def improvise(request: GenerateRequest, seed: int, *, fond_of_calls: bool = True) -> Script:
    """What a model writes that knows nothing, save that it likes to come to an end."""
    params = request.sampling
    state = SamplingState(
        params,
        np.array(request.prompt_token_ids),
        VOCAB,
        constraint=None if params.constraint is None else compiler().compile(params.constraint),
        thinking=THINKING,
    )
    rng = np.random.default_rng(seed)
    closing = [EOS_ID, *ids('"}],>0</')]
    output: list[int] = []
    while EOS_ID not in output and len(output) < min(params.max_tokens, 3000):
        logits = rng.normal(0, 3, (1, VOCAB)).astype(np.float32)
        logits[:, closing] += 8
        if fond_of_calls:
            logits[:, MARKER.token_id] += 12
            logits[:, EOS_ID] -= 3
        output.append(draw(state.distributions(logits, ())[0], seed=seed, place=len(output)))
        state.accept(output[-1:])
    return Script(tuple(output), finish_reason="stop" if EOS_ID in output else "length")


# --- what the engine is asked for -------------------------------------------------------------------------------------


async def sampling_of(**fields: Any) -> Any:
    """How the engine was asked to sample."""
    async with chatting(says("{}")) as (client, engine):
        await ask(client, **fields)
    return engine.requests[0].sampling


async def test_penalties_and_bias_reach_the_engine() -> None:
    sampling = await sampling_of(
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"5": -100, "511": 2.5},
        extra_body={**CHAT, "repetition_penalty": 1.1},
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        -2,
        0.5,
        1.1,
    )
    assert sampling.logit_bias == ((5, -100.0), (511, 2.5))
    plain = await sampling_of()
    assert (plain.presence_penalty, plain.frequency_penalty, plain.repetition_penalty) == (0, 0, 1)
    assert (plain.logit_bias, plain.thinking_budget, plain.constraint) == ((), None, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 7},
        {"thinking_token_budget": 7},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"chat_template_kwargs": {"thinking_budget": 7}},
        {"thinking_budget": 7, "thinking_token_budget": 7},
    ],
    ids=str,
)
async def test_every_way_to_limit_a_thought(fields: dict[str, Any]) -> None:
    assert (await sampling_of(extra_body=fields)).thinking_budget == 7


ANY = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 7}}}}


async def test_response_formats_are_enforced() -> None:
    async def constraint(form: dict[str, Any]) -> Constraint | None:
        return (await sampling_of(messages=JSON_HELLO, response_format=form)).constraint

    assert await constraint({"type": "text"}) is None
    assert await constraint({"type": "json_object"}) == Constraint("json_object", param="response_format")
    assert await constraint({"type": "regex", "regex": "a+"}) == Constraint(
        "regex", "a+", "response_format.regex"
    )
    loose = await constraint({"type": "json_schema", "json_schema": {"name": "x", "schema": ANY}})
    assert loose is not None
    assert json.loads(loose.text) == {**ANY, "x-guidance": {"lenient": True}}
    check_constraint(loose)
    nested = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
    strict = await constraint(strict_format({"a": nested}, ["a"]))
    assert strict == Constraint(
        "json_schema", strict.text if strict else "", "response_format.json_schema.schema"
    )
    closed = {**nested, "additionalProperties": False}
    assert json.loads(strict.text) == {
        "type": "object",
        "properties": {"a": closed},
        "required": ["a"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("fields", "is_constrained"),
    [
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}, True),
        ({"tools": [strict_tool(PERSON, list(PERSON))]}, True),
        ({"tools": [strict_tool(PERSON, list(PERSON))], "tool_choice": "none"}, False),
        ({"tools": TOOLS, "response_format": strict_format(PERSON, list(PERSON))}, True),
    ],
    ids=str,
)
async def test_calls_are_enforced_when_they_are_strict_or_required(
    fields: dict[str, Any], is_constrained: bool
) -> None:
    constraint = (await sampling_of(**fields)).constraint
    assert (constraint is not None) == is_constrained
    if constraint is not None:
        assert constraint.kind == "grammar"
        check_constraint(constraint)
        assert ("weather" in constraint.text) == ("add" in constraint.text) or "tool_choice" in fields


# --- what comes of it -------------------------------------------------------------------------------------------------

COLOUR = {"type": "string", "enum": ["red", 'dark "blue"', "grün"]}
STRICT = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "anything"},
                "colour": {"$ref": "#/$defs/Colour"},
                "width": {"type": ["integer", "null"]},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
                "code": {"type": "string", "pattern": "^[A-C]{2,3}$"},
                "layers": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/Layer"}},
            },
            "required": ["text", "colour", "width", "maybe", "code", "layers"],
            "additionalProperties": False,
            "$defs": {
                "Colour": COLOUR,
                "Layer": {
                    "type": "object",
                    "properties": {
                        "colour": {"$ref": "#/$defs/Colour"},
                        "below": {"anyOf": [{"$ref": "#/$defs/Layer"}, {"type": "null"}]},
                    },
                    "required": ["colour", "below"],
                    "additionalProperties": False,
                },
            },
        },
    },
}
REST = strict_tool({}, [], "rest")


def is_layer(value: Any) -> bool:
    return (
        list(value) == ["colour", "below"]
        and value["colour"] in COLOUR["enum"]
        and (value["below"] is None or is_layer(value["below"]))
    )


def is_strict_call(name: str, arguments: Any) -> bool:
    if name == "rest":
        return arguments == {}
    return (
        name == "paint"
        and list(arguments) == list(STRICT["function"]["parameters"]["properties"])  # type: ignore[index]
        and isinstance(arguments["text"], str)
        and arguments["colour"] in COLOUR["enum"]
        and (arguments["width"] is None or type(arguments["width"]) is int)
        and isinstance(arguments["maybe"], str | bool)
        and re.fullmatch("[A-C]{2,3}", arguments["code"]) is not None
        and len(arguments["layers"]) <= 2
        and all(is_layer(layer) for layer in arguments["layers"])
    )


async def answers(num_answers: int, *, fond_of_calls: bool = True, **fields: Any) -> list[Any]:
    """Improvised answers as the client reads them: finish reason and message."""
    seeds = iter(range(num_answers))
    engine = ScriptedEngine(
        lambda request: improvise(request, next(seeds), fond_of_calls=fond_of_calls), max_model_len=8192
    )
    async with chatting(engine) as (client, _):
        return [(await ask(client, **fields)).choices[0] for _ in range(num_answers)]


@pytest.mark.parametrize("fields", [CHAT, {**THINK, "thinking_budget": 20}], ids=["chat", "thinking"])
async def test_strict_calls_have_their_form_whatever_the_model_is(fields: dict[str, Any]) -> None:
    choices = await answers(25, tools=[STRICT, REST], extra_body=fields)
    calls = [call.function for choice in choices for call in choice.message.tool_calls or ()]
    ended = [choice for choice in choices if choice.finish_reason != "length"]
    assert len(ended) > 15
    assert {call.name for call in calls} == {"paint", "rest"}, "calls of both tools came up"
    for choice in ended:
        for call in choice.message.tool_calls or ():
            assert is_strict_call(call.function.name, json.loads(call.function.arguments)), call
        assert "DSML" not in (choice.message.content or "")


@pytest.mark.parametrize("named", [False, True])
async def test_a_required_call_comes_whatever_the_model_is(named: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "add"}} if named else "required"
    for answer in await answers(20, tools=TOOLS, tool_choice=choice):
        if answer.finish_reason != "length":
            assert answer.finish_reason == "tool_calls"
            for call in answer.message.tool_calls:
                assert call.function.name in (["add"] if named else ["weather", "add"])
                assert isinstance(json.loads(call.function.arguments), dict)


async def test_beside_tools_an_answer_is_a_call_or_has_its_schema() -> None:
    texts = []
    for fond_of_calls in (False, True):
        fields = {"tools": TOOLS, "response_format": strict_format(PERSON, list(PERSON))}
        for answer in await answers(20, fond_of_calls=fond_of_calls, **fields):
            if answer.finish_reason == "stop":
                texts.append(answer.message.content)
            elif answer.finish_reason == "tool_calls":
                assert not (answer.message.content or "").strip()
    assert len(texts) > 5
    assert all(is_person(json.loads(text)) for text in texts)


@pytest.mark.parametrize("fields", [CHAT, {**THINK, "thinking_budget": 10}], ids=["chat", "thinking"])
async def test_an_answer_has_its_schema_whatever_the_model_is(fields: dict[str, Any]) -> None:
    form = strict_format(PERSON, list(PERSON))
    for answer in await answers(20, fond_of_calls=False, response_format=form, extra_body=fields):
        assert answer.finish_reason == "stop"
        assert is_person(json.loads(answer.message.content))


def test_calls_as_the_publisher_renders_them_are_in_the_grammar() -> None:
    arguments = '<｜DSML｜ parameter name="city" string="true">K <b>ö</b>ln </ x</｜DSML｜ parameter>\n'
    call = f'<｜DSML｜ invoke name="weather">\n{arguments}</｜DSML｜ invoke>'
    empty = '<｜DSML｜ invoke name="rest">\n\n</｜DSML｜ invoke>'
    block = f"\n\n<｜DSML｜ calls>\n{call}\n{empty}\n</｜DSML｜ calls>"
    functions = [strict_tool({"city": {"type": "string"}}, ["city"], "weather")["function"], REST["function"]]
    grammar = Constraint("grammar", tool_grammar(functions, MARKER, is_begun=False))

    def is_allowed(text: str) -> bool:
        constraint = compiler().compile(grammar)
        return all(constraint.consume(token_id) for token_id in (*ids(text), EOS_ID))

    assert is_allowed("Let me see: a < b." + block)
    assert is_allowed("No.")
    assert not is_allowed(block.replace("city", "town"))
    assert not is_allowed(block.replace('string="true"', 'string="false"'))
    assert not is_allowed(block.replace(arguments, ""))
    assert not is_allowed(block + "more")
    spelled_out = [*ids("calls are made of ｜DSML"), *ids("｜"), EOS_ID]
    assert MARKER.token_id not in spelled_out
    constraint = compiler().compile(grammar)
    assert not all(constraint.consume(token_id) for token_id in spelled_out), "to the parser it is the same"


# --- the real engine --------------------------------------------------------------------------------------------------

VERDICT = {"ok": {"type": "boolean"}, "colour": COLOUR}
FORM = strict_format(VERDICT, list(VERDICT))
# A model that knows nothing likes whitespace too much for a test that should take a second.
NO_SPACE = {
    str(i): -100 for i in range(VOCAB) if not TOKENIZER.decode([i], skip_special_tokens=False).strip()
}


def is_verdict(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["ok", "colour"] and value["ok"] in (True, False) and value["colour"] in COLOUR["enum"]
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncOpenAI]:
    options = EngineOptions(max_model_len=1024, max_num_seqs=4, threads_per_rank=1)
    async with (
        EngineClient(Checkpoint.open(CHECKPOINT), options) as engine,
        serving(engine, settings()) as endpoint,
        AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key="unused", max_retries=0) as running,
    ):
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_the_real_engine_answers_in_json(client: AsyncOpenAI, stream: bool, temperature: float) -> None:
    fields = {"response_format": FORM, "temperature": temperature, "seed": 5, "logit_bias": NO_SPACE}
    if stream:
        chunks = [chunk async for chunk in await ask(client, stream=True, **fields)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    else:
        text = (await ask(client, **fields)).choices[0].message.content
    assert is_verdict(text), text


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("budget", [0, 4])
async def test_the_real_engine_thinks_as_long_as_allowed_and_then_answers_in_json(
    client: AsyncOpenAI, budget: int
) -> None:
    bias = NO_SPACE | {str(THINKING.end): -100}  # it ends a thought only because it must
    body = {**THINK, "thinking_budget": budget}
    answer = await ask(client, response_format=FORM, extra_body=body, seed=3, logit_bias=bias)
    assert is_verdict(answer.choices[0].message.content)
    entries = answer.usage.completion_tokens_details.reasoning_tokens
    assert entries == budget


@pytest.mark.asyncio(loop_scope="module")
async def test_the_real_engine_calls_what_it_must(client: AsyncOpenAI) -> None:
    tool = strict_tool(VERDICT, list(VERDICT))
    # One call is enough.
    bias = {str(token_id): 20 for token_id in ids("</")}
    answer = await ask(client, tools=[tool], tool_choice="required", temperature=0, logit_bias=bias)
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "strictly"
    assert is_verdict(call.arguments)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bias_decides(client: AsyncOpenAI) -> None:
    (wanted,) = ids("q")
    answer = await ask(client, temperature=0, max_tokens=5, logit_bias={str(wanted): 100})
    assert answer.choices[0].message.content == "qqqqq"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "regex", "regex": "(a"}},
            "response_format.regex",
            "response_format.regex: this regex cannot be enforced: .*unclosed group",
        ),
        (
            {"response_format": strict_format({"a": {"type": "integer", "not": {"const": 7}}}, ["a"])},
            "response_format.json_schema.schema",
            r'Unimplemented keys: \["not"\]',
        ),
        (
            {"tools": [strict_tool({"a": {"type": "string", "format": "no-such"}}, ["a"])]},
            "tools",
            "no-such",
        ),
    ],
    ids=["regex", "schema", "tool"],
)
async def test_what_cannot_be_enforced_is_a_bad_request(
    client: AsyncOpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            await ask(client, stream=stream, **fields)
        assert refused.value.param == param
    assert (await ask(client, max_tokens=1)).choices, "the engine lives on"
