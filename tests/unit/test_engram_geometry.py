"""Columns, primes, offsets and multipliers against the golden tables and the written specification."""

from __future__ import annotations

import dataclasses

import engram_golden
import numpy as np
import pytest

from deskfleet_engram import EngramGeometry, EngramSpec, GeometryError, table_rows

REAL = EngramSpec(
    layer_ids=(1, 14),
    num_embeddings=(384006168, 384016682),
    max_ngram_size=4,
    vocab_size=16000000,
    n_heads=8,
    head_dim=256,
    pad_token_id=2,
    compressed_vocab_size=99092,
)


def tiny_spec() -> EngramSpec:
    config = engram_golden.config()
    return EngramSpec(
        layer_ids=tuple(config["engram_layer_ids"]),
        num_embeddings=tuple(config["engram_num_embeddings"]),
        max_ngram_size=config["engram_max_ngram_size"],
        vocab_size=config["engram_vocab_size"],
        n_heads=config["engram_n_heads"],
        head_dim=config["engram_head_dim"],
        pad_token_id=config["engram_pad_token_id"],
        compressed_vocab_size=config["engram_compressed_vocab_size"],
    )


@pytest.mark.parametrize(("spec", "prefix"), [(REAL, ""), (tiny_spec(), "tiny.")], ids=["real", "tiny"])
def test_tables_equal_the_golden_ones(spec: EngramSpec, prefix: str) -> None:
    geometry = EngramGeometry.build(spec)
    for name in ("primes", "offsets", "multipliers"):
        golden = engram_golden.read("kernels/engram_real.safetensors", prefix + name)
        found = getattr(geometry, name)
        assert found.dtype == np.int64
        assert not found.flags.writeable
        np.testing.assert_array_equal(found, golden, err_msg=name)


def test_written_values_of_the_specification() -> None:
    geometry = EngramGeometry.build(REAL)
    assert geometry.primes[0, 0].tolist() == [
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
    ]  # fmt: skip
    assert geometry.primes[1, 2, -1] == 16000889
    assert geometry.offsets[1, -1] == 368015793
    assert geometry.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_column_rows_are_the_primes_in_column_order() -> None:
    geometry = EngramGeometry.build(REAL)
    rows = geometry.column_rows(1)
    assert len(rows) == REAL.num_columns == 24
    assert rows[0] == 16000477
    assert rows[8] == 16000667
    assert sum(rows) == 384016682
    with pytest.raises(GeometryError, match=r"position 2 is outside 0\.\.1"):
        geometry.column_rows(2)


def test_table_rows_tells_what_build_accepts() -> None:
    assert table_rows(REAL) == REAL.num_embeddings
    spec = dataclasses.replace(REAL, vocab_size=100, n_heads=3, num_embeddings=(0, 0))
    EngramGeometry.build(dataclasses.replace(spec, num_embeddings=table_rows(spec)))


def test_primes_are_primes() -> None:
    spec = dataclasses.replace(REAL, vocab_size=1, n_heads=100, layer_ids=(0,), num_embeddings=(0,))
    spec = dataclasses.replace(spec, num_embeddings=table_rows(spec))
    sieve = np.ones(2000, dtype=bool)
    sieve[:2] = False
    for number in range(2, 45):
        sieve[number * number :: number] = False
    assert EngramGeometry.build(spec).column_rows(0) == tuple(np.flatnonzero(sieve)[:300].tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_embeddings": (384006168, 384016683)}, r"layer 14: .* 384016682 rows .* says 384016683"),
        ({"vocab_size": 16000058}, r"layer 1: .* says 384006168"),
        ({"num_embeddings": (384006168,)}, r"2 engram layer ids but 1 table sizes"),
        ({"max_ngram_size": 1}, r"max_ngram_size is 1"),
        ({"n_heads": 0}, r"n_heads is 0"),
        ({"compressed_vocab_size": 0}, r"compressed_vocab_size is 0"),
        ({"layer_ids": (-1, 14)}, r"layer id -1 is negative"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        EngramGeometry.build(dataclasses.replace(REAL, **change))
