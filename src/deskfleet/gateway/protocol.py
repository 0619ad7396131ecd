"""What a protocol is: the contract between HTTP and what clients speak.

Owns the steps that every request for tokens goes through, and their order. Knows no protocol and no policy.

    body -> Protocol.prepare -> Prepared -> policies -> engine -> watchers -> AnswerParser -> events, or one object

`prepare` is CPU-bound and runs off the event loop; everything after it runs on it and is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self, TypeVar

from msgspec import Struct, structs

from deskfleet.endpoint import GenerateRequest, TokenChunk
from deskfleet.errors import PromptTooLong, RequestError
from deskfleet.gateway.failures import Failure
from deskfleet.gateway.policies.contract import Caller, Draft, Policy
from deskfleet.gateway.thinking import Thought

NOBODY = Caller()
"""Who asks, where nobody says."""

Watch = Callable[[TokenChunk], TokenChunk]
"""A policy's look at a chunk. What it returns with a finish reason ends the answer."""

PreparedT = TypeVar("PreparedT", bound="Prepared")


class Prepared(Struct, frozen=True, kw_only=True):
    """One request as it may go to an engine. A protocol adds what its parser needs.

    `thought` is what the wishes for thinking add up to, None in a protocol without. `max_tokens_param` is what the
    client calls the limit of its answer.
    """

    draft: Draft
    thought: Thought | None = None
    max_tokens_param: str = "max_tokens"

    @property
    def stream(self) -> bool:
        """Whether the answer is sent in pieces."""
        return self.draft.is_stream

    @property
    def generate(self) -> GenerateRequest:
        """The request for the engine."""
        return self.draft.generate

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, with every image at its full span."""
        return self.draft.num_prompt_tokens

    def with_draft(self, draft: Draft) -> Self:
        """Return the same request with what policies made of it."""
        return self if draft is self.draft else structs.replace(self, draft=draft)


class WholeAnswer(Protocol):
    """An answer that is sent as one object."""

    def add(self, events: list[Any]) -> None:
        """Add what `AnswerParser.push` returned. Consumes the events."""

    def to_json(self) -> str:
        """Return the object, once the parser is finished."""


class AnswerParser(Protocol):
    """One answer: engine chunks in, protocol events out."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: the engine finished, or nothing more is wanted of it."""

    @property
    def repairs(self) -> frozenset[str]:
        """What the model wrote in a form that had to be put right, by kind."""

    def push(self, chunk: TokenChunk) -> list[Any]:
        """Return the events that `chunk` adds, maybe none. Raises EngineError for an abort."""

    def encode(self, events: list[Any]) -> bytes:
        """Return events as they are sent. Called for what each `push` returned, in order."""

    def end(self) -> bytes:
        """Return what is sent after the last event."""

    def fail(self, failure: Failure) -> bytes:
        """Return what is sent in place of the rest when something breaks."""

    def whole_answer(self) -> WholeAnswer:
        """Return an empty answer to which the events of `push` can be added."""


class GeneratingProtocol(Protocol):
    """A protocol whose requests ask for tokens."""

    @property
    def id_prefix(self) -> str:
        """What an answer's id begins with, e.g. `chatcmpl-`."""

    def prepare(self, body: bytes, request_id: str, caller: Caller = NOBODY) -> Prepared:
        """Return the request in `body` as token ids, with what the client wished itself.

        Raises RequestError naming the field, UnknownModel, PromptTooLong with both numbers.
        """

    def parser(self, prepared: Any) -> AnswerParser:
        """Return the parser of this request's answer."""


def apply_policies(prepared: PreparedT, policies: Sequence[Policy]) -> PreparedT:
    """Return the request as policies shape it, one after the other.

    Raises RequestError of a policy that refuses it, PromptTooLong when prompt and answer then do not fit together.
    """
    draft = prepared.draft
    for policy in policies:
        draft = policy.shape(draft)
    prepared = prepared.with_draft(draft)
    check_room(prepared)
    return prepared


def watchers_of(prepared: Prepared, policies: Sequence[Policy]) -> tuple[Watch, ...]:
    """Return how policies look at the answer to a request that all of them have shaped."""
    draft, found = prepared.draft, []
    for policy in policies:
        watcher = policy.watcher(draft)
        if watcher is not None:
            found.append(watcher.push)
    return tuple(found)


def check_room(prepared: Prepared) -> None:
    """Raise PromptTooLong unless prompt and answer fit into the context together."""
    draft = prepared.draft
    max_tokens = draft.generate.sampling.max_tokens
    if draft.num_prompt_tokens + max_tokens > draft.max_model_len:
        error = PromptTooLong(draft.num_prompt_tokens, max_tokens, draft.max_model_len)
        error.param = prepared.max_tokens_param
        raise error


def refuse_unknown_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError for an id that is not in the vocabulary."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(f"{param}: {token_id} is not in the vocabulary of {vocab_size}", param=param)


__all__ = [
    "NOBODY",
    "AnswerParser",
    "GeneratingProtocol",
    "Prepared",
    "Watch",
    "WholeAnswer",
    "apply_policies",
    "check_room",
    "refuse_unknown_ids",
    "watchers_of",
]
