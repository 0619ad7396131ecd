"""What is wrong with a text as text: nothing in it, one token over and over, another script or language, markup.

Owns the words for it. Knows neither questions nor right answers: a text without a fault may still be wrong.
"""

from __future__ import annotations

import re
import unicodedata

_MARKUP = re.compile(r"</?think>|<\|[\w ]+\|>|<｜|｜>|｜DSML｜|<tool_call>")
_REPEATED = re.compile(r"(.{1,16}?)\1{7,}", re.DOTALL)
_COMMON_WORDS = """
a about after all an and are as at be because been before but by can did do for from had has have he her him his i if in
into is it its near no not of on one or said saw she so that the their them then there they this to too up very was we
went were what when which who will with you
"""
_COMMON = frozenset(_COMMON_WORDS.split())
_MIN_WORDS = 12
_MIN_COMMON_SHARE = 0.12  # English prose has 0.4 to 0.6 of them, Latin-written languages below 0.05
_MAX_FOREIGN_SHARE = 0.2
_SHOWN = 60


def shown(text: str) -> str:
    """Return a text as one short quoted line."""
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 20] + " ... " + text[-15:])


def fault_in(text: str) -> str | None:
    """Return what is wrong with an English text as text, in words that follow "the answer is"; None for nothing."""
    stripped = text.strip()
    if not stripped:
        return "empty"
    if (markup := _MARKUP.search(stripped)) is not None:
        return f"full of control markup: {markup[0]!r} in {shown(stripped)}"
    if "\ufffd" in stripped:
        return f"full of broken characters, bytes that are no text: {shown(stripped)}"
    if (control := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", stripped)) is not None:
        return f"full of control characters: {control[0]!r} in {shown(stripped)}"
    if (repeated := _constant(stripped)) is not None:
        return f"a constant token: {repeated!r} over and over"
    letters = [c for c in stripped if c.isalpha()]
    foreign = [c for c in letters if not unicodedata.name(c, "").startswith("LATIN")]
    if len(foreign) > _MAX_FOREIGN_SHARE * len(letters):
        script = unicodedata.name(foreign[0], "unknown").split()[0]
        return f"in the wrong language: {script} letters in {shown(stripped)}"
    words = re.findall(r"[^\W\d_]+", stripped.lower())
    common = sum(word in _COMMON for word in words)
    if len(words) >= _MIN_WORDS and common < _MIN_COMMON_SHARE * len(words):
        return f"in the wrong language: no English in {shown(stripped)}"
    return None


def _constant(text: str) -> str | None:
    """Return what most of a text repeats; counting and lists of numbers do not repeat."""
    found = _REPEATED.search(text)
    if found is None or len(found[0]) < len(text) / 2:
        return None
    return found[1].strip() or found[1]


def first_difference(one: str, other: str) -> str:
    """Return where two texts part, as words."""
    at = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return f"they part at character {at}: {shown(one[at : at + 20])} and {shown(other[at : at + 20])}"


__all__ = ["fault_in", "first_difference", "shown"]
