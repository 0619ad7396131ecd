"""A whole decode step of a small model, stage by stage: every kernel, in the order and with the buffers of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import linear, synthetic
from deskfleet.engine.cuda.checks import StepCheck, relative_error
from deskfleet.engine.cuda.step import DecodeStep, Pages, make_pages
from deskfleet.engine.cuda.synthetic import LayerWeights, RankShape, make_layer
from deskfleet.engine.ops import reference
from deskfleet.engine.ops.records import ENTRY, INDEX_KEY, WINDOW
from deskfleet.model.config import ModelConfig
from deskfleet.model.published import published_config_dict
from tests.gpu.test_kernels import BF16, FLOAT32

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]

STAGES = {
    "engram", "attention_in", "qkv", "latents", "entries", "query", "picks", "core", "attention_out", "ffn_in", "route",
    "experts",
}  # fmt: skip


def small_config() -> ModelConfig:
    """Five layers with every role: window alone, ratio-2 source, Engram, ratio-1 source, re-indexing layer."""
    data = published_config_dict()
    text: dict[str, Any] = data["text_config"]
    text.update(
        hidden_size=1024, q_lora_rank=128, o_lora_rank=128, vocab_size=512, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=256, num_hidden_layers=5, index_topk=32,
        compress_ratios=[0, 2, 2, 1, 1, 0, 0, 0], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 4],
        candidate_source_layer_id=3,
        candidate_topk_blocks=8, engram_layer_ids=[2], engram_num_embeddings=[1000], engram_n_heads=1,
        engram_head_dim=64, engram_compressed_vocab_size=500, dspark_target_layer_ids=[2, 3, 4],
    )  # fmt: skip
    data.pop("vision_config")
    data["image_token_id"] = 400
    text["dspark_noise_token_id"] = 401
    return ModelConfig.from_dict(data)


def filled(pages: Pages) -> Pages:
    """Pages full of records of normed random rows, as earlier steps would have left them."""
    generator = torch.Generator().manual_seed(3)

    def rows(like: Tensor, width: int) -> Tensor:
        return torch.randn(len(like), width, generator=generator).to(torch.bfloat16)

    for page in pages.windows:
        page.copy_(WINDOW.pack(rows(page, 512)))
    for source, page in pages.entries.items():
        page.copy_(ENTRY.pack(rows(page, 512)))
        pages.index_keys[source].copy_(INDEX_KEY.pack(rows(page, 128)))
    for state in pages.open_rows.values():
        state.copy_(torch.randn(state.shape, generator=generator))
    return pages


def on(device: torch.device, layer: LayerWeights) -> LayerWeights:
    """A layer whose tensors lie on the device; they are made on the CPU so that the oracle has the same."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if hasattr(value, "codes"):
            return replace(value, codes=value.codes.to(device), scales=value.scales.to(device))
        if isinstance(value, synthetic.MixWeights):
            return synthetic.MixWeights(*(getattr(value, name).to(device) for name in value.__slots__))
        return value

    return LayerWeights(**{name: moved(getattr(layer, name)) for name in layer.__slots__})


def pages_on(device: torch.device, pages: Pages) -> Pages:
    """A copy of the pages on the device."""
    return Pages(
        [page.to(device, copy=True) for page in pages.windows],
        {k: v.to(device, copy=True) for k, v in pages.entries.items()},
        {k: v.to(device, copy=True) for k, v in pages.index_keys.items()},
        {k: v.to(device, copy=True) for k, v in pages.open_rows.items()},
        pages.window_table.to(device),
        pages.entry_table.to(device),
        pages.block_size,
        pages.num_open,
    )


def test_every_stage_of_a_step(device: torch.device, bit_ops: bool) -> None:
    """Three rows of two requests, one of them two rows long, through both kinds of source, Engram and a layer that
    picks among candidate blocks."""
    config = small_config()
    shape = RankShape(config, 4)
    layers = [on(device, make_layer(shape, config.layers[index], 0, "cpu")) for index in (1, 2, 3, 4)]
    embedding = synthetic.normal((config.vocab_size, config.hidden_size), 1.0, 11, device).to(torch.bfloat16)
    head = synthetic.normal((shape.vocabulary, config.hidden_size), 0.02, 12, device).to(torch.bfloat16)
    pages = filled(make_pages(config, num_slots=2, max_model_len=512, block_size=64, device="cpu"))
    step = DecodeStep(
        shape, layers, embedding, linear.pack_bf16(head), torch.ones(config.hidden_size, device=device),
        pages_on(device, pages), num_rows=3, device=device, bit_ops=bit_ops,
    )  # fmt: skip
    codes, scales = step.host_rows[2]
    codes.copy_(synthetic.random_bytes(tuple(codes.shape), 1, "cpu") & 0xF7)
    scales.copy_(synthetic.random_scales(tuple(scales.shape), (118, 122), 2, "cpu"))
    scales[:, config.engram_width // 32 :] = 0
    step.ids.copy_(torch.tensor([17, 300, 5]))
    step.positions.copy_(torch.tensor([41, 250, 251]))
    step.slots.copy_(torch.tensor([1, 0, 0]))
    check = StepCheck(step)
    step.run(check)
    assert {name.split(".")[1] for name in check.errors} == STAGES
    assert all(error == 0 for name, error in check.errors.items() if name.endswith("wrong"))
    # A weight of attention rounded against another maximum, and a code chosen by a last place, are worse than bf16.
    loose = ("core", "grouped", "entry", "key")
    wrong = {
        name: error
        for name, error in check.errors.items()
        if not name.endswith("wrong") and error > (0.02 if name.endswith(loose) else BF16)
    }
    assert not wrong, wrong
    expected = reference.linear_f32(step.streams.x.cpu(), head.cpu())
    assert relative_error(step.vocabulary_logits, expected) < FLOAT32
    assert not step.work.counters.any()
    assert not step.experts.counters.any()
