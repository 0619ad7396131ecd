"""How much of a prompt runs at once, and the memory that the sparse indexer takes for it.

Owns the indexer's transient, its bounded form, and the rules by which chunks shrink as a prompt grows. Knows no engine
and no machine: budgets are given. A pair is one query of the chunk with one key of the prefix (the chunk's own tokens
included), so a chunk of T tokens over L keys makes T * L pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from deskfleet.errors import ConfigError, DoesNotFit
from deskfleet.planner.checks import at_least

PAIR_PARTS: Mapping[str, int] = MappingProxyType({"logits": 4, "candidate copy": 4, "mask": 1, "slack": 5})
"""Bytes of a pair in an indexer that scores a whole chunk at once. The first three follow from dtypes; the slack makes
up the published 14 bytes, which two boots bear out with 14.5 and 12.2."""

PAIR_BYTES = sum(PAIR_PARTS.values())

UPSTREAM_PAIR_BYTES = 6
"""What upstream's own report counts for a pair: logits and two bytes of masks, no candidate copy and no slack."""

PUBLISHED_PAIR_LIMIT = 200_000_000
"""Pairs of one chunk that a published recipe for three DGX Sparks allows: 2.8 GB."""

INDEX_BYTES = 4
"""One chosen position, int32."""


def indexer_bytes(
    chunk_tokens: int, num_keys: int, *, pair_bytes: int = PAIR_BYTES, copy_cap_bytes: int | None = None
) -> int:
    """Peak bytes of an indexer that scores a whole chunk at once: `pair_bytes` * chunk * keys.

    Published (M-74): 15.03 GB for 1,024 tokens over 1,048,576 keys, 60.13 GB for 4,096. `num_keys` counts entries: for
    a source of compression ratio r, a prefix of L tokens has L // r. With `copy_cap_bytes` the candidate copy is made
    piece by piece within that many bytes (M-78). Raises ConfigError for negative sizes.
    """
    at_least(0, chunk_tokens=chunk_tokens, num_keys=num_keys, pair_bytes=pair_bytes)
    pairs = chunk_tokens * num_keys
    if copy_cap_bytes is None:
        return pair_bytes * pairs
    copy_bytes = PAIR_PARTS["candidate copy"]
    return (pair_bytes - copy_bytes) * pairs + min(copy_bytes * pairs, copy_cap_bytes)


def bounded_indexer_bytes(
    chunk_tokens: int,
    num_keys: int,
    budget_bytes: int,
    *,
    top_k: int = 512,
    pair_bytes: int = PAIR_BYTES,
) -> int:
    """Peak bytes of an indexer that scores a few rows of the chunk at a time, as many as `budget_bytes` hold.

    The budget or what the whole chunk needs, at least one row of `pair_bytes` a key, and the chosen positions of the
    whole chunk, `top_k` int32 a row. The peak is that of the whole prompt up to `num_keys`: at the end whole rows may
    fill less of the budget than they did before. Rows are independent, so the result is that of the unbounded form.
    Raises ConfigError for sizes below 1.
    """
    at_least(1, chunk_tokens=chunk_tokens, num_keys=num_keys, budget_bytes=budget_bytes)
    row_bytes = pair_bytes * num_keys
    scores_bytes = max(row_bytes, min(chunk_tokens * row_bytes, budget_bytes))
    return scores_bytes + chunk_tokens * min(top_k, num_keys) * INDEX_BYTES


def smallest_image_chunk(max_image_tokens: int) -> int:
    """Tokens that a chunk must take when images are served: the largest image whole, and one more (M-73: 1,025).

    Raises ConfigError.
    """
    at_least(1, max_image_tokens=max_image_tokens)
    return max_image_tokens + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """Which chunk may run over how many keys: no more than `pair_limit` pairs, in sizes the engine is tuned for.

    `multiples` of `granularity` is the rule taken here (M-77). It is the published formula, clamp(floor256(2e8 / L),
    256, 2048), and obeys the same limit as the published table of powers of two (`doublings`), but fills it: between
    the table's steps chunks are up to 1.75 times as large, so a long prompt reads the weights less often, and the
    transient keeps about one size from chunk to chunk, which spares an allocator that cannot join freed blocks. The
    formula's lower clamp is not taken: a chunk of 256 over more than limit / 256 keys breaks the limit.

    `min_chunk` is the smallest size worth running, or `smallest_image_chunk`; it is rounded up to a legal size. Raises
    ConfigError when no legal size lies between `min_chunk` and `max_chunk`.
    """

    pair_limit: int
    max_chunk: int = 2048
    min_chunk: int = 256
    granularity: int = 256
    steps: Literal["multiples", "doublings"] = "multiples"

    def __post_init__(self) -> None:
        at_least(
            1,
            pair_limit=self.pair_limit,
            max_chunk=self.max_chunk,
            min_chunk=self.min_chunk,
            granularity=self.granularity,
        )
        if not self.sizes:
            raise ConfigError(
                f"no chunk in {self.steps} of {self.granularity} from {self.min_chunk} to {self.max_chunk} tokens",
                hint="raise the largest chunk, or serve without images",
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Legal chunks in tokens, ascending."""
        most = self.max_chunk // self.granularity
        if self.steps == "multiples":
            factors = list(range(1, most + 1))
        else:
            factors = [1 << power for power in range(most.bit_length())]
        return tuple(size for factor in factors if (size := factor * self.granularity) >= self.min_chunk)

    @property
    def largest_context(self) -> int:
        """Tokens of the longest prompt that is never over the limit, with the smallest chunk at its end."""
        return self.pair_limit // self.sizes[0]

    def chunk_for(self, num_keys: int) -> int:
        """The largest legal chunk over `num_keys` keys, 0 when even the smallest breaks the limit."""
        return max((size for size in self.sizes if size * num_keys <= self.pair_limit), default=0)

    def chunk_from(self, prefix: int, num_left: int) -> int:
        """The chunk that starts after `prefix` tokens with `num_left` to go; 0 when none keeps the limit.

        Its keys are the prefix and itself, so the limit holds at the chunk's end.
        """
        takes = (min(size, num_left) for size in self.sizes)
        return max((take for take in takes if take * (prefix + take) <= self.pair_limit), default=0)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """`num_chunks` chunks of `chunk_tokens`, one after another, the first after `from_prefix` tokens."""

    from_prefix: int
    chunk_tokens: int
    num_chunks: int


def chunk_schedule(num_tokens: int, rule: ChunkRule) -> tuple[ChunkRun, ...]:
    """Return the chunks of a prompt of `num_tokens` in order, equal ones together; they tile it exactly.

    The last one takes what is left. Raises ConfigError for less than one token, DoesNotFit when the prompt is longer
    than the limit allows.
    """
    at_least(1, num_tokens=num_tokens)
    runs: list[ChunkRun] = []
    prefix = 0
    while prefix < num_tokens:
        chunk = rule.chunk_from(prefix, num_tokens - prefix)
        if not chunk:
            raise _too_long(num_tokens, prefix, rule)
        if runs and runs[-1].chunk_tokens == chunk:
            runs[-1] = ChunkRun(runs[-1].from_prefix, chunk, runs[-1].num_chunks + 1)
        else:
            runs.append(ChunkRun(prefix, chunk, 1))
        prefix += chunk
    return tuple(runs)


def _too_long(num_tokens: int, prefix: int, rule: ChunkRule) -> DoesNotFit:
    chunk = rule.sizes[0]
    return DoesNotFit(
        f"a prompt of {num_tokens:,} tokens: after {prefix:,} of them the smallest chunk of {chunk:,} makes "
        f"{chunk * (prefix + chunk):,} pairs of {rule.pair_limit:,}",
        hint=f"ask for at most {rule.largest_context:,} tokens, or bound the indexer",
    )


def pair_limit(budget_bytes: int, *, pair_bytes: int = PAIR_BYTES) -> int:
    """Pairs that `budget_bytes` hold in an indexer that scores a whole chunk at once."""
    at_least(1, pair_bytes=pair_bytes)
    return budget_bytes // pair_bytes


__all__ = [
    "INDEX_BYTES",
    "PAIR_BYTES",
    "PAIR_PARTS",
    "PUBLISHED_PAIR_LIMIT",
    "UPSTREAM_PAIR_BYTES",
    "ChunkRule",
    "ChunkRun",
    "bounded_indexer_bytes",
    "chunk_schedule",
    "indexer_bytes",
    "pair_limit",
    "smallest_image_chunk",
]
