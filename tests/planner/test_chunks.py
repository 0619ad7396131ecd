"""The indexer's transient and the chunks that keep it within a budget: published figures and hand arithmetic."""

from __future__ import annotations

import pytest

from deskfleet.errors import ConfigError, DoesNotFit
from deskfleet.planner.chunks import (
    PAIR_BYTES,
    PUBLISHED_PAIR_LIMIT,
    UPSTREAM_PAIR_BYTES,
    ChunkRule,
    ChunkRun,
    bounded_indexer_bytes,
    chunk_schedule,
    indexer_bytes,
    pair_limit,
    smallest_image_chunk,
)

RULE = ChunkRule(pair_limit=PUBLISHED_PAIR_LIMIT)
TABLE = ChunkRule(pair_limit=PUBLISHED_PAIR_LIMIT, steps="doublings")


@pytest.mark.parametrize(("chunk", "published_gb"), [(1024, 15.03), (4096, 60.13)])
def test_m74_unbounded_peak_at_one_million(chunk: int, published_gb: float) -> None:
    assert indexer_bytes(chunk, 1_048_576) / 1e9 == pytest.approx(published_gb, abs=0.005)


def test_m75_measured_peaks_lie_around_the_published_coefficient() -> None:
    measured = [2.97e9 / (2048 * 100_000), 2.6e9 / (1024 * 208_000)]
    assert min(measured) < PAIR_BYTES < max(measured)
    assert PAIR_BYTES == 14


def test_m78_a_smaller_copy_budget_takes_the_coefficient_to_11() -> None:
    capped = indexer_bytes(2048, 97_656, copy_cap_bytes=256 << 20)
    assert round(capped / (2048 * 97_656)) == 11
    assert indexer_bytes(16, 1000, copy_cap_bytes=256 << 20) == indexer_bytes(16, 1000)


def test_m80_the_other_formula_is_that_of_a_ratio_of_four() -> None:
    theirs = indexer_bytes(2048, 262_144 // 4, pair_bytes=4)
    assert theirs == 536_870_912
    assert indexer_bytes(2048, 262_144) == 14 * theirs


def test_m81_upstream_form() -> None:
    assert indexer_bytes(16_384, 1_048_576, pair_bytes=UPSTREAM_PAIR_BYTES) == 96 << 30


def test_bounded_indexer_keeps_its_budget_and_never_needs_more_than_the_unbounded_one() -> None:
    chosen_bytes = 4096 * 512 * 4
    assert bounded_indexer_bytes(4096, 1_048_576, 1 << 30) == (1 << 30) + chosen_bytes
    sizes = [bounded_indexer_bytes(1280, num_keys, 2 << 30) for num_keys in range(1000, 1_048_576, 997)]
    assert sizes == sorted(sizes)  # a longer prompt never needs less
    assert bounded_indexer_bytes(4096, 1_048_576, 2 << 30) <= (2 << 30) + chosen_bytes
    assert bounded_indexer_bytes(64, 1000, 1 << 30) == indexer_bytes(64, 1000) + 64 * 512 * 4
    assert bounded_indexer_bytes(2, 1_000_000, 1) == 14_000_000 + 2 * 512 * 4  # one row is the least


@pytest.mark.parametrize(("last", "chunk"), [(97_656, 2048), (195_312, 1024), (390_625, 512), (781_250, 256)])
def test_m77_thresholds_of_the_published_table(last: int, chunk: int) -> None:
    assert TABLE.chunk_for(last) == RULE.chunk_for(last) == chunk
    assert TABLE.chunk_for(last + 1) == chunk // 2 * (chunk > 256)


def test_m77_multiples_fill_the_limit_between_the_steps_of_the_table() -> None:
    assert (RULE.chunk_for(133_000), TABLE.chunk_for(133_000)) == (1280, 1024)
    assert indexer_bytes(1280, 133_000) / 1e9 == pytest.approx(2.38, abs=0.005)
    assert RULE.chunk_for(781_251) == 0  # where the published formula would go on with 256


def test_m76_refuses_what_the_guard_stopped() -> None:
    assert RULE.chunk_for(133_000) < 2048
    assert RULE.chunk_for(256_000) < 1024


def test_m73_images_raise_the_smallest_chunk_and_shorten_the_context() -> None:
    smallest = smallest_image_chunk(1024)
    assert smallest == 1025
    with_images = ChunkRule(pair_limit=PUBLISHED_PAIR_LIMIT, min_chunk=smallest)
    assert with_images.sizes == (1280, 1536, 1792, 2048)
    assert with_images.largest_context == 156_250
    assert RULE.largest_context == 781_250
    with pytest.raises(ConfigError, match="from 1025 to 1024"):
        ChunkRule(pair_limit=1, max_chunk=1024, min_chunk=smallest)


def test_schedule_by_hand() -> None:
    # Of 524,288 pairs, 512 * 512 and 512 * 1,024 stay within, 512 * 1,536 do not, so 256 * 1,280 is next. The 320 left
    # are less than a legal chunk of 512, and 320 * 1,600 stay within.
    rule = ChunkRule(pair_limit=512 * 1024, max_chunk=512)
    assert chunk_schedule(1600, rule) == (ChunkRun(0, 512, 2), ChunkRun(1024, 256, 1), ChunkRun(1280, 320, 1))


@pytest.mark.parametrize("rule", [RULE, TABLE])
@pytest.mark.parametrize("num_tokens", [1, 255, 2048, 98_000, 400_001, 781_250])
def test_schedule_tiles_the_prompt_within_the_limit(rule: ChunkRule, num_tokens: int) -> None:
    end = 0
    for run in chunk_schedule(num_tokens, rule):
        assert run.from_prefix == end
        end += run.chunk_tokens * run.num_chunks
        assert run.chunk_tokens * end <= rule.pair_limit
    assert end == num_tokens


def test_multiples_take_fewer_chunks_than_the_table() -> None:
    chunks = [sum(run.num_chunks for run in chunk_schedule(400_000, rule)) for rule in (RULE, TABLE)]
    assert chunks[0] < chunks[1]


def test_schedule_refuses_a_prompt_beyond_the_limit_with_its_arithmetic() -> None:
    with pytest.raises(DoesNotFit, match=r"200,015,872 pairs of 200,000,000") as error:
        chunk_schedule(1_000_000, RULE)
    assert "781,250" in str(error.value)


def test_pairs_of_a_budget() -> None:
    assert pair_limit(2_800_000_000) == PUBLISHED_PAIR_LIMIT
