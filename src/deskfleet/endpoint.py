"""The seam between the gateway and any engine: plain data and one contract.

Token ids go in, token ids and log probabilities come out. Knows nothing of prompts, protocols, torch or
processes. The gateway and the engines both import this module and never each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

FinishReason = Literal["stop", "length", "abort"]

RankState = Literal["loading", "idle", "prefill", "decode", "draft", "image", "ended"]
"""What a rank's main thread is at, as it said itself. `idle` waits for work, `ended` is no process any more."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine answers. Says where, never how it feels."""

    url: str
    model_id: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be, from its first token to its last. A thought before it is free.

    `text` is the JSON schema, the regular expression (of the whole answer), or the grammar in llguidance's
    Lark; nothing for any JSON object. `param` is where the client wrote it, for errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar"]
    text: str = ""
    param: str = "constraint"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request picks its tokens.

    temperature 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off. `seed` None means an
    unrepeatable one. `logprobs` None means none; n means the chosen token plus the n most likely. `prompt_logprobs` is
    the same for the tokens of the prompt, of which then nothing is taken from a cache.

    Penalties are those of vLLM: `repetition_penalty` divides positive and multiplies other logits of tokens in
    prompt or output (1 is off); `presence_penalty` and `frequency_penalty` are subtracted, the one once and the
    other per occurrence, for tokens of the output (0 is off). `logit_bias` adds to logits: (token id, bias).
    `thinking_budget`: so many tokens after `<think>`, and `</think>` is written; None means no limit.
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    thinking_budget: int | None = None
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image as encoded file bytes (PNG, JPEG, WebP). Its placeholder stands in the prompt ids."""

    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. `prompt_token_ids` holds one image token per image; the engine expands the spans.

    After `timeout_s` seconds, waiting included, the engine gives it up; None means never.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural, of the unmodified distribution) of one sampled token and its rivals."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one engine step added to one request. The last chunk carries `finish_reason`.

    `num_prompt_tokens` counts the prompt as the model saw it, image spans expanded; `num_cached_tokens` those of them
    that did not have to be run. `num_drafted` and `num_accepted` count this request's verified drafts so far,
    `num_verify_steps` the steps that verified them, `num_wasted_rows` rows of those steps that no token came of; 0 from
    engines that do not say.
    `stop_reason` says more about a `stop` that the model did not decide itself, e.g. "repetition". `queued_s` are the
    seconds that the request waited before its first row was run, None from engines that do not say.
    `prompt_logprobs`, where they were asked for, come with the first chunk: of every token of the prompt but the first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    num_prompt_tokens: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    stop_reason: str | None = None
    queued_s: float | None = None
    num_verify_steps: int = 0
    num_wasted_rows: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def _counter(text: str) -> Any:
    return field(default=0, metadata={"kind": "counter", "help": text})


def _gauge(text: str) -> Any:
    return field(default=0, metadata={"kind": "gauge", "help": text})


@dataclass(frozen=True, slots=True)
class EngramStats:
    """What the ranks' readers of Engram rows did since start, summed over ranks.

    `errors` counts faults by kind, also those that a retry or the second source repaired.
    """

    num_rows: int = _counter("Engram rows asked for")
    num_unique: int = _counter("Engram rows asked for, repeats within a request left out")
    num_cache_hits: int = _counter("Engram rows that memory answered")
    num_fallback_rows: int = _counter(
        "Engram rows that the second source answered, because the pack could not"
    )
    num_reads: int = _counter("Reads of the disk for Engram rows")
    read_bytes: int = _counter("Bytes read for Engram rows")
    wait_s: float = _counter("Seconds that steps waited for Engram rows, summed over ranks")
    errors: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: EngramStats) -> EngramStats:
        plain = [name for name in self.__dataclass_fields__ if name != "errors"]
        return EngramStats(
            **{name: getattr(self, name) + getattr(other, name) for name in plain},
            errors=dict(Counter(self.errors) + Counter(other.errors)),
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of now, read without disturbing the engine.

    Each number says in its metadata which of the two it is and what it counts.
    """

    num_steps: int = _counter("Steps the engine has run")
    num_running: int = _gauge("Requests in the engine's running batch")
    num_waiting: int = _gauge("Requests waiting to join it")
    oldest_wait_s: float = _gauge("Seconds that the first of them has waited")
    num_finished: int = _counter("Requests the engine has finished")
    num_cancelled: int = _counter("Requests cancelled in the engine before their end")
    num_expired: int = _counter("Requests whose deadline passed")
    num_preempted: int = _counter("Times a running request gave its blocks to others, to go on later")
    num_overtaken: int = _counter("Times a short prompt was run before a longer one that came first")
    num_not_finite: int = _counter(
        "Requests failed because their logits were not finite; more than 0 needs a look"
    )
    num_prompt_tokens: int = _counter("Prompt tokens of accepted requests")
    num_generated_tokens: int = _counter("Tokens the engine has generated")
    num_prefix_queried: int = _counter("Tokens of requests looked up in the prefix cache")
    num_prefix_hits: int = _counter("Of those, tokens whose compressed KV was found")
    num_window_hits: int = _counter("Of those, tokens of prefixes whose window was found too")
    num_replayed_tokens: int = _counter("Tokens run again to make a lost window")
    num_blocks: int = _gauge("Blocks of compressed KV and index keys")
    num_free_blocks: int = _gauge("Of those, blocks that no running request holds")
    num_window_blocks: int = _gauge("Blocks of window rows")
    num_free_window_blocks: int = _gauge("Of those, blocks that no running request holds")
    num_verify_steps: int = _counter("Verifications of a request's drafts")
    num_drafted: int = _counter("Drafts verified")
    num_accepted: int = _counter("Drafts accepted")
    num_verify_tokens: int = _counter("Tokens that came out of verifications")
    num_wasted_rows: int = _counter("Rows of verifications that no token came of")
    engram: EngramStats = EngramStats()


@dataclass(frozen=True, slots=True)
class RankHealth:
    """One rank at one moment. Ages are in seconds, None where it never happened.

    `num_steps` counts finished forward passes, `num_moves` also smaller pieces of work (layers, images), so that a
    long pass can be told from one that hangs. A rank whose heartbeat grows old is a frozen process; one with a fresh
    heartbeat whose `num_moves` stands still in a state other than `idle` is a stuck main thread. `num_tokens` are the
    rows of the pass under way. `memory_bytes` are the resident bytes of its process, `planned_bytes` what they were
    planned to be; `host_available_bytes` is what its machine could still give to a program.
    """

    rank: int
    state: RankState = "idle"
    num_steps: int = 0
    num_moves: int = 0
    num_tokens: int = 0
    last_step_age_s: float | None = None
    heartbeat_age_s: float | None = None
    memory_bytes: int | None = None
    planned_bytes: int | None = None
    host_available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What an engine knows of its ranks, in rank order."""

    ranks: tuple[RankHealth, ...]


class TokenEngine(Protocol):
    """An engine behind the gateway. It may be a `HealthSource` and `Abandonable` too."""

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


@runtime_checkable
class HealthSource(Protocol):
    """An engine that knows how its ranks are."""

    async def health(self) -> EngineHealth | None:
        """Return how the ranks are, also while they load and after their end; None where that is not known."""


@runtime_checkable
class Abandonable(Protocol):
    """An engine that can be given up when it is alive and answers nothing any more."""

    async def abandon(self, reason: str) -> None:
        """End every rank, by force; `reason` becomes the engine's `failure`. Does nothing once it has failed."""


__all__ = [
    "Abandonable",
    "Constraint",
    "Endpoint",
    "EngineHealth",
    "EngineStats",
    "EngramStats",
    "FinishReason",
    "GenerateRequest",
    "HealthSource",
    "ImageInput",
    "RankHealth",
    "RankState",
    "SamplingParams",
    "TokenChunk",
    "TokenEngine",
    "TokenLogprob",
]
