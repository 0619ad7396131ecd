"""What the HTTP library logs. Owns which of its lines are left out; knows nothing of requests.

It writes a trace for whatever is no HTTP: anybody who can connect could fill the log with it. Such bytes are answered
with 400, which is all there is to say.
"""

from __future__ import annotations

import logging

from aiohttp.http import HttpProcessingError

_LOGGER = logging.getLogger("aiohttp.server")


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def leave_out_malformed() -> None:
    """Log nothing of bytes that are no HTTP. May be called again."""
    _LOGGER.addFilter(_is_worth_a_line)


__all__ = ["leave_out_malformed"]
