"""Figures of a step and of what engines keep beside weights: M-63 to M-73, M-85 to M-87. Owns which function gives
ours."""

from __future__ import annotations

from deskfleet.planner.chunks import (
    smallest_image_chunk,
)
from deskfleet.planner.cluster import SPARK
from deskfleet.planner.collectives import (
    COLLECTIVES_BESIDE_ALL_REDUCES,
    DEFAULT_BUFFERS,
    MIB,
    SMALL_BUFFERS,
    all_reduce_bytes,
    collectives_per_step,
    nccl_buffer_bytes,
    num_connections,
)
from deskfleet.planner.copies import draft_hidden_bytes, head_copy_bytes, wo_a_bytes
from deskfleet.planner.disk import SPLIT_READS, chunk_reads, read_s, row_reads, serial_read_s, staging_bytes
from deskfleet.planner.engines import sglang
from deskfleet.planner.engines.stock import STREAMS
from deskfleet.planner.evidence.layouts import MODEL, plan_of, tables_of
from deskfleet.planner.evidence.table import Row, answered, exact, measured, rounded
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.published import published_inventory
from deskfleet.planner.sharding import local_heads, padded_vocab


def engram_step_rows() -> list[Row]:
    """Engram rows of a step and of a chunk, and the disk's time for them."""
    tables, disk = tables_of(MODEL), SPARK.disk
    columns = tables.num_columns // 4
    chunk = chunk_reads(tables, 4, 4096, 5_900, disk)
    split = chunk_reads(tables, 4, 4096, 5_900, disk, reads_per_row=SPLIT_READS)
    rows = [
        exact(
            f"M-63 ({n} rank{'s' if n > 1 else ''})",
            "Engram rows of a step of six tokens",
            text,
            "rows",
            row_reads(tables, 6, n),
            "6 x 24 x 2 / ranks",
        )
        for n, text in {1: "288", 4: "72", 3: "96"}.items()
    ]
    rows.append(
        exact(
            "M-64",
            "staging buffer, 8,192 tokens on 4 ranks",
            "12,976,128",
            "B",
            staging_bytes(8192, columns, tables.row_bytes),
            "tokens x columns x bytes of a row",
        )
    )
    rows.append(
        rounded(
            "M-65 (one by one)",
            "72 rows one after another",
            "20.6",
            "ms",
            1000 * serial_read_s(72, disk),
            "rows / 3,500",
        )
    )
    rows += [
        rounded(
            f"M-65 ({count} rows)", "rows at depth", text, "ms", 1000 * read_s(count, disk), "rows / 112,000"
        )
        for count, text in {72: "0.64", 96: "0.86", 144: "1.29"}.items()
    ]
    return [
        *rows,
        exact(
            "M-66",
            "rows of a chunk of 4,096 on 4 ranks",
            "49,152",
            "rows",
            chunk.num_rows,
            "4,096 x 24 x 2 / 4",
        ),
        rounded("M-66 (disk)", "the disk's time for them", "0.44", "s", chunk.disk_s, "rows / 112,000"),
        rounded(
            "M-66 (chunk)", "the chunk's time at 5,900 tok/s", "0.69", "s", chunk.compute_s, "tokens / rate"
        ),
        answered(
            "M-66 (hidden)",
            "the disk is hidden",
            "yes",
            "yes" if chunk.is_hidden else "no",
            "disk against chunk",
        ),
        exact(
            "M-67",
            "reads of a row in two places",
            "2",
            "reads",
            split.disk_s / chunk.disk_s,
            "codes and scale apart",
            is_fitted=True,
        ),
    ]


def collective_rows() -> list[Row]:
    """Messages of a step and NCCL's buffers."""
    hidden, layers = published_inventory(MODEL).hidden_size, published_inventory(MODEL).num_layers
    before, after = num_connections(2, 64, 2), num_connections(2, 8, 2)
    return [
        exact(
            "M-68 (1 request)",
            "all-reduce of six rows",
            "61,440",
            "B",
            all_reduce_bytes(6, hidden),
            "rows x hidden x 2",
        ),
        exact("M-68 (16)", "all-reduce of 96 rows", "983,040", "B", all_reduce_bytes(96, hidden), "likewise"),
        exact(
            "M-69 (all-reduces)",
            "all-reduces of a step",
            "80",
            "",
            collectives_per_step(layers),
            "two a layer",
        ),
        exact(
            "M-69",
            "collectives of a step",
            "104",
            "",
            collectives_per_step(layers, num_others=COLLECTIVES_BESIDE_ALL_REDUCES),
            "24 besides, taken from this figure",
            is_fitted=True,
        ),
        exact(
            "M-70 (connections)",
            "NCCL connections",
            "512",
            "",
            before,
            "2 communicators x 64 channels x 2 peers x 2 ways: a division that fits",
            is_fitted=True,
        ),
        rounded(
            "M-70 (one)",
            "buffers of a connection",
            "9.19",
            "MiB",
            DEFAULT_BUFFERS.connection_bytes / MIB,
            "the library's own sizes",
        ),
        measured(
            "M-70",
            "NCCL buffers as it comes",
            "4,705",
            "MiB",
            nccl_buffer_bytes(before) / MIB,
            "512 x 9.1875",
            share=0.0006,
        ),
        measured(
            "M-71",
            "NCCL buffers as set",
            "139",
            "MiB",
            nccl_buffer_bytes(after, SMALL_BUFFERS) / MIB,
            "64 connections x 1.75 MiB",
            deviation_reason="all shared memory was measured, which holds more than these buffers: ours is a lower "
            "bound, 27 MiB short",
        ),
        exact(
            "M-73 (chunk)",
            "smallest chunk with images",
            "1025",
            "tokens",
            smallest_image_chunk(_image_tokens()),
            "image + 1",
        ),
        exact(
            "M-73 (window)",
            "window with an image",
            "1,152",
            "tokens",
            published_inventory(MODEL).kv.window + _image_tokens(),
            "window + image",
        ),
    ]


def _image_tokens() -> int:
    return published_inventory(MODEL).max_image_tokens


def copy_rows() -> list[Row]:
    """Second copies that engines keep, on three ranks (4 padded groups) and on four (2 groups)."""
    model = published_inventory(MODEL)
    plan = plan_of("sglang", 3)
    rules = sglang.RULES.cut_rules(plan.cluster)
    per_group = model.num_heads // model.num_groups
    padded = local_heads(model, rules, 3) // per_group
    all_layers = model.num_layers + model.num_draft_stages
    twin = _wo_a_mib(model, all_layers, padded, 1)
    net = _wo_a_mib(model, model.num_layers, padded, 1) - _wo_a_mib(model, model.num_layers, padded, 2)
    rank_rows = padded_vocab(model, rules, 3) // 3
    return [
        exact("M-85", "FP8 twin of wo_a, 3 ranks", "688", "MiB", twin, "43 layers, 4 groups a rank"),
        exact(
            "M-85 (net)",
            "twin less bf16 of the model",
            "-640",
            "MiB",
            net,
            "40 layers: drafts keep theirs; MB read as MiB",
            is_fitted=True,
        ),
        measured(
            "M-85 (4 ranks)",
            "bf16 wo_a freed",
            "722",
            "MB",
            _wo_a_mib(model, all_layers, 2, 2) * MIB / 1e6,
            "43 layers, 2 groups a rank",
        ),
        measured(
            "M-86",
            "FP8 copy of the head, 3 ranks",
            "210",
            "MiB",
            head_copy_bytes(rank_rows, model.hidden_size) / MIB,
            "a third of padded rows",
        ),
        exact(
            "M-87",
            "hidden states for drafts",
            "256",
            "MiB",
            draft_hidden_bytes(8192, published_inventory("v4-flash").hidden_size, STREAMS) / MIB,
            "8,192 tokens of V4-Flash in four streams: our reading",
            is_fitted=True,
        ),
    ]


def _wo_a_mib(model: Inventory, num_layers: int, num_groups: int, weight_bytes: int) -> float:
    width = model.num_heads // model.num_groups * model.head_dim
    return wo_a_bytes(num_layers, num_groups, model.o_lora_rank, width, weight_bytes=weight_bytes) / MIB


__all__ = ["collective_rows", "copy_rows", "engram_step_rows"]
