"""The built-in inventories: `published_inventory(name)` plans a model that nobody has downloaded yet.

Owns which models these are and what was published of those whose tensors are not known one by one. What follows from a
configuration is `v41`'s and `v4`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet.model.config_keys import nearest
from deskfleet.model.published import published_config_dict
from deskfleet.planner.inventory import Inventory, WeightGroup
from deskfleet.planner.v4 import V4Config, v4_inventory
from deskfleet.planner.v41 import engram_tables, v41_inventory

PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "v4.1-flash": "DeepSeek-V4.1-Flash, MXFP4 experts, FP8 Engram rows",
        "v4.1-flash-nvfp4": "DeepSeek-V4.1-Flash, MXFP4 experts, NVFP4 Engram rows",
        "v4.1-flash-exl3-2.0": "DeepSeek-V4.1-Flash, EXL3 experts of 2.0 bits, FP8 Engram rows",
        "v4.1-flash-exl3-2.9": "DeepSeek-V4.1-Flash, EXL3 experts of 2.9 bits, FP8 Engram rows",
        "v4.1-flash-exl3-3.5": "DeepSeek-V4.1-Flash, EXL3 experts of 3.5 bits, FP8 Engram rows",
        "v4-flash": "DeepSeek-V4-Flash, MXFP4 experts, one plain MTP stage",
        "v4-flash-dspark": "DeepSeek-V4-Flash, MXFP4 experts, three DSpark stages",
    }
)
"""Every name that `published_inventory` knows, with its title."""

_V41_FILE_BYTES = 510_296_708_312
"""The 48 shards as published, headers included."""

_EXL3_29_BYTES = round(196.5 * 2**30)
"""Published as 196 to 197 GiB in 39 shards, without the Engram tables; the middle is taken."""
_EXL3_29_FILES = 39 + 2
_EXL3_35_EXPERT_BYTES = 245_400_000_000
"""Published as 245.4 GB of experts in 460.0 GB."""

_EXPERT_GROUPS = ("routed experts", "draft routed experts")


@cache
def published_inventory(name: str) -> Inventory:
    """Return the inventory called `name`, one of `PUBLISHED`.

    V4.1-Flash is exact to the byte; `derived` says what is not in the others. Raises ConfigError for an unknown name.
    """
    build = _BUILDERS.get(name)
    if build is None:
        raise ConfigError(
            f"no built-in model {name!r}; there are {', '.join(PUBLISHED)}", hint=nearest(name, PUBLISHED)
        )
    return build(name)


def _v41(name: str) -> Inventory:
    config = ModelConfig.from_dict(published_config_dict(), source=name)
    inventory = v41_inventory(config, name=name, origin="the published tensors of DeepSeek-V4.1-Flash")
    return replace(inventory, file_bytes=_V41_FILE_BYTES)


def _v41_nvfp4(name: str) -> Inventory:
    base = published_inventory("v4.1-flash")
    config = ModelConfig.from_dict(published_config_dict(), source=name)
    fp8, nvfp4 = base.engram, engram_tables(config, "nvfp4")
    assert fp8 is not None
    assert nvfp4 is not None
    return replace(
        base,
        name=name,
        origin=f"{base.origin}, Engram rows of {nvfp4.row_bytes} bytes in place of {fp8.row_bytes}",
        derived=("file_bytes: the headers of the files taken as long as those of the FP8 rows",),
        file_bytes=base.file_bytes - fp8.num_bytes + nvfp4.num_bytes,
        engram=nvfp4,
    )


def _exl3_29(name: str) -> Inventory:
    base = published_inventory("v4.1-flash")
    rest_bytes = base.weight_bytes - base.group_bytes(*_EXPERT_GROUPS)
    return _with_exl3_experts(
        name,
        _EXL3_29_BYTES - rest_bytes,
        "routed experts: what a published recipe's 196 to 197 GiB (196.5 taken) leave when all else, drafts' dense "
        "tensors and vision included, is as released",
        num_files=_EXL3_29_FILES,
    )


def _exl3_35(name: str) -> Inventory:
    return _with_exl3_experts(
        name,
        _EXL3_35_EXPERT_BYTES,
        "routed experts: 245.4 GB as published, all else as released",
    )


def _exl3_20(name: str) -> Inventory:
    reported = published_inventory("v4.1-flash-exl3-3.5")
    overhead_bits = reported.expert_bits - 3.5
    num_weights = sum(group.num_weights for group in reported.groups if group.name in _EXPERT_GROUPS)
    return _with_exl3_experts(
        name,
        round(num_weights * (2.0 + overhead_bits) / 8),
        f"routed experts: nothing published; 2.0 bits and the {overhead_bits:.4f} bits a weight that the published "
        "size of the 3.5-bit model has above 3.5",
    )


def _with_exl3_experts(name: str, expert_bytes: int, derived: str, num_files: int | None = None) -> Inventory:
    """Return V4.1-Flash with routed experts, the drafts' too, of `expert_bytes` together, shared out by weights."""
    base = published_inventory("v4.1-flash")
    backbone, draft = (next(group for group in base.groups if group.name == kind) for kind in _EXPERT_GROUPS)
    num_weights = backbone.num_weights + draft.num_weights
    draft_bytes = expert_bytes * draft.num_weights // num_weights
    sizes = {backbone.name: expert_bytes - draft_bytes, draft.name: draft_bytes}
    groups = tuple(_resized(group, sizes) for group in base.groups)
    notes = [derived, "file_bytes: tensors only, the headers of the files (some MB) left out"]
    if num_files is None:
        notes.append("num_files: not published; taken as that of the release")
    assert base.engram is not None
    return replace(
        base,
        name=name,
        weight_format="exl3",
        expert_bits=8 * expert_bytes / num_weights,
        origin=f"{base.origin}, routed experts quantised to EXL3",
        derived=tuple(notes),
        file_bytes=sum(group.num_bytes for group in groups) + base.engram.num_bytes,
        num_files=base.num_files if num_files is None else num_files,
        groups=groups,
    )


def _resized(group: WeightGroup, sizes: Mapping[str, int]) -> WeightGroup:
    return replace(group, num_bytes=sizes.get(group.name, group.num_bytes))


def _v4(name: str) -> Inventory:
    config = V4Config.from_dict(_v4_config_dict(num_stages=1), source=name)
    return v4_inventory(config, name=name, origin="the published shapes of DeepSeek-V4-Flash", num_files=46)


def _v4_dspark(name: str) -> Inventory:
    dspark = {
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 256,
    }
    config = V4Config.from_dict({**_v4_config_dict(num_stages=3), **dspark}, source=name)
    return v4_inventory(
        config, name=name, origin="the published shapes of DeepSeek-V4-Flash-DSpark", num_files=48
    )


def _v4_config_dict(num_stages: int) -> dict[str, Any]:
    """Return what memory depends on of V4-Flash's config.json."""
    return {
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "max_position_embeddings": 1048576,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, *[0] * num_stages],
        "index_n_heads": 64,
        "index_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "hc_mult": 4,
        "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }


_BUILDERS: Mapping[str, Callable[[str], Inventory]] = {
    "v4.1-flash": _v41,
    "v4.1-flash-nvfp4": _v41_nvfp4,
    "v4.1-flash-exl3-2.0": _exl3_20,
    "v4.1-flash-exl3-2.9": _exl3_29,
    "v4.1-flash-exl3-3.5": _exl3_35,
    "v4-flash": _v4,
    "v4-flash-dspark": _v4_dspark,
}

__all__ = ["PUBLISHED", "published_inventory"]
