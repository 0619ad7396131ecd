"""Tags of tool-call markup, as they are found in what a model writes.

Owns the spelling of tags and how far one reaches. Knows nothing of what tags mean together (`calls.py`). Everything
here is a function of bytes from one place on, so that it does not matter how they arrived.

A tag is `<`, a marker, a name, attributes, `>`: `<｜DSML｜ invoke name="add">`. V4 writes no space before the name and
calls the block `tool_calls`, V4.1 writes a space and calls it `calls`; here both are read alike.

The marker is one token, and so is `</think>`. `SPELLED` also takes their text for them, cut anywhere, because not every
engine cuts as the tokenizer does. `EXACT` takes the tokens alone: a model that was shown markup in its prompt, by a
file or a web page, may quote it, and text must not become a call.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

MORE: Final = "more"
"""Whether a tag begins here depends on bytes that are not there yet."""

_BARS = ("｜", "｜｜", "‖", "|", "||")
"""Vertical lines that models have been seen to write. The first is the publisher's."""

_SECRET = secrets.token_hex(8)

EXACT_MARKER = f"｜DSML{_SECRET}｜"
"""What stands for the marker's token, where its text does not count."""

EXACT_THOUGHT_END = f"</think{_SECRET}>"
"""The same for `</think>`."""


class Markers(NamedTuple):
    """What tags begin with, and what begins and ends a thought."""

    openers: tuple[bytes, ...]
    closers: tuple[bytes, ...]
    thought_begin: bytes
    thought_end: bytes

    @property
    def all(self) -> tuple[bytes, ...]:
        """Everything that a `<` may be the beginning of."""
        return (*self.openers, *self.closers, self.thought_begin, self.thought_end)


SPELLED = Markers(
    tuple(f"<{bar}DSML{bar}".encode() for bar in _BARS),
    tuple(f"</{bar}DSML{bar}".encode() for bar in _BARS),
    b"<think>",
    b"</think>",
)
EXACT = Markers(
    (f"<{EXACT_MARKER}".encode(),),
    (f"</{EXACT_MARKER}".encode(),),
    f"<think{_SECRET}>".encode(),
    EXACT_THOUGHT_END.encode(),
)
_LONGEST_MARKER = max(len(marker) for markers in (SPELLED, EXACT) for marker in markers.all)
_MAX_HEAD_BYTES = 4096
"""What follows a marker and has no end within so many bytes is no tag."""

_CANONICAL_BAR = b"<\xef\xbd\x9c", b"</\xef\xbd\x9c"

_NAME = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_")
_BLANK = frozenset(b" \t")
_CALLS = frozenset({"calls", "tool_calls", "function_calls"})

TagName = Literal["calls", "invoke", "parameter", "think", "other"]


class Tag(NamedTuple):
    """One tag. `num_bytes` is its length; a tag without its `>` reaches to its last complete part."""

    num_bytes: int
    name: TagName
    is_closing: bool
    is_empty: bool
    attributes: Mapping[str, str]


def read_tag(data: bytes, start: int, markers: Markers) -> Tag | Literal["more"] | None:
    """Return the tag that begins with the `<` at `start`, None when none does, MORE when that cannot be told yet."""
    for spellings, is_closing in ((markers.openers, False), (markers.closers, True)):
        for marker in spellings:
            if data.startswith(marker, start):
                return _read_head(data, start, start + len(marker), is_closing)
    for marker, is_closing in ((markers.thought_begin, False), (markers.thought_end, True)):
        if data.startswith(marker, start):
            return Tag(len(marker), "think", is_closing, False, {})
    beginning = data[start : start + _LONGEST_MARKER]
    if any(marker.startswith(beginning) for marker in markers.all):
        return MORE
    return None


def as_shown(text: str) -> str:
    """Return text with the tokens' own spellings in the place of what stands for them."""
    return (
        text.replace(EXACT_MARKER, "｜DSML｜").replace(EXACT_THOUGHT_END, "</think>")
        if _SECRET in text
        else text
    )


def is_markup(rest: bytes, markers: Markers) -> bool:
    """Whether `rest`, what MORE was said of when an answer ended, is the beginning of a tag and not of text.

    A lone `<` or `</` is text. So is `<|`, which programs are full of; the publisher's bar is not.
    """
    return rest.startswith(_CANONICAL_BAR) or rest.startswith((*markers.openers, *markers.closers))


def _read_head(data: bytes, start: int, at: int, is_closing: bool) -> Tag | Literal["more"]:
    limit = min(len(data), at + _MAX_HEAD_BYTES)
    is_cut = limit == len(data)  # whether what comes to the limit may go on
    name_at = at + 1 if data[at : at + 1] == b" " else at
    name_end = _run(data, name_at, limit, _NAME)
    if name_end == limit and is_cut:
        return MORE
    name = _tag_name(data[name_at:name_end])
    attributes: dict[str, str] = {}
    end = name_end  # of the last complete part
    while True:
        here = _run(data, end, limit, _BLANK)
        if here == limit:
            return MORE if is_cut else Tag(end - start, name, is_closing, False, attributes)
        if data[here : here + 1] == b">":
            return Tag(here + 1 - start, name, is_closing, False, attributes)
        if data[here : here + 2] == b"/>":
            return Tag(here + 2 - start, name, is_closing, True, attributes)
        if data[here : here + 1] == b"/" and here + 1 == limit and is_cut:
            return MORE
        attribute = _read_attribute(data, here, limit, is_cut) if here > end else None
        if attribute == MORE:
            return MORE
        if attribute is None:
            return Tag(end - start, name, is_closing, False, attributes)
        key, value, end = attribute
        attributes[key] = value


def _read_attribute(
    data: bytes, at: int, limit: int, is_cut: bool
) -> tuple[str, str, int] | Literal["more"] | None:
    """`key="value"` at `at` and where it ends."""
    key_end = _run(data, at, limit, _NAME)
    if key_end == at:
        return None
    if key_end == limit:
        return MORE if is_cut else None
    if data[key_end : key_end + 1] != b"=":
        return None
    if key_end + 1 == limit:
        return MORE if is_cut else None
    quote = data[key_end + 1 : key_end + 2]
    if quote not in (b'"', b"'"):
        return None
    end = data.find(quote, key_end + 2, limit)
    line_end = data.find(b"\n", key_end + 2, limit if end < 0 else end)
    if line_end >= 0:
        return None
    if end < 0:
        return MORE if is_cut else None
    value = data[key_end + 2 : end].decode("utf-8", "replace")
    return data[at:key_end].decode("ascii"), value, end + 1


def _run(data: bytes, at: int, limit: int, kind: frozenset[int]) -> int:
    """Where the bytes of one kind that begin at `at` end."""
    while at < limit and data[at] in kind:
        at += 1
    return at


def _tag_name(name: bytes) -> TagName:
    match name.decode("ascii"):
        case "invoke":
            return "invoke"
        case "parameter":
            return "parameter"
        case known if known in _CALLS:
            return "calls"
        case _:
            return "other"


__all__ = [
    "EXACT",
    "EXACT_MARKER",
    "EXACT_THOUGHT_END",
    "MORE",
    "SPELLED",
    "Markers",
    "Tag",
    "TagName",
    "as_shown",
    "is_markup",
    "read_tag",
]
