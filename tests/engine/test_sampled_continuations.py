"""Sampled answers are distributed as the model says, with and without drafts: the whole core, judged by chi-square.

test_speculate.py enumerates the acceptance rules alone. Here everything between a request and its tokens takes part:
which drafts a request gets, when they are verified, which coins are spent on what, how the sampler shapes the rows.
Each of many seeds is a request of one prompt to a real `EngineCore`; `MemoRunner` replays the model's forwards.

The expectation is the product of the model's own conditional distributions, from one plain forward over each
continuation. Seeds are fixed, so a result is the same in every run. P_LEAST is the chance of an unlucky choice of seeds
in one test; planted biases of the kinds that speculation is known for must come out below it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.core import EngineCore
from deskfleet.engine.messages import RequestOutput
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.speculate import Verdict, pick, verify
from tests.engine.cores import adding, assert_nothing_held, core_over, load_runner
from tests.engine.engines import random_ids
from tests.engine.golden import measured
from tests.engine.memo import MemoRunner, Tokens, text_segment

P_LEAST = 1e-6
FEW, MANY = 4_000, 100_000
NUM_TOKENS = 4  # the first comes with the prompt, the others from steps with up to two drafts
PROMPT = random_ids(6, seed=1)
ALLOWED = (136, 271, 411)  # no prefix of these makes one of them rarer than 1 %
FOREIGN = 484  # drafted now and then, never allowed

MODES = {
    "off": "off",
    "greedy drafts": "k=5,draft=greedy,accept=token",
    "token": "k=5,accept=token",
    "block": "k=5,accept=block",
    # Of this drafter's pairs some are surer than this and some are not, depending on the first of the two.
    "block, capped": "k=5,accept=block,cap=conf:0.68",
    "block, colder drafts": "k=5,accept=block,temperature=0.5",
    "token, capped": "k=5,accept=token,cap=conf:0.68",
    "block, by cost": "k=5,accept=block,cap=cost:TABLE",
}
# Of the 96 rows that 32 requests may fill, 40 are cheap.
COST = '{"rows": [[1, 0.01], [40, 0.01], [96, 0.1]]}'


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "table.json"
    path.write_text(COST)
    return path


def sampling(seed: int) -> SamplingParams:
    """Three tokens are left: 100 is more than the model's logits differ by."""
    return SamplingParams(
        temperature=1.0,
        top_k=len(ALLOWED),
        seed=seed,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logit_bias=tuple((token_id, 100.0) for token_id in ALLOWED),
    )


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    loaded = load_runner(num_slots=32, max_model_len=32)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def memo(runner: ModelRunner) -> MemoRunner:
    return MemoRunner(runner, draftable=(*ALLOWED, FOREIGN), depth=NUM_TOKENS - 2)


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, memo: MemoRunner) -> dict[Tokens, float]:
    """Chance of every continuation: softmax of the model's logits over the allowed tokens, multiplied."""
    beginnings = list(itertools.product(ALLOWED, repeat=NUM_TOKENS - 1))
    segments = [text_segment(slot, (), PROMPT + tokens) for slot, tokens in enumerate(beginnings)]
    logits = runner.lead(segments, range(len(segments) * segments[0].num_tokens)).logits
    steps = torch.softmax(logits[:, list(ALLOWED)].double(), -1).unflatten(0, (len(segments), -1))
    chances = {}
    for tokens, rows in zip(beginnings, steps[:, len(PROMPT) - 1 :].tolist(), strict=True):
        before = math.prod(row[ALLOWED.index(token)] for row, token in zip(rows, tokens, strict=False))
        chances |= {(*tokens, last): before * share for last, share in zip(ALLOWED, rows[-1], strict=True)}
    assert math.isclose(sum(chances.values()), 1.0)
    return chances


def continuations(core: EngineCore, seeds: Sequence[int]) -> Counter[Tokens]:
    """How often each continuation came, one request for each seed, as many at once as the core runs."""
    found: Counter[Tokens] = Counter()
    under_way: dict[str, Tokens] = {}
    waiting = iter(seeds)
    while True:
        for seed in itertools.islice(waiting, core.scheduler.max_num_seqs - len(under_way)):
            assert core.add(adding(str(seed), PROMPT, sampling(seed))) is None
            under_way[str(seed)] = ()
        if not under_way:
            assert_nothing_held(core)
            return found
        for output in core.step():
            assert output.error is None
            under_way[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                found[under_way.pop(output.request_id)] += 1


def p_value(found: Counter[Tokens], expected: dict[Tokens, float]) -> float:
    """Chance of a larger chi-square. Cells of fewer than 5 expected samples are counted as one."""
    assert found.keys() <= expected.keys()
    total = found.total()
    rare = [tokens for tokens, chance in expected.items() if chance * total < 5]
    cells = [(found[t], chance * total) for t, chance in expected.items() if t not in rare]
    if rare:
        cells.append((sum(found[t] for t in rare), sum(expected[t] for t in rare) * total))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def judge(memo: MemoRunner, expected: dict[Tokens, float], speculation: str, num_seeds: int) -> float:
    """p-value of so many continuations, which must have come about in the way `speculation` says."""
    core = core_over(memo, speculation, prefix_cache=False)
    chance = p_value(continuations(core, range(num_seeds)), expected)
    stats = core.stats
    assert stats.num_generated_tokens == NUM_TOKENS * num_seeds
    if speculation == "off":
        assert stats.num_drafted == 0
    else:
        assert 0.2 * stats.num_verify_steps < stats.num_accepted < 0.6 * stats.num_drafted
    return chance


FAST = ("off", "block", "token")


@pytest.mark.parametrize(
    ("mode", "num_seeds"),
    [
        pytest.param(mode, num_seeds, marks=() if num_seeds == FEW and mode in FAST else pytest.mark.slow)
        for mode in MODES
        for num_seeds in (FEW, MANY)
    ],
)
def test_answers_are_distributed_as_the_model_says(
    memo, expected, table: Path, mode: str, num_seeds: int
) -> None:
    chance = judge(memo, expected, MODES[mode].replace("TABLE", str(table)), num_seeds)
    measured.append(f"{num_seeds} sampled continuations, {mode}: p = {chance:.3g}")
    assert chance > P_LEAST


@pytest.mark.parametrize(("mode", "possible"), [("block, capped", {1, 2}), ("block, by cost", {0, 1, 2})])
def test_the_cap_cuts_some_blocks_and_not_others(
    memo: MemoRunner, table: Path, mode: str, possible: set[int]
) -> None:
    """Else the mode would be one without a cap, or one of single drafts."""
    lengths: Counter[int] = Counter()
    core = core_over(memo, MODES[mode].replace("TABLE", str(table)), prefix_cache=False)
    step = core.step

    def watched() -> list[RequestOutput]:
        outputs = step()
        lengths.update(
            len(request.draft_token_ids)
            for request in core.scheduler.running
            if len(request.output_token_ids) == 1  # room for two
        )
        return outputs

    core.step = watched  # type: ignore[method-assign]
    continuations(core, range(200))
    assert lengths.keys() == possible
    assert min(lengths.values()) > 20


# --- planted biases -------------------------------------------------------------------------------------


def redrawn_after_a_cut(target: np.ndarray, drafts: Sequence[int], drafted: Any, **rest: Any) -> Verdict:
    """X1 of the specification: the whole block is verified, cut to one draft, and a fresh token follows."""
    verdict = verify(target, drafts, drafted, **rest)
    if verdict.num_accepted < 2:
        return verdict
    return Verdict(1, pick(target[1], rest["coins"].uniform("further", rest["place"], 1)))


def judged_at_another_temperature(
    target: np.ndarray, drafts: Sequence[int], drafted: np.ndarray | None, **rest: Any
) -> Verdict:
    """Drafts drawn at one temperature, verified as if at its double."""
    if drafted is not None:
        drafted = np.sqrt(drafted) / np.sqrt(drafted).sum(-1, keepdims=True)
    return verify(target, drafts, drafted, **rest)


def redrawn_from_the_target(target: np.ndarray, drafts: Sequence[int], drafted: Any, **rest: Any) -> Verdict:
    """After a refusal the target itself instead of what is left of it."""
    verdict = verify(target, drafts, drafted, **rest)
    row = target[verdict.num_accepted]
    return Verdict(verdict.num_accepted, pick(row, rest["coins"].uniform("further", rest["place"])))


def one_coin_for_all_steps(target: np.ndarray, drafts: Sequence[int], drafted: Any, **rest: Any) -> Verdict:
    """Every step of a request accepts and draws with the coins of its first."""
    return verify(target, drafts, drafted, **{**rest, "place": 0})


@pytest.mark.parametrize(
    ("biased", "num_seeds"),  # fewer than what the engine itself has to stand
    [
        (redrawn_after_a_cut, 2_000),
        (judged_at_another_temperature, 1_000),
        (redrawn_from_the_target, 1_000),
        (one_coin_for_all_steps, 1_000),
    ],
)
def test_planted_biases_are_found(memo, expected, monkeypatch, biased, num_seeds: int) -> None:
    monkeypatch.setattr("deskfleet.engine.core.verify", biased)
    chance = judge(memo, expected, MODES["block"], num_seeds)
    measured.append(f"{num_seeds} continuations, planted: {biased.__name__}: p = {chance:.3g}")
    assert chance < P_LEAST
