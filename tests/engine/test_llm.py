"""LLM and EngineClient as users call them: what comes out, when it ends, and what is refused with which words."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.client import EngineClient, EngineOptions
from deskfleet.engine.llm import LLM
from deskfleet.engine.stopping import StopStrings, cut_at_stop
from deskfleet.errors import CheckpointError, ConfigError, EngineError, PromptTooLong, RequestError
from deskfleet.model.tokenizer import load_tokenizer
from tests.engine.engines import (
    IMAGE_TOKEN,
    MODEL,
    SMALL,
    chunks_of,
    greedy,
    idle,
    random_ids,
    request,
    tokens_of,
)
from tests.engine.golden import checkpoint, golden, measured

EOS = 1
in_session = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


# --- LLM.generate and LLM.score


def test_strings_and_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "the river in early spring"
    from_text, from_ids, from_array = llm.generate(
        [text, llm.encode(text), np.array(llm.encode(text))],  # type: ignore[list-item]
        greedy(6),
    )
    assert from_text == from_ids == from_array
    assert from_text.prompt_token_ids == llm.encode(text)
    assert len(from_text.token_ids) == 6
    assert from_text.finish_reason == "length"
    assert from_text.text == llm.tokenizer.decode(from_text.token_ids, skip_special_tokens=False)
    assert from_text.logprobs is None


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    prompt = random_ids(5, seed=1)
    short, long = llm.generate([prompt, prompt], [greedy(2), greedy(5)])
    assert long.token_ids[:2] == short.token_ids
    assert (len(short.token_ids), len(long.token_ids)) == (2, 5)
    with pytest.raises(ValueError, match="zip"):
        llm.generate([prompt, prompt], [greedy(2)])
    assert llm.generate([]) == []


def test_a_seed_repeats_and_none_does_not(llm: LLM) -> None:
    prompt = random_ids(5, seed=2)
    seeded = SamplingParams(temperature=2.0, seed=3, max_tokens=12, ignore_eos=True)
    first, second, other = llm.generate([prompt] * 3, [seeded, seeded, replace(seeded, seed=4)])
    assert first == second
    assert first.token_ids != other.token_ids
    free = llm.generate([prompt] * 2, replace(seeded, seed=None))
    assert free[0].token_ids != free[1].token_ids


def test_eos_stops_and_can_be_ignored(llm: LLM) -> None:
    prompt = random_ids(120, seed=33)[:25]
    assert llm.score(prompt)[-1].argmax() == EOS, "the prompt was searched so that EOS comes first"
    stopped, ignored, cut = llm.generate(
        [prompt] * 3, [replace(greedy(4), ignore_eos=False), greedy(4), replace(greedy(1), ignore_eos=False)]
    )
    assert (stopped.token_ids, stopped.finish_reason, stopped.text) == ((EOS,), "stop", "")
    assert (len(ignored.token_ids), ignored.finish_reason) == (4, "length")
    assert ignored.token_ids[0] == EOS
    assert cut.finish_reason == "stop", "a stop in the last token allowed is a stop"


def test_stop_token_ids_end_with_the_token(llm: LLM) -> None:
    prompt = random_ids(6, seed=3)
    free = llm.generate([prompt], greedy(10))[0].token_ids
    stop = free[4]
    expected = free[: free.index(stop) + 1]
    completion = llm.generate([prompt], greedy(10, stop_token_ids=(499, stop)))[0]
    assert (completion.token_ids, completion.finish_reason) == (expected, "stop")


def test_a_stop_string_over_several_tokens(llm: LLM) -> None:
    prompt = random_ids(6, seed=0)  # its answer holds " letter-ours r", in five tokens
    free = llm.generate([prompt], greedy(24))[0]
    stop = "tter-ours "
    assert stop in free.text
    completion = llm.generate([prompt], greedy(24, stop=("nowhere", stop)))[0]
    assert completion.finish_reason == "stop"
    assert completion.text == free.text[: free.text.index(stop)]
    assert stop in llm.tokenizer.decode(completion.token_ids)
    assert stop not in llm.tokenizer.decode(completion.token_ids[:-1])
    # The token limit falls on the very token that completes the stop string: that is a stop.
    exact = llm.generate([prompt], greedy(len(completion.token_ids), stop=(stop,)))[0]
    assert exact == completion


def test_a_stop_string_that_ends_inside_nothing_but_bytes(llm: LLM) -> None:
    prompt = random_ids(6, seed=9)  # its answer holds "é", whose bytes are two tokens
    free = llm.generate([prompt], greedy(24))[0]
    assert "é" in free.text
    completion = llm.generate([prompt], greedy(24, stop=("é",)))[0]
    assert completion.finish_reason == "stop"
    assert completion.text == free.text[: free.text.index("é")]


def test_logprobs_are_of_the_scored_distribution(llm: LLM) -> None:
    prompt = random_ids(20, seed=4)
    params = SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=5, ignore_eos=True, logprobs=3)
    completion, bare = llm.generate([prompt] * 2, [params, replace(params, logprobs=0)])
    assert completion.logprobs is not None
    assert bare.logprobs is not None
    assert [len(entry.top) for entry in completion.logprobs] == [3] * 5
    assert [entry.top for entry in bare.logprobs] == [()] * 5
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    logits = llm.score(prompt + completion.token_ids)[len(prompt) - 1 : -1].astype(np.float64)
    for row, entry in zip(logits, completion.logprobs, strict=True):
        normalised = row - row.max() - math.log(np.exp(row - row.max()).sum())
        assert entry.logprob == pytest.approx(normalised[entry.token_id], abs=1e-12)
        assert [i for i, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()


def test_scores_are_what_generation_sees(llm: LLM) -> None:
    prompt = random_ids(30, seed=5)
    tokens = llm.generate([prompt], greedy(8))[0].token_ids
    logits = llm.score(prompt + tokens)
    assert logits.shape == (38, 512)
    assert logits.dtype == np.float32
    assert tuple(logits[29:-1].argmax(-1)) == tokens


def test_generation_ends_at_the_context_limit(llm: LLM) -> None:
    limit = checkpoint().config.max_position_embeddings
    completion = llm.generate([random_ids(limit - 3, seed=6)], greedy(50))[0]
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(llm: LLM) -> None:
    limit = checkpoint().config.max_position_embeddings
    for length in (limit, limit + 500):
        with pytest.raises(
            PromptTooLong, match=f"{length} tokens exceeds the context of {limit} tokens"
        ) as failure:
            llm.generate([random_ids(length, seed=7)], greedy(1))
        assert (failure.value.num_prompt_tokens, failure.value.max_model_len) == (length, limit)
    with pytest.raises(PromptTooLong):
        llm.score(random_ids(limit + 1, seed=7))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message", "param"),
    [
        ((), greedy(1), "the prompt is empty", "messages"),
        ("", greedy(1), "the prompt is empty", "messages"),
        ((5, 512), greedy(1), "token id 512 is outside the vocabulary of 512", "messages"),
        ((5, -1), greedy(1), "token id -1 is outside the vocabulary of 512", "messages"),
        ((5, IMAGE_TOKEN), greedy(1), "prompt has 1 image placeholders but 0 images", "messages"),
        ((5,), SamplingParams(temperature=-0.5), "temperature is -0.5", "temperature"),
        ((5,), SamplingParams(temperature=math.nan), "temperature is nan", "temperature"),
        ((5,), SamplingParams(temperature=math.inf), "temperature is inf", "temperature"),
        ((5,), SamplingParams(top_p=0.0), "top_p is 0.0", "top_p"),
        ((5,), SamplingParams(top_p=math.nan), "top_p is nan", "top_p"),
        ((5,), SamplingParams(top_k=-1), "top_k is -1", "top_k"),
        ((5,), SamplingParams(min_p=1.5), "min_p is 1.5", "min_p"),
        ((5,), SamplingParams(max_tokens=0), "max_tokens is 0", "max_tokens"),
        ((5,), SamplingParams(seed=2**64), "seed is 18446744073709551616", "seed"),
        ((5,), SamplingParams(logprobs=513), "logprobs is 513, but must be 0 to 512", "logprobs"),
        ((5,), SamplingParams(stop_token_ids=(5, 600)), "stop token id 600", "stop_token_ids"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_by_name(
    llm: LLM, prompt: tuple[int, ...] | str, sampling: SamplingParams, message: str, param: str
) -> None:
    with pytest.raises(RequestError) as failure:
        llm.generate([prompt], sampling)
    assert failure.value.message.startswith(message)
    assert failure.value.param == param


def test_one_refused_prompt_takes_the_others_with_it(llm: LLM) -> None:
    """Nobody waits for the answers of the others, so they must not keep the engine busy."""
    before = llm._call(llm._client.stats()).num_generated_tokens
    with pytest.raises(RequestError):
        llm.generate([random_ids(5, seed=8), ()], greedy(500))
    time.sleep(0.3)  # long enough for a step that says what runs
    after = llm._call(llm._client.stats())
    assert idle(after)
    assert after.num_generated_tokens < before + 100
    assert llm.generate([random_ids(5, seed=8)], greedy(1))[0].token_ids


def test_a_missing_tokenizer_or_bad_option_is_refused_before_anything_starts(tmp_path) -> None:
    for name in MODEL.iterdir():
        (tmp_path / name.name).symlink_to(name)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in"):
        LLM(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        LLM(tmp_path)
    for options, message in (
        ({"tp_size": 0}, "tp_size must be an integer of 1 or more, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, less than 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0, less than 1"),
        ({"threads_per_rank": 0}, "threads_per_rank is 0, less than 1"),
        ({"max_model_len": 1025}, r"max_model_len 1025 is outside 2\.\.1024"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(MODEL, **options)


def test_a_signal_just_after_the_start_leaves_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start can no longer be cancelled then, and nobody has the object yet that would be closed."""
    call = LLM._call
    calls = []

    def interrupted(self: LLM, work: Coroutine[Any, Any, Any]) -> Any:
        calls.append(work)
        result = call(self, work)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(LLM, "_call", interrupted)
    before = set(psutil.Process().children())
    with pytest.raises(KeyboardInterrupt):
        LLM(MODEL, threads_per_rank=1)
    assert set(psutil.Process().children()) <= before
    assert len(calls) == 2  # the start and the close


async def test_an_engine_that_is_not_started_says_so() -> None:
    engine = EngineClient(checkpoint(), EngineOptions())
    with pytest.raises(EngineError, match="the engine is not loaded yet"):
        await tokens_of(engine, request((5,), greedy(1)))
    with pytest.raises(EngineError, match="the engine is not loaded yet"):
        await engine.stats()
    await engine.close()
    with pytest.raises(EngineError, match="the engine is shutting down"):
        await engine.stats()


# --- images


def golden_image_prompt() -> tuple[tuple[int, ...], list[bytes], np.ndarray]:
    """The golden image prompt with one placeholder per image, its image files, and its golden logits."""
    data = golden("golden/image")
    ids, types = data["input_ids"].tolist(), data["token_types"].tolist()
    starts_span = 0
    short = tuple(i for i, kind in zip(ids, types, strict=True) if kind in (-1, starts_span))
    files = [data[f"image{k}.png"].numpy().tobytes() for k in range(2)]
    return short, files, data["logits"].numpy()


@in_session
async def test_images_from_file_to_token(engine: EngineClient) -> None:
    """The spans are expanded, the prompt is cut inside them, and decoding equals prefilling what was decoded."""
    prompt, files, logits = golden_image_prompt()
    assert prompt.count(IMAGE_TOKEN) == 2
    assert len(logits) > SMALL.max_num_batched_tokens, "else the spans would not be cut"
    answer = await chunks_of(engine, request(prompt, greedy(5, logprobs=8), files))
    assert {chunk.num_prompt_tokens for chunk in answer} == {len(logits)}
    tokens = tuple(i for chunk in answer for i in chunk.token_ids)
    assert tokens[0] == logits[-1].argmax(), "the golden prompt has a clear winner here"
    assert answer[0].logprobs is not None
    first = dict(answer[0].logprobs[0].top)
    wide = logits[-1].astype(np.float64)
    reference = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    difference = max(abs(first[i] - reference[i]) for i in first)
    measured.append(
        f"log probabilities: largest difference of {len(first)} golden log probabilities: {difference:.4f}"
    )
    assert difference < 0.3
    for place in range(1, 5):
        again = await chunks_of(engine, request(prompt + tokens[:place], greedy(1, logprobs=8), files))
        assert again[0].token_ids == (tokens[place],)
        assert again[0].logprobs == answer[place].logprobs


@in_session
async def test_images_matter_and_keep_their_order(engine: EngineClient) -> None:
    prompt, files, _ = golden_image_prompt()
    straight, swapped, plain = await asyncio.gather(
        chunks_of(engine, request(prompt, greedy(1, logprobs=0), files)),
        chunks_of(engine, request(prompt, greedy(1, logprobs=0), files[::-1])),
        chunks_of(engine, request([i for i in prompt if i != IMAGE_TOKEN], greedy(1, logprobs=0))),
    )
    values = [chunks[0].logprobs[0].logprob for chunks in (straight, swapped, plain) if chunks[0].logprobs]
    assert len(set(values)) == 3


@in_session
async def test_bad_images_are_the_requests_fault(engine: EngineClient) -> None:
    prompt, files, _ = golden_image_prompt()
    with pytest.raises(RequestError, match="prompt has 2 image placeholders but 1 images"):
        await tokens_of(engine, request(prompt, greedy(1), files[:1]))
    with pytest.raises(RequestError, match="an image of 5 bytes is not a readable PNG, JPEG, WEBP"):
        await tokens_of(engine, request(prompt, greedy(1), [files[0], b"bytes"]))
    long = tuple(random_ids(250, seed=9)) + prompt
    with pytest.raises(PromptTooLong, match="prompt of 284 tokens exceeds the context of 256 tokens"):
        await tokens_of(engine, request(long, greedy(1), files))
    assert idle(await engine.stats())


# --- stop strings over a stream of tokens

TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8", exclude_categories=["Cs"]), st.sampled_from("ab é€🙂")),
    max_size=12,
)


@settings(deadline=None, max_examples=300)
@given(TEXTS, TEXTS, TEXTS)
def test_a_stop_string_is_seen_with_the_token_that_completes_it(
    tokenizer: Tokenizer, before: str, stop: str, after: str
) -> None:
    assume(stop)
    ids = tokenizer.encode(before + stop + after, add_special_tokens=False).ids
    watcher = StopStrings(tokenizer, ("not in any text \0", stop))
    seen = next((n for n, token in enumerate(ids, 1) if watcher.push([token])), None)
    # The first prefix whose text is whole and holds the stop string.
    texts = [tokenizer.decode(ids[:n], skip_special_tokens=False) for n in range(1, len(ids) + 1)]
    expected = next(
        (n for n, text in enumerate(texts, 1) if stop in text and not text.endswith("\ufffd")), None
    )
    assert seen == expected


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 511), max_size=40),
    st.text(st.sampled_from(" aeinorst<|"), min_size=1, max_size=3),
)
def test_any_tokens_at_all_can_be_watched(tokenizer: Tokenizer, ids: list[int], stop: str) -> None:
    """A model may emit broken UTF-8 for as long as it likes."""
    watcher = StopStrings(tokenizer, (stop,))
    seen = any(watcher.push([token]) for token in ids)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    if seen:
        assert stop in whole
    elif not whole.endswith("\ufffd"):
        assert stop not in whole


def test_the_text_is_cut_at_the_first_stop_string() -> None:
    assert cut_at_stop("one two three", ("three", "two", "")) == "one "
    assert cut_at_stop("one two three", ("four",)) == "one two three"
    assert cut_at_stop("one", ("one",)) == ""
