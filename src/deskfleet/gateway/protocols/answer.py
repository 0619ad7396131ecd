"""One answer: engine chunks in, the publisher's protocol events out. What all protocols with a conversation share.

Owns how tokens reach the library's parser. Knows nothing of HTTP or of how events are spelled.

* **Control tokens never become text.** The library writes out every id it is given, end of sentence included.
  So the ids of `ChatFormat.hidden_token_ids`, and a client's stop token that ended the answer, are taken out
  before it sees them. They still count as completion tokens, and have no entry among the log probabilities.
* **Calls are read before it** (`calls.CallReader`). Text goes on as the tokens it came in, so that log probabilities
  stay with it. A token that is part text and part tag goes on as that text alone.
* The library would put half a character that is followed by a tag behind the tag. So tokens are held until their
  characters are whole.
* When a stop string matches, or no more calls are wanted, `finished` turns true before the engine is done, and the
  caller closes the engine's iterator.
* An answer that ends in the middle of a call says `length`, whatever the engine said; so does one that a policy cut
  between the calls of a block, since the model was not done with them.
* The library takes the count of cached tokens at the beginning. An engine that tells it at the end has its number put
  into the usage afterwards (`late_cached`).
"""

from __future__ import annotations

import codecs
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from deepseek_recipe import (
    ChatCompletionChunkGenerator,
    InferenceChunk,
    InferenceFinishReason,
    MessagesChunkGenerator,
    PromptUsage,
    ResponsesChunkGenerator,
    SpecialTokens,
    StreamProcessor,
)

from deskfleet.endpoint import TokenChunk, TokenLogprob
from deskfleet.errors import EngineError
from deskfleet.gateway.chat_format import ChatFormat
from deskfleet.gateway.protocols.calls import MARKER, THOUGHT_END, CallReader, Mode, Piece
from deskfleet.gateway.protocols.conversation import PreparedConversation
from deskfleet.gateway.protocols.markup import EXACT, SPELLED, as_shown

logger = logging.getLogger(__name__)

Generator = ChatCompletionChunkGenerator | ResponsesChunkGenerator | MessagesChunkGenerator

_CANONICAL = SpecialTokens(dsml=MARKER)
"""How the call reader spells calls for the library."""

UNFINISHED_CALL = "unfinished_call"
"""The stop reason of an answer that the model ended in the middle of a call."""

UNWANTED_CALL = "unwanted_call"
"""The stop reason of an answer in which the model called a tool though no call was wanted; it was dropped."""


class _Token(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None
    num_bytes: int


class TokenReader:
    """From token ids to what the library's parser takes: text as tokens, calls in their one form."""

    def __init__(
        self, texts: tuple[bytes, ...], hidden: frozenset[int], thought_end_id: int, calls: CallReader
    ) -> None:
        self._texts = texts
        self._hidden = hidden
        self._thought_end_id = thought_end_id
        self._calls = calls
        self._waiting: deque[_Token] = deque()  # their bytes are in the call reader
        self._used = 0  # bytes of the first of them that were decided about
        self._run: list[_Token] = []  # text that is not told yet
        self._run_bytes = bytearray()
        self._num_uncounted = 0  # tokens that were used up and have to be counted with the next part

    def read(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        hidden: frozenset[int] | None = None,
    ) -> list[InferenceChunk]:
        """Return what can be told after these tokens. `hidden` replaces the ids that are not text."""
        unseen = self._hidden if hidden is None else hidden
        if unseen.isdisjoint(token_ids):
            data = self._join(token_ids)
            if self._is_plain(data):
                told = None if logprobs is None else _logprobs(logprobs)
                return [InferenceChunk.tokens(token_ids, told)] if token_ids else []
        parts: list[InferenceChunk] = []
        for index, token_id in enumerate(token_ids):
            data = b"" if token_id in unseen else self._text(token_id)
            self._waiting.append(_Token(token_id, logprobs[index] if logprobs else None, len(data)))
            self._place(self._calls.feed(data), parts)
        self._tell_run(parts, is_final=False)
        return parts

    def finish(self) -> tuple[list[InferenceChunk], bool]:
        """Return what is left to tell, and whether no call is unfinished."""
        parts: list[InferenceChunk] = []
        pieces, is_whole = self._calls.finish()
        self._place(pieces, parts)
        self._tell_run(parts, is_final=False)
        # Half a character at the very end is nothing; its tokens count.
        num_left = len(self._run) + len(self._waiting) + self._num_uncounted
        if num_left:
            parts.append(InferenceChunk.text("", num_left))
        return parts, is_whole

    def _is_plain(self, data: bytes) -> bool:
        """Whether nothing waits, nothing of `data` may be a tag, and it ends with a whole character."""
        if self._waiting or self._run or self._run_bytes or not self._calls.is_plain(data):
            return False
        if data.isascii():
            return True
        try:
            data.decode()
        except UnicodeDecodeError:
            return False
        return True

    def _text(self, token_id: int) -> bytes:
        return self._texts[token_id] if token_id < len(self._texts) else b""

    def _join(self, token_ids: Sequence[int]) -> bytes:
        if len(token_ids) == 1:
            return self._text(token_ids[0])
        return b"".join([self._text(token_id) for token_id in token_ids])

    def _place(self, pieces: list[Piece], parts: list[InferenceChunk]) -> None:
        """Lay pieces over the tokens whose bytes they are."""
        for num_bytes, text in pieces:
            if text is None or (text == THOUGHT_END and self._waiting[0].token_id == self._thought_end_id):
                self._pass_on(num_bytes)
            else:
                self._tell_run(parts, is_final=True)
                self._use_up(num_bytes)
                if text or self._num_uncounted:
                    parts.append(InferenceChunk.text(text, self._take_count()))
        if not self._calls.is_holding:
            while self._waiting and self._waiting[0].num_bytes == self._used:  # hidden ones
                self._num_uncounted += 1
                self._waiting.popleft()
                self._used = 0

    def _pass_on(self, num_bytes: int) -> None:
        """The next bytes are text."""
        while num_bytes or (self._waiting and not self._waiting[0].num_bytes):
            token = self._waiting[0]
            step = min(num_bytes, token.num_bytes - self._used)
            begin = self._used
            self._used += step
            num_bytes -= step
            is_used_up = self._used == token.num_bytes
            self._run_bytes += self._text(token.token_id)[begin : self._used] if step else b""
            if step and step == token.num_bytes:
                self._run.append(token)
            elif is_used_up:
                self._num_uncounted += 1
            if is_used_up:
                self._waiting.popleft()
                self._used = 0
            elif not step:
                break

    def _use_up(self, num_bytes: int) -> None:
        """The next bytes are no text."""
        while num_bytes and self._waiting:
            step = min(num_bytes, self._waiting[0].num_bytes - self._used)
            self._used += step
            num_bytes -= step
            if self._used == self._waiting[0].num_bytes:
                self._num_uncounted += 1
                self._waiting.popleft()
                self._used = 0

    def _tell_run(self, parts: list[InferenceChunk], *, is_final: bool) -> None:
        """Tell the text that has gathered, up to its last whole character; `is_final`: half a one is broken."""
        if self._run_bytes:
            try:
                _, num_whole = codecs.utf_8_decode(self._run_bytes, "strict", False)
            except UnicodeDecodeError:
                self._tell_as_text(parts, is_final=is_final)
            else:
                self._tell_as_tokens(num_whole, parts)
                if is_final and self._run_bytes:
                    self._tell_as_text(parts, is_final=True)
        if self._num_uncounted and not self._run_bytes:
            parts.append(InferenceChunk.text("", self._take_count()))

    def _tell_as_tokens(self, num_whole: int, parts: list[InferenceChunk]) -> None:
        """Tell the tokens that end within the first `num_whole` bytes, at the end of a character."""
        if sum(token.num_bytes for token in self._run) != len(self._run_bytes):
            self._tell_as_text(parts, is_final=False)  # it begins or ends within a token
            return
        num_tokens = num_bytes = end = 0
        for index, token in enumerate(self._run, start=1):
            end += token.num_bytes
            if end == num_whole or (end < num_whole and self._run_bytes[end] & 0xC0 != 0x80):
                num_tokens, num_bytes = index, end
        if not num_tokens:
            return
        told = self._run[:num_tokens]
        logprobs = [token.logprob for token in told if token.logprob is not None]
        parts.append(InferenceChunk.tokens([token.token_id for token in told], _logprobs(logprobs or None)))
        del self._run[:num_tokens], self._run_bytes[:num_bytes]

    def _tell_as_text(self, parts: list[InferenceChunk], *, is_final: bool) -> None:
        text, num_used = codecs.utf_8_decode(self._run_bytes, "replace", is_final)
        self._num_uncounted += len(self._run)
        self._run.clear()
        del self._run_bytes[:num_used]
        if text:
            parts.append(InferenceChunk.text(as_shown(text), self._take_count()))

    def _take_count(self) -> int:
        count, self._num_uncounted = self._num_uncounted, 0
        return count


class LibraryAnswer:
    """One answer through the library's parser. A protocol's parser adds how its events are sent.

    `stop_reason` says more about why the answer ended, once it has, and is None where there is no more to say.
    `late_cached` are the cached tokens of the prompt where only the answer's end has told them, else None.
    """

    def __init__(self, prepared: PreparedConversation, generator: Generator, chat_format: ChatFormat) -> None:
        self.stop_reason: str | None = None
        self.late_cached: int | None = None
        self._told_cached = 0
        generate = prepared.draft.generate
        self._request_id = generate.request_id
        parsing = prepared.parsing
        starts = Mode.BLOCK if prepared.calls_are_begun else Mode.ANSWER
        stage = parsing.thinking_initial_stage
        if stage is not None and stage.starts_in_reasoning():
            starts = Mode.THOUGHT
        is_exact = prepared.quotes_markup
        markers = EXACT if is_exact else SPELLED
        self._calls = CallReader(prepared.tools, starts, markers=markers, max_calls=prepared.max_calls)
        parsing.parse_tool_calls = True  # of what the call reader writes; nothing else can be a call
        parsing.special_tokens = _CANONICAL
        self._hidden = chat_format.hidden_token_ids
        texts = chat_format.exact_texts if is_exact else chat_format.texts
        self._reader = TokenReader(texts, self._hidden, chat_format.thought_end_id, self._calls)
        self._processor = StreamProcessor(generator, parsing, chat_format.tokenizer)
        self._stop_token_ids = frozenset(generate.sampling.stop_token_ids)
        self._started = False

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: the engine finished, or nothing more is wanted of it."""
        return self._processor.finished

    @property
    def repairs(self) -> frozenset[str]:
        """What the model wrote in a form that had to be put right, by kind."""
        return frozenset(self._calls.repairs)

    @property
    def is_amended(self) -> bool:
        """Whether there is more to say of the answer's end than the library does."""
        return self.stop_reason is not None or self.late_cached is not None

    @property
    def has_cut_call(self) -> bool:
        """Whether the last call that was told is not finished."""
        return self._calls.has_cut_call

    def push(self, chunk: TokenChunk) -> list[Any]:
        """Return the library's events for `chunk`, maybe none. Raises EngineError for an abort."""
        hidden = self._hidden_in(chunk) if self._stop_token_ids else None
        parts = self._reader.read(chunk.token_ids, chunk.logprobs, hidden)
        if not self._started:
            self._started = True
            self._told_cached = chunk.num_cached_tokens
            usage = PromptUsage(
                prompt_tokens=chunk.num_prompt_tokens, prompt_cache_hit_tokens=chunk.num_cached_tokens
            )
            parts = [InferenceChunk.ready(prompt_usage=usage), *parts]
        if chunk.finish_reason is not None:
            parts += self._finish(chunk)
        elif self._calls.is_complete:
            rest, _ = self._reader.finish()
            parts += [*rest, InferenceChunk.finish(InferenceFinishReason.Stop)]
        out: list[Any] = []
        for part in parts:
            if self._processor.finished:
                break
            out += self._processor.push(part)
        return out

    def _hidden_in(self, chunk: TokenChunk) -> frozenset[int] | None:
        """The ids of a chunk that are no text, where the client's own stop token is one of them."""
        if chunk.finish_reason != "stop" or not chunk.token_ids:
            return None
        last = chunk.token_ids[-1]
        return self._hidden | {last} if last in self._stop_token_ids else None

    def _finish(self, chunk: TokenChunk) -> list[InferenceChunk]:
        reason = finish_reason(chunk)
        if self._calls.is_complete:
            reason = InferenceFinishReason.Stop
        rest, is_whole = self._reader.finish()
        self.stop_reason = chunk.stop_reason
        if chunk.num_cached_tokens > self._told_cached:
            self.late_cached = chunk.num_cached_tokens
        if not is_whole or (chunk.stop_reason is not None and self._calls.ends_in_block):
            if reason == InferenceFinishReason.Stop:
                self.stop_reason = self.stop_reason or UNFINISHED_CALL
            reason = InferenceFinishReason.Length
        elif UNWANTED_CALL in self._calls.repairs and not self._calls.num_calls:
            self.stop_reason = self.stop_reason or UNWANTED_CALL
        if self._calls.repairs:
            # What the model wrote can so be told from what the parser made of it.
            logger.info("%s: put right: %s", self._request_id, ", ".join(sorted(self._calls.repairs)))
        return [*rest, InferenceChunk.finish(reason)]


def finish_reason(chunk: TokenChunk) -> InferenceFinishReason:
    """Return the library's word for why the engine ended. Raises EngineError for an abort."""
    match chunk.finish_reason:
        case "stop":
            return InferenceFinishReason.Stop
        case "length":
            return InferenceFinishReason.Length
        case _:
            raise EngineError(f"the engine ended a request with {chunk.finish_reason!r}")


def _logprobs(
    logprobs: Sequence[TokenLogprob] | None,
) -> list[tuple[float, Sequence[tuple[int, float]]]] | None:
    return None if logprobs is None else [(entry.logprob, entry.top) for entry in logprobs]


__all__ = ["UNFINISHED_CALL", "UNWANTED_CALL", "Generator", "LibraryAnswer", "TokenReader", "finish_reason"]
