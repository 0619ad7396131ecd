"""Random weights of one rank, made where they are used. Owns the generator and what is random about them.

Every byte is a hash of its place and of a seed made of layer, tensor and rank, in integer arithmetic that every device
does alike: any slice can be made again anywhere, so a check needs no copy of 70 GB. Codes are random bytes (never
constant ones, which run faster than real weights); scales are chosen so that a projection of a normed row has about
unit size and the streams stay finite through forty layers.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.packing import Fp4Tiles, Fp8Tiles, pack_mixes
from deskfleet.model.config import ModelConfig
from deskfleet.model.layers import LayerPlan

_CHUNK = 1 << 24  # words hashed at a time: bounds the transient
FP4_SCALES = (118, 125)
FP8_SCALES = (111, 116)


def seed_of(layer: int, tensor: str, rank: int) -> int:
    """The seed of one tensor."""
    return zlib.crc32(f"{layer}.{tensor}.{rank}".encode())


def random_words(seed: int, start: int, count: int, device: torch.device | str) -> Tensor:
    """int64 [count]: hashes of start, start + 1, .. (two rounds of a multiply-xorshift)."""
    x = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x = x * -7046029254386353131 + (seed * 2654435761 + 1 & 0x7FFFFFFFFFFFFFFF)
    x ^= (x >> 31) & 0x1FFFFFFFF
    x *= -4658895280553007687
    x ^= (x >> 29) & 0x7FFFFFFFF
    x *= -7723592293110705685
    x ^= (x >> 32) & 0xFFFFFFFF
    return x


def random_bytes(shape: tuple[int, ...], seed: int, device: torch.device | str) -> Tensor:
    """uint8 of `shape`."""
    size = 1
    for length in shape:
        size *= length
    out = torch.empty(-(-size // 8), dtype=torch.int64, device=device)
    for start in range(0, len(out), _CHUNK):
        out[start : start + _CHUNK] = random_words(seed, start, min(_CHUNK, len(out) - start), device)
    return out.view(torch.uint8)[:size].view(shape)


def random_scales(
    shape: tuple[int, ...], bounds: tuple[int, int], seed: int, device: torch.device | str
) -> Tensor:
    """E8M0 bytes in [low, high), uint8 of `shape`."""
    low, high = bounds
    return (random_bytes(shape, seed, device) % (high - low) + low).to(torch.uint8)


def fp4_tiles(
    experts: int, rows: int, columns: int, seed: int, device: torch.device | str, *, exact: bool = False
) -> Fp4Tiles:
    """Every byte pair of codes is a pair of numbers, so random bytes are random tiles."""
    codes = random_bytes((experts, rows // 128, columns // 64, 128, 32), seed, device)
    groups, words = columns // 32, -(-columns // 128)
    scales = random_scales((experts, rows // 128, words, 128, 4), FP4_SCALES, seed + 1, device)
    if groups % 4:
        scales[:, :, -1, :, groups % 4 :] = 0
    return Fp4Tiles(codes, scales.view(torch.int32).squeeze(-1), rows, columns, exact)


def fp8_tiles(
    rows: int,
    columns: int,
    seed: int,
    device: torch.device | str,
    *,
    paired: bool = False,
    exact: bool = False,
) -> Fp8Tiles:
    """Random codes but for the two that are no numbers."""
    tiles = -(-rows // 128)
    codes = random_bytes((tiles, columns // 32, 128, 32), seed, device)
    codes -= ((codes & 0x7F) == 0x7F).to(torch.uint8)
    groups, words = columns // 32, -(-columns // 128)
    scales = random_scales((tiles * 4, words, 4), FP8_SCALES, seed + 1, device)
    if groups % 4:
        scales[:, -1, groups % 4 :] = 0
    if paired:
        typed = codes.view(tiles, columns // 64, 128, 64).view(torch.int16)
    else:
        typed = codes.view(torch.float8_e4m3fn)
    return Fp8Tiles(typed, scales.view(torch.int32).squeeze(-1), rows, columns, exact)


def normal(shape: tuple[int, ...], std: float, seed: int, device: torch.device | str) -> Tensor:
    """float32 of `shape`, roughly normal: the sum of four bytes, centred."""
    parts = random_bytes((*shape, 4), seed, device).to(torch.float32)
    return (parts.sum(-1) - 510.0) * (std / 147.8)


@dataclass(slots=True)
class MixWeights:
    """One sub-layer's hyper-connection and the norm behind it."""

    weight: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


@dataclass(slots=True)
class LayerWeights:
    """One rank's share of a layer, packed. Absent parts are None."""

    plan: LayerPlan
    attention: MixWeights
    ffn: MixWeights
    qkv: Fp8Tiles
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Fp8Tiles
    sink: Tensor
    wo_a: Fp8Tiles
    wo_b: Fp8Tiles
    router: Tensor
    bias: Tensor
    w13: Fp4Tiles
    w2: Fp4Tiles
    shared_w13: Fp8Tiles
    shared_w2: Fp8Tiles
    bias_vl: Tensor | None = None  # the router's of rows within images
    extra: Tensor | None = None  # compressor values and gates, then index weights, of the same input
    num_extra: int = 0
    entry_norm: Tensor | None = None
    wk: Tensor | None = None
    key_norm: Tensor | None = None
    index_wq_b: Fp8Tiles | None = None
    engram_wkv: Fp8Tiles | None = None
    engram_weight: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """One rank's share of the draft stages (spec §2.5), packed; embedding and head are the backbone's.

    main_proj and, of all stages under one another, wkv as `main_kv` take the taps to the context; main_norm float32 [M]
    lies between them. norm float32 [M] is the head's, markov_embedding and markov_head bf16 [V, R] the bias's,
    confidence bf16 [M + R]. `noise_id` is the token that fills a block.
    """

    layers: list[LayerWeights]
    main_proj: Fp8Tiles
    main_norm: Tensor
    main_kv: Fp8Tiles
    norm: Tensor
    markov_embedding: Tensor
    markov_head: Tensor
    confidence: Tensor
    noise_id: int


@dataclass(frozen=True, slots=True)
class RankShape:
    """What one rank of `tp_size` holds: heads and groups, and every expert's share of the intermediate width.

    `of_drafts`: of the draft stages, not of the backbone. `exact`: how products are summed (packing.Fp4Tiles).
    """

    config: ModelConfig
    tp_size: int
    of_drafts: bool = False
    exact: bool = False

    @property
    def expert_width(self) -> int:
        return self.config.moe_intermediate_size // self.tp_size

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads // self.tp_size

    @property
    def groups(self) -> int:
        return self.config.o_groups // self.tp_size

    @property
    def group_rank(self) -> int:
        return self.config.o_lora_rank

    @property
    def vocabulary(self) -> int:
        return self.config.vocab_size // self.tp_size

    @property
    def expert_ids(self) -> range:
        c = self.config
        return range(c.dspark_n_routed_experts if self.of_drafts else c.n_routed_experts)


def make_layer(shape: RankShape, plan: LayerPlan, rank: int, device: torch.device | str) -> LayerWeights:
    """The weights of one layer."""
    c = shape.config
    width, f, low = c.hidden_size, shape.expert_width, c.q_lora_rank

    def seed(tensor: str) -> int:
        return seed_of(plan.index, tensor, rank)

    def fp8(tensor: str, rows: int, columns: int, *, paired: bool = False) -> Fp8Tiles:
        return fp8_tiles(rows, columns, seed(tensor), device, paired=paired, exact=shape.exact)

    def norm(tensor: str, size: int) -> Tensor:
        return 1.0 + normal((size,), 0.05, seed(tensor), device)

    def mixes(name: str, norm_name: str) -> MixWeights:
        fn = normal((c.hc_num_mixes, c.hc_mult * width), 0.01, seed(f"{name}_fn"), device)
        return MixWeights(
            pack_mixes(fn),
            normal((3,), 1.0, seed(f"{name}_scale"), device),
            normal((c.hc_num_mixes,), 1.0, seed(f"{name}_base"), device),
            norm(norm_name, width),
        )

    def plain(tensor: str, rows: int, columns: int, std: float) -> Tensor:
        return normal((rows, columns), std, seed(tensor), device).to(torch.bfloat16)

    layer = LayerWeights(
        plan=plan,
        attention=mixes("hc_attn", "attn_norm"),
        ffn=mixes("hc_ffn", "ffn_norm"),
        qkv=fp8("wq_a_wkv", low + c.head_dim, width),
        q_norm=norm("q_norm", low),
        kv_norm=norm("kv_norm", c.head_dim),
        wq_b=fp8("wq_b", shape.heads * c.head_dim, low),
        sink=normal((shape.heads,), 1.0, seed("sink"), device),
        wo_a=fp8("wo_a", shape.groups * c.o_lora_rank, shape.heads // shape.groups * c.head_dim, paired=True),
        wo_b=fp8("wo_b", width, shape.groups * c.o_lora_rank),
        router=linear.pack_bf16(plain("gate", plan.num_experts, width, 0.02)),
        bias=normal((plan.num_experts,), 0.01, seed("bias"), device),
        w13=fp4_tiles(plan.num_experts, 2 * f, width, seed("w13"), device, exact=shape.exact),
        w2=fp4_tiles(plan.num_experts, width, f, seed("w2"), device, exact=shape.exact),
        shared_w13=fp8("shared_w13", 2 * f, width),
        shared_w2=fp8("shared_w2", width, f),
    )
    extra = []
    if plan.is_kv_source:
        extra.append(plain("compressor", c.head_dim * min(plan.compress_ratio, 2), width, 0.02))
        layer.entry_norm = norm("entry_norm", c.head_dim)
        layer.wk = linear.pack_bf16(plain("wk", c.index_head_dim, c.head_dim, 0.05))
        layer.key_norm = norm("key_norm", c.index_head_dim)
    if plan.is_index_source:
        extra.append(plain("index_weights", c.index_n_heads, width, 0.02))
        layer.index_wq_b = fp8("index_wq_b", c.index_n_heads * c.index_head_dim, low)
    if extra:
        stacked = torch.cat(extra)
        layer.extra, layer.num_extra = linear.pack_bf16(stacked), len(stacked)
    if plan.has_engram:
        layer.engram_wkv = fp8("engram_wkv", (c.hc_mult + 1) * width, c.engram_width)
        layer.engram_weight = normal((c.hc_mult, width), 1.0, seed("engram_qk"), device)
    return layer


def make_drafts(shape: RankShape, rank: int, device: torch.device | str) -> DraftWeights:
    """The weights of the draft stages; `shape` is theirs. Tokens are those of the rank, noise too."""
    c = shape.config
    stages, width, markov = c.draft_layers, c.hidden_size, c.dspark_markov_rank
    first = stages[0].index

    def plain(tensor: str, shape: tuple[int, ...], std: float) -> Tensor:
        return normal(shape, std, seed_of(first, tensor, rank), device).to(torch.bfloat16)

    def norm(tensor: str) -> Tensor:
        return 1.0 + normal((width,), 0.05, seed_of(first, tensor, rank), device)

    taps = len(c.dspark_target_layer_ids) * width
    return DraftWeights(
        layers=[make_layer(shape, plan, rank, device) for plan in stages],
        main_proj=fp8_tiles(width, taps, seed_of(first, "main_proj", rank), device, exact=shape.exact),
        main_norm=norm("main_norm"),
        main_kv=fp8_tiles(
            len(stages) * c.head_dim, width, seed_of(first, "main_kv", rank), device, exact=shape.exact
        ),
        norm=norm("norm"),
        markov_embedding=plain("markov_embedding", (shape.vocabulary, markov), 1.0),
        markov_head=plain("markov_head", (shape.vocabulary, markov), 0.05),
        confidence=plain("confidence", (width + markov,), 0.02),
        noise_id=c.dspark_noise_token_id % shape.vocabulary,
    )


__all__ = [
    "DraftWeights",
    "LayerWeights",
    "MixWeights",
    "RankShape",
    "fp4_tiles",
    "fp8_tiles",
    "make_drafts",
    "make_layer",
    "normal",
    "random_bytes",
    "random_scales",
    "random_words",
    "seed_of",
]
