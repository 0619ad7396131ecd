"""What a token costs on its way through the gateway: few writes, and the same at the end of a long answer.

Takes about five seconds. Costs are seconds of this thread's processor, which other work on the machine does not change
much; each is the least of several runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp.http_writer import StreamWriter
from chat_scripts import CHAT, CHECKPOINT, EOS_ID, HELLO, MODEL, ids, requesting, says, settings
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from deskfleet.endpoint import TokenChunk, TokenLogprob
from deskfleet.errors import EngineError
from deskfleet.gateway import stream
from deskfleet.gateway.admission import Admission
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.gate import Gate
from deskfleet.gateway.observing import Observer
from deskfleet.gateway.policies.contract import Caller
from deskfleet.gateway.protocol import apply_policies, watchers_of
from deskfleet.gateway.protocols.chat import ChatProtocol
from deskfleet.gateway.protocols.completions import CompletionsProtocol
from deskfleet.gateway.protocols.messages import MessagesProtocol
from deskfleet.gateway.protocols.responses import ResponsesProtocol
from deskfleet.gateway.token_texts import join
from deskfleet.gateway.upstream.http_upstream import coalesced
from deskfleet.gateway.upstream.vocabulary import Vocabulary
from deskfleet.testing.scripted import ScriptedEngine

FORMAT = ChatFormat.from_checkpoint(CHECKPOINT)
VOCABULARY = Vocabulary.from_checkpoint(CHECKPOINT)
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatProtocol, {"messages": HELLO, **CHAT}),
    "messages": (MessagesProtocol, {"messages": HELLO, "max_tokens": 30_000, **CHAT}),
    "responses": (ResponsesProtocol, {"input": "hello", **CHAT}),
    "completions": (CompletionsProtocol, {"prompt": "hello"}),
}
TEXTS = ["one ", "two", " three", "\n", "é", "日", "🙂", "</"]
BLOCK = 1500

COUNT_THREADS = """
import os, sys
from pathlib import Path
from deepseek_recipe import Conversation, UserMessage
from deskfleet.gateway.chat_format import ChatFormat
chat_format = ChatFormat.from_checkpoint(Path(sys.argv[1]))
before = len(os.listdir("/proc/self/task"))
chat_format.encode(Conversation([UserMessage("hello")], thinking_mode=False))
print(before, len(os.listdir("/proc/self/task")))
"""


def ends_whole(token_id: int) -> bool:
    return "\ufffd" not in VOCABULARY.decode([token_id])


def text(token_ids: tuple[int, ...]) -> str:
    return VOCABULARY.decode(token_ids)


@examples(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(TEXTS), max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=8),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
def test_fewer_chunks_say_the_same(
    words: list[str], sizes: list[int], num_cut: int, is_over: bool, has_logprobs: bool
) -> None:
    """Whatever came together, even if it stops within a character."""
    told = ids("".join(words))
    told = told[: len(told) - num_cut]
    chunks: list[TokenChunk] = []
    start = 0
    while start < len(told):
        own = told[start : start + sizes[len(chunks) % len(sizes)]]
        start += len(own)
        logprobs = tuple(TokenLogprob(token_id, -start / 8) for token_id in own) if has_logprobs else None
        chunks.append(TokenChunk(own, logprobs, 7, num_drafted=start))
    if is_over:
        chunks.append(
            TokenChunk((EOS_ID,), (TokenLogprob(EOS_ID, 0.0),) if has_logprobs else None, 7, "stop")
        )
    merged = coalesced(chunks, ends_whole)

    def joined(found: list[TokenChunk], name: str) -> tuple[Any, ...]:
        return tuple(each for chunk in found for each in getattr(chunk, name) or ())

    for name in ("token_ids", "logprobs"):
        assert joined(merged, name) == joined(chunks, name)
    assert merged[-1:] == chunks[-1:] or not is_over, "the end comes by itself"
    assert len(merged) <= 5
    num_open = len(chunks) - is_over
    if num_open and ends_whole(chunks[num_open - 1].token_ids[-1]):
        assert len(merged) == 1 + is_over, "all that is whole is one"
    if len(merged) < len(chunks) and ends_whole(told[-1]):
        assert not text(merged[0].token_ids).endswith("\ufffd")


async def test_an_answer_is_as_many_packets_as_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head goes with the first event and all that ends it with the last: no packet carries either alone."""
    packets: list[bytes] = []

    def counted(self: StreamWriter, chunk: Any) -> None:
        packets.append(bytes(chunk))
        write(self, chunk)

    def counted_lines(self: StreamWriter, chunks: Any) -> None:
        packets.append(b"".join(chunks))
        write_lines(self, chunks)

    write, write_lines = StreamWriter._write, StreamWriter._writelines
    script = says("one two three")
    body = {
        "model": MODEL,
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
        **CHAT,
    }
    async with requesting(ScriptedEngine(script)) as (session, url):
        monkeypatch.setattr(StreamWriter, "_write", counted)
        monkeypatch.setattr(StreamWriter, "_writelines", counted_lines)
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            await response.read()
    answer = [packet for packet in packets if not packet.startswith(b"POST ")]
    assert len(answer) == len(script.token_ids)
    assert answer[0].startswith(b"HTTP/1.1 200")
    assert b"data: {" in answer[0]
    assert b"data: [DONE]\n\n" in answer[-1]
    assert answer[-1].endswith(b"0\r\n\r\n")
    assert b'"usage":{' in answer[-1]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_last_packet_leaves_when_all_is_counted(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Who asks again with it waits for nothing; what breaks until then takes the place of the end."""
    seen: list[str] = []
    end, leave = Observer._end, Admission.leave

    def ended(self: Observer, *args: Any) -> None:
        seen.append("counted")
        end(self, *args)

    def left(self: Admission, *args: Any) -> None:
        leave(self, *args)
        if fails:
            raise EngineError("the last moment")

    def sent(self: StreamWriter, chunk: Any) -> None:
        seen.append("end" if b"0\r\n\r\n" in bytes(chunk) else "packet")
        write(self, chunk)

    write = StreamWriter._write
    async with requesting(ScriptedEngine(says("one two three"))) as (session, url):
        body = {"model": MODEL, "messages": HELLO, "stream": True, **CHAT}
        monkeypatch.setattr(StreamWriter, "_write", sent)
        monkeypatch.setattr(Observer, "_end", ended)
        monkeypatch.setattr(Admission, "leave", left)
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            told = await response.read()
    answer = seen[seen.index("packet") :]
    if fails:
        assert b"the last moment" in told
        assert b"[DONE]" not in told
    else:
        assert told.endswith(b"data: [DONE]\n\n")
        assert answer[-2:] == ["counted", "end"]


async def test_what_an_answer_needs_is_made_at_the_loops_next_turn_or_when_it_is_wanted() -> None:
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    later, wanted = stream.Later(lambda: make("later")), stream.Later(lambda: make("wanted"))
    assert (wanted(), made) == ("wanted", ["wanted"])
    await asyncio.sleep(0)
    assert (later(), wanted(), made) == ("later", "wanted", ["wanted", "later"])


def cost_s(parser: Any, watchers: Sequence[stream.Watch], token_ids: tuple[int, ...]) -> float:
    """Send tokens one by one, as `stream_answer` does. Returns the processor's seconds a token."""
    began_s = time.thread_time()
    for token_id in token_ids:
        chunk = TokenChunk((token_id,), None, 9)
        for watch in watchers:
            chunk = watch(chunk)
        assert chunk.finish_reason is None
        parser.encode(parser.push(chunk))
    return (time.thread_time() - began_s) / len(token_ids)


@pytest.mark.parametrize("name", BODIES)
def test_the_twenty_thousandth_token_costs_what_the_first_does(name: str) -> None:
    kind, fields = BODIES[name]
    protocol = kind(settings(), 60_000, FORMAT)
    body = json.dumps({"model": MODEL, "stream": True, **fields}).encode()
    prepared = protocol.prepare(body, "id", Caller())
    gate = Gate(settings(), lambda token_ids: join(FORMAT.texts, token_ids).decode(errors="replace"))
    answer_ids = ids(" ".join(f"{number} red, {number * 7} blue;\n" for number in range(1500)))
    first: list[float] = []
    last: list[float] = []
    for _ in range(3):
        policies = gate.policies_for(Caller())
        shaped = apply_policies(prepared, policies)
        parser, watchers = protocol.parser(shaped), watchers_of(shaped, policies)
        costs = [
            cost_s(parser, watchers, answer_ids[start : start + BLOCK]) for start in range(0, 20_000, BLOCK)
        ]
        first.append(min(costs[1:4]))
        last.append(min(costs[-3:]))
    assert len(answer_ids) >= 20_000
    assert min(last) < 1.6 * min(first), f"{1e6 * min(first):.1f} -> {1e6 * min(last):.1f} µs"
    assert min(last) < 60e-6, "six times what it was when this was written"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_prompt_is_handed_to_no_other_thread() -> None:
    """The library's own threads would each time have to be waited for, on a busy machine for long."""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    program = [sys.executable, "-c", COUNT_THREADS, str(CHECKPOINT)]
    counted = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=True)
    before, after = counted.stdout.split()
    assert after == before
