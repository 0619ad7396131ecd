"""The seam between the gateway and any engine: plain data and one contract.

Token ids go in, token ids and log probabilities come out. Knows nothing of prompts, protocols, torch or
processes. The gateway and the engines both import this module and never each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine answers. Says where, never how it feels."""

    url: str
    model_id: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens.

    temperature 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off. `seed` None means an
    unrepeatable one. `logprobs` None means none; n means the chosen token plus the n most likely.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image as encoded file bytes (PNG, JPEG, WebP). Its placeholder stands in the prompt ids."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. `prompt_token_ids` holds one image token per image; the engine expands the spans."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural, of the unmodified distribution) of one sampled token and its rivals."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one engine step added to one request. The last chunk carries `finish_reason`.

    `num_prompt_tokens` counts the prompt as the model saw it, image spans expanded.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    num_prompt_tokens: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngramStats:
    """What the ranks' readers of Engram rows did since start, summed over ranks.

    `num_rows` rows asked for, `num_unique` after removing repeats within a request; `num_cache_hits` of these came from
    memory, `num_fallback_rows` from the second source. `wait_s` is how long steps waited. `errors` counts faults by
    kind, also those that a retry or the second source repaired.
    """

    num_rows: int = 0
    num_unique: int = 0
    num_cache_hits: int = 0
    num_fallback_rows: int = 0
    num_reads: int = 0
    read_bytes: int = 0
    wait_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: EngramStats) -> EngramStats:
        plain = [name for name in self.__dataclass_fields__ if name != "errors"]
        return EngramStats(
            **{name: getattr(self, name) + getattr(other, name) for name in plain},
            errors=dict(Counter(self.errors) + Counter(other.errors)),
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of now, read without disturbing the engine."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    engram: EngramStats = EngramStats()


class TokenEngine(Protocol):
    """An engine behind the gateway."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield chunks until one carries a finish reason.

        Closing the iterator early cancels the request within one engine step. Raises RequestError when the
        request cannot be served, EngineError (RankDied) when the engine fails.
        """

    async def stats(self) -> EngineStats:
        """Return current counters. Raises EngineError when the engine is dead."""

    @property
    def failure(self) -> str | None:
        """None while the engine lives, else the sentence that says why it ended."""


__all__ = [
    "Endpoint",
    "EngineStats",
    "EngramStats",
    "FinishReason",
    "GenerateRequest",
    "ImageInput",
    "SamplingParams",
    "TokenChunk",
    "TokenEngine",
    "TokenLogprob",
]
