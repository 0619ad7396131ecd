"""Budgets for thoughts and forms after them, on engines that know of neither: parts of one answer.

What must come out is what the native engine's sampler does; the oracle is a few lines that apply the contract to a
script, token by token.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from chat_scripts import EOS, ids
from hypothesis import given, settings
from hypothesis import strategies as st
from upstream_scripts import ENGINES, PROMPT, answer, asking, server_of, tokens, upstream_of

from deskfleet.endpoint import Constraint, FinishReason, GenerateRequest
from deskfleet.errors import EngineError, RequestError
from deskfleet.gateway.upstream.thoughts import Thought
from deskfleet.testing.scripted import Script

START, END = 507, 508
EOS_ID, CALL_ID = 1, 509
THINKING = (*PROMPT, START)
FORM = Constraint("json_object", param="response_format")
STOP = 40


def expected(
    script: tuple[int, ...],
    prompt: tuple[int, ...],
    budget: int | None,
    max_tokens: int,
    stops: tuple[int, ...],
) -> tuple[tuple[int, ...], FinishReason]:
    """The contract, token by token: a model that says `script`, but must close its thought when the budget is spent.

    A forced `</think>` takes the place of nothing: the model goes on with what it would have said after its own.
    """
    said: list[int] = []
    rest = list(script)
    thought = Thought.of_prompt(prompt, (START, END))
    while True:
        if budget is not None and thought.is_open and thought.num_tokens >= budget:
            token_id = END
            rest = rest[rest.index(END) + 1 :] if END in rest else rest
        elif not rest:
            return tuple(said), "stop"
        else:
            token_id = rest.pop(0)
        said.append(token_id)
        thought = thought.after([token_id], (START, END))
        if token_id == EOS_ID or token_id in stops:
            return tuple(said), "stop"
        if len(said) == max_tokens:
            return tuple(said), "length"


class Model:
    """Says `script` from where a prompt has got to, as a model would that is asked again in the middle."""

    def __init__(self, script: tuple[int, ...], prompt: tuple[int, ...]) -> None:
        self.script = script
        self.prompt = prompt

    def __call__(self, request: GenerateRequest) -> Script:
        params = request.sampling
        forced = [token_id for token_id, bias in params.logit_bias if bias >= 100]
        if forced:
            return Script((forced[0],))
        said = request.prompt_token_ids[len(self.prompt) :]
        rest = self.script
        for token_id in said:
            if rest and token_id == rest[0]:
                rest = rest[1:]
            else:  # a forced end of the thought
                rest = rest[rest.index(END) + 1 :] if END in rest else rest
        return Script(rest)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("budget", [None, 0, 1, 3, 4, 5, 9, 100])
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 5, 6, 8, 50])
async def test_a_thought_is_closed_when_its_budget_is_spent(
    engine: str, budget: int | None, max_tokens: int
) -> None:
    """Every budget against every length, ids and reason; the engine never hears of the budget."""
    script = (20, 21, 22, 23, END, 30, 31, 32, EOS_ID)
    for prompt in (THINKING, (*THINKING, 20), PROMPT):
        async with (
            server_of(engine, Model(script, prompt), continues=False) as server,
            upstream_of(server) as upstream,
        ):
            chunks = await answer(
                upstream, asking(prompt=prompt, thinking_budget=budget, max_tokens=max_tokens)
            )
            assert (tokens(chunks), chunks[-1].finish_reason) == expected(
                script, prompt, budget, max_tokens, ()
            )
            assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert all(request.sampling.thinking_budget is None for request in server.requests)
            assert {chunk.num_prompt_tokens for chunk in chunks} == {len(prompt)}
            assert len({request.request_id for request in server.requests}) == len(server.requests)


@settings(deadline=None, max_examples=200)
@given(
    body=st.lists(st.sampled_from([20, 21, 22, STOP, START, END, EOS_ID]), max_size=12),
    budget=st.none() | st.integers(0, 6),
    max_tokens=st.integers(1, 14),
    stops=st.sampled_from([(), (STOP,), (END,), (START,)]),
    is_thinking=st.booleans(),
)
def test_any_script_is_cut_as_the_contract_says(
    body: list[int], budget: int | None, max_tokens: int, stops: tuple[int, ...], is_thinking: bool
) -> None:
    """Thoughts that open again, ends inside them, the client's own stops on the marks themselves."""
    script = (*body, EOS_ID)
    script = script[: script.index(EOS_ID) + 1]
    prompt = THINKING if is_thinking else PROMPT

    async def run() -> None:
        async with (
            server_of("vllm", Model(script, prompt), continues=False) as server,
            upstream_of(server) as upstream,
        ):
            request = asking(
                prompt=prompt, thinking_budget=budget, max_tokens=max_tokens, stop_token_ids=stops
            )
            chunks = await answer(upstream, request)
            assert (tokens(chunks), chunks[-1].finish_reason) == expected(
                script, prompt, budget, max_tokens, stops
            )

    asyncio.run(run())


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_form_holds_from_the_first_token_after_the_thought(engine: str) -> None:
    """The thought is free, but can neither end the answer nor begin a call; the rest is asked for with the form."""
    script = ids("Hm.</think>{}" + EOS)
    async with (
        server_of(engine, Model(script, THINKING), continues=False) as server,
        upstream_of(server) as upstream,
    ):
        request = asking(prompt=THINKING, constraint=FORM, seed=7, logit_bias=((5, 2.0), (EOS_ID, 3.0)))
        assert tokens(await answer(upstream, request)) == script
        thought, rest = server.requests
        assert thought.sampling.constraint is None
        assert thought.sampling.stop_token_ids == (END,)
        assert dict(thought.sampling.logit_bias) == {5: 2.0, EOS_ID: -100.0, CALL_ID: -100.0}
        assert rest.sampling.constraint is not None
        assert dict(rest.sampling.logit_bias) == {5: 2.0, EOS_ID: 3.0}
        assert rest.prompt_token_ids == THINKING + script[: script.index(END) + 1]
        assert rest.sampling.max_tokens == request.sampling.max_tokens - script.index(END) - 1
        assert (thought.sampling.seed, rest.sampling.seed) == (7, 8)
        if engine == "vllm":
            assert [body.get("reasoning_ended") for body in server.bodies] == [None, True]


@pytest.mark.parametrize("engine", ENGINES)
async def test_without_a_thought_one_request_is_enough(engine: str) -> None:
    script = ids("{}" + EOS)
    async with (
        server_of(engine, Model(script, (*PROMPT, START, END)), continues=False) as server,
        upstream_of(server) as upstream,
    ):
        request = asking(prompt=(*PROMPT, START, END), constraint=FORM, presence_penalty=1.0)
        assert tokens(await answer(upstream, request)) == script
        assert len(server.requests) == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
async def test_what_cannot_reach_over_the_parts_is_refused(engine: str, name: str) -> None:
    async with server_of(engine, continues=False) as server, upstream_of(server) as upstream:
        for wish in ({"constraint": FORM}, {"thinking_budget": 5}):
            with pytest.raises(RequestError, match="cannot reach back into a thought") as error:
                await answer(upstream, asking(prompt=THINKING, **{name: 0.5}, **wish))
            assert error.value.param == name
        assert server.requests == []
        without = replace(upstream.vocabulary, thinking=None)
        upstream.vocabulary = without
        with pytest.raises(RequestError, match="no <think> and </think>"):
            await answer(upstream, asking(thinking_budget=5))


async def test_a_forced_end_has_its_own_log_probability() -> None:
    """vLLM gives it of the unmodified distribution; SGLang does not, and refuses."""
    script = (20, 21, 22, END, 30, EOS_ID)
    async with (
        server_of("vllm", Model(script, THINKING), continues=False) as server,
        upstream_of(server) as upstream,
    ):
        chunks = await answer(upstream, asking(prompt=THINKING, thinking_budget=2, logprobs=1))
        entries = [entry for chunk in chunks for entry in chunk.logprobs or ()]
        assert [entry.token_id for entry in entries] == [20, 21, END, 30, EOS_ID]
    async with (
        server_of("sglang", Model(script, THINKING), continues=False) as server,
        upstream_of(server) as upstream,
    ):
        with pytest.raises(RequestError, match="after thinking_budget"):
            await answer(upstream, asking(prompt=THINKING, thinking_budget=2, logprobs=1))


async def test_an_engine_that_does_not_say_what_it_is_forced_to() -> None:
    def stubborn(request: GenerateRequest) -> Script:
        return Script((20,), finish_reason="length")

    async with server_of("vllm", stubborn, continues=False) as server, upstream_of(server) as upstream:
        with pytest.raises(EngineError, match="said token 20 where 508 was forced"):
            await answer(upstream, asking(prompt=THINKING, thinking_budget=0))


async def test_leaving_in_the_second_part_cancels_it() -> None:
    script = (20, END, *range(30, 90))
    slow: Any = Model(script, THINKING)
    async with (
        server_of("vllm", lambda request: replace(slow(request), delay_s=0.01), continues=False) as server,
        upstream_of(server) as upstream,
    ):
        chunks = upstream.generate(asking(prompt=THINKING, thinking_budget=50))
        seen = [await anext(chunks) for _ in range(6)]
        assert tokens(seen) == script[:6]
        await chunks.aclose()
        for _ in range(200):
            if server.num_cancelled:
                break
            await asyncio.sleep(0.01)
        assert (server.num_cancelled, server.num_running) == (1, 0)
