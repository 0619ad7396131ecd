"""Steps of the small models, with the weights that they have: the golden one and the one that is embedded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="checkpoints are opened with their tokenizer")

from deskfleet.engine.cuda import synthetic
from deskfleet.engine.cuda.checks import StepCheck
from deskfleet.engine.cuda.loader import load_model
from deskfleet.engine.cuda.step import DecodeStep, make_pages
from deskfleet.engine.ops.records import ENTRY, INDEX_KEY, WINDOW
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.checkpoint import Checkpoint
from deskfleet.model.layout import Layout, ShardPlan
from tests.gpu.conftest import HAS_GPU

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "v41-tiny" / "model"
POCKET = ROOT / "pocket" / "checkpoint"


@pytest.mark.parametrize(
    ("path", "tp_size", "layers", "exact"),
    [
        (GOLDEN, 1, (1, 2, 6, 8), None),
        (GOLDEN, 2, (4,), False),
        (POCKET, 1, (4, 6), None),
        (POCKET, 2, (6, 8), False),
    ],
    ids=[
        "golden",
        "golden, one of two ranks, as large models",
        "pocket",
        "pocket, one of two ranks, as large models",
    ],
)
def test_every_stage(
    device: torch.device, bit_ops: bool, path: Path, tp_size: int, layers: tuple[int, ...], exact: bool | None
) -> None:
    """Two requests, one of them two rows long; the last rank, which is the one with padding."""
    torch.manual_seed(tp_size)
    checkpoint = Checkpoint.open(path)
    with ShardReader(checkpoint, ShardPlan(checkpoint.config, Layout(tp_size)), tp_size - 1) as reader:
        weights = load_model(reader, device, exact=exact)
    assert weights.layers[0].w13.exact == (exact is None)
    c = checkpoint.config
    pages = make_pages(c, num_slots=2, max_model_len=384, block_size=32, device=device)
    for page in pages.windows:
        page.copy_(WINDOW.pack(torch.randn(len(page), c.head_dim).to(torch.bfloat16)))
    for source, page in pages.entries.items():
        page.copy_(ENTRY.pack(torch.randn(len(page), c.head_dim).to(torch.bfloat16)))
        pages.index_keys[source].copy_(
            INDEX_KEY.pack(torch.randn(len(page), c.index_head_dim).to(torch.bfloat16))
        )
    for state in pages.open_rows.values():
        state.copy_(torch.randn(state.shape))
    step = DecodeStep(
        weights.shape, [weights.layers[number] for number in layers], weights.embedding, weights.head, weights.norm,
        pages, num_rows=3, device=device, bit_ops=bit_ops,
    )  # fmt: skip
    for codes, scales in step.host_rows.values():
        codes.copy_(synthetic.random_bytes(tuple(codes.shape), 1, "cpu") & 0xF7)
        scales.copy_(synthetic.random_scales(tuple(scales.shape), (118, 122), 2, "cpu"))
        scales[:, c.engram_width // 32 :] = 0
    step.ids.copy_(torch.tensor([17, 200, 5]))
    step.positions.copy_(torch.tensor([41, 350, 351]))
    step.slots.copy_(torch.tensor([1, 0, 0]))
    check = StepCheck(step)
    step.run(check)
    assert not {name: error for name, error in check.errors.items() if name.endswith("wrong") and error}
    # A weight of attention rounded against another maximum, and a code chosen by a last place, are worse than bf16.
    loose = ("core", "grouped", "entry", "key")
    tight = 5e-4 if not HAS_GPU else 4e-3 if exact is False else 1e-3
    wrong = {
        name: error
        for name, error in check.errors.items()
        if not name.endswith("wrong") and error > (0.02 if name.endswith(loose) else tight)
    }
    assert not wrong, wrong
    assert bool(torch.isfinite(step.vocabulary_logits).all())


@pytest.mark.parametrize("matrix", ["w1", "w3", "w2"])
def test_scales_that_prompts_cannot_take(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, matrix: str
) -> None:
    """One scale of one expert of the second of two ranks: 2**7 is loaded, more is refused by name and value."""
    checkpoint = Checkpoint.open(GOLDEN)
    plan = ShardPlan(checkpoint.config, Layout(2))
    name = f"layers.3.ffn.experts.{plan.expert_range(1)[-1]}.{matrix}.scale"
    read = ShardReader.raw
    byte = 134

    def raw(reader: ShardReader, asked: str) -> np.ndarray:
        stored = read(reader, asked)
        if asked == name:
            stored = stored.copy()
            stored[-1, -1] = byte
        return stored

    monkeypatch.setattr(ShardReader, "raw", raw)
    with ShardReader(checkpoint, plan, 1) as reader:
        load_model(reader, device)
        byte = 135
        with pytest.raises(
            EngineError, match=re.escape(f"{name} has a scale byte of 135, more than the 134")
        ) as refused:
            load_model(reader, device)
    assert "--device cpu" in str(refused.value.hint)
