"""One table of spellings for thinking, effort and budget: the same in every protocol, and said in a header."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from chat_scripts import HELLO, MODEL, TOOLS, says, text_of
from msgspec import Struct
from protocol_clients import Served, served
from protocol_parsers import request_body

from deskfleet.errors import RequestError
from deskfleet.gateway.fields import ConversationFields, Decisions, read_fields
from deskfleet.gateway.thinking import EFFORT_TIERS, HEADER, SPELLINGS, resolve_thinking

ROUTES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def nested(path: str, value: Any) -> dict[str, Any]:
    """A body's fields with `value` at `path`; what must stand beside it stands there."""
    name, _, rest = path.partition(".")
    if not rest:
        return {name: value}
    more = {"type": "enabled"} if path == "thinking.budget_tokens" else {}
    return {name: {rest: value, **more}}


VALUES: dict[str, list[tuple[Any, str]]] = {
    "switch": [(True, "on; effort=75"), (False, "off")],
    "effort": [
        ("low", "on; effort=50"),
        ("medium", "on; effort=75"),
        ("xhigh", "on; effort=75"),
        ("max", "on; effort=100"),
        (37, "on; effort=37"),
        (0.6, "on; effort=60"),
        (0.99, "on; effort=99"),
        ("none", "off"),
        (0.0, "off"),
    ],
    "budget": [(99, "on; effort=75; budget=99")],
}

EVERY = [
    (spelling.path, value, told)
    for spelling in SPELLINGS
    for value, told in (
        [("enabled", "on; effort=75"), ("adaptive", "on; effort=75"), ("disabled", "off")]
        if spelling.path == "thinking.type"
        else VALUES[spelling.kind]
    )
]


async def header_of(to: Served, name: str, fields: dict[str, Any], *, tools: bool = False) -> str:
    status, body, headers = await to.post(
        ROUTES[name], request_body(name, tools=tools, thinking=True) | fields
    )
    assert status == 200, body
    return str(headers[HEADER])


def without_switch(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """`request_body` switches thinking; here only `fields` do."""
    return {"thinking": None, **fields}


@pytest.mark.parametrize("name", ROUTES)
async def test_every_spelling_in_every_protocol(name: str) -> None:
    async with served(says("a</think>b")) as to:
        for path, value, told in EVERY:
            header = await header_of(to, name, without_switch(name, nested(path, value)))
            source = "thinking.type" if path == "thinking.budget_tokens" else path
            assert header == f"{told}; source={source}", (path, value)
            prompt = text_of(to.engine.requests[-1].prompt_token_ids)
            assert prompt.endswith("<think>" if told.startswith("on") else "</think>")
            effort = told.partition("effort=")[2].partition(";")[0]
            assert (f"Reasoning Effort: {effort} (range" in prompt) == told.startswith("on")
            budget = int(told.partition("budget=")[2] or 0) or None
            assert to.engine.requests[-1].sampling.thinking_budget == budget


@pytest.mark.parametrize("default", [False, True])
async def test_nothing_said_is_the_server_s_default_in_every_protocol(default: bool) -> None:
    async with served(says("a</think>b"), default_thinking=default) as to:
        for name in ROUTES:
            header = await header_of(to, name, without_switch(name, {}))
            assert header == ("on; effort=75; source=default" if default else "off; source=default")


async def test_the_header_comes_with_streams_and_with_counts_too() -> None:
    async with served(says("a</think>b")) as to:
        for name, route in ROUTES.items():
            body = request_body(name, tools=False, thinking=True, reasoning_effort="max", stream=True)
            async with to.http.post(f"{to.url}{route}", json=body) as response:
                assert response.content_type == "text/event-stream"
                assert response.headers[HEADER] == "on; effort=100; source=reasoning_effort"
                await response.read()
        _, _, headers = await to.post(
            "/v1/messages/count_tokens", {"model": MODEL, "messages": HELLO, "enable_thinking": False}
        )
        assert headers[HEADER] == "off; source=enable_thinking"
        _, _, headers = await to.post("/v1/completions", {"model": MODEL, "prompt": "a"})
        assert HEADER not in headers, "a completion does not think"


SWITCHES: dict[str, dict[str, Any]] = {
    "absent": {},
    "on": {"thinking": {"type": "enabled"}},
    "off": {"thinking": {"type": "disabled"}},
}
OTHERS: dict[str, dict[str, Any]] = {"absent": {}, "off": {"enable_thinking": False}}
EFFORTS: list[Any] = [None, "none", "low", "xhigh", 37, 0.6]
NUMBERS = {None: 75, "low": 50, "xhigh": 75, 37: 37, 0.6: 60}


async def test_wishes_that_meet_in_one_request() -> None:
    """Every combination, with and without tools, in every protocol: a prompt by the rules, or a 400."""
    async with served(says("a</think>b")) as to:
        for (first, switch), (second, other), effort, tools in itertools.product(
            SWITCHES.items(), OTHERS.items(), EFFORTS, (False, True)
        ):
            wishes = {**switch, **other, "reasoning_effort": effort}
            says_off = first == "off" or second == "off" or effort == "none"
            contradicts = first == "on" and (second == "off" or effort == "none")
            prompts = set()
            for name, route in ROUTES.items():
                body = request_body(name, tools=tools, thinking=True) | {"thinking": None} | wishes
                status, answer, headers = await to.post(route, body)
                if contradicts:
                    assert status == 400, wishes
                    assert "contradicts" in answer["error"]["message"]
                    continue
                assert status == 200, (wishes, answer)
                prompt = text_of(to.engine.requests[-1].prompt_token_ids)
                prompts.add(prompt.replace('"description": "", ', ""))
                assert prompt.endswith("</think>" if says_off else "<think>")
                if says_off:
                    assert "Reasoning Effort" not in prompt
                    assert headers[HEADER].startswith("off; source=")
                    ignored = effort not in (None, "none")
                    assert headers[HEADER].endswith("; ignored=reasoning_effort") == ignored
                else:
                    assert f"Reasoning Effort: {NUMBERS[effort]} (range 1-100" in prompt
            if not tools:
                assert len(prompts) <= 1, "the protocols agree to the byte"


@pytest.mark.parametrize("name", ROUTES)
async def test_an_unknown_effort_is_refused_with_those_that_are_known(name: str) -> None:
    async with served(says("never")) as to:
        for path in (spelling.path for spelling in SPELLINGS if spelling.kind == "effort"):
            for effort in ("hardest", "HIGH", 0, 101, 1.5, 1.0, -0.1):
                body = request_body(name, tools=False, thinking=True) | without_switch(
                    name, nested(path, effort)
                )
                status, answer, _ = await to.post(ROUTES[name], body)
                assert status == 400
                message = answer["error"]["message"]
                assert f"{path}: unknown effort {effort!r}" in message
                assert all(tier in message for tier in EFFORT_TIERS)
    assert to.engine.requests == []


def resolved(fields: dict[str, Any], **more: Any) -> str:
    told = read_fields(fields, Decisions(fields=ConversationFields))
    assert isinstance(told, Struct)
    return resolve_thinking(told, default=False, **more).header()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"reasoning": {"effort": "low", "max_tokens": 9}},
            "on; effort=50; budget=9; source=reasoning.effort",
        ),
        ({"thinking_budget": 0}, "off; source=default"),
        ({"enable_thinking": True, "thinking_budget": 0}, "on; effort=75; budget=0; source=enable_thinking"),
        (
            {"thinking": False, "reasoning_effort": 5, "thinking_budget": 9},
            "off; source=thinking; ignored=reasoning_effort,thinking_budget",
        ),
        (
            {"reasoning_effort": 0.5, "output_config": {"effort": "low"}},
            "on; effort=50; source=reasoning_effort",
        ),
        ({"reasoning_effort": 0.001}, "on; effort=1; source=reasoning_effort"),
    ],
)
def test_how_wishes_add_up(fields: dict[str, Any], told: str) -> None:
    assert resolved(fields) == told


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": True, "reasoning": False}, "reasoning"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}, "reasoning": {"max_tokens": 6}},
            "reasoning.max_tokens",
        ),
        (
            {"chat_template_kwargs": {"thinking": False}, "enable_thinking": True},
            "chat_template_kwargs.thinking",
        ),
    ],
)
def test_contradictions_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        resolved(fields)
    assert raised.value.param == param
    assert "contradicts" in raised.value.message


def test_a_checkpoint_that_knows_tiers_only_gets_the_nearest() -> None:
    for effort, number in ((1, 50), (62, 50), (63, 75), (87, 75), (88, 100), (0.6, 50), ("xhigh", 75)):
        assert resolved({"reasoning_effort": effort}, tiers_only=True) == (
            f"on; effort={number}; source=reasoning_effort"
        )


async def test_a_forced_call_and_a_thought_go_together_in_chat() -> None:
    """What once was refused: the grammar asks for the call when the thought is over."""
    async with served(says("Hm.</think>")) as to:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            await to.openai.chat.completions.create(
                model=MODEL,
                messages=HELLO,
                tools=TOOLS,
                tool_choice=choice,
                extra_body={"enable_thinking": True},
            )
    for request in to.engine.requests:
        assert text_of(request.prompt_token_ids).endswith("<think>")
        assert request.sampling.constraint is not None
        assert r'start: "\n\n" opening calls' in request.sampling.constraint.text
    required, named = (text_of(request.prompt_token_ids) for request in to.engine.requests)
    assert ("weather" in required, "weather" in named) == (True, False)
