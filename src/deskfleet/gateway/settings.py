"""What an operator may decide about the gateway. Owns every default; knows nothing of HTTP or the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deskfleet.errors import ConfigError

if TYPE_CHECKING:
    from deskfleet.gateway.observation import ObservationSettings
    from deskfleet.gateway.policy_file import PolicyStore


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """One gateway. Raises ConfigError naming the setting when a value cannot work.

    `model_id` is the name clients ask for, `checkpoint` the directory with tokenizer.json and config.json.
    `default_thinking` holds where a request says nothing. `default_max_tokens` None leaves the default to the
    publisher's own table (8,192 without thinking, 65,536 with, 131,072 at effort `max`, each lowered to the
    context left). `port` 0 takes any free port. `max_running` is how many requests the engine runs at once, where that
    is known. `policies` are settings and keys that were read from files; what they say goes before what is said here.
    `observation` is what is watched, logged and shown; None leaves that to its own defaults. `debug_answers` is how
    many answers are kept as the model wrote them, for GET /debug/answers.
    """

    model_id: str
    checkpoint: Path
    host: str = "127.0.0.1"
    port: int = 8000
    default_thinking: bool = True
    default_max_tokens: int | None = None
    max_body_bytes: int = 64 * 2**20
    max_images: int = 64
    max_image_bytes: int = 20 * 2**20
    max_image_pixels: int = 64 * 10**6
    """Width times height. Decoding costs three bytes per pixel."""
    max_running: int | None = None
    policies: PolicyStore | None = None
    observation: ObservationSettings | None = None
    debug_answers: int = 0

    def __post_init__(self) -> None:
        if not self.model_id:
            raise ConfigError("model_id is empty")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is not in 0-65535")
        if self.debug_answers < 0:
            raise ConfigError(f"debug_answers is {self.debug_answers}, less than 0")
        for name in (
            "default_max_tokens",
            "max_body_bytes",
            "max_images",
            "max_image_bytes",
            "max_image_pixels",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, less than 1")


__all__ = ["GatewaySettings"]
