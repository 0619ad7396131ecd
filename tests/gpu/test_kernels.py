"""Each kernel against the operator it computes, on fresh random inputs, at sizes with a ragged edge everywhere."""

from __future__ import annotations

import re
import zlib

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import (
    attention,
    compress,
    engram,
    experts,
    hyper,
    indexer,
    linear,
    packing,
    records,
    routing,
    tiles,
    topk,
)
from deskfleet.engine.cuda.checks import mix_matrix, relative_error
from deskfleet.engine.ops import quant, reference
from deskfleet.engine.ops.quant import Fp4Matrix
from deskfleet.engine.ops.records import ENTRY, INDEX_KEY, WINDOW
from tests.gpu.conftest import HAS_GPU

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore")]

EPS = 1e-20
# The kernels round where the reference does, so a last place apart is rare in the interpreter, which sums in float32;
# one of bf16 is 4e-3 of a value. The tensor cores keep some 13 bits of FP8 products beside the greatest one, and cut
# off the rest: that moves one value in twenty by a last place, and by a code where it is quantised again.
BF16 = 4e-3 if HAS_GPU else 5e-4
EXACT = 5e-4  # of products whose sums are float32 there, too
FLOAT32 = 2e-5 if HAS_GPU else 2e-6
MIXES = 1e-4 if HAS_GPU else 1e-5


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers in every run, others in every test."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def assert_neighbours(mine: Tensor, expected: Tensor) -> None:
    """Equal but for a few codes, and those by one: a last place of bf16 decides there."""
    differs = mine.float() != expected.float()
    apart = (mine.float() - expected.float()).abs()
    # What cancels to nearly nothing has the error of its summands: a last place of the row's usual value.
    rms = expected.float().square().mean(-1, keepdim=True).sqrt()
    step = torch.maximum(expected.float().abs() / 8, rms * 2.0**-7)
    assert bool((apart <= step).all()), f"by more than a code: {float((apart / step).max())}"
    assert differs.float().mean() <= 0.03, f"{int(differs.sum())} of {differs.numel()} codes differ"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def fp4(*shape: int) -> Fp4Matrix:
    *batch, rows, columns = shape
    codes = torch.randint(0, 256, (*batch, rows, columns // 2), dtype=torch.uint8)
    return Fp4Matrix(codes, torch.randint(118, 125, (*batch, rows, columns // 32), dtype=torch.uint8))


def fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes -= ((codes & 0x7F) == 0x7F).to(torch.uint8)  # the two codes that are no numbers
    return codes, torch.randint(111, 117, (rows // 32, columns // 32), dtype=torch.uint8)


def quantized(x: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """What kernels take of bf16 x: codes and scale words."""
    codes, scales = quant.quantize_fp8(x)
    return codes.to(device), packing.scale_words(scales.view(torch.uint8)).to(device)


def fp8_on(device: torch.device, packed: packing.Fp8Tiles, *, exact: bool = False) -> packing.Fp8Tiles:
    return packing.Fp8Tiles(
        packed.codes.to(device), packed.scales.to(device), packed.num_rows, packed.num_columns, exact
    )


def fp4_on(device: torch.device, packed: packing.Fp4Tiles, *, exact: bool = False) -> packing.Fp4Tiles:
    return packing.Fp4Tiles(
        packed.codes.to(device), packed.scales.to(device), packed.num_rows, packed.num_columns, exact
    )


def rotation(rows: int, width: int = 64) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, width // 2) * 9
    return angle.cos(), angle.sin()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Output memory in which an element that is not written shows."""
    return torch.full(shape, float("nan"), device=device).to(dtype)


def test_packing_gives_back_what_it_took() -> None:
    matrix, (codes, scales) = fp4(2, 256, 320), fp8(192, 320)
    for gated in (False, True):
        back = packing.unpack_fp4(packing.pack_fp4(matrix, gated=gated), gated=gated)
        assert torch.equal(back.codes, matrix.codes)
        assert torch.equal(back.scales, matrix.scales)
    for paired in (False, True):
        packed = packing.pack_fp8(codes, scales, paired=paired)
        assert all(map(torch.equal, packing.unpack_fp8(packed), (codes, scales)))


def bf16_pair(word: int) -> Tensor:
    """float64 [2] of a 32-bit word, the low half first."""
    return (
        torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .double()
    )


def word_of(pair: Tensor) -> int:
    """The inverse of `bf16_pair`, rounded."""
    low, high = (int(bits) & 0xFFFF for bits in pair.to(torch.bfloat16).view(torch.int16))
    return low | high << 16


def run_ptx(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Execute the few instructions that the decoders are made of on 32-bit registers."""
    values = dict(inputs)

    def read(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for statement in text.strip("{} ").split(";"):
        found = re.match(r"\s*([\w.]+)\s+(.*)", statement)
        if not found or found[1].startswith(".reg"):
            continue
        operation, (target, *sources) = found[1], [part.strip() for part in found[2].split(",")]
        a = [read(source) for source in sources]
        if operation == "mul.rn.bf16x2":
            result = word_of(bf16_pair(a[0]) * bf16_pair(a[1]))
        elif operation == "prmt.b32":
            eight = (a[0] | a[1] << 32).to_bytes(8, "little")
            result = int.from_bytes([eight[a[2] >> (4 * place) & 7] for place in range(4)], "little")
        elif operation == "lop3.b32":
            result = 0
            for bit in range(32):
                index = ((a[0] >> bit & 1) << 2) | ((a[1] >> bit & 1) << 1) | (a[2] >> bit & 1)
                result |= (a[3] >> index & 1) << bit
        elif operation == "mov.b32":
            result = a[0]
        elif operation == "and.b32":
            result = a[0] & a[1]
        else:
            result = a[0] << a[1] if operation == "shl.b32" else a[0] >> a[1]
        values[target] = result & 0xFFFFFFFF
    return values


def test_the_ptx_that_the_interpreter_cannot_run() -> None:
    """Its instructions, carried out here, give what the plain arithmetic gives, for every byte in every place."""
    every = torch.arange(256, dtype=torch.uint8)
    shifted = [every.roll(-shift) for shift in (0, 71, 142, 213)]
    words = sum(part.to(torch.int64) << (8 * place) for place, part in enumerate(shifted))
    for text, plain in (
        (tiles.FIRST_CODES, every & 0x9C),
        (tiles.SECOND_CODES, ((every << 2) & 0x8C) | ((every >> 2) & 0x10)),
    ):
        results = torch.tensor([run_ptx(text, {"$1": int(word)})["$0"] for word in words])
        for place, shift in enumerate((0, 71, 142, 213)):
            assert torch.equal(results >> (8 * place) & 0xFF, plain.roll(-shift).to(torch.int64))
    values = every.view(torch.float8_e4m3fn).to(torch.float64)
    kept = torch.isfinite(values)
    for text, place in ((tiles.LOW_CODES, 0), (tiles.HIGH_CODES, 1)):
        results = torch.tensor([run_ptx(text, {"$1": int(word)})["$0"] for word in words])
        for half in (0, 1):
            mine = torch.stack([bf16_pair(int(result))[half] for result in results])
            shift = (0, 71, 142, 213)[2 * half + place]
            assert torch.equal(mine[kept.roll(-shift)], values.roll(-shift)[kept.roll(-shift)])


def test_the_ptx_of_records() -> None:
    """Every code in every place times scales of its own, exact."""
    numbers = torch.randperm(256)
    first, second = torch.tensor([0.375, 96.0]), torch.tensor([2.0**-9, 1.5])
    fp8 = numbers.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    nibbles = torch.tensor(
        quant.FP4_MAGNITUDES + tuple(-m for m in quant.FP4_MAGNITUDES), dtype=torch.float64
    )
    for start in range(0, 256, 4):
        codes, values = numbers[start : start + 4], fp8[start : start + 4]
        word = sum(int(code) << (8 * place) for place, code in enumerate(codes))
        out = run_ptx(records.FP8_ELEMENTS, {"$2": word_of(first), "$3": word})
        for place in (0, 1):
            kept = values[place::2].isfinite()
            expected = (values[place::2] * first).to(torch.bfloat16).double()
            assert torch.equal(bf16_pair(out[f"${place}"])[kept], expected[kept])
        out = run_ptx(records.FP4_ELEMENTS, {"$4": word_of(first), "$5": word_of(second), "$6": word})
        for place, shift in ((0, 0), (2, 4)):
            mine = torch.cat((bf16_pair(out[f"${place}"]), bf16_pair(out[f"${place + 1}"])))
            assert torch.equal(mine, nibbles[codes >> shift & 0xF] * torch.cat((first, second)))


@pytest.mark.parametrize(
    ("rows", "width", "expert_width", "num_experts", "num_chosen", "tuning", "exact"),
    [
        (1, 256, 64, 8, 2, None, False),
        (5, 320, 192, 4, 3, None, False),
        (20, 128, 64, 3, 2, None, False),
        (2, 1024, 64, 6, 2, None, False),
        (9, 320, 64, 2, 1, experts.Tuning(groups=4, tiles=3), False),
        (5, 320, 192, 4, 3, None, True),
        (20, 256, 128, 3, 2, None, True),
    ],
    ids=[
        "one row",
        "ragged width",
        "more than 16 rows an expert",
        "split K",
        "all tiles in a program",
        "exact",
        "exact, more rows",
    ],
)
def test_routed_experts(
    device: torch.device,
    bit_ops: bool,
    rows: int,
    width: int,
    expert_width: int,
    num_experts: int,
    num_chosen: int,
    tuning: experts.Tuning | None,
    exact: bool,
) -> None:
    """The widths of a packed matrix are rounded up to 128 rows by the caller: w2 has `width` of them."""
    out_rows = -(-width // 128) * 128
    w13, w2 = fp4(num_experts, 2 * expert_width, width), fp4(num_experts, out_rows, expert_width)
    x = normal(rows, width).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(num_experts)[:num_chosen] for _ in range(rows)])
    weights = torch.rand(rows, num_chosen)
    shape = experts.ExpertShape(width, expert_width, num_experts, num_chosen)
    buffers = experts.ExpertBuffers(shape, rows, device, tuning)
    buffers.outputs = poisoned((rows * num_chosen, out_rows), torch.bfloat16, device)
    codes, scales = quantized(x, device)
    packed13, packed2 = (
        fp4_on(device, packing.pack_fp4(w13, gated=True), exact=exact),
        fp4_on(device, packing.pack_fp4(w2), exact=exact),
    )
    for _ in range(2):  # counters and lists must be left as they were found
        buffers.num_items.zero_()
        experts.list_items(chosen.to(torch.int32).to(device), buffers)
        experts.routed_up(codes, scales, packed13, weights.to(device), buffers, 10.0, bit_ops=bit_ops)
        experts.routed_down(packed2, buffers, bit_ops=bit_ops)
    expected = torch.zeros(rows, out_rows, dtype=torch.float64)
    for expert in range(num_experts):
        mine = reference.fake_quant_fp8(x).to(torch.float64) @ w13[expert].decode().T
        gate, up = mine.to(torch.bfloat16).chunk(2, -1)
        for row, place in (chosen == expert).nonzero().tolist():
            activated = reference.expert_activation(
                gate[row : row + 1], up[row : row + 1], 10.0, weights[row, place : place + 1]
            )
            expected[row] += reference.quantized_linear(activated, w2[expert].decode())[0].to(torch.float64)
    total = buffers.outputs.cpu().to(torch.float64).view(rows, num_chosen, -1).sum(1)
    assert relative_error(total, expected) < (EXACT if exact else BF16)
    assert not buffers.counters.any()


@pytest.mark.parametrize(
    ("rows", "width", "exact"),
    [(18, 256, False), (3, 320, False), (18, 320, True)],
    ids=["more than a block", "ragged width", "exact"],
)
def test_shared_expert(device: torch.device, bit_ops: bool, rows: int, width: int, exact: bool) -> None:
    expert_width = 192
    (codes13, scales13), (codes2, scales2) = fp8(2 * expert_width, width), fp8(width, expert_width)
    x = normal(rows, width).to(torch.bfloat16)
    buffers = experts.SharedBuffers(width, expert_width, rows, device)
    codes, scales = quantized(x, device)
    experts.shared_up(
        codes,
        scales,
        fp8_on(device, packing.pack_fp8(codes13, scales13, gated=True), exact=exact),
        buffers,
        10.0,
        bit_ops=bit_ops,
    )
    packed2 = fp8_on(device, packing.pack_fp8(codes2, scales2), exact=exact)
    experts.shared_down(packed2, buffers, bit_ops=bit_ops)
    expected = reference.shared_expert(
        x,
        quant.dequantize_fp8_weight(codes13, scales13),
        quant.dequantize_fp8_weight(codes2, scales2),
        limit=10.0,
    )
    assert relative_error(buffers.outputs, expected) < (EXACT if exact else BF16)


@pytest.mark.parametrize(
    ("rows", "num_outputs", "width", "splits", "head", "exact"),
    [
        (1, 192, 320, 2, 0, False),
        (18, 256, 256, 1, 256, False),
        (3, 128, 1280, 4, 128, False),
        (33, 256, 128, 1, 0, False),
        (3, 512, 64, 1, 64, False),
        (2, 128, 128, 1, 32, False),
        (12, 192, 320, 2, 0, True),
        (33, 256, 256, 1, 64, True),
    ],
)
def test_fp8_linear(
    device: torch.device,
    bit_ops: bool,
    rows: int,
    num_outputs: int,
    width: int,
    splits: int,
    head: int,
    exact: bool,
) -> None:
    """bf16, rotated and FP8 outputs of the same product."""
    weight = fp8(num_outputs, width)
    x = normal(rows, width).to(torch.bfloat16)
    work = linear.SplitBuffers(1 << 18, 64, device)
    packed, (codes, scales) = fp8_on(device, packing.pack_fp8(*weight), exact=exact), quantized(x, device)
    expected = reference.quantized_linear(x, quant.dequantize_fp8_weight(*weight))
    out = poisoned((rows, num_outputs), torch.bfloat16, device)
    rope = rotation(rows, 16 if head in (32, 64) else 64)
    linear.fp8_linear(
        codes, scales, packed, out, work, splits=splits, bit_ops=bit_ops, rope_head=head,
        rope=(rope[0].to(device), rope[1].to(device)),
    )  # fmt: skip
    turned = expected
    if head:
        turned = reference.apply_rope(expected.unflatten(1, (-1, head)), *rope).flatten(1)
    assert relative_error(out, turned) < (EXACT if exact else BF16)
    if not head:  # the same bits, whoever adds the parts up
        parts = linear.fp8_linear(
            codes, scales, packed, torch.empty_like(out), work, splits=splits, bit_ops=bit_ops, unsummed=True
        )
        few = linear.fewest(codes, bit_ops=bit_ops)  # these sum within a block
        assert parts.shape == (out.shape if splits == 1 or few else (splits, *out.shape))
        assert torch.equal(linear.summed(parts), out)
    out8 = torch.zeros(rows, num_outputs, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    out_scales = torch.zeros(rows, -(-num_outputs // 128), dtype=torch.int32, device=device)
    linear.fp8_linear(
        codes, scales, packed, out8, work, splits=splits, bit_ops=bit_ops, out_scales=out_scales
    )
    decoded = reference.decode_fp8_rows(
        out8.view(torch.uint8).cpu(), out_scales.cpu().view(torch.uint8)[:, : num_outputs // 32]
    )
    assert_neighbours(decoded, quant.fake_quant_fp8(expected))
    assert not work.counters.any()


def test_grouped_and_bf16_linear(device: torch.device, bit_ops: bool) -> None:
    rows, groups, width = 3, 2, 256
    weight = fp8(groups * 128, width)
    x = normal(rows, groups * width).to(torch.bfloat16)
    work = linear.SplitBuffers(1 << 16, 64, device)
    out = torch.zeros(rows, groups * 128, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(rows, groups, dtype=torch.int32, device=device)
    packed = fp8_on(device, packing.pack_fp8(*weight, paired=True))
    linear.grouped_linear(x.to(device), packed, out, scales, work, groups=groups, splits=2, bit_ops=bit_ops)
    matrix = quant.dequantize_fp8_weight(*weight).unflatten(0, (groups, -1))
    expected = reference.grouped_linear(x.unflatten(1, (groups, -1)), matrix).flatten(1)
    decoded = reference.decode_fp8_rows(out.view(torch.uint8).cpu(), scales.cpu().view(torch.uint8))
    assert_neighbours(decoded, quant.fake_quant_fp8(expected))
    weight16, x = normal(100, 320).to(torch.bfloat16), normal(17, 320).to(torch.bfloat16)
    out32 = poisoned((17, 100), torch.float32, device)
    linear.bf16_linear(
        x.to(device), linear.pack_bf16(weight16).to(device), out32, work, splits=2, bit_ops=bit_ops
    )
    assert relative_error(out32, reference.linear_f32(x, weight16)) < FLOAT32


@pytest.mark.parametrize(("rows", "parts", "width"), [(3, 1, 1024), (17, 3, 1024), (2, 3, 128)])
def test_hyper_connection(device: torch.device, bit_ops: bool, rows: int, parts: int, width: int) -> None:
    weight, base, scale = normal(24, 4 * width) * 0.02, normal(24), normal(3)
    norm = 1 + 0.1 * normal(width)
    stream, output = normal(rows, 4, width).to(torch.bfloat16), normal(rows * parts, width).to(torch.bfloat16)
    given = output
    if parts == 1:  # a split sum, to be added up here
        given = normal(3, rows, width)
        output = linear.summed(given)
    shared = normal(rows, width).to(torch.bfloat16) if parts > 1 else None
    pre, post, comb = torch.rand(rows, 4), torch.rand(rows, 4), torch.rand(rows, 4, 4)
    buffers = hyper.StreamBuffers(width, rows, device)
    for target, value in (
        (buffers.stream, stream),
        (buffers.pre, pre),
        (buffers.post, post),
        (buffers.comb, comb),
    ):
        target.copy_(value)
    taps = poisoned((rows, 2 * width), torch.bfloat16, device)[:, width:]
    packed = packing.pack_mixes(weight).to(device)
    hyper.mix(
        buffers, packed, output=given.to(device), shared=None if shared is None else shared.to(device), parts=parts,
        taps=taps, bit_ops=bit_ops,
    )  # fmt: skip
    hyper.finish(
        buffers, norm.to(device), scale.to(device), base.to(device), iterations=20, norm_eps=EPS, eps=1e-6,
        bit_ops=bit_ops,
    )  # fmt: skip
    if shared is not None:
        output = reference.add_round(output.to(torch.float64).view(rows, parts, -1).sum(1), shared)
    expanded = reference.hc_expand(output, stream, post, comb)
    assert relative_error(buffers.stream, expanded) < BF16
    assert relative_error(taps, expanded.to(torch.float64).mean(1)) < 3e-3
    x = reference.hc_collapse_norm(buffers.stream.cpu(), pre, norm, EPS)
    assert relative_error(buffers.x, x) < BF16
    codes, scales = quant.quantize_fp8(buffers.x.cpu())
    assert torch.equal(buffers.codes.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(buffers.scales.cpu(), packing.scale_words(scales.view(torch.uint8)))
    mixes = reference.hc_weights(
        buffers.stream.cpu(), weight, scale, base, norm_eps=EPS, iterations=20, eps=1e-6
    )
    for mine, theirs in zip((buffers.pre, buffers.post, buffers.comb), mixes, strict=True):
        assert relative_error(mine, theirs) < MIXES
    assert relative_error(mix_matrix(packed.cpu()), weight) < 1e-5


def test_streams_begin_as_embeddings(device: torch.device, bit_ops: bool) -> None:
    """Rows as they are or as a float32 sum, which is rounded; rows of images are the images'."""
    rows, width = 5, 1280
    images, text = normal(rows, width).to(torch.bfloat16), torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    buffers = hyper.StreamBuffers(width, rows, device)
    for given in (normal(rows, width).to(torch.bfloat16), normal(rows, width)):
        for others in (None, (text.to(device), images.to(device))):
            buffers.stream.fill_(float("nan")), buffers.pre.fill_(float("nan"))
            hyper.start(buffers, given.to(device), bit_ops=bit_ops, images=others)
            expected = given.to(torch.bfloat16)
            if others is not None:
                expected = torch.where(text[:, None] != 0, expected, images)
            assert torch.equal(buffers.stream.cpu(), expected[:, None].expand(-1, 4, -1))
            assert torch.equal(buffers.pre.cpu(), torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(rows, 4))


@pytest.mark.parametrize("rows", [4, 11], ids=["listed by the last", "listed apart"])
def test_routing(device: torch.device, rows: int) -> None:
    """Small and great scores, a tie that goes to the lower expert; lists of the experts of one rank of two."""
    num_experts = 384
    logits, bias = normal(rows, num_experts) * 6, normal(num_experts) * 0.1
    logits[0, 7] = logits[0, 300] = 30.0
    bias[7] = bias[300] = 0.5
    logits[1] = -30.0 - torch.arange(num_experts) * 0.1
    logits[:, 200] += 20.0  # chosen by all: more than an item takes
    first, num_held = 150, 192
    chosen = torch.zeros(rows, 6, dtype=torch.int32, device=device)
    weights = torch.zeros(rows, 6, device=device)
    buffers = experts.ExpertBuffers(experts.ExpertShape(64, 64, num_held, 6), rows, device)
    identity = torch.eye(num_experts, dtype=torch.float64)
    expected, expected_weights = reference.route(logits.double(), identity, bias, num_chosen=6, scaling=1.5)
    listed = []
    for expert in range(num_held):
        pairs = (expected.flatten() == expert + first).nonzero().flatten().tolist()
        listed += [(expert, pairs[begin : begin + 8]) for begin in range(0, len(pairs), 8)]
    for _ in range(2):  # the counter must be left as it was found
        routing.choose(
            logits.to(device), bias.to(device), chosen, weights, buffers, scaling=1.5, first_expert=first
        )
        assert torch.equal(chosen.cpu().long(), expected)
        assert relative_error(weights, expected_weights) < FLOAT32
        assert read_items(buffers) == listed
        buffers.num_items.zero_()
        buffers.items.fill_(-1)
        experts.list_items(chosen, buffers, first_expert=first)
        assert read_items(buffers) == listed


def read_items(buffers: experts.ExpertBuffers) -> list[tuple[int, list[int]]]:
    """The work list, in the order of experts and pairs."""
    count = int(buffers.num_items)
    items, pairs = buffers.items[:count].tolist(), buffers.item_pairs[:count].tolist()
    return sorted((expert, own[:number]) for (expert, number), own in zip(items, pairs, strict=True))


PUBLISHED = attention.AttentionShape(heads=16, width=512, rope=64, window=128)
POCKET = attention.AttentionShape(heads=8, width=64, rope=16, window=64)
GOLDEN = attention.AttentionShape(heads=16, width=64, rope=16, window=16)
WIDE = attention.AttentionShape(heads=24, width=64, rope=16, window=64)


@pytest.mark.parametrize(
    ("shape", "rows", "num_picks", "splits"),
    [
        (PUBLISHED, 2, 512, 20),
        (PUBLISHED, 3, 0, 2),
        (PUBLISHED, 1, 64, 3),
        (PUBLISHED, 1, 64, 1),
        (POCKET, 2, 64, 4),
        (GOLDEN, 3, 8, 2),
        (WIDE, 2, 64, 3),
        (WIDE, 2, 64, 5),
    ],
    ids=[
        "parts merged apart",
        "window alone",
        "parts merged by the last",
        "one part",
        "half of a head block",
        "less than a block of keys",
        "more than a head block",
        "more than a head block, merged apart",
    ],
)
def test_attention(
    device: torch.device,
    bit_ops: bool,
    shape: attention.AttentionShape,
    rows: int,
    num_picks: int,
    splits: int,
) -> None:
    """Latents and records from the projection, then the core over scattered pages, windows that begin late included."""
    block_size, blocks, num_slots = 64, 8, 2
    size, width = shape.width, 64 if shape is GOLDEN else 128
    slots = torch.randint(0, num_slots, (rows,), dtype=torch.int32)
    positions = torch.tensor([5, 200, 400], dtype=torch.int32)[:rows]
    tables = [
        (torch.randperm(num_slots * blocks) + 1).view(num_slots, blocks).to(torch.int32) for _ in range(2)
    ]
    count = (num_slots * blocks + 1) * block_size
    windows = WINDOW.pack(normal(count, size).to(torch.bfloat16)).to(device)
    entries = ENTRY.pack(normal(count, size).to(torch.bfloat16)).to(device)
    rope = rotation(rows, shape.rope)
    on_device = tuple(part.to(device) for part in rope)
    where = [part.to(device) for part in (slots, positions, *tables)]
    qkv, q_norm, kv_norm = (
        normal(rows, width + size).to(torch.bfloat16),
        torch.rand(width) + 0.5,
        torch.rand(size) + 0.5,
    )
    codes = torch.zeros(rows, width, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.zeros(rows, 1, dtype=torch.int32, device=device)
    before = windows.clone()
    attention.write_latents(
        qkv.to(device), q_norm.to(device), kv_norm.to(device), on_device, codes, scales, windows,
        (where[0], where[1], where[2]), block_size=block_size, eps=EPS, bit_ops=bit_ops,
    )  # fmt: skip
    low_rank = reference.decode_fp8_rows(
        codes.view(torch.uint8).cpu(), scales.cpu().view(torch.uint8)[:, : width // 32]
    )
    assert (
        relative_error(low_rank, quant.fake_quant_fp8(reference.rms_norm(qkv[:, :width], q_norm, EPS))) < 4e-3
    )
    own = (
        tables[0].long()[slots.long(), positions.long() // block_size] * block_size
        + positions.long() % block_size
    )
    record = WINDOW.pack(reference.apply_rope(reference.rms_norm(qkv[:, width:], kv_norm, EPS), *rope))
    assert relative_error(WINDOW.unpack(windows.cpu()[own]), WINDOW.unpack(record)) < 2e-3
    assert set((windows != before).any(1).nonzero().flatten().tolist()) <= set(own.tolist())

    picks = torch.full((rows, num_picks), -1, dtype=torch.int32)
    for row in range(rows if num_picks else 0):
        chosen = min(int(positions[row]) + 1, num_picks - 7)
        picks[row, :chosen] = torch.randperm(blocks * block_size)[:chosen].sort().values.to(torch.int32)
    query, sink = normal(rows, shape.heads, size).to(torch.bfloat16), normal(shape.heads)

    def places(table: Tensor, numbers: Tensor) -> Tensor:
        safe = numbers.clamp_min(0)
        found = table.long()[slots.long()[:, None], safe // block_size] * block_size + safe % block_size
        return torch.where(numbers < 0, -1, found)

    window = positions.long()[:, None] + 1 - shape.window + torch.arange(shape.window)
    located = torch.full((rows, shape.window), -9, dtype=torch.int32, device=device)
    attention.locate_window((where[0], where[1], where[2]), located, block_size=block_size)
    assert torch.equal(located.cpu().long(), places(tables[0], window))
    tuning = attention.AttendTuning(splits, merges=splits <= 4)
    buffers = attention.AttentionBuffers(shape, rows, num_picks, device, tuning)
    picked = places(tables[1], picks.long()).to(torch.int32).to(device)
    for _ in range(2):  # counters must be left as they were found
        buffers.out.fill_(float("nan"))
        attention.attend(
            query.flatten(1).to(device), windows, entries, (located, picked), sink.to(device), on_device, buffers,
            bit_ops=bit_ops,
        )  # fmt: skip
    sources = [
        (WINDOW.unpack(windows.cpu()), places(tables[0], window)),
        (ENTRY.unpack(entries.cpu()), places(tables[1], picks.long())),
    ]
    assert not buffers.counters.any()
    attended = reference.sparse_attention(query, sources, sink, size**-0.5)
    attended = reference.apply_rope(attended, *rope, inverse=True).flatten(1)
    # Weights are rounded to bf16 against another running maximum.
    assert relative_error(buffers.out, attended) < 4e-3


@pytest.mark.parametrize(
    ("ratio", "size", "key_size", "turned"), [(1, 512, 128, 64), (2, 512, 128, 64), (2, 64, 32, 16)]
)
def test_compressor(
    device: torch.device, bit_ops: bool, ratio: int, size: int, key_size: int, turned: int
) -> None:
    """Groups that stay open, that end with the row before them, and that began in an earlier step."""
    block_size, num_slots, blocks, num_open = 16, 3, 8, 7
    per_block = block_size // ratio
    slots = torch.tensor([0, 1, 1, 1, 2], dtype=torch.int32)
    positions = torch.tensor([7, 20, 21, 22, 33], dtype=torch.int32)
    table = (torch.randperm(num_slots * blocks) + 1).view(num_slots, blocks).to(torch.int32)
    projected, norm, rope = normal(5, 2 * size + 4), torch.rand(size) + 0.5, rotation(5, turned)
    state = normal(num_slots * num_open, 2 * size)
    keys, key_norm = normal(5, key_size), torch.rand(key_size) + 0.5
    num_records = (num_slots * blocks + 1) * per_block
    pages = torch.zeros(num_records, ENTRY.row_bytes(size), dtype=torch.uint8, device=device)
    key_pages = torch.zeros(num_records, INDEX_KEY.row_bytes(key_size), dtype=torch.uint8, device=device)
    latents = poisoned((5, size), torch.bfloat16, device)
    where = (slots.to(device), positions.to(device), table.to(device))
    on_device = (rope[0].to(device), rope[1].to(device))
    compress.pool(
        projected.to(device), state.to(device), norm.to(device), on_device, where, pages, latents, ratio=ratio,
        num_open=num_open, block_size=block_size, eps=EPS, bit_ops=bit_ops,
    )  # fmt: skip
    compress.write_keys(
        keys.to(device), key_norm.to(device), on_device, where, key_pages, ratio=ratio, block_size=block_size,
        eps=EPS, bit_ops=bit_ops,
    )  # fmt: skip
    done = []
    for row in range(5):
        position, slot = int(positions[row]), int(slots[row])
        if position % ratio != ratio - 1:
            continue
        pooled = projected[row : row + 1, :size].to(torch.bfloat16)
        if ratio == 2:
            first = (
                projected[row - 1, : 2 * size]
                if row == 2
                else state[slot * num_open + (position - 1) % num_open]
            )
            both = torch.stack((first, projected[row, : 2 * size]))[None]
            pooled = reference.compress_pairs(both[..., :size], both[..., size:])
        latent = reference.rms_norm(pooled, norm, EPS)
        turn = (rope[0][row : row + 1], rope[1][row : row + 1])
        at = int(table[slot, position // ratio // per_block]) * per_block + position // ratio % per_block
        key = reference.rms_norm(keys[row : row + 1].to(torch.bfloat16), key_norm, EPS)
        for form, mine, values in ((ENTRY, pages, latent), (INDEX_KEY, key_pages, key)):
            expected = form.unpack(form.pack(reference.apply_rope(values, *turn)))
            assert relative_error(form.unpack(mine[at : at + 1].cpu()), expected) < 0.02
        assert relative_error(latents[row : row + 1], latent) < BF16
        done.append(at)
    assert pages.any(1).nonzero().flatten().tolist() == sorted(done)
    assert key_pages.any(1).nonzero().flatten().tolist() == sorted(done)


@pytest.mark.parametrize(("heads", "size"), [(32, 128), (4, 32)])
def test_indexer(device: torch.device, bit_ops: bool, heads: int, size: int) -> None:
    """Scores of scattered keys, the exact best of them, ties included, and the row that takes all it sees."""
    rows, num_slots, blocks, block_size, ratio, num_picks = 3, 2, 8, 64, 2, 64
    per_block = block_size // ratio
    slots, positions = (
        torch.tensor([0, 1, 0], dtype=torch.int32),
        torch.tensor([400, 511, 62], dtype=torch.int32),
    )
    table = (torch.randperm(num_slots * blocks) + 1).view(num_slots, blocks).to(torch.int32)
    keys = normal((num_slots * blocks + 1) * per_block, size).to(torch.bfloat16)
    keys[1::3] = keys[0]  # many equal scores
    pages = INDEX_KEY.pack(keys)
    query, weights = normal(rows, heads, size).to(torch.bfloat16), normal(rows, 64)
    scores = torch.zeros(rows, 256, dtype=torch.bfloat16, device=device)
    picks = torch.full((rows, num_picks), -9, dtype=torch.int32, device=device)
    where = (slots.to(device), positions.to(device), table.to(device))
    indexer.score(
        query.flatten(1).to(device), weights.to(device)[:, :heads], pages.to(device), where, scores,
        num_picks=num_picks, weight_scale=1 / 64, ratio=ratio, block_size=block_size, bit_ops=bit_ops,
    )  # fmt: skip
    lies = torch.full((rows, num_picks), -9, dtype=torch.int32, device=device)
    topk.select(scores, where, picks, None, lies, ratio=ratio, block_size=block_size)
    for row in range(rows):
        count = (int(positions[row]) + 1) // ratio
        numbers = torch.arange(count)
        at = table[slots[row].long(), numbers // per_block].long() * per_block + numbers % per_block
        own_weights = weights[row : row + 1, :heads].to(torch.bfloat16) * (1 / 64)
        expected = reference.index_scores(
            quant.fake_quant_fp4_e8m0(query[row : row + 1]), own_weights,
            INDEX_KEY.unpack(pages)[at], numbers, torch.tensor([count]), None, block=8,
        )  # fmt: skip
        mine = scores[row : row + 1, :count].cpu() if count > num_picks else expected
        assert relative_error(mine, expected) < 3e-3
        best = torch.full((num_picks,), -1)
        found = reference.top_positions(mine, num_picks)[0]
        best[: len(found)] = found
        assert torch.equal(picks[row].cpu().long(), best)
        safe = best.clamp_min(0)
        at = table[slots[row].long(), safe // per_block].long() * per_block + safe % per_block
        assert torch.equal(lies[row].cpu().long(), torch.where(best < 0, -1, at))


def test_candidate_blocks(device: torch.device, bit_ops: bool) -> None:
    """More blocks than candidates in one row, fewer in the other; scores of another layer among them."""
    block_size, ratio, num_picks, unit, top_blocks = 64, 1, 16, 8, 8
    slots, positions = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([250, 50], dtype=torch.int32)
    table = (torch.randperm(8) + 1).view(2, 4).to(torch.int32)
    keys = normal(9 * block_size, 128).to(torch.bfloat16)
    pages = INDEX_KEY.pack(keys)
    where = (slots.to(device), positions.to(device), table.to(device))
    candidates = indexer.Candidates(2, 256, unit, top_blocks, device)
    candidates.allowed.fill_(7)
    scores = torch.zeros(2, 256, dtype=torch.bfloat16, device=device)
    query, weights = normal(2, 32, 128).to(torch.bfloat16), normal(2, 32)

    def score(among: indexer.Candidates | None) -> Tensor:
        indexer.score(
            query.flatten(1).to(device), weights.to(device), pages.to(device), where, scores, num_picks=num_picks,
            weight_scale=1 / 64, ratio=ratio, block_size=block_size, bit_ops=bit_ops, among=among,
        )  # fmt: skip
        return scores[:1, :251].cpu()

    free = score(None)
    indexer.narrow(scores, where, candidates, ratio=ratio, block_size=block_size)
    ranked = reference.candidate_scores(free, torch.arange(32), torch.tensor([251]), block=unit)
    best = reference.top_positions(ranked, top_blocks)
    assert torch.equal(candidates.picks[:1].cpu().long(), best)
    assert candidates.picks[1].cpu().tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    mask = reference.block_mask(best, 251, block=unit)
    assert torch.equal(candidates.allowed[:1].cpu().bool().repeat_interleave(unit, 1)[:, :251], mask)
    assert torch.equal(score(candidates), free.masked_fill(~mask, -torch.inf))


@pytest.mark.parametrize("width", [2048, 128])
def test_engram_gate(device: torch.device, bit_ops: bool, width: int) -> None:
    rows = 3
    stream, projected = normal(rows, 4, width).to(torch.bfloat16), normal(rows, 5 * width).to(torch.bfloat16)
    weight, alive = normal(4, width), torch.tensor([1, 0, 1], dtype=torch.int32)
    expected = reference.engram_gate(
        stream,
        projected[:, : 4 * width].unflatten(1, (4, width)),
        projected[:, 4 * width :],
        weight,
        alive.bool(),
        EPS,
    )
    mine = stream.to(device)
    engram.gate(mine, projected.to(device), weight.to(device), alive.to(device), eps=EPS, bit_ops=bit_ops)
    assert relative_error(mine, expected) < BF16
