"""Each layer from its own golden inputs: the test that sees the smallest mistakes."""

from __future__ import annotations

import pytest
import torch

from tests.engine.golden import (
    Harness,
    decode_differences,
    draft_differences,
    golden,
    image_differences,
    prefill_differences,
)


@pytest.mark.parametrize(
    "differences", [prefill_differences, decode_differences, draft_differences, image_differences]
)
def test_every_layer_agrees(harness: Harness, differences):
    found = list(differences(harness))
    assert not found, "\n".join(map(str, found))


def test_caches_agree_with_the_reference_state(harness: Harness):
    """Rings, entries and index keys after prefill 17, 40 and decode to 70, up to the noise of requantised inputs."""
    state = golden("golden/state")
    prompts = {"after_prefill_17": (golden("golden/prefill")["len17.input_ids"], [17]),
               "after_prefill_40": (golden("golden/prefill")["len40.input_ids"], [40]),
               "after_decode_70": (golden("golden/decode")["input_ids"][:70], [40] + [1] * 30)}  # fmt: skip
    for name, (ids, steps) in prompts.items():
        position = 0
        for count in steps:
            harness.run(harness.segment(ids, position, position + count))
            position += count
        for key, value in state.items():
            if not key.startswith(name) or "compressor_" in key or "engram_cache" in key:
                continue
            ours = _cached(harness, key.removeprefix(f"{name}."), value.shape[1], position).float()
            error = ((ours - value[0].float()).norm() / value.float().norm()).item()
            # One flipped FP4 code of a small cache is worth a few percent; a wrong slot or row is worth a hundred.
            assert error < 0.12, f"{key}: {error:.4f}"


def _cached(harness: Harness, name: str, rows: int, stop: int) -> torch.Tensor:
    prefix, kind = name.rsplit(".", 1)
    stack, number = prefix.split(".")
    layer = int(number) + (harness.runner.config.num_hidden_layers if stack == "mtp" else 0)
    if kind == "window_kv":
        return harness.window_ring(layer, stop)
    return harness.entries(layer, rows) if kind == "compress_kv" else harness.index_keys(layer, rows)
