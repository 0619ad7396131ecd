"""What config.json says of tokens, of V4.1's checkpoints and of V4's, and which encoding that means.

`model_type` decides: `deepseek_v41` is V4.1's, `deepseek_v4` is V4's. Of a V4 checkpoint nothing is read but this: its
engine runs elsewhere, and whatever else its config.json says is that engine's. Knows nothing of tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from deskfleet.errors import ConfigError
from deskfleet.model.config import ModelConfig, VisionConfig

Encoding = Literal["v4", "v4.1"]

_V4 = "deepseek_v4"


class _V4Config(msgspec.Struct, frozen=True):
    """What the gateway needs of a V4 checkpoint's config.json (V4 spec §2.1)."""

    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int | None = None


class _ModelType(msgspec.Struct, frozen=True):
    model_type: str = ""


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What config.json says of tokens and images. `image_token_id` is None where there are no images."""

    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int | None
    image_token_id: int | None
    vision: VisionConfig | None


def read_token_facts(path: Path) -> tuple[TokenFacts, Encoding]:
    """Read a config.json. Raises ConfigError when it is missing, unreadable, or neither V4's nor V4.1's."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        if msgspec.json.decode(text, type=_ModelType).model_type == _V4:
            v4 = msgspec.json.decode(text, type=_V4Config)
            return TokenFacts(
                v4.vocab_size, v4.bos_token_id, v4.eos_token_id, v4.pad_token_id, None, None
            ), "v4"
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error
    config = ModelConfig.from_file(path)
    facts = TokenFacts(
        config.vocab_size,
        config.bos_token_id,
        config.eos_token_id,
        config.pad_token_id,
        config.image_token_id,
        config.vision,
    )
    return facts, "v4.1"


__all__ = ["Encoding", "TokenFacts", "read_token_facts"]
