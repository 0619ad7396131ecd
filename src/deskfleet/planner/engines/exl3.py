"""EXL3 checkpoints in the vLLM image that carries the ExLlamaV3 kernels: as vLLM, but for cuts and a token's price."""

from __future__ import annotations

from fractions import Fraction

from deskfleet.planner.cluster import Cluster
from deskfleet.planner.engines.contract import KvRate
from deskfleet.planner.engines.vllm import VllmRules
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.sharding import CutRules
from deskfleet.planner.wishes import EngineName, ServingLayout


class Exl3Rules(VllmRules):
    """Widths are cut in tiles of 128, unevenly where they do not divide; heads by whole groups."""

    name: EngineName = "exl3"
    title = "vLLM with ExLlamaV3 kernels"
    weight_formats = frozenset({"exl3"})
    reads_packs = False

    def cut_rules(self, cluster: Cluster) -> CutRules:
        """The fullest rank of an uneven cut counts."""
        return CutRules(
            cuts=frozenset({"group", "expert", "vocab", "shared_expert", "engram_projection"}),
            head_rule="group",
            width_multiple=1,
            width_pad=128,
            vocab_pad=64,
            pads_draft_experts=False,
            cuts_drafts=True,
            holds_wo_a_as_bf16=True,
        )

    def kv_rate(self, inventory: Inventory, layout: ServingLayout) -> KvRate:
        """Of three published prices the one that a request of 500,000 tokens showed: the others undercount it."""
        return KvRate(Fraction(4080), "1.9 GiB for 500,000 tokens, as published", "published")


RULES = Exl3Rules()

__all__ = ["RULES", "Exl3Rules"]
