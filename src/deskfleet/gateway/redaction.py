"""Keeps keys out of logs. Owns what a key looks like wherever it may be written; knows no key.

Keys are kept as digests only, so that a text cannot be searched for them. It is searched for how they are sent
(headers, in any spelling that a trace may show) and for how ours begin.
"""

from __future__ import annotations

import logging
import re

KEY_PREFIX = "dfk_"
"""How every key made here begins."""

HIDDEN = "[key]"

_OURS = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]+")
_HEADER = re.compile(
    r"(?i)((?:proxy-)?authorization|x-api-key|api-key|api_key)(['\"]?\s*[:=,]\s*b?['\"]?)((?:bearer|basic)\s+)?"
    r"[^\r\n'\"]+"
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s+)(?!realm=|\[key\])[^\s'\",]{4,}")


def redact(text: str) -> str:
    """Return `text` with everything hidden that may be a key."""
    text = _HEADER.sub(lambda found: f"{found[1]}{found[2]}{found[3] or ''}{HIDDEN}", text)
    return _OURS.sub(HIDDEN, _SCHEME.sub(rf"\1\2{HIDDEN}", text))


class KeyRedaction(logging.Filter):
    """Hides keys in every record that passes: in its message, and in the trace that goes with it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let the record pass, without keys."""
        message = record.getMessage()
        hidden = redact(message)
        if hidden != message:
            record.msg, record.args = hidden, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        return True


def redact_logs(*names: str) -> None:
    """Hide keys in what the named loggers say, once however often it is asked for.

    A filter of a logger sees only what is logged with that logger itself, none of its children.
    """
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(each, KeyRedaction) for each in logger.filters):
            logger.addFilter(KeyRedaction())


__all__ = ["HIDDEN", "KEY_PREFIX", "KeyRedaction", "redact", "redact_logs"]
