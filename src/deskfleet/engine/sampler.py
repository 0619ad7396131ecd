"""Logits to tokens. Owns the distribution a request asked for and its random numbers.

A draw depends on the request's seed and the token's place in the output alone, so a request repeats exactly
whatever else runs beside it, and after it was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deskfleet.endpoint import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token, with log probabilities when asked for."""

    token_id: int
    logprob: TokenLogprob | None


def sample(logits: np.ndarray, params: SamplingParams, *, seed: int, place: int) -> Sampled:
    """Pick from finite float32 logits [V]; `place` counts output tokens from 0."""
    if params.temperature == 0:
        token_id = int(logits.argmax())
    else:
        token_id = _draw(distribution(logits, params), seed, place)
    return Sampled(token_id, None if params.logprobs is None else logprobs(logits, token_id, params.logprobs))


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 probabilities [V] after temperature, then top_k, top_p and min_p, in that order.

    Each filter works on what the one before it left; equal probabilities are kept in order of token id.
    """
    scaled = logits.astype(np.float64) / max(params.temperature, 1e-5)
    weights = np.exp(scaled - scaled.max())
    if params.top_k > 0 and params.top_k < len(weights):
        weights[np.argsort(-weights, kind="stable")[params.top_k :]] = 0.0
    probabilities = weights / weights.sum()
    if params.top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.concatenate(([0.0], np.cumsum(probabilities[order])[:-1]))
        probabilities[order[before >= params.top_p]] = 0.0  # the token that crosses top_p stays
    if params.min_p > 0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    normalised: np.ndarray = probabilities / probabilities.sum()
    return normalised


def logprobs(logits: np.ndarray, token_id: int, count: int) -> TokenLogprob:
    """Natural log probabilities of the unmodified distribution: the chosen token and the `count` likeliest."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    normalised = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-wide, kind="stable")[
        :count
    ]  # by logit: what rounds to equal here is ranked as greedy does
    return TokenLogprob(
        token_id, float(normalised[token_id]), tuple((int(i), float(normalised[i])) for i in best)
    )


def _draw(probabilities: np.ndarray, seed: int, place: int) -> int:
    key = np.array(
        [seed & (2**64 - 1), place], dtype=np.uint64
    )  # a list with a large seed would become floats
    uniform = np.random.Generator(np.random.Philox(key=key)).random()
    cumulative = np.cumsum(probabilities)
    chosen = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding of the last sum may point one past a token of probability zero at the end.
    return chosen if chosen < len(probabilities) else int(np.flatnonzero(probabilities)[-1])


__all__ = ["Sampled", "distribution", "logprobs", "sample"]
