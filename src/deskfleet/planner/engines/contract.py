"""What the planner asks of an engine: `EngineRules`. Owns the seam; each engine's file answers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from deskfleet.planner.budget import Basis, BudgetLine
from deskfleet.planner.cluster import Cluster
from deskfleet.planner.inventory import Inventory
from deskfleet.planner.sharding import EngramSplit
from deskfleet.planner.wishes import EngineName, EngramPlacement, KvFormat, ServingLayout


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a layout cannot be served, whatever memory there is; `hint` is what to do instead."""

    rule: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class KvRate:
    """What one token of context costs each rank in the pool that grows with context."""

    bytes_per_token: Fraction
    formula: str
    basis: Basis

    def pool_bytes(self, num_tokens: int) -> int:
        """Bytes of a pool for `num_tokens`."""
        return -(-num_tokens * self.bytes_per_token.numerator // self.bytes_per_token.denominator)

    def tokens(self, num_bytes: int) -> int:
        """Tokens that fit into `num_bytes`, never less than 0."""
        return max(0, num_bytes * self.bytes_per_token.denominator // self.bytes_per_token.numerator)


@dataclass(frozen=True, slots=True)
class BootPrediction:
    """What the engine's own budget rule will say at start. `granted_tokens` None: the pool is taken as asked.

    `refusal` says why the engine would not start or would not grant the pool that was asked for.
    """

    line: str
    rule: str
    granted_tokens: int | None
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Choices:
    """What an engine offers for a model on a kind of machine, best first."""

    ep_sizes: tuple[int, ...]
    dcp_sizes: tuple[int, ...]
    engram: tuple[EngramPlacement, ...]
    kv_formats: tuple[KvFormat, ...]
    chunks: tuple[int, ...]
    has_bounded_indexer: bool


class EngineRules(Protocol):
    """One engine, at the version that its rules were written for."""

    @property
    def name(self) -> EngineName:
        """As users select it."""

    @property
    def version(self) -> str:
        """The version that the rules were written for; corrections from boots belong to it."""

    @property
    def title(self) -> str:
        """Name and version."""

    @property
    def engram_split(self) -> EngramSplit:
        """How ranks share out Engram tables."""

    @property
    def reads_packs(self) -> bool:
        """Whether rows on disk come from packs; else from the published shards."""

    def unserved(self, inventory: Inventory, cluster: Cluster) -> Refusal | None:
        """Why no layout at all can be: another architecture, no kernels for this machine. None when some may."""

    def choices(self, inventory: Inventory, cluster: Cluster, tp_size: int) -> Choices:
        """What may be chosen."""

    def refusals(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> list[Refusal]:
        """Why this layout cannot be, memory apart."""

    def needs(self, inventory: Inventory, cluster: Cluster, layout: ServingLayout) -> list[str]:
        """What this layout needs beyond the engine as it is released."""

    def kv_rate(self, inventory: Inventory, layout: ServingLayout) -> KvRate:
        """What a token costs."""

    def lines(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, rank: int
    ) -> list[BudgetLine]:
        """Every byte of one rank but what its system holds."""

    def boot(
        self, inventory: Inventory, cluster: Cluster, layout: ServingLayout, lines: list[BudgetLine]
    ) -> BootPrediction | None:
        """What the engine's own rule makes of these lines; None when it has no rule."""


__all__ = ["BootPrediction", "Choices", "EngineRules", "KvRate", "Refusal"]
