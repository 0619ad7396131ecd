"""Every operator, in both implementations, against the publisher's kernel vectors (tests/golden/v41-tiny/kernels)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deskfleet.engine import ops
from deskfleet.engine.ops.quant import e8m0_to_float, pow2_ceil
from deskfleet.engine.ops.rope import RopeTable
from tests.engine.golden import Harness, golden


@pytest.fixture(params=["native", "reference"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The operators of one implementation. That there is a native one is part of what is tested."""
    ops.select(request.param)
    yield request.param
    ops.select()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that -0 and 0 differ and formats without `equal` compare."""
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "x", "quantize", "codes", "fake_quant"),
    [
        ("act_quant", "x", ops.quantize_fp8, "q", ops.fake_quant_fp8),
        ("fp4_e8m0_32", "x_fp4", ops.quantize_fp4_e8m0, "packed", ops.fake_quant_fp4_e8m0),
        ("fp4_e4m3_16", "x_fp4", ops.quantize_fp4_e4m3, "packed", ops.fake_quant_fp4_e4m3),
    ],
)
def test_quantisers_are_bit_exact(name, x, quantize, codes, fake_quant):
    data = golden("kernels/quant")
    ours, scale = quantize(data[x])
    assert torch.equal(bits(ours), bits(data[f"{name}.{codes}"]))
    assert torch.equal(bits(scale), bits(data[f"{name}.s"]))
    assert torch.equal(bits(fake_quant(data[x])), bits(data[f"{name}.inplace"]))


def test_quantisers_give_the_written_hand_vector():
    """The vector of spec §N.8."""
    x = (torch.arange(32) - 15.5).mul(0.37).to(torch.bfloat16)[None]
    codes, scale = ops.quantize_fp8(x)
    assert bits(scale).tolist() == [[121]]
    assert (
        bytes(bits(codes)[0].tolist())
        .hex(" ")
        .startswith("fc fb fa f9 f8 f8 f6 f5 f3 f2 f0 ed ea e7 e1 d4 54")
    )
    packed, scale = ops.quantize_fp4_e8m0(x)
    assert bytes(packed[0].tolist()).hex(" ") == "ff ee ee de cd bc ab 89 10 32 43 54 65 66 66 77"
    _, scale = ops.quantize_fp4_e4m3(x)
    assert bits(scale)[0].tolist()[1] == 0x37


def test_pow2_ceil_at_and_beside_powers():
    exact = torch.tensor([2.0**-20, 1.0, 448.0 / 448.0, 2.0**9])
    assert torch.equal(pow2_ceil(exact), exact)
    above = torch.nextafter(exact, torch.full_like(exact, torch.inf))
    assert torch.equal(pow2_ceil(above), exact * 2)


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_gemm_within_one_ulp(case, kind):
    data = golden("kernels/gemm")
    scale = e8m0_to_float(data[f"case{case}.a_scale"].view(torch.uint8)).repeat_interleave(32, -1)
    activations = data[f"case{case}.a"].double() * scale
    dequantize = {"fp8": ops.dequantize_fp8_weight, "fp4": ops.dequantize_fp4_weight}[kind]
    weight = dequantize(
        data[f"case{case}.b_{kind}"].view(torch.uint8), data[f"case{case}.b_{kind}_scale"].view(torch.uint8)
    )
    rows, matrix = activations.bfloat16(), weight.bfloat16()
    assert torch.equal(rows.double(), activations)
    assert torch.equal(matrix.double(), weight)
    ours = ops.linear_f32(rows, matrix)
    theirs = data[f"case{case}.{kind}_gemm_fp32"]
    assert ((ours - theirs).abs() / theirs.abs().amax(1, keepdim=True)).max() < 1e-5
    ulps = (
        ours.bfloat16().view(torch.int16).int() - data[f"case{case}.{kind}_gemm_bf16"].view(torch.int16).int()
    ).abs()
    assert ulps.max() <= 1


@pytest.mark.parametrize("case", range(4))
def test_sparse_attention_within_two_ulps(case):
    data = golden("kernels/sparse_attn")
    query, keys, index = (data[f"case{case}.{name}"] for name in ("q", "kv", "idx"))
    for batch in range(query.shape[0]):
        ours = ops.sparse_attention(
            query[batch],
            [(keys[batch], index[batch].long())],
            data[f"case{case}.sink"],
            query.shape[-1] ** -0.5,
        )
        theirs = data[f"case{case}.out"][batch]
        ulp = theirs.float().abs().clamp_min(2**-20) * 2**-7
        assert ((ours.float() - theirs.float()).abs() <= 2 * ulp).all()


def test_sparse_attention_lists_may_come_from_several_pools():
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 4, 32, generator=generator).bfloat16()
    pool = torch.randn(50, 32, generator=generator).bfloat16()
    index = torch.randint(-1, 50, (3, 90), generator=generator)
    sink = torch.randn(4, generator=generator)
    whole = ops.sparse_attention(query, [(pool, index)], sink, 0.2)
    split = ops.sparse_attention(query, [(pool, index[:, :64]), (pool, index[:, 64:])], sink, 0.2)
    assert torch.equal(whole, split)
    alone = torch.cat(
        [ops.sparse_attention(query[i : i + 1], [(pool, index[i : i + 1])], sink, 0.2) for i in range(3)]
    )
    assert torch.equal(whole, alone)


def test_hyper_connections_and_norm():
    data = golden("kernels/hc_and_norm")
    mixes = data["mixes"].flatten(0, 1)
    options = {"copies": 4, "eps": 1e-6}
    pre, post, comb = ops.hc_split(mixes, data["scale"].float(), data["base"], iterations=20, **options)
    for ours, name in ((pre, "pre"), (post, "post"), (comb, "comb")):
        assert (ours - data[name].flatten(0, 1)).abs().max() < 1e-5, name
    _, _, once = ops.hc_split(mixes, data["scale"].float(), data["base"], iterations=1, **options)
    assert (once - data["comb_1_iteration"].flatten(0, 1)).abs().max() < 1e-5
    stream = data["hc_pre.x"][0]
    assert torch.equal(ops.hc_collapse(stream, data["hc_pre.mix"][0]), data["hc_pre.out"][0])
    expanded = ops.hc_expand(
        data["hc_post.sublayer_out"][0], stream, data["hc_post.post"][0], data["hc_post.comb"][0]
    )
    assert torch.equal(expanded, data["hc_post.out"][0])
    weight = data["rmsnorm.weight"].float()
    assert torch.equal(ops.rms_norm(data["rmsnorm.x"], weight, 1e-20), data["rmsnorm.out"])


ROPE_TABLES = {
    "tiny_local": RopeTable.local(16, 10000.0),
    "tiny_yarn": RopeTable.yarn(16, 1000.0, factor=16, beta_fast=4, beta_slow=1, original_max_position=64),
    "real_local": RopeTable.local(64, 10000.0),
    "real_yarn": RopeTable.yarn(
        64, 160000.0, factor=16, beta_fast=32, beta_slow=1, original_max_position=65536
    ),
}


@pytest.mark.parametrize("name", ROPE_TABLES)
def test_rope_tables_are_bit_exact(name):
    """Up to position 1,048,575 in the real configuration."""
    data, table = golden("kernels/rope"), ROPE_TABLES[name]
    assert torch.equal(table.frequencies, data[f"{name}.inv_freq"])
    cos, sin = table.rows(data[f"{name}.positions"])
    assert torch.equal(cos, data[f"{name}.cos"])
    assert torch.equal(sin, data[f"{name}.sin"])


def test_rope_rotates_and_unrotates():
    data = golden("kernels/rope")
    start = int(data["apply.start_pos"])
    x = data["apply.x"][0]
    for table in (ROPE_TABLES["tiny_local"], ROPE_TABLES["tiny_yarn"]):
        rows = table.rows(torch.arange(start, start + len(x)))
        if torch.equal(ops.apply_rope(x, *rows), data["apply.forward"][0]):
            break
    else:
        pytest.fail("neither table reproduces apply.forward")
    assert torch.equal(ops.apply_rope(x, *rows, inverse=True), data["apply.inverse"][0])
    assert torch.equal(
        ops.apply_rope(data["apply.forward"][0], *rows, inverse=True), data["apply.inverse_of_forward"][0]
    )


def candidate_blocks(
    scores: torch.Tensor, visible: torch.Tensor, *, num_blocks: int, block: int
) -> torch.Tensor:
    """The chosen block numbers, as the indexer of a single rank has them."""
    numbers = torch.arange(-(-scores.shape[1] // block))
    return ops.top_positions(ops.candidate_scores(scores, numbers, visible, block=block), num_blocks)


@pytest.mark.parametrize(
    ("logits", "lengths", "mask", "num_blocks", "block"),
    [
        ("prefill.logits", "prefill.compress_lens", "prefill.mask_top4_block4", 4, 4),
        ("prefill.logits", "prefill.compress_lens", "prefill.mask_top2_block8", 2, 8),
        ("prefill_ratio2.logits", "prefill_ratio2.compress_lens", "prefill_ratio2.mask_top3_block4", 3, 4),
    ],
)
def test_candidate_blocks_of_a_prefill_are_exact(logits, lengths, mask, num_blocks, block):
    data = golden("kernels/candidate_blocks")
    scores, visible = data[logits][0].float(), data[lengths].long()
    scores = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)
    blocks = candidate_blocks(scores, visible, num_blocks=num_blocks, block=block)
    assert torch.equal(ops.block_mask(blocks, scores.shape[1], block=block), data[mask][0].bool())


@pytest.mark.parametrize(
    ("mask", "length", "num_blocks"),
    [
        ("mask_len100_top5_block8", 100, 5),
        ("mask_len97_first97_top5_block8", 97, 5),
        ("mask_top2048_block8", 100, 2048),
    ],
)
def test_candidate_blocks_of_a_decode_step_are_exact(mask, length, num_blocks):
    data = golden("kernels/candidate_blocks")
    scores = data["decode.logits"][:, 0, :length].float()
    blocks = candidate_blocks(scores, torch.full((2,), length), num_blocks=num_blocks, block=8)
    assert torch.equal(ops.block_mask(blocks, length, block=8), data[f"decode.{mask}"][:, 0].bool())


def test_top_positions_prefers_the_lower_position_on_ties():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, -torch.inf], [-torch.inf] * 5, [0.0, 0.0, 0.0, 1.0, 0.0]])
    assert ops.top_positions(scores, 2).tolist() == [[1, 2], [-1, -1], [0, 3]]
    assert ops.top_positions(scores, 9).tolist()[0] == [0, 1, 2, 3, -1]


def test_router_gives_the_written_example():
    """Spec §6.1: logits chosen directly, as the gate of a row that is 1."""
    logits = torch.tensor([[0.3, -1.2, 2.0, 0.7, -0.4, 1.1]])
    chosen, weights = ops.route(
        torch.ones(1, 1, dtype=torch.bfloat16),
        logits.T.contiguous(),
        torch.tensor([0, 1.5, -0.2, 0.1, 0.9, -0.3]),
        num_chosen=3,
        scaling=1.5,
    )
    by_expert = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    assert by_expert == pytest.approx({1: 0.286360, 4: 0.399729, 2: 0.813911}, abs=2e-6)


def test_compressor_state_carries_an_open_group(harness: Harness):
    """kernels/compressor: prefill of 17 leaves one open row; steps 17-20; a prefill of 21 at once; ratio 1."""
    data = golden("kernels/compressor")
    compressor = harness.model.blocks[2].attention.compressor
    assert compressor is not None
    ids = torch.zeros(21, dtype=torch.long)

    def latents(start: int, stop: int) -> torch.Tensor:
        batch = harness.runner.builder.build([harness.segment(ids, start, stop)])
        step = harness.model.begin(batch, harness.cache)
        return compressor.latents(data["layer2.x"][0, start:stop], step)

    with torch.inference_mode():
        assert torch.equal(latents(0, 17), data["layer2.prefill17.latent"][0])
        open_row = data["layer2.prefill17.kv_state"][0, 0]
        row = 16 % harness.cache.open_rows[2]
        torch.testing.assert_close(harness.cache.open_values[2][row], open_row, rtol=1e-6, atol=1e-6)
        for position in (17, 18, 19, 20):
            made = latents(position, position + 1)
            expected = data.get(f"layer2.step{position}.latent")
            assert (len(made) == 0) if expected is None else torch.equal(made, expected[0])
        assert torch.equal(latents(0, 20), data["layer2.prefill20.latent"][0])
        ratio_one = harness.model.blocks[6].attention.compressor
        assert ratio_one is not None
        step = harness.model.begin(harness.runner.builder.build([harness.segment(ids, 0, 21)]), harness.cache)
        assert torch.equal(ratio_one.latents(data["layer6.x"][0], step), data["layer6.prefill21.latent"][0])
