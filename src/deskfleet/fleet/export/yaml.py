"""Values as YAML, in the part of it that every reader agrees on: block mappings and lists, strings always quoted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

# What YAML does not let stand in a quoted string, or takes for the end of a line.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def to_yaml(value: object) -> str:
    """Return a mapping or a list as lines of YAML. Keys are strings, values also numbers, booleans and None."""
    return "\n".join(_lines(value, 0)) + "\n"


def scalar(value: object) -> str:
    """Return one value. Strings are quoted as in JSON, which every YAML reader takes for the same string."""
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _lines(value: object, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        for name, each in value.items():
            key = (
                name
                if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", name) and name not in _WORDS
                else scalar(name)
            )
            if isinstance(each, dict | list) and each:
                yield f"{pad}{key}:"
                yield from _lines(each, depth + 1)
            else:
                yield f"{pad}{key}: {scalar(each)}"
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, dict | list) and each:
                first, *rest = _lines(each, depth + 1)
                yield f"{pad}- {first.lstrip()}"
                yield from rest
            else:
                yield f"{pad}- {scalar(each)}"


_WORDS = frozenset({"y", "Y", "n", "N"}) | {
    form
    for word in ("yes", "no", "on", "off", "true", "false", "null")
    for form in (word, word.upper(), word.title())
}
"""Names that some readers take for a truth or for nothing."""


__all__ = ["scalar", "to_yaml"]
