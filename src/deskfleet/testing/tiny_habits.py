"""What a tiny checkpoint tends to say next: a random walk through its vocabulary, built into its heads.

Purely random weights would repeat one token, and a rounding error would change which. So every token has a
few successors that the heads favour clearly; where there are several, the context decides. Text tokens form
two chains that only lead forward: one for thinking, which ends in `</think>`, and one for answers, which ends
in the end of sentence. So a greedy generation finishes by itself. Knows nothing of files.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NUM_ENTRIES = 8  # places where a chain can be entered
_NUM_BRANCHES = 4  # successors of a token that leaves the choice to the context
_BRANCH_EVERY = 8  # every so many text tokens, one leaves the choice
_MAX_SKIP = 9  # how far ahead a branch may lead
_THINKING_SHARE = 4  # one text token in so many belongs to thinking
_NUM_FIT_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """The token ids that steer the walk."""

    eos: int
    think: int
    end_think: int
    noise: int


@dataclass(frozen=True, slots=True)
class Habits:
    """Favoured successors: `pairs` int64 [N, 2] of (token, next token)."""

    pairs: NDArray[np.int64]

    def fit_head(
        self, embedding: NDArray[np.float32], noise: NDArray[np.float32], *, boost: float
    ) -> NDArray[np.float32]:
        """Return float32 [V, D]: `noise` moved so that each pair's logit for a unit-spread input is `boost`.

        `embedding` float32 [V, D] holds the inputs. One correction disturbs others that share a row, so the
        pairs are visited a few times.
        """
        inputs = embedding.astype(np.float64)
        inputs /= np.sqrt((inputs**2).mean(axis=1, keepdims=True))
        head = noise.astype(np.float64)
        for _ in range(_NUM_FIT_ROUNDS):
            for token, successor in self.pairs:
                x = inputs[token]
                head[successor] += (boost - float((head[successor] * x).sum())) / x.size * x
        return head.astype(np.float32)


def draw_habits(text_ids: Sequence[int], vocab_size: int, special: SpecialIds, *, seed: int) -> Habits:
    """Draw the walk over `text_ids`; every other id leads to a place in the answer chain.

    The noise token has no successor: at its positions the drafts' own head decides.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    order = [int(token) for token in np.asarray(text_ids)[_permutation(generator, len(text_ids))]]
    cut = len(order) // _THINKING_SHARE
    thinking, answer = order[:cut], order[cut:]
    pairs = _chain(generator, thinking, special.end_think) + _chain(generator, answer, special.eos)
    pairs += [(special.think, entry) for entry in _entries(thinking)]
    pairs += [(special.end_think, entry) for entry in _entries(answer)]
    linked = {token for token, _ in pairs} | {special.noise}
    for token in range(vocab_size):
        if token not in linked:
            pairs.append((token, answer[_permutation(generator, len(answer))[0]]))
    return Habits(np.array(pairs, dtype=np.int64))


def _chain(generator: np.random.Generator, chain: Sequence[int], end: int) -> list[tuple[int, int]]:
    """Link each token to the next, the last one to `end`, and every few also to places further ahead."""
    line = [*chain, end]
    pairs = list(itertools.pairwise(line))
    for at in range(0, len(chain), _BRANCH_EVERY):
        skips = _permutation(generator, _MAX_SKIP)[: _NUM_BRANCHES - 1] + 2
        pairs += [(chain[at], line[at + skip]) for skip in skips if at + skip < len(line)]
    return pairs


def _entries(chain: Sequence[int]) -> list[int]:
    """Places spread over the first three quarters, so that lengths differ by where the context enters."""
    step = max(len(chain) * 3 // 4 // _NUM_ENTRIES, 1)
    return list(chain[: step * _NUM_ENTRIES : step])


def _permutation(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Return a random order of 0..count-1 from raw bits, the same in every release of numpy."""
    return np.argsort(generator.bit_generator.random_raw(count), kind="stable")


__all__ = ["Habits", "SpecialIds", "draw_habits"]
