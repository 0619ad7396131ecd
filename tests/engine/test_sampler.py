"""Sampling: the distribution is the one asked for, draws follow it, and a seed decides everything."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deskfleet.endpoint import Constraint, SamplingParams
from deskfleet.engine.constraints import ConstraintCompiler, TokenConstraint
from deskfleet.engine.sampler import SamplingState, logprobs
from deskfleet.errors import EngineError
from deskfleet.model.tokenizer import ThinkingTokens, load_tokenizer
from tests.engine.golden import ROOT
from tests.engine.sampling import distribution, draw, sample

# 0.1 % of the chi-square distribution lies beyond these, by degrees of freedom.
CHI_SQUARE_999 = {2: 13.816, 4: 18.467, 5: 20.515, 7: 24.322, 9: 27.877}


def enumerate_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The same in plain Python: sort the tokens, walk down the list, keep or drop."""
    temperature = max(params.temperature, 1e-5)
    top = max(logits)
    weight = {token: math.exp((logit - top) / temperature) for token, logit in enumerate(logits)}
    ranked = sorted(weight, key=lambda token: (-weight[token], token))
    kept = ranked[: params.top_k] if params.top_k else ranked
    total = math.fsum(weight[token] for token in kept)
    if params.top_p < 1:
        nucleus, mass = [], 0.0
        for token in kept:
            if mass >= params.top_p:
                break
            nucleus.append(token)
            mass += weight[token] / total
        kept = nucleus
    best = weight[kept[0]]
    kept = [token for token in kept if weight[token] >= params.min_p * best]
    total = math.fsum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(logits))]


def close_call(logits: list[float], params: SamplingParams) -> bool:
    """Whether rounding may decide if a token is kept: a running sum on top_p, or a ratio on min_p."""
    unfiltered = enumerate_distribution(logits, replace(params, top_p=1.0, min_p=0.0))
    sums = np.cumsum(sorted(unfiltered, reverse=True))
    ratios = np.array(unfiltered) / max(unfiltered)
    return bool(np.any(abs(sums - params.top_p) < 1e-9) or np.any(abs(ratios - params.min_p) < 1e-9))


# Few distinct values, so that ties are common.
LOGITS = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32)), min_size=1, max_size=12
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1e-6, 0.2, 0.7, 1.0, 1.5, 5.0, 1e6]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@settings(deadline=None, max_examples=400)
@given(LOGITS, PARAMS)
def test_the_distribution_is_the_enumerated_one(logits: list[float], params: SamplingParams) -> None:
    assume(params.min_p in (0.0, 1.0) or not close_call(logits, params))
    assume(params.top_p == 1.0 or not close_call(logits, params))
    found = distribution(np.array(logits, np.float32), params)
    expected = enumerate_distribution([float(np.float32(x)) for x in logits], params)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-300, err_msg=f"{params} {logits}")
    assert [p > 0 for p in found] == [p > 0 for p in expected]


@settings(deadline=None, max_examples=100)
@given(LOGITS, PARAMS, st.integers(0, 2**63))
def test_a_draw_is_never_a_filtered_token(logits: list[float], params: SamplingParams, seed: int) -> None:
    array = np.array(logits, np.float32)
    allowed = set(np.flatnonzero(distribution(array, params)))
    assert {sample(array, params, seed=seed, place=place) for place in range(20)} <= allowed


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.7, top_k=6, top_p=0.95, min_p=0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("by", ["place", "seed"])
def test_draws_follow_the_distribution(params: SamplingParams, by: str) -> None:
    """Chi-square over 4,000 draws: places of one seed, and first places of many seeds."""
    logits = np.array([0.3, 2.0, -1.0, 1.9, 0.0, -4.0, 1.0, 0.3, -0.5, 1.2], np.float32)
    expected = distribution(logits, params) * 4000
    drawn = [
        sample(logits, params, seed=11 if by == "place" else n, place=n if by == "place" else 0)
        for n in range(4000)
    ]
    counts = np.bincount(drawn, minlength=len(logits))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    degrees = int(possible.sum()) - 1
    limit = CHI_SQUARE_999[min(d for d in CHI_SQUARE_999 if d >= degrees)]
    assert statistic < limit, (
        f"{params} by {by}: chi-square {statistic:.1f} with {degrees} degrees of freedom"
    )


def test_a_seed_and_a_place_decide_the_draw() -> None:
    logits = np.zeros(1000, np.float32)
    params = SamplingParams()

    def draws(seed: int) -> list[int]:
        return [sample(logits, params, seed=seed, place=place) for place in range(50)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert len(set(draws(5))) > 40, "places of one seed repeat each other"
    # Neighbouring seeds are no shifted copies of each other.
    assert not set(zip(draws(5), draws(5)[1:], strict=False)) & set(zip(draws(6), draws(6)[1:], strict=False))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_any_64_bit_seed_works(seed: int) -> None:
    logits = np.zeros(1000, np.float32)

    def draws(seed: int) -> list[int]:
        return [sample(logits, SamplingParams(), seed=seed, place=place) for place in range(8)]

    neighbour = seed - 1 if seed > 0 else seed + 1
    assert draws(seed) == draws(seed)
    assert draws(seed) != draws(neighbour)


def test_temperature_zero_is_the_likeliest_and_ties_go_to_the_lower_id() -> None:
    logits = np.array([0.0, 3.0, 1.0, 3.0, 3.0], np.float32)
    assert sample(logits, SamplingParams(temperature=0), seed=1, place=0) == 1
    assert sample(logits, SamplingParams(temperature=0, top_k=1), seed=2, place=9) == 1
    # And so for the filters: of equals, the lower id stays.
    assert np.flatnonzero(distribution(logits, SamplingParams(top_k=2))).tolist() == [1, 3]
    assert np.flatnonzero(distribution(logits, SamplingParams(top_p=0.1))).tolist() == [1]


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_uniform() -> None:
    logits = np.array([80.0, -80.0, 80.5, 3e38, -3e38], np.float32)
    assert distribution(logits, SamplingParams(temperature=1e-300)).tolist() == [0, 0, 0, 1, 0]
    uniform = distribution(logits[:3], SamplingParams(temperature=1e30))
    np.testing.assert_allclose(uniform, [1 / 3] * 3, rtol=1e-12)


@settings(deadline=None, max_examples=200)
@given(LOGITS, st.data())
def test_logprobs_are_log_softmax_of_the_untouched_logits(logits: list[float], data: st.DataObject) -> None:
    array = np.array(logits, np.float32)
    token = data.draw(st.integers(0, len(logits) - 1))
    count = data.draw(st.integers(0, len(logits)))
    wide = [float(x) for x in array]
    log_sum = max(wide) + math.log(math.fsum(math.exp(x - max(wide)) for x in wide))
    found = logprobs(array, token, count)
    assert found.token_id == token
    assert found.logprob == pytest.approx(wide[token] - log_sum, rel=1e-12, abs=1e-12)
    ranked = sorted(range(len(wide)), key=lambda i: (-wide[i], i))[:count]
    assert [i for i, _ in found.top] == ranked
    assert [p for _, p in found.top] == pytest.approx(
        [wide[i] - log_sum for i in ranked], rel=1e-12, abs=1e-12
    )


# --- with a state -------------------------------------------------------------------------------------------------

VOCAB, EOS, THINKING = 512, 1, ThinkingTokens(507, 508)
OPEN = np.array([0, 505, 40, 506, THINKING.start])
CLOSED = np.array([0, 505, 40, 506, THINKING.end])
CONSTRAINTS = (
    None,
    Constraint("json_object"),
    Constraint("json_schema", '{"type": "array", "items": {"enum": [1, 22, "a", null]}, "maxItems": 4}'),
    Constraint("regex", "(ab|c)+[0-9]{2}"),
)


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(load_tokenizer(ROOT / "model"), VOCAB, EOS)


def compiled(constraint: Constraint | None) -> TokenConstraint | None:
    return None if constraint is None else compiler().compile(constraint)


def state_of(params: SamplingParams, prompt: np.ndarray) -> SamplingState:
    return SamplingState(params, prompt, VOCAB, constraint=compiled(params.constraint), thinking=THINKING)


def random_logits(rows: int, seed: int) -> np.ndarray:
    """Coarse enough for ties, high for what ends things."""
    logits = np.round(np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)) * 2) / 2
    logits[:, [EOS, *THINKING]] += 6
    return logits.astype(np.float32)


STATEFUL = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 3, 50]),
    top_p=st.sampled_from([0.4, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((40, 5.0), (68, -100.0), (EOS, -3.0))]),
    thinking_budget=st.sampled_from([None, 0, 1, 3]),
    constraint=st.sampled_from(CONSTRAINTS),
)


@settings(deadline=None, max_examples=300)
@given(STATEFUL, st.sampled_from([OPEN, CLOSED, OPEN[:-1]]), st.integers(0, 2**32), st.data())
def test_rows_after_drafts_are_those_of_plain_decoding(
    params: SamplingParams, prompt: np.ndarray, seed: int, data: st.DataObject
) -> None:
    """Two steps of five drafts each: likely ones, so that they go deep into the grammar, and arbitrary ones."""
    state, plain = state_of(params, prompt), state_of(params, prompt)
    for step in range(2):
        logits = random_logits(6, seed + step)
        drafts: list[int] = []
        expected: list[np.ndarray] = []
        for row in range(6):
            expected.extend(plain.distributions(logits[row : row + 1], ()))
            if row == 5:
                break
            likely = np.flatnonzero(expected[-1])
            drafts.append(data.draw(st.sampled_from(likely.tolist()) | st.integers(0, VOCAB - 1)))
            if expected[-1][drafts[-1]] == 0:
                break
            plain.accept(drafts[-1:])
        legal = len(expected)
        drafts += [3] * (5 - len(drafts))
        found = state.distributions(logits, drafts)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found[:legal], expected)
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)
        np.testing.assert_array_equal(state.distributions(logits, drafts), found, "asking changes nothing")
        state.accept(drafts[: legal - 1])


@settings(deadline=None, max_examples=200)
@given(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.7, 0.6]),
        presence_penalty=st.sampled_from([0.0, 1.25, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.75, -2.0]),
        logit_bias=st.sampled_from([(), ((0, 2.0), (5, -7.5))]),
    ),
    st.lists(st.integers(0, 7), max_size=6),
    st.lists(st.integers(0, 7), max_size=6),
    st.integers(0, 6),
    st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8),
)
def test_penalties_are_the_formula(
    params: SamplingParams, prompt: list[int], output: list[int], num_drafts: int, logits: list[float]
) -> None:
    """vLLM's, a token at a time; the last tokens of the output are drafts, which count just the same."""
    expected = []
    for token, value in enumerate(logits):
        value += dict(params.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        expected.append(math.exp(value / params.temperature))
    total = math.fsum(expected)
    state = SamplingState(params, np.array(prompt, np.int64), 8)
    accepted = output[: max(len(output) - num_drafts, 0)]
    state.accept(accepted)
    drafts = output[len(accepted) :]
    row = state.distributions(np.array([logits] * (len(drafts) + 1), np.float32), drafts)[-1]
    np.testing.assert_allclose(row, [x / total for x in expected], rtol=1e-9)


@settings(deadline=None, max_examples=100)
@given(LOGITS, PARAMS)
def test_without_a_state_rows_are_the_plain_distribution(logits: list[float], params: SamplingParams) -> None:
    array = np.array([logits, logits[::-1]], np.float32)
    state = SamplingState(params, np.array([0]), len(logits))
    expected = [distribution(row, params) for row in array]
    np.testing.assert_array_equal(state.distributions(array, [0]), expected)
    greedy = SamplingState(replace(params, temperature=0), np.array([0]), len(logits))
    np.testing.assert_array_equal(greedy.distributions(array, [0]), np.eye(len(logits))[array.argmax(axis=1)])


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_from_one_token_is_that_token(seed: int) -> None:
    for token_id in (0, 3, 7):
        assert draw(np.eye(8)[token_id], seed=seed, place=seed) == token_id


def test_greedy_ties_after_penalties_go_to_the_lower_id() -> None:
    state = SamplingState(SamplingParams(temperature=0, presence_penalty=1.0), np.array([0]), 4)
    logits = np.array([[3.0, 4.0, 3.0, 3.0]], np.float32)
    assert state.distributions(logits, ()).argmax() == 1
    state.accept([1])
    assert state.distributions(logits, ()).tolist() == [[1, 0, 0, 0]]


def thought_length(params: SamplingParams, prompt: np.ndarray, drafts_per_step: int, seed: int) -> list[int]:
    """What is written up to `</think>`, in steps of so many drafts, by a model that neither opens nor ends one."""
    state = state_of(params, prompt)
    output: list[int] = []
    rng = np.random.default_rng(seed)
    while THINKING.end not in output and len(output) < 30:
        logits = random_logits(drafts_per_step + 1, int(rng.integers(2**32)))
        logits[:, list(THINKING)] = -50
        drafts: list[int] = []
        for row in range(drafts_per_step + 1):
            drafts.append(
                draw(state.distributions(logits[: row + 1], drafts)[-1], seed=seed, place=len(output) + row)
            )
        state.accept(drafts)
        output += drafts
    return output[: output.index(THINKING.end)] if THINKING.end in output else output


@pytest.mark.parametrize("budget", [0, 1, 2, 7])
@pytest.mark.parametrize("drafts_per_step", [0, 1, 3, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_thought_has_exactly_its_budget(budget: int, drafts_per_step: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, thinking_budget=budget)
    assert len(thought_length(params, OPEN, drafts_per_step, seed=budget)) == budget
    # What the prompt holds of the thought counts.
    begun = np.append(OPEN, [40, 41])
    assert len(thought_length(params, begun, drafts_per_step, seed=budget)) == max(budget - 2, 0)
    assert len(thought_length(params, CLOSED, drafts_per_step, seed=budget)) >= 30, "no thought, no limit"
    assert (
        len(thought_length(replace(params, thinking_budget=None), OPEN, drafts_per_step, seed=budget)) >= 30
    )


def test_a_thought_that_the_model_opens_has_the_budget_too() -> None:
    state = state_of(SamplingParams(thinking_budget=2), CLOSED)
    logits = random_logits(1, 5)
    for written, forced in ((40, False), (THINKING.start, False), (41, False), (THINKING.start, True)):
        state.accept([written])
        row = state.distributions(logits, ())[0]
        assert (row[THINKING.end] == 1) == forced, written
    state.accept([THINKING.end])
    assert 0 < state.distributions(logits, ())[0][THINKING.end] < 1
    state.accept([THINKING.start])
    assert state.distributions(logits, ())[0][THINKING.end] < 1, "the next thought has a budget of its own"


def test_without_thinking_tokens_there_is_no_budget() -> None:
    state = SamplingState(SamplingParams(thinking_budget=0), OPEN, VOCAB)
    logits = random_logits(1, 5)
    np.testing.assert_array_equal(
        state.distributions(logits, ()), [distribution(logits[0], SamplingParams())]
    )


def test_a_token_that_the_constraint_forbids_cannot_be_accepted() -> None:
    state = state_of(SamplingParams(constraint=Constraint("regex", "a")), CLOSED)
    with pytest.raises(EngineError, match="token 68 was emitted against"):
        state.accept([68])
