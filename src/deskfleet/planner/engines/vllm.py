"""vLLM 0.33, and the image with ExLlamaV3 kernels that is built on it: how they cut, what a token costs, the
utilisation rule. What a token costs is read off boot logs: the hybrid allocator pads every kind of page to one size."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar

from deskfleet.planner.budget import BudgetLine
from deskfleet.planner.cluster import GIB, Cluster
from deskfleet.planner.engine_rules import admits_utilisation, largest_utilisation, utilisation_bytes
from deskfleet.planner.engines.contract import BootPrediction, KvRate, Refusal
from deskfleet.planner.engines.stock import RECORD_BYTES, Runtime, StockRules
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.sharding import CutRules, EngramSplit
from deskfleet.planner.wishes import EngineName, KvFormat, ServingLayout

PREFILL_BYTES_AT_1M = int(5.2 * GIB)
"""Workspace of reading a prompt of 1,048,576 tokens, as published; it grows with the context that is allowed."""


class VllmRules(StockRules):
    """Stock vLLM. Experts are cut by width and padded for its kernels; Engram projections are cut too."""

    name: EngineName = "vllm"
    version = "0.33"
    title = f"vLLM {version}"
    adapter = "deskfleet-vllm"
    has_bounded_indexer = True
    # engram.py: rank r looks up columns r * n to (r + 1) * n - 1.
    engram_split: ClassVar[EngramSplit] = "runs"
    runtime = Runtime(
        context_bytes=int(0.6 * GIB),
        process_bytes=int(1.6 * GIB),
        graph_bytes=GIB,
        slack_bytes=int(0.8 * GIB),
        source="split of the 5 GiB, the low end of what a published recipe saw beside weights and KV",
    )

    def cut_rules(self, cluster: Cluster) -> CutRules:
        """On compute capability 9.0 narrow slices are padded, elsewhere there are no kernels for them."""
        is_hopper = cluster.kind.arch == "sm90"
        return CutRules(
            cuts=frozenset({"group", "expert", "vocab", "shared_expert", "engram_projection"}),
            head_rule="power of two",
            width_multiple=32 if is_hopper else 64,
            width_pad=128,
            vocab_pad=64,
            pads_draft_experts=False,
            cuts_drafts=True,
            holds_wo_a_as_bf16=True,
        )

    def kv_formats(self, inventory: Inventory, cluster: Cluster) -> tuple[KvFormat, ...]:
        """V4 on Sparks also as NVFP4, which the image of a published recipe has."""
        has_nvfp4 = inventory.architecture == "v4" and cluster.kind.arch == "sm121"
        return ("fp8", "nvfp4") if has_nvfp4 else ("fp8",)

    def needs(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> list[str]:
        """As all, and for NVFP4 records that image."""
        needs = super().needs(inventory, cluster, layout)
        if layout.kv_format == "nvfp4":
            needs.append(
                f"{self.title} has no nvfp4_ds_mla records: an image of it does, padded to fp8's 584 B; "
                "no byte is saved"
            )
        return needs

    def kv_rate(self, inventory: Inventory, layout: ServingLayout) -> KvRate:
        """V4.1: 6,779.4 B shared out over DCP ranks and 21.2 B on each. V4: 7,786 B."""
        if inventory.architecture == "v4":
            return KvRate(Fraction(7786), "as a boot of two Sparks reported it", "published")
        shared, own = Fraction(67794, 10), Fraction(212, 10)
        return KvRate(
            shared / layout.dcp_size + own, "as boots with and without DCP reported it", "published"
        )

    def window_line(self, inventory: Inventory, layout: ServingLayout) -> BudgetLine:
        """Pages of windows come from the same pool; two windows of each request are kept aside."""
        kv = inventory.kv
        layers = kv.num_window_layers + (kv.num_draft_layers if layout.num_drafts else 0)
        rows = layout.max_num_seqs * 2 * kv.window
        record = RECORD_BYTES[layout.kv_format][1]
        return BudgetLine(
            "window pool",
            "kv",
            rows * layers * record,
            "persistent",
            f"{layout.max_num_seqs} requests x 2 x {kv.window} rows x {layers} layers x {record} B",
            "raw rows of the last tokens, every layer",
        )

    def prefill_lines(self, inventory: Inventory, layout: ServingLayout) -> list[BudgetLine]:
        """Workspaces that are as long as the context that may come."""
        num_bytes = PREFILL_BYTES_AT_1M * layout.max_model_len // (1 << 20)
        return [
            BudgetLine(
                "prefill workspace",
                "workspace",
                num_bytes,
                "temporary",
                f"5.2 GiB x {layout.max_model_len:,} / 1,048,576",
                "scores and gathered keys, as long as the context",
                "published",
                "prefill",
            )
        ]

    def boot(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, lines: list[BudgetLine]
    ) -> BootPrediction | None:
        """It starts only if utilisation x total is free; a pool given in bytes is then taken as it is."""
        node = cluster.nodes[0]
        held = sum(line.num_bytes for line in lines if line.kind == "persistent" and line.group != "kv")
        pool = sum(line.num_bytes for line in lines if line.group == "kv")
        largest = largest_utilisation(node.total_bytes, node.available_bytes)
        fraction = layout.fraction or largest
        claim = utilisation_bytes(fraction, node.total_bytes)
        refusal = None
        if not admits_utilisation(fraction, node.total_bytes, node.available_bytes):
            refusal = Refusal(
                "utilisation",
                f"gpu-memory-utilization {fraction:.2f} x {node.total_bytes / GIB:.2f} GiB = {claim / GIB:.2f} GiB, "
                f"and {node.available_bytes / GIB:.2f} GiB are free: {self.title} refuses to start",
                f"take {largest:.2f} or less; the pool is given in bytes anyway",
            )
        elif held + pool > claim:
            refusal = Refusal(
                "utilisation",
                f"weights, runtime and KV of {(held + pool) / GIB:.2f} GiB exceed the {claim / GIB:.2f} GiB that "
                f"gpu-memory-utilization {fraction:.2f} allows",
                "raise it, or ask for fewer tokens",
            )
        rate = self.kv_rate(inventory, layout)
        tokens = rate.tokens(sum(line.num_bytes for line in lines if line.name == "KV pool"))
        return BootPrediction(
            line=f"GPU KV cache size: {tokens:,} tokens; "
            f"maximum concurrency for {layout.max_model_len:,} tokens per request: "
            f"{tokens / layout.max_model_len:.2f}x",
            rule=f"starts if {fraction:.2f} x {node.total_bytes / GIB:.2f} GiB = {claim / GIB:.2f} GiB are free; "
            f"kv-cache-memory-bytes {pool}",
            granted_tokens=None,
            refusal=refusal,
        )


RULES = VllmRules()

__all__ = ["PREFILL_BYTES_AT_1M", "RULES", "VllmRules"]
