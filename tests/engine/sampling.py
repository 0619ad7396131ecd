"""Plain sampling from logits, as the engine does it for a request without drafts: for tests that need an
expectation."""

from __future__ import annotations

import numpy as np

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.sampler import SamplingState
from deskfleet.engine.speculate import Coins, pick


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 probabilities [V] of float32 logits [V]."""
    row: np.ndarray = SamplingState(params, np.zeros(0, np.int64), len(logits)).distributions(
        logits[None], ()
    )[0]
    return row


def draw(probabilities: np.ndarray, *, seed: int, place: int) -> int:
    """The token that a request of that seed gets as its `place`-th."""
    return pick(probabilities, Coins(seed).uniform("further", place))


def sample(logits: np.ndarray, params: SamplingParams, *, seed: int, place: int) -> int:
    return draw(distribution(logits, params), seed=seed, place=place)
