"""Row ids against the golden ones, and independence of how a sequence is cut."""

from __future__ import annotations

import itertools

import engram_golden
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_engram_geometry import REAL, tiny_spec
from tokenizers import Tokenizer

from deskfleet_engram import DEAD, EngramGeometry, HistoryError, compressed_token_map, hash_ids

KERNELS = "kernels/engram_real.safetensors"
REAL_GEOMETRY = EngramGeometry.build(REAL)
TINY_GEOMETRY = EngramGeometry.build(tiny_spec())


def whole(geometry: EngramGeometry, ids: NDArray[np.int64], pad_id: int) -> NDArray[np.int64]:
    return hash_ids(geometry, ids, start=0, position=0, pad_id=pad_id)


@pytest.mark.parametrize("masked", [False, True])
def test_real_configuration_is_exact(masked: bool) -> None:
    ids = engram_golden.read(KERNELS, "compressed_ids")
    if masked:
        ids = np.where(engram_golden.read(KERNELS, "token_mask") == 0, DEAD, ids)
        assert (ids == DEAD).any()
    pad_id = int(engram_golden.read(KERNELS, "pad_compressed_id")[0])
    golden = engram_golden.read(KERNELS, "hash_ids_masked" if masked else "hash_ids")
    np.testing.assert_array_equal(whole(REAL_GEOMETRY, ids, pad_id), golden)


def test_written_vector_of_the_specification() -> None:
    found = whole(REAL_GEOMETRY, np.array([400, 300, 200, 100], dtype=np.int64), 2)[-1]
    assert found[0].tolist() == [
        12013311, 19589167, 45006560, 56352444, 73396926, 95085389, 97930840, 125571061,
        139496094, 154390218, 168372840, 187320647, 207399159, 217467923, 232607951, 249747568,
        268309477, 274083286, 289509718, 313233695, 334386990, 342122088, 359270622, 380048014,
    ]  # fmt: skip
    assert found[1].tolist() == [
        1915295, 31448111, 41304315, 58552781, 67180214, 81174207, 111213027, 126297219,
        135466211, 144663466, 175046693, 177447282, 193857560, 212688673, 238785285, 252830242,
        262487874, 282431780, 301551198, 318902422, 323925055, 348385914, 364865570, 383274204,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["intermediates_prefill40", "image"])
def test_ids_inside_the_reference_model(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(engram_golden.GOLDEN / "model" / "tokenizer.json"))
    compressed = compressed_token_map(tokenizer)
    file = f"golden/{name}.safetensors"
    ids = compressed[engram_golden.read(file, "input_ids")].astype(np.int64)
    if name == "image":
        ids[engram_golden.read(file, "token_types") >= 0] = DEAD
        assert (ids == DEAD).sum() > 10
    golden = engram_golden.read(file, "engram_hash_ids")
    np.testing.assert_array_equal(whole(TINY_GEOMETRY, ids, int(compressed[2])), golden)


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 408), min_size=1, max_size=40),
    cuts=st.sets(st.integers(1, 39)),
    data=st.data(),
)
def test_any_split_gives_what_one_pass_gives(ids: list[int], cuts: set[int], data: st.DataObject) -> None:
    sequence = np.array(ids, dtype=np.int64)
    expected = whole(TINY_GEOMETRY, sequence, 2)
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    parts = []
    for begin, end in itertools.pairwise(edges):
        history = min(begin, data.draw(st.integers(3, 6)))
        parts.append(
            hash_ids(
                TINY_GEOMETRY,
                sequence[begin - history : end],
                start=history,
                position=begin - history,
                pad_id=2,
            )
        )
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_rows_lie_inside_their_columns() -> None:
    ids = np.random.default_rng(5).integers(-1, REAL.compressed_vocab_size, size=500)
    rows = whole(REAL_GEOMETRY, ids, 2)
    ends = REAL_GEOMETRY.offsets + REAL_GEOMETRY.primes.reshape(2, 24)
    assert ((rows >= REAL_GEOMETRY.offsets) & (rows < ends)).all()


def test_the_start_of_a_stretch_is_not_the_start_of_the_sequence() -> None:
    """The same ids at position 0 and in the middle differ, so a forgotten `position` cannot pass unseen."""
    ids = np.arange(10, 20, dtype=np.int64)
    middle = hash_ids(TINY_GEOMETRY, ids, start=3, position=50, pad_id=2)
    np.testing.assert_array_equal(middle, hash_ids(TINY_GEOMETRY, ids, start=3, position=0, pad_id=2))
    with pytest.raises(HistoryError, match=r"2 ids of history before position 52; hashing needs 3"):
        hash_ids(TINY_GEOMETRY, ids, start=2, position=50, pad_id=2)


def test_nothing_to_hash_is_an_empty_answer() -> None:
    ids = np.arange(3, dtype=np.int64)
    assert hash_ids(TINY_GEOMETRY, ids, start=3, position=0, pad_id=2).shape == (0, 2, 12)
    assert hash_ids(TINY_GEOMETRY, ids[:0], start=0, position=7, pad_id=2).shape == (0, 2, 12)


@pytest.mark.parametrize(
    ("ids", "arguments", "message"),
    [
        (np.array([1, 409]), {}, r"compressed id 409 at position 1 is outside 0\.\.408"),
        (np.array([-2, 3]), {}, r"compressed id -2 at position 0"),
        (np.array([1], dtype=np.int32), {}, r"int64 \[T\], not int32"),
        (np.array([[1]]), {}, r"of shape \(1, 1\)"),
        (np.array([1]), {"start": 2}, r"start 2 must be in 0\.\.1"),
        (np.array([1]), {"position": -1}, r"position -1"),
        (np.array([1]), {"pad_id": DEAD}, r"pad id -1 is outside"),
    ],
)
def test_bad_input_is_refused(ids: NDArray[np.int64], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(HistoryError, match=message):
        hash_ids(TINY_GEOMETRY, ids, **{"start": 0, "position": 0, "pad_id": 2, **arguments})
