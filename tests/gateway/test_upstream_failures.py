"""Whatever an engine behind HTTP does, the client gets a sentence, soon, and the engine hears of those who leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from chat_scripts import CHAT, HELLO, MODEL, says, settings
from upstream_scripts import ANSWER, ENGINES, HASTY, answer, asking, server_of, tokens, upstream, upstream_of

from deskfleet.endpoint import Constraint, GenerateRequest, TokenChunk, TokenEngine
from deskfleet.errors import ConfigError, DeskfleetError, EngineError, PromptTooLong, RequestError
from deskfleet.gateway.upstream.failures import UpstreamBusy, UpstreamFailed, UpstreamUnreachable
from deskfleet.gateway.upstream.router import Router
from deskfleet.gateway.upstream.vllm import VllmUpstream
from deskfleet.testing.scripted import Script, running_gateway
from deskfleet.testing.upstreams import Fault

FORM = Constraint("regex", "a(", "response_format.regex")
LONG = Script(tuple(range(20, 320)), delay_s=0.005, finish_reason="length")

FAULTS: list[tuple[Fault, type[DeskfleetError], str]] = [
    (Fault("empty"), UpstreamFailed, "answered 200 with an empty body"),
    (Fault("cut", 2), UpstreamFailed, "ended its answer after 2 tokens without a finish reason"),
    (Fault("vanish", 2), UpstreamFailed, "broke off in the middle of its answer"),
    (Fault("vanish"), UpstreamFailed, "broke off in the middle of its answer"),
    (Fault("malformed", 1), UpstreamFailed, "sent an event that cannot be read"),
    (
        Fault("not-stream"),
        UpstreamFailed,
        "answered with text/html, not with a stream of events: <html>welcome",
    ),
    (Fault("http", status=500, message="CUDA error"), UpstreamFailed, "answered 500: CUDA error"),
    (Fault("http", status=404, message="no such model"), UpstreamFailed, "answered 404: no such model"),
    (Fault("http", status=401, message="who?"), UpstreamFailed, "refused the gateway's key: who?"),
    (Fault("http", status=400, message="temperature is silly"), RequestError, "temperature is silly"),
    (Fault("http", status=429, message="slow down"), UpstreamBusy, "is busy: slow down"),
    (
        Fault("in-stream", status=500, message="EngineCore died"),
        UpstreamFailed,
        "answered 500: EngineCore died",
    ),
    (Fault("in-stream", 3, 500, "EngineCore died"), UpstreamFailed, "answered 500: EngineCore died"),
    (Fault("in-stream", status=400, message="id 8000 is unknown"), RequestError, "id 8000 is unknown"),
    (Fault("in-stream", status=503, message="queue is full"), UpstreamBusy, "is busy: queue is full"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("fault", "kind", "sentence"), FAULTS)
async def test_every_fault_is_one_clean_error(
    engine: str, fault: Fault, kind: type[DeskfleetError], sentence: str
) -> None:
    """Tokens that came before it are passed on; the same engine answers the next request."""
    async with upstream(engine) as (engine_, server):
        server.faults = [fault]
        seen, error = await until_error(engine_, asking())
        assert isinstance(error, kind)
        assert sentence in str(error)
        assert tokens(seen) == ANSWER.token_ids[: fault.after]
        assert all(chunk.finish_reason is None for chunk in seen)
        assert tokens(await answer(engine_, asking("r2"))) == ANSWER.token_ids


@pytest.mark.parametrize("engine", ENGINES)
async def test_probabilities_that_are_not_finite_fail_the_request(engine: str) -> None:
    async with upstream(engine) as (engine_, server):
        server.faults = [Fault("nan", 2)]
        seen, error = await until_error(engine_, asking(logprobs=1))
        assert isinstance(error, EngineError)
        assert "not finite" in error.message
        assert tokens(seen) == ANSWER.token_ids[:2]


async def test_how_long_to_wait_is_passed_on() -> None:
    async with upstream("vllm") as (engine_, server):
        for header, expected in (("7", 7.0), ("soon", 5.0), ("-3", 0.0), ("9" * 400, 5.0)):
            server.faults = [Fault("http", status=503, headers=(("Retry-After", header),))]
            with pytest.raises(UpstreamBusy) as error:
                await answer(engine_, asking())
            assert error.value.retry_after_s == expected
        assert error.value.headers == {"Retry-After": "5"}


@pytest.mark.parametrize(
    ("params", "fault", "param"),
    [
        ({}, Fault("http", 0, 400, "must be lower", "max_tokens"), "max_tokens"),
        ({}, Fault("http", 0, 400, "greater than max allowed", "logprobs"), "top_logprobs"),
        ({"constraint": FORM}, Fault("in-stream", 0, 400, "Grammar error: unclosed"), FORM.param),
        ({}, Fault("in-stream", 0, 400, "no reason at all", "internal_name"), None),
    ],
)
async def test_a_refusal_names_the_field_as_the_client_spells_it(
    params: dict[str, Any], fault: Fault, param: str | None
) -> None:
    async with upstream("vllm") as (engine_, server):
        server.faults = [fault]
        with pytest.raises(RequestError) as error:
            await answer(engine_, asking(**params))
        assert (error.value.message, error.value.param) == (fault.message, param)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("after", [0, 3])
async def test_a_frozen_engine_is_given_up(engine: str, after: int) -> None:
    """Nothing of it answers any more: neither the stream nor a look at its counters."""
    async with upstream(engine) as (engine_, server):
        server.faults = [Fault("freeze", after)]
        chunks = engine_.generate(asking())
        for _ in range(after):
            await anext(chunks)
        reading = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0.05)
        server.freeze()
        started = time.monotonic()
        with pytest.raises(UpstreamFailed, match="has stopped answering, and sent nothing for"):
            await reading
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_engine_that_answers_and_does_nothing_is_given_up(engine: str) -> None:
    """As when a rank hangs: HTTP is fine, counters stand still."""
    async with upstream(engine) as (engine_, server):
        server.is_stuck = True
        started = time.monotonic()
        with pytest.raises(UpstreamFailed, match="answers, but its engine has done nothing for"):
            await answer(engine_, asking())
        assert 0.5 <= time.monotonic() - started < 3


@pytest.mark.parametrize("engine", ENGINES)
async def test_who_compiles_for_the_first_token_is_waited_for_by_the_probe_alone(engine: str) -> None:
    """Its counters stand still for longer than a client's request may be silent. Nor does a probe wait for ever."""
    patient = replace(HASTY, first_token_s=20.0)
    async with upstream(engine, options=patient) as (engine_, server):
        server.is_stuck = True
        probing = asyncio.create_task(engine_.probe())
        with pytest.raises(UpstreamFailed, match="has done nothing for"):
            await answer(engine_, asking())
        assert not probing.done()
        server.is_stuck = False
        await probing
    async with upstream(engine) as (engine_, server):
        server.is_stuck = True
        with pytest.raises(UpstreamFailed, match="has done nothing for"):
            await engine_.probe()


@pytest.mark.parametrize("engine", ENGINES)
async def test_log_probabilities_of_a_prompt_are_refused(engine: str) -> None:
    async with upstream(engine) as (engine_, server):
        with pytest.raises(RequestError, match="not asked for the log probabilities of a prompt") as error:
            await answer(engine_, asking(prompt_logprobs=0))
    assert error.value.param == "echo"
    assert not server.requests


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_busy_engine_is_waited_for(engine: str) -> None:
    """Silent for four times the patience, while its counters move: a long queue, or a long prompt."""
    slow = replace(ANSWER, first_delay_s=2.0)
    async with upstream(engine, slow) as (engine_, server):

        async def work() -> None:
            while True:
                server.num_steps += 1
                await asyncio.sleep(0.05)

        working = asyncio.create_task(work())
        try:
            assert tokens(await answer(engine_, asking())) == ANSWER.token_ids
        finally:
            working.cancel()


async def test_a_long_prompt_buys_patience_for_everyone() -> None:
    """One pass over it may take long, and nothing moves meanwhile: also for a short prompt beside it."""
    options = replace(HASTY, prefill_tokens_per_s=500.0)
    slow = replace(ANSWER, first_delay_s=1.5)
    async with upstream("vllm", slow, options) as (engine_, _):
        long_prompt = tuple(20 + index % 100 for index in range(1000))
        answers = await asyncio.gather(
            answer(engine_, asking("long", long_prompt)), answer(engine_, asking("short"))
        )
        assert [tokens(each) for each in answers] == [ANSWER.token_ids] * 2
        with pytest.raises(UpstreamFailed, match="done nothing"):
            await answer(engine_, asking("short, alone"))


async def test_an_engine_without_counters_is_asked_for_its_health() -> None:
    slow = replace(ANSWER, first_delay_s=1.5)
    async with upstream("sglang", slow) as (engine_, server):
        server.has_metrics = False
        assert tokens(await answer(engine_, asking())) == ANSWER.token_ids
        server.is_stuck = True
        with pytest.raises(UpstreamFailed, match="has stopped answering"):
            await answer(engine_, asking("r2"))


async def test_a_slow_reader_is_no_silent_engine() -> None:
    """A client that reads nothing for a while, with the whole answer in our buffers."""
    async with upstream("vllm") as (engine_, server):
        chunks = engine_.generate(asking())
        seen = [await anext(chunks)]
        server.freeze()
        await asyncio.sleep(1.0)
        server._unfrozen.set()
        seen += [chunk async for chunk in chunks]
        assert tokens(seen) == ANSWER.token_ids


async def test_a_whole_answer_survives_a_stream_that_does_not_end() -> None:
    """The finish reason has come; what is missing is the end of the connection."""
    async with upstream("vllm") as (engine_, server):
        after = server._after

        def hanging(request: GenerateRequest, said: tuple[int, ...]) -> Iterator[dict[str, Any]]:
            yield from after(request, said)
            server.faults = []
            raise ConnectionResetError("scripted")

        server._after = hanging  # type: ignore[method-assign]
        chunks = await answer(engine_, asking())
        assert (tokens(chunks), chunks[-1].finish_reason) == (ANSWER.token_ids, "stop")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("num_read", [0, 1, 5])
async def test_leaving_cancels_in_the_engine(engine: str, num_read: int) -> None:
    async with upstream(engine, LONG) as (engine_, server):
        chunks = engine_.generate(asking(max_tokens=300))
        assert isinstance(chunks, AsyncGenerator)
        reading = asyncio.create_task(take(chunks, num_read))
        while not server.num_running:
            await asyncio.sleep(0.01)
        if num_read:
            await reading
        else:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await chunks.aclose()
        await until(lambda: server.num_running == 0)
        assert server.num_cancelled == 1
        assert server.num_tokens < 200
        if engine == "sglang":
            await until(lambda: server.aborted == ["r"])  # type: ignore[attr-defined]
        else:
            assert (await engine_.stats()).num_cancelled == 1


async def until_error(
    engine: TokenEngine, request: GenerateRequest
) -> tuple[list[TokenChunk], DeskfleetError | None]:
    """What came, and the error that ended it."""
    seen = []
    try:
        async for chunk in engine.generate(request):
            seen.append(chunk)
    except DeskfleetError as error:
        return seen, error
    return seen, None


async def take(chunks: AsyncGenerator[Any, None], count: int) -> None:
    for _ in range(max(count, 1)):
        await anext(chunks)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come true within 3 s")


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_deadline_holds_before_and_after_the_first_token(engine: str) -> None:
    async with upstream(engine, LONG) as (engine_, server):
        started = time.monotonic()
        with pytest.raises(EngineError, match="the deadline passed after"):
            await answer(engine_, asking(max_tokens=300, timeout_s=0.3))
        assert 0.25 < time.monotonic() - started < 1
        server.freeze()
        with pytest.raises(EngineError, match="the deadline passed before the engine answered"):
            await answer(engine_, asking("r2", timeout_s=0.2))


async def test_an_engine_that_takes_requests_and_never_answers() -> None:
    async with upstream("vllm") as (engine_, server):
        server.freeze()
        with pytest.raises(UpstreamFailed, match="took a request and did not answer for 4 s"):
            await answer(engine_, asking())


async def test_requests_that_no_engine_can_answer_do_not_leave_the_gateway() -> None:
    async with upstream("vllm", max_model_len=64) as (engine_, server):
        for prompt, kind, sentence in (
            ((), RequestError, "the prompt is empty"),
            ((0, 512), RequestError, "token id 512, outside the vocabulary of 512"),
            ((0, -1), RequestError, "outside the vocabulary"),
            ((0,) * 64, PromptTooLong, "prompt of 64 tokens exceeds the context of 64"),
            ((0, 511), RequestError, "1 image placeholders but 0 images"),
        ):
            with pytest.raises(kind, match=sentence):
                await answer(engine_, asking(prompt=prompt))
        assert server.requests == []


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_engine_that_does_not_fit_is_refused_at_once(engine: str) -> None:
    async with server_of(engine, max_model_len=1000) as server:
        for changes, sentence in (
            ({"max_model_len": 2000}, "serves a context of 1000 tokens, less than max_model_len 2000"),
            ({"model": "other"}, "does not serve 'other'"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                await upstream_of(server, replace(HASTY, **changes)).__aenter__()
        async with upstream_of(server, replace(HASTY, max_model_len=500)) as fitting:
            assert fitting.max_model_len == 500
        tokenizer = server.tokenizer
        tokenizer.add_tokens(["Großes"])  # as a fine-tuned checkpoint might have
        tokenizer.add_tokens(["quick"])
        with pytest.raises(
            ConfigError, match="cuts text into other tokens than the checkpoint does, from token"
        ):
            await upstream_of(server).__aenter__()


async def test_keys_and_addresses() -> None:
    async with server_of("vllm", key="s3cret") as server:
        with pytest.raises(UpstreamFailed, match="refused the gateway's key"):
            await upstream_of(server).__aenter__()
        async with upstream_of(server, replace(HASTY, api_key="s3cret")) as engine_:
            assert tokens(await answer(engine_, asking())) == ANSWER.token_ids
    assert "s3cret" not in repr(replace(HASTY, api_key="s3cret"))
    for url in ("", "host:80", "ftp://x", "http://", "http://a:b@host", "http://x?y=1", "http://x:99999"):
        with pytest.raises(ConfigError):
            VllmUpstream(url, upstream_of(server).vocabulary)
    assert VllmUpstream(" http://x:1/v1/ ", upstream_of(server).vocabulary).url == "http://x:1"


async def test_nothing_at_the_address() -> None:
    async with server_of("vllm") as server:
        pass
    with pytest.raises(UpstreamUnreachable, match=f"nothing answers at {server.url}"):
        await upstream_of(server).__aenter__()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_is_told_over_http(engine: str, stream: bool) -> None:
    """Before the first token with a status, after it as the stream's last event; within a second or two."""
    body = {"model": MODEL, "messages": HELLO, **CHAT, "stream": stream}
    async with (
        server_of(engine, says("one two three", delay_s=0.01)) as server,
        Router([upstream_of(server)]) as router,
        running_gateway(router, settings()) as base_url,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        for fault, status, words in (
            (Fault("empty"), 503, "empty body"),
            (Fault("cut", 2), 200 if stream else 503, "without a finish reason"),
            (Fault("freeze", 2), 200 if stream else 503, "done nothing"),
            (Fault("http", status=400, message="not today"), 400, "not today"),
        ):
            server.faults = [fault]
            started = time.monotonic()
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                text = await response.text()
            assert time.monotonic() - started < 3
            assert (response.status, words in text) == (status, True), (fault, text)
            if status != 200:
                assert words in json.loads(text)["error"]["message"]
            router._replicas[0].breaker.succeed()
