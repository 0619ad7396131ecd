"""The token of a row where its logits are: the likeliest, or one that is drawn (oracle: engine/wanted.py). Owns its
buffers and launches.

    best    every row's likeliest token, of equals the lowest, and how many of its logits are not finite
    draw    of rows with a temperature, the token that their coin falls on, after top_k, top_p and min_p

A draw is that of the host or none. What the filters keep is a beginning of the logits in falling order, so each is a
least logit; it is found by its bits, four at a time, from counts and sums of chances (float64) of the logits that begin
like it. Sums come in another order than on the host, so whatever could be decided by their last places is not decided
here: a coin beside the border of two tokens, a sum beside top_p, a chance beside min_p, a filter that ends among logits
so near 0 that their chances may be equal. Then the token is -1, and the host, told the logits, draws. No row's token
depends on other rows or on chance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deskfleet.endpoint import SamplingParams
from deskfleet.engine.sampler import draw_temperature

_CHUNK = 1024  # tokens of one program
_PART = 128  # of them at a time, where each is one of 16 kinds
NUM_DRAW = 5
"""Numbers of a draw: temperature, top_k, top_p, min_p, coin."""
_LEVELS = 8  # of 4 bits, of a logit's 32
_DOUBT = tl.constexpr(1e-10)
"""Share of a sum within which its last places may decide: a host that adds up 2**18 chances one after another is wrong
by less than a third of it."""


@triton.jit
def best_kernel(
    logits,  # float32 [R, V] of rows STRIDE apart
    maxima,  # float32 [R, CHUNKS] out
    best,  # int32 [R, CHUNKS] out
    bad,  # int32 [R, CHUNKS] out: logits that are not finite
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program a chunk of a row."""
    row = tl.program_id(1)
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = column < V
    logit = tl.load(logits + row.to(tl.int64) * STRIDE + column, mask=inside, other=float("-inf"))
    part = row * tl.num_programs(0) + tl.program_id(0)
    is_finite = tl.abs(logit) < float("inf")  # neither of NaN
    tl.store(maxima + part, tl.max(logit, 0))
    tl.store(best + part, tl.program_id(0) * CHUNK + tl.argmax(logit, 0, tie_break_left=True))
    tl.store(bad + part, tl.sum((inside & (is_finite == 0)).to(tl.int32), 0))


@triton.jit
def token_kernel(
    maxima,  # float32 [R, CHUNKS]
    best,  # int32 [R, CHUNKS]
    bad,  # int32 [R, CHUNKS]
    greatest,  # float32 [R] out
    chosen,  # int32 [R, 2] out: token, and logits that are not finite
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK_CHUNKS)
    inside = chunk < CHUNKS
    highest = tl.load(maxima + row * CHUNKS + chunk, mask=inside, other=float("-inf"))
    first = tl.minimum(tl.argmax(highest, 0, tie_break_left=True), CHUNKS - 1)
    token = tl.load(best + row * CHUNKS + first)
    tl.store(greatest + row, tl.max(highest, 0))
    tl.store(chosen + row * 2, tl.minimum(tl.maximum(token, 0), V - 1))
    tl.store(chosen + row * 2 + 1, tl.sum(tl.load(bad + row * CHUNKS + chunk, mask=inside, other=0), 0))


@triton.jit
def chance(logit, greatest, temperature):
    """exp of float32 logits over a temperature, the greatest's 1: float64, as sampler._normalise has it."""
    return tl.exp(logit.to(tl.float64) / temperature - greatest.to(tl.float64) / temperature)


@triton.jit
def filters(draw, V: tl.constexpr):
    """1 where a draw has a top_k, and a top_p, that may leave something out, otherwise 0."""
    top_k = tl.load(draw + 1)
    is_drawn = tl.load(draw) > 0
    has_k = tl.where(is_drawn & (top_k > 0) & (top_k < V), 1, 0)
    return has_k, tl.where(is_drawn & (tl.load(draw + 2) < 1), 1, 0)


@triton.jit
def searched(draw, V: tl.constexpr, SEARCH: tl.constexpr):
    """What search SEARCH of a row looks for: 1, the last of top_k; 2, where the sum reaches top_p; 0, nothing. A row
    with both has two searches; top_p is a share of what top_k left."""
    has_k, has_p = filters(draw, V)
    if SEARCH == 0:
        return tl.where(has_k == 1, 1, 2 * has_p)
    return 2 * has_k * has_p


@triton.jit
def key_of(logit):
    """A number int64 from 0 that is ordered as finite float32 are; below 2**32."""
    bits = logit.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def logit_of(key):
    """float32 of a key."""
    bits = (key - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["shift"])
def digit_kernel(
    logits,  # float32 [R, V] of rows STRIDE apart
    greatest,  # float32 [R]
    draws,  # float64 [R, DRAW]
    found,  # int64 [R, 2]: the key's upper bits, and logits whose upper bits are higher
    counts,  # int32 [R, CHUNKS, 16] out
    masses,  # float64 [R, CHUNKS, 16] out
    shift,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    DRAW: tl.constexpr,
    SEARCH: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """One program a chunk of a row: logits that begin like the one that is searched, by their next four bits."""
    row = tl.program_id(1)
    draw = draws + row * DRAW
    if searched(draw, V, SEARCH) > 0:
        bins = tl.arange(0, 16)
        upper = tl.load(found + row * 2)
        count, mass = tl.zeros((16,), tl.int32), tl.zeros((16,), tl.float64)
        for part in range(CHUNK // PART):
            column = tl.program_id(0) * CHUNK + part * PART + tl.arange(0, PART)
            inside = column < V
            logit = tl.load(logits + row.to(tl.int64) * STRIDE + column, mask=inside, other=float("-inf"))
            key = key_of(logit)
            if shift < 28:
                inside = inside & ((key >> (shift + 4)) == upper)
            if tl.sum(inside.to(tl.int32), 0) > 0:
                digit = tl.where(inside, ((key >> shift) & 15).to(tl.int32), -1)
                is_it = digit[:, None] == bins[None, :]
                chances = chance(logit, tl.load(greatest + row), tl.load(draw))
                count += tl.sum(is_it.to(tl.int32), 0)
                mass += tl.sum(tl.where(is_it, chances[:, None], 0.0), 0)
        at = (row * tl.num_programs(0) + tl.program_id(0)) * 16 + bins
        tl.store(counts + at, count)
        tl.store(masses + at, mass)


@triton.jit(do_not_specialize=["shift"])
def narrow_kernel(
    counts,  # int32 [R, CHUNKS, 16]
    masses,  # float64 [R, CHUNKS, 16]
    greatest,  # float32 [R]
    draws,  # float64 [R, DRAW]
    found,  # int64 [R, 2], as of digit_kernel; four bits longer out; at the end, how many of the least are kept
    sums,  # float64 [R, 4]: of the logits above; wanted; out at the end: the least that is kept, and doubt if not 0
    shift,
    V: tl.constexpr,
    DRAW: tl.constexpr,
    SEARCH: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One program a row: the greatest next four bits with which the logits from there on are enough."""
    row = tl.program_id(0)
    draw = draws + row * DRAW
    mode = searched(draw, V, SEARCH)
    if mode > 0:
        chunk = tl.arange(0, BLOCK_CHUNKS)
        bins = tl.arange(0, 16)
        at = (row * CHUNKS + chunk)[:, None] * 16 + bins[None, :]
        live = (chunk < CHUNKS)[:, None]
        count = tl.sum(tl.load(counts + at, mask=live, other=0), 0).to(tl.int64)
        mass = tl.sum(tl.load(masses + at, mask=live, other=0.0), 0)
        key, above_count = tl.load(found + row * 2), tl.load(found + row * 2 + 1)
        above, wanted = tl.load(sums + row * 4), tl.load(sums + row * 4 + 1)
        if shift == 28:
            key, above_count, above = key * 0, above_count * 0, tl.where(shift == 28, 0.0, above)
            if SEARCH == 0:  # else top_k has left what is to be shared
                wanted = tl.load(draw + 2) * tl.sum(mass, 0)
            else:
                wanted = tl.load(draw + 2) * wanted
        from_count = above_count + tl.cumsum(count, 0, reverse=True)
        from_mass = above + tl.cumsum(mass, 0, reverse=True)
        top_k = tl.load(draw + 1).to(tl.int64)
        is_enough = tl.where(mode == 1, from_count >= top_k, from_mass >= wanted)
        digit = tl.maximum(tl.sum(is_enough.to(tl.int32), 0) - 1, 0)
        is_it = bins == digit
        key = key * 16 + digit
        higher = bins > digit
        higher_count = above_count + tl.sum(tl.where(higher, count, 0), 0)
        higher_mass = above + tl.sum(tl.where(higher, mass, 0.0), 0)
        tl.store(found + row * 2, key)
        tl.store(found + row * 2 + 1, higher_count)
        tl.store(sums + row * 4, higher_mass)
        if shift == 0:
            # Of equal logits the lower tokens are kept, as many as are needed.
            at_count = tl.sum(tl.where(is_it, count, 0), 0)
            own = tl.sum(tl.where(is_it, mass, 0.0), 0) / tl.maximum(at_count, 1).to(tl.float64)
            if mode == 1:
                num_kept = top_k - higher_count
            else:
                num_kept = tl.ceil((wanted - higher_mass) / own).to(tl.int64)
            num_kept = tl.minimum(tl.maximum(num_kept, 1), at_count)
            up_to = higher_mass + num_kept.to(tl.float64) * own
            doubt = _DOUBT * up_to
            is_sure = mode == 1
            is_sure = is_sure | ((up_to - wanted > doubt) & (wanted - (up_to - own) > doubt))
            tl.store(found + row * 2 + 1, num_kept)
            least = logit_of(key)
            highest, temperature = tl.load(greatest + row), tl.load(draw)
            # Nearer to 0, other logits may have equal chances.
            apart = tl.maximum(temperature, (highest - least).to(tl.float64))
            is_sure = is_sure & (tl.abs(least).to(tl.float64) > 1e-6 * apart)
            before = 0.0
            if SEARCH == 1:
                before = tl.load(sums + row * 4 + 3)
            tl.store(sums + row * 4 + 1, up_to)
            tl.store(sums + row * 4 + 2, least.to(tl.float64))
            tl.store(sums + row * 4 + 3, tl.where(is_sure, before, 1.0))
        else:
            tl.store(sums + row * 4 + 1, wanted)


@triton.jit
def kept_chances(
    logits,
    greatest,
    draws,
    found,
    sums,
    counts,
    row,
    number,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    DRAW: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """Chances float64 of chunk `number` of a row after the filters, and which of them min_p may as well have judged
    otherwise. The pointers are the kernels'."""
    draw = draws + row * DRAW
    column = number * CHUNK + tl.arange(0, CHUNK)
    inside = column < V
    logit = tl.load(logits + row.to(tl.int64) * STRIDE + column, mask=inside, other=float("-inf"))
    chances = chance(logit, tl.load(greatest + row), tl.load(draw))
    if IS_FILTERED:
        has_k, has_p = filters(draw, V)
        least = tl.where(has_k + has_p > 0, tl.load(sums + row * 4 + 2), float("-inf"))
        chunk = tl.arange(0, BLOCK_CHUNKS)
        at = (row * CHUNKS + chunk) * 16 + (tl.load(found + row * 2) & 15)
        before = tl.sum(tl.load(counts + at, mask=chunk < number, other=0), 0)
        value = logit.to(tl.float64)
        equal = (inside & (value == least)).to(tl.int32)
        rank = before + tl.cumsum(equal, 0) - equal
        inside = inside & ((value > least) | ((equal > 0) & (rank < tl.load(found + row * 2 + 1))))
    min_p = tl.load(draw + 3)
    least_chance = tl.where(min_p > 0, min_p, -1.0)  # which nothing is near
    is_near = inside & (tl.abs(chances - least_chance) <= 1e-12 * least_chance)
    return tl.where(inside & (chances >= least_chance), chances, 0.0), is_near


@triton.jit
def weigh_kernel(
    logits,  # float32 [R, V] of rows STRIDE apart
    greatest,  # float32 [R]
    draws,  # float64 [R, DRAW]
    found,  # int64 [R, 2], where IS_FILTERED: the least key that is kept, and how many that are it
    sums,  # float64 [R, 4], where IS_FILTERED
    counts,  # int32 [R, CHUNKS, 16], where IS_FILTERED: logits of the least key
    parts,  # float64 [R, CHUNKS] out; NaN where min_p is near
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    DRAW: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One program a chunk of a row: its chances, added up."""
    number = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(draws + row * DRAW) > 0:
        chances, is_near = kept_chances(
            logits, greatest, draws, found, sums, counts, row, number, V, STRIDE, DRAW, IS_FILTERED, CHUNK,
            CHUNKS, BLOCK_CHUNKS,
        )  # fmt: skip
        total = tl.sum(chances, 0)
        total = tl.where(tl.sum(is_near.to(tl.int32), 0) > 0, float("nan"), total)
        tl.store(parts + row * CHUNKS + number, total)


@triton.jit
def draw_kernel(
    logits,  # float32 [R, V] of rows STRIDE apart
    greatest,  # float32 [R]
    draws,  # float64 [R, DRAW]
    found,  # int64 [R, 2], where IS_FILTERED: the least key that is kept, and how many that are it
    sums,  # float64 [R, 4], where IS_FILTERED
    counts,  # int32 [R, CHUNKS, 16], where IS_FILTERED: logits of the least key
    parts,  # float64 [R, CHUNKS]
    chosen,  # int32 [R, 2] out: the token, -1 where the host has to draw; the other number stays
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    DRAW: tl.constexpr,
    IS_FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    draw = draws + row * DRAW
    if tl.load(draw) > 0:
        chunk = tl.arange(0, BLOCK_CHUNKS)
        part = tl.load(parts + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
        total = tl.sum(part, 0)
        coin = tl.load(draw + 4) * total
        passed = (tl.cumsum(part, 0) <= coin) & (chunk < CHUNKS)
        number = tl.minimum(tl.sum(passed.to(tl.int32), 0), CHUNKS - 1)
        coin -= tl.sum(tl.where(chunk < number, part, 0.0), 0)
        place = tl.arange(0, CHUNK)
        chances, _ = kept_chances(
            logits, greatest, draws, found, sums, counts, row, number, V, STRIDE, DRAW, IS_FILTERED, CHUNK,
            CHUNKS, BLOCK_CHUNKS,
        )  # fmt: skip
        ends = tl.cumsum(chances, 0)
        within = tl.sum((ends <= coin).to(tl.int32), 0)
        end = tl.sum(tl.where(place == within, ends, 0.0), 0)  # 0 where the coin is behind all
        begin = tl.sum(tl.where(place == within - 1, ends, 0.0), 0)
        doubt = _DOUBT * total  # NaN of a sum that is none, and then nothing is sure
        is_sure = (end - coin > doubt) & (coin - begin > doubt)
        if IS_FILTERED:
            has_k, has_p = filters(draw, V)
            doubts = tl.where(has_k + has_p > 0, tl.load(sums + row * 4 + 3), 0.0)
            is_sure = is_sure & (doubts == 0)
        tl.store(chosen + row * 2, tl.where(is_sure, number * CHUNK + within, -1))


class Sampling:
    """Buffers of the choices of R rows of V logits. `draws` float64 [R, 5] are temperature, 0 for a row that nothing is
    drawn of, top_k, top_p, min_p and coin; `chosen` int32 [R, 2] the token and how many logits are not finite."""

    def __init__(self, num_rows: int, num_tokens: int, device: torch.device | str) -> None:
        chunks = -(-num_tokens // _CHUNK)
        self.draws = torch.zeros(num_rows, NUM_DRAW, dtype=torch.float64, device=device)
        self.chosen = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        self.maxima = torch.zeros(num_rows, chunks, device=device)
        self.best = torch.zeros(num_rows, chunks, dtype=torch.int32, device=device)
        self.bad = torch.zeros(num_rows, chunks, dtype=torch.int32, device=device)
        self.greatest = torch.zeros(num_rows, device=device)
        self.parts = torch.zeros(num_rows, chunks, dtype=torch.float64, device=device)
        self.counts = torch.zeros(num_rows, chunks, 16, dtype=torch.int32, device=device)
        self.masses = torch.zeros(num_rows, chunks, 16, dtype=torch.float64, device=device)
        self.found = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)
        self.sums = torch.zeros(num_rows, 4, dtype=torch.float64, device=device)

    def best_of(self, logits: Tensor) -> None:
        """The likeliest token of every row of logits float32 [R, V]."""
        rows, chunks = self.maxima.shape
        best_kernel[(chunks, rows)](
            logits, self.maxima, self.best, self.bad, V=logits.shape[1], STRIDE=logits.stride(0), CHUNK=_CHUNK,
            num_warps=4,
        )  # fmt: skip
        token_kernel[(rows,)](
            self.maxima, self.best, self.bad, self.greatest, self.chosen, V=logits.shape[1], CHUNKS=chunks,
            BLOCK_CHUNKS=triton.next_power_of_2(chunks), num_warps=4,
        )  # fmt: skip

    def draw(self, logits: Tensor, *, num_searches: int) -> None:
        """After `best_of` of the same logits, what `draws` ask for. `num_searches`: top_k and top_p, as many as the row
        with the most has."""
        rows, chunks = self.maxima.shape
        sizes = {"V": logits.shape[1], "DRAW": NUM_DRAW}
        block = {"CHUNKS": chunks, "BLOCK_CHUNKS": triton.next_power_of_2(chunks)}
        where = {"STRIDE": logits.stride(0), "CHUNK": _CHUNK}
        for search in range(num_searches):
            for level in range(_LEVELS):
                shift = 4 * (_LEVELS - 1 - level)
                digit_kernel[(chunks, rows)](
                    logits, self.greatest, self.draws, self.found, self.counts, self.masses, shift, **sizes, **where,
                    SEARCH=search, PART=_PART, num_warps=4,
                )  # fmt: skip
                narrow_kernel[(rows,)](
                    self.counts, self.masses, self.greatest, self.draws, self.found, self.sums, shift, **sizes,
                    **block, SEARCH=search, num_warps=4,
                )  # fmt: skip
        is_filtered = num_searches > 0
        weigh_kernel[(chunks, rows)](
            logits, self.greatest, self.draws, self.found, self.sums, self.counts, self.parts, **sizes, **where,
            **block, IS_FILTERED=is_filtered, num_warps=4,
        )  # fmt: skip
        draw_kernel[(rows,)](
            logits, self.greatest, self.draws, self.found, self.sums, self.counts, self.parts, self.chosen, **sizes,
            **where, **block, IS_FILTERED=is_filtered, num_warps=4,
        )  # fmt: skip


def draw_of(params: SamplingParams, coin: float) -> tuple[float, ...]:
    """What `Sampling.draws` has of a row."""
    return draw_temperature(params.temperature), params.top_k, params.top_p, params.min_p, coin


def num_searches(params: SamplingParams, num_tokens: int) -> int:
    """Searches that a draw among so many tokens takes, as the kernels count them."""
    return (0 < params.top_k < num_tokens) + (params.top_p < 1)


__all__ = ["NUM_DRAW", "Sampling", "draw_of", "num_searches"]
