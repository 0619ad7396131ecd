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
from deskfleet.model.device import (
    FILLED_ROWS,
    MOST_DECODE_ROWS,
    REPLAYED_ROWS,
    decode_sizes,
    draft_sizes,
    passage_blocks,
    prefill_sizes,
    summed_rows,
)
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
_ATTENDED_WIDTH, _ATTENDED_KEYS = (
    512,
    16,
)  # heads whose width this divides share a list out in chunks of so many
_ATTENDED_TURNS = 1  # of a block; beyond, chunks are twice as long and a processor has two blocks
_PROCESSORS = 132
_PRODUCTS = 160  # partial products of 128 x 16
_KEYS = 64  # that attention takes at a time
_CHUNK = 4096  # scores that one of many programs looks at
_COUNTERS = 64  # places of a row whose partial sums are counted
_SCORES = 1 << 30  # bytes of scores that a filled step has at a time
_EXPANDED = 16 << 20  # weights that it has as bf16 at a time
_SPARE_POSITIONS = 16384  # whose entries it has room for beside those of the longest request
_LONE_ROWS = 128  # rows whose picks it has for themselves
_ITEM_ROWS = 128  # rows of an expert that are taken at a time, at most
_MARKOV_TILE, _CHANCES = 64, 1024  # tokens of a program that biases logits, and of one that adds chances up
_DIGITS, _DRAW = 16, 5  # kinds of logits that are told apart at a time, and numbers of a draw
_BF16, _FLOAT32, _INT32, _INT64, _FLOAT64 = 2, 4, 4, 8, 8


def cuda_lines(
    plan: ShardPlan, limits: RunnerLimits, rank: int, *, max_step_tokens: int, with_drafts: bool = False
) -> tuple[BudgetLine, ...]:
    """Every line of one rank on a GPU, in bytes; all are there once it is loaded.

    `max_step_tokens`: of all requests of one step. Raises ConfigError for a rank outside the layout.
    """
    return tuple(
        line
        for line in (*_weight_lines(plan, rank, with_drafts), *_page_lines(plan, limits, max_step_tokens, with_drafts),
                     _step_line(plan, limits, max_step_tokens, with_drafts))
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


def _expert_bytes(config: ModelConfig) -> int:
    hidden, width = config.hidden_size, _expert_width(config)
    return _fp4_bytes(2 * width, hidden) + _fp4_bytes(hidden, width)


def _weight_lines(plan: ShardPlan, rank: int, with_drafts: bool) -> Iterator[BudgetLine]:
    c = plan.config
    experts, one = len(plan.expert_range(rank)), _expert_bytes(c)
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
    if with_drafts:
        yield _draft_line(plan, rank)


def _draft_line(plan: ShardPlan, rank: int) -> BudgetLine:
    c = plan.config
    hidden, markov, stages = c.hidden_size, c.dspark_markov_rank, c.draft_layers
    experts = len(plan.draft_expert_range(rank))
    total = sum(_dense_bytes(plan, stage) + experts * _expert_bytes(c) for stage in stages)
    total += _fp8_bytes(hidden, len(c.dspark_target_layer_ids) * hidden)
    total += _fp8_bytes(len(stages) * c.head_dim, hidden)  # wkv of every stage once more, together
    total += 2 * hidden * _FLOAT32
    total += 2 * c.vocab_size * markov * _BF16 + (hidden + markov) * _BF16  # each rank has all of it
    return BudgetLine(
        DeviceLine.draft,
        "weights",
        total,
        "persistent",
        f"{len(stages)} stages of {experts} experts, 2 x {c.vocab_size:,} tokens x {markov} x 2 B",
        "the draft stages, because drafts are served",
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
    biases = 1 if c.vision is None or layer.is_draft else 2  # one for rows of images
    total += _bf16_bytes(layer.num_experts, hidden) + biases * layer.num_experts * _FLOAT32
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


def _page_lines(
    plan: ShardPlan, limits: RunnerLimits, max_step_tokens: int, with_drafts: bool
) -> Iterator[BudgetLine]:
    c, size = plan.config, limits.block_size
    formats = CacheFormats(c, size, with_drafts)
    drafted = c.dspark_block_size if with_drafts else 0
    passage = passage_blocks(max_step_tokens, limits.max_num_seqs, size, drafted)
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


def _step_line(plan: ShardPlan, limits: RunnerLimits, max_step_tokens: int, with_drafts: bool) -> BudgetLine:
    c = plan.config
    num_drafts = c.dspark_block_size if with_drafts else 0
    sizes = [
        *decode_sizes(limits.max_num_seqs, num_drafts),
        *prefill_sizes(max_step_tokens, limits.max_model_len),
    ]
    rows, few = max(sizes), [size for size in sizes if size < FILLED_ROWS]
    row = sum(_row_bytes(plan, limits).values()) + (_context_bytes(c) if with_drafts else 0)
    filled = _filled_bytes(plan, limits, rows, max_step_tokens) if rows >= FILLED_ROWS else 0
    logits = min(rows, _LOGIT_ROWS) * (_logit_bytes(plan) + _choosing_bytes(plan) + c.hidden_size * _BF16)
    parts = _part_bytes(plan, c.n_routed_experts, c.num_experts_per_tok, few, (0, c.index_topk))
    parts += _PRODUCTS * _TILE_ROWS * 16 * _FLOAT32
    few_row = sum(_few_row_bytes(plan, limits).values())
    replay = 0
    if limits.decoder_replay:
        replay = REPLAYED_ROWS * (row + _INT64 + (1 + c.sliding_window) * _INT32) + logits
        replay += _filled_bytes(plan, limits, REPLAYED_ROWS, max_step_tokens)
    if with_drafts:
        parts += max(_context_part_bytes(c, size) for size in sizes)
    drafts = _block_bytes(plan, limits) if with_drafts else 0
    summed = 0
    if plan.layout.tp_size > 1:
        most = summed_rows(limits.max_num_seqs, rows, num_drafts, decoder_replay=limits.decoder_replay)
        summed = most * c.hidden_size * _FLOAT32
    formula = f"{rows:,} rows x {row:,} B + {max(few):,} x {few_row:,} B + {logits:,} B of logits"
    formula += f" + {parts:,} B of partial sums"
    for num_bytes, what in ((filled, "filled steps"), (replay, "decoder replay"), (drafts, "drafts")):
        formula += f" + {num_bytes:,} B of {what}" if num_bytes else ""
    return BudgetLine(
        DeviceLine.workspace,
        "workspace",
        rows * row + max(few) * few_row + filled + replay + logits + parts + drafts + summed,
        "persistent",
        formula + (f" + {summed:,} B of sums over ranks" if summed else ""),
        f"what kernels leave for each other, of steps of up to {rows:,} rows",
    )


def _block_bytes(plan: ShardPlan, limits: RunnerLimits) -> int:
    """Buffers of blocks of drafts for as many requests as there are at a time."""
    c = plan.config
    sizes = [n * c.dspark_block_size for n in draft_sizes(limits.max_num_seqs)]
    drafted = (c.dspark_block_size,)
    parts = _part_bytes(plan, c.dspark_n_routed_experts, c.dspark_num_experts_per_tok, sizes, drafted)
    hidden, latents = c.hidden_size, c.q_lora_rank + c.head_dim
    parts += max(_split_bytes(math.ceil(latents / _TILE_ROWS), hidden, size) for size in sizes)
    return max(sizes) * sum(_block_row_bytes(plan).values()) + parts


def _stream_bytes(config: ModelConfig) -> int:
    hidden, copies = config.hidden_size, config.hc_mult
    return (
        (copies + 2) * hidden * _BF16
        + hidden // 64 * (2 + config.hc_num_mixes) * _FLOAT32
        + hidden
        + math.ceil(hidden / 128) * _INT32
        + copies * (2 + copies) * _FLOAT32
    )


def _choices_bytes(experts: int, chosen: int) -> int:
    """A row's choice of `chosen` of so many experts."""
    return chosen * (_INT32 + _FLOAT32) + experts * _FLOAT32 + _COUNTERS * _INT32


def _chosen_bytes(config: ModelConfig, chosen: int) -> int:
    """What the `chosen` experts and the shared one make of a row."""
    hidden, width = config.hidden_size, _expert_width(config)
    return (chosen + 1) * (hidden * _BF16 + width + math.ceil(width / 128) * _INT32)


def _attended_bytes(plan: ShardPlan, outputs: int) -> int:
    """A row's queries, latents and grouped outputs, and of its heads' outputs as many as there are kinds of layers."""
    c = plan.config
    grouped = plan.groups_per_rank * _group_rank(c)
    zeros = c.hidden_size * _BF16 if plan.layout.tp_size > 1 else 0  # beside a sum over ranks
    return (
        zeros
        + (outputs + 1) * plan.heads_per_rank * c.head_dim * _BF16
        + (c.q_lora_rank + c.head_dim + c.hidden_size) * _BF16
        + c.q_lora_rank
        + math.ceil(c.q_lora_rank / 128) * _INT32
        + grouped
        + math.ceil(grouped / 128) * _INT32
    )


def _logit_bytes(plan: ShardPlan) -> int:
    """A row's logits, and of several ranks those of all, as they come and beside each other."""
    ranks = plan.layout.tp_size
    return (1 + (2 * ranks if ranks > 1 else 0)) * plan.vocab_per_rank * _FLOAT32


def _choosing_bytes(plan: ShardPlan) -> int:
    """What choosing a row's token among its logits takes (engine/cuda/sampling.py)."""
    tokens = plan.config.vocab_size if plan.layout.tp_size > 1 else plan.vocab_per_rank
    chunk = 3 * _INT32 + _FLOAT64 + _DIGITS * (_INT32 + _FLOAT64)
    row = _DRAW * _FLOAT64 + 2 * _INT32 + _FLOAT32 + 2 * _INT64 + 4 * _FLOAT64
    return math.ceil(tokens / _CHANCES) * chunk + row


def _row_bytes(plan: ShardPlan, limits: RunnerLimits) -> Mapping[str, int]:
    """Bytes of one row of a step of any size, by what they are for."""
    c = plan.config
    hidden = c.hidden_size
    sources = len(c.index_source_layer_ids)
    return {
        "inputs": 2 * _INT64 + 4 * _INT32 + 3 * c.qk_rope_head_dim * _FLOAT32,
        "streams": _stream_bytes(c),
        "experts": _choices_bytes(c.n_routed_experts, c.num_experts_per_tok),
        "attention": _attended_bytes(plan, 0),
        "index": max(_num_extra(c, layer) for layer in c.layers) * _FLOAT32
        + c.head_dim * _BF16
        + c.index_head_dim * _FLOAT32
        + c.index_n_heads * c.index_head_dim * _BF16
        + (2 * sources * c.index_topk + c.sliding_window) * _INT32,
        "engram": len(c.engram_layer_ids) * (c.engram_width + 4 * math.ceil(c.engram_width / 128))
        + (c.hc_mult + 1) * hidden * _BF16,
        "taps": max(len(c.dspark_target_layer_ids), 1) * hidden * _BF16,
    }


def _few_row_bytes(plan: ShardPlan, limits: RunnerLimits) -> Mapping[str, int]:
    """What a row has beside them in a step that does not fill the tensor cores."""
    c = plan.config
    return {
        "experts": _chosen_bytes(c, c.num_experts_per_tok),
        # With window alone, and with picked entries.
        "attention": 2 * plan.heads_per_rank * c.head_dim * _BF16,
        "index": _scored_bytes(c, limits),
    }


def _scored_bytes(config: ModelConfig, limits: RunnerLimits) -> int:
    """A row's scores, of entries and of their blocks, and the choice among them."""
    entries = _up(limits.max_model_len, limits.block_size)
    blocks = math.ceil(entries / config.candidate_block_size)
    scores = entries * _BF16 + blocks * (_BF16 + 1) + config.candidate_topk_blocks * _INT32
    return scores + _choice_bytes(config, limits)


def _filled_bytes(plan: ShardPlan, limits: RunnerLimits, rows: int, max_step_tokens: int) -> int:
    """What a step of `rows` has beside its rows' own where they fill the tensor cores (engine/cuda/prefill.py)."""
    c, size = plan.config, limits.block_size
    hidden, width, chosen = c.hidden_size, _expert_width(c), c.num_experts_per_tok
    grouped = plan.groups_per_rank * _group_rank(c)
    widest = max(hidden, c.engram_width, c.q_lora_rank, grouped)
    row = (chosen * (width + hidden) + 3 * width + hidden + widest + grouped) * _BF16
    row += plan.heads_per_rank * c.head_dim * _BF16 + (c.sliding_window + c.index_topk + 1 + chosen) * _INT32
    entries = _up(limits.max_model_len, size)
    row += math.ceil(entries / c.candidate_block_size)
    scored = min(rows, max(_SCORES // (16 * entries * _BF16), 1) * 16)
    passage = passage_blocks(max_step_tokens, limits.max_num_seqs, size)
    places = entries // size + _SPARE_POSITIONS // size
    unpacked = (limits.num_window_blocks + 1 + passage + places) * size + _LONE_ROWS * c.index_topk
    items = min(rows * chosen, c.n_routed_experts) * _ITEM_ROWS * _INT32
    return (
        rows * row
        + scored * _scored_bytes(c, limits)
        + unpacked * c.head_dim * _BF16
        + places * _INT32
        + items
        + _EXPANDED * _BF16
    )


def _context_bytes(config: ModelConfig) -> int:
    """A row's taps on their way to the context of the drafts."""
    hidden, taps = config.hidden_size, len(config.dspark_target_layer_ids) * config.hidden_size
    codes = sum(width + math.ceil(width / 128) * _INT32 for width in (taps, hidden))
    return codes + (hidden + len(config.draft_layers) * config.head_dim) * _BF16


def _block_row_bytes(plan: ShardPlan) -> Mapping[str, int]:
    """Bytes of one row of a block of drafts, its share of the request's included."""
    c = plan.config
    length, tokens = c.dspark_block_size, c.vocab_size
    request = (length + 1) * (_INT64 + _FLOAT64) + 3 * _INT32
    request += (
        math.ceil(tokens / _MARKOV_TILE) * (_FLOAT32 + _INT32) + math.ceil(tokens / _CHANCES) * _FLOAT64
    )
    return {
        "inputs": _INT64 + 4 * _INT32 + 3 * c.qk_rope_head_dim * _FLOAT32,
        "streams": _stream_bytes(c),
        "experts": _choices_bytes(c.dspark_n_routed_experts, c.dspark_num_experts_per_tok)
        + _chosen_bytes(c, c.dspark_num_experts_per_tok),
        "attention": _attended_bytes(plan, 1) + (c.sliding_window + length) * _INT32,
        "chain": _logit_bytes(plan) + _FLOAT32 + math.ceil(request / length),
    }


def _part_bytes(
    plan: ShardPlan, experts: int, chosen: int, sizes: Sequence[int], picks: Sequence[int]
) -> int:
    """Partial sums of the step of `sizes` that has the most: of attention, for each number of `picks` that layers have
    beside their window, and of `chosen` of `experts`."""
    c = plan.config
    attention = sum(max(_attention_part_bytes(plan, count, rows) for rows in sizes) for count in picks)
    routed = max(_expert_part_bytes(c, experts, rows * chosen) for rows in sizes)
    shared = max(_shared_part_bytes(c, rows) for rows in sizes)
    return attention + routed + shared


def _attention_part_bytes(plan: ShardPlan, picks: int, rows: int) -> int:
    """As engine/cuda/native/attending.py shares a list out; where other kernels do, one for each processor at most."""
    c = plan.config
    blocks, each = (
        rows * math.ceil(plan.heads_per_rank / _HEAD_ROWS),
        _HEAD_ROWS * (c.head_dim + 2) * _FLOAT32,
    )
    if c.head_dim % _ATTENDED_WIDTH != 0 or rows > MOST_DECODE_ROWS:
        lists = math.ceil(c.sliding_window / _KEYS) + math.ceil(picks / _KEYS)
        return _PROCESSORS * each if lists > 1 else 0  # one block of keys is in no parts
    chunks, longer = (
        math.ceil(c.sliding_window / keys) + math.ceil(picks / keys)
        for keys in (_ATTENDED_KEYS, 2 * _ATTENDED_KEYS)
    )
    turns = math.ceil(chunks * blocks / _PROCESSORS)
    if turns > _ATTENDED_TURNS and c.head_dim == _ATTENDED_WIDTH:
        chunks, turns = longer, max(2, math.ceil(longer * blocks / (2 * _PROCESSORS)))
    splits = math.ceil(chunks / turns)
    return blocks * splits * each if splits > 1 else 0


def _expert_part_bytes(config: ModelConfig, experts: int, pairs: int) -> int:
    """Of so many pairs of a row and an expert: as engine/cuda/experts.py cuts the routed experts' K."""
    rows = 8 if pairs <= 4 * experts else 16
    places = min(pairs, min(experts, pairs) + pairs // rows) * (_expert_width(config) // _GATES)
    blocks, splits = math.ceil(config.hidden_size / 128), 1
    while splits < 8 and places * 2 * splits <= 2 * _PROCESSORS and blocks // (2 * splits) >= 4:
        splits *= 2
    return splits * places * _TILE_ROWS * rows * _FLOAT32 if splits > 1 else 0


def _shared_part_bytes(config: ModelConfig, num_rows: int) -> int:
    """The same of the shared expert."""
    return _split_bytes(_expert_width(config) // _GATES, config.hidden_size, num_rows, most_splits=8)


def _context_part_bytes(config: ModelConfig, num_rows: int) -> int:
    """Of what makes context of taps."""
    hidden, taps = config.hidden_size, len(config.dspark_target_layer_ids) * config.hidden_size
    outputs = (hidden, taps), (len(config.draft_layers) * config.head_dim, hidden)
    return max(_split_bytes(math.ceil(rows / _TILE_ROWS), columns, num_rows) for rows, columns in outputs)


def _split_bytes(tiles: int, num_columns: int, num_rows: int, most_splits: int = _PRODUCTS) -> int:
    """Of a product of so many tiles of outputs, as engine/cuda/linear.py cuts its K."""
    rows = 16 if num_rows <= 16 else 32
    items, blocks = math.ceil(num_rows / rows), math.ceil(num_columns / 128)
    places, splits = items * tiles, 1
    most = _PRODUCTS if items == 1 else _PROCESSORS
    while splits < most_splits and places * 2 * splits <= most and blocks // (2 * splits) >= 2:
        splits *= 2
    return splits * places * _TILE_ROWS * rows * _FLOAT32 if splits > 1 else 0


def _choice_bytes(config: ModelConfig, limits: RunnerLimits) -> int:
    """A row's histograms and counts where many programs choose, among entries and among their blocks."""
    entries = _up(limits.max_model_len, limits.block_size)
    among = (entries, math.ceil(entries / config.candidate_block_size))
    return sum((2 * 256 + 2 * math.ceil(n / _CHUNK)) * _INT32 for n in among if n > 2 * _CHUNK)


__all__ = ["check_device", "cuda_lines"]
