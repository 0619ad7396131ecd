"""The rules by which released engines size their own cache: vLLM's utilisation, SGLang's static fraction.

Owns the arithmetic that an engine does at start, so that its boot line can be predicted. Knows no model and no layout.
Where an engine prints "GB" it counts GiB: only so does SGLang's pool come out (M-37).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from deskfleet.errors import ConfigError
from deskfleet.planner.checks import above_zero, at_least

GIB = 1 << 30

SGLANG_RESERVE_BYTES = GIB // 10
"""What SGLang takes off its budget; "0.1 GB" in its terms."""

SGLANG_PAGE_TOKENS = 256
"""Both published pools, 16,735,744 and 10,029,056 tokens, are multiples of it."""

FRACTION_STEP = Fraction(1, 1000)
"""The finest fraction that published recipes distinguish: 0.944 leaves nothing, 0.945 leaves 0.12 GB."""


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise ConfigError(f"memory fraction is {fraction}", hint="give a number between 0 and 1, e.g. 0.85")


def utilisation_bytes(utilisation: float, total_bytes: int) -> int:
    """Bytes that vLLM claims at start: utilisation * total. Published (M-62): 0.87 of 121.69 GiB is 105.87.

    Raises ConfigError.
    """
    _check_fraction(utilisation)
    return int(utilisation * total_bytes)


def admits_utilisation(utilisation: float, total_bytes: int, free_bytes: int) -> bool:
    """Whether vLLM starts: its claim must be free at that moment, whatever of it would be used. Raises ConfigError."""
    return utilisation_bytes(utilisation, total_bytes) <= free_bytes


def largest_utilisation(total_bytes: int, free_bytes: int) -> float:
    """The largest utilisation in hundredths that vLLM starts with. Raises ConfigError when there is none."""
    above_zero(total_bytes=total_bytes)
    hundredths = min(99, 100 * free_bytes // total_bytes)
    if hundredths < 1:
        raise ConfigError(
            f"{free_bytes} bytes free of {total_bytes}", hint="free memory before the engine is started"
        )
    return hundredths / 100


def kv_budget_bytes(fraction: float, before_bytes: int, after_bytes: int) -> int:
    """Bytes that SGLang gives its cache: after - (1 - f) * before - 0.1 GiB; negative when it would not start.

    `before_bytes` is available before the weights are loaded, `after_bytes` after. So a smaller fraction frees nothing
    for others that they did not have: it only takes from the cache (M-40). Raises ConfigError.
    """
    return after_bytes - outside_pool_bytes(fraction, before_bytes) - SGLANG_RESERVE_BYTES


def outside_pool_bytes(fraction: float, before_bytes: int) -> int:
    """Bytes that SGLang leaves to everything that is neither weights nor cache: (1 - f) * before.

    Published (M-84): about 24 GiB at 0.80. Raises ConfigError.
    """
    _check_fraction(fraction)
    return math.ceil((1 - Fraction(str(fraction))) * before_bytes)


def smallest_fraction(before_bytes: int, after_bytes: int, needed_bytes: int = 0) -> float:
    """The smallest fraction, in thousandths, with which SGLang's cache gets `needed_bytes`.

    Published (M-40): below about 0.944 there is nothing left on three nodes. Raises ConfigError when no fraction does.
    """
    at_least(1, before_bytes=before_bytes)
    outside = Fraction(after_bytes - SGLANG_RESERVE_BYTES - needed_bytes, before_bytes)
    steps = max(1, math.ceil((1 - outside) / FRACTION_STEP))
    if steps * FRACTION_STEP >= 1:
        raise ConfigError(
            f"a cache of {needed_bytes} bytes, of {after_bytes} that are left after loading",
            hint="ask for fewer tokens, or more nodes",
        )
    return float(steps * FRACTION_STEP)


def fraction_change_bytes(before_bytes: int, old: float, new: float) -> int:
    """Bytes that SGLang's cache gains, negative when it loses: (new - old) * before.

    Published (M-39): from 0.90 to 0.80 it loses about 13 GB. Raises ConfigError.
    """
    return outside_pool_bytes(old, before_bytes) - outside_pool_bytes(new, before_bytes)


def pool_tokens(
    budget_bytes: int, window_bytes: int, token_bytes: Fraction, *, page_tokens: int = SGLANG_PAGE_TOKENS
) -> int:
    """Tokens of SGLang's pool: (budget - window pool) / bytes of a token, in whole pages, 0 when nothing is left.

    Published (M-37): 16,735,744 with 26.71 to 26.72 GiB, 0.67 GiB of them for the window, and 1,670.75 B. Raises
    ConfigError.
    """
    above_zero(token_bytes=float(token_bytes))
    at_least(1, page_tokens=page_tokens)
    return max(0, int((budget_bytes - window_bytes) / token_bytes)) // page_tokens * page_tokens


@dataclass(frozen=True, slots=True)
class SubPools:
    """Entries of the pools that SGLang derives from the full one, by compression ratio 4 and 128."""

    c4_entries: int
    c128_entries: int


def sub_pools(full_tokens: int) -> SubPools:
    """One entry for every 4 and every 128 tokens. Published (M-42): 8,000,000 give 2,000,000 and 62,500."""
    at_least(0, full_tokens=full_tokens)
    return SubPools(full_tokens // 4, full_tokens // 128)


def window_pool_tokens(num_tails: int, tail_tokens: int, running_tokens: int) -> int:
    """Tokens of the sliding-window pool: what kept prefixes end with, and what running requests use.

    Published (M-42): 64 tails of 576 and 8,704 are 45,568. Raises ConfigError.
    """
    at_least(0, num_tails=num_tails, tail_tokens=tail_tokens, running_tokens=running_tokens)
    return num_tails * tail_tokens + running_tokens


def pool_of_ranks(tokens: Iterable[int]) -> int:
    """The pool that all ranks get: that of the poorest one. Raises ConfigError without ranks."""
    smallest = min(tokens, default=None)
    if smallest is None:
        raise ConfigError("no ranks to share a pool", hint="give the tokens of every rank")
    return smallest


def pool_holds(live_tokens: Iterable[int], pool: int) -> bool:
    """Whether requests of these live lengths, prompt and output, run together: their sum is at most the pool (M-55)."""
    return sum(live_tokens) <= pool


def admission_delay(num_slots: int, setting: int | None = None) -> int:
    """The admission delay that a recipe's scheduler sets itself, in a unit its publisher does not name; 0 is off.

    min(4, max(2, (n + 5) // 6)) for `num_slots` n of 8 or more, off below (M-96). A `setting` wins, and 1 or less turns
    it off. Raises ConfigError.
    """
    at_least(1, num_slots=num_slots)
    if setting is not None:
        return setting if setting > 1 else 0
    return min(4, max(2, (num_slots + 5) // 6)) if num_slots >= 8 else 0


__all__ = [
    "SGLANG_PAGE_TOKENS",
    "SGLANG_RESERVE_BYTES",
    "SubPools",
    "admission_delay",
    "admits_utilisation",
    "fraction_change_bytes",
    "kv_budget_bytes",
    "largest_utilisation",
    "outside_pool_bytes",
    "pool_holds",
    "pool_of_ranks",
    "pool_tokens",
    "smallest_fraction",
    "sub_pools",
    "utilisation_bytes",
    "window_pool_tokens",
]
