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
from typing import Any

import numpy as np
import pytest
import torch

from deskfleet.endpoint import SamplingParams
from deskfleet.engine import core as core_module
from deskfleet.engine.core import EngineCore
from deskfleet.engine.runner import ModelRunner
from deskfleet.engine.speculate import Acceptance, Coins, Verdict, draft_distribution, pick, verify
from tests.engine.cores import adding, assert_nothing_held, core_over, load_runner
from tests.engine.engines import random_ids
from tests.engine.golden import measured
from tests.engine.memo import MemoRunner, Tokens, _segment

P_LEAST = 1e-6
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
}


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
    chances = {}
    for tokens in itertools.product(ALLOWED, repeat=NUM_TOKENS):
        rows = range(len(PROMPT) - 1, len(PROMPT) + NUM_TOKENS - 1)
        logits = runner.lead([_segment(0, (), PROMPT + tokens)], rows)[:, list(ALLOWED)].double()
        steps = torch.softmax(logits, -1).tolist()
        chances[tokens] = math.prod(
            step[ALLOWED.index(token)] for step, token in zip(steps, tokens, strict=True)
        )
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
