"""The role of each layer: which caches it reads, which it fills, which experts it has.

Owns the derivation of spec §4.1's table from the configuration's id lists. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deskfleet.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer's role (spec §4.1).

    `kv_source` is the layer whose compressed cache and index keys this one reads, `index_source` the layer
    whose picks it uses; both are this layer's own index when it is a source and None when `compress_ratio`
    is 0. `uses_candidates` marks a layer that ranks only positions the candidate source let through.
    `starts_decoder` marks the last KV source: what later tokens look up is complete once it has written (spec §3.1).
    `is_tap` marks a layer whose input stream feeds the drafts. `uses_yarn` selects the rotary table.
    `index` counts draft stages on from the backbone; `prefix` is the tensor name prefix without the dot.
    """

    index: int
    prefix: str
    is_draft: bool
    compress_ratio: int
    kv_source: int | None
    index_source: int | None
    is_kv_source: bool
    starts_decoder: bool
    is_index_source: bool
    is_candidate_source: bool
    uses_candidates: bool
    has_engram: bool
    is_tap: bool
    uses_yarn: bool
    num_experts: int
    num_chosen: int


def last_source(sources: Iterable[int], ratios: Sequence[int], layer: int) -> int | None:
    """Return the last of `sources` at or before `layer` with the same ratio, or None."""
    candidates = [source for source in sources if source <= layer and ratios[source] == ratios[layer]]
    return max(candidates, default=None)


def plan_layers(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """Return the plan of every backbone layer, in order."""
    return tuple(_plan_layer(config, layer) for layer in range(config.num_hidden_layers))


def plan_draft_layers(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """Return the plan of every draft stage, in order (spec §8.1: window only, local rotary table)."""
    return tuple(
        LayerPlan(
            index=config.num_hidden_layers + stage,
            prefix=f"mtp.{stage}",
            is_draft=True,
            compress_ratio=0,
            kv_source=None,
            index_source=None,
            is_kv_source=False,
            starts_decoder=False,
            is_index_source=False,
            is_candidate_source=False,
            uses_candidates=False,
            has_engram=False,
            is_tap=False,
            uses_yarn=False,
            num_experts=config.dspark_n_routed_experts,
            num_chosen=config.dspark_num_experts_per_tok,
        )
        for stage in range(config.num_nextn_predict_layers)
    )


def _plan_layer(config: ModelConfig, layer: int) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    is_index_source = layer in config.index_source_layer_ids
    candidate_source = config.candidate_source_layer_id
    kv_source = index_source = None
    if ratio > 0:
        kv_source = last_source(config.kv_source_layer_ids, config.compress_ratios, layer)
        index_source = last_source(config.index_source_layer_ids, config.compress_ratios, layer)
    return LayerPlan(
        index=layer,
        prefix=f"layers.{layer}",
        is_draft=False,
        compress_ratio=ratio,
        kv_source=kv_source,
        index_source=index_source,
        is_kv_source=layer in config.kv_source_layer_ids,
        starts_decoder=layer == max(config.kv_source_layer_ids, default=None),
        is_index_source=is_index_source,
        is_candidate_source=layer == candidate_source,
        # Any later index source shares the candidate source's cache; `contradictions` refuses the rest.
        uses_candidates=is_index_source and candidate_source is not None and layer > candidate_source,
        has_engram=layer in config.engram_layer_ids,
        is_tap=layer in config.dspark_target_layer_ids,
        uses_yarn=ratio > 0,
        num_experts=config.n_routed_experts,
        num_chosen=config.num_experts_per_tok,
    )


__all__ = ["LayerPlan", "last_source", "plan_draft_layers", "plan_layers"]
