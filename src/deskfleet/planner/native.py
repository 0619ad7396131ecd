"""What a rank of the native engine needs, line by line, and how that compares with what a rank reported.

Owns how that engine holds a checkpoint's tensors: FP8 weights as bf16, which has all their values, the rest as stored.
Array lines are exact (`TensorLine`); the process around them was measured once (`Runtime`). Imports no engine, so the
two are independent.

What one step needs besides is not here: it depends on the batch, and the engine sets no bound to it yet.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.layout import ShardPlan
from deskfleet.model.limits import RunnerLimits
from deskfleet.model.memory import RankMemory, TensorLine
from deskfleet.model.names import TensorClass, TensorSpec
from deskfleet.planner.budget import BudgetLine
from deskfleet_engram.native import NativeOptions
from deskfleet_engram.row_cache import PROCESS_CACHE_BYTES

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Runtime:
    """A rank's process without its arrays, in resident bytes, as measured on `source`.

    `process_bytes`: Python, torch and the libraries, half of it mapped files that ranks of one machine share.
    `collectives_bytes`: gloo or shared memory, in groups of more than one. `leader_bytes`: what rank 0 has besides for
    scheduling and grammars, and `tokenizer_bytes` for each entry of its vocabulary; `token_map_bytes` stay of each on
    any rank.
    """

    process_bytes: int
    collectives_bytes: int
    leader_bytes: int
    tokenizer_bytes: int
    token_map_bytes: int
    source: str


RUNTIME = Runtime(
    process_bytes=250 * MIB,
    collectives_bytes=1 * MIB,
    leader_bytes=4 * MIB,
    tokenizer_bytes=1140,
    token_map_bytes=124,
    source="Python 3.11 and torch 2.13.0+cpu on x86-64 Linux",
)

_ON_DISK = re.compile(r".*\.engram\.embed\.\w+")
_AS_FLOAT32 = re.compile(r".*norm\d?\.weight|.*\.gate\.bias(_vl)?|.*\.attn_sink|.*\.engram\.q_weight")
_EXPERTS = ".ffn.experts."

_WEIGHT_LINES = {
    TensorClass.routed_expert: (TensorLine.routed_experts, "routed experts whole, FP4 as stored"),
    TensorClass.dense: (
        TensorLine.dense,
        "attention by group, the rest of the layers on every rank, FP8 as bf16",
    ),
    TensorClass.other: (TensorLine.vocabulary, "embedding and head by token, padded to equal shares"),
    TensorClass.draft: (TensorLine.draft, "the draft stages, because drafts are served"),
    TensorClass.vision: (TensorLine.vision, "the tower; rank 0 encodes the images of all"),
}


def native_lines(
    plan: ShardPlan,
    limits: RunnerLimits,
    rank: int,
    *,
    with_drafts: bool,
    with_native_reader: bool = True,
    runtime: Runtime = RUNTIME,
) -> tuple[BudgetLine, ...]:
    """Every line of one rank in bytes; lines of nothing are left out.

    Persistent lines are resident once the rank is loaded. Reserved ones fill while it serves. The temporary one is the
    most that loading can hold besides. `with_native_reader`: whether the library that reads Engram rows is installed.
    Raises ConfigError for a rank outside the layout.
    """
    held = _held_tensors(plan, rank, with_drafts=with_drafts)
    lines = [
        *_weight_lines(held),
        *_cache_lines(plan, limits, with_drafts=with_drafts),
        *_buffer_lines(plan, with_drafts=with_drafts),
        *(_reader_lines(plan) if with_native_reader and plan.engram_columns(rank) else ()),
        *_process_lines(plan, limits, rank, runtime),
        _loading_line(held),
    ]
    return tuple(line for line in lines if line.num_bytes)


# --- weights ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """Tensors alike, of one layer, that a rank holds: `count` of `num_values` each, in rows of `width`.

    A value takes `value_bytes` in memory; one of FP4 is a byte, which holds two numbers.
    """

    tensor_class: TensorClass
    dtype: str
    count: int
    num_values: int
    width: int
    value_bytes: int


# A context is searched for with dozens of plans of the same ranks.
@lru_cache(maxsize=64)
def _held_tensors(plan: ShardPlan, rank: int, *, with_drafts: bool) -> tuple[_Held, ...]:
    """What the rank keeps of each tensor. Experts of a layer are alike, so expert 0 stands for all it has."""
    kept = set(_WEIGHT_LINES) - ({TensorClass.vision} if rank > 0 else set())
    if not with_drafts:
        kept.discard(TensorClass.draft)
    all_held = []
    for name, spec, value_bytes in _in_memory(plan):
        if spec.tensor_class not in kept:
            continue
        count, shape = 1, spec.shape
        if _EXPERTS in name:
            is_draft = spec.tensor_class is TensorClass.draft
            count = len(plan.draft_expert_range(rank) if is_draft else plan.expert_range(rank))
        else:
            shape = plan.shard(name, rank).local_shape
        all_held.append(_Held(spec.tensor_class, spec.dtype, count, math.prod(shape), shape[-1], value_bytes))
    return tuple(all_held)


@lru_cache(maxsize=8)
def _in_memory(plan: ShardPlan) -> tuple[tuple[str, TensorSpec, int], ...]:
    """Tensors that ranks hold, with the bytes of a value, and of the experts of a layer the first."""
    found = []
    for name, spec in plan.tensors.items():
        if _EXPERTS in name and f"{_EXPERTS}0." not in name:
            continue
        if spec.tensor_class in _WEIGHT_LINES and (value_bytes := _value_bytes(name, spec)):
            found.append((name, spec, value_bytes))
    return tuple(found)


def _value_bytes(name: str, spec: TensorSpec) -> int:
    """Bytes of one value in a rank's memory; 0 for what goes into another tensor or stays on disk."""
    if _ON_DISK.fullmatch(name) or name.endswith(".engram.k_weight"):
        return 0  # the two gate weights are multiplied with each other
    if spec.dtype == "F8_E8M0":
        return 1 if _EXPERTS in name else 0  # the scales of FP8 are multiplied in
    if spec.dtype == "I8":
        return 1
    return 4 if spec.dtype == "F32" or _AS_FLOAT32.fullmatch(name) else 2


_PARTS_BYTES = {"F8_E4M3": 2, "I8": 1, "F8_E8M0": 1, "BF16": 2, "F32": 0}
"""What lies beside a value while it is put in its place: what it was read as; of FP8, the codes of two matrices."""

_DECODED_AT_ONCE = 1 << 12  # values of FP8, but never less than the rows that share a scale
_SCALE_ROWS = 32
_DECODED_BYTES = 10 * 8  # as float64; three are in use, the others the allocator keeps (measured)
_FREE_HEAP_BYTES = 6 * MIB  # of small pieces that the allocator keeps until loading is over (measured)


def _weight_lines(all_held: Sequence[_Held]) -> Iterator[BudgetLine]:
    values: defaultdict[TensorClass, Counter[int]] = defaultdict(Counter)
    for held in all_held:
        values[held.tensor_class][held.value_bytes] += held.count * held.num_values
    for tensor_class, (name, reason) in _WEIGHT_LINES.items():
        counts = {size: count for size, count in sorted(values[tensor_class].items(), reverse=True) if count}
        yield BudgetLine(
            name,
            "weights",
            sum(size * count for size, count in counts.items()),
            "persistent",
            " + ".join(f"{count:,} x {size} B" for size, count in counts.items()),
            reason,
        )


def _loading_line(all_held: Sequence[_Held]) -> BudgetLine:
    """The most that making one tensor holds besides that tensor, as if it came last."""
    read_bytes = decoded_bytes = 0
    for held in all_held:
        read_bytes = max(read_bytes, held.num_values * _PARTS_BYTES[held.dtype])
        if held.dtype == "F8_E4M3":
            decoded_bytes = max(
                decoded_bytes, max(_DECODED_AT_ONCE, _SCALE_ROWS * held.width) * _DECODED_BYTES
            )
    return BudgetLine(
        "load.decoding",
        "workspace",
        read_bytes + decoded_bytes + _FREE_HEAP_BYTES,
        "temporary",
        f"{read_bytes:,} B as read + {decoded_bytes:,} B of float64 + {_FREE_HEAP_BYTES:,} B of free heap",
        "a tensor as it was read, and some of its rows while they are decoded",
        phase="load",
    )


# --- caches and buffers -------------------------------------------------------------------------------


def _cache_lines(plan: ShardPlan, limits: RunnerLimits, *, with_drafts: bool) -> Iterator[BudgetLine]:
    config, size = plan.config, limits.block_size
    formats = CacheFormats(config, size, with_drafts)
    window_blocks = limits.num_window_blocks + 1
    yield BudgetLine(
        TensorLine.windows,
        "kv",
        window_blocks * formats.window_block_bytes,
        "persistent",
        f"{window_blocks:,} blocks x {size} tokens x {formats.num_window_layers} layers x "
        f"{formats.window_record_bytes} B",
        "raw rows of the last tokens of every request, and of finished ones that may come back",
    )
    ratios = [config.compress_ratios[source] for source in config.kv_source_layer_ids]
    blocks = -(-(limits.num_blocks + 1) // limits.dcp_size)
    rows = blocks * sum(formats.entries_per_block(ratio) for ratio in ratios)
    shared = f", shared out over {limits.dcp_size} ranks" if limits.dcp_size > 1 else ", on every rank"
    for name, record_bytes, what in (
        (TensorLine.entries, formats.entry_record_bytes, "compressed keys and values"),
        (TensorLine.index_keys, formats.index_key_record_bytes, "index keys"),
    ):
        formula = f"{blocks:,} blocks, {rows:,} rows of {len(ratios)} sources x {record_bytes} B"
        yield BudgetLine(name, "kv", rows * record_bytes, "persistent", formula, what + shared)
    # A slot keeps the open members before a verify window, and the window itself; of values and of gates.
    open_rows = sum(ratio + config.dspark_block_size for ratio in ratios if ratio > 1)
    yield BudgetLine(
        TensorLine.open_groups,
        "kv",
        2 * limits.max_num_seqs * open_rows * config.head_dim * 4,
        "persistent",
        f"2 x {limits.max_num_seqs} requests x {open_rows} rows x {config.head_dim} x 4 B",
        "tokens that wait for the rest of their group",
    )
    table = -(-limits.max_model_len // size)
    yield BudgetLine(
        TensorLine.block_tables,
        "kv",
        2 * limits.max_num_seqs * table * 4,
        "persistent",
        f"2 x {limits.max_num_seqs} requests x {table:,} blocks x 4 B",
        "which block is whose, in both pools",
    )


def _buffer_lines(plan: ShardPlan, *, with_drafts: bool) -> Iterator[BudgetLine]:
    config = plan.config
    tables = 2 + with_drafts
    yield BudgetLine(
        TensorLine.rope,
        "workspace",
        tables * config.qk_rope_head_dim // 2 * 4,
        "persistent",
        f"{tables} tables x {config.qk_rope_head_dim // 2} x 4 B",
        "rotary frequencies: two of the backbone, one of the drafts",
    )
    layers, columns = len(config.engram_layer_ids), config.engram_num_columns
    if layers:
        places = plan.layout.tp_size * plan.engram_columns_per_rank
        numbers = layers * (3 * columns + config.engram_max_ngram_size) + places
        yield BudgetLine(
            TensorLine.engram,
            "engram",
            numbers * 8,
            "persistent",
            f"{numbers:,} x 8 B",
            "primes, offsets and order of the hash columns, multipliers, and who owns which column",
        )


_READ_BYTES = 2 * 4096  # a row may cross a page
_ROW_WORDS_BYTES = (
    8 + 1 + 2 * 4
)  # of each cached row: its key, how often it was used, its place in two queues
_ROW_INDEX_BYTES = (
    6 + 8
)  # of each row that there is room for: 1.5 index words, a fourth of a bucket of ghosts


def _reader_lines(plan: ShardPlan) -> Iterator[BudgetLine]:
    """The native reader's memory; sizes are those of its library's source."""
    config, depth = plan.config, NativeOptions().depth
    yield BudgetLine(
        "engram.staging",
        "engram",
        depth * _READ_BYTES,
        "persistent",
        f"{depth} reads x {_READ_BYTES} B",
        "where the disk puts Engram rows; the tables stay on it",
    )
    row_bytes = config.engram_head_dim + config.engram_head_dim // config.weight_block_size
    row_bytes = -(-row_bytes // 8) * 8 + _ROW_WORDS_BYTES
    num_rows = PROCESS_CACHE_BYTES // (row_bytes + _ROW_INDEX_BYTES)
    index_bytes = num_rows * _ROW_INDEX_BYTES
    yield BudgetLine(
        "engram.row_index",
        "engram",
        index_bytes,
        "persistent",
        f"{num_rows:,} rows x {_ROW_INDEX_BYTES} B",
        "the index of the row cache, made when it is opened",
    )
    yield BudgetLine(
        "engram.row_cache",
        "engram",
        PROCESS_CACHE_BYTES - index_bytes,
        "reserved",
        f"{num_rows:,} rows x {row_bytes} B",
        "rows kept in memory; fills as they are read",
    )


# --- the process --------------------------------------------------------------------------------------

_SLOTS, _SLOT_BYTES = 2, 1 << 18
"""Of each rank and each group it is in, as the library of compiled operators has them (docs/decisions/0022)."""


def _process_lines(
    plan: ShardPlan, limits: RunnerLimits, rank: int, runtime: Runtime
) -> Iterator[BudgetLine]:
    def measured(name: str, num_bytes: int, formula: str, reason: str) -> BudgetLine:
        reason = f"{reason}; measured with {runtime.source}"
        return BudgetLine(name, "runtime", num_bytes, "persistent", formula, reason, "measured")

    yield measured("runtime.process", runtime.process_bytes, "constant", "Python, torch, libraries")
    if plan.layout.tp_size > 1:
        yield measured(
            "runtime.collectives",
            runtime.collectives_bytes,
            "constant",
            "gloo, or the pages of shared memory in use",
        )
        divisions = 1 + (limits.dcp_size > 1)
        yield BudgetLine(
            "runtime.shared_memory",
            "runtime",
            divisions * _SLOTS * _SLOT_BYTES,
            "reserved",
            f"{divisions * _SLOTS} slots x {_SLOT_BYTES // 1024} KiB",
            "this rank's part of the memory that ranks of one machine exchange through; fills as messages grow",
        )
    vocabulary = plan.config.vocab_size
    yield measured(
        "runtime.token_map",
        vocabulary * runtime.token_map_bytes,
        f"{vocabulary:,} tokens x {runtime.token_map_bytes} B",
        "the map of equal tokens, and what making it leaves",
    )
    if rank > 0:
        return
    yield measured(
        "runtime.leader", runtime.leader_bytes, "constant", "scheduler, sampler, grammars: on rank 0"
    )
    yield measured(
        "runtime.tokenizer",
        vocabulary * runtime.tokenizer_bytes,
        f"{vocabulary:,} tokens x {runtime.tokenizer_bytes} B",
        "tokenizer and grammar compiler of rank 0",
    )
    pools = (limits.num_blocks, limits.num_window_blocks)
    yield BudgetLine(
        "runtime.blocks",
        "runtime",
        sum(_pool_bytes(num_blocks) for num_blocks in pools),
        "persistent",
        f"{sum(pools):,} blocks x 80 B + 28 B x slots of a table",
        "who holds which block: counts, hashes and the free list of rank 0, in CPython's objects",
    )
    yield BudgetLine(
        "runtime.prefix_index",
        "runtime",
        sum(num_blocks * 80 + _table_slots(num_blocks) * 20 for num_blocks in pools),
        "reserved",
        f"{sum(pools):,} blocks x 80 B + 20 B x slots of a table",
        "hashes by which full blocks are found again; fills until every block is remembered",
    )


def _pool_bytes(num_blocks: int) -> int:
    """A pool's lists (16 B a block), numbers (32 B), and ordered free list (32 B, and 28 B for each table slot)."""
    return num_blocks * (16 + 32 + 32) + _table_slots(num_blocks) * 28


def _table_slots(num_keys: int) -> int:
    """Slots of CPython's dictionary of so many keys: a power of two, at most two thirds of it in use."""
    slots = 8
    while slots * 2 // 3 < num_keys:
        slots *= 2
    return slots


# --- predicted and measured ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineCheck:
    """One line, predicted and measured. "process" is what is resident besides the arrays."""

    name: str
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True)
class RankCheck:
    """One rank's resident memory after loading: what was predicted, and what its process reported."""

    rank: int
    predicted_bytes: int
    measured_bytes: int
    lines: tuple[LineCheck, ...]

    @property
    def relative_difference(self) -> float:
        """Measured over predicted, less one."""
        return self.measured_bytes / self.predicted_bytes - 1

    def group_bytes(self, *prefixes: str) -> int:
        """Measured bytes of the lines whose names begin so."""
        return sum(line.measured_bytes for line in self.lines if line.name.startswith(prefixes))


def check_rank(lines: Sequence[BudgetLine], memory: RankMemory) -> RankCheck:
    """Compare what a rank reported with its persistent lines."""
    predicted = {line.name: line.num_bytes for line in lines if line.kind == "persistent"}
    total = sum(predicted.values())
    checks = [
        LineCheck(name, predicted.pop(name, 0), memory.tensor_bytes[name])
        for name in TensorLine
        if name in predicted or memory.tensor_bytes[name]
    ]
    measured = memory.after.resident_bytes
    process = LineCheck("process", sum(predicted.values()), measured - memory.total_tensor_bytes)
    return RankCheck(memory.rank, total, measured, (*checks, process))


__all__ = ["RUNTIME", "LineCheck", "RankCheck", "Runtime", "check_rank", "native_lines"]
