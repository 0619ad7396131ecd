"""A fact of a boot, and the sheet of all of them. Owns which facts there are, which are amounts, which must be the same
on every rank, and how much less than asked is a clamp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Value = int | float | str | tuple[int, ...]
Side = Literal["asked", "granted"]
Kind = Literal["tokens", "count", "bytes", "seconds", "name", "sizes"]


@dataclass(frozen=True, slots=True)
class FactSpec:
    """One quantity. `same_on_ranks`: ranks that differ build different shapes, or a pool as small as the smallest.
    `least`: a grant may be so much of what was asked, for rounding to whole pages; None where less is no harm."""

    meaning: str
    kind: Kind
    same_on_ranks: bool = False
    least: float | None = None


SPECS: dict[str, FactSpec] = {
    "kv_tokens": FactSpec("tokens in the KV pool", "tokens", same_on_ranks=True, least=0.995),
    "kv_bytes": FactSpec("bytes of the KV pool", "bytes", same_on_ranks=True, least=0.99),
    "max_model_len": FactSpec("longest prompt plus answer", "tokens", same_on_ranks=True, least=1.0),
    "max_num_seqs": FactSpec("requests at the same time", "count", same_on_ranks=True, least=1.0),
    "max_num_batched_tokens": FactSpec("tokens of a step", "tokens", same_on_ranks=True, least=1.0),
    "tp_size": FactSpec("ranks of tensor parallelism", "count", same_on_ranks=True, least=1.0),
    "speculation": FactSpec("how tokens are drafted", "name", same_on_ranks=True),
    "num_drafts": FactSpec("tokens drafted ahead", "count", same_on_ranks=True, least=1.0),
    "moe_backend": FactSpec("kernels of the experts", "name", same_on_ranks=True),
    "linear_backend": FactSpec("kernels of dense products", "name", same_on_ranks=True),
    "attention_backend": FactSpec("kernels of attention", "name", same_on_ranks=True),
    "kv_cache_dtype": FactSpec("numbers of the KV cache", "name", same_on_ranks=True),
    "graph_sizes": FactSpec("batch sizes with a captured graph", "sizes", same_on_ranks=True),
    "graph_bytes": FactSpec("memory of captured graphs", "bytes"),
    "weight_bytes": FactSpec("weights on the device", "bytes"),
    "available_bytes": FactSpec("memory left after loading", "bytes"),
    "load_s": FactSpec("seconds of loading", "seconds"),
    "engram_rows": FactSpec("Engram rows of this rank", "name"),
    "process_bytes": FactSpec("resident memory of the rank", "bytes"),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing a line said. `rank` None is of all ranks; `line` is where it stands."""

    key: str
    side: Side
    value: Value
    rank: int | None
    line: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line that matters without being a fact: a warning of the engine that is easily missed."""

    text: str
    rank: int | None
    line: str


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that is not as it should be. `kind` is clamped, replaced, ranks differ, missing, or warned."""

    kind: Literal["clamped", "replaced", "ranks differ", "missing", "warned"]
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class FactRow:
    """A quantity: asked for, and granted by rank. Rank None are those that say it once for all."""

    key: str
    asked: Value | None
    granted: dict[int | None, Value]


@dataclass(frozen=True, slots=True)
class FactSheet:
    """All of a boot. `engine` is whose logs they are."""

    engine: str
    rows: tuple[FactRow, ...]
    flags: tuple[Flag, ...]

    def row(self, key: str) -> FactRow | None:
        """Return a quantity's row, None where no line said anything of it."""
        return next((row for row in self.rows if row.key == key), None)


__all__ = ["SPECS", "Fact", "FactRow", "FactSheet", "FactSpec", "Flag", "Kind", "Note", "Side", "Value"]
