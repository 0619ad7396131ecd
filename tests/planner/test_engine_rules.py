"""The budget rules of released engines, against their boot lines as published."""

from __future__ import annotations

from fractions import Fraction

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.engine_rules import (
    GIB,
    SGLANG_PAGE_TOKENS,
    admission_delay,
    admits_utilisation,
    fraction_change_bytes,
    kv_budget_bytes,
    largest_utilisation,
    outside_pool_bytes,
    pool_holds,
    pool_of_ranks,
    pool_tokens,
    smallest_fraction,
    sub_pools,
    utilisation_bytes,
    window_pool_tokens,
)

SPARK_BYTES = int(121.69 * GIB)
TOKEN_BYTES = Fraction(6683, 4)  # 1,670.75
BEFORE = 121 * GIB
# What three nodes had left, back from the published "0.945 leaves 0.12 GB": 0.12 + 0.055 * 121 + 0.1 GiB.
AFTER = int(6.875 * GIB)


@pytest.mark.parametrize(("utilisation", "claim_gib"), [(0.84, 102.22), (0.87, 105.87)])
def test_m62_vllm_claims_its_utilisation_of_the_total(utilisation: float, claim_gib: float) -> None:
    assert utilisation_bytes(utilisation, SPARK_BYTES) / GIB == pytest.approx(claim_gib, abs=0.005)


def test_m62_refusal_and_the_largest_utilisation_that_starts() -> None:
    free = 102 * GIB
    assert not admits_utilisation(0.87, SPARK_BYTES, free)
    assert largest_utilisation(SPARK_BYTES, free) == 0.83
    assert admits_utilisation(0.83, SPARK_BYTES, free)
    assert not admits_utilisation(0.84, SPARK_BYTES, free)  # by a quarter of a GiB
    with pytest.raises(ConfigError, match="fraction is 87"):
        utilisation_bytes(87, SPARK_BYTES)


def test_m40_below_0_944_nothing_is_left_and_0_95_is_enough() -> None:
    assert kv_budget_bytes(0.943, BEFORE, AFTER) < 0
    assert kv_budget_bytes(0.945, BEFORE, AFTER) / GIB == pytest.approx(0.12, abs=0.002)
    window_bytes = int(0.34 * GIB)
    assert kv_budget_bytes(0.945, BEFORE, AFTER) < window_bytes
    assert kv_budget_bytes(0.95, BEFORE, AFTER) > window_bytes
    assert smallest_fraction(BEFORE, AFTER) == 0.945


@pytest.mark.parametrize("needed_bytes", [0, 1, GIB // 3, 5 * GIB])
def test_smallest_fraction_is_the_smallest(needed_bytes: int) -> None:
    fraction = smallest_fraction(BEFORE, AFTER, needed_bytes)
    assert kv_budget_bytes(fraction, BEFORE, AFTER) >= needed_bytes
    assert kv_budget_bytes(round(fraction - 0.001, 3), BEFORE, AFTER) < needed_bytes


def test_no_fraction_gives_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="a cache of"):
        smallest_fraction(BEFORE, AFTER, 7 * GIB)


def test_m39_a_smaller_fraction_takes_from_the_cache() -> None:
    assert fraction_change_bytes(SPARK_BYTES, 0.90, 0.80) / 1e9 == pytest.approx(-13, rel=0.03)


def test_m84_outside_the_static_pool() -> None:
    assert outside_pool_bytes(0.80, SPARK_BYTES) / GIB == pytest.approx(24, rel=0.03)


def test_m37_full_tokens_only_come_out_with_gib() -> None:
    logged = 16_735_744
    low, high = (
        pool_tokens(int(available * GIB), int(0.67 * GIB), TOKEN_BYTES) for available in (26.71, 26.72)
    )
    assert low <= logged <= high
    assert high < pool_tokens(int(26.73 * GIB), int(0.67 * GIB), TOKEN_BYTES)
    assert pool_tokens(int(26.72e9), int(0.67e9), TOKEN_BYTES) < 0.94 * logged
    assert logged % SGLANG_PAGE_TOKENS == 10_029_056 % SGLANG_PAGE_TOKENS == 0


def test_m38_the_pool_at_0_80() -> None:
    assert pool_tokens(int(15.61 * GIB), 0, TOKEN_BYTES) == pytest.approx(10_029_056, rel=0.001)
    assert pool_tokens(GIB, 2 * GIB, TOKEN_BYTES) == 0


def test_m42_sub_pools() -> None:
    pools = sub_pools(8_000_000)
    assert (pools.c4_entries, pools.c128_entries) == (2_000_000, 62_500)
    assert window_pool_tokens(64, 576, 8_704) == 45_568


def test_m47_the_poorest_rank_decides() -> None:
    assert pool_of_ranks([1_048_576, 600_000, 900_000]) == 600_000


@pytest.mark.parametrize(
    ("live", "holds"),
    [
        ([50_000] * 6, True),
        ([200_000] * 6, True),
        ([500_000] * 6, True),
        ([1_000_000] * 3, True),
        ([1_000_000] * 6, False),
    ],
)
def test_m55_live_tokens_share_the_pool(live: list[int], holds: bool) -> None:
    assert pool_holds(live, 3_225_280) is holds


def test_m96_admission_delay() -> None:
    published = {7: 0, 8: 2, 12: 2, 13: 3, 18: 3, 19: 4, 64: 4}
    assert {slots: admission_delay(slots) for slots in published} == published
    assert [admission_delay(64, setting) for setting in (-1, 0, 1, 2, 9)] == [0, 0, 0, 2, 9]
