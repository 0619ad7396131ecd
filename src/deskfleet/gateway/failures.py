"""What a client is told when a request fails: one status and one error object per exception.

Owns the mapping and its two JSON shapes, OpenAI's and Anthropic's. Knows nothing of sockets; `app` and `stream` send
what this module makes.

    RequestError, a field or message is wrong       400 invalid_request_error, `param` names it
    PromptTooLong                                   400 context_length_exceeded, both numbers in the message
    UnknownModel                                    404 model_not_found
    Refusal                                         its own status, code and headers
    no such route, wrong method, body too large     404, 405, 413
    EngineError, RankDied                           503 engine_failed
    anything else                                   500 internal_error

Clients know a prompt that is too long by the words of the message, so their vendors' words are used: Anthropic's for
Anthropic's clients, and OpenAI's before our own sentence for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from aiohttp import web

from deskfleet.errors import EngineError, PromptTooLong, RequestError
from deskfleet.gateway.refusals import Refusal

ErrorStyle = Literal["openai", "anthropic"]


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked!r} does not exist; this server serves {served!r}", param="model")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request as the client sees it. `anthropic` replaces the message for Anthropic's clients."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    anthropic: str | None = None

    def to_json(self, style: ErrorStyle = "openai", request_id: str | None = None) -> bytes:
        """Return `{"error": {...}}` as OpenAI's clients expect it, or Anthropic's object."""
        return msgspec.json.encode(self.describe(style, request_id))

    def describe(self, style: ErrorStyle = "openai", request_id: str | None = None) -> dict[str, Any]:
        """Return the same as an object."""
        if style == "anthropic":
            error = {"type": self._anthropic_type(), "message": self.anthropic or self.message}
            return {"type": "error", "error": error, "request_id": request_id}
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def _anthropic_type(self) -> str:
        otherwise = "api_error" if self.status >= 500 else "invalid_request_error"
        return _ANTHROPIC_TYPES.get(self.status, otherwise)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def describe_failure(error: Exception) -> Failure:
    """Return what a client is told about `error`."""
    match error:
        case PromptTooLong():
            return _invalid(
                error,
                status=400,
                code="context_length_exceeded",
                before=f"This model's maximum context length is {error.max_model_len} tokens. ",
                anthropic=_anthropic_length(error),
            )
        case UnknownModel():
            return _invalid(error, status=404, code="model_not_found")
        case Refusal():
            return _invalid(error, status=error.status, code=error.code, headers=error.headers)
        case RequestError():
            return _invalid(error, status=400, code=None)
        case EngineError():
            return Failure(503, error.message, "server_error", code="engine_failed")
        case web.HTTPException():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            code = _HTTP_CODES.get(error.status)
            return Failure(error.status, error.text or error.reason, kind, code=code)
        case _:
            return Failure(
                500, "internal error; the server's log says more", "server_error", code="internal_error"
            )


def _invalid(
    error: RequestError,
    *,
    status: int,
    code: str | None,
    headers: Mapping[str, str] | None = None,
    before: str = "",
    anthropic: str | None = None,
) -> Failure:
    message = before + (f"{error.message}; {error.hint}" if error.hint else error.message)
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"  # many clients show the message and nothing else
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return Failure(status, message, kind, error.param, code, headers or {}, anthropic)


def _anthropic_length(error: PromptTooLong) -> str:
    """The message that Anthropic's clients look for, to shorten the conversation or lower max_tokens."""
    if error.num_prompt_tokens < error.max_model_len and error.max_tokens:
        return (
            "input length and `max_tokens` exceed context limit: "
            f"{error.num_prompt_tokens} + {error.max_tokens} > {error.max_model_len}, "
            "decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len} maximum"


__all__ = ["ErrorStyle", "Failure", "UnknownModel", "describe_failure"]
