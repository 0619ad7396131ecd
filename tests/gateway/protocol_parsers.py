"""The three chat protocols without HTTP: an answer's bytes, cut anywhere, and what a client makes of the events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from chat_scripts import CHECKPOINT, EOS_ID, HELLO, MODEL, TOKENIZER, TOOLS, settings

from deskfleet.endpoint import FinishReason, TokenChunk
from deskfleet.gateway.chat_format import ChatFormat, Encoding
from deskfleet.gateway.protocol import Prepared
from deskfleet.gateway.protocols.chat import ChatProtocol
from deskfleet.gateway.protocols.messages import MessagesProtocol
from deskfleet.gateway.protocols.responses import ResponsesProtocol

PROTOCOLS = {"chat": ChatProtocol, "responses": ResponsesProtocol, "messages": MessagesProtocol}


@dataclass(frozen=True)
class Outcome:
    """What a client has when an answer is over, whatever the protocol. Arguments are the text that was sent."""

    thought: str
    text: str
    calls: tuple[tuple[str, str], ...]
    ending: str


@cache
def chat_format(encoding: Encoding) -> ChatFormat:
    return ChatFormat.from_checkpoint(CHECKPOINT, encoding=encoding)


@cache
def protocol(name: str, encoding: Encoding = "v4.1") -> Any:
    return PROTOCOLS[name](settings(), 8192, chat_format(encoding))


def request_body(name: str, *, tools: bool, thinking: bool, **fields: Any) -> dict[str, Any]:
    """The same request in any of the protocols."""
    functions = [tool["function"] for tool in TOOLS]
    switch = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    if name == "chat":
        body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS}
    elif name == "responses":
        body = {"input": "hello", "tools": [{"type": "function", **function} for function in functions]}
    else:
        described = [
            {"name": function["name"], "input_schema": function["parameters"]} for function in functions
        ]
        body = {"messages": HELLO, "tools": described}
    if not tools:
        del body["tools"]
    return {"model": MODEL, **body, **switch, **fields}


@cache
def prepared(name: str, tools: bool, thinking: bool, encoding: Encoding = "v4.1") -> Prepared:
    body = request_body(name, tools=tools, thinking=thinking)
    request: Prepared = protocol(name, encoding).prepare(json.dumps(body).encode(), "id")
    return request


@cache
def byte_ids() -> dict[bytes, int]:
    texts = chat_format("v4.1").texts
    return {bytes([byte]): texts.index(bytes([byte])) for byte in range(256)}


def ids_of(data: bytes) -> list[int]:
    """The ids a tokenizer gives to text; single bytes where a cut went through a character."""
    try:
        return list(TOKENIZER.encode(data.decode(), add_special_tokens=False).ids)
    except UnicodeDecodeError:
        return [byte_ids()[data[i : i + 1]] for i in range(len(data))]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    marks = [0, *sorted(set(places)), len(data)]
    return [data[begin:end] for begin, end in pairwise(marks)]


def chunks_of(pieces: Sequence[bytes], reason: FinishReason) -> Iterator[TokenChunk]:
    """One chunk per piece, the end of sentence in the last one if the model ended the answer itself."""
    for index, piece in enumerate(pieces):
        ids = ids_of(piece)
        if index < len(pieces) - 1:
            yield TokenChunk(tuple(ids), None, 3)
        else:
            yield TokenChunk((*ids, EOS_ID) if reason == "stop" else tuple(ids), None, 3, reason)


def events_of(sent: bytes) -> Iterator[dict[str, Any]]:
    for block in sent.decode().split("\n\n"):
        data = block.rpartition("data: ")[2]
        if block and data != "[DONE]":
            event = msgspec.json.decode(data)
            if block.startswith("event: "):
                assert block.partition("\n")[0] == f"event: {event['type']}"
            yield event


def streamed(name: str, parser: Any, chunks: Iterable[TokenChunk]) -> Outcome:
    """What a client puts together from the events of a stream."""
    sent = b""
    for chunk in chunks:
        sent += parser.encode(parser.push(chunk))
        if parser.finished:
            break
    assert parser.finished
    return READERS[name](list(events_of(sent)))


def whole(name: str, parser: Any, chunks: Iterable[TokenChunk]) -> Outcome:
    """What a client reads in an answer that came whole."""
    answer = parser.whole_answer()
    for chunk in chunks:
        answer.add(parser.push(chunk))
        if parser.finished:
            break
    return WHOLE_READERS[name](json.loads(answer.to_json()))


def outcome(
    name: str,
    pieces: Sequence[bytes],
    *,
    tools: bool = True,
    thinking: bool = False,
    reason: FinishReason = "stop",
    encoding: Encoding = "v4.1",
) -> Outcome:
    request = prepared(name, tools, thinking, encoding)
    return streamed(name, protocol(name, encoding).parser(request), chunks_of(pieces, reason))


ENDINGS = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "calls",
    "end_turn": "stop",
    "max_tokens": "length",
    "tool_use": "calls",
}


def _chat_stream(events: list[dict[str, Any]]) -> Outcome:
    thought = text = ending = ""
    calls: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                entry = calls.setdefault(call["index"], ["", ""])
                entry[0] += call["function"].get("name") or ""
                entry[1] += call["function"].get("arguments") or ""
            ending = choice["finish_reason"] or ending
    return Outcome(thought, text, _told(calls), ENDINGS[ending])


def _chat_whole(answer: dict[str, Any]) -> Outcome:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = tuple(
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    )
    return Outcome(
        message.get("reasoning_content") or "",
        message.get("content") or "",
        calls,
        ENDINGS[choice["finish_reason"]],
    )


def _responses_stream(events: list[dict[str, Any]]) -> Outcome:
    thought = text = ""
    calls: dict[int, list[str]] = {}
    for number, event in enumerate(events):
        assert event["sequence_number"] == number if "sequence_number" in event else number < 2
        match event["type"]:
            case "response.reasoning_text.delta":
                thought += event["delta"]
            case "response.output_text.delta":
                text += event["delta"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                calls[event["output_index"]] = [event["item"]["name"], ""]
            case "response.function_call_arguments.delta":
                calls[event["output_index"]][1] += event["delta"]
            case "response.completed" | "response.incomplete":
                told = _responses_whole(event["response"])
                assert (told.thought, told.text, told.calls) == (thought, text, _told(calls))
                return told
    raise AssertionError("no last event")


def _responses_whole(response: dict[str, Any]) -> Outcome:
    thought = text = ""
    calls: list[tuple[str, str]] = []
    for item in response["output"]:
        parts = "".join(part["text"] for part in item.get("content", ()))
        if item["type"] == "reasoning":
            thought += parts
        elif item["type"] == "message":
            text += parts
        else:
            calls.append((item["name"], item["arguments"]))
    ending = "length" if response["status"] == "incomplete" else "calls" if calls else "stop"
    return Outcome(thought, text, tuple(calls), ending)


def _messages_stream(events: list[dict[str, Any]]) -> Outcome:
    thought = text = ending = ""
    calls: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            thought += delta.get("thinking", "")
            text += delta.get("text", "")
            if "partial_json" in delta:
                calls[event["index"]][1] += delta["partial_json"]
        elif event["type"] == "message_delta":
            ending = event["delta"]["stop_reason"]
    return Outcome(thought, text, _told(calls), ENDINGS[ending])


def _messages_whole(message: dict[str, Any]) -> Outcome:
    blocks = message["content"]
    return Outcome(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        tuple((block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"),
        ENDINGS[message["stop_reason"]],
    )


def _told(calls: dict[int, list[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, arguments) for _, (name, arguments) in sorted(calls.items()))


READERS = {"chat": _chat_stream, "responses": _responses_stream, "messages": _messages_stream}
WHOLE_READERS = {"chat": _chat_whole, "responses": _responses_whole, "messages": _messages_whole}


def v4_checkpoint(directory: Path) -> Path:
    """A directory whose config.json says V4, with the tiny tokenizer: all the gateway needs."""
    config = {
        "model_type": "deepseek_v4",
        "vocab_size": 512,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    return directory
