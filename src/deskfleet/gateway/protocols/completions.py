"""Plain completions: POST /v1/completions. No conversation, no thinking, no calls: tokens go on where the prompt ends.

Owns the fields, and how tokens become text: control tokens are never shown, and characters are shown whole. A prompt of
text begins with the beginning-of-sentence token unless `add_special_tokens` is false or the text has it already;
control tokens spelled in it are control tokens, since there is no other way to say them. A prompt of ids is used as it
is.

An answer that a policy, not the model, brought to an end says so as `stop_reason` beside `finish_reason`, where vLLM
says it too; so does one that a stop string ended.

With `echo` the answer begins with the prompt; with `logprobs` as well, also with the log probabilities of its tokens,
of which the first has none. An engine behind HTTP does not tell those. Stop strings are looked for behind the prompt.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deskfleet.endpoint import GenerateRequest, TokenChunk, TokenLogprob
from deskfleet.errors import EngineError, PromptTooLong, RequestError
from deskfleet.gateway.answer_form import FormWishes, ResponseFormat, response_constraint
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.failures import Failure, UnknownModel
from deskfleet.gateway.fields import (
    IGNORED,
    REFUSED,
    Decisions,
    SamplingFields,
    StopString,
    StopStrings,
    StreamOptions,
    TokenCount,
    TokenId,
    read_fields,
)
from deskfleet.gateway.policies.contract import Caller, Draft
from deskfleet.gateway.protocol import NOBODY, Prepared, refuse_unknown_ids
from deskfleet.gateway.protocols.conversation import client_wishes, sampling_params
from deskfleet.gateway.protocols.stop_strings import StopStrings as StopMatcher
from deskfleet.gateway.settings import GatewaySettings

DEFAULT_MAX_TOKENS = 8192
"""As in a chat without thinking. The vendor's 16 would cut every answer of a client that says nothing."""


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """The fields this server honours. None means that the client said nothing."""

    model: str
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: TokenCount | None = None
    stop: StopString | StopStrings | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None


_NO_CHAT = "a completion has no conversation; use /v1/chat/completions"

DECISIONS = Decisions(
    fields=CompletionFields,
    refused=REFUSED
    | {
        "suffix": (None, "the model continues text, it does not fill it in"),
        "messages": (None, _NO_CHAT),
        "tools": ([], _NO_CHAT),
        "tool_choice": (None, _NO_CHAT),
        "thinking": (None, _NO_CHAT),
        "enable_thinking": (None, _NO_CHAT),
        "reasoning": (None, _NO_CHAT),
        "reasoning_effort": (None, _NO_CHAT),
        "chat_template_kwargs": (None, _NO_CHAT),
        "thinking_budget": (None, _NO_CHAT),
        "max_completion_tokens": (None, "send max_tokens"),
        "guided_json": (None, "send response_format instead"),
        "guided_regex": (None, "send response_format instead"),
        "guided_choice": (None, "send response_format instead"),
        "guided_grammar": (None, "send response_format instead"),
        "structured_outputs": (None, "send response_format instead"),
        "prompt_embeds": (None, "prompts are text or token ids"),
    },
    ignored=IGNORED,
    choices={"response_format.type": "text, json_object, json_schema, regex"},
)


class PreparedCompletion(Prepared, frozen=True, kw_only=True):
    """A completion ready for the engine, and what its parser needs."""

    stop: tuple[str, ...] = ()
    include_usage: bool = False
    num_logprobs: int | None = None
    echo: bool = False
    begins_by_itself: bool = False
    """Whether the first token of the prompt is not the client's: it has no text."""


class CompletionsProtocol:
    """Completions for one served checkpoint. Holds no state between requests; any thread may use it."""

    id_prefix = "cmpl-"

    def __init__(self, settings: GatewaySettings, max_model_len: int, chat_format: ChatFormat) -> None:
        self._settings = settings
        self._max_model_len = max_model_len
        self._format = chat_format

    def prepare(self, body: bytes, request_id: str, caller: Caller = NOBODY) -> PreparedCompletion:
        """Return the request in `body` as token ids. CPU-bound: run it off the event loop.

        Raises RequestError naming the field, UnknownModel, PromptTooLong with both numbers.
        """
        fields = read_fields(body, DECISIONS)
        if fields.model != self._settings.model_id:
            raise UnknownModel(fields.model, self._settings.model_id)
        if fields.stream_options is not None and not fields.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        token_ids, begins = begun_prompt(
            fields.prompt, self._format, add_special_tokens=fields.add_special_tokens
        )
        room = self._max_model_len - len(token_ids)
        if room < 1:
            error = PromptTooLong(len(token_ids), 1 if room == 0 else None, self._max_model_len)
            error.param = "prompt"
            raise error
        default = self._settings.default_max_tokens or DEFAULT_MAX_TOKENS
        sampling = sampling_params(
            fields,
            vocab_size=self._format.config.vocab_size,
            max_tokens=fields.max_tokens or min(default, room),
            logprobs=fields.logprobs,
            constraint=response_constraint(FormWishes(response_format=fields.response_format)),
            prompt_logprobs=fields.logprobs if fields.echo else None,
        )
        options = fields.stream_options
        return PreparedCompletion(
            draft=Draft(
                generate=GenerateRequest(request_id, tuple(token_ids), sampling),
                wishes=client_wishes(fields, None, fields.max_tokens),
                caller=caller,
                model_id=self._settings.model_id,
                num_prompt_tokens=len(token_ids),
                max_model_len=self._max_model_len,
                is_stream=bool(fields.stream),
            ),
            stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
            include_usage=options is not None and bool(options.include_usage),
            num_logprobs=fields.logprobs,
            echo=bool(fields.echo),
            begins_by_itself=begins,
        )

    def parser(self, prepared: PreparedCompletion) -> CompletionAnswer:
        """Return the parser of this request's answer."""
        return CompletionAnswer(prepared, self._settings.model_id, self._format)


def prompt_ids(
    prompt: str | Sequence[Any], chat_format: ChatFormat, *, add_special_tokens: bool | None
) -> list[int]:
    """Return a prompt's ids. Raises RequestError: empty, several prompts, ids and texts mixed, unknown ids."""
    return begun_prompt(prompt, chat_format, add_special_tokens=add_special_tokens)[0]


def begun_prompt(
    prompt: str | Sequence[Any], chat_format: ChatFormat, *, add_special_tokens: bool | None
) -> tuple[list[int], bool]:
    """Return a prompt's ids, and whether the first of them was put before what the client sent. Raises as above."""
    if not isinstance(prompt, str):
        if prompt and all(isinstance(each, int) for each in prompt):
            token_ids = [int(each) for each in prompt]
            refuse_unknown_ids("prompt", token_ids, chat_format.config.vocab_size)
            return token_ids, False
        if len(prompt) != 1 or isinstance(prompt[0], int):
            raise RequestError(f"prompt: one prompt per request, not {len(prompt)} items", param="prompt")
        return begun_prompt(prompt[0], chat_format, add_special_tokens=add_special_tokens)
    token_ids = chat_format.tokenizer.encode(prompt)
    bos = chat_format.config.bos_token_id
    begins = add_special_tokens is not False and token_ids[:1] != [bos]
    if begins:
        token_ids = [bos, *token_ids]
    if not token_ids:
        raise RequestError("prompt: it holds no token", param="prompt")
    return token_ids, begins


@dataclass(slots=True)
class _Piece:
    """What one push adds to the answer. `logprobs`: an id alone for the token that nothing comes before."""

    text: str = ""
    logprobs: list[TokenLogprob | int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class CompletionAnswer:
    """One answer as text_completion chunks, or as one text_completion."""

    def __init__(self, prepared: PreparedCompletion, model_id: str, chat_format: ChatFormat) -> None:
        self.stop_reason: str | None = None
        self._request_id = prepared.generate.request_id
        self._model_id = model_id
        self._created = int(time.time())
        self._texts = chat_format.texts
        self._hidden = chat_format.control_ids
        self._stop_token_ids = frozenset(prepared.generate.sampling.stop_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(prepared.stop)
        self._include_usage = prepared.include_usage
        self._num_logprobs = prepared.num_logprobs
        self._prompt = prepared.generate.prompt_token_ids if prepared.echo else ()  # that is not repeated yet
        self._begins_by_itself = prepared.begins_by_itself
        self._num_prompt = self._num_cached = self._num_generated = self._num_chars = 0
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: the engine finished, or a stop string matched."""
        return self._finished

    @property
    def repairs(self) -> frozenset[str]:
        """Nothing is put right in plain text."""
        return frozenset()

    def push(self, chunk: TokenChunk) -> list[_Piece]:
        """Return what `chunk` adds, maybe nothing. Raises EngineError for an abort."""
        if chunk.finish_reason == "abort":
            raise EngineError(f"the engine ended a request with {chunk.finish_reason!r}")
        self._num_prompt = chunk.num_prompt_tokens
        self._num_cached = max(self._num_cached, chunk.num_cached_tokens)  # some engines tell it last
        piece = _Piece()
        pieces: list[_Piece] = []
        if self._prompt:
            self._repeat_prompt(piece, chunk.prompt_logprobs)
        last = len(chunk.token_ids) - 1
        for index, token_id in enumerate(chunk.token_ids):
            self._num_generated += 1
            ended = index == last and chunk.finish_reason == "stop" and token_id in self._stop_token_ids
            if token_id in self._hidden or ended or token_id >= len(self._texts):
                continue
            if self._num_logprobs is not None and chunk.logprobs is not None:
                piece.logprobs.append(chunk.logprobs[index])
                piece.offsets.append(self._num_chars)
            decoded = self._decoder.decode(self._texts[token_id])
            self._num_chars += len(decoded)
            text, matched = self._matcher.push(decoded)
            piece.text += text
            if matched is not None:
                self._finished, self.stop_reason, piece.finish_reason = True, matched, "stop"
                break
        if chunk.finish_reason is not None and not self._finished:
            # Half a character at the very end is nothing.
            piece.text += self._matcher.finish()
            self._finished, piece.finish_reason = True, chunk.finish_reason
            self.stop_reason = chunk.stop_reason
        if piece.text or piece.logprobs or piece.finish_reason is not None:
            pieces.append(piece)
        return pieces

    def _repeat_prompt(self, piece: _Piece, told: Sequence[TokenLogprob] | None) -> None:
        """Put the prompt before the answer. Raises EngineError when its log probabilities are wanted and not told."""
        token_ids, self._prompt = self._prompt, ()
        if self._num_logprobs is not None and (told is None or len(told) != len(token_ids) - 1):
            raise EngineError("the engine has not told the log probabilities of the prompt")
        for index, token_id in enumerate(token_ids):
            if self._num_logprobs is not None:
                piece.logprobs.append(token_id if told is None or index == 0 else told[index - 1])
                piece.offsets.append(self._num_chars)
            if (index == 0 and self._begins_by_itself) or token_id >= len(self._texts):
                continue
            text = self._decoder.decode(self._texts[token_id])
            self._num_chars += len(text)
            piece.text += text

    def encode(self, events: list[_Piece]) -> bytes:
        """Return events as they are sent. Called for what each `push` returned, in order."""
        told = [self._object("text_completion", [self._choice(piece)]) for piece in events]
        if self._finished and self._include_usage:
            told.append({**self._object("text_completion", []), "usage": self._usage()})
        return b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in told)

    def end(self) -> bytes:
        """Return the message that ends a stream of this protocol."""
        return b"data: [DONE]\n\n"

    def fail(self, failure: Failure) -> bytes:
        """Return what is sent in place of the rest when something breaks."""
        return b"data: " + failure.to_json() + b"\n\n"

    def whole_answer(self) -> WholeCompletion:
        """Return an empty answer to which the events of `push` can be added."""
        return WholeCompletion(self)

    def whole(self, pieces: Sequence[_Piece]) -> dict[str, Any]:
        """Return all pieces as one answer."""
        joined = _Piece(
            "".join(piece.text for piece in pieces),
            [entry for piece in pieces for entry in piece.logprobs],
            [offset for piece in pieces for offset in piece.offsets],
            pieces[-1].finish_reason if pieces else None,
        )
        return {**self._object("text_completion", [self._choice(joined)]), "usage": self._usage()}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._request_id,
            "object": kind,
            "created": self._created,
            "model": self._model_id,
            "choices": choices,
        }

    def _choice(self, piece: _Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": piece.text,
            "logprobs": None if self._num_logprobs is None else self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None and self.stop_reason is not None:
            choice["stop_reason"] = self.stop_reason
        return choice

    def _logprobs(self, piece: _Piece) -> dict[str, Any]:
        return {
            "tokens": [
                self._spelled(entry if isinstance(entry, int) else entry.token_id) for entry in piece.logprobs
            ],
            "token_logprobs": [None if isinstance(entry, int) else entry.logprob for entry in piece.logprobs],
            "top_logprobs": [
                None if isinstance(entry, int) else self._top(entry) for entry in piece.logprobs
            ],
            "text_offset": piece.offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        known = [(token_id, value) for token_id, value in entry.top if token_id < len(self._texts)]
        return {self._spelled(token_id): value for token_id, value in reversed(known)}

    def _spelled(self, token_id: int) -> str:
        """A token by itself; half a character as its bytes, as the vendor spells them."""
        try:
            return self._texts[token_id].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._texts[token_id])

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": self._num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


class WholeCompletion:
    """The answer of a request that does not stream."""

    def __init__(self, parser: CompletionAnswer) -> None:
        self._parser = parser
        self._pieces: list[_Piece] = []

    def add(self, events: list[_Piece]) -> None:
        """Add what `push` returned."""
        self._pieces += events

    def to_json(self) -> str:
        """Return the text_completion object."""
        return msgspec.json.encode(self._parser.whole(self._pieces)).decode()


__all__ = [
    "DECISIONS",
    "CompletionAnswer",
    "CompletionFields",
    "CompletionsProtocol",
    "PreparedCompletion",
    "WholeCompletion",
    "prompt_ids",
]
