"""What a DeepSeek-V4 configuration says of memory: `V4Config`, `v4_tensors`, `v4_inventory`.

Owns the names and shapes of V4-Flash, of its plain MTP stage and of its DSpark stages. Knows no files, and of
config.json only what memory depends on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from deskfleet.errors import ConfigError
from deskfleet.planner.inventory import Inventory, KvShape, TensorSize, group_tensors

MODEL_TYPE = "deepseek_v4"

INDEXED_RATIO, PLAIN_RATIO = 4, 128
"""Compressed sparse attention picks among entries of four tokens; heavily compressed attention reads all of its own."""

_FLOAT32_BYTES = 4
_FP4_SCALE_BLOCK = 32

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config:
    """The keys of config.json that memory depends on, under their published names.

    `compress_ratios` has an entry for each layer, then one for each draft stage. `dspark_block_size` None means plain
    MTP.
    """

    vocab_size: _Positive
    hidden_size: _Positive
    num_hidden_layers: _Positive
    num_attention_heads: _Positive
    head_dim: _Positive
    qk_rope_head_dim: _Positive
    q_lora_rank: _Positive
    o_groups: _Positive
    o_lora_rank: _Positive
    sliding_window: _Positive
    max_position_embeddings: _Positive
    compress_ratios: tuple[_Natural, ...]
    index_n_heads: _Positive
    index_head_dim: _Positive
    n_routed_experts: _Positive
    num_experts_per_tok: _Positive
    moe_intermediate_size: _Positive
    num_hash_layers: _Natural
    hc_mult: _Positive
    weight_block_size: tuple[_Positive, _Positive] = (128, 128)
    expert_dtype: Literal["fp4", "fp8"] = "fp4"
    n_mtp_layers: _Natural | None = None
    dspark_block_size: _Positive | None = None
    dspark_target_layer_ids: tuple[_Natural, ...] = ()
    dspark_markov_rank: _Natural = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, source: str = "config.json") -> V4Config:
        """Build from parsed JSON; keys that memory does not depend on are left alone.

        Raises ConfigError naming the file and the key: missing, of a wrong type, or a ratio that V4 does not have.
        """
        quantization = data.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
        values = dict(data) if block is None else {**data, "weight_block_size": block}
        try:
            config = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{source}: {error}", hint="give the config.json of a DeepSeek-V4 checkpoint"
            ) from error
        if len(config.compress_ratios) < config.num_hidden_layers:
            raise ConfigError(
                f"{source}: compress_ratios has {len(config.compress_ratios)} entries for "
                f"{config.num_hidden_layers} layers"
            )
        unknown = set(config.compress_ratios) - {0, INDEXED_RATIO, PLAIN_RATIO}
        if unknown:
            raise ConfigError(
                f"{source}: compress_ratios holds {min(unknown)}; this architecture has 0, {INDEXED_RATIO} and "
                f"{PLAIN_RATIO}"
            )
        return config

    @property
    def num_stages(self) -> int:
        """Draft stages. config.json says one for DSpark's three, so its ratios decide unless n_mtp_layers is there."""
        if self.n_mtp_layers is not None:
            return self.n_mtp_layers
        return len(self.compress_ratios) - self.num_hidden_layers

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression of each backbone layer, 0 for none."""
        return self.compress_ratios[: self.num_hidden_layers]


def v4_tensors(config: V4Config) -> Iterator[TensorSize]:
    """Yield every tensor of a checkpoint of `config`, token-to-expert tables as int64.

    A layer's routed experts are alike, so its first stands for all of them.
    """
    yield _bf16("embed.weight", config.vocab_size, config.hidden_size)
    for layer, ratio in enumerate(config.ratios):
        yield from _block(config, f"layers.{layer}", is_hashed=layer < config.num_hash_layers)
        if ratio:
            yield from _compressed_attention(config, f"layers.{layer}.attn", ratio)
    yield _bf16("norm.weight", config.hidden_size)
    yield from _output_collapse(config, "hc_head")
    yield _bf16("head.weight", config.vocab_size, config.hidden_size)
    for stage in range(config.num_stages):
        yield from _block(config, f"mtp.{stage}", is_hashed=False)
        if config.dspark_block_size is None:
            yield from _mtp_ends(config, f"mtp.{stage}")
        else:
            yield from _dspark_ends(config, stage)


def _block(config: V4Config, prefix: str, *, is_hashed: bool) -> Iterator[TensorSize]:
    hidden, mixes = config.hidden_size, (2 + config.hc_mult) * config.hc_mult
    yield _bf16(f"{prefix}.attn_norm.weight", hidden)
    yield _bf16(f"{prefix}.ffn_norm.weight", hidden)
    for half in ("attn", "ffn"):
        yield _float32(f"{prefix}.hc_{half}_fn", mixes, config.hc_mult * hidden)
        yield _float32(f"{prefix}.hc_{half}_base", mixes)
        yield _float32(f"{prefix}.hc_{half}_scale", 3)
    attn, heads, head_dim = f"{prefix}.attn", config.num_attention_heads, config.head_dim
    out_rank = config.o_groups * config.o_lora_rank
    yield _float32(f"{attn}.attn_sink", heads)
    yield from _fp8(config, f"{attn}.wq_a", config.q_lora_rank, hidden)
    yield _bf16(f"{attn}.q_norm.weight", config.q_lora_rank)
    yield from _fp8(config, f"{attn}.wq_b", heads * head_dim, config.q_lora_rank)
    yield from _fp8(config, f"{attn}.wkv", head_dim, hidden)
    yield _bf16(f"{attn}.kv_norm.weight", head_dim)
    yield from _fp8(config, f"{attn}.wo_a", out_rank, heads // config.o_groups * head_dim)
    yield from _fp8(config, f"{attn}.wo_b", hidden, out_rank)
    yield from _feed_forward(config, f"{prefix}.ffn", is_hashed=is_hashed)


def _feed_forward(config: V4Config, prefix: str, *, is_hashed: bool) -> Iterator[TensorSize]:
    hidden, inner, num_experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield _bf16(f"{prefix}.gate.weight", num_experts, hidden)
    if is_hashed:
        shape = (config.vocab_size, config.num_experts_per_tok)
        yield _sized(f"{prefix}.gate.tid2eid", "I64", 8, shape)
    else:
        yield _float32(f"{prefix}.gate.bias", num_experts)
    sides = (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner))
    routed = _fp4 if config.expert_dtype == "fp4" else _fp8_float32_scales
    for side in sides:
        for part in routed(config, *side):
            yield part._replace(name=f"{prefix}.experts.0.{part.name}", copies=num_experts)
    for name, rows, columns in sides:
        yield from _fp8(config, f"{prefix}.shared_experts.{name}", rows, columns)


def _compressed_attention(config: V4Config, prefix: str, ratio: int) -> Iterator[TensorSize]:
    yield from _compressor(config, f"{prefix}.compressor", ratio, config.head_dim)
    if ratio == INDEXED_RATIO:
        rows = config.index_n_heads * config.index_head_dim
        yield from _fp8(config, f"{prefix}.indexer.wq_b", rows, config.q_lora_rank)
        yield _bf16(f"{prefix}.indexer.weights_proj.weight", config.index_n_heads, config.hidden_size)
        yield from _compressor(config, f"{prefix}.indexer.compressor", ratio, config.index_head_dim)


def _compressor(config: V4Config, prefix: str, ratio: int, width: int) -> Iterator[TensorSize]:
    channels = _channels(ratio, width)
    yield _bf16(f"{prefix}.wkv.weight", channels, config.hidden_size)
    yield _bf16(f"{prefix}.wgate.weight", channels, config.hidden_size)
    yield _float32(f"{prefix}.ape", ratio, channels)
    yield _bf16(f"{prefix}.norm.weight", width)


def _channels(ratio: int, width: int) -> int:
    """Windows of four tokens overlap: half of a token's channels go to its own window, half to the next."""
    return 2 * width if ratio == INDEXED_RATIO else width


def _mtp_ends(config: V4Config, prefix: str) -> Iterator[TensorSize]:
    hidden = config.hidden_size
    for name in ("enorm", "hnorm", "norm"):
        yield _bf16(f"{prefix}.{name}.weight", hidden)
    for name in ("e_proj", "h_proj"):
        yield from _fp8(config, f"{prefix}.{name}", hidden, hidden)
    yield from _output_collapse(config, f"{prefix}.hc_head")


def _dspark_ends(config: V4Config, stage: int) -> Iterator[TensorSize]:
    """Yield what the first stage takes in and the last gives out."""
    prefix, hidden, rank = f"mtp.{stage}", config.hidden_size, config.dspark_markov_rank
    if stage == 0:
        yield from _fp8(config, f"{prefix}.main_proj", hidden, len(config.dspark_target_layer_ids) * hidden)
        yield _bf16(f"{prefix}.main_norm.weight", hidden)
    if stage == config.num_stages - 1:
        yield _bf16(f"{prefix}.norm.weight", hidden)
        yield from _output_collapse(config, f"{prefix}.hc_head")
        for name in ("markov_w1", "markov_w2"):
            yield _bf16(f"{prefix}.markov_head.{name}.weight", config.vocab_size, rank)
        yield _bf16(f"{prefix}.confidence_head.proj.weight", 1, hidden + rank)


def _output_collapse(config: V4Config, prefix: str) -> Iterator[TensorSize]:
    yield _float32(f"{prefix}_fn", config.hc_mult, config.hc_mult * config.hidden_size)
    yield _float32(f"{prefix}_base", config.hc_mult)
    yield _float32(f"{prefix}_scale", 1)


def _bf16(name: str, *shape: int) -> TensorSize:
    return _sized(name, "BF16", 2, shape)


def _float32(name: str, *shape: int) -> TensorSize:
    return _sized(name, "F32", _FLOAT32_BYTES, shape)


def _fp8(config: V4Config, name: str, rows: int, columns: int) -> Iterator[TensorSize]:
    yield _sized(f"{name}.weight", "F8_E4M3", 1, (rows, columns))
    yield _sized(f"{name}.scale", "F8_E8M0", 1, _blocks(config, rows, columns))


def _fp8_float32_scales(config: V4Config, name: str, rows: int, columns: int) -> Iterator[TensorSize]:
    yield _sized(f"{name}.weight", "F8_E4M3", 1, (rows, columns))
    yield _sized(f"{name}.scale", "F32", _FLOAT32_BYTES, _blocks(config, rows, columns))


def _fp4(config: V4Config, name: str, rows: int, columns: int) -> Iterator[TensorSize]:
    yield _sized(f"{name}.weight", "I8", 1, (rows, columns // 2))
    yield _sized(f"{name}.scale", "F8_E8M0", 1, (rows, columns // _FP4_SCALE_BLOCK))


def _blocks(config: V4Config, rows: int, columns: int) -> tuple[int, int]:
    high, wide = config.weight_block_size
    return -(-rows // high), -(-columns // wide)


def _sized(name: str, dtype: str, element_bytes: int, shape: tuple[int, ...]) -> TensorSize:
    return TensorSize(name, dtype, shape, math.prod(shape) * element_bytes)


def v4_inventory(config: V4Config, *, name: str, origin: str, num_files: int) -> Inventory:
    """Return the inventory of a checkpoint of `config`; `derived` says what config.json leaves open."""
    groups = group_tensors(v4_tensors(config))
    experts = next(group for group in groups if group.name == "routed experts")
    derived = ["file_bytes: tensors only, the headers of the files (some MB) left out"]
    if config.num_hash_layers:
        derived.append(
            f"router: token-to-expert tables of {config.num_hash_layers} layers taken as int64; half with int32"
        )
    return Inventory(
        name=name,
        architecture="v4",
        weight_format="mxfp4" if config.expert_dtype == "fp4" else "fp8",
        expert_bits=8 * experts.num_bytes / experts.num_weights,
        origin=origin,
        derived=tuple(derived),
        file_bytes=sum(group.num_bytes for group in groups),
        num_files=num_files,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_groups=config.o_groups,
        head_dim=config.head_dim,
        o_lora_rank=config.o_lora_rank,
        q_lora_rank=config.q_lora_rank,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_experts=config.n_routed_experts,
        num_chosen_experts=config.num_experts_per_tok,
        num_draft_experts=config.n_routed_experts if config.num_stages else 0,
        num_chosen_draft_experts=config.num_experts_per_tok if config.num_stages else 0,
        expert_width=config.moe_intermediate_size,
        num_draft_stages=config.num_stages,
        draft_block=config.dspark_block_size or min(1, config.num_stages),
        index_heads=config.index_n_heads,
        max_image_tokens=0,
        groups=groups,
        engram=None,
        kv=v4_kv_shape(config),
    )


def v4_kv_shape(config: V4Config) -> KvShape:
    """Return what a token leaves behind; only the sources of ratio 4 keep index keys.

    The state is a ring of float32 rows for each compressor, two windows long where windows overlap; a row is a token's
    values and weights in all channels. Speculation makes rings longer; how much is the engine's choice.
    """
    sources = tuple(ratio for ratio in config.ratios if ratio)
    state_bytes = 0
    for ratio in sources:
        is_indexed = ratio == INDEXED_RATIO
        widths = (config.head_dim, config.index_head_dim) if is_indexed else (config.head_dim,)
        ring = 2 * ratio if is_indexed else ratio
        state_bytes += ring * sum(2 * _channels(ratio, width) * _FLOAT32_BYTES for width in widths)
    return KvShape(
        ratios=sources,
        indexed=tuple(ratio == INDEXED_RATIO for ratio in sources),
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        index_head_dim=config.index_head_dim,
        window=config.sliding_window,
        num_window_layers=config.num_hidden_layers,
        num_draft_layers=config.num_stages,
        state_bytes=state_bytes,
    )


__all__ = [
    "INDEXED_RATIO",
    "MODEL_TYPE",
    "PLAIN_RATIO",
    "V4Config",
    "v4_inventory",
    "v4_kv_shape",
    "v4_tensors",
]
