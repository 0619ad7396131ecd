"""DSpark's draft stages on a GPU (spec §8; oracle: engine/model/draft.py). Owns their buffers and launches.

A stage is a layer without compressed KV, so its launches are those of `DecodeStep`; what differs is where they begin,
what its rows attend to, and the chain of tokens behind the head:

    DraftContext  after a step: the taps of its rows into the windows of every stage (§8.3)
    DraftStep     one block for each of B requests: stages, head, Markov chain, confidence (§8.4)

The chain stays on the device, for sampled drafts too: a place's coin does not depend on any logits, so all coins can
come before. Of several ranks each has all logits and all of the Markov head, and chooses like the others. Rows of a
block are nobody's context; their records lie in window rows that are a step's own (pages.py), which hold nothing in
between. Knows nothing of acceptance.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.engine.cuda import attention, linear
from deskfleet.engine.cuda.attention import store_low_rank, store_window_record
from deskfleet.engine.cuda.collectives import DeviceGroup
from deskfleet.engine.cuda.packing import Fp8Tiles
from deskfleet.engine.cuda.step import DecodeStep, Pages, Shape, Watch, rope_kernel
from deskfleet.engine.cuda.synthetic import DraftWeights
from deskfleet.engine.cuda.tiles import fp8_codes, fp8_scale

_TILE = 64  # tokens that one program of the Markov head takes
_REQUESTS = 16  # and requests
_CHUNK = 1024  # tokens whose chances one program adds up


@triton.jit(do_not_specialize=["table_width", "first_own", "noise_id", "first_token", "num_held"])
def anchor_kernel(
    tokens,  # int64 [B, LENGTH + 1]: the anchors' first
    anchors,  # int32 [B, 3]: slot, position, and from where on there are window rows
    table,  # int32 [S, blocks]: window blocks
    table_width,
    first_own,  # page row of the first block's first record
    noise_id,
    first_token,  # of those whose embeddings are held; of all others the row behind them
    num_held,
    ids,  # int64 [B * LENGTH] out: rows of the embedding
    positions,  # int32 [B * LENGTH] out
    records,  # int32 [B * LENGTH, WINDOW + LENGTH] out: page rows that a row sees, -1 absent
    LENGTH: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program a row (oracle: DraftModel.begin): the window before the anchor, oldest first, then the own block."""
    row = tl.program_id(0)
    request = row // LENGTH
    slot = tl.load(anchors + request * 3)
    position = tl.load(anchors + request * 3 + 1)
    begin = tl.maximum(tl.load(anchors + request * 3 + 2), 0)
    tl.store(positions + row, position + row % LENGTH)
    token = tl.where(row % LENGTH == 0, tl.load(tokens + request * (LENGTH + 1)), noise_id) - first_token
    tl.store(ids + row, tl.where((token >= 0) & (token < num_held), token, num_held))
    place = tl.arange(0, BLOCK)
    number = position - WINDOW + place
    exists = (place < WINDOW) & (number >= begin)
    page = tl.load(table + slot * table_width + number // BLOCK_SIZE, mask=exists, other=0)
    record = tl.where(exists, page * BLOCK_SIZE + number % BLOCK_SIZE, -1)
    own = first_own + request * LENGTH + place - WINDOW
    record = tl.where(place < WINDOW, record, own)
    tl.store(records + row * (WINDOW + LENGTH) + place, record, mask=place < WINDOW + LENGTH)


@triton.jit
def quantize_kernel(
    x,  # bf16 [T, K]
    codes,  # float8e4nv [T, K] out
    scales,  # uint8 [T, 4 * ceil(K/128)] out
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program: COLUMNS of a row, a multiple of 32 (oracle: quantize_fp8)."""
    row = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    groups = tl.reshape(tl.load(x + row * K + column).to(tl.float32), (COLUMNS // 32, 32))
    bits = fp8_scale(tl.max(tl.abs(groups), 1))
    tl.store(codes + row * K + column, tl.reshape(fp8_codes(groups, bits[:, None], BIT_OPS), (COLUMNS,)))
    group = tl.program_id(0) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    tl.store(scales + row * (4 * ((K + 127) // 128)) + group, (bits >> 23).to(tl.uint8))


@triton.jit
def norm_kernel(
    x,  # bf16 [T, K]
    norm,  # float32 [K]
    codes,  # float8e4nv [T, K] out
    scales,  # uint8 [T, 4 * ceil(K/128)] out
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a row (oracle: rms_norm, quantize_fp8)."""
    row = tl.program_id(0)
    own_scales = scales + row * (4 * ((K + 127) // 128))
    store_low_rank(x + row * K, norm, codes + row * K, own_scales, K, BLOCK, EPS, BIT_OPS)


@triton.jit(do_not_specialize=["table_width", "block_size", "stride"])
def context_kernel(
    latents,  # bf16 [T, D] of rows `stride` apart
    stride,
    norm,  # float32 [D]
    cos,  # float32 [T, ROPE/2]
    sin,
    pages,  # uint8 [rows, BYTES] out
    slots,  # int32 [T]
    positions,  # int32 [T]
    table,  # int32 [S, blocks]: window blocks; block 0 is nobody's and not written
    table_width,
    block_size,  # no constant, as of attention.latent_kernel
    D: tl.constexpr,
    ROPE: tl.constexpr,
    BYTES: tl.constexpr,
    EPS: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """One program a row (oracle: rms_norm, apply_rope, WINDOW.pack)."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    block = tl.load(table + tl.load(slots + row) * table_width + position // block_size)
    at = pages + (block.to(tl.int64) * block_size + position % block_size) * BYTES
    turn = row * (ROPE // 2)
    source = latents + row * stride
    store_window_record(source, norm, cos + turn, sin + turn, at, block > 0, D, ROPE, EPS, BIT_OPS)


@triton.jit(do_not_specialize=["place", "num_requests"])
def markov_kernel(
    tokens,  # int64 [B, LENGTH + 1]
    embedding,  # bf16 [V, R]
    weight,  # bf16 [V, R]
    logits,  # float32 [B, LENGTH, V] of rows STRIDE apart, changed in place
    maxima,  # float32 [B, TILES] out
    best,  # int32 [B, TILES] out
    place,
    num_requests,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
    BM: tl.constexpr,
    BIT_OPS: tl.constexpr,
):
    """The bias of the token before place `place` on its logits, and the greatest of every TILE of them; BM requests."""
    tile = tl.program_id(0)
    request = tl.program_id(1) * BM + tl.arange(0, BM)
    live = request < num_requests
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < V
    k = tl.arange(0, BLOCK_R)
    weight_at = weight + column.to(tl.int64)[:, None] * R + k[None, :]
    weights = tl.load(weight_at, mask=inside[:, None] & (k < R)[None, :], other=0.0)
    previous = tl.load(tokens + request * (LENGTH + 1) + place, mask=live, other=0)
    embedded_at = embedding + previous[None, :] * R + k[:, None]
    embedded = tl.load(embedded_at, mask=live[None, :] & (k < R)[:, None], other=0.0)
    at = logits + (request * LENGTH + place).to(tl.int64)[None, :] * STRIDE + column[:, None]
    mask = inside[:, None] & live[None, :]
    biased = tl.load(at, mask=mask, other=float("-inf"))
    if BIT_OPS:
        biased += tl.dot(weights.to(tl.float32), embedded.to(tl.float32))
    else:
        biased += tl.dot(weights, embedded)
    tl.store(at, biased, mask=mask)
    part = request * tl.num_programs(0) + tile
    tl.store(maxima + part, tl.max(biased, 0), mask=live)
    tl.store(best + part, tile * TILE + tl.argmax(biased, 0, tie_break_left=True), mask=live)


@triton.jit
def chance(logit, greatest, temperature):
    """exp of float32 logits over a temperature, the greatest's 1: float64, as speculate.draft_distribution has it."""
    return tl.exp(logit.to(tl.float64) / temperature - greatest.to(tl.float64) / temperature)


@triton.jit(do_not_specialize=["place"])
def weigh_kernel(
    logits,  # float32 [B, LENGTH, V] of rows STRIDE apart
    maxima,  # float32 [B, TILES]
    draws,  # float64 [B, 1 + LENGTH]: temperature, 0 for greedy drafts, and coins
    sums,  # float64 [B, CHUNKS] out
    place,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a chunk of a request's tokens: their chances at place `place`, added up."""
    request = tl.program_id(1)
    temperature = tl.load(draws + request * (1 + LENGTH))
    if temperature > 0:
        tile = tl.arange(0, BLOCK_TILES)
        greatest = tl.max(tl.load(maxima + request * TILES + tile, mask=tile < TILES, other=float("-inf")), 0)
        column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        at = logits + (request * LENGTH + place).to(tl.int64) * STRIDE + column
        logit = tl.load(at, mask=column < V, other=float("-inf"))
        total = tl.sum(chance(logit, greatest, temperature), 0)
        tl.store(sums + request * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit(do_not_specialize=["place"])
def draw_kernel(
    maxima,  # float32 [B, TILES]
    best,  # int32 [B, TILES]
    logits,  # float32 [B, LENGTH, V] of rows STRIDE apart
    draws,  # float64 [B, 1 + LENGTH]: temperature and coins
    sums,  # float64 [B, CHUNKS]
    tokens,  # int64 [B, LENGTH + 1]: out after place `place`
    place,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
):
    """One program a request: the likeliest token, of equals the lowest; or the one that the coin falls on (oracle:
    speculate.draft_choice). Of logits that are no numbers, some token."""
    request = tl.program_id(0)
    tile = tl.arange(0, BLOCK_TILES)
    highest = tl.load(maxima + request * TILES + tile, mask=tile < TILES, other=float("-inf"))
    first = tl.argmax(highest, 0, tie_break_left=True)
    token = tl.load(best + request * TILES + tl.minimum(first, TILES - 1))
    if IS_SAMPLED:
        temperature = tl.load(draws + request * (1 + LENGTH))
        if temperature > 0:
            chunk = tl.arange(0, BLOCK_CHUNKS)
            parts = tl.load(sums + request * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
            coin = tl.load(draws + request * (1 + LENGTH) + 1 + place) * tl.sum(parts, 0)
            passed = (tl.cumsum(parts, 0) <= coin) & (chunk < CHUNKS)
            # A coin that is nearly 1 may round to the end: then the last place of any chance.
            number = tl.minimum(tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(parts > 0, chunk, 0), 0))
            coin -= tl.sum(tl.where(chunk < number, parts, 0.0), 0)
            column = tl.arange(0, CHUNK)
            inside = number * CHUNK + column < V
            at = logits + (request * LENGTH + place).to(tl.int64) * STRIDE + number * CHUNK + column
            chances = chance(tl.load(at, mask=inside, other=float("-inf")), tl.max(highest, 0), temperature)
            passed = (tl.cumsum(chances, 0) <= coin) & inside
            within = tl.minimum(tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(chances > 0, column, 0), 0))
            token = number * CHUNK + within
    token = tl.minimum(tl.maximum(token, 0), V - 1)
    tl.store(tokens + request * (LENGTH + 1) + place + 1, token.to(tl.int64))


@triton.jit
def confidence_kernel(
    x,  # bf16 [B * LENGTH, M]: collapsed, not normed
    tokens,  # int64 [B, LENGTH + 1]
    embedding,  # bf16 [V, R]
    weight,  # bf16 [M + R]
    out,  # float32 [B * LENGTH] out
    M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """One program a row: how sure the drafter is of it, raw (oracle: the end of DraftModel._decode_chain)."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK_M)
    value = tl.load(x + row * M + column, mask=column < M, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < M, other=0.0).to(tl.float32)
    previous = tl.load(tokens + row // LENGTH * (LENGTH + 1) + row % LENGTH)
    k = tl.arange(0, BLOCK_R)
    embedded = tl.load(embedding + previous * R + k, mask=k < R, other=0.0).to(tl.float32)
    own = tl.load(weight + M + k, mask=k < R, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(value * factor, 0) + tl.sum(embedded * own, 0))


class DraftContext:
    """Buffers and launches that follow a step: its taps become the context of the draft stages.

    Rows of drafts that are refused later lie behind the last committed position; they are written again before any
    draft sees them.
    """

    def __init__(self, drafts: DraftWeights, step: DecodeStep) -> None:
        rows, device = step.num_rows, step.device

        def bf16(width: int) -> Tensor:
            return torch.zeros(rows, width, dtype=torch.bfloat16, device=device)

        def quantized(width: int) -> tuple[Tensor, Tensor]:
            codes = torch.zeros(rows, width, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            return codes, torch.zeros(rows, -(-width // 128), dtype=torch.int32, device=device)

        self.drafts, self.step = drafts, step
        weights = (drafts.main_proj, drafts.main_kv)
        self.taps, self.taps_scales = quantized(weights[0].num_columns)
        self.main = bf16(weights[0].num_rows)
        self.codes, self.scales = quantized(weights[1].num_columns)
        self.latents = bf16(weights[1].num_rows)
        tiles = [(_splits(weight, rows), -(-weight.num_rows // 128)) for weight in weights]
        padded, blocks = linear.padded_rows(rows), linear.padded_rows(rows) // linear.block_rows(rows)
        partials = max(splits * count * 128 * padded if splits > 1 else 0 for splits, count in tiles)
        self.work = linear.SplitBuffers(partials, max(count for _, count in tiles) * blocks, device)

    def run(self) -> None:
        """Write the draft windows of every row of the step that has a page (oracle: DraftModel.commit)."""
        drafts, step, bit_ops, eps = self.drafts, self.step, self.step.bit_ops, self.step.config.rms_norm_eps
        rows, width = step.taps.shape
        columns = min(width & -width, 1024)  # the greatest power of two that divides the width
        quantize_kernel[(width // columns, rows)](
            step.taps, self.taps, self.taps_scales.view(torch.uint8), K=width, COLUMNS=columns, BIT_OPS=bit_ops,
            num_warps=4,
        )  # fmt: skip
        linear.fp8_linear(
            self.taps, self.taps_scales, drafts.main_proj, self.main, self.work,
            splits=_splits(drafts.main_proj, rows), bit_ops=bit_ops,
        )  # fmt: skip
        width = self.main.shape[1]
        norm_kernel[(rows,)](
            self.main, drafts.main_norm, self.codes, self.scales.view(torch.uint8), K=width,
            BLOCK=triton.next_power_of_2(width), EPS=eps, BIT_OPS=bit_ops, num_warps=8,
        )  # fmt: skip
        linear.fp8_linear(
            self.codes, self.scales, drafts.main_kv, self.latents, self.work,
            splits=_splits(drafts.main_kv, rows), bit_ops=bit_ops,
        )  # fmt: skip
        table, size = step.pages.window_table, step.config.head_dim
        for number, layer in enumerate(drafts.layers):
            pages = step.pages.windows[layer.plan.index]
            context_kernel[(rows,)](
                self.latents[:, number * size :], self.latents.stride(0), layer.kv_norm, *step.rope[0], pages,
                step.slots, step.positions, table, table.stride(0), step.pages.block_size, D=size,
                ROPE=2 * step.rope.shape[-1], BYTES=pages.shape[1], EPS=eps, BIT_OPS=bit_ops, num_warps=4,
            )  # fmt: skip


class DraftStep(DecodeStep):
    """Buffers and launches of a block of drafts for each of B requests.

    Inputs: `tokens` int64 [B, n + 1], of which the first is the anchor's and the others are drafted; `anchors` int32
    [B, 3] slot, position and first window position; `draws` float64 [B, 1 + n] the temperature, 0 for greedy drafts,
    and a coin for each. Outputs: `tokens`, `vocabulary_logits` float32 [B·n, V] with the Markov bias, `confidence`
    float32 [B·n], raw.
    """

    def __init__(
        self,
        shape: Shape,
        drafts: DraftWeights,
        embedding: Tensor,
        head: Tensor,
        pages: Pages,
        *,
        num_requests: int,
        first_own: int,
        first_token: int = 0,
        device: torch.device | str,
        bit_ops: bool,
        group: DeviceGroup | None = None,
    ) -> None:
        """`first_own`: the first of B·n rows of the window pages that nobody else needs while this runs. `embedding`
        has the tokens from `first_token` on, and a row of zeros behind them where others have the rest. `group` as of
        DecodeStep."""
        self.group = group or self.group
        c, plan = shape.config, drafts.layers[0].plan
        length, num_rows = c.dspark_block_size, num_requests * c.dspark_block_size
        self.shape, self.config, self.layers, self.drafts = shape, c, drafts.layers, drafts
        self.embedding, self.head, self.norm = embedding, head, drafts.norm
        self.num_requests, self.num_rows, self.num_logits = num_requests, num_rows, num_rows
        self.bit_ops, self.long, self.device = bit_ops, False, torch.device(device)
        self.length, self.first_own, self.first_token = length, first_own, first_token
        self.context_table, self.context_block_size = pages.window_table, pages.block_size
        self._make_layer_buffers(plan.num_experts, plan.num_chosen)
        # As a step sees it, its rows are those of one request whose blocks have one row each.
        own = torch.arange(first_own, first_own + num_rows, dtype=torch.int32)
        self.pages = replace(pages, window_table=self._ints(1, num_rows).copy_(own), block_size=1)
        self.slots = self._ints(num_rows)
        self.positions = self._ints(num_rows).copy_(torch.arange(num_rows, dtype=torch.int32))
        self.ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.places = self._ints(num_rows)
        seen = c.sliding_window + length
        self.window_records = self._ints(num_rows, seen)
        attended = attention.AttentionShape(shape.heads, c.head_dim, c.qk_rope_head_dim, seen)
        self.attention = {0: attention.AttentionBuffers(attended, num_rows, 0, device)}
        self.extra = torch.zeros(0, device=device)
        self.wanted = self.streams.x
        self._make_logits()
        self.tokens = torch.zeros(num_requests, length + 1, dtype=torch.int64, device=device)
        self.anchors = self._ints(num_requests, 3)
        self.draws = torch.zeros(num_requests, 1 + length, dtype=torch.float64, device=device)
        num_tokens = self.vocabulary_logits.shape[1]
        self.maxima = torch.zeros(num_requests, -(-num_tokens // _TILE), device=device)
        self.best = self._ints(*self.maxima.shape)
        chunks = -(-num_tokens // _CHUNK)
        self.sums = torch.zeros(num_requests, chunks, dtype=torch.float64, device=device)
        self.confidence = torch.zeros(num_rows, device=device)

    def run(self, watch: Watch | None = None, *, is_sampled: bool = False) -> None:
        """Launch the block; `is_sampled` where a temperature is not 0. `watch` as of DecodeStep.run."""
        seen = watch or (lambda name: None)
        self.run_layers(seen)
        self._project()  # the bias not in them yet
        seen("head")
        for place in range(self.length):
            self._choose(place, is_sampled=is_sampled)
        drafts, (rows, width) = self.drafts, self.streams.collapsed.shape
        rank = drafts.markov_embedding.shape[1]
        confidence_kernel[(rows,)](
            self.streams.collapsed, self.tokens, drafts.markov_embedding, drafts.confidence, self.confidence,
            M=width, BLOCK_M=triton.next_power_of_2(width), R=rank, BLOCK_R=triton.next_power_of_2(rank),
            LENGTH=self.length, num_warps=4,
        )  # fmt: skip
        seen("drafts")

    def _begin(self) -> None:
        c, table = self.config, self.context_table
        anchor_kernel[(self.num_rows,)](
            self.tokens, self.anchors, table, table.stride(0), self.first_own, self.drafts.noise_id,
            self.first_token, self.shape.vocabulary, self.ids, self.places, self.window_records,
            LENGTH=self.length, WINDOW=c.sliding_window, BLOCK_SIZE=self.context_block_size,
            BLOCK=triton.next_power_of_2(c.sliding_window + self.length), num_warps=4,
        )  # fmt: skip
        rope_kernel[(self.num_rows,)](
            self.places, *self.frequencies, self.rope, self.num_rows, PAIRS=self.rope.shape[-1], num_warps=1
        )
        self._enter()

    def _choose(self, place: int, *, is_sampled: bool) -> None:
        """Bias the logits of place `place` by the token before it, and choose its token."""
        drafts, requests = self.drafts, self.num_requests
        tiles, chunks, rank = self.maxima.shape[1], self.sums.shape[1], drafts.markov_head.shape[1]
        logits = self.vocabulary_logits
        sizes = {"V": logits.shape[1], "STRIDE": logits.stride(0), "LENGTH": self.length}
        block_tiles = triton.next_power_of_2(tiles)
        markov_kernel[(tiles, triton.cdiv(requests, _REQUESTS))](
            self.tokens, drafts.markov_embedding, drafts.markov_head, logits, self.maxima,
            self.best, place, requests, **sizes, R=rank, BLOCK_R=max(triton.next_power_of_2(rank), 16), TILE=_TILE,
            BM=_REQUESTS, BIT_OPS=self.bit_ops, num_warps=4,
        )  # fmt: skip
        if is_sampled:
            weigh_kernel[(chunks, requests)](
                logits, self.maxima, self.draws, self.sums, place, **sizes, TILES=tiles,
                BLOCK_TILES=block_tiles, CHUNK=_CHUNK, num_warps=4,
            )  # fmt: skip
        draw_kernel[(requests,)](
            self.maxima, self.best, logits, self.draws, self.sums, self.tokens, place, **sizes,
            TILES=tiles, BLOCK_TILES=block_tiles, CHUNKS=chunks, BLOCK_CHUNKS=triton.next_power_of_2(chunks),
            CHUNK=_CHUNK, IS_SAMPLED=is_sampled, num_warps=4,
        )  # fmt: skip


def _splits(weight: Fp8Tiles, num_rows: int) -> int:
    tiles, blocks = -(-weight.num_rows // 128), -(-weight.num_columns // 128)
    return linear.num_splits(tiles, blocks, num_rows)


__all__ = ["DraftContext", "DraftStep"]
