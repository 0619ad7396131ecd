"""The native engine's budget against hand arithmetic; that ranks really hold it is tests/engine/test_memory.py."""

from __future__ import annotations

import os
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

import deskfleet_ops
from deskfleet.cli.loading import memory_table
from deskfleet.engine.blocks import BlockPool
from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet.model.layout import Layout, ShardPlan
from deskfleet.model.limits import RunnerLimits, resolve_limits
from deskfleet.model.memory import ProcessMemory, RankMemory, TensorLine
from deskfleet.model.published import published_config_dict
from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.native import LineCheck, RankCheck, check_rank, native_lines

TINY = ModelConfig.from_file(Path(__file__).parents[1] / "golden" / "v41-tiny" / "model" / "config.json")
PUBLISHED = ModelConfig.from_dict(published_config_dict())
LIMITS = RunnerLimits(
    max_num_seqs=3, max_model_len=1000, block_size=16, num_blocks=99, num_window_blocks=40, dcp_size=1
)


def bytes_of(lines: tuple[BudgetLine, ...], name: str) -> int:
    """Bytes of the line of that name."""
    return next(line.num_bytes for line in lines if line.name == name)


def lines_of(
    config: ModelConfig,
    tp_size: int,
    rank: int = 0,
    limits: RunnerLimits = LIMITS,
    *,
    with_drafts: bool = False,
) -> tuple[BudgetLine, ...]:
    return native_lines(ShardPlan(config, Layout(tp_size)), limits, rank, with_drafts=with_drafts)


def test_the_published_experts_by_hand() -> None:
    """40 layers of 384 experts, or 128 on the first of three ranks: three matrices of FP4 with a scale for 32."""
    expert_bytes = 3 * 5120 * 2304 * 17 // 32
    assert bytes_of(lines_of(PUBLISHED, 1), TensorLine.routed_experts) == 40 * 384 * expert_bytes
    assert bytes_of(lines_of(PUBLISHED, 3), TensorLine.routed_experts) == 40 * 128 * expert_bytes


def test_the_tiny_pools_by_hand() -> None:
    """Sources of ratio 2, 2 and 1; entries of 64 take 32 + 4 bytes, index keys of 32 take 16 + 1, window rows 66."""
    lines = lines_of(TINY, 1, with_drafts=True)
    assert bytes_of(lines, TensorLine.entries) == 100 * (8 + 8 + 16) * 36
    assert bytes_of(lines, TensorLine.index_keys) == 100 * (8 + 8 + 16) * 17
    assert bytes_of(lines, TensorLine.windows) == 41 * 16 * (10 + 3) * 66
    assert bytes_of(lines, TensorLine.open_groups) == 2 * 3 * 2 * (2 + 5) * 64 * 4
    assert bytes_of(lines, TensorLine.block_tables) == 2 * 3 * 63 * 4
    halved = lines_of(TINY, 2, limits=replace(LIMITS, dcp_size=2))
    assert bytes_of(halved, TensorLine.entries) == 50 * 32 * 36


@pytest.mark.parametrize(("size", "dcp_size"), [(2, 1), (4, 1), (4, 2)])
def test_parts_of_the_shared_memory_are_its_file(size: int, dcp_size: int) -> None:
    """Slots of all ranks for everyone and, where KV is divided, for one division; the file has room for both."""
    parts = [
        bytes_of(lines_of(TINY, size, rank, replace(LIMITS, dcp_size=dcp_size)), "runtime.shared_memory")
        for rank in range(size)
    ]
    file = os.memfd_create("test")
    group = deskfleet_ops.library().df_group_open(file, 0, size, size, False)
    file_bytes = os.fstat(file).st_size
    deskfleet_ops.library().df_group_close(group)
    os.close(file)
    assert sum(parts) * (2 // (1 + (dcp_size > 1))) == pytest.approx(
        file_bytes, rel=0.02
    )  # the rest are counters


@pytest.mark.parametrize("num_blocks", [20_000, 65_536, 90_000])
def test_a_pool_of_blocks_takes_what_python_says(num_blocks: int) -> None:
    tracemalloc.start()
    pool = BlockPool(num_blocks)
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.num_free == num_blocks
    limits = replace(LIMITS, num_blocks=num_blocks, num_window_blocks=0)
    assert bytes_of(lines_of(TINY, 1, limits=limits), "runtime.blocks") == pytest.approx(
        taken_bytes, rel=0.05
    )


def test_more_room_never_takes_less() -> None:
    plan, before = ShardPlan(PUBLISHED, Layout(4)), 0
    for max_model_len in (1, 17, 300, 4096, 65536, 1 << 20):
        limits = resolve_limits(
            PUBLISHED,
            max_num_seqs=4,
            max_model_len=max_model_len,
            block_size=16,
            kv_cache_tokens=2 * max_model_len + 16,
            num_window_tails=8,
            with_drafts=True,
            tp_size=4,
        )
        total = sum(line.num_bytes for line in native_lines(plan, limits, 3, with_drafts=True))
        assert total > before
        before = total


def test_only_rank_0_has_images_and_requests_and_only_served_drafts_count() -> None:
    first, second = ({line.name for line in lines_of(TINY, 2, rank)} for rank in (0, 1))
    assert first - second == {
        TensorLine.vision, "runtime.leader", "runtime.tokenizer", "runtime.blocks", "runtime.prefix_index",
    }  # fmt: skip
    assert {line.name for line in lines_of(TINY, 2, with_drafts=True)} - first == {TensorLine.draft}


def test_the_full_checkpoint_is_planned_in_two_seconds() -> None:
    begin = time.process_time()
    lines_of(ModelConfig.from_dict(published_config_dict()), 8, with_drafts=True)
    assert time.process_time() - begin < 2


def test_a_rank_outside_the_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2 is outside tp_size 2"):
        lines_of(TINY, 2, 2)


def test_a_check_names_the_line_that_differs() -> None:
    """A rank that holds 1000 bytes of drafts that were not planned, and whose process is 500 bytes smaller."""
    lines = lines_of(TINY, 2, 1)
    held = {line.name: line.num_bytes for line in lines if line.kind == "persistent"}
    tensors = {name: held.get(name, 0) for name in TensorLine} | {TensorLine.draft: 1000}
    process = ProcessMemory(sum(held.values()) + 500, 0, 0, 0)
    check = check_rank(lines, RankMemory(1, tensors, process, process))
    assert {
        line.name: line.measured_bytes - line.predicted_bytes
        for line in check.lines
        if line.measured_bytes != line.predicted_bytes
    } == {TensorLine.draft: 1000, "process": -500}
    assert check.measured_bytes - check.predicted_bytes == 500
    assert sum(line.predicted_bytes for line in check.lines) == check.predicted_bytes


def test_what_serve_prints_of_a_check() -> None:
    lines = (
        LineCheck(TensorLine.dense, 30 << 20, 30 << 20),
        LineCheck(TensorLine.windows, 10 << 20, 10 << 20),
        LineCheck("process", 160 << 20, 158 << 20),
    )
    heading, row = memory_table([RankCheck(1, 200 << 20, 198 << 20, lines)])
    assert heading.split() == ["rank", "planned", "measured", "weights", "caches", "process"]
    expected = "rank 1 200.00 MiB 198.00 MiB -1.0% 30.00 MiB 10.00 MiB 158.00 MiB"
    assert " ".join(row.split()) == expected
    assert len(heading) == len(row) <= 80
