"""Tokens that are chosen where the logits are, against those that the host chooses from the same logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.cuda.sampling import Sampling, draw_of, num_searches
from deskfleet.engine.sampler import distribution
from deskfleet.engine.wanted import Choice, choose, outcome_of
from tests.gpu.conftest import HAS_GPU

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]

VOCAB = 129280 if HAS_GPU else 1100  # the last program's in part
SAMPLINGS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in (
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 0.95, 0.0),
        (1.3, 40, 1.0, 0.0),
        (0.8, 300, 0.9, 0.02),
        (1.0, 0, 0.999, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.0, VOCAB - 1, 0.3, 0.0),
        (1.0, 1, 1.0, 0.0),
        (0.7, VOCAB, 0.01, 0.0),
        (1e-6, 0, 0.9, 0.0),
        (0.0, 0, 1.0, 0.0),
    )
]


def chosen(logits: np.ndarray, choices: Sequence[Choice], device: torch.device) -> np.ndarray:
    """int64 [R, 2]: the token of each row, -1 where the host has to draw, and how many logits are not finite."""
    # Rows of a wider matrix, as where ranks' logits lie beside each other.
    padded = torch.full((len(logits), logits.shape[1] + 36), 1e30, device=device)
    rows = padded[:, : logits.shape[1]]
    rows.copy_(torch.from_numpy(logits))
    sampling = Sampling(len(logits), logits.shape[1], device)
    draws = [draw_of(choice.sampling, choice.coin) for choice in choices]
    sampling.draws.copy_(torch.tensor(draws, dtype=torch.float64))
    found = []
    most = max(num_searches(choice.sampling, logits.shape[1]) for choice in choices)
    for _ in range(2):  # what one run leaves is not the next one's
        sampling.best_of(rows)
        if any(c.sampling.temperature > 0 for c in choices):
            sampling.draw(rows, num_searches=most)
        found.append(sampling.chosen.cpu().numpy().astype(np.int64))
    assert (found[0] == found[1]).all()
    return found[0]


@pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}-{s.min_p}"
)
def test_a_draw_is_the_hosts(sampling: SamplingParams, device: torch.device) -> None:
    """Flat rows and peaked ones, every coin: nothing is left to the host where the logits are anyhow."""
    rng = np.random.default_rng(7)
    spread = np.repeat([0.5, 4.0], 20 if HAS_GPU else 1)[:, None]
    logits = (rng.normal(size=(len(spread), VOCAB)) * spread + 9).astype(np.float32)
    choices = [Choice(row, sampling, float(rng.random())) for row in range(len(logits))]
    found = chosen(logits, choices, device)
    assert found[:, 0].tolist() == [choose(row, choice) for row, choice in zip(logits, choices, strict=True)]
    assert not found[:, 1].any()


def test_what_the_last_places_decide_is_left_to_the_host(device: torch.device) -> None:
    """Sums that are just top_p, chances that are just min_p, coins beside the border of two tokens, logits near 0: the
    host's token or none. A filter that parts equal logits keeps the lower tokens."""
    equal = np.full(VOCAB, -40.0, np.float32)
    equal[[3, 700, 1060, 1099]] = 5.0
    steps = np.repeat(np.linspace(-3, 3, VOCAB // 5).astype(np.float32), 5)
    near_0 = np.full(VOCAB, -9.0, np.float32)
    near_0[:4] = np.array([1, 1e-30, 2e-30, 3e-30])
    ordinary = np.random.default_rng(3).normal(size=VOCAB).astype(np.float32)
    cases: list[tuple[np.ndarray, SamplingParams, float]] = []
    for coin in (0.0, 0.3, 0.5):
        cases += [(equal, SamplingParams(top_k=top_k), coin) for top_k in (1, 2, 4, 5)]
        cases += [(equal, SamplingParams(top_p=top_p), coin) for top_p in (0.1, 0.25, 0.5, 0.6)]
        cases += [
            (steps, SamplingParams(top_k=7), coin),
            (steps, SamplingParams(top_p=0.7, temperature=0.5), coin),
        ]
        cases += [(near_0, SamplingParams(top_k=2), coin), (ordinary, SamplingParams(min_p=1.0), coin)]
    share = distribution(ordinary, SamplingParams())
    borders = np.cumsum(share)
    cases += [(ordinary, SamplingParams(), 1 - 2**-53)]
    cases += [(ordinary, SamplingParams(), float(borders[n] / borders[-1])) for n in (0, 1023, 1024, 1098)]
    ranked = np.sort(share)[::-1]
    cases += [(ordinary, SamplingParams(top_p=float(np.cumsum(ranked)[n])), 0.4) for n in (0, 100)]
    cases += [(ordinary, SamplingParams(min_p=float(ranked[n] / ranked[0])), 0.4) for n in (1, 100)]
    logits = np.stack([row for row, _, _ in cases])
    choices = [Choice(n, sampling, coin) for n, (_, sampling, coin) in enumerate(cases)]
    found = chosen(logits, choices, device)[:, 0]
    expected = np.array([choose(row, choice) for row, choice in zip(logits, choices, strict=True)])
    assert ((found == expected) | (found == -1)).all(), np.flatnonzero((found != expected) & (found != -1))
    of_equal = [(n, sampling, coin) for n, (row, sampling, coin) in enumerate(cases) if row is equal]
    just = [n for n, s, _ in of_equal if s.top_p in (0.25, 0.5)]
    assert (found[just] == -1).all()
    parted = [n for n, s, coin in of_equal if coin == 0.3 and (s.top_k > 1 or s.top_p == 0.6)]
    assert (found[parted] == expected[parted]).all()
    whole = [n for n, s, coin in of_equal if s.top_k == 4 and coin == 0.3]
    assert (found[whole] == 700).all()


def test_the_likeliest_of_equals_is_the_lowest(device: torch.device) -> None:
    """Within a program and across two; the other number counts what is not finite, of rows that are not to be used."""
    logits = np.random.default_rng(1).normal(size=(5, VOCAB)).astype(np.float32)
    logits[0, [VOCAB - 1, 1030]] = 9
    logits[1, [1024, 1023]] = 9
    logits[2, VOCAB - 1] = 9
    logits[3] = -3
    logits[4, [0, 1024, VOCAB - 1]] = [np.nan, np.inf, -np.inf]
    choices = [Choice(row, SamplingParams(temperature=0)) for row in range(len(logits))]
    found = chosen(logits, choices, device)
    expected = outcome_of(torch.from_numpy(logits), choices)
    assert expected.token_ids[:4].tolist() == [1030, 1023, VOCAB - 1, 0]
    assert found[:4, 0].tolist() == expected.token_ids[:4].tolist()
    assert found[:, 1].tolist() == expected.num_not_finite.tolist() == [0, 0, 0, 0, 3]
