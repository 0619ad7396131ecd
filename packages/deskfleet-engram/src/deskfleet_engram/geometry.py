"""Shape of the Engram tables: columns, primes, offsets and hash multipliers, from the configuration alone.

A table of one layer is a stack of columns, one per (n-gram size, head); a column has a prime number of rows.
Knows nothing of tokens, files or ranks. Terms are those of the published configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deskfleet_engram.errors import GeometryError

_INT64_MAX = 2**63 - 1
_SEED_STRIDE = 10007  # the multipliers of layer L come from PCG64 seeded with 10007 * L
# These witnesses decide primality without error for every n below 3.3e24 (Sorenson and Webster, 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


@dataclass(frozen=True, slots=True)
class EngramSpec:
    """What a checkpoint's configuration says about its Engram tables.

    `vocab_size` is `engram_vocab_size` (the lower bound of every column's rows), `num_embeddings` the rows of
    each layer's table, `compressed_vocab_size` the number of ids the token map yields.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def num_columns(self) -> int:
        """Rows looked up per token and layer: one per n-gram size (2 and up) and head."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclass(frozen=True, slots=True, eq=False)
class EngramGeometry:
    """The derived numbers of all Engram layers; L is the number of Engram layers. Arrays are read-only.

    `primes` int64 [L, max_ngram_size - 1, n_heads]: rows per column.
    `offsets` int64 [L, num_columns]: first row of each column, columns ordered by n-gram size, then head.
    `multipliers` int64 [L, max_ngram_size]: odd hash factors, newest token first.
    """

    spec: EngramSpec
    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    multipliers: NDArray[np.int64]

    @classmethod
    def build(cls, spec: EngramSpec) -> EngramGeometry:
        """Derive primes, offsets and multipliers (specification §7.2).

        Raises GeometryError when a size is not positive, when the lists differ in length, or when the primes
        of a layer do not sum to the rows that the configuration gives its table.
        """
        _check_sizes(spec)
        num_layers = len(spec.layer_ids)
        walk = _primes_from(spec.vocab_size)
        count = num_layers * spec.num_columns
        rows = np.array([next(walk) for _ in range(count)], dtype=np.int64)
        columns = rows.reshape(num_layers, spec.num_columns)
        for layer_id, expected, found in zip(
            spec.layer_ids, spec.num_embeddings, columns.sum(axis=1).tolist(), strict=True
        ):
            if found != expected:
                raise GeometryError(
                    f"engram layer {layer_id}: its {spec.num_columns} columns have {found} rows together, "
                    f"but engram_num_embeddings says {expected}"
                )
        offsets = np.cumsum(columns, axis=1) - columns
        multipliers = np.stack([_multipliers(spec, layer_id) for layer_id in spec.layer_ids])
        primes = columns.reshape(num_layers, spec.max_ngram_size - 1, spec.n_heads)
        for array in (primes, offsets, multipliers):
            array.flags.writeable = False
        return cls(spec=spec, primes=primes, offsets=offsets, multipliers=multipliers)

    def column_rows(self, layer_position: int) -> tuple[int, ...]:
        """Return the rows of each column of the `layer_position`-th Engram layer, in column order.

        Raises GeometryError when there is no such layer.
        """
        num_layers = len(self.spec.layer_ids)
        if not 0 <= layer_position < num_layers:
            raise GeometryError(f"engram layer position {layer_position} is outside 0..{num_layers - 1}")
        return tuple(int(rows) for rows in self.primes[layer_position].reshape(-1))


def table_rows(spec: EngramSpec) -> tuple[int, ...]:
    """Return the rows each layer's table must have; `spec.num_embeddings` is not looked at.

    For whoever writes a configuration: these are the values that `EngramGeometry.build` will accept.
    """
    walk = _primes_from(spec.vocab_size)
    return tuple(sum(next(walk) for _ in range(spec.num_columns)) for _ in spec.layer_ids)


def _check_sizes(spec: EngramSpec) -> None:
    if len(spec.layer_ids) != len(spec.num_embeddings) or not spec.layer_ids:
        raise GeometryError(
            f"{len(spec.layer_ids)} engram layer ids but {len(spec.num_embeddings)} table sizes; "
            "one size per layer is needed, and at least one layer"
        )
    if spec.max_ngram_size < 2:
        raise GeometryError(f"engram_max_ngram_size is {spec.max_ngram_size}; it must be at least 2")
    for name in ("vocab_size", "n_heads", "head_dim", "compressed_vocab_size"):
        value = getattr(spec, name)
        if value < 1:
            raise GeometryError(f"engram {name} is {value}; it must be at least 1")
    for layer_id in spec.layer_ids:
        if layer_id < 0:
            raise GeometryError(f"engram layer id {layer_id} is negative")


def _multipliers(spec: EngramSpec, layer_id: int) -> NDArray[np.int64]:
    # The bound keeps compressed_id * multiplier inside int64, so the hash never wraps.
    bound = max(1, (_INT64_MAX // spec.compressed_vocab_size) // 2)
    drawn = np.random.default_rng(_SEED_STRIDE * layer_id).integers(
        0, bound, size=spec.max_ngram_size, dtype=np.int64
    )
    return 2 * drawn + 1


def _primes_from(lowest: int) -> Iterator[int]:
    """Yield the primes >= `lowest`, ascending.

    The specification restarts the search for every (layer, n-gram size) and skips primes already used; since
    all earlier columns took consecutive primes, that is one ascending walk.
    """
    candidate = lowest
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd //= 2
        twos += 1
    return all(_passes(number, witness, odd, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    """Miller-Rabin: does `witness` fail to prove `number` composite?"""
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


__all__ = ["EngramGeometry", "EngramSpec", "table_rows"]
