"""The small kernels of a few rows against the operators they compute, in the emulator or on a GPU."""

from __future__ import annotations

import zlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deskfleet.engine.cuda import packing
from deskfleet.engine.cuda.native import attending, choice, entries, gating, latents, picking, streams
from deskfleet.engine.ops import quant, reference
from deskfleet.engine.ops.records import ENTRY, INDEX_KEY, WINDOW

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = 4e-3 if DEVICE.type == "cuda" else 1e-3
EPS = 1e-20


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers in every run, others in every test."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def relative_error(mine: Tensor, expected: Tensor) -> float:
    mine, expected = mine.cpu().double(), expected.double()
    return float((mine - expected).norm() / expected.norm())


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Output memory in which an element that is not written shows."""
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def poisoned_codes(*shape: int) -> Tensor:
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)


def stream_buffers(width: int, rows: int) -> SimpleNamespace:
    slices = width // 64
    return SimpleNamespace(
        width=width,
        num_rows=rows,
        stream=torch.randn(rows, 4, width).to(torch.bfloat16).to(DEVICE),
        collapsed=poisoned(rows, width, dtype=torch.bfloat16),
        collapsed_squares=poisoned(slices, rows),
        stream_squares=poisoned(slices, rows),
        mixes=poisoned(slices, rows, 24),
        x=poisoned(rows, width, dtype=torch.bfloat16),
        codes=poisoned_codes(rows, width),
        scales=torch.full((rows, width // 128), -1, dtype=torch.int32, device=DEVICE),
        pre=torch.rand(rows, 4).to(DEVICE),
        post=torch.rand(rows, 4).to(DEVICE),
        comb=torch.rand(rows, 4, 4).to(DEVICE),
    )


@pytest.mark.parametrize(
    ("rows", "width", "parts", "floats", "shares"),
    [
        (1, 384, 6, 0, 0), (3, 1280, 1, 0, 0), (8, 256, 1, 1, 0), (17, 128, 2, 0, 0), (2, 5120, 1, 3, 0),
        (67, 256, 3, 0, 3), (70, 384, 1, 0, 1), (9, 128, 1, 1, 2), (65, 128, 1, 3, 2),
    ],
    ids=[
        "pairs", "one output", "a sum over ranks", "more than a block", "parts of a split sum",
        "pairs of a chunk", "one output of a chunk", "a sum over ranks of a chunk",
        "parts of a split sum of a chunk",
    ],
)  # fmt: skip
def test_streams(rows: int, width: int, parts: int, floats: int, shares: int) -> None:
    """Expansion, taps, collapse, mixes and their split; the same with nothing to expand and nothing to mix. `shares`:
    by the kernels of many rows."""
    b = stream_buffers(width, rows)
    weight = torch.randn(24, 4 * width) * 0.02
    scale, base, norm = torch.rand(3) + 0.5, torch.randn(24), torch.rand(width) + 0.5
    packed = packing.pack_mixes(weight).to(DEVICE)
    stream, pre, post, comb = (tensor.cpu().clone() for tensor in (b.stream, b.pre, b.post, b.comb))
    given = (
        torch.randn(floats, rows, width) if floats else torch.randn(rows * parts, width).to(torch.bfloat16)
    )
    shared = torch.randn(rows, width).to(torch.bfloat16) if parts > 1 or floats == 1 else None
    taps = poisoned(rows, 2 * width, dtype=torch.bfloat16)[:, width:]
    whole = given.double().sum(0) if floats else given.double().view(rows, parts, width).sum(1)
    if floats > 1:
        whole = given.sum(0).to(torch.bfloat16).double()
    if shared is not None:
        whole = (whole + shared.double()).float().to(torch.bfloat16)
    expected = reference.hc_expand(whole.float(), stream, post, comb)

    def mix(mixed: Tensor | None, output: Tensor | None, tapped: Tensor | None) -> None:
        other = None if shared is None or output is None else shared.to(DEVICE)
        own = None if output is None else output.to(DEVICE)
        of_rows = parts if output is not None else 1
        if shares:
            streams.mix_rows(b, mixed, own, other, tapped, parts=of_rows, shares=shares)
        else:
            streams.mix(b, mixed, own, other, tapped, parts=of_rows)

    mix(packed, given, taps)
    assert relative_error(b.stream, expected) < BF16
    assert relative_error(taps, b.stream.cpu().double().mean(1)) < 3e-3
    now = b.stream.cpu().clone()
    left = [
        b.collapsed,
        *(part[: shares or width // 64] for part in (b.mixes, b.collapsed_squares, b.stream_squares)),
    ]
    first = [tensor.clone() for tensor in left]
    for tensor in left:
        tensor.fill_(float("nan"))
    mix(packed, None, None)
    for tensor, before in zip(left, first, strict=True):
        assert torch.equal(tensor, before)
    assert torch.equal(b.stream.cpu(), now)

    b.post.fill_(float("nan")), b.comb.fill_(float("nan"))
    finish = partial(streams.finish_rows, shares=shares) if shares else streams.finish
    finish(b, norm.to(DEVICE), scale.to(DEVICE), base.to(DEVICE), iterations=20, norm_eps=EPS, eps=1e-6)
    assert relative_error(b.x, reference.hc_collapse_norm(now, pre, norm, EPS)) < BF16
    codes, scales = quant.quantize_fp8(b.x.cpu())
    assert torch.equal(b.codes.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(b.scales.cpu(), packing.scale_words(scales.view(torch.uint8)))
    mixes = reference.hc_weights(now, weight, scale, base, norm_eps=EPS, iterations=20, eps=1e-6)
    for mine, theirs in zip((b.pre, b.post, b.comb), mixes, strict=True):
        assert relative_error(mine, theirs) < 2e-5

    before = [tensor.cpu().clone() for tensor in (b.stream, b.post, b.comb)]
    mix(None, given, None)
    assert relative_error(b.stream, reference.hc_expand(whole.float(), *before)) < BF16


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 40])
def test_choice(rows: int) -> None:
    """Small and great scores, ties that go to the lower expert; lists of the experts of one rank of two."""
    num_experts, first, num_held, members = 384, 150, 192, 8
    logits, bias = torch.randn(rows, num_experts) * 6, torch.randn(num_experts) * 0.1
    logits[0, 7] = logits[0, 300] = logits[0, 301] = 30.0
    bias[7] = bias[300] = bias[301] = 0.5
    logits[-1] = -30.0 - torch.arange(num_experts) * 0.1
    logits[:, 200] += 20.0  # chosen by all: more than an item takes
    bias[3] = -9.0  # below zero
    chosen = torch.full((rows, 6), -1, dtype=torch.int32, device=DEVICE)
    weights = poisoned(rows, 6)
    most = min(rows * 6, num_held) + rows * 6 // members
    items, pairs, (count, counter) = (
        torch.full((most, 2), -1, dtype=torch.int32, device=DEVICE),
        torch.full((most, members), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, 1, dtype=torch.int32, device=DEVICE),
    )
    identity = torch.eye(num_experts, dtype=torch.float64)
    expected, expected_weights = reference.route(logits.double(), identity, bias, num_chosen=6, scaling=1.5)
    listed = []
    for expert in range(num_held):
        own = (expected.flatten() == expert + first).nonzero().flatten().tolist()
        listed += [(expert, own[begin : begin + members]) for begin in range(0, len(own), members)]
    for _ in range(2):  # the counter must be left as it was found
        choice.choose(
            logits.to(DEVICE), bias.to(DEVICE), chosen, weights, (items, pairs, count), counter,
            num_held=num_held, scaling=1.5, first_expert=first,
        )  # fmt: skip
        assert torch.equal(chosen.cpu().long(), expected)
        assert relative_error(weights, expected_weights) < 1e-5
        number = int(count)
        found = zip(items[:number].tolist(), pairs[:number].tolist(), strict=True)
        assert sorted((expert, own[:taken]) for (expert, taken), own in found) == listed
        assert not counter.any()


@pytest.mark.parametrize(
    ("rows", "low_rank", "size", "rope"), [(1, 1536, 512, 64), (3, 96, 64, 16), (17, 320, 128, 64)]
)
def test_latents(rows: int, low_rank: int, size: int, rope: int) -> None:
    """Low ranks and window records; a row without a place writes none."""
    block_size, blocks, num_slots = 64, 3, 3
    slots = torch.randint(0, num_slots, (rows,), dtype=torch.int32)
    positions = torch.randperm(blocks * block_size)[:rows].to(torch.int32)
    table = (torch.randperm(num_slots * blocks) + 1).view(num_slots, blocks).to(torch.int32)
    if rows > 1:
        table[slots[1]] = 0
    pages = torch.full(
        ((num_slots * blocks + 1) * block_size, WINDOW.row_bytes(size)),
        0x55,
        dtype=torch.uint8,
        device=DEVICE,
    )
    before = pages.clone()
    qkv = torch.randn(rows, low_rank + size).to(torch.bfloat16)
    q_norm, kv_norm = torch.rand(low_rank) + 0.5, torch.rand(size) + 0.5
    angle = torch.rand(rows, rope // 2) * 9
    turn = angle.cos(), angle.sin()
    codes = poisoned_codes(rows, low_rank)
    scales = torch.zeros(rows, -(-low_rank // 128), dtype=torch.int32, device=DEVICE)
    latents.write_latents(
        qkv.to(DEVICE), (q_norm.to(DEVICE), kv_norm.to(DEVICE)), (turn[0].to(DEVICE), turn[1].to(DEVICE)), codes,
        scales, pages, (slots.to(DEVICE), positions.to(DEVICE), table.to(DEVICE)), block_size=block_size, eps=EPS,
    )  # fmt: skip
    expected = quant.fake_quant_fp8(reference.rms_norm(qkv[:, :low_rank], q_norm, EPS))
    words = scales.cpu().view(torch.uint8)
    scale = torch.exp2(words[:, : low_rank // 32].float() - 127).repeat_interleave(32, 1)
    assert relative_error(codes.float().cpu() * scale, expected) < BF16
    assert not words[:, low_rank // 32 :].any()
    block = table.long()[slots.long(), positions.long() // block_size]
    own = block * block_size + positions.long() % block_size
    record = WINDOW.pack(reference.apply_rope(reference.rms_norm(qkv[:, low_rank:], kv_norm, EPS), *turn))
    kept = block > 0
    mine = WINDOW.unpack(pages.cpu()[own[kept]])
    assert relative_error(mine, WINDOW.unpack(record[kept])) < 2e-3
    changed = (pages != before).any(1).nonzero().flatten().tolist()
    assert set(changed) == set(own[kept].tolist())


@pytest.mark.parametrize(
    ("rows", "heads", "num_picks", "splits"),
    [
        (1, 16, 512, None),
        (3, 16, 64, None),
        (2, 8, 0, 3),
        (2, 24, 40, 2),
        (1, 16, 64, 1),
        (2, 16, 512, 3),
        (16, 8, 512, None),
        (64, 16, 0, 2),
        (33, 16, 64, None),
    ],
    ids=[
        "one chunk a block",
        "a list that ends early",
        "window alone",
        "more than a head block",
        "one part",
        "more chunks than the ring has",
        "two chunks a block",
        "windows of many rows",
        "many rows",
    ],
)
def test_attention(rows: int, heads: int, num_picks: int, splits: int | None) -> None:
    """Windows that begin late, lists with absent places, and rows of pages that nobody names, which are no numbers."""
    size, rope, window, count = 512, 64, 128 if num_picks else 133, 700
    shape = attending.Heads(heads, size, rope, window, num_picks)
    splits = splits or shape.splits(rows)
    window_pages = WINDOW.pack((torch.randn(count, size) * 2).to(torch.bfloat16))
    entry_pages = ENTRY.pack((torch.randn(count, size) * 2).to(torch.bfloat16))
    records = torch.stack([torch.randperm(count - 1)[:window] for _ in range(rows)])
    records[0, : window - 6] = -1
    picks = torch.full((rows, num_picks), -1)
    for row in range(rows if num_picks else 0):
        taken = min(num_picks, 7 + 300 * row) if num_picks < 512 else 505
        picks[row, :taken] = torch.randperm(count - 1)[:taken]
    window_pages[-1], entry_pages[-1] = 0x7F, 0x7F  # E4M3 NaN
    query, sink = torch.randn(rows, heads, size).to(torch.bfloat16), torch.randn(heads)
    query[-1] *= 8  # whose scores rise far along the list
    angle = torch.rand(rows, rope // 2) * 9
    turn = angle.cos(), angle.sin()
    padded = -(-heads // 16) * 16
    parts = (
        poisoned(rows, splits, padded, size),
        poisoned(rows, splits, padded),
        poisoned(rows, splits, padded),
    )
    out = poisoned(rows, heads * size, dtype=torch.bfloat16)

    def places(numbers: Tensor) -> Tensor:
        return numbers.to(torch.int32).to(DEVICE)

    for picks_are_new in (False, True):
        out.fill_(float("nan"))
        attending.attend(
            query.flatten(1).to(DEVICE), (window_pages.to(DEVICE), entry_pages.to(DEVICE) if num_picks else None),
            (places(records), places(picks) if num_picks else None), sink.to(DEVICE),
            (turn[0].to(DEVICE), turn[1].to(DEVICE)), parts, out, shape, splits=splits, picks_are_new=picks_are_new,
        )  # fmt: skip
        sources = [(WINDOW.unpack(window_pages), records), (ENTRY.unpack(entry_pages), picks)]
        attended = reference.sparse_attention(query, sources, sink, size**-0.5)
        expected = reference.apply_rope(attended, *turn, inverse=True).flatten(1)
        # Weights are rounded to bf16 against another running maximum. In a row of few heads that averages out less; the
        # last one is by far the greatest.
        assert relative_error(out, expected) < 4e-3
        assert max(map(relative_error, out, expected)) < 5e-3


@pytest.mark.parametrize("restricts", [False, True])
def test_scores(restricts: bool) -> None:
    """Scattered keys, rows that take all they see, more entries than the blocks take at once, candidate blocks."""
    rows, blocks, block_size, ratio, num_picks, heads, size = 6, 8, 64, 2, 64, 32, 128
    per_block, unit, top_blocks = block_size // ratio, 8, 16
    slots = torch.tensor([0, 1, 0, 1, 1, 0], dtype=torch.int32)
    positions = torch.tensor([400, 511, 62, 129, 257, 130], dtype=torch.int32)
    table = (torch.randperm(2 * blocks) + 1).view(2, blocks).to(torch.int32)
    pages = INDEX_KEY.pack(torch.randn((2 * blocks + 1) * per_block, size).to(torch.bfloat16))
    query, weights = torch.randn(rows, heads, size).to(torch.bfloat16), torch.randn(rows, heads + 9)
    scores = poisoned(rows, blocks * per_block, dtype=torch.bfloat16)
    allowed = torch.randint(0, 2, (rows, blocks * per_block // unit), dtype=torch.uint8)
    among = picking.Allowed(allowed.to(DEVICE), unit, top_blocks) if restricts else None
    for most in (264, 6):
        picking._MOST_BLOCKS, before = most, picking._MOST_BLOCKS
        scores.fill_(float("nan"))
        picking.score(
            query.flatten(1).to(DEVICE), weights.to(DEVICE)[:, :heads], pages.to(DEVICE),
            (slots.to(DEVICE), positions.to(DEVICE), table.to(DEVICE)), scores, among,
            num_picks=num_picks, weight_scale=1 / 64, ratio=ratio, block_size=block_size,
        )  # fmt: skip
        picking._MOST_BLOCKS = before
        for row in range(rows):
            count = (int(positions[row]) + 1) // ratio
            mine = scores[row, :count].float().cpu()
            assert scores[row, count:].isnan().all()
            if count <= num_picks:
                assert mine.isnan().all()
                continue
            numbers = torch.arange(count)
            at = table[slots[row].long(), numbers // per_block].long() * per_block + numbers % per_block
            expected = reference.index_scores(
                quant.fake_quant_fp4_e8m0(query[row : row + 1]),
                weights[row : row + 1, :heads].to(torch.bfloat16) * (1 / 64),
                INDEX_KEY.unpack(pages)[at], numbers, torch.tensor([count]), None, block=8,
            )[0].float()  # fmt: skip
            kept = torch.ones(count, dtype=torch.bool)
            if restricts and count > unit * top_blocks:
                kept = allowed[row].repeat_interleave(unit)[:count] != 0
            assert mine[~kept].isneginf().all()
            assert relative_error(mine[kept], expected[kept]) < 3e-3


@pytest.mark.parametrize(("most", "unit", "num_picks"), [(256, 1, 64), (2560, 1, 512), (8192, 8, 128)])
def test_selection(most: int, unit: int, num_picks: int) -> None:
    """The exact best, ties to the lower number, and where they lie; equal scores and rows that take all they see."""
    rows, block_size, ratio = 4, 64, 2
    per_block = block_size // ratio
    seen = torch.tensor([most, num_picks + 1, num_picks - 3, most // 2 + 5])
    positions = (seen * unit * ratio - 1).to(torch.int32)
    slots = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    table = (torch.randperm(2 * most // per_block) + 1).view(2, -1).to(torch.int32)
    scores = (torch.randn(rows, most) * 3).round().to(torch.bfloat16)
    scores[3, : most // 2] = torch.randn(most // 2).to(torch.bfloat16)
    scores[0, 5:90] = -torch.inf
    picks = torch.full((rows, num_picks), -9, dtype=torch.int32, device=DEVICE)
    lies = torch.full((rows, num_picks), -9, dtype=torch.int32, device=DEVICE) if unit == 1 else None
    picking.select(
        scores.to(DEVICE), (slots.to(DEVICE), positions.to(DEVICE), table.to(DEVICE)), picks, lies,
        ratio=ratio, block_size=block_size, unit=unit,
    )  # fmt: skip
    again = torch.full_like(picks, -9)
    picking.select_rows(scores.to(DEVICE), positions.to(DEVICE), again, ratio=ratio, unit=unit)
    assert torch.equal(again, picks)
    for row in range(rows):
        count = int(seen[row])
        best = torch.full((num_picks,), -1)
        found = (
            torch.arange(count)
            if count <= num_picks
            else reference.top_positions(scores[row : row + 1, :count], num_picks)[0]
        )
        best[: len(found)] = found
        assert torch.equal(picks[row].cpu().long(), best)
        if lies is not None:
            safe = best.clamp_min(0)
            at = table[slots[row].long(), safe // per_block].long() * per_block + safe % per_block
            assert torch.equal(lies[row].cpu().long(), torch.where(best < 0, -1, at))


@pytest.mark.parametrize("width", [5120, 384])
def test_gate(width: int) -> None:
    """Rows within an image span stay as they are."""
    stream, projected = (
        torch.randn(3, 4, width).to(torch.bfloat16),
        torch.randn(3, 5 * width).to(torch.bfloat16),
    )
    weight, alive = torch.randn(4, width), torch.tensor([1, 0, 1], dtype=torch.int32)
    keys, value = projected[:, : 4 * width].unflatten(1, (4, width)), projected[:, 4 * width :]
    expected = reference.engram_gate(stream, keys, value, weight, alive.bool(), EPS)
    mine = stream.clone().to(DEVICE)
    gating.gate(mine, projected.to(DEVICE), weight.to(DEVICE), alive.to(DEVICE), eps=EPS)
    assert relative_error(mine, expected) < BF16


@pytest.mark.parametrize(
    ("ratio", "size", "key_size", "rope", "keeps"),
    [(1, 512, 128, 64, True), (2, 512, 128, 64, True), (2, 64, 32, 16, False)],
)
def test_entries(ratio: int, size: int, key_size: int, rope: int, keeps: bool) -> None:
    """Groups that stay open, that end with the row before them, and that began earlier; a row without a place."""
    block_size, num_slots, blocks, num_open = 16, 4, 8, 7
    per_block = block_size // ratio
    slots = torch.tensor([0, 1, 1, 1, 2, 3], dtype=torch.int32)
    positions = torch.tensor([7, 20, 21, 22, 33, 5], dtype=torch.int32)
    table = (torch.randperm(num_slots * blocks) + 1).view(num_slots, blocks).to(torch.int32)
    table[3] = 0
    projected, norm = torch.randn(6, 2 * size + 4), torch.rand(size) + 0.5
    angle = torch.rand(6, rope // 2) * 9
    turns = angle.cos(), angle.sin()
    state = torch.randn(num_slots * num_open, 2 * size)
    keys, key_norm = torch.randn(6, key_size), torch.rand(key_size) + 0.5
    count = (num_slots * blocks + 1) * per_block
    pages = torch.full((count, ENTRY.row_bytes(size)), 0x55, dtype=torch.uint8, device=DEVICE)
    key_pages = torch.full((count, INDEX_KEY.row_bytes(key_size)), 0x55, dtype=torch.uint8, device=DEVICE)
    before, key_before = pages.clone(), key_pages.clone()
    latents = poisoned(6, size, dtype=torch.bfloat16)
    where = (slots.to(DEVICE), positions.to(DEVICE), table.to(DEVICE))
    on_device, kept = (turns[0].to(DEVICE), turns[1].to(DEVICE)), state.clone().to(DEVICE)
    entries.pool(
        projected.to(DEVICE), kept, norm.to(DEVICE), on_device, where, pages, latents, ratio=ratio, num_open=num_open,
        block_size=block_size, eps=EPS, keeps=keeps,
    )  # fmt: skip
    entries.write_keys(
        keys.to(DEVICE),
        key_norm.to(DEVICE),
        on_device,
        where,
        key_pages,
        ratio=ratio,
        block_size=block_size,
        eps=EPS,
    )
    written = []
    for row in range(6):
        position, slot = int(positions[row]), int(slots[row])
        if ratio == 2:
            own = projected[row, : 2 * size] if keeps else state[slot * num_open + position % num_open]
            assert torch.equal(kept[slot * num_open + position % num_open].cpu(), own)
        if position % ratio != ratio - 1:
            assert not latents[row].any()
            continue
        pooled = projected[row : row + 1, :size].to(torch.bfloat16)
        if ratio == 2:
            earlier = state[slot * num_open + (position - 1) % num_open]
            first = projected[row - 1, : 2 * size] if row == 2 else earlier
            both = torch.stack((first, projected[row, : 2 * size]))[None]
            pooled = reference.compress_pairs(both[..., :size], both[..., size:])
        latent = reference.rms_norm(pooled, norm, EPS)
        assert relative_error(latents[row : row + 1], latent) < BF16
        if slot == 3:
            continue
        at = int(table[slot, position // ratio // per_block]) * per_block + position // ratio % per_block
        written.append(at)
        turn = (turns[0][row : row + 1], turns[1][row : row + 1])
        key = reference.rms_norm(keys[row : row + 1].to(torch.bfloat16), key_norm, EPS)
        for form, mine, values in ((ENTRY, pages, latent), (INDEX_KEY, key_pages, key)):
            expected = form.unpack(form.pack(reference.apply_rope(values, *turn)))
            assert relative_error(form.unpack(mine[at : at + 1].cpu()), expected) < 0.02
    for now, then in ((pages, before), (key_pages, key_before)):
        assert set((now != then).any(1).nonzero().flatten().tolist()) == set(written)
