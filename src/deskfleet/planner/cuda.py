"""What a rank of the native engine holds in the memory of a GPU, line by line. Owns the sizes of tiles and of steps.

Weights stay in the format of the checkpoint there, in tiles of 128 rows that are filled up with zeros; pages are those
of a rank on the CPU; the buffers of steps of every size share the memory of the largest. Imports no engine, so that
what is predicted and what is measured are independent.

What is not here: the driver's context and compiled kernels, which torch's allocator does not know, and the few
temporaries that graphs keep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.config import ModelConfig
from deskfleet.model.device import decode_sizes, prefill_sizes
from deskfleet.model.layers import LayerPlan
from deskfleet.model.layout import ShardPlan
from deskfleet.model.limits import RunnerLimits
from deskfleet.model.memory import DeviceLine, RankMemory
from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.native import LineCheck, RankCheck

_TILE_ROWS = 128
_GATES = 64
_LOGIT_ROWS = 64
_HEAD_ROWS = 16  # heads of one partial sum of attention
_PROCESSORS = 132
_PRODUCTS = 160  # partial products of 128 x 16
_KEYS = 64  # that attention takes at a time
_CHUNK = 4096  # scores that one of many programs looks at
_COUNTERS = 64  # places of a row whose partial sums are counted
_BF16, _FLOAT32, _INT32, _INT64 = 2, 4, 4, 8


def cuda_lines(
    plan: ShardPlan, limits: RunnerLimits, rank: int, *, max_step_tokens: int
) -> tuple[BudgetLine, ...]:
    """Every line of one rank on a GPU, in bytes; all are there once it is loaded.

    `max_step_tokens`: of all requests of one step. Raises ConfigError for a rank outside the layout.
    """
    return tuple(
        line
        for line in (*_weight_lines(plan, rank), *_page_lines(plan, limits, max_step_tokens),
                     _step_line(plan, limits, rank, max_step_tokens))
        if line.num_bytes
    )  # fmt: skip


def check_device(lines: tuple[BudgetLine, ...], memory: RankMemory) -> RankCheck:
    """Compare what a rank reported of its GPU with its lines. In all, what torch has given out counts, if known."""
    assert memory.device is not None
    measured = memory.device.tensor_bytes
    predicted = {line.name: line.num_bytes for line in lines}
    checks = [LineCheck(name, predicted.get(name, 0), measured[name]) for name in DeviceLine]
    total, allocated = sum(measured.values()), memory.device.allocated_bytes
    if allocated is not None:
        checks.append(LineCheck("gpu.other", 0, allocated - total))
        total = allocated
    return RankCheck(memory.rank, sum(predicted.values()), total, tuple(checks))


# --- weights ------------------------------------------------------------------------------------------


def _fp8_bytes(rows: int, columns: int) -> int:
    tiles = math.ceil(rows / _TILE_ROWS)
    return tiles * _TILE_ROWS * columns + tiles * 4 * math.ceil(columns / 128) * _INT32


def _fp4_bytes(rows: int, columns: int) -> int:
    return rows * columns // 2 + rows * math.ceil(columns / 128) * _INT32


def _bf16_bytes(rows: int, columns: int) -> int:
    return _up(rows, 64) * columns * _BF16


def _up(number: int, unit: int) -> int:
    return math.ceil(number / unit) * unit


def _group_rank(config: ModelConfig) -> int:
    return _up(config.o_lora_rank, _TILE_ROWS)


def _expert_width(config: ModelConfig) -> int:
    return _up(config.moe_intermediate_size, _GATES)


def _num_extra(config: ModelConfig, layer: LayerPlan) -> int:
    """Rows of what shares its input: the compressor's values and gates, then the index weights."""
    rows = config.head_dim * min(layer.compress_ratio, 2) if layer.is_kv_source else 0
    return rows + (config.index_n_heads if layer.is_index_source else 0)


def _weight_lines(plan: ShardPlan, rank: int) -> Iterator[BudgetLine]:
    c = plan.config
    experts, width = len(plan.expert_range(rank)), _expert_width(c)
    one = _fp4_bytes(2 * width, c.hidden_size) + _fp4_bytes(c.hidden_size, width)
    layers = len(c.layers)
    yield BudgetLine(
        DeviceLine.routed_experts,
        "weights",
        layers * experts * one,
        "persistent",
        f"{layers} layers x {experts} experts x {one:,} B",
        "routed experts whole, FP4 in tiles",
    )
    dense = [_dense_bytes(plan, layer) for layer in c.layers]
    yield BudgetLine(
        DeviceLine.dense,
        "weights",
        sum(dense),
        "persistent",
        f"{layers} layers of {min(dense):,} to {max(dense):,} B",
        "attention by group, the rest of the layers on every rank, FP8 in tiles",
    )
    rows, hidden = plan.vocab_per_rank, c.hidden_size
    embedding = (rows + (plan.layout.tp_size > 1)) * hidden * _BF16
    yield BudgetLine(
        DeviceLine.vocabulary,
        "weights",
        embedding + _bf16_bytes(rows, hidden) + hidden * _FLOAT32,
        "persistent",
        f"2 x {rows:,} tokens x {hidden} x 2 B",
        "embedding and head by token, padded to equal shares and whole tiles",
    )


def _dense_bytes(plan: ShardPlan, layer: LayerPlan) -> int:
    c = plan.config
    hidden, width, heads = c.hidden_size, _expert_width(c), plan.heads_per_rank
    grouped = plan.groups_per_rank * _group_rank(c)
    mixes = c.hc_num_mixes
    total = 2 * (2 * mixes * c.hc_mult * hidden * _BF16 + (3 + mixes + hidden) * _FLOAT32)
    total += _fp8_bytes(c.q_lora_rank + c.head_dim, hidden) + (c.q_lora_rank + c.head_dim) * _FLOAT32
    total += _fp8_bytes(heads * c.head_dim, c.q_lora_rank) + heads * _FLOAT32
    total += _fp8_bytes(grouped, c.heads_per_group * c.head_dim) + _fp8_bytes(hidden, grouped)
    total += _bf16_bytes(layer.num_experts, hidden) + layer.num_experts * _FLOAT32
    total += _fp8_bytes(2 * width, hidden) + _fp8_bytes(hidden, width)
    if extra := _num_extra(c, layer):
        total += _bf16_bytes(extra, hidden)
    if layer.is_kv_source:
        total += _bf16_bytes(c.index_head_dim, c.head_dim) + (c.head_dim + c.index_head_dim) * _FLOAT32
    if layer.is_index_source:
        total += _fp8_bytes(c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    if layer.has_engram:
        total += _fp8_bytes((c.hc_mult + 1) * hidden, c.engram_width) + c.hc_mult * hidden * _FLOAT32
    return total


# --- pages --------------------------------------------------------------------------------------------


def _page_lines(plan: ShardPlan, limits: RunnerLimits, max_step_tokens: int) -> Iterator[BudgetLine]:
    c, size = plan.config, limits.block_size
    formats = CacheFormats(c, size, with_drafts=False)
    passage = math.ceil(max_step_tokens / size) + limits.max_num_seqs
    windows = limits.num_window_blocks + 1 + passage
    yield BudgetLine(
        DeviceLine.windows,
        "kv",
        windows * formats.window_block_bytes,
        "persistent",
        f"{windows:,} blocks x {formats.window_block_bytes:,} B",
        f"raw rows of the last tokens; {passage:,} blocks are for rows that only their own step sees",
    )
    ratios = [c.compress_ratios[source] for source in c.kv_source_layer_ids]
    rows = (limits.num_blocks + 1) * sum(formats.entries_per_block(ratio) for ratio in ratios)
    for name, record_bytes, what in (
        (DeviceLine.entries, formats.entry_record_bytes, "compressed keys and values"),
        (DeviceLine.index_keys, formats.index_key_record_bytes, "index keys"),
    ):
        formula = f"{rows:,} rows of {len(ratios)} sources x {record_bytes} B"
        yield BudgetLine(name, "kv", rows * record_bytes, "persistent", formula, what)
    slots = limits.max_num_seqs + 1
    open_rows = sum(2 + c.dspark_block_size for ratio in ratios if ratio > 1)
    yield BudgetLine(
        DeviceLine.open_groups,
        "kv",
        slots * open_rows * 2 * c.head_dim * _FLOAT32,
        "persistent",
        f"{slots} slots x {open_rows} rows x {2 * c.head_dim} x 4 B",
        "tokens that wait for the rest of their group; one slot is nobody's",
    )
    table = math.ceil(limits.max_model_len / size)
    yield BudgetLine(
        DeviceLine.block_tables,
        "kv",
        2 * slots * table * _INT32,
        "persistent",
        f"2 x {slots} slots x {table:,} blocks x 4 B",
        "which block is whose, in both pools",
    )


# --- steps --------------------------------------------------------------------------------------------


def _step_line(plan: ShardPlan, limits: RunnerLimits, rank: int, max_step_tokens: int) -> BudgetLine:
    sizes = [*decode_sizes(limits.max_num_seqs), *prefill_sizes(max_step_tokens, limits.max_model_len)]
    rows = max(sizes)
    row = sum(_row_bytes(plan, limits).values())
    logits = min(rows, _LOGIT_ROWS) * (plan.vocab_per_rank * _FLOAT32 + plan.config.hidden_size * _BF16)
    parts = _part_bytes(plan, limits, sizes)
    return BudgetLine(
        DeviceLine.workspace,
        "workspace",
        rows * row + logits + parts,
        "persistent",
        f"{rows:,} rows x {row:,} B + {logits:,} B of logits + {parts:,} B of partial sums",
        f"what kernels leave for each other, of steps of up to {rows:,} rows",
    )


def _row_bytes(plan: ShardPlan, limits: RunnerLimits) -> Mapping[str, int]:
    """Bytes of one row of a step, by what they are for."""
    c = plan.config
    hidden, width, chosen = c.hidden_size, _expert_width(c), c.num_experts_per_tok
    slices = hidden // 64
    grouped = plan.groups_per_rank * _group_rank(c)
    entries = _up(limits.max_model_len, limits.block_size)
    blocks = math.ceil(entries / c.candidate_block_size)
    words = math.ceil(width / 128)
    sources = len(c.index_source_layer_ids)
    return {
        "inputs": 2 * _INT64 + 4 * _INT32 + 3 * c.qk_rope_head_dim * _FLOAT32,
        "streams": (c.hc_mult + 2) * hidden * _BF16
        + slices * (2 + c.hc_num_mixes) * _FLOAT32
        + hidden
        + math.ceil(hidden / 128) * _INT32
        + c.hc_mult * (2 + c.hc_mult) * _FLOAT32,
        "experts": (chosen + 1) * (hidden * _BF16 + width + words * _INT32)
        + chosen * (_INT32 + _FLOAT32)
        + c.n_routed_experts * _FLOAT32
        + _COUNTERS * _INT32,
        "attention": 2
        * plan.heads_per_rank
        * c.head_dim
        * _BF16  # with window alone, and with picked entries
        + plan.heads_per_rank * c.head_dim * _BF16
        + (c.q_lora_rank + c.head_dim + hidden) * _BF16
        + c.q_lora_rank
        + math.ceil(c.q_lora_rank / 128) * _INT32
        + grouped
        + math.ceil(grouped / 128) * _INT32,
        "index": max(_num_extra(c, layer) for layer in c.layers) * _FLOAT32
        + c.head_dim * _BF16
        + c.index_head_dim * _FLOAT32
        + c.index_n_heads * c.index_head_dim * _BF16
        + (2 * sources * c.index_topk + c.sliding_window) * _INT32
        + entries * _BF16
        + blocks * (_BF16 + 1)
        + c.candidate_topk_blocks * _INT32,
        "engram": len(c.engram_layer_ids) * (c.engram_width + 4 * math.ceil(c.engram_width / 128))
        + (c.hc_mult + 1) * hidden * _BF16,
        "taps": max(len(c.dspark_target_layer_ids), 1) * hidden * _BF16,
    }


def _part_bytes(plan: ShardPlan, limits: RunnerLimits, sizes: Sequence[int]) -> int:
    """Partial sums: of attention one for each processor at most, of both kinds of layers; of products as many as there
    are programs at a time; of the experts those of the step that has the most of them; and of the choice of entries."""
    kinds = 2 if plan.config.sliding_window > _KEYS else 1  # a window of one block of keys is in no parts
    attention = kinds * _PROCESSORS * _HEAD_ROWS * (plan.config.head_dim + 2) * _FLOAT32
    experts = max(_expert_part_bytes(plan.config, rows) for rows in sizes)
    shared = max(_shared_part_bytes(plan.config, rows) for rows in sizes)
    choice = max(sizes) * _choice_bytes(plan.config, limits)
    return attention + experts + shared + choice + _PRODUCTS * _TILE_ROWS * 16 * _FLOAT32


def _expert_part_bytes(config: ModelConfig, num_rows: int) -> int:
    """Of a step of `num_rows`: as engine/cuda/experts.py cuts the routed experts' K."""
    pairs, experts = num_rows * config.num_experts_per_tok, config.n_routed_experts
    rows = 8 if pairs <= 4 * experts else 16
    places = min(pairs, min(experts, pairs) + pairs // rows) * (_expert_width(config) // _GATES)
    blocks, splits = math.ceil(config.hidden_size / 128), 1
    while splits < 8 and places * 2 * splits <= 2 * _PROCESSORS and blocks // (2 * splits) >= 4:
        splits *= 2
    return splits * places * _TILE_ROWS * rows * _FLOAT32 if splits > 1 else 0


def _shared_part_bytes(config: ModelConfig, num_rows: int) -> int:
    """The same of the shared expert."""
    rows = 16 if num_rows <= 16 else 32
    items, blocks = math.ceil(num_rows / rows), math.ceil(config.hidden_size / 128)
    places, splits = items * (_expert_width(config) // _GATES), 1
    most = _PRODUCTS if items == 1 else _PROCESSORS
    while splits < 8 and places * 2 * splits <= most and blocks // (2 * splits) >= 2:
        splits *= 2
    return splits * places * _TILE_ROWS * rows * _FLOAT32 if splits > 1 else 0


def _choice_bytes(config: ModelConfig, limits: RunnerLimits) -> int:
    """A row's histograms and counts where many programs choose, among entries and among their blocks."""
    entries = _up(limits.max_model_len, limits.block_size)
    among = (entries, math.ceil(entries / config.candidate_block_size))
    return sum((2 * 256 + 2 * math.ceil(n / _CHUNK)) * _INT32 for n in among if n > 2 * _CHUNK)


__all__ = ["check_device", "cuda_lines"]
