"""Corruptions of a checkpoint, of an engine, of a gateway: each as a change of files where files can have it.

Owns the list, and which questions could show each. Knows nothing of asking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deskfleet.errors import ConfigError
from deskfleet.model.engram import engram_geometry
from pocket.edit import CheckpointCopy

TEXT = ("arithmetic", "facts", "tool-calls", "needle", "prose")
PICTURES = ("vision",)
EFFORTS = (10, 50, 100)

_LAYER = 5  # in the middle


@dataclass(frozen=True)
class Variant:
    """One corruption: `edit` changes a copy, `fault` is planted. `tasks` are those that could show it."""

    name: str
    what: str
    edit: Callable[[CheckpointCopy], None] | None = None
    fault: str | None = None
    tasks: tuple[str, ...] = TEXT
    efforts: tuple[int, ...] = ()
    tp_size: int = 1

    def write(self, source: Path, target: Path) -> None:
        """Write it as a checkpoint. Raises ConfigError for a variant that is no change of files."""
        if self.edit is None:
            raise ConfigError(
                f"{self.name} is a fault of the engine or the gateway: no checkpoint can have it"
            )
        self.edit(CheckpointCopy(source, target))


def _swap_experts(copy: CheckpointCopy) -> None:
    for part in ("w1.weight", "w1.scale", "w2.weight", "w2.scale", "w3.weight", "w3.scale"):
        names = [f"layers.{_LAYER}.ffn.experts.{expert}.{part}" for expert in (0, 1)]
        first, second = (copy.raw(name) for name in names)
        copy.write(names[0], second)
        copy.write(names[1], first)


def _zero_sinks(copy: CheckpointCopy) -> None:
    name = f"layers.{_LAYER}.attn.attn_sink"
    copy.write(name, np.zeros_like(copy.raw(name)))


def _tables(copy: CheckpointCopy) -> list[str]:
    return [name for name in copy.names if ".engram.embed." in name]


def _shift_engram(copy: CheckpointCopy) -> None:
    for name in _tables(copy):
        copy.write(name, np.roll(copy.raw(name), 1, axis=0))


def _zero_engram(copy: CheckpointCopy) -> None:
    for name in _tables(copy):
        if name.endswith(".weight"):
            copy.write(name, np.zeros_like(copy.raw(name)))


def _foreign_engram(copy: CheckpointCopy) -> None:
    """Rank 1 of 2 reads rank 0's rows: each of its columns holds what another rank's column holds."""
    geometry = engram_geometry(copy.config)
    if geometry is None:
        raise ConfigError("the checkpoint has no Engram tables")
    for number, layer in enumerate(copy.config.engram_layer_ids):
        sizes = [int(size) for size in np.asarray(geometry.primes)[number].ravel()]
        starts = [int(start) for start in np.asarray(geometry.offsets)[number].ravel()]
        half = len(sizes) // 2
        for part in ("weight", "scale"):
            name = f"layers.{layer}.engram.embed.{part}"
            rows = copy.raw(name)
            changed = rows.copy()
            for column in range(half, len(sizes)):
                own = np.arange(sizes[column])
                changed[starts[column] + own] = rows[starts[column - half] + own % sizes[column - half]]
            copy.write(name, changed)


def _rope_theta(copy: CheckpointCopy) -> None:
    copy.change_config(compress_rope_theta=copy.config.rope_theta)


def _no_yarn(copy: CheckpointCopy) -> None:
    scaling = copy.config.rope_scaling
    copy.change_config(
        rope_scaling={
            "rope_type": "yarn",
            "factor": 1,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    )


def _ratios(copy: CheckpointCopy) -> None:
    ratios = [2 if ratio == 1 else ratio for ratio in copy.config.compress_ratios]
    copy.change_config(compress_ratios=ratios)


def _one_iteration(copy: CheckpointCopy) -> None:
    copy.change_config(hc_sinkhorn_iters=1)


def _one_expert(copy: CheckpointCopy) -> None:
    copy.change_config(num_experts_per_tok=1)


def _route_scale(copy: CheckpointCopy) -> None:
    copy.change_config(routed_scaling_factor=1.0)


def _few_picks(copy: CheckpointCopy) -> None:
    copy.change_config(index_topk=8)


def _random_picks(copy: CheckpointCopy) -> None:
    """Index queries of every index source point anywhere, so that the top-k is a draw."""
    rng = np.random.default_rng(0)
    for name in copy.names:
        if name.endswith(".indexer.wq_b.weight"):
            raw = copy.raw(name)
            # E4M3 codes of moderate size and any sign; 0x7f and 0xff would be no numbers.
            codes = rng.integers(0x30, 0x40, raw.shape, np.uint8) | (
                rng.integers(0, 2, raw.shape, np.uint8) << 7
            )
            copy.write(name, codes)


def _image_range(copy: CheckpointCopy) -> None:
    """Pixels from 0 to 1 instead of -1 to 1: (n + 1) / 2 through the same projection."""
    weight, bias = (copy.floats(f"vision.patch_embed.proj.{part}") for part in ("weight", "bias"))
    copy.write_floats("vision.patch_embed.proj.weight", weight / np.float32(2))
    halves = weight.reshape(len(weight), -1).sum(1, dtype=np.float32) / np.float32(2)
    copy.write_floats("vision.patch_embed.proj.bias", bias + halves)


def _image_channels(copy: CheckpointCopy) -> None:
    """Blue where red belongs."""
    name = "vision.patch_embed.proj.weight"
    weight = copy.floats(name)
    planes = weight.reshape(len(weight), 3, -1)[:, ::-1]
    copy.write_floats(name, planes.reshape(weight.shape))


def _no_router_bias(copy: CheckpointCopy) -> None:
    for name in copy.names:
        if name.startswith("layers.") and name.endswith(".ffn.gate.bias"):
            copy.write(name, np.zeros_like(copy.raw(name)))


def _scale_rows(copy: CheckpointCopy) -> None:
    """The scales of one matrix belong to the tiles of another row."""
    name = f"layers.{_LAYER}.attn.wq_b.scale"
    copy.write(name, np.roll(copy.raw(name), 1, axis=0))


def _fp4_order(copy: CheckpointCopy) -> None:
    """Even and odd columns of one layer's experts are swapped."""
    for name in copy.names:
        if name.startswith(f"layers.{_LAYER}.ffn.experts.") and name.endswith(".weight"):
            raw = copy.raw(name)
            copy.write(name, (raw >> 4) | (raw << 4))


def _no_shared_expert(copy: CheckpointCopy) -> None:
    name = f"layers.{_LAYER}.ffn.shared_experts.w2.weight"
    copy.write(name, np.zeros_like(copy.raw(name)))


VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("swapped-experts", f"experts 0 and 1 of layer {_LAYER} are swapped", _swap_experts),
        Variant("zero-sinks", f"the attention sinks of layer {_LAYER} are zero", _zero_sinks),
        Variant("no-sinks", "no layer has attention sinks", fault="no_sink"),
        Variant("engram-shifted", "every Engram row is the one before it", _shift_engram),
        Variant("engram-zero", "every Engram row is zero", _zero_engram),
        Variant("engram-foreign", "rank 1 of 2 reads rank 0's Engram rows", _foreign_engram),
        Variant("no-inverse-rope", "what was attended stays rotated", fault="no_inverse_rope"),
        Variant("bf16-router", "router scores are rounded to bf16", fault="bf16_router"),
        Variant("rope-theta", "compressed layers rotate with the window's base", _rope_theta),
        Variant("no-yarn", "rotary positions are not scaled", _no_yarn),
        Variant("compress-ratio", "layers of ratio 1 are taken for ratio 2", _ratios),
        Variant("one-iteration", "hyper-connections are normalised once, not 20 times", _one_iteration),
        Variant("one-expert", "one expert is chosen, not two", _one_expert),
        Variant("route-scale", "routed experts are not scaled", _route_scale),
        Variant("no-router-bias", "the router's bias is left out", _no_router_bias),
        Variant("no-shared-expert", f"layer {_LAYER} has no shared expert", _no_shared_expert),
        Variant("random-picks", "the indexer picks at random", _random_picks),
        Variant("few-picks", "the indexer picks 8 entries, not 64", _few_picks),
        Variant("scale-rows", f"scales of one matrix of layer {_LAYER} are a tile off", _scale_rows),
        Variant("fp4-order", f"FP4 columns of layer {_LAYER}'s experts are swapped in pairs", _fp4_order),
        Variant("image-range", "pixels are 0 to 1, not -1 to 1", _image_range, tasks=PICTURES),
        Variant("image-channels", "red and blue are swapped", _image_channels, tasks=PICTURES),
        Variant("effort-reversed", "effort n is told as 101 - n", fault="effort_reversed", tasks=("primality",),
                efforts=EFFORTS),
        Variant("effort-ignored", "every effort is told as 50", fault="effort_ignored", tasks=("primality",),
                efforts=EFFORTS),
    )
}  # fmt: skip
"""Every variant by name."""


__all__ = ["VARIANTS", "Variant"]
