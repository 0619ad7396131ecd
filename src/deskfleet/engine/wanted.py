"""What is wanted of a step's rows: logits, or the token that is chosen from them. Owns the choice on the host.

Who computes the rows chooses where it has their logits (backends.py), so that they need not travel; this is the oracle.
A choice is of a row alone: what depends on more than its logits (sampler.is_stateless) is told the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.sampler import distribution
from deskfleet.engine.speculate import draw


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of row `row` of a step instead of its logits: of `sampling`, which has no state, drawn by `coin` in
    [0, 1); at temperature 0 the likeliest, of equals the lowest id."""

    row: int
    sampling: SamplingParams
    coin: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the wanted rows, for as long as nothing else is run: logits float32 [R, V] of some, of C others the
    token int64 [C] and how many of its logits are not finite, int64 [C]; where any is not, some token."""

    logits: Tensor
    token_ids: np.ndarray
    num_not_finite: np.ndarray


def outcome_of(logits: Tensor, choices: Sequence[Choice]) -> Outcome:
    """From logits float32 [R + C, V] on the host, of which the last are those of `choices`."""
    first = len(logits) - len(choices)
    rows = logits[first:].numpy()
    bad = np.array([np.count_nonzero(~np.isfinite(row)) for row in rows], np.int64)
    chosen = [0 if n else choose(row, choice) for row, n, choice in zip(rows, bad, choices, strict=True)]
    return Outcome(logits[:first], np.array(chosen, np.int64), bad)


def choose(logits: np.ndarray, choice: Choice) -> int:
    """The token of finite logits float32 [V], as `speculate.verify` finds it without drafts."""
    if choice.sampling.temperature == 0:
        return int(logits.argmax())
    return draw(distribution(logits, choice.sampling), lambda: choice.coin)


__all__ = ["Choice", "Outcome", "choose", "outcome_of"]
