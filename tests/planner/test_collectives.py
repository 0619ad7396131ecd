"""Capture sizes, NCCL's buffers and all-reduces, against published figures."""

from __future__ import annotations

import pytest

from deskfleet.errors import ConfigError
from deskfleet.planner.cluster import Link
from deskfleet.planner.collectives import (
    COLLECTIVES_BESIDE_ALL_REDUCES,
    DEFAULT_BUFFERS,
    MIB,
    ONE_SHOT,
    RING,
    SMALL_BUFFERS,
    TWO_SHOT,
    all_reduce_bytes,
    all_reduce_s,
    collectives_per_step,
    fastest_all_reduce,
    nccl_buffer_bytes,
    num_connections,
)
from deskfleet.planner.graphs import capture_sizes, max_capture_size

NVLINK = Link("NVLink", bytes_per_s=450e9, latency_s=5e-6)


def test_s1_47_exact_capture_sizes() -> None:
    assert capture_sizes(8, 5) == (5, 6, 10, 12, 15, 18, 20, 24, 25, 30, 35, 36, 40, 42, 48)


def test_capture_sizes_without_drafts_and_with_one() -> None:
    assert capture_sizes(4, 0) == (1, 2, 3, 4)
    assert capture_sizes(3, 1) == (1, 2, 3, 4, 6)


@pytest.mark.parametrize(("max_num_seqs", "num_drafts", "published"), [(6, 3, 24), (6, 5, 36)])
def test_s4_17_largest_capture(max_num_seqs: int, num_drafts: int, published: int) -> None:
    assert max_capture_size(max_num_seqs, num_drafts) == published


def test_m70_buffers_as_nccl_comes() -> None:
    assert num_connections(2, 64, 2) == 512
    assert round(DEFAULT_BUFFERS.connection_bytes / MIB, 2) == 9.19
    assert nccl_buffer_bytes(512) == 4704 * MIB
    assert nccl_buffer_bytes(512) == pytest.approx(4705 * MIB, rel=0.001)
    assert nccl_buffer_bytes(512) / 1e9 == pytest.approx(4.93, abs=0.005)


def test_m71_small_buffers_are_a_lower_bound_of_what_was_measured() -> None:
    assert SMALL_BUFFERS.connection_bytes == 1.75 * MIB
    computed = nccl_buffer_bytes(num_connections(2, 8, 2), SMALL_BUFFERS)
    assert computed == 112 * MIB
    assert 0.75 * 139 * MIB < computed < 139 * MIB


def test_m72_the_reduction_is_of_the_order_that_eight_nodes_saw() -> None:
    ours = nccl_buffer_bytes(num_connections(2, 64, 2)) / nccl_buffer_bytes(
        num_connections(2, 8, 2), SMALL_BUFFERS
    )
    assert 11.61 / 0.425 < ours < 2 * 11.61 / 0.425


@pytest.mark.parametrize(
    ("rows", "hidden_size", "published"),
    [(6, 5120, 61_440), (96, 5120, 983_040), (6, 4096, 49_152), (48, 4096, 393_216)],
)
def test_m68_message_of_an_all_reduce(rows: int, hidden_size: int, published: int) -> None:
    assert all_reduce_bytes(rows, hidden_size) == published


def test_m69_collectives_of_a_step() -> None:
    assert collectives_per_step(40) == 80
    assert collectives_per_step(40, num_others=COLLECTIVES_BESIDE_ALL_REDUCES) == 104


@pytest.mark.parametrize(
    ("rows", "best_ms", "ring_ms"),
    [(1, 0.41, 1.1), (6, 0.43, 1.1), (16, 0.49, 1.2), (64, 0.75, 1.3), (96, 0.90, 1.5), (384, 1.7, 2.5)],
)
def test_all_reduces_of_a_step_on_four_h200(rows: int, best_ms: float, ring_ms: float) -> None:
    message_bytes = all_reduce_bytes(rows, 5120)
    best = all_reduce_s(message_bytes, 4, NVLINK, fastest_all_reduce(message_bytes, 4, NVLINK))
    assert 80_000 * best == pytest.approx(best_ms, rel=0.03)
    assert 80_000 * all_reduce_s(message_bytes, 4, NVLINK, RING) == pytest.approx(ring_ms, abs=0.09)


def test_small_messages_go_in_one_shot_and_large_ones_in_two() -> None:
    assert fastest_all_reduce(10_240, 4, NVLINK) is ONE_SHOT
    assert fastest_all_reduce(3_932_160, 4, NVLINK) is TWO_SHOT


def test_one_rank_exchanges_nothing_and_a_link_needs_bandwidth() -> None:
    assert all_reduce_s(1 << 20, 1, NVLINK, RING) == 0
    with pytest.raises(ConfigError, match="bytes_per_s"):
        all_reduce_s(1, 2, Link("none", 0, 1e-6), RING)
