"""What a checkpoint is, as numbers: `ModelConfig`, read from a published config.json.

Owns the fields, their derived sizes and the plan of the layers. Knows nothing of tensors, files other than
config.json, or how anything is computed. Fields keep the names the publisher gave them. The keys of the two
file layouts live in `config_keys`, the rules a configuration must obey in `contradictions`, the plan of the
layers in `layers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from deskfleet.errors import ConfigError
from deskfleet.model.config_keys import (
    PublishedValues,
    parse_json_object,
    read_published,
    write_published,
)
from deskfleet.model.contradictions import find_contradiction
from deskfleet.model.layers import LayerPlan, plan_draft_layers, plan_layers


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters of the compressed layers (spec §N.7)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower and its preprocessing (spec §1.4). Sizes in elements, `min_pixels` in pixels.

    `max_wh_ratio` None means that an image of any shape is padded, never squeezed.
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Every architecture fact of a DeepSeek-V4.1 checkpoint, under its published name (spec §1).

    Construction checks that the values agree with each other, so an instance is always consistent, also one
    made by `dataclasses.replace`. Raises ConfigError naming the values that contradict each other.

    `weight_block_size` is the side of the square tile that shares one scale. `compress_ratios` has one entry
    for each backbone layer, then one for each draft stage. `vision` None means a text-only checkpoint.
    """

    gate_temp: ClassVar[float] = 1.0
    """Router temperature. A constant of the publisher's code, in neither file (spec §1.5)."""

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    weight_block_size: int
    vision: VisionConfig | None

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling
    compress_rope_theta: float

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float

    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int

    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    layers: tuple[LayerPlan, ...] = field(init=False, repr=False, compare=False)
    """The backbone layers in order (spec §4.1)."""

    draft_layers: tuple[LayerPlan, ...] = field(init=False, repr=False, compare=False)
    """The draft stages in order; their `index` continues the backbone's (spec §8.1)."""

    def __post_init__(self) -> None:
        contradiction = find_contradiction(self)
        if contradiction is not None:
            raise ConfigError(contradiction.message, hint=contradiction.hint)
        # The plans are looked up in every forward, so they are made once; the instance is frozen.
        object.__setattr__(self, "layers", plan_layers(self))
        object.__setattr__(self, "draft_layers", plan_draft_layers(self))

    @property
    def heads_per_group(self) -> int:
        """Attention heads that share one output group."""
        return self.num_attention_heads // self.o_groups

    @property
    def qk_nope_head_dim(self) -> int:
        """Leading elements of a head that are not rotated."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def hc_num_mixes(self) -> int:
        """Coefficients one sub-layer's hyper-connection predicts: pre, post and the comb matrix."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def engram_num_columns(self) -> int:
        """Rows one token reads from one Engram table: n-gram sizes from 2 up, times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def engram_width(self) -> int:
        """Elements of one token's concatenated Engram rows."""
        return self.engram_num_columns * self.engram_head_dim

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read config.json (or the flat inference/config.json) at `path`.

        Raises ConfigError naming the file and the key: unreadable, not JSON, a duplicate, unknown or missing
        key, a wrong type, a value this architecture does not have, or values that contradict each other.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ConfigError(f"no such file: {path}", hint="give the path of a config.json") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        return cls.from_dict(parse_json_object(text, source=str(path)), source=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, object], *, source: str = "config.json") -> ModelConfig:
        """Build from parsed JSON in the nested published layout or the flat inference layout (spec §1.1-1.5).

        `source` names the file in messages. Raises ConfigError as `from_file` does.

        What the flat layout does not say takes these values: bos, eos and pad token ids 0, 1 and 2;
        max_position_embeddings = original_seq_len * rope_factor; num_key_value_heads 1; topk_method
        noaux_tc; norm_topk_prob true; weight_block_size 32.
        """
        values = read_published(data, cls, source=source)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.message}", hint=error.hint) from error

    def to_published_dict(self) -> PublishedValues:
        """Return the nested published layout, ready for json.dump. `from_dict` of it equals this instance."""
        return write_published(self)


__all__ = ["LayerPlan", "ModelConfig", "RopeScaling", "VisionConfig"]
