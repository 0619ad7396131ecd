"""Prompts of many rows: the grouped products, what stands around the vendor's product, and whole chunks."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deskfleet.engine.backends import CudaBackend
from deskfleet.engine.cuda import (
    indexer,
    linear,
    model,
    packing,
    prefill,
    prefill_experts,
    prefill_indexer,
    prefill_linear,
    synthetic,
)
from deskfleet.engine.cuda.checks import StepCheck, relative_error
from deskfleet.engine.cuda.experts import ExpertShape
from deskfleet.engine.cuda.native import products
from deskfleet.engine.cuda.prefill import PrefillStep
from deskfleet.engine.cuda.prefill_checks import RowsOf
from deskfleet.engine.cuda.prefill_experts import GroupedBuffers, GroupedTuning
from deskfleet.engine.cuda.prefill_replay import ReplayStep
from deskfleet.engine.cuda.step import DecodeStep, make_pages
from deskfleet.engine.cuda.synthetic import RankShape, make_layer
from deskfleet.engine.ops import quant, reference
from deskfleet.engine.ops.records import INDEX_KEY
from deskfleet.model import device as device_sizes
from deskfleet.model.config import ModelConfig
from deskfleet.model.published import published_config_dict
from tests.gpu.test_engine import MEAN_LIMIT, Pair, segment, tokens
from tests.gpu.test_kernels import (
    BF16,
    FLOAT32,
    assert_neighbours,
    bf16_pair,
    fp4,
    fp4_on,
    fp8,
    fp8_on,
    normal,
    poisoned,
    quantized,
    rotation,
    run_ptx,
    seeded,
    word_of,
)
from tests.gpu.test_step import STAGES, filled, on, pages_on, small_config

__all__ = ["seeded"]  # the fixture: the same numbers in every run

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]


def test_the_ptx_of_words() -> None:
    """Codes of random words, times 2**120 and their scale, are nibbles of the checkpoint times 2**-6."""
    codes = torch.randint(0, 256, (1, 128, 32), dtype=torch.uint8)
    matrix = quant.Fp4Matrix(codes, torch.full((1, 128, 2), 127, dtype=torch.uint8))
    words = packing.pack_fp4(matrix).codes.view(torch.int16)[0, 0, 0].to(torch.int32) & 0xFFFF  # [128, 16]
    values = matrix[0].decode()  # [128, 64]
    order = prefill_experts.permuted(torch.arange(64)).view(4, 16)
    factor = word_of(torch.tensor([2.0, 2.0]).double() ** 120)
    for number, text in enumerate(prefill_experts.CODES):
        for row, word in product(range(128), range(0, 16, 2)):
            pair = int(words[row, word]) | int(words[row, word + 1]) << 16
            out = run_ptx(text, {"$1": pair, "$2": factor})["$0"]
            expected = values[row, order[number, word : word + 2]].double() * 2.0**-6
            assert torch.equal(bf16_pair(out), expected), (number, row, word)


@pytest.mark.parametrize(
    ("rows", "width", "expert_width", "num_experts", "num_chosen", "tuning"),
    [
        (40, 256, 64, 3, 2, GroupedTuning(rows=32, tiles=2)),
        (9, 320, 192, 4, 3, GroupedTuning(rows=32, tiles=3)),
        (70, 128, 64, 1, 1, GroupedTuning(rows=64, tiles=1)),
    ],
    ids=["two items an expert", "ragged width", "one expert"],
)
def test_grouped_experts(
    device: torch.device,
    bit_ops: bool,
    rows: int,
    width: int,
    expert_width: int,
    num_experts: int,
    num_chosen: int,
    tuning: GroupedTuning,
) -> None:
    """One expert more than is held here: its pairs are in no item."""
    out_rows = -(-width // 128) * 128
    w13, w2 = fp4(num_experts, 2 * expert_width, width), fp4(num_experts, out_rows, expert_width)
    x = normal(rows, width).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(num_experts + 1)[:num_chosen] for _ in range(rows)])
    weights = torch.rand(rows, num_chosen)
    buffers = GroupedBuffers(ExpertShape(width, expert_width, num_experts, num_chosen), rows, device, tuning)
    buffers.outputs = torch.zeros(rows * num_chosen, out_rows, dtype=torch.bfloat16, device=device)
    packed13 = fp4_on(device, packing.pack_fp4(w13, gated=True))
    packed2 = fp4_on(device, packing.pack_fp4(w2))
    products = prefill_linear.ProductBuffers(rows, width, 0, device)
    prefill_experts.sort_pairs((chosen + 5).to(torch.int32).to(device), buffers, first_expert=5)
    x_rows = prefill_linear.expand_rows(*quantized(x, device), products)
    assert torch.equal(x_rows.cpu(), prefill_experts.permuted(quant.fake_quant_fp8(x)))
    prefill_experts.grouped_up(x_rows, packed13, weights.to(device), buffers, 10.0, bit_ops=bit_ops)
    prefill_experts.grouped_down(packed2, buffers, bit_ops=bit_ops)
    expected = torch.zeros(rows, out_rows, dtype=torch.float64)
    for expert in range(num_experts):
        mine = quant.fake_quant_fp8(x).to(torch.float64) @ w13[expert].decode().T
        gate, up = mine.to(torch.bfloat16).chunk(2, -1)
        for row, place in (chosen == expert).nonzero().tolist():
            activated = reference.expert_activation(
                gate[row : row + 1], up[row : row + 1], 10.0, weights[row, place : place + 1]
            )
            expected[row] += reference.quantized_linear(activated, w2[expert].decode())[0].to(torch.float64)
    total = buffers.outputs.cpu().to(torch.float64).view(rows, num_chosen, -1).sum(1)
    assert relative_error(total, expected) < BF16


def test_scales_of_grouped_experts(device: torch.device, bit_ops: bool) -> None:
    """Every scale that a weight may have, a row of the matrix each, and the first that it may not."""
    width, most = 64, prefill_experts.MOST_SCALE
    codes = torch.randint(0, 256, (1, 256, width // 2), dtype=torch.uint8)
    scales = torch.arange(256).clamp(max=most + 1).to(torch.uint8)
    matrix = quant.Fp4Matrix(codes, scales[None, :, None].expand(1, 256, width // 32).contiguous())
    buffers = GroupedBuffers(ExpertShape(256, width, 1, 1), 1, device, GroupedTuning(rows=32, tiles=1))
    prefill_experts.sort_pairs(torch.zeros(1, 1, dtype=torch.int32, device=device), buffers)
    x = quant.fake_quant_fp8(normal(1, width).to(torch.bfloat16))
    buffers.activated.copy_(prefill_experts.permuted(x))
    prefill_experts.grouped_down(fp4_on(device, packing.pack_fp4(matrix)), buffers, bit_ops=bit_ops)
    got, weight = buffers.outputs[0].cpu().double(), matrix[0].decode().double()
    exact, terms = weight @ x[0].double(), weight.abs() @ x[0].double().abs()
    # The output's bf16, the float32 sum, and whatever a device makes of the smallest bf16 numbers.
    allowed = 2.0**-8 * exact.abs() + 2.0**-20 * terms + 2.0**-110
    assert bool(((got - exact).abs() <= allowed)[: most + 1].all())
    assert not bool(torch.isfinite(got[most + 1 :]).any())


def test_products(device: torch.device, bit_ops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight in parts, its heads rotated, and the shared expert."""
    rows, width, expert_width = 37, 320, 192
    monkeypatch.setattr(prefill_linear, "WEIGHT_ELEMENTS", 256 * width)
    products = prefill_linear.ProductBuffers(rows, width, 0, device)
    weight, x = fp8(576, width), normal(rows, width).to(torch.bfloat16)
    x_rows = prefill_linear.expand_rows(*quantized(x, device), products)
    out = poisoned((rows, 576), torch.bfloat16, device)
    prefill_linear.product(x_rows, fp8_on(device, packing.pack_fp8(*weight)), out, products)
    expected = reference.quantized_linear(x, quant.dequantize_fp8_weight(*weight))
    assert relative_error(out, expected) < BF16
    rope = rotation(rows)
    prefill_linear.turn(out, (rope[0].to(device), rope[1].to(device)), 192, bit_ops=bit_ops)
    turned = reference.apply_rope(expected.unflatten(1, (-1, 192)), *rope).flatten(1)
    assert relative_error(out, turned) < BF16
    (codes13, scales13), (codes2, scales2) = fp8(2 * expert_width, width), fp8(width, expert_width)

    def empty(columns: int) -> Tensor:
        return poisoned((rows, columns), torch.bfloat16, device)

    out = empty(width)
    prefill_linear.shared_expert(
        x_rows, fp8_on(device, packing.pack_fp8(codes13, scales13, gated=True)),
        fp8_on(device, packing.pack_fp8(codes2, scales2)), empty(2 * expert_width), empty(expert_width), out,
        products, 10.0, bit_ops=bit_ops,
    )  # fmt: skip
    matrices = quant.dequantize_fp8_weight(codes13, scales13), quant.dequantize_fp8_weight(codes2, scales2)
    assert relative_error(out, reference.shared_expert(x, *matrices, limit=10.0)) < BF16


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_grouped_and_plain_products(
    device: torch.device, bit_ops: bool, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    rows, groups, width = 35, 2, 256
    monkeypatch.setattr(prefill_linear, "WEIGHT_ELEMENTS", at_a_time * 128 * width)
    weight = fp8(groups * 128, width)
    x = normal(rows, groups * width).to(torch.bfloat16)
    products = prefill_linear.ProductBuffers(rows, width, groups * 128, device)
    codes = torch.zeros(rows, groups * 128, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(rows, groups, dtype=torch.int32, device=device)
    packed = fp8_on(device, packing.pack_fp8(*weight, paired=True))
    prefill_linear.grouped_product(x.to(device), packed, codes, scales, products, groups, bit_ops=bit_ops)
    matrix = quant.dequantize_fp8_weight(*weight).unflatten(0, (groups, -1))
    expected = reference.grouped_linear(x.unflatten(1, (groups, -1)), matrix).flatten(1)
    decoded = reference.decode_fp8_rows(codes.view(torch.uint8).cpu(), scales.cpu().view(torch.uint8))
    assert_neighbours(decoded, quant.fake_quant_fp8(expected))
    weight16, x = normal(100, 320).to(torch.bfloat16), normal(130, 320).to(torch.bfloat16)
    out = poisoned((130, 100), torch.float32, device)
    prefill_linear.plain_product(
        x.to(device), linear.pack_bf16(weight16).to(device), out, bit_ops=bit_ops, tiles_each=at_a_time
    )
    assert relative_error(out, reference.linear_f32(x, weight16)) < FLOAT32


def test_every_stage_of_a_chunk(device: torch.device, bit_ops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two requests through every kind of layer, scored a few at a time; what is kept of an open group is what a
    step of few rows keeps."""
    config = small_config()
    shape = RankShape(config, 4)
    layers = [on(device, make_layer(shape, config.layers[index], 0, "cpu")) for index in (1, 2, 3, 4)]
    embedding = synthetic.normal((config.vocab_size, config.hidden_size), 1.0, 11, device).to(torch.bfloat16)
    head = synthetic.normal((shape.vocabulary, config.hidden_size), 0.02, 12, device).to(torch.bfloat16)
    pages = pages_on(
        device, filled(make_pages(config, num_slots=3, max_model_len=512, block_size=64, device="cpu"))
    )
    pages.entry_table[2] = pages.window_table[2] = 0  # nobody's
    monkeypatch.setattr(prefill, "SCORE_BYTES", 2 * 512 * 16)
    step = PrefillStep(
        shape, layers, embedding, linear.pack_bf16(head), torch.ones(config.hidden_size, device=device), pages,
        num_rows=19, device=device, bit_ops=bit_ops, long=True,
    )  # fmt: skip
    assert len(step.scores) == 16
    codes, scales = step.host_rows[2]
    codes.copy_(synthetic.random_bytes(tuple(codes.shape), 1, "cpu") & 0xF7)
    scales.copy_(synthetic.random_scales(tuple(scales.shape), (118, 122), 2, "cpu"))
    scales[:, config.engram_width // 32 :] = 0
    positions = torch.cat((torch.arange(240, 251), torch.arange(41, 49)))
    step.ids.copy_(torch.randint(0, 512, (19,)))
    step.positions.copy_(positions)
    step.slots.copy_(torch.tensor([0] * 11 + [1] * 8))
    step.entry_slots.copy_(step.slots)
    step.kept_at.copy_(2 * pages.num_open + positions % pages.num_open)
    step.kept_at[4:11] = positions[4:11].to(device) % pages.num_open
    step.kept_at[12:] = pages.num_open + positions[12:].to(device) % pages.num_open
    step.logit_rows.copy_(torch.arange(18, -1, -1))
    blocks = step.attended_rows.blocks.fill_(-1)
    blocks[:9] = torch.cat((torch.zeros(1), pages.entry_table[1, :4].cpu(), pages.entry_table[0, :4].cpu()))
    step.attended_rows.places.copy_(torch.tensor([5] * 11 + [1] * 6 + [-1, -2]))
    step.attended_rows.lone.fill_(-1)[:2] = torch.tensor([17, 18])
    with RowsOf(step, torch.arange(19)) as rows:
        check = StepCheck(rows)  # type: ignore[arg-type]
        step.run(check)
    assert {name.split(".")[1] for name in check.errors} == STAGES
    assert all(error == 0 for name, error in check.errors.items() if name.endswith("wrong"))
    loose = ("core", "grouped", "entry", "key")
    wrong = {
        name: error
        for name, error in check.errors.items()
        if not name.endswith("wrong") and error > (0.02 if name.endswith(loose) else BF16)
    }
    assert not wrong, wrong
    expected = reference.linear_f32(step.streams.x.cpu().flip(0), head.cpu())
    assert relative_error(step.vocabulary_logits, expected) < FLOAT32


@pytest.mark.parametrize("tp_size", [1, 4, 8])
def test_split_sums_fit_their_workspace(monkeypatch: pytest.MonkeyPatch, tp_size: int) -> None:
    """Steps of prompts of the published model, of every size, launched without memory: what programs that share a
    product leave for each other lies within the step's workspace."""
    config = ModelConfig.from_dict(published_config_dict())
    shape = RankShape(config, tp_size)
    layers = [make_layer(shape, config.layers[index], 0, "meta") for index in (0, 1, 2, 14, 20, 24)]
    embedding = torch.zeros(shape.vocabulary, config.hidden_size, dtype=torch.bfloat16, device="meta")
    pages = make_pages(config, num_slots=2, max_model_len=8192, block_size=64, device="meta")
    parts = (shape, layers, embedding, linear.pack_bf16(embedding), torch.zeros(5120, device="meta"), pages)
    split: Counter[str] = Counter()

    def launched(kernel: Any, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        if given.get("SPLITS", 1) > 1 and given.get("OUTPUT") != "parts":
            split[kernel.fn.__name__] += 1
            tile_rows = 64 if kernel.fn is linear.bf16_kernel.fn else 128
            programs = grid[0] * grid[1]
            assert programs * tile_rows * given["BM"] <= given["partials"].numel(), kernel.fn.__name__
            assert programs // given["SPLITS"] <= given["counters"].numel(), kernel.fn.__name__

    monkeypatch.setattr(type(linear.bf16_kernel), "run", launched)
    for num_rows in device_sizes.prefill_sizes(2048, 8192):
        if num_rows > products.MOST_ROWS:  # of fewer, a GPU has kernels that split nothing
            kind = PrefillStep if num_rows >= device_sizes.FILLED_ROWS else DecodeStep
            step = kind(*parts, num_rows=num_rows, device="meta", bit_ops=True, long=True)
            step.run()
    replay = ReplayStep(*parts, num_rows=device_sizes.REPLAYED_ROWS, device="meta", bit_ops=True)
    replay.source = step.streams
    replay.run()
    assert split["bf16_kernel"] > 0


@pytest.mark.parametrize(("heads", "size"), [(32, 128), (4, 32)])
def test_scores_of_rows(device: torch.device, bit_ops: bool, heads: int, size: int) -> None:
    """Rows of two requests in one program, candidates that leave some out, and rows that take all they see."""
    blocks, block_size, ratio, num_picks, unit = 8, 64, 2, 64, 8
    per_block = block_size // ratio
    slots = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.int32)
    positions = torch.tensor([395, 396, 397, 398, 399, 400, 200, 201, 202, 203, 60], dtype=torch.int32)
    rows = len(slots)
    table = (torch.randperm(2 * blocks) + 1).view(2, blocks).to(torch.int32)
    pages = INDEX_KEY.pack(normal((2 * blocks + 1) * per_block, size).to(torch.bfloat16))
    query, weights = normal(rows, heads, size).to(torch.bfloat16), normal(rows, 64)
    candidates = indexer.Candidates(rows, 256, unit, 8, device)
    candidates.allowed.copy_(torch.rand(rows, 32) < 0.5)
    for among in (None, candidates):
        scores = poisoned((rows, 256), torch.bfloat16, device)
        prefill_indexer.score_rows(
            query.flatten(1).to(device), weights.to(device)[:, :heads], pages.to(device),
            (slots.to(device), positions.to(device), table.to(device)), scores, num_picks=num_picks,
            weight_scale=1 / 64, ratio=ratio, block_size=block_size, bit_ops=bit_ops, among=among,
        )  # fmt: skip
        for row in range(rows):
            count = (int(positions[row]) + 1) // ratio
            numbers = torch.arange(count)
            at = table[slots[row].long(), numbers // per_block].long() * per_block + numbers % per_block
            expected = reference.index_scores(
                quant.fake_quant_fp4_e8m0(query[row : row + 1]),
                weights[row : row + 1, :heads].to(torch.bfloat16) * (1 / 64),
                INDEX_KEY.unpack(pages)[at], numbers, torch.tensor([count]), None, block=unit,
            )[0]  # fmt: skip
            mine = scores[row].cpu()
            assert bool(mine[count:].isnan().all())
            if count <= num_picks:
                continue
            left = candidates.allowed[row].cpu()[numbers // unit] != 0
            left |= torch.tensor(among is None or count <= unit * candidates.top_blocks)
            assert bool(torch.isneginf(mine[:count][~left]).all())
            assert relative_error(mine[:count][left], expected[left]) < 3e-3


def test_where_entries_are_unpacked() -> None:
    """Whole requests while there is room, the picks of those with few rows, and no row of what has no place."""
    rows = [(5, 100, 20), (1, 900, 1), (3, 320, 30), (7, 40, 8), (2, 470, 12)]  # slot, last position, rows
    slots = np.concatenate([np.full(count, slot, np.int32) for slot, _, count in rows])
    positions = np.concatenate([np.arange(last + 1 - count, last + 1) for _, last, count in rows])
    laid = prefill.lay_out(positions, slots, 16, 29)
    assert laid.requests == [(0, 20, 1, 7), (21, 51, 8, 21)]
    assert laid.lone == [20, *range(51, 59)]
    assert laid.num_rows == 59
    whole = prefill.lay_out(positions, slots, 16, 59)
    assert whole.num_rows == 71
    assert whole.requests[-1] == (59, 71, 29, 30)


def test_decoder_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of which the decoder sees the last rows alone gives the CPU's logits, and so do the tokens after it,
    which look up what both halves have left. Another request decodes beside the prompt."""
    monkeypatch.setattr(device_sizes, "_PREFILL_SIZES", (28,))
    for module in (device_sizes, model):
        monkeypatch.setattr(module, "FILLED_ROWS", 16)
    monkeypatch.setattr(model, "REPLAYED_ROWS", 10)
    pair = Pair(decoder_replay=True, block_size=8, max_step_tokens=28)
    first, second = tokens(28, 1), tokens(3, 2)
    pair.run(segment(second, 0, 1, slot=2))
    # Positions 8 to 24 go through the decoder, in two pieces, the token of the other request with them.
    pair.run(segment(second, 1, 2, slot=2), segment(first, 0, 25), rows=[0, *range(9, 26)])
    assert isinstance(pair.device.backend, CudaBackend)
    assert pair.device.backend.model._replay is not None
    pair.run(segment(first, 25, 27), segment(second, 2, 3, slot=2))
    assert torch.cat(pair.errors).mean() <= MEAN_LIMIT
