"""Conversations as coding agents have them, request by request, as they go over the wire: `scenarios/*.json`.

Each turn says what is sent, what the model writes, and what the client must get, streamed and whole; what the prompt
must hold; or how it is refused. The files were written by hand, after what such agents send. Takes about four seconds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chat_scripts import requesting, says, text_of

from deskfleet.endpoint import GenerateRequest
from deskfleet.testing.scripted import Script, ScriptedEngine

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.json"))


class Model:
    """Writes what the turn says."""

    def __init__(self) -> None:
        self.text, self.is_cut = "", False

    def __call__(self, request: GenerateRequest) -> Script:
        return says(self.text, finish_reason="length" if self.is_cut else "stop", chunk_sizes=(2, 1, 3))


def read_answer(path: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client has in the end: of one object, or of the events of a stream."""
    if path.startswith("/v1/messages"):
        return read_message(answers)
    if path.startswith("/v1/responses"):
        return read_response(answers)
    return read_chat(answers)


def read_message(answers: list[dict[str, Any]]) -> dict[str, Any]:
    if answers[0]["type"] == "message":
        blocks, ending, usage = answers[0]["content"], answers[0]["stop_reason"], answers[0]["usage"]
    else:
        blocks, ending, usage = [], "", {}
        for event in answers:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for key in ("text", "thinking"):
                    if key in delta:
                        block[key] += delta[key]
                block["json"] += delta.get("partial_json", "")
            elif event["type"] == "message_delta":
                ending, usage = event["delta"]["stop_reason"], event["usage"]
        assert answers[-1]["type"] == "message_stop"
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
    return {
        "ending": ending,
        "usage": usage,
        "thinking": "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "text": "".join(block["text"] for block in blocks if block["type"] == "text"),
        "calls": [[block["name"], block["input"]] for block in blocks if block["type"] == "tool_use"],
        "custom": [],
    }


def read_response(answers: list[dict[str, Any]]) -> dict[str, Any]:
    response = answers[-1].get("response", answers[-1])
    items = response["output"]
    done = [event["item"] for event in answers if event.get("type") == "response.output_item.done"]
    if len(answers) > 1:  # such clients go by these events
        assert [strip(item) for item in done] == [strip(item) for item in items]

    def texts(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

    return {
        "ending": response["status"],
        "usage": response["usage"],
        "thinking": texts("reasoning"),
        "text": texts("message"),
        "calls": [
            [item["name"], json.loads(item["arguments"])] for item in items if item["type"] == "function_call"
        ],
        "custom": [[item["name"], item["input"]] for item in items if item["type"] == "custom_tool_call"],
    }


def strip(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "status")}


def read_chat(answers: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"thinking": "", "text": "", "custom": []}
    calls: dict[int, list[str]] = {}
    for answer in answers:
        for choice in answer["choices"]:
            said = choice.get("delta") or choice.get("message")
            found["thinking"] += said.get("reasoning_content") or ""
            found["text"] += said.get("content") or ""
            for index, call in enumerate(said.get("tool_calls") or ()):
                part = calls.setdefault(call.get("index", index), ["", ""])
                part[0] += call["function"].get("name") or ""
                part[1] += call["function"].get("arguments") or ""
            found["ending"] = choice["finish_reason"] or found.get("ending")
        found["usage"] = answer.get("usage") or found.get("usage")
    return found | {"calls": [[name, json.loads(text)] for name, text in calls.values()]}


def events_of(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


async def ask(
    session: aiohttp.ClientSession, url: str, headers: dict[str, str], body: dict[str, Any]
) -> tuple[int, list[dict[str, Any]]]:
    async with session.post(url, json=body, headers=headers) as response:
        text = await response.text()
    return response.status, list(events_of(text)) if text.startswith(("data", "event")) else [
        json.loads(text)
    ]


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
async def test_scenario(path: Path) -> None:
    scenario = json.loads(path.read_text(encoding="utf-8"))
    route, headers = scenario["path"], scenario["headers"]
    model = Model()
    engine = ScriptedEngine(model, max_model_len=200_000, num_tokens_per_image=10)
    async with requesting(engine) as (session, root):
        for turn in scenario["turns"]:
            about, body = turn["about"], turn["request"]
            if "refused" in turn:
                status, (answer,) = await ask(session, root + route, headers, body)
                refused, error = turn["refused"], answer["error"]
                assert (status, error["type"]) == (refused["status"], refused["type"]), about
                assert [word for word in refused["says"] if word not in error["message"]] == [], error
                continue
            model.text, model.is_cut = turn["model_writes"], turn.get("cut", False)
            expected = {"thinking": "", "text": "", "calls": [], "custom": [], **turn["expect"]}
            counted = None
            if route.startswith("/v1/messages"):
                count = {key: value for key, value in body.items() if key not in ("max_tokens", "stream")}
                status, (answer,) = await ask(
                    session, f"{root}/v1/messages/count_tokens?beta=true", headers, count
                )
                assert status == 200, (about, answer)
                counted = answer["input_tokens"]
            for stream in (True, False):
                asked = {**body, "stream": stream}
                if not stream:
                    asked.pop("stream_options", None)
                status, answers = await ask(session, root + route, headers, asked)
                assert status == 200, (about, answers)
                found = read_answer(route, answers)
                usage = found.pop("usage")
                if "text" not in turn["expect"] and model.is_cut:
                    found["thinking"] = found["text"] = ""
                assert found == expected, about
                assert counted is None or usage["input_tokens"] == counted, about
            check_prompt(engine.requests[-1], turn)


def check_prompt(request: GenerateRequest, turn: dict[str, Any]) -> None:
    """Nothing that was said is missing, images included."""
    prompt = text_of(request.prompt_token_ids)
    assert [words for words in turn.get("prompt_holds", ()) if words not in prompt] == [], turn["about"]
    assert len(request.images) == turn.get("num_images", 0), turn["about"]
    assert all(image.data.startswith(base64.b64decode("iVBORw0K")) for image in request.images)


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 3
