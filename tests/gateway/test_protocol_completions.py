"""Plain completions through the unmodified `openai` client, and tokens without an answer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import openai
import pytest
from chat_scripts import EOS, HELLO, IMAGE_ID, MODEL, TOOLS, call_markup, ids, says, text_of
from hypothesis import given
from hypothesis import strategies as st
from protocol_clients import png, served

from deskfleet.gateway.protocols.stop_strings import StopStrings
from deskfleet.testing.scripted import Script, ScriptedEngine, every_chunking, invented_logprob

ANSWER = "héllo wörld, 3 € — fine 🙂"
BOS = "<｜begin▁of▁sentence｜>"


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "once", **fields}


async def test_plain_answer() -> None:
    async with served(says(ANSWER)) as to:
        answer = await to.openai.completions.create(**ask())
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.logprobs) == (ANSWER, "stop", None)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id == to.engine.requests[0].request_id
    assert answer.usage.prompt_tokens == len(to.engine.requests[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len(ids(ANSWER + EOS))
    assert text_of(to.engine.requests[0].prompt_token_ids) == f"{BOS}once", "no chat template"


async def test_streams_say_the_same_for_every_chunking() -> None:
    answer = says(ANSWER)
    chunkings = every_chunking(len(answer.token_ids))
    queue = iter(chunkings)
    async with served(lambda request: Script(answer.token_ids, chunk_sizes=next(queue))) as to:
        for sizes in chunkings:
            stream = await to.openai.completions.create(
                **ask(stream=True, stream_options={"include_usage": True})
            )
            chunks = [chunk async for chunk in stream]
            told = [chunk.choices[0] for chunk in chunks if chunk.choices]
            assert "".join(choice.text for choice in told) == ANSWER, sizes
            assert [choice.finish_reason for choice in told if choice.finish_reason] == ["stop"]
            assert chunks[-1].choices == []
            assert chunks[-1].usage.completion_tokens == len(answer.token_ids)


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("once", {}, f"{BOS}once"),
        ("once", {"add_special_tokens": False}, "once"),
        (f"{BOS}once", {}, f"{BOS}once"),
        (["once"], {}, f"{BOS}once"),
        (list(ids("once")), {}, "once"),
        ([list(ids("once"))], {}, "once"),
        ("<｜User｜>hi<｜Assistant｜></think>", {}, f"{BOS}<｜User｜>hi<｜Assistant｜></think>"),
    ],
)
async def test_prompts(prompt: Any, fields: dict[str, Any], expected: str) -> None:
    async with served(says("ok")) as to:
        await to.openai.completions.create(**ask(prompt=prompt, extra_body=fields))
    assert to.engine.requests[0].prompt_token_ids == ids(expected)


@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
async def test_control_tokens_are_counted_and_never_shown(sizes: tuple[int, ...]) -> None:
    text = f"one<｜User｜> two</think>｜DSML｜ three<think>{EOS}"
    async with served(Script(ids(text), chunk_sizes=sizes)) as to:
        answer = await to.openai.completions.create(**ask(extra_body={"ignore_eos": True}))
    assert answer.choices[0].text == "one two three"
    assert answer.usage.completion_tokens == len(ids(text))


async def test_markup_is_text_here() -> None:
    markup = call_markup(("weather", {"city": ("Oslo", True)})).replace("｜DSML｜", "||DSML||")
    async with served(says(markup)) as to:
        assert (await to.openai.completions.create(**ask())).choices[0].text == markup


@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP"], ["STOP", "TOP"]])
async def test_a_stop_string_ends_the_answer(stop: Any, sizes: tuple[int, ...]) -> None:
    async with served(says("before STOP after and a great deal more", chunk_sizes=sizes)) as to:
        plain = await to.openai.completions.create(**ask(stop=stop))
        stream = await to.openai.completions.create(**ask(stop=stop, stream=True))
        chunks = [chunk async for chunk in stream]
    assert plain.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == "before "
    assert plain.choices[0].finish_reason == "stop"
    assert plain.choices[0].stop_reason == "STOP"
    if sizes != (100,):
        assert to.engine.num_cancelled == 2


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_stop_strings_are_found_however_text_is_cut(text: str, stops: list[str], places: list[int]) -> None:
    matcher, shown, matched = StopStrings(stops), "", None
    marks = [0, *sorted(place for place in places if place <= len(text)), len(text)]
    for begin, end in pairwise(marks):
        piece, matched = matcher.push(text[begin:end])
        shown += piece
        if matched is not None:
            break
    else:
        shown += matcher.finish()
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (shown, matched) == (text, None)
        return
    assert matched in stops
    assert text.startswith(shown + matched)
    assert not any(stop in shown for stop in stops)


async def test_length_is_reported() -> None:
    async with served(says("a long answer")) as to:
        answer = await to.openai.completions.create(**ask(max_tokens=2))
        silent = await to.openai.completions.create(**ask())
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)
    assert silent.choices[0].finish_reason == "stop", "an answer is not cut because the client said nothing"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(stream: bool) -> None:
    text = "log €"
    async with served(says(text, chunk_sizes=(2,))) as to:
        told = await to.openai.completions.create(**ask(logprobs=2, stream=stream))
        choices = [chunk.choices[0] async for chunk in told] if stream else told.choices
    expected = [invented_logprob(token_id, 2) for token_id in ids(text)]
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert values == [entry.logprob for entry in expected]
    assert tokens[:3] == [text_of((token_id,)) for token_id in ids(text)[:3]]
    assert [len(top) for top in tops] == [2] * len(expected)
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sizes", [(1,), (3,), (100,)])
@pytest.mark.parametrize(
    ("prompt", "shown", "begins"),
    [
        ("once €", "once €", True),
        (f"{BOS}<｜User｜>hi", f"{BOS}<｜User｜>hi", False),
        (list(ids("in € ids")), "in € ids", False),
        # Half of a character, whose other half is the beginning of the answer.
        (list(ids("halves €")[:-1]), "halves ", False),
    ],
)
async def test_the_prompt_is_repeated_with_its_logprobs(
    prompt: Any, shown: str, begins: bool, sizes: tuple[int, ...], stream: bool
) -> None:
    answer = ids("€")[-1:] + ids(" and more") if shown == "halves " else ids(" and more")
    text = "halves € and more" if shown == "halves " else f"{shown} and more"
    async with served(Script((*answer, *ids(EOS)), chunk_sizes=sizes)) as to:
        told = await to.openai.completions.create(
            **ask(prompt=prompt, echo=True, logprobs=2, stop="once", stream=stream)
        )
        choices = [chunk.choices[0] async for chunk in told] if stream else told.choices
        bare = await to.openai.completions.create(**ask(prompt=prompt, echo=True))
    assert "".join(choice.text for choice in choices) == bare.choices[0].text == text, "no stop in the prompt"
    assert bare.choices[0].logprobs is None
    request, plain = to.engine.requests
    assert (request.sampling.prompt_logprobs, plain.sampling.prompt_logprobs) == (2, None)
    told_ids = (*request.prompt_token_ids, *answer)
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    expected = [invented_logprob(token_id, 2) for token_id in told_ids]
    assert values == [None, *(entry.logprob for entry in expected[1:])]
    assert [top and len(top) for top in tops] == [None, *(2 for _ in expected[1:])]
    assert len(tokens) == len(offsets) == len(told_ids)
    assert tokens[0] == text_of(told_ids[:1])
    assert offsets == sorted(offsets)
    assert offsets[: 1 + begins] == [0] * (1 + begins), "what the client did not send has no text"


async def test_an_engine_that_tells_nothing_of_the_prompt_is_an_error() -> None:
    class Silent(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            asked = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
            async for chunk in super().generate(asked):
                yield chunk

    async with served(Silent(says("ok"))) as to:
        status, body, _ = await to.post("/v1/completions", ask(echo=True, logprobs=0))
    assert (status, "log probabilities of the prompt" in body["error"]["message"]) == (503, True)


async def test_a_form_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    async with served(says("{}")) as to:
        await to.openai.completions.create(**ask(extra_body={"response_format": form}))
    assert to.engine.requests[0].sampling.constraint.kind == "json_schema"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"n": 2}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"messages": HELLO}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokns": 5}, "max_tokns"),
    ({"stop": [""]}, "stop[0]"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
]


async def test_errors_name_the_field() -> None:
    async with served(says("never")) as to:
        for fields, param in BAD:
            status, body, _ = await to.post("/v1/completions", ask(**fields))
            assert (status, body["error"]["param"]) == (400, param), (fields, body)
            assert param in body["error"]["message"]
    assert to.engine.requests == []


async def test_too_long_is_said_with_the_field() -> None:
    async with served(ScriptedEngine(says("never"), max_model_len=100)) as to:
        for fields, param in (({"prompt": "and on " * 100}, "prompt"), ({"max_tokens": 99}, "max_tokens")):
            with pytest.raises(openai.BadRequestError) as raised:
                await to.openai.completions.create(**ask(**fields))
            assert (raised.value.code, raised.value.param) == ("context_length_exceeded", param)


# --- tokens without an answer ---------------------------------------------------------------------------------------


async def test_tokenize_a_text_and_back() -> None:
    async with served(says("never")) as to:
        status, told, _ = await to.post("/tokenize", {"prompt": ANSWER, "model": MODEL})
        assert status == 200
        assert told["tokens"] == list(ids(BOS + ANSWER))
        assert (told["count"], told["max_model_len"], told["token_strs"]) == (len(told["tokens"]), 4096, None)
        _, bare, _ = await to.post(
            "/tokenize", {"prompt": "abc", "add_special_tokens": False, "return_token_strs": True}
        )
        assert bare["tokens"] == list(ids("abc"))
        assert "".join(bare["token_strs"]) == "abc"
        _, empty, _ = await to.post("/tokenize", {"prompt": "", "add_special_tokens": False})
        assert empty["tokens"] == []
        _, back, _ = await to.post("/detokenize", {"tokens": told["tokens"]})
        assert back == {"prompt": BOS + ANSWER}
        _, nothing, _ = await to.post("/detokenize", {"tokens": []})
        assert nothing == {"prompt": ""}


async def test_tokenize_a_chat_as_it_would_be_asked() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}}
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}, image]}],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    async with served(says("ok")) as to:
        _, told, _ = await to.post("/tokenize", {**chat, "return_token_strs": True})
        await to.openai.chat.completions.create(
            model=MODEL,
            messages=chat["messages"],
            tools=TOOLS,
            extra_body={"chat_template_kwargs": chat["chat_template_kwargs"]},
        )
    assert tuple(told["tokens"]) == to.engine.requests[0].prompt_token_ids
    assert told["tokens"].count(IMAGE_ID) == 1
    assert told["count"] > len(told["tokens"])
    assert "".join(told["token_strs"]) == text_of(tuple(told["tokens"]))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/tokenize", {"messages": HELLO, "return_token_strs": "yes"}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"token": [1]}, "token"),
    ],
)
async def test_tokens_errors_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    async with served(says("never")) as to:
        status, told, _ = await to.post(path, body)
        assert (status, told["error"]["param"]) == (400, param)
        status, told, _ = await to.post(path, {**body, "model": "other"} if "token" not in body else body)
        assert status in (400, 404)
