"""The arguments of one call, put together so that they are JSON whatever the model wrote.

Owns the canonical spelling of parameters, and what a value is: text, JSON, or text that was meant to be JSON. Knows
nothing of where values begin and end (`calls.py`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from deskfleet.gateway.protocols.markup import Tag, as_shown

MARKER = f"\ufdd0{secrets.token_hex(8)}\ufdd0"
"""What stands in the place of `｜DSML｜` in canonical markup."""

Schema = Mapping[str, Any]
"""A tool's parameters as JSON Schema."""

_MAX_JSON_DEPTH = 100  # readers of JSON differ beyond it


class Call:
    """The call that is being read, and its latest parameter."""

    def __init__(self, name: str, schema: Schema | None = None) -> None:
        self.name = name
        self.is_shown = False
        self.is_empty = True  # but for blanks
        self.names: set[str] = set()
        self.held = bytearray()
        self.is_text = False
        self.is_repeated = False
        self.was_repaired = False
        self._properties: Schema = (schema or {}).get("properties") or {}
        self._parameter = ""
        self._kind: str | None = None

    def begin_value(self, tag: Tag) -> None:
        """Take note of a parameter whose value follows."""
        self._parameter = tag.attributes["name"]
        self._kind = tag.attributes.get("string")
        self.is_repeated = self._parameter in self.names
        self.names.add(self._parameter)
        self.is_empty = False
        self.held.clear()
        self.was_repaired = False
        declared = self._properties.get(self._parameter)
        if self._kind not in ("true", "false") and isinstance(declared, Mapping):
            self._kind = "true" if declared.get("type") == "string" else None
        self.is_text = self._kind == "true" and not self.is_repeated

    def opening(self) -> str:
        """The canonical tag before a value that is text."""
        return _opening(self._parameter, is_text=True)

    def end_held_value(self) -> str:
        """The parameter whose value was held, in the canonical spelling."""
        if self.is_repeated:
            return ""
        text = as_shown(self.held.decode("utf-8", "replace"))
        value = _as_json(text)
        self.was_repaired = self._kind == "false" and value != text
        return _parameter(self._parameter, text if value is None else value, is_text=value is None)

    def body(self) -> str:
        """The parameters that a JSON object in their place holds; text that is none is one parameter."""
        text = as_shown(self.held.decode("utf-8", "replace")).strip()
        members = _members(text)
        if members is None:
            return _parameter("arguments", text, is_text=True)
        return "".join(
            _parameter(name, value, is_text=True)
            if isinstance(value, str)
            else _parameter(name, json.dumps(value, ensure_ascii=False), is_text=False)
            for name, value in members.items()
        )


def _opening(name: str, *, is_text: bool) -> str:
    return f'<{MARKER} parameter name="{_spelled(name)}" string="{"true" if is_text else "false"}">'


def _parameter(name: str, value: str, *, is_text: bool) -> str:
    return f"{_opening(name, is_text=is_text)}{value}</{MARKER} parameter>\n"


def _spelled(name: str) -> str:
    """A parameter's name for the publisher's parser, which copies it into JSON unescaped, and misreads blanks."""
    return "".join(
        f"\\u{ord(char):04x}" if char in '"\\' or char.isspace() or ord(char) < 32 else char for char in name
    )


def _as_json(text: str) -> str | None:
    """`text` as one strict JSON value, with raw control characters in its strings escaped; None when it is none."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        is_exact = True
    except RecursionError:
        return None
    except ValueError:
        try:
            value = json.loads(text, strict=False, parse_constant=_refuse_constant)
            is_exact = False
        except (ValueError, RecursionError):
            return None
    if _depth(value) > _MAX_JSON_DEPTH:
        return None
    try:
        told = json.dumps(value, ensure_ascii=False, allow_nan=False)
        told.encode()
    except ValueError:  # half a surrogate pair, or 1e999: JSON to some readers, an error to others
        return None
    return text if is_exact else told


def _members(text: str) -> dict[str, Any] | None:
    told = _as_json(text)
    value = None if told is None else json.loads(told)
    return value if isinstance(value, dict) and "" not in value else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _depth(value: Any) -> int:
    """How deep arrays and objects lie in each other, no further than it matters."""
    depth = 0
    level = [value]
    while level and depth <= _MAX_JSON_DEPTH:
        level = [
            item
            for node in level
            if isinstance(node, list | dict)
            for item in (node.values() if isinstance(node, dict) else node)
        ]
        depth += 1
    return depth


__all__ = ["MARKER", "Call", "Schema"]
