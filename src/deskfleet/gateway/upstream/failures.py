"""What can go wrong with an engine behind HTTP, and how its own error bodies become our exceptions.

    400, 413, 422, also inside a stream     RequestError, with the engine's sentence
    429, 503, of a request                  UpstreamBusy, with how long to wait
    connection refused, host unknown        UpstreamUnreachable
    closed before an answer began           UpstreamLost
    everything else                         UpstreamFailed

Owns the mapping. Knows nothing of sockets or of what either engine sends when all is well.
"""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from deskfleet.endpoint import GenerateRequest
from deskfleet.errors import EngineError, RequestError
from deskfleet.gateway.refusals import Refusal

DEFAULT_RETRY_AFTER_S = 5.0
_MAX_RETRY_AFTER_S = 3600.0
_MAX_SENTENCE = 500  # characters of a foreign message that are repeated
_REFUSED = frozenset({400, 413, 422})
_BUSY = frozenset({429, 503})


class UpstreamFailed(EngineError):
    """An upstream broke off, answered nonsense, or fell silent. Other replicas may do better."""


class UpstreamUnreachable(UpstreamFailed):
    """Nothing answers at an upstream's address; no request has reached an engine."""


class UpstreamLost(UpstreamFailed):
    """The connection ended before an answer began, as when a server closes an idle one while we write into it."""


class UpstreamBusy(Refusal):
    """An upstream lives and takes no more requests. Worth asking again after `retry_after_s` seconds."""

    status = 503
    code = "engine_busy"

    def __init__(self, message: str, retry_after_s: float = DEFAULT_RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> Mapping[str, str]:
        """Whole seconds, rounded up, at least one."""
        return {"Retry-After": str(max(math.ceil(self.retry_after_s), 1))}


class _ErrorBody(msgspec.Struct):
    """`{"error": {...}}` of both engines, `{"object": "error", ...}` of older ones, `{"detail": ...}` of FastAPI."""

    error: Any = None
    message: Any = None
    detail: Any = None


class _ErrorObject(msgspec.Struct):
    message: str = ""
    param: Any = None
    code: Any = None


def failure_of(
    status: int,
    body: bytes,
    url: str,
    *,
    request: GenerateRequest | None = None,
    retry_after: str | None = None,
) -> EngineError | RequestError:
    """Return the exception for an answer of `status`. `request`: what the engine was asked for, None for a look-up."""
    error = _error_object(body)
    said = shorten(error.message) or f"HTTP {status} without a reason"
    if status in _REFUSED and request is not None:
        return RequestError(said, param=_param(error.param, said, request))
    if status in _BUSY and request is not None:
        return UpstreamBusy(f"{url} is busy: {said}", parse_retry_after(retry_after))
    if status in (401, 403):
        return UpstreamFailed(f"{url} refused the gateway's key: {said}", hint="see --upstream-key-file")
    return UpstreamFailed(f"{url} answered {status}: {said}")


ERROR_SIGN = b'"error"'
MAX_ERROR_SIGN_BYTES = 64


def failure_in_stream(
    payload: bytes, url: str, request: GenerateRequest
) -> EngineError | RequestError | None:
    """Return the exception that an event stands for, None when it is no error. Both engines send `{"error": ...}`.

    Whoever reads every event asks first whether ERROR_SIGN is within MAX_ERROR_SIGN_BYTES.
    """
    error = _error_object(payload)
    if not error.message and error.code is None:
        return None
    status = error.code if isinstance(error.code, int) else 500
    return failure_of(status, payload, url, request=request)


def shorten(text: str) -> str:
    """Return a foreign sentence on one line, at most `_MAX_SENTENCE` characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SENTENCE else line[:_MAX_SENTENCE] + "…"


def parse_retry_after(value: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, a number or a date; the default when it says neither."""
    if value is None:
        return DEFAULT_RETRY_AFTER_S
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return DEFAULT_RETRY_AFTER_S
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S) if math.isfinite(seconds) else DEFAULT_RETRY_AFTER_S


def _error_object(body: bytes) -> _ErrorObject:
    try:
        whole = msgspec.json.decode(body, type=_ErrorBody)
    except msgspec.MsgspecError:
        return _ErrorObject(message=body[:_MAX_SENTENCE].decode(errors="replace"))
    for part in (whole.error, whole.message, whole.detail):
        if isinstance(part, str):
            return _ErrorObject(message=part)
        if isinstance(part, dict):
            message = part.get("message")
            return _ErrorObject(
                message if isinstance(message, str) else "", part.get("param"), part.get("code")
            )
        if part is not None:
            return _ErrorObject(message=msgspec.json.encode(part).decode())
    return _ErrorObject()


_OWN_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "max_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "logprobs": "top_logprobs",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""A field as an engine names it -> as clients spell it."""

_ABOUT_FORM = ("grammar", "regex", "schema", "structured", "ebnf")


def _param(theirs: object, said: str, request: GenerateRequest) -> str | None:
    """Return the client's name of the field an engine complains about, None when that cannot be told."""
    if isinstance(theirs, str) and theirs in _OWN_NAMES:
        return _OWN_NAMES[theirs]
    lowered = said.lower()
    if request.sampling.constraint is not None and any(word in lowered for word in _ABOUT_FORM):
        return request.sampling.constraint.param
    if request.images and ("image" in lowered or "multimodal" in lowered):
        return "messages"
    return None


__all__ = [
    "DEFAULT_RETRY_AFTER_S",
    "ERROR_SIGN",
    "MAX_ERROR_SIGN_BYTES",
    "UpstreamBusy",
    "UpstreamFailed",
    "UpstreamLost",
    "UpstreamUnreachable",
    "failure_in_stream",
    "failure_of",
    "parse_retry_after",
    "shorten",
]
