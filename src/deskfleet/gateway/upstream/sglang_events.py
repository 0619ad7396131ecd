"""What SGLang answers: the events of /generate, as token chunks. Knows nothing of how it was asked or of HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from deskfleet.endpoint import FinishReason, GenerateRequest, TokenChunk, TokenLogprob
from deskfleet.gateway.upstream.failures import UpstreamFailed, failure_of
from deskfleet.gateway.upstream.retokenise import Retokeniser
from deskfleet.gateway.upstream.vocabulary import Vocabulary


class _Finish(Struct):
    type: str
    matched: Any = None
    message: str | None = None
    status_code: int | None = None


class _Meta(Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[list[float | int | str | None]] | None = None
    output_top_logprobs: list[list[list[float | int | str | None]] | None] | None = None
    output_token_ids_logprobs: list[list[list[float | int | str | None]] | None] | None = None
    spec_num_proposed_drafts: int | None = None
    spec_num_correct_drafts: int | None = None


class GenerateEvent(Struct):
    """One event, or the whole answer."""

    meta_info: _Meta
    output_ids: list[int] | None = None
    text: str | None = None


_EVENTS = msgspec.json.Decoder(GenerateEvent)
_METAS = msgspec.json.Decoder(_Meta)
_IDS = msgspec.json.Decoder(list[int])


class GenerateEvents:
    """Reads the events of one answer.

    A server sends either what is new or everything so far, every time. Which of the two, an event tells by its own
    count of tokens; one that does not add up is an error.
    """

    def __init__(self, request: GenerateRequest, url: str, vocabulary: Vocabulary) -> None:
        self._params = request.sampling
        self._url = url
        self._vocabulary = vocabulary
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_seen = 0  # tokens that have come
        self._num_listed_bytes = 0  # length of the latest list of ids, where lists are cumulative
        self._retokeniser: Retokeniser | None = None
        self._text = ""

    def push(self, payload: bytes) -> TokenChunk | None:
        """Return what an event says (see EventReader)."""
        parts = self._split(payload) if self._params.logprobs is None else None
        if parts is None:
            event = _EVENTS.decode(payload)
            meta = event.meta_info
            self._refuse_abort(meta)
            token_ids = self._new_ids(event)
        else:
            meta, token_ids = parts
            self._refuse_abort(meta)
        first = self._num_seen
        self._num_seen += len(token_ids)
        if meta.prompt_tokens is not None:
            self._num_prompt_tokens = meta.prompt_tokens
        if not token_ids and meta.finish_reason is None:
            return None
        return TokenChunk(
            tuple(token_ids),
            None if self._params.logprobs is None else self._logprobs(meta, token_ids, first),
            self._num_prompt_tokens,
            self._reason(meta.finish_reason, token_ids),
            num_cached_tokens=meta.cached_tokens or 0,
            num_drafted=meta.spec_num_proposed_drafts or 0,
            num_accepted=meta.spec_num_correct_drafts or 0,
        )

    def finish(self, last: TokenChunk) -> TokenChunk:
        """Return the last chunk; nothing comes after it."""
        return last

    def _split(self, payload: bytes) -> tuple[_Meta, list[int]] | None:
        """Read only what is new of a cumulative event, None where that cannot be done.

        A list of 10,000 ids would be decoded 10,000 times. Its text begins with the text of the list before it, so
        that its end is enough; the count of tokens then proves that nothing was lost.
        """
        start = payload.rfind(b'"output_ids":[')  # inside a string the first quote would follow a backslash
        if self._num_listed_bytes == 0 or start < 0:
            return None
        start += 14
        end = payload.find(b"]", start + self._num_listed_bytes)
        mark = b',"meta_info":'
        if end < 0 or not payload.startswith(mark, end + 1) or not payload.endswith(b"}"):
            return None
        fresh = payload[start + self._num_listed_bytes : end]
        meta = _METAS.decode(payload[end + 1 + len(mark) : -1])
        if fresh and not fresh.startswith(b","):
            return None
        token_ids = _IDS.decode(b"[" + fresh[1:] + b"]") if fresh else []
        if meta.completion_tokens != self._num_seen + len(token_ids):
            return None
        self._num_listed_bytes = end - start
        return meta, token_ids

    def _new_ids(self, event: GenerateEvent) -> list[int]:
        """What an event adds, whichever way the server counts."""
        if event.output_ids is None:
            return self._ids_of_text(event)
        ids, total = event.output_ids, event.meta_info.completion_tokens
        if total is None or total == self._num_seen + len(ids):
            return ids
        if len(ids) >= max(total, self._num_seen):
            self._num_listed_bytes = sum(map(len, map(str, ids))) + max(len(ids) - 1, 0)
            return ids[self._num_seen :]
        raise UpstreamFailed(
            f"{self._url} lost tokens: {total} were made, {self._num_seen} and {len(ids)} have come"
        )

    def _ids_of_text(self, event: GenerateEvent) -> list[int]:
        """For a server that sends no ids: its text, which is cumulative or not, cut into ids again."""
        if self._retokeniser is None:
            self._retokeniser = Retokeniser(self._vocabulary)
        text = event.text or ""
        if event.meta_info.finish_reason is None:
            text = text.rstrip("\ufffd")  # a character whose bytes have not all come
        is_cumulative = bool(self._text) and text.startswith(self._text)
        fresh = text[len(self._text) :] if is_cumulative else text
        self._text = text if is_cumulative or not self._text else self._text + text
        token_ids = list(self._retokeniser.push(fresh))
        finish = event.meta_info.finish_reason
        if finish is not None:
            token_ids += self._retokeniser.finish()
            if finish.type == "stop" and isinstance(finish.matched, int):
                token_ids.append(finish.matched)  # text does not show the token that ended it
        return token_ids

    def _refuse_abort(self, meta: _Meta) -> None:
        finish = meta.finish_reason
        if finish is None or finish.type in ("stop", "length"):
            return
        said = finish.message or "without a reason"
        if finish.type == "abort" and finish.status_code is not None:
            body = msgspec.json.encode({"error": {"message": said}})
            request = GenerateRequest("", (), self._params)
            raise failure_of(finish.status_code, body, self._url, request=request)
        raise UpstreamFailed(f"{self._url} ended a request with {finish.type!r}: {said}")

    def _reason(self, finish: _Finish | None, token_ids: list[int]) -> FinishReason | None:
        if finish is None:
            return None
        if finish.type == "length" and token_ids:
            # SGLang looks at the length first; an answer that ends itself with its last token is not cut.
            ends = {*self._params.stop_token_ids}
            if not self._params.ignore_eos:
                ends.add(self._vocabulary.eos_token_id)
            return "stop" if token_ids[-1] in ends else "length"
        return "stop" if finish.type == "stop" else "length"

    def _logprobs(self, meta: _Meta, token_ids: list[int], first: int) -> tuple[TokenLogprob, ...]:
        """Those of the event's own tokens, of lists that hold only these or all so far, like the ids."""
        chosen, tops = meta.output_token_logprobs or [], meta.output_top_logprobs or []
        if len(chosen) == first + len(token_ids):
            chosen, tops = chosen[first:], tops[first:]
        if len(chosen) != len(token_ids):
            raise UpstreamFailed(
                f"{self._url} sent {len(chosen)} log probabilities for {len(token_ids)} tokens"
            )
        num_top = self._params.logprobs or 0
        rows = tops if len(tops) == len(chosen) else [None] * len(chosen)
        return tuple(
            TokenLogprob(
                token_id,
                self._finite(entry[0]),
                tuple((int(pair[1] or 0), self._finite(pair[0])) for pair in (row or ())[:num_top]),
            )
            for token_id, entry, row in zip(token_ids, chosen, rows, strict=True)
        )

    def _finite(self, logprob: float | int | str | None) -> float:
        if not isinstance(logprob, float | int):
            raise UpstreamFailed(f"{self._url} gave a log probability that is not finite")
        return float(logprob)


__all__ = ["GenerateEvent", "GenerateEvents"]
