"""Images by data URL: bytes, places, order and counts."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_scripts import CHECKPOINT, IMAGE_ID, ask, ask_streaming, call_markup, chatting, says, text_of
from PIL import Image

from deskfleet.gateway.images import LOW_DETAIL_SIDE
from deskfleet.model.config import ModelConfig
from deskfleet.model.vision import plan_image
from deskfleet.testing.scripted import ScriptedEngine

VISION = ModelConfig.from_file(CHECKPOINT / "config.json").vision


def encoded(width: int, height: int, *, image_format: str = "PNG", grey: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (grey, 10, 10)).save(buffer, image_format)
    return buffer.getvalue()


def data_url(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def looking_at(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Look."}, *parts]}]


def span(width: int, height: int) -> int:
    assert VISION is not None
    return plan_image(width, height, VISION).num_tokens


@pytest.mark.parametrize(
    ("image_format", "media"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")]
)
async def test_bytes_reach_the_engine_unchanged(image_format: str, media: str) -> None:
    data = encoded(64, 48, image_format=image_format)
    async with chatting(says("red")) as (client, engine):
        await ask(client, messages=looking_at(image_part(data_url(data, media))))
    (request,) = engine.requests
    assert [image.data for image in request.images] == [data]
    assert request.prompt_token_ids.count(IMAGE_ID) == 1
    assert text_of(request.prompt_token_ids).endswith("Look.\n\n<｜deepseek_image｜><｜Assistant｜></think>")


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_is_what_the_engine_counted(stream: bool) -> None:
    engine = ScriptedEngine(says("red"), num_tokens_per_image=77)
    messages = looking_at(image_part(data_url(encoded(64, 48))))
    async with chatting(engine) as (client, _):
        if stream:
            chunks = await ask_streaming(client, messages=messages, stream_options={"include_usage": True})
            usage = chunks[-1].usage
        else:
            usage = (await ask(client, messages=messages)).usage
    assert usage.prompt_tokens == len(engine.requests[0].prompt_token_ids) + 76


async def test_the_context_is_checked_with_images_at_full_span() -> None:
    messages = looking_at(*[image_part(data_url(encoded(200, 200)))] * 3)
    async with chatting(says("red")) as (client, engine):
        await ask(client, messages=messages)
        expanded = len(engine.requests[0].prompt_token_ids) + 3 * (span(200, 200) - 1)
    engine = ScriptedEngine(says("red"), max_model_len=expanded - 1)
    async with chatting(engine) as (client, _):
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(client, messages=messages)
    assert engine.requests == []
    assert raised.value.code == "context_length_exceeded"
    assert f"prompt of {expanded} tokens" in raised.value.message
    assert f"context of {expanded - 1} tokens" in raised.value.message


async def test_images_follow_their_placeholders_when_tool_results_are_reordered() -> None:
    """The publisher's library sorts tool results by their calls; the images must move along."""
    first, second, third = (encoded(20 + grey, 20, grey=grey) for grey in (1, 2, 3))
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for name in ("a", "b")
    ]
    messages = [
        *looking_at(image_part(data_url(first))),
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": [image_part(data_url(third))]},
        {"role": "tool", "tool_call_id": "a", "content": [image_part(data_url(second))]},
    ]
    async with chatting(says("ok")) as (client, engine):
        await ask(client, messages=messages)
    (request,) = engine.requests
    assert request.prompt_token_ids.count(IMAGE_ID) == 3
    assert [image.data for image in request.images] == [first, second, third]
    assert call_markup(("weather", {})).splitlines()[1] in text_of(request.prompt_token_ids)


async def test_low_detail_sends_a_smaller_image() -> None:
    async with chatting(says("red")) as (client, engine):
        await ask(client, messages=looking_at(image_part(data_url(encoded(1200, 600)), detail="low")))
        await ask(client, messages=looking_at(image_part(data_url(encoded(1200, 600)), detail="high")))
    low, high = (Image.open(io.BytesIO(request.images[0].data)) for request in engine.requests)
    assert low.size == (LOW_DETAIL_SIDE, LOW_DETAIL_SIDE // 2)
    assert high.size == (1200, 600)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("https://example.com/cat.png", "only data URLs"),
        ("http://127.0.0.1:1/cat.png", "only data URLs"),
        ("file:///etc/passwd", "only data URLs"),
        ("cat.png", "only data URLs"),
        ("", "only data URLs"),
        ("data:image/png,raw", "not base64"),
        ("data:image/gif;base64,AAAA", "image/gif"),
        ("data:text/plain;base64,AAAA", "text/plain"),
        ("data:image/png;base64,@@@@", "base64 is damaged"),
        ("data:image/png;base64,", "not a readable"),
        (data_url(b"no image at all"), "not a readable"),
        (data_url(encoded(64, 48)[:60]), "not a readable"),
        (data_url(encoded(300, 300, image_format="JPEG")[:700], "image/jpeg"), "not a readable"),
        (data_url(encoded(64, 48, image_format="GIF")), "not a readable"),
        (data_url(encoded(1100, 1000)), "exceeds 1000000 pixels"),
        (data_url(b"\0" * 50_000), "exceeds 40000 bytes"),
    ],
)
async def test_unusable_images_are_refused_by_their_place(url: str, what: str) -> None:
    messages = looking_at(image_part(data_url(encoded(8, 8))), image_part(url))
    limits = {"max_image_pixels": 1_000_000, "max_image_bytes": 40_000}
    async with chatting(says("red"), **limits) as (client, engine):
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(client, messages=messages)
    assert engine.requests == []
    assert raised.value.param == "messages[0].content[2].image_url"
    assert what in raised.value.message
    assert raised.value.param in raised.value.message


async def test_too_many_images_are_refused() -> None:
    part = image_part(data_url(encoded(8, 8)))
    async with chatting(says("red"), max_images=2) as (client, _):
        await ask(client, messages=looking_at(part, part))
        with pytest.raises(openai.BadRequestError, match="3 images exceed the limit of 2") as raised:
            await ask(client, messages=looking_at(part, part, part))
    assert raised.value.param == "messages[0].content[3].image_url"


async def test_a_checkpoint_without_a_vision_tower_refuses_images(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    async with chatting(says("text"), checkpoint=tmp_path) as (client, engine):
        await ask(client)
        with pytest.raises(openai.BadRequestError, match="no vision tower") as raised:
            await ask(client, messages=looking_at(image_part(data_url(encoded(8, 8)))))
    assert raised.value.param == "messages[0].content[1].image_url"
    assert len(engine.requests) == 1
