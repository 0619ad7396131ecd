"""What vLLM, SGLang and engines built on them have in common: `StockRules`. Owns lines and refusals that all share.

An engine's own file says how it cuts, what a token costs, and what its runtime takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.chunks import smallest_image_chunk
from deskfleet.planner.cluster import GIB, Cluster
from deskfleet.planner.collectives import SMALL_BUFFERS, nccl_buffer_bytes, num_connections
from deskfleet.planner.disk import staging_bytes
from deskfleet.planner.engines.contract import BootPrediction, Choices, KvRate, Refusal
from deskfleet.planner.inventory import EngramTables, Inventory
from deskfleet.planner.sharding import (
    CutRules,
    EngramShare,
    EngramSplit,
    engram_bytes,
    engram_share,
    local_heads,
    padded_width,
    weight_lines,
)
from deskfleet.planner.wishes import EngineName, EngramPlacement, KvFormat, ServingLayout

LARGEST_CHUNK = 8192
CHUNK_STEP = 256

RECORD_BYTES: dict[KvFormat, tuple[int, int]] = {"fp8": (584, 584), "fp4": (288, 528), "nvfp4": (584, 584)}
"""Bytes of a compressed entry and of a window row."""

NCCL_COMMUNICATORS, NCCL_CHANNELS = 2, 8
"""What the launcher sets; without it NCCL takes 512 connections of 9.19 MiB."""

_READER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Runtime:
    """What an engine's processes hold on one rank beside the model; `source` says who saw it."""

    context_bytes: int
    process_bytes: int
    graph_bytes: int
    slack_bytes: int
    source: str


class StockRules(ABC):
    """Rules that hold for all of them; a subclass fills in the rest."""

    name: EngineName
    title: ClassVar[str]
    version: ClassVar[str]
    runtime: ClassVar[Runtime]
    adapter: ClassVar[str]
    head_bytes: ClassVar[int] = GIB // 2
    weight_formats: ClassVar[frozenset[str]] = frozenset({"mxfp4", "fp8"})
    dcp_sizes: ClassVar[tuple[int, ...]] = (1,)
    has_bounded_indexer: ClassVar[bool] = False
    engram_split: ClassVar[EngramSplit]
    reads_packs: ClassVar[bool] = True

    @abstractmethod
    def cut_rules(self, cluster: Cluster) -> CutRules:
        """How it cuts on this kind of machine."""

    @abstractmethod
    def kv_rate(self, inventory: Inventory, layout: ServingLayout) -> KvRate:
        """What a token costs."""

    @abstractmethod
    def window_line(self, inventory: Inventory, layout: ServingLayout) -> BudgetLine:
        """The pool of raw window rows."""

    @abstractmethod
    def prefill_lines(self, inventory: Inventory, layout: ServingLayout) -> list[BudgetLine]:
        """What reading a long prompt needs beyond activations."""

    @abstractmethod
    def boot(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, lines: list[BudgetLine]
    ) -> BootPrediction | None:
        """What the engine's own rule makes of these lines."""

    def unserved(self, inventory: Inventory, cluster: Cluster) -> Refusal | None:
        """It needs an accelerator, and kernels for the experts' format."""
        if inventory.weight_format not in self.weight_formats:
            message = f"{self.title} has no kernels for {inventory.weight_format} experts"
            return Refusal("weight format", message, "choose an engine that has, or another checkpoint")
        if cluster.kind.arch == "cpu":
            message = f"{self.title} serves this model on accelerators, not on {cluster.kind.title}"
            return Refusal("device", message, "choose native, or machines with accelerators")
        return None

    def choices(self, inventory: Inventory, cluster: Cluster, tp_size: int) -> Choices:
        """Every split with kernels for it, every placement that the machine has."""
        rules = self.cut_rules(cluster)
        splits = [ep for ep in range(1, tp_size + 1) if tp_size % ep == 0]
        legal = [ep for ep in splits if _is_legal_width(inventory, rules, tp_size, ep)]
        placements: tuple[EngramPlacement, ...] = ("none",)
        if inventory.engram is not None:
            placements = ("disk", "device") if cluster.kind.is_unified else ("device", "host", "disk")
        chunks = tuple(range(LARGEST_CHUNK, CHUNK_STEP - 1, -CHUNK_STEP))
        return Choices(
            ep_sizes=tuple(legal or splits[:1]),
            dcp_sizes=tuple(dcp for dcp in self.dcp_sizes if tp_size % dcp == 0),
            engram=placements,
            kv_formats=self.kv_formats(inventory, cluster),
            chunks=chunks,
            has_bounded_indexer=self.has_bounded_indexer,
        )

    def refusals(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> list[Refusal]:
        """Why this layout cannot be, memory apart."""
        return [
            refusal
            for refusal in (
                self._width_refusal(inventory, cluster, layout),
                self._placement_refusal(inventory, cluster, layout),
                self._kv_refusal(inventory, cluster, layout),
                self._dcp_refusal(layout),
                _image_refusal(inventory, layout),
                _draft_refusal(inventory, layout),
            )
            if refusal is not None
        ]

    def kv_formats(self, inventory: Inventory, cluster: Cluster) -> tuple[KvFormat, ...]:
        """Formats of KV that somebody has kernels for, the engine's own first."""
        return ("fp8",)

    def needs(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> list[str]:
        """What this layout needs beyond the engine as it is released."""
        needs = []
        heads = local_heads(inventory, self.cut_rules(cluster), layout.tp_size) * layout.tp_size
        if heads != inventory.num_heads:
            needs.append(
                f"{self.title} does not pad heads {inventory.num_heads} -> {heads}: a patch of it does"
            )
        if layout.engram == "disk":
            needs.append(f"{self.adapter}, the adapter that reads Engram rows from disk")
        return needs

    def lines(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, rank: int
    ) -> list[BudgetLine]:
        """Every byte of one rank but what its system holds."""
        rules = self.cut_rules(cluster)
        rate = self.kv_rate(inventory, layout)
        pool = BudgetLine(
            "KV pool",
            "kv",
            rate.pool_bytes(layout.kv_tokens),
            "persistent",
            f"{layout.kv_tokens:,} tokens x {float(rate.bytes_per_token):,.2f} B ({rate.formula})",
            "compressed KV and index keys of every token in flight",
            rate.basis,
        )
        return [
            *weight_lines(inventory, rules, layout),
            *_engram_lines(inventory, cluster, layout, self.engram_split, rank),
            pool,
            self.window_line(inventory, layout),
            *self._runtime_lines(cluster, layout, rank),
            *_activation_lines(inventory, rules, layout),
            *self.prefill_lines(inventory, layout),
            *_loading_lines(cluster, later_bytes=pool.num_bytes + self.runtime.graph_bytes),
        ]

    def _runtime_lines(self, cluster: Cluster, layout: ServingLayout, rank: int) -> list[BudgetLine]:
        def line(name: str, num_bytes: int, formula: str, reason: str) -> BudgetLine:
            return BudgetLine(name, "runtime", num_bytes, "persistent", formula, reason, "published")

        runtime, source = self.runtime, self.runtime.source
        lines = [
            line("accelerator context", runtime.context_bytes, source, "driver and kernels of one process"),
            line("graph pools", runtime.graph_bytes, source, "buffers of captured decode graphs"),
            line("allocator slack", runtime.slack_bytes, source, "freed blocks that fit nothing else"),
        ]
        if cluster.kind.is_unified:
            text = "interpreter, libraries, host buffers: the same memory here"
            lines.append(line("engine processes", runtime.process_bytes, source, text))
        if cluster.kind.is_unified and rank == 0:
            text = "tokenizer, HTTP server, gateway and file export live on the first node"
            head = BudgetLine(
                "head's other processes", "runtime", self.head_bytes, "persistent", "a guess", text, "assumed"
            )
            lines.append(head)
        if layout.tp_size > 1:
            count = num_connections(NCCL_COMMUNICATORS, NCCL_CHANNELS, min(2, layout.tp_size - 1))
            lines.append(
                BudgetLine(
                    "collective buffers",
                    "runtime",
                    nccl_buffer_bytes(count, SMALL_BUFFERS),
                    "persistent",
                    f"{count} connections x {SMALL_BUFFERS.connection_bytes / (1 << 20):.2f} MiB, as we set them",
                    "pinned by NCCL for its channels, shown as shared memory",
                )
            )
        return lines

    def _width_refusal(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> Refusal | None:
        rules = self.cut_rules(cluster)
        if layout.tp_size % layout.ep_size:
            return Refusal(
                "expert split",
                f"ep_size {layout.ep_size} does not divide tp_size {layout.tp_size}",
                "choose a divisor",
            )
        if _is_legal_width(inventory, rules, layout.tp_size, layout.ep_size):
            return None
        width = layout.expert_width(inventory.expert_width)
        legal = [
            ep
            for ep in range(1, layout.tp_size + 1)
            if layout.tp_size % ep == 0 and _is_legal_width(inventory, rules, layout.tp_size, ep)
        ]
        hint = (
            f"ep_size {legal[0]} gives width {inventory.expert_width * legal[0] // layout.tp_size}"
            if legal
            else (
                f"a slice must be a multiple of {rules.width_multiple}: choose ranks that give one, or another engine"
            )
        )
        return Refusal(
            "expert width",
            f"tp_size {layout.tp_size} with ep_size {layout.ep_size} cuts experts {inventory.expert_width} wide into "
            f"{width}, which is no multiple of {rules.width_multiple}: there is no kernel for it",
            hint,
        )

    def _placement_refusal(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout
    ) -> Refusal | None:
        tables = inventory.engram
        if (tables is None) != (layout.engram == "none"):
            return Refusal(
                "Engram",
                f"Engram placement {layout.engram!r} for a model {'without' if tables is None else 'with'} tables",
                "leave the placement to the planner",
            )
        if layout.engram == "host" and cluster.kind.is_unified:
            return Refusal(
                "Engram",
                "host memory is accelerator memory on this machine: moving tables there frees nothing",
                "read them from disk",
            )
        held = engram_bytes(inventory, self.engram_split, layout.tp_size, 0)
        if layout.engram == "host" and held > cluster.kind.host_bytes:
            return Refusal(
                "Engram",
                f"pinned tables take {held / GIB:.1f} GiB for each rank, and the host has "
                f"{cluster.kind.host_bytes / GIB:.1f} GiB for each device",
                "read them from disk",
            )
        if tables is not None and tables.format == "nvfp4" and layout.engram in ("device", "host"):
            return Refusal(
                "Engram",
                f"{self.title} cannot hold NVFP4 tables in memory: it knows only FP8 rows",
                "read them from disk",
            )
        return None

    def _kv_refusal(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> Refusal | None:
        if layout.kv_format in self.kv_formats(inventory, cluster):
            return None
        return Refusal(
            "KV format",
            f"{self.title} has no kernels for {layout.kv_format} KV on {cluster.kind.arch}",
            "use fp8",
        )

    def _dcp_refusal(self, layout: ServingLayout) -> Refusal | None:
        if layout.dcp_size in self.dcp_sizes and layout.tp_size % layout.dcp_size == 0:
            return None
        return Refusal(
            "context parallel",
            f"dcp_size {layout.dcp_size} with tp_size {layout.tp_size}: {self.title} "
            f"serves this model with {', '.join(map(str, self.dcp_sizes))}",
            "choose 1",
        )


def _is_legal_width(inventory: Inventory, rules: CutRules, tp_size: int, ep_size: int) -> bool:
    parts = tp_size // ep_size
    return inventory.expert_width % parts == 0 and inventory.expert_width // parts % rules.width_multiple == 0


def _image_refusal(inventory: Inventory, layout: ServingLayout) -> Refusal | None:
    if not layout.has_images or not inventory.max_image_tokens:
        return None
    needed = smallest_image_chunk(inventory.max_image_tokens)
    if layout.chunk_tokens >= needed:
        return None
    return Refusal(
        "images",
        f"a chunk of {layout.chunk_tokens} tokens cannot hold an image of {inventory.max_image_tokens} and its end",
        f"take chunks of {needed} or more, or serve without images",
    )


def _draft_refusal(inventory: Inventory, layout: ServingLayout) -> Refusal | None:
    if not layout.num_drafts or layout.num_drafts <= inventory.draft_block:
        return None
    return Refusal(
        "speculation",
        f"{layout.num_drafts} drafts of a checkpoint whose block is {inventory.draft_block}",
        f"take {inventory.draft_block} or fewer" if inventory.draft_block else "turn speculation off",
    )


def _engram_lines(
    inventory: Inventory, cluster: Cluster, layout: ServingLayout, split: EngramSplit, rank: int
) -> list[BudgetLine]:
    tables = inventory.engram
    if tables is None:
        return []
    share = engram_share(tables, split, layout.tp_size, rank)
    if layout.engram == "device" or (layout.engram == "host" and cluster.kind.is_unified):
        held = share.num_rows * tables.row_bytes
        text = _engram_text(tables, share)
        return [BudgetLine("Engram tables", "engram", held, "persistent", text, "every row may be asked for")]
    staging = len(tables.rows) * staging_bytes(layout.chunk_tokens, share.num_columns, tables.row_bytes)
    lines = [
        BudgetLine(
            "Engram staging",
            "engram",
            staging,
            "persistent",
            f"{layout.chunk_tokens} tokens x {share.num_columns} columns x {tables.row_bytes} B "
            f"x {len(tables.rows)} tables",
            "rows of one chunk, between the tables and the model",
        )
    ]
    if layout.engram == "disk":
        text = "aligned buffers and queues; rows are not kept, because text hardly repeats them"
        lines.append(
            BudgetLine("Engram reader", "engram", _READER_BYTES, "persistent", "at most", text, "assumed")
        )
    return lines


def _engram_text(tables: EngramTables, share: EngramShare) -> str:
    if share.is_by_row:
        return f"{share.num_rows:,} of {sum(tables.rows):,} rows, equal ranges of each table, x {tables.row_bytes} B"
    columns = f"{share.num_columns} of {tables.num_columns} columns of {len(tables.rows)} tables"
    return f"{columns} x {tables.row_bytes} B a row"


def _activation_lines(inventory: Inventory, rules: CutRules, layout: ServingLayout) -> list[BudgetLine]:
    """What one step holds at its widest. An estimate from shapes: engines reuse and fuse differently."""
    hidden, heads = inventory.hidden_size, local_heads(inventory, rules, layout.tp_size)
    width = padded_width(inventory, rules, layout)
    per_token = 2 * (
        3 * STREAMS * hidden  # residual streams: before, after, mixed
        + 2 * heads * inventory.head_dim  # queries and attention's output
        + inventory.num_chosen_experts * (3 * width + hidden)  # gate, up, their product; outputs to combine
        + 4 * hidden  # sub-layer input and output, and the sum over ranks in float32
    )
    rows = layout.max_num_seqs * (layout.num_drafts + 1)
    logits = 3 * rows * inventory.vocab_size * 4
    return [
        BudgetLine(
            "activations",
            "workspace",
            layout.chunk_tokens * per_token,
            "temporary",
            f"{layout.chunk_tokens} tokens x {per_token:,} B",
            "the widest layer of one prefill chunk",
            "assumed",
            "prefill",
        ),
        BudgetLine(
            "activations of decode",
            "workspace",
            rows * per_token,
            "temporary",
            f"{rows} rows x {per_token:,} B",
            "the widest layer of one decode step",
            "assumed",
            "decode",
        ),
        BudgetLine(
            "logits",
            "workspace",
            logits,
            "temporary",
            f"3 x {rows} rows x {inventory.vocab_size:,} x 4 B",
            "logits, probabilities and a sorted copy",
            "assumed",
            "decode",
        ),
    ]


def _loading_lines(cluster: Cluster, *, later_bytes: int) -> list[BudgetLine]:
    num_bytes = max(0, LOADING_CACHE_BYTES - later_bytes)
    if not cluster.kind.is_unified or not num_bytes:
        return []
    return [
        BudgetLine(
            "page cache",
            "workspace",
            num_bytes,
            "temporary",
            "at most 4 GiB when dropped behind, less the pool and the graphs, which come after loading",
            "pages of shards just read; the driver allocates from free memory, not from these",
            "published",
            "load",
        )
    ]


LOADING_CACHE_BYTES = 4 * GIB

STREAMS = 4
"""Residual streams of hyper-connections, the same in both models."""

__all__ = ["CHUNK_STEP", "LARGEST_CHUNK", "RECORD_BYTES", "Runtime", "StockRules"]
