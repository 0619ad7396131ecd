"""What a policy is. Owns the two places where one may act, and what it is told there.

    client -> protocol.prepare -> Policy.shape -> engine -> Watcher.push -> protocol parser -> client

`shape` sees a request before any engine does; a `Watcher` sees every chunk of one answer before the parser does.
Both are plain functions: they wait for nothing, so that a policy costs a stream no time slice.

What is made anew for every request are structs, which take a tenth of a frozen dataclass's time to make.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct, structs

from deskfleet.endpoint import GenerateRequest, SamplingParams, TokenChunk


class Caller(Struct, frozen=True):
    """Who asks. `key` is the name of the caller's key, None where no keys are set; `address` the peer's."""

    key: str | None = None
    address: str = ""


class Wishes(Struct, frozen=True, kw_only=True):
    """What the client itself said, before any default; None where it said nothing.

    `thinking` is what the answer will do, and always known.
    """

    thinking: bool
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    thinking_budget: int | None = None


class Draft(Struct, frozen=True, kw_only=True):
    """A request on its way to an engine. `num_prompt_tokens` has every image at its full span.

    `is_stream` says that what a watcher returns is sent at once. What it has not returned of an answer that is sent
    whole, it can still leave out.
    """

    generate: GenerateRequest
    wishes: Wishes
    caller: Caller
    model_id: str
    num_prompt_tokens: int
    max_model_len: int
    is_stream: bool = True

    @property
    def sampling(self) -> SamplingParams:
        """How the request samples as of now."""
        return self.generate.sampling


class Watcher(Protocol):
    """Looks at one answer while it is made."""

    def push(self, chunk: TokenChunk) -> TokenChunk:
        """Return `chunk`, or what shall become of it.

        A returned chunk that carries a finish reason ends the answer, whatever the engine would have said next.
        """


class Policy(Protocol):
    """One policy of one gateway. `name` is its section in the settings file and its label in the metrics."""

    @property
    def name(self) -> str:
        """Lower case, underscores."""

    def shape(self, draft: Draft) -> Draft:
        """Return the request as it may go to the engine. Raises RequestError when it may not."""

    def watcher(self, draft: Draft) -> Watcher | None:
        """Return what looks at this answer, None where nothing has to."""


def with_sampling(draft: Draft, sampling: SamplingParams) -> Draft:
    """Return the same request, sampled in another way."""
    own = draft.generate
    changed = GenerateRequest(own.request_id, own.prompt_token_ids, sampling, own.images, own.timeout_s)
    return with_generate(draft, changed)


def with_generate(draft: Draft, generate: GenerateRequest) -> Draft:
    """Return the same request with another one for the engine."""
    return structs.replace(draft, generate=generate)


if tuple(GenerateRequest.__dataclass_fields__) != (
    "request_id",
    "prompt_token_ids",
    "sampling",
    "images",
    "timeout_s",
):
    raise TypeError("with_sampling does not copy every field of a GenerateRequest")


__all__ = ["Caller", "Draft", "Policy", "Watcher", "Wishes", "with_generate", "with_sampling"]
