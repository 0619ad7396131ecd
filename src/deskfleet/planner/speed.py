"""What a layout can do at best: loading, decoding, reading prompts, Engram traffic. Ceilings, never promises.

Owns how the parts of `rates`, `disk`, `loading` and `graphs` are put together for one layout on one kind of node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deskfleet.model.limits import MAX_TRANSIENT_BYTES
from deskfleet.planner.chunks import ChunkRule, ChunkRun, chunk_schedule, pair_limit
from deskfleet.planner.cluster import NodeKind
from deskfleet.planner.disk import read_s, row_reads
from deskfleet.planner.graphs import capture_sizes
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.loading import LOCAL_NVME, LoadPath, load_s
from deskfleet.planner.rates import ACCEPTED_PER_STEP, DecodePoint, decode_ceiling, prefill_ceiling
from deskfleet.planner.reads import TEXT_ROUTING
from deskfleet.planner.wishes import ServingLayout


@dataclass(frozen=True, slots=True)
class EngramTraffic:
    """Rows that one rank reads, and the disk's time for them: of a decode step of one request, and of a chunk."""

    rows_per_step: int
    disk_s_per_step: float
    rows_per_chunk: int
    disk_s_per_chunk: float
    is_chunk_hidden: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """Ceilings of one layout. `decode` by number of requests, empty where nothing is known of an engine's kernels.

    `accepted_per_step` is the assumption behind tokens per second: what mixed text commits of a verified step.
    """

    load_s: float
    load_path: str
    decode: tuple[DecodePoint, ...]
    accepted_per_step: float
    prefill_tokens_per_s: float | None
    engram: EngramTraffic | None
    capture_sizes: tuple[int, ...]


def speed_of(
    inventory: Inventory,
    layout: ServingLayout,
    kind: NodeKind,
    *,
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    path: LoadPath = LOCAL_NVME,
) -> Speed:
    """The ceilings of `layout`. The native engine's reference computes in float64, for which no ceiling is given."""
    decode: tuple[DecodePoint, ...] = ()
    prefill = None
    accepted = min(ACCEPTED_PER_STEP["mixed"], layout.num_drafts + 1.0)
    if layout.engine != "native":
        decode = tuple(
            decode_ceiling(
                inventory,
                layout.tp_size,
                count,
                bytes_per_s=kind.bytes_per_s,
                link=kind.link,
                num_drafts=layout.num_drafts,
                accepted_per_step=accepted,
                routing=TEXT_ROUTING,
            )
            for count in batches
            if count <= layout.max_num_seqs
        )
        prefill = prefill_ceiling(
            inventory,
            layout.tp_size,
            layout.chunk_tokens,
            peak_flops=kind.peak_flops,
            bytes_per_s=kind.bytes_per_s,
        )
    held = inventory.weight_bytes // layout.tp_size
    return Speed(
        load_s=load_s(held, path),
        load_path=f"{path.name}: {path.source}",
        decode=decode,
        accepted_per_step=accepted,
        prefill_tokens_per_s=prefill,
        engram=engram_traffic(inventory, layout, kind, prefill_tokens_per_s=prefill),
        capture_sizes=capture_sizes(layout.max_num_seqs, layout.num_drafts),
    )


def chunks_of(layout: ServingLayout) -> tuple[ChunkRun, ...]:
    """The chunks in which a prompt of full length is read. Only the native engine's shrink as the prefix grows."""
    limit = layout.chunk_tokens * layout.max_model_len
    if layout.engine == "native":
        limit = pair_limit(MAX_TRANSIENT_BYTES)
    size = layout.chunk_tokens
    rule = ChunkRule(
        pair_limit=limit, max_chunk=size, min_chunk=1, granularity=1 if layout.engine == "native" else size
    )
    return chunk_schedule(layout.max_model_len, rule)


def engram_traffic(
    inventory: Inventory, layout: ServingLayout, kind: NodeKind, *, prefill_tokens_per_s: float | None = None
) -> EngramTraffic | None:
    """Reads of the rank with the most columns; None when rows lie in memory."""
    tables = inventory.engram
    if tables is None or layout.engram != "disk":
        return None
    step = row_reads(tables, layout.num_drafts + 1, layout.tp_size)
    chunk = row_reads(tables, layout.chunk_tokens, layout.tp_size)
    disk_s = read_s(chunk, kind.disk)
    is_hidden = prefill_tokens_per_s is not None and disk_s <= layout.chunk_tokens / prefill_tokens_per_s
    return EngramTraffic(round(step), read_s(step, kind.disk), round(chunk), disk_s, is_hidden)


__all__ = ["EngramTraffic", "Speed", "chunks_of", "engram_traffic", "speed_of"]
