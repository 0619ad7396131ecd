"""What the user wants: `Wishes`, and one concrete way to serve it: `ServingLayout`. Pure data; knows no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from deskfleet.errors import ConfigError

EngineName = Literal["native", "vllm", "sglang", "exl3"]
EngramPlacement = Literal["device", "host", "disk", "none"]
"""Where the tables lie: accelerator memory, pinned host memory, NVMe read row by row; `none` for models without."""

KvFormat = Literal["fp4", "fp8", "nvfp4"]
"""`fp4`: 288-byte entries and 528-byte window rows, the published formats. `fp8`: the 584-byte record for both, which
kernels of compute capability 9.0 and 12.x read. `nvfp4`: records of V4 in the image of one published recipe, padded to
the same 584 bytes (M-52)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What to serve. None leaves the choice to the planner; the plan says what was chosen and why.

    `max_model_len` None asks for the longest context that fits. `kv_tokens` is the size of the pool, by default one
    request of full length. `margin_bytes` is left free on every node beyond the floors. `num_drafts` None is the
    checkpoint's block, 0 turns speculation off. `fraction` is SGLang's mem-fraction-static or vLLM's
    gpu-memory-utilization. `has_bounded_indexer` None is what the stock engine does. Raises ConfigError.
    """

    engine: EngineName | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 4
    kv_tokens: int | None = None
    num_drafts: int | None = None
    has_images: bool = True
    margin_bytes: int = 0
    tp_size: int | None = None
    ep_size: int | None = None
    dcp_size: int | None = None
    engram: EngramPlacement | None = None
    kv_format: KvFormat | None = None
    chunk_tokens: int | None = None
    fraction: float | None = None
    has_bounded_indexer: bool | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "kv_tokens",
            "tp_size",
            "ep_size",
            "dcp_size",
            "chunk_tokens",
            "max_num_seqs",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is {value!r}, not a number of 1 or more")
        for name in ("margin_bytes", "num_drafts"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ConfigError(f"{name} is {value!r}, not a number of 0 or more")
        for name, choices in (("engine", EngineName), ("engram", EngramPlacement), ("kv_format", KvFormat)):
            value = getattr(self, name)
            if value is not None and value not in get_args(choices):
                raise ConfigError(
                    f"{name} is {value!r}", hint=f"choose one of {', '.join(get_args(choices))}"
                )
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise ConfigError(f"fraction is {self.fraction}", hint="give a number between 0 and 1, e.g. 0.85")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLayout:
    """One concrete way to serve: nothing is left open. `tp_size` ranks, one to a device.

    Of each routed expert a rank holds 1 / (tp_size / ep_size), of a rank group's experts all; `dcp_size` ranks share
    out the compressed KV.
    """

    engine: EngineName
    tp_size: int
    ep_size: int
    dcp_size: int
    engram: EngramPlacement
    kv_format: KvFormat
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    chunk_tokens: int
    num_drafts: int
    has_images: bool
    has_bounded_indexer: bool
    fraction: float | None

    def expert_width(self, width: int) -> int:
        """How much of an expert's `width` one rank holds, rounded up."""
        return -(-width * self.ep_size // self.tp_size)


__all__ = ["EngineName", "EngramPlacement", "KvFormat", "ServingLayout", "Wishes"]
