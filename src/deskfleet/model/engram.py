"""The Engram geometry of a configuration: hands its fields to deskfleet_engram, which owns the arithmetic."""

from __future__ import annotations

from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig
from deskfleet_engram.errors import GeometryError
from deskfleet_engram.geometry import EngramGeometry, EngramSpec


def engram_geometry(config: ModelConfig) -> EngramGeometry | None:
    """Primes, offsets and multipliers (spec §7.2); None for a model without Engram layers.

    Raises ConfigError when the columns do not add up to engram_num_embeddings.
    """
    if not config.engram_layer_ids:
        return None
    spec = EngramSpec(
        layer_ids=config.engram_layer_ids,
        num_embeddings=config.engram_num_embeddings,
        max_ngram_size=config.engram_max_ngram_size,
        vocab_size=config.engram_vocab_size,
        n_heads=config.engram_n_heads,
        head_dim=config.engram_head_dim,
        pad_token_id=config.engram_pad_token_id,
        compressed_vocab_size=config.engram_compressed_vocab_size,
    )
    try:
        return EngramGeometry.build(spec)
    except GeometryError as error:
        raise ConfigError(str(error)) from error


__all__ = ["engram_geometry"]
