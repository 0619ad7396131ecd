"""The exact operators: the publisher's arithmetic in plain torch (spec §N, §4-§7).

Owns every rounding point of the forward pass. Two rules make results independent of batch, chunk and
rank count: sums and transcendental functions are evaluated in float64, and values are rounded to float32 or
bf16 exactly where the publisher's code stores them. A product of quantised operands is exact in float64, so
their sums do not depend on order; for the rest the order effect (1e-16) vanishes in the rounding.
Knows nothing of layers, caches or ranks. Weights arrive dequantised, in whatever float dtype holds them exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deskfleet.engine.ops.quant import Fp4Matrix, e8m0_to_float, fake_quant_fp8

_SCALE_BLOCK = 32  # elements of a row that share an E8M0 scale
_ATTENTION_BLOCK = 64  # the publisher's kernel walks the index list in blocks of this size (spec §N.5)
_ROW_CHUNK = 256  # rows of attention or index scoring at a time; bounds the transient, changes no result
_KEY_CHUNK = 8192  # index keys at a time, likewise


def _round(x: Tensor) -> Tensor:
    """float64 -> bf16. torch goes by way of float32, which is how an fp32 accumulator is stored."""
    return x.to(torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim (spec §N.2). x bf16 [..., M], weight [M] -> bf16; one rounding."""
    mean_square = x.to(torch.float64).square().mean(-1, keepdim=True)
    scaled = x.to(torch.float32) * torch.rsqrt(mean_square + eps).to(torch.float32)
    return (weight.to(torch.float32) * scaled).to(torch.bfloat16)


def linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] @ weight[out, K]ᵀ in float64, not rounded: a rank's share of a sum."""
    return x.to(torch.float64) @ weight.to(torch.float64).T


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """Unquantised linear that is kept in float32: [..., K] -> float32 [..., out]."""
    return linear_partial(x, weight).to(torch.float32)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Unquantised linear: [..., K] -> bf16 [..., out]."""
    return _round(linear_partial(x, weight))


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """One unquantised linear per group: bf16 [T, G, K], weight [G, out, K] -> bf16 [T, G, out]."""
    wide = weight.to(torch.float64)
    return _round((x.to(torch.float64).transpose(0, 1) @ wide.transpose(1, 2)).transpose(0, 1))


def quantized_linear_partial(x: Tensor, weight: Tensor) -> Tensor:
    """FP8/FP4 linear (spec §N.4) before its rounding: activations take FP8 in groups of 32. -> float64."""
    return fake_quant_fp8(x).to(torch.float64) @ weight.to(torch.float64).T


def quantized_linear(x: Tensor, weight: Tensor) -> Tensor:
    """FP8/FP4 linear: bf16 [..., K] -> bf16 [..., out]."""
    return _round(quantized_linear_partial(x, weight))


def normed_linear(x: Tensor, weight: Tensor, norm: Tensor, eps: float) -> Tensor:
    """`quantized_linear` of bf16 [T, K], then `rms_norm` by norm float32 [out] -> bf16 [T, out]."""
    return rms_norm(quantized_linear(x, weight), norm, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last 2·P dims of x by adjacent pairs (spec §N.7).

    x bf16 [T, ..., D]; cos, sin float32 [T, P]. float32 inside, bf16 out; `inverse` conjugates.
    """
    num_rotated = 2 * cos.shape[-1]
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    tail = x[..., -num_rotated:].to(torch.float32)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-num_rotated], rotated.to(x.dtype)), -1)


def sparse_attention(
    query: Tensor, sources: Sequence[tuple[Tensor, Tensor]], sink: Tensor, scale: float
) -> Tensor:
    """Attention of each row over its own index list, with a sink per head (spec §N.5).

    query bf16 [T, H, D]; each source is (rows bf16 [R, D], index int64 [T, L], -1 absent) and the list of a
    row is the concatenation over sources; keys and values are the same rows; sink float32 [H]
    -> bf16 [T, H, D]. Online softmax in blocks of 64 of the list: probabilities are rounded to bf16 against
    the running maximum before they meet the values, the denominator sums them unrounded, the sink adds to
    the denominator only. A row without a valid entry gives zeros.
    """
    chunks = []
    for i in range(0, query.shape[0], _ROW_CHUNK):
        rows = slice(i, i + _ROW_CHUNK)
        keys = torch.cat([pool[index[rows].clamp_min(0)] for pool, index in sources], 1)
        valid = torch.cat([index[rows] >= 0 for _, index in sources], 1)
        # An absent entry reads some row of the pool, maybe another request's; even a NaN there must not show.
        keys = keys.masked_fill(~valid[..., None], 0)
        chunks.append(_attend(query[rows], keys, valid, sink, scale))
    return torch.cat(chunks) if chunks else torch.zeros_like(query)


def _attend(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    rows, heads, size = query.shape
    wide_query = query.to(torch.float64)
    maximum = torch.full((rows, heads), -1e30, dtype=torch.float64)
    denominator = torch.zeros(rows, heads, dtype=torch.float64)
    total = torch.zeros(rows, heads, size, dtype=torch.float64)
    for start in range(0, keys.shape[1], _ATTENTION_BLOCK):
        block = keys[:, start : start + _ATTENTION_BLOCK].to(torch.float64)  # (T, 64, D)
        scores = (wide_query @ block.transpose(1, 2)).to(torch.float32) * scale  # (T, H, 64)
        scores = scores.to(torch.float64)
        scores.masked_fill_(~valid[:, None, start : start + _ATTENTION_BLOCK], -torch.inf)
        new_maximum = torch.maximum(maximum, scores.amax(-1))
        rescale = torch.exp(maximum - new_maximum)
        weights = torch.exp(scores - new_maximum[..., None]).to(torch.float32)
        denominator = denominator * rescale + weights.sum(-1, dtype=torch.float64)
        total = total * rescale[..., None] + weights.to(torch.bfloat16).to(torch.float64) @ block
        maximum = new_maximum
    denominator = denominator + torch.exp(sink.to(torch.float64) - maximum)
    return _round(total / denominator[..., None])


def hc_split(
    mixes: Tensor, scale: Tensor, base: Tensor, *, copies: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the mixes of one sub-layer (spec §N.6): float32 [T, (2+C)·C] -> pre [T, C], post [T, C], comb [T, C, C].

    `comb[j, k]` weighs source copy j for target copy k: softmax over k, then alternating column and row
    normalisation.
    """
    mixes, scale, base = mixes.to(torch.float64), scale.to(torch.float64), base.to(torch.float64)
    pre = torch.sigmoid(mixes[:, :copies] * scale[0] + base[:copies]) + eps
    post = 2 * torch.sigmoid(mixes[:, copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    comb = (mixes[:, 2 * copies :] * scale[2] + base[2 * copies :]).view(-1, copies, copies)
    comb = torch.softmax(comb, -1) + eps
    # Sums as products with a matrix of ones: each normalisation is two operations on a tiny tensor.
    ones = torch.ones(copies, copies, dtype=torch.float64).expand_as(comb)
    guard = torch.full((), eps, dtype=torch.float64).expand_as(comb)
    comb = comb / torch.baddbmm(guard, ones, comb)  # columns
    for _ in range(iterations - 1):
        comb = comb / torch.baddbmm(guard, comb, ones)  # rows
        comb = comb / torch.baddbmm(guard, ones, comb)
    return pre.to(torch.float32), post.to(torch.float32), comb.to(torch.float32)


def hc_mixes(stream: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Raw mixes of a stream bf16 [T, C, M] with weight float32 [(2+C)·C, C·M] -> float32 (spec §5.1)."""
    flat = stream.flatten(1).to(torch.float64)  # copy-major
    product = (flat @ weight.to(torch.float64).T).to(torch.float32)
    return product * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps).to(torch.float32)


def hc_weights(
    stream: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    iterations: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`hc_split` of the `hc_mixes` of a stream bf16 [T, C, M]."""
    mixes = hc_mixes(stream, weight, norm_eps)
    return hc_split(mixes, scale, base, copies=stream.shape[1], iterations=iterations, eps=eps)


def hc_collapse_norm(stream: Tensor, pre: Tensor, norm: Tensor, eps: float) -> Tensor:
    """`rms_norm` by norm float32 [M] of a stream's `hc_collapse`: bf16 [T, C, M] -> bf16 [T, M]."""
    return rms_norm(hc_collapse(stream, pre), norm, eps)


def hc_collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Σ_j pre[j]·stream[j]: bf16 [T, C, M], float32 [T, C] -> bf16 [T, M]."""
    return _sum_copies(pre[..., None] * stream.to(torch.float32)).to(torch.bfloat16)


def hc_expand(output: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[k]·output + Σ_j comb[j, k]·stream[j] -> bf16 [T, C, M]; the first index of comb is the source copy."""
    weighted = comb[..., None] * stream.to(torch.float32)[:, :, None]  # (T, source, target, M)
    return (post[..., None] * output.to(torch.float32)[:, None] + _sum_copies(weighted)).to(torch.bfloat16)


def _sum_copies(weighted: Tensor) -> Tensor:
    """Σ over dim 1 in float32, copies in order: few enough terms to keep the published order."""
    first, *others = weighted.unbind(1)
    total = first
    for other in others:
        total = total + other
    return total


def compress_pairs(values: Tensor, gates: Tensor) -> Tensor:
    """Pool groups per channel (spec §4.4): float32 [N, ratio, D] twice -> bf16 [N, D], softmax over the group."""
    weights = torch.softmax(gates.to(torch.float64), 1)
    return _round((weights * values.to(torch.float64)).sum(1))


def index_scores(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    numbers: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    *,
    block: int,
) -> Tensor:
    """Indexer scores (spec §4.5). query bf16 [T, H, D], weights bf16 [T, H], keys bf16 [N, D] -> bf16 [T, N].

    The dot product, its weighted ReLU and the sum over heads are each rounded to bf16, as the publisher does. It is
    -inf where a row may not look: at keys whose number (`numbers` int64 [N], ascending) is not below `visible` [T],
    and outside of its `blocks` int64 [T, K] of `block` numbers, -1 absent, when there are any.
    """
    wide_query = query.to(torch.float64)
    rows = []
    for i in range(0, query.shape[0], _ROW_CHUNK):
        parts = []
        for wide_keys in keys.split(_KEY_CHUNK):
            dots = torch.relu(
                _round(wide_query[i : i + _ROW_CHUNK] @ wide_keys.to(torch.float64).T)
            )  # (T, H, N)
            weighted = dots * weights[i : i + _ROW_CHUNK, :, None]
            parts.append(_round(weighted.to(torch.float64).sum(1)))
        rows.append(torch.cat(parts, 1))
    scores = torch.cat(rows).masked_fill(numbers >= visible[:, None], -torch.inf)
    if blocks is None:
        return scores
    allowed = block_mask(blocks, int(visible.max()), block=block)
    return scores.masked_fill(~allowed[:, numbers], -torch.inf)


def top_positions(scores: Tensor, count: int) -> Tensor:
    """The `count` best finite positions of each row, ascending, absent ones -1 at the end.

    scores [T, N], -inf where not allowed -> int64 [T, min(count, N)]. Ties go to the lower position.
    """
    count = min(count, scores.shape[1])
    order = torch.sort(scores.to(torch.float32), dim=1, descending=True, stable=True)
    picks = order.indices[:, :count]
    absent = torch.isneginf(order.values[:, :count])
    picks = picks.masked_fill(absent, scores.shape[1]).sort(dim=1).values
    return picks.masked_fill(picks == scores.shape[1], -1)


def candidate_scores(scores: Tensor, block_numbers: Tensor, num_visible: Tensor, *, block: int) -> Tensor:
    """How blocks of entries rank among those that re-indexing layers may pick from (spec §4.6).

    scores [T, N] of whole blocks in order, -inf where not visible; block_numbers int64 [B], num_visible int64 [T] ->
    float32 [T, B]: the maximum of each block, infinite for the newest visible one, which is always chosen.
    """
    length = scores.shape[1]
    padded = torch.nn.functional.pad(scores.to(torch.float32), (0, -length % block), value=-torch.inf)
    best: Tensor = padded.unflatten(1, (len(block_numbers), block)).amax(-1)
    is_newest = block_numbers == ((num_visible - 1) // block)[:, None]
    return best.masked_fill(is_newest & (num_visible > 0)[:, None], torch.inf)


def block_mask(blocks: Tensor, length: int, *, block: int) -> Tensor:
    """Block numbers int64 [T, K], -1 absent -> bool [T, length]: the entries that lie in them."""
    count = -(-length // block)
    mask = torch.zeros(len(blocks), count + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(blocks < 0, count, blocks), True)
    return mask[:, :-1].repeat_interleave(block, 1)[:, :length]


def route(
    x: Tensor, weight: Tensor, bias: Tensor, *, num_chosen: int, scaling: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Router (spec §6.1). x bf16 [T, M], weight [E, M], bias float32 [T, E] or [E].

    Returns chosen experts int64 [T, K] in descending biased score (ties: lower id) and weights float32 [T, K]
    made of the *unbiased* scores.
    """
    logits = (x.to(torch.float64) @ weight.to(torch.float64).T).to(torch.float32) / temperature
    scores = torch.sqrt(torch.nn.functional.softplus(logits.to(torch.float64))).to(torch.float32)
    chosen = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :num_chosen]
    raw = scores.gather(1, chosen).to(torch.float64)
    return chosen, (raw / (raw.sum(1, keepdim=True) + 1e-20) * scaling).to(torch.float32)


def expert_activation(gate: Tensor, up: Tensor, limit: float, route_weight: Tensor | None) -> Tensor:
    """Clamped SwiGLU (spec §6.2): bf16 [T, F] twice -> bf16 [T, F]; the route weight [T] acts before w2."""
    wide_up = up.to(torch.float32).clamp(-limit, limit)
    wide_gate = gate.to(torch.float32).clamp_max(limit).to(torch.float64)
    activated = (wide_gate * torch.sigmoid(wide_gate)).to(torch.float32) * wide_up
    if route_weight is not None:
        activated = activated * route_weight[:, None]
    return activated.to(torch.bfloat16)


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Fp4Matrix,
    w2: Fp4Matrix,
    *,
    first_expert: int,
    limit: float,
) -> Tensor:
    """Experts `first_expert`.. of a routed sum (spec §6.3), float64 [T, M], not rounded: a rank's share.

    x bf16 [T, M]; chosen int64 and weights float32 [T, K]; w13 [E, 2F, M], w2 [E, M, F]. Experts are added by rising
    number; each output is rounded to bf16 before it is.
    """
    total = torch.zeros(x.shape, dtype=torch.float64)
    quantized = fake_quant_fp8(x).to(torch.float64)  # once: every expert takes the same codes
    for expert, rows, places in _by_expert(chosen):
        local = expert - first_expert
        if not 0 <= local < len(w13):
            continue
        gate, up = _round(quantized[rows] @ w13[local].decode().T).chunk(2, -1)
        output = _down(gate, up, w2[local].decode(), limit, weights[rows, places])
        total.index_add_(0, rows, output.to(torch.float64))
    return total


def shared_expert(x: Tensor, w13: Tensor, w2: Tensor, *, limit: float) -> Tensor:
    """The expert that every row passes (spec §6.3): x bf16 [T, M], w13 [2F, M], w2 [M, F] -> bf16 [T, M]."""
    gate, up = quantized_linear(x, w13).chunk(2, -1)
    return _down(gate, up, w2, limit, None)


def _down(gate: Tensor, up: Tensor, w2: Tensor, limit: float, route_weight: Tensor | None) -> Tensor:
    # The route weight acts before w2: it changes the FP8 scale that w2's input takes (spec §6.3).
    return quantized_linear(expert_activation(gate, up, limit, route_weight), w2)


def _by_expert(chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, rows, places) of every expert that int64 [T, K] names, ascending."""
    order = torch.sort(chosen.flatten(), stable=True)
    experts, counts = torch.unique_consecutive(order.values, return_counts=True)
    for expert, where in zip(experts.tolist(), order.indices.split(counts.tolist()), strict=True):
        yield expert, where // chosen.shape[1], where % chosen.shape[1]


def add_round(total: Tensor, added: Tensor) -> Tensor:
    """float64 [T, M] + bf16 [T, M] -> bf16 [T, M]; one rounding."""
    return _round(total + added.to(torch.float64))


def decode_fp8_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Rows as they lie on disk (spec §7.4): codes uint8 [..., D], scales uint8 [..., D/32] -> bf16 [..., D]."""
    values = codes.view(torch.float8_e4m3fn).to(torch.float64)
    return _round(values * e8m0_to_float(scales).repeat_interleave(_SCALE_BLOCK, -1))


def write_rows(target: Tensor, places: Tensor, source: Tensor, rows: Tensor) -> None:
    """target[places] = source[rows], for int64 [M] twice; places are different."""
    target[places] = source[rows]


def engram_gate(
    stream: Tensor, key: Tensor, value: Tensor, weight: Tensor, alive: Tensor, eps: float
) -> Tensor:
    """Add the gated Engram value to each copy (spec §7.5).

    stream bf16 [T, C, M], key bf16 [T, C, M], value bf16 [T, M], weight float32 [C, M] (q·k), alive bool [T]
    -> bf16 [T, C, M]. Rows that are not alive (image spans) pass unchanged.
    """
    wide, wide_key = stream.to(torch.float64), key.to(torch.float64)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(wide_key.square().mean(-1) + eps)
    dot = (wide * weight * wide_key).sum(-1) * rstd * stream.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)) * alive[:, None]
    # Elementwise from here, so float32 as published: order cannot matter.
    scaled = gate.to(torch.float32)[..., None] * value.to(torch.float32)[:, None]
    return (stream.to(torch.float32) + scaled).to(torch.bfloat16)


__all__ = [
    "add_round",
    "apply_rope",
    "block_mask",
    "candidate_scores",
    "compress_pairs",
    "decode_fp8_rows",
    "engram_gate",
    "expert_activation",
    "grouped_linear",
    "hc_collapse",
    "hc_collapse_norm",
    "hc_expand",
    "hc_mixes",
    "hc_split",
    "hc_weights",
    "index_scores",
    "linear",
    "linear_f32",
    "linear_partial",
    "normed_linear",
    "quantized_linear",
    "quantized_linear_partial",
    "rms_norm",
    "route",
    "routed_experts",
    "shared_expert",
    "sparse_attention",
    "top_positions",
    "write_rows",
]
