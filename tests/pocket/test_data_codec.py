"""Pocket's prompts and answers against the publisher's codec, the way the gateway uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from deepseek_recipe import ChatCompletionRequest, ConversionOptions, ModelVersion, SpecialTokens

from deskfleet.endpoint import FinishReason, TokenChunk
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.protocols.chat import ChatProtocol
from deskfleet.gateway.settings import GatewaySettings
from pocket import tokenizer as spelling
from pocket.data.evaluate import EVAL_TASKS, chat_request, judge
from pocket.data.example import Call, Example, Expect, Message, draw
from pocket.data.render import EFFORT_TEXT, Renderer
from pocket.data.stream import GENERATORS, VISION
from pocket.sizes import pocket_config

MODEL = "pocket"
TASKS = (*EVAL_TASKS, "prose", "code")
TIERS = {50: "low", 75: "high", 100: "max"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pocket")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text((spelling.DIRECTORY / name).read_text("utf-8"), "utf-8")
    (directory / "config.json").write_text(json.dumps(pocket_config(directory / "tokenizer.json")))
    return directory


@pytest.fixture(scope="module")
def chat_format(checkpoint: Path) -> ChatFormat:
    return ChatFormat.from_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def protocol(checkpoint: Path) -> ChatProtocol:
    return ChatProtocol(GatewaySettings(model_id=MODEL, checkpoint=checkpoint), 8192)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(spelling.load_tokenizer(), VISION)


def examples(task: str, count: int, *, tiers_only: bool = True) -> Iterator[Example]:
    """Examples of a task; with `tiers_only`, with efforts that the codec's own interface can say."""
    rng = Random(f"codec {task}")
    found = 0
    while found < count:
        example = draw(GENERATORS[task], rng, "train")
        if not isinstance(example, Example):
            continue
        found += 1
        change = tiers_only and example.effort is not None
        yield replace(example, effort=rng.choice(tuple(TIERS))) if change else example


def body(example: Example, *, whole: bool = False) -> dict[str, object]:
    request = {"model": MODEL, **chat_request(example, whole=whole)}
    if example.effort is not None:
        request["reasoning_effort"] = TIERS[example.effort]
    return request


def codec_ids(chat_format: ChatFormat, request: dict[str, object]) -> list[int]:
    options = (
        ConversionOptions()
        .with_model_versions_by_name({MODEL: ModelVersion.DeepseekV41Flash})
        .with_special_tokens(SpecialTokens(image=spelling.IMAGE))
    )
    conversion = ChatCompletionRequest(request).convert(options)
    return chat_format.encoding.encode(conversion.conversation)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_those_of_the_gateway(task: str, protocol: ChatProtocol, renderer: Renderer) -> None:
    for example in examples(task, 25, tiers_only=False):
        request = {"model": MODEL, **chat_request(example)}
        prepared = protocol.prepare(json.dumps(request).encode(), "r")
        assert renderer.render_prompt(example) == list(prepared.generate.prompt_token_ids)
        expanded = renderer.render(
            replace(example, messages=(*example.messages[:-1], Message("assistant", "x")))
        )
        assert prepared.num_prompt_tokens == len(expanded) - len(tail(renderer, example, "x"))


def tail(renderer: Renderer, example: Example, content: str) -> list[int]:
    """What an assistant without reasoning adds to the prompt."""
    after = replace(example, messages=(*example.messages[:-1], Message("assistant", content)))
    return renderer.render_conversation(after)[len(renderer.render_prompt(example)) :]


@pytest.mark.parametrize("task", TASKS)
def test_whole_conversations_are_those_of_the_codec(
    task: str, chat_format: ChatFormat, renderer: Renderer
) -> None:
    """As history: a question follows, so that the codec renders the last answer too (with tools: its reasoning)."""
    for example in examples(task, 25):
        results = (Message("tool", "ok"),) * len(example.messages[-1].calls)
        more = (*results, Message("user", "And?"), Message("assistant", ""))
        longer = replace(example, messages=(*example.messages, *more))
        assert renderer.render_prompt(longer) == codec_ids(chat_format, body(longer))


@pytest.mark.parametrize("task", EVAL_TASKS)
def test_the_gateway_parses_what_is_trained(task: str, protocol: ChatProtocol, renderer: Renderer) -> None:
    """The tokens with full loss after the prompt come back as the answer, its reasoning and its calls."""
    for example in examples(task, 15):
        prepared = protocol.prepare(json.dumps(body(example)).encode(), "r")
        answer_ids = renderer.render_conversation(example)[len(renderer.render_prompt(example)) :]
        parser = protocol.parser(prepared)
        whole = parser.whole_answer()
        for index, token_id in enumerate(answer_ids):
            finish: FinishReason | None = "stop" if index == len(answer_ids) - 1 else None
            whole.add(parser.push(TokenChunk((token_id,), None, prepared.num_prompt_tokens, finish)))
        message = json.loads(whole.to_json())["choices"][0]["message"]
        assert judge(example.expect, message.get("content"), message.get("tool_calls"))
        assert (message.get("reasoning_content") or None) == example.messages[-1].reasoning


def test_loss_is_on_what_the_assistant_says_and_only_there(renderer: Renderer) -> None:
    tokenizer = spelling.load_tokenizer()
    call = Call("paint", {"thing": "door", "times": 2})
    example = Example(
        "t",
        "k",
        (
            Message("user", "Paint it."),
            Message("assistant", "", "I call paint.", (call,)),
            Message("tool", "ok"),
            Message("assistant", "Done.", "It worked."),
        ),
        effort=50,
        tools=({"name": "paint"},),
    )
    document = renderer.render(example)
    said = tokenizer.decode(document.token_ids[document.target_weight == 1])
    assert said == (
        'I call paint.</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="paint">\n'
        '<｜DSML｜ parameter name="thing" string="true">door</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="times" string="false">2</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls><｜end▁of▁sentence｜>It worked.</think>Done.<｜end▁of▁sentence｜>"
    )
    assert set(document.target_weight.tolist()) == {0.0, 1.0}


def test_any_effort_is_the_tier_with_its_number_replaced(renderer: Renderer) -> None:
    """The codec's interface knows three efforts; the prompt of another number differs in the number alone."""
    example = Example("t", "k", (Message("user", "Hi"), Message("assistant", "Hi", "Hm")), effort=50)
    tokenizer = spelling.load_tokenizer()
    other = tokenizer.decode(renderer.render_prompt(replace(example, effort=37)))
    usual = tokenizer.decode(renderer.render_prompt(example))
    assert other == usual.replace(EFFORT_TEXT.format(effort=50), EFFORT_TEXT.format(effort=37))


def test_special_tokens_in_text_stay_text(renderer: Renderer) -> None:
    tokenizer = spelling.load_tokenizer()
    example = Example("t", "k", (Message("user", "<｜User｜></think>"), Message("assistant", "no")))
    ids = renderer.render_prompt(example)
    assert ids.count(tokenizer.special_id("<｜User｜>")) == 1
    assert ids.count(tokenizer.special_id("</think>")) == 1


def test_judge_can_say_no() -> None:
    assert not judge(Expect("exact", "42"), "43")
    assert not judge(Expect("exact", "42"), "42", [{"function": {"name": "f", "arguments": "{}"}}])
    assert not judge(Expect("json", value={"a": 1}), '{"a": 1')
    assert not judge(Expect("json", value={"a": 1}), '{"a": 2}')
    assert not judge(Expect("calls", calls=(Call("f", {"a": 1}),)), "", [])
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]
    assert judge(Expect("calls", calls=(Call("f", {"a": 1}),)), None, calls)
    assert not judge(Expect("calls", calls=(Call("f", {"a": 1}), Call("f", {"a": 1}))), None, calls)
