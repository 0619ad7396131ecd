"""How much an engine holds at once: slots, positions and blocks, from what was asked and what the checkpoint is.

Owns the defaults and the arithmetic of the two pools. Pure numbers; imports no torch, since the supervisor and the
planner use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deskfleet.errors import ConfigError
from deskfleet.model.cache_formats import CacheFormats
from deskfleet.model.config import ModelConfig

PrefixReplay = Literal["window", "exact"]
"""How a lost window is made again. `window` runs one window of tokens, as the publisher serves (spec §3.4): its first
rows see less than they did. `exact` runs as many windows as there are layers, and gives the same bits as a cold
start."""

OperatorChoice = Literal["auto", "native", "reference"]
"""Who computes the operators of the model: the compiled ones, or plain torch. `auto` takes the compiled ones where they
can be loaded; `native` refuses to start without them."""

DEFAULT_BLOCK_SIZE = 16
DEFAULT_NUM_WINDOW_TAILS = 32

MAX_TRANSIENT_BYTES = 2 << 30
"""What a step may take for index scores, by default."""

_DEFAULT_KV_BYTES = 1 << 30  # of the global pool when nobody says; a plan or a flag does on a real machine


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes fixed at start. Blocks of `block_size` tokens; their counts leave out the null block.

    Each of `dcp_size` ranks holds its share of the `num_blocks`. With `decoder_replay`, prompt rows that no later one
    sees in the decoder's windows skip the decoder.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_window_blocks: int
    dcp_size: int = 1
    decoder_replay: bool = False


def resolve_limits(
    config: ModelConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    kv_cache_tokens: int | None,
    num_window_tails: int,
    with_drafts: bool,
    tp_size: int = 1,
    dcp_size: int = 1,
    decoder_replay: bool = False,
) -> RunnerLimits:
    """Block counts of both pools. Raises ConfigError.

    The global pool holds `kv_cache_tokens` tokens; by default every slot at full length, or as many as fit in 1 GiB of
    each rank, but always one request of full length. The window pool holds what running requests need at once, and
    the windows of `num_window_tails` finished ones.
    """
    ratio = max((config.compress_ratios[source] for source in config.kv_source_layer_ids), default=1)
    if block_size < ratio or block_size % ratio:
        raise ConfigError(
            f"block_size is {block_size}",
            hint=f"choose a multiple of {ratio}, so that no group crosses a block",
        )
    if dcp_size < 1 or tp_size % dcp_size:
        raise ConfigError(
            f"dcp_size is {dcp_size}, which does not divide tp_size {tp_size}",
            hint="choose a divisor of tp_size",
        )
    if dcp_size > 1 and block_size % config.candidate_block_size:
        raise ConfigError(
            f"block_size is {block_size} with dcp_size {dcp_size}",
            hint=f"choose a multiple of {config.candidate_block_size}: a candidate block must lie on one rank",
        )
    if decoder_replay:
        _check_decoder_replay(config)
    if num_window_tails < 0:
        raise ConfigError(f"num_window_tails is {num_window_tails}, less than 0")
    formats = CacheFormats(config, block_size, with_drafts)
    longest = -(-max_model_len // block_size)
    if kv_cache_tokens is None:
        affordable = dcp_size * _DEFAULT_KV_BYTES // formats.global_block_bytes
        num_blocks = max(longest, min(max_num_seqs * longest, affordable))
    else:
        num_blocks = kv_cache_tokens // block_size
    if num_blocks < longest:
        raise ConfigError(
            f"kv_cache_tokens {kv_cache_tokens} is less than max_model_len {max_model_len}: the longest request would "
            "never run",
            hint=f"give at least {longest * block_size}, or lower max_model_len",
        )
    # While a chunk runs, a request holds the window before it and the one it leaves behind.
    tail = formats.window_blocks_per_tail
    return RunnerLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        num_window_blocks=max_num_seqs * (2 * tail + 2) + num_window_tails * tail,
        dcp_size=dcp_size,
        decoder_replay=decoder_replay,
    )


def _check_decoder_replay(config: ModelConfig) -> None:
    """Raises ConfigError for a model whose decoder must see every token."""
    decoder = next((layer.index for layer in config.layers if layer.starts_decoder), None)
    if decoder is None:
        raise ConfigError(
            "decoder_replay: this model has no compressed KV, so all its layers need every token"
        )
    late = [layer.index for layer in config.layers[decoder + 1 :] if layer.has_engram or layer.is_kv_source]
    early_taps = [layer.index for layer in config.layers[: decoder + 1] if layer.is_tap]
    if late or early_taps:
        raise ConfigError(
            f"decoder_replay: layers {late or early_taps} need tokens that skip the decoder, which starts at {decoder}",
            hint="serve this model without it",
        )


__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "DEFAULT_NUM_WINDOW_TAILS",
    "MAX_TRANSIENT_BYTES",
    "OperatorChoice",
    "PrefixReplay",
    "RunnerLimits",
    "resolve_limits",
]
