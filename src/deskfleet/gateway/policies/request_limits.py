"""How large a request may be, and how deeply nested. Owns a check of the bytes, made before anything parses them.

Nesting is counted without parsing: strings are left out, brackets and commas outside of them counted. A body that is no
JSON may pass here; the parser refuses it.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from deskfleet.errors import RequestError
from deskfleet.gateway.policies.section import Bytes, Seconds, Section
from deskfleet.gateway.refusals import BodyTooLarge

_QUOTE, _COMMA = b'",'
_OTHERS = bytes(set(range(256)) - set(b'"[]{},'))
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_BLOCK = 2**20


class RequestLimits(Section):
    """How large a request may be. Decided before its model is known."""

    enabled: bool = Field(default=True, description="Whether nesting and values are looked at.")
    max_body_bytes: Bytes = Field(
        default=64 * 2**20, ge=1024, description="Bytes of a body; always a limit, also when not enabled."
    )
    body_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="Seconds in which a body must arrive; always a limit."
    )
    header_timeout_s: Seconds = Field(
        default=75.0,
        gt=0,
        description="Seconds in which a new connection must say what it wants, and one that is kept open what it "
        "wants next: request line and headers. Always a limit; changed by a restart only.",
    )
    unread_timeout_s: Seconds = Field(
        default=120.0,
        gt=0,
        description="Seconds for which a client may take nothing of an answer that waits to be sent, before it counts "
        "as gone and its request is cancelled. Always a limit, where the system has it (Linux).",
    )
    max_depth: int = Field(
        default=64, ge=4, le=1000, description="Arrays and objects within each other in a body."
    )
    max_values: int = Field(
        default=4_000_000, ge=1000, description="Elements of arrays and objects in a body, over all of them."
    )


def check_body(body: bytes, limits: RequestLimits) -> None:
    """Check the bytes of one request.

    Raises BodyTooLarge for too many bytes, RequestError for too many levels or values, always with both numbers.
    """
    if len(body) > limits.max_body_bytes:
        raise BodyTooLarge(f"the body has {len(body)} bytes, more than {limits.max_body_bytes}")
    if not limits.enabled:
        return
    num_openings, num_commas = body.count(b"[") + body.count(b"{"), body.count(b",")
    if num_openings <= limits.max_depth and num_commas < limits.max_values:
        return  # most bodies: what stands in strings is counted too, and still within the limits
    num_values, depth = _measure(body)
    if num_values > limits.max_values:
        raise RequestError(f"the body holds {num_values} values, more than {limits.max_values}")
    if depth > limits.max_depth:
        raise RequestError(f"the body is nested {depth} levels deep, more than {limits.max_depth}")


def _measure(body: bytes) -> tuple[int, int]:
    """Return how many values a body holds, by its commas, and how deeply they are nested, strings left out."""
    # Pairs of backslashes go first: what is left before a quotation mark says that it is part of a string.
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    num_values, level, depth, in_string = 1, 0, 0, 0
    for start in range(0, len(marks), _BLOCK):
        block = np.frombuffer(marks, np.uint8, min(_BLOCK, len(marks) - start), start)
        # Odd from a string's first quotation mark up to its last; the sum may overflow, which leaves that as it is.
        num_quotes = np.cumsum(block == _QUOTE, dtype=np.uint8) + np.uint8(in_string)
        outside = block[num_quotes % 2 == 0]
        in_string = int(num_quotes[-1]) % 2
        num_values += int(np.count_nonzero(outside == _COMMA))
        if len(outside):
            levels = np.cumsum(_STEP[outside], dtype=np.int64) + level
            level, depth = int(levels[-1]), max(depth, int(levels.max()))
    return num_values, depth


__all__ = ["RequestLimits", "check_body"]
