"""From a checkpoint to one rank's packed weights on the device. Owns what is padded so that the kernels take it.

The rank's slices are those of its ShardPlan, read by the ShardReader: nothing here knows a file. A tensor is packed on
the device as soon as it is read, so loading holds one tensor of a layer besides the layer. Two kinds of zeros are
added to those of the plan, and neither changes a result: experts whose width is no multiple of 64 get gates and up
values of zero, and output groups of a low rank that is no multiple of 128 get rows of zero, which meet columns of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deskfleet.engine.cuda import linear
from deskfleet.engine.cuda.packing import GROUP, TILE_ROWS, Fp4Tiles, Fp8Tiles, pack_fp4, pack_fp8, pack_mixes
from deskfleet.engine.cuda.prefill_experts import MOST_SCALE
from deskfleet.engine.cuda.synthetic import DraftWeights, LayerWeights, MixWeights
from deskfleet.engine.ops.quant import Fp4Matrix
from deskfleet.engine.weights import ShardReader
from deskfleet.errors import EngineError
from deskfleet.model.config import ModelConfig
from deskfleet.model.device import exact_products
from deskfleet.model.layers import LayerPlan
from deskfleet.model.layout import ShardPlan

_GATES = TILE_ROWS // 2


@dataclass(frozen=True, slots=True)
class RankShape:
    """What `rank` of a plan holds, padded for the kernels (see step.Shape); of the draft stages where `of_drafts`."""

    plan: ShardPlan
    rank: int
    of_drafts: bool = False

    @property
    def config(self) -> ModelConfig:
        return self.plan.config

    @property
    def heads(self) -> int:
        return self.plan.heads_per_rank

    @property
    def groups(self) -> int:
        return self.plan.groups_per_rank

    @property
    def group_rank(self) -> int:
        return _up(self.config.o_lora_rank, TILE_ROWS)

    @property
    def expert_width(self) -> int:
        return _up(self.config.moe_intermediate_size, _GATES)

    @property
    def expert_ids(self) -> range:
        plan, rank = self.plan, self.rank
        return plan.draft_expert_range(rank) if self.of_drafts else plan.expert_range(rank)

    @property
    def vocabulary(self) -> int:
        return self.plan.vocab_per_rank


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a rank's backbone.

    `embedding` bf16 [V_local, M], of more than one rank with a row of zeros behind for the tokens of others; `head`
    bf16 tiles of [V_local, M]; `norm` float32 [M].
    """

    shape: RankShape
    layers: list[LayerWeights]
    embedding: Tensor
    head: Tensor
    norm: Tensor


def load_model(reader: ShardReader, device: torch.device, *, exact: bool | None = None) -> ModelWeights:
    """Read and pack this rank's share, with products that are `exact` (packing.Fp4Tiles) or, where None, by the model's
    size. Raises CheckpointError, and EngineError for sizes and for scales of experts that no kernel takes."""
    loader = _Loader(reader, device, exact)
    shape = RankShape(reader.plan, reader.rank)
    embedding = loader.plain("embed.weight")
    if reader.plan.layout.tp_size > 1:
        embedding = torch.cat((embedding, torch.zeros_like(embedding[:1])))
    return ModelWeights(
        shape,
        [loader.layer(plan, shape) for plan in reader.plan.config.layers],
        embedding,
        linear.pack_bf16(loader.plain("head.weight")),
        loader.float32("norm.weight"),
    )


def load_drafts(reader: ShardReader, device: torch.device, *, exact: bool | None = None) -> DraftWeights:
    """Read and pack this rank's share of the draft stages; of the Markov head, all of it: it is small, and then no rank
    waits for another between two drafts. Raises CheckpointError, and EngineError as `load_model`.
    """
    loader, config = _Loader(reader, device, exact), reader.plan.config
    stages, shape = config.draft_layers, RankShape(reader.plan, reader.rank, of_drafts=True)
    first, last = stages[0].prefix, stages[-1].prefix
    with reader.whole() as whole:
        markov = [
            _Loader(whole, device, exact).plain(f"{last}.markov_head.{name}.weight")
            for name in ("embed", "head")
        ]
    return DraftWeights(
        layers=[loader.layer(plan, shape) for plan in stages],
        main_proj=loader.fp8(f"{first}.main_proj"),
        main_norm=loader.float32(f"{first}.main_norm.weight"),
        main_kv=loader.fp8(*(f"{plan.prefix}.attn.wkv" for plan in stages)),
        norm=loader.float32(f"{last}.norm.weight"),
        markov_embedding=markov[0],
        markov_head=markov[1],
        confidence=loader.plain(f"{last}.confidence_head.proj.weight")[0],
        noise_id=config.dspark_noise_token_id,
    )


class _Loader:
    """Tensors of one rank by name, on the device."""

    def __init__(self, reader: ShardReader, device: torch.device, exact: bool | None) -> None:
        self._reader = reader
        self._device = device
        c = reader.plan.config
        small = exact_products(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size)
        self._exact = small if exact is None else exact

    def plain(self, name: str) -> Tensor:
        """A tensor as it is stored: bf16, float32, or uint8 of codes and scales."""
        stored = self._reader.raw(name)
        if stored.dtype == np.uint16:
            return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16).to(self._device)
        return torch.from_numpy(stored).to(self._device)

    def float32(self, name: str) -> Tensor:
        return self.plain(name).to(torch.float32)

    def fp8(
        self,
        *prefixes: str,
        rows: int | None = None,
        columns: int | None = None,
        gated: bool = False,
        paired: bool = False,
    ) -> Fp8Tiles:
        """Matrices under one another, each padded to `rows` and `columns`."""
        codes = [_padded(self.plain(f"{prefix}.weight"), rows, columns) for prefix in prefixes]
        scales = [
            _padded(self.plain(f"{prefix}.scale"), rows and rows // GROUP, columns and columns // GROUP)
            for prefix in prefixes
        ]
        tiles = pack_fp8(torch.cat(codes), torch.cat(scales), gated=gated, paired=paired)
        return replace(tiles, exact=self._exact)

    def experts(
        self,
        prefix: str,
        names: Sequence[str],
        ids: range,
        *,
        rows: int | None = None,
        columns: int | None = None,
        gated: bool = False,
    ) -> Fp4Tiles:
        """The matrices `names` of each expert under one another, each padded; packed one expert at a time."""
        whole: Fp4Tiles | None = None
        for place, expert in enumerate(ids):
            owner = f"{prefix}.{expert}"
            codes = torch.cat([
                _padded(self.plain(f"{owner}.{name}.weight"), rows, columns and columns // 2) for name in names
            ])  # fmt: skip
            scales = torch.cat([
                _padded(self.plain(f"{owner}.{name}.scale"), rows, columns and columns // GROUP)
                for name in names
            ])  # fmt: skip
            one = pack_fp4(Fp4Matrix(codes[None], scales[None]), gated=gated)
            if whole is None:
                whole = Fp4Tiles(
                    one.codes.new_empty((len(ids), *one.codes.shape[1:])),
                    one.scales.new_empty((len(ids), *one.scales.shape[1:])),
                    one.num_rows,
                    one.num_columns,
                    self._exact,
                )
            whole.codes[place], whole.scales[place] = one.codes[0], one.scales[0]
        if whole is None:  # more ranks than experts
            none = torch.zeros(0, dtype=torch.uint8, device=self._device)
            return Fp4Tiles(none, none.view(torch.int32), 0, 0, self._exact)
        return whole

    def _check_scales(self, owners: Sequence[str], *matrices: Fp4Tiles | Fp8Tiles) -> None:
        """Raise EngineError where a scale of the experts `owners` is more than products in bf16 take: they would
        compute something else and say nothing. The device is asked once; who it was is looked up only then."""
        most = [tiles.scales.view(torch.uint8).amax() for tiles in matrices if len(tiles.scales)]
        if not most or int(torch.stack(most).amax()) <= MOST_SCALE:
            return
        for name in (f"{owner}.{matrix}.scale" for owner in owners for matrix in ("w1", "w2", "w3")):
            byte = int(self._reader.raw(name).max())
            if byte > MOST_SCALE:
                raise EngineError(
                    f"{name} has a scale byte of {byte}, more than the {MOST_SCALE} (2**7) that experts on a GPU take",
                    hint="no expert that was trained has such weights: copy the checkpoint anew, or serve with "
                    "--device cpu",
                )

    def mixes(self, name: str, norm: str) -> MixWeights:
        return MixWeights(
            pack_mixes(self.float32(f"{name}_fn")),
            self.float32(f"{name}_scale"),
            self.float32(f"{name}_base"),
            self.float32(norm),
        )

    def grouped_columns(self, prefix: str, shape: RankShape) -> Fp8Tiles:
        """wo_b, whose columns come group by group."""
        groups, low = shape.groups, shape.config.o_lora_rank
        parts = []
        for part, unit in (("weight", 1), ("scale", GROUP)):
            own = self.plain(f"{prefix}.{part}").unflatten(1, (groups, low // unit))
            parts.append(
                torch.nn.functional.pad(own, (0, (shape.group_rank - low) // unit)).flatten(1).contiguous()
            )
        return replace(pack_fp8(*parts), exact=self._exact)

    def grouped_rows(self, prefix: str, shape: RankShape) -> Fp8Tiles:
        """wo_a, whose rows come group by group."""
        groups, low = shape.groups, shape.config.o_lora_rank
        parts = []
        for part, unit in (("weight", 1), ("scale", GROUP)):
            own = self.plain(f"{prefix}.{part}").unflatten(0, (groups, low // unit))
            missing = (shape.group_rank - low) // unit
            parts.append(torch.nn.functional.pad(own, (0, 0, 0, missing)).flatten(0, 1).contiguous())
        return pack_fp8(*parts, paired=True)

    def layer(self, plan: LayerPlan, shape: RankShape) -> LayerWeights:
        attn, ffn, width = f"{plan.prefix}.attn", f"{plan.prefix}.ffn", shape.expert_width
        shared = f"{ffn}.shared_experts"
        layer = LayerWeights(
            plan=plan,
            attention=self.mixes(f"{plan.prefix}.hc_attn", f"{plan.prefix}.attn_norm.weight"),
            ffn=self.mixes(f"{plan.prefix}.hc_ffn", f"{plan.prefix}.ffn_norm.weight"),
            qkv=self.fp8(f"{attn}.wq_a", f"{attn}.wkv"),
            q_norm=self.float32(f"{attn}.q_norm.weight"),
            kv_norm=self.float32(f"{attn}.kv_norm.weight"),
            wq_b=self.fp8(f"{attn}.wq_b"),
            sink=self.float32(f"{attn}.attn_sink"),
            wo_a=self.grouped_rows(f"{attn}.wo_a", shape),
            wo_b=self.grouped_columns(f"{attn}.wo_b", shape),
            router=linear.pack_bf16(self.plain(f"{ffn}.gate.weight")),
            bias=self.float32(f"{ffn}.gate.bias"),
            w13=self.experts(f"{ffn}.experts", ("w1", "w3"), shape.expert_ids, rows=width, gated=True),
            w2=self.experts(f"{ffn}.experts", ("w2",), shape.expert_ids, columns=width),
            shared_w13=self.fp8(f"{shared}.w1", f"{shared}.w3", rows=width, gated=True),
            shared_w2=self.fp8(f"{shared}.w2", columns=width),
        )
        # Steps of prompts have such products, and all that are exact; no block of drafts is as large as a prompt.
        if self._exact or not plan.is_draft:
            self._check_scales(
                [f"{ffn}.experts.{expert}" for expert in shape.expert_ids], layer.w13, layer.w2
            )
        if self._exact:
            self._check_scales([shared], layer.shared_w13, layer.shared_w2)
        extra = []
        if plan.is_kv_source:
            extra.append(self.plain(f"{attn}.compressor.wkv.weight"))
            if plan.compress_ratio > 1:
                extra.append(self.plain(f"{attn}.compressor.wgate.weight"))
            layer.entry_norm = self.float32(f"{attn}.compressor.norm.weight")
            layer.wk = linear.pack_bf16(self.plain(f"{attn}.indexer.wk.weight"))
            layer.key_norm = self.float32(f"{attn}.indexer.k_norm.weight")
        if plan.is_index_source:
            extra.append(self.plain(f"{attn}.indexer.weights_proj.weight"))
            layer.index_wq_b = self.fp8(f"{attn}.indexer.wq_b")
        if extra:
            stacked = torch.cat(extra)
            layer.extra, layer.num_extra = linear.pack_bf16(stacked), len(stacked)
        if self._reader.plan.config.vision is not None and not plan.is_draft:
            layer.bias_vl = self.float32(f"{ffn}.gate.bias_vl")
        if plan.has_engram:
            engram = f"{plan.prefix}.engram"
            layer.engram_wkv = self.fp8(f"{engram}.wkv")
            weights = (self.plain(f"{engram}.{name}_weight").to(torch.float64) for name in "qk")
            query, key = weights
            layer.engram_weight = (query * key).to(torch.float32)
        return layer


def _padded(matrix: Tensor, rows: int | None, columns: int | None) -> Tensor:
    """Zeros below and to the right, up to the sizes given."""
    below = 0 if rows is None else rows - matrix.shape[0]
    right = 0 if columns is None else columns - matrix.shape[1]
    return torch.nn.functional.pad(matrix, (0, right, 0, below)) if below or right else matrix


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


__all__ = ["ModelWeights", "RankShape", "load_drafts", "load_model"]
