"""Log probabilities of a prompt are those of `score`, however the prompt is cut into steps. Takes about ten seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deskfleet.endpoint import SamplingParams, TokenLogprob
from deskfleet.engine.messages import RequestOutput
from deskfleet.engine.runner import ModelRunner
from tests.engine.cores import adding, core_over, load_runner

PROMPT = tuple((7 * place * place + 3 * place) % 400 + 20 for place in range(150))
ASKING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=3)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_runner(num_slots=4, max_model_len=512)


def outputs_of(core: object, *requests: object) -> dict[str, list[RequestOutput]]:
    for request in requests:
        assert core.add(request) is None  # type: ignore[attr-defined]
    found: dict[str, list[RequestOutput]] = {}
    while core.has_work:  # type: ignore[attr-defined]
        for output in core.step():  # type: ignore[attr-defined]
            assert output.error is None
            found.setdefault(output.request_id, []).append(output)
    return found


def scored(runner: ModelRunner) -> np.ndarray:
    """Log probabilities float64 [n, V] after each position, from the rows of a score."""
    core = core_over(runner, max_num_batched_tokens=40)
    told = outputs_of(core, adding("score", PROMPT, SamplingParams(max_tokens=1), score=True))["score"]
    flat = np.concatenate([np.frombuffer(output.logits or b"", np.float32) for output in told])
    logits = flat.reshape(len(PROMPT), -1).astype(np.float64)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def check(told: tuple[TokenLogprob, ...] | None, expected: np.ndarray) -> None:
    assert told is not None
    assert [entry.token_id for entry in told] == list(PROMPT[1:])
    for entry, row in zip(told, expected[:-1], strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-9)
        best = np.argsort(-row, kind="stable")[:3]
        assert [token_id for token_id, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row[best], abs=1e-9)


@pytest.mark.parametrize("speculation", ["off", "5"])
@pytest.mark.parametrize("rows", [13, 40, 512])
def test_they_are_those_of_a_score_and_the_answer_is_the_same(
    runner: ModelRunner, rows: int, speculation: str
) -> None:
    expected = scored(runner)
    core = core_over(runner, speculation, max_num_batched_tokens=rows)
    plain = replace(ASKING, prompt_logprobs=None)
    # The second has the same prompt, which by then lies in the cache: nothing of it is taken from there.
    for name in ("first", "second"):
        told = outputs_of(core, adding(name, PROMPT, ASKING), adding(f"{name}, plain", PROMPT, plain))
        own, other = told[name], told[f"{name}, plain"]
        check(own[0].prompt_logprobs, expected)
        assert all(output.prompt_logprobs is None for output in (*own[1:], *other))
        assert own[0].num_cached_tokens == 0
        for field in ("token_ids", "logprobs"):
            said = [
                [each for output in outputs for each in getattr(output, field)] for outputs in (own, other)
            ]
            assert said[0] == said[1], field


def test_a_request_that_was_pushed_out_tells_each_token_once(runner: ModelRunner) -> None:
    expected = scored(runner)
    core = core_over(runner, max_num_batched_tokens=40)
    assert core.add(adding("own", PROMPT, ASKING)) is None
    found: list[RequestOutput] = []
    for step in range(200):
        if step in (1, 5):  # within the prompt, and while it answers
            entry = next(iter(core.scheduler._running.values()))
            core.scheduler._preempt(entry)
        found += core.step()
        if not core.has_work:
            break
    check(found[0].prompt_logprobs, expected)
    assert core.stats.num_preempted == 2
    assert sum(len(output.token_ids) for output in found) == 6


def test_a_prompt_of_one_token_has_none(runner: ModelRunner) -> None:
    core = core_over(runner)
    (first, *_) = outputs_of(core, adding("one", PROMPT[:1], ASKING))["one"]
    assert first.prompt_logprobs == ()
