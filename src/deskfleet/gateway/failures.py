"""What a client is told when a request fails: one status and one OpenAI error object per exception.

Owns the mapping and the JSON shape. Knows nothing of sockets; `app` and `stream` send what this module makes.

    RequestError, a field or message is wrong       400 invalid_request_error, `param` names it
    PromptTooLong                                   400 context_length_exceeded, both numbers in the message
    UnknownModel                                    404 model_not_found
    no such route, wrong method, body too large     404, 405, 413
    EngineError, RankDied                           503 engine_failed
    anything else                                   500 internal_error
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from aiohttp import web

from deskfleet.errors import EngineError, PromptTooLong, RequestError


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"the model {asked!r} does not exist; this server serves {served!r}", param="model")


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request as the client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    def to_json(self) -> bytes:
        """Return `{"error": {...}}` as OpenAI clients expect it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def describe_failure(error: Exception) -> Failure:
    """Return what a client is told about `error`."""
    match error:
        case PromptTooLong():
            return _invalid(error, status=400, code="context_length_exceeded")
        case UnknownModel():
            return _invalid(error, status=404, code="model_not_found")
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


def _invalid(error: RequestError, *, status: int, code: str | None) -> Failure:
    message = f"{error.message}; {error.hint}" if error.hint else error.message
    if error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"  # many clients show the message and nothing else
    return Failure(status, message, "invalid_request_error", param=error.param, code=code)


__all__ = ["Failure", "UnknownModel", "describe_failure"]
