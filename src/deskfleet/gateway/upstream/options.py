"""How an upstream is talked to: who we are, what it must offer, and how long anything may take.

Owns every default. Knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deskfleet.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamOptions:
    """One upstream. Raises ConfigError naming the option when a value cannot work. Times are in seconds.

    `api_key` is sent as a bearer token. `model` is the name to ask the engine for, None for the first it serves.
    `max_model_len` is the context to serve, None for the engine's own; an engine that has less is refused.

    A stream that has been silent for `silence_s` makes us look whether the engine still does anything. It is given
    up when the engine does not answer within `look_s`, twice; when it answers but its counters stand still for
    `stall_s` plus the time that the longest prompt under way may take at `prefill_tokens_per_s`; and in any case
    after `longest_silence_s`. An engine that works on other requests is busy, not dead: it is waited for.
    """

    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    max_model_len: int | None = None
    connect_s: float = 5.0
    answer_s: float = 30.0
    """From a request to the head of its answer, which both engines send before the first token."""
    silence_s: float = 8.0
    look_s: float = 3.0
    stall_s: float = 8.0
    prefill_tokens_per_s: float = 400.0
    longest_silence_s: float = 1800.0
    first_token_s: float = 60.0
    """For the token that an engine is asked for before it gets requests: some compile a kernel when it is first needed,
    and their counters stand still meanwhile."""
    coalesce: bool = True
    """Make fewer chunks of many events that have arrived together. Off: one chunk per event, for comparisons."""

    def __post_init__(self) -> None:
        for name in (
            "connect_s",
            "answer_s",
            "silence_s",
            "look_s",
            "stall_s",
            "prefill_tokens_per_s",
            "longest_silence_s",
            "first_token_s",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} is {value}, not more than 0")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}, less than 2")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the upstream's key holds characters that no header can carry")


__all__ = ["UpstreamOptions"]
