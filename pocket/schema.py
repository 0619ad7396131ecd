"""Whether JSON text is valid by a schema of the kind that Pocket is asked to follow. Owns that subset, and no more.

Objects with `properties`, `required` and `additionalProperties`, arrays with `items`, and the plain types with `enum`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
_KNOWN = {"type", "properties", "required", "additionalProperties", "items", "enum", "description"}


def is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether `text` is JSON, each name once, valid by `schema`. Raises ValueError for a schema beyond these."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return False
    return _fits(value, schema)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name comes twice")
    return dict(pairs)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if unknown := set(schema) - _KNOWN:
        raise ValueError(f"{sorted(unknown)[0]} is not among {sorted(_KNOWN)}")
    kind = schema["type"]
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if value not in schema.get("enum", [value]):
        return False
    if isinstance(value, list):
        return all(_fits(item, schema["items"]) for item in value)
    if not isinstance(value, dict):
        return True
    properties: Mapping[str, Any] = schema.get("properties", {})
    if not set(schema.get("required", ())) <= value.keys():
        return False
    if schema.get("additionalProperties", True) is False and not value.keys() <= properties.keys():
        return False
    return all(_fits(item, properties[name]) for name, item in value.items() if name in properties)


__all__ = ["is_valid"]
