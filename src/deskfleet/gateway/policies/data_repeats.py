"""Which repetitions are data rather than a loop. Owns that judgement; knows text, nothing of tokens or requests.

What a model was asked for may repeat itself: forty equal rows of a table, an array of two hundred zeros, closing
braces, a drawing. A loop says the same words again and again. They differ in what is repeated, so the repeated text is
looked at, together with the line it stands on:

    data      no letters: digits, brackets, punctuation of data, box and block drawing; also 0x1f, ff, null, true, NaN
    table     rows with cells between bars, or between tabs, commas or semicolons without a space after them
    json      elements of an array, or openings of nested objects and arrays
    markup    tags, or lines that are tags
    base64    a long word of that alphabet which did not begin with the repetition
    code      anything inside a fenced block, or inside the arguments of a tool call
    asked     all of its words, in this order, stand in the prompt: "write this line a hundred times"

Never excused: white space alone, and the model's own control tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property

_WORDS_OF_DATA = re.compile(
    r"(?<![^\W_])(?:0[xX][0-9a-fA-F]+|[0-9a-fA-F]{2}|null|None|nil|true|false|True|False|NaN|nan|inf)(?![^\W_])"
)
_DATA = re.compile(r"[\s0-9,.;:|+\-=_*#~^<>/\\()\[\]{}'\"`%$&@°\u2500-\u25ff\u2800-\u28ff]+")
"""Box and block drawing, geometric shapes and Braille patterns are what drawings are made of."""

_PART_OF_WORD = re.compile(r"^\w+|\w+$")
_CONTROL = re.compile(r"<｜|</?think>")
_BAR_ROW = re.compile(r"[\s>*+-]*[|│].*[|│]")
_OPEN_ROW = re.compile(r"[^|]+ \| [^|]+( \| [^|]+)+")
_SEPARATED_ROW = re.compile(r"[^\t]+(\t[^\t]*)+|[^,]*(,[^,\s][^,]*|,){2,}|[^;]*(;[^;\s][^;]*|;){2,}")
_MARKUP_LINE = re.compile(r"\s*<[a-zA-Z/!][^<>]*>(.*>)?\s*")
_TAGS = re.compile(r"(<[a-zA-Z/!][^<>]*>[^<>]*)+")
_OPENINGS = re.compile(r'([\[{(]\s*("(?:[^"\\]|\\.)*"\s*:\s*)?)+')
_BASE64_LINE = re.compile(r"[A-Za-z0-9+/_-]{40,}={0,2}")
_NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/_-]")
_MIXED = (re.compile("[a-z]"), re.compile("[A-Z]"), re.compile("[0-9]"))
_SENTENCE_END = (".", "!", "?", "。", "！", "？")
_WORD = re.compile(r"\w+")
_DECODER = json.JSONDecoder()
_COMMA = re.compile(r"\s*,\s*")

_MAX_STARTS = 32
"""Places within a unit where an element of an array is looked for."""

_MAX_ASKED_WORDS = 256
"""Longer texts are not looked for in the prompt."""

_MIN_BASE64 = 64
"""Shorter words are never taken for base64."""


@dataclass(frozen=True)
class Surroundings:
    """Where a repetition stands: the text of its line so far, whether that is code, and the end of the prompt."""

    line: str = ""
    in_code: bool = False
    prompt: str = ""

    @cached_property
    def prompt_words(self) -> str:
        """The prompt's words, one space around each."""
        return _spaced(self.prompt)


def kind_of_data(unit: str, surroundings: Surroundings) -> str | None:
    """Return what kind of data repeats when `unit` does, as named above, or None when it is a loop.

    `unit` may begin anywhere within what is repeated: in the middle of a word, a row, an element.
    """
    if not unit.strip() or _CONTROL.search(unit):
        return None
    if surroundings.in_code:
        return "code"
    if _is_repeated_data(unit):
        return "data"
    if "\n" in unit:
        # The lines between the first and the last end of a line of three copies hold every line of one copy.
        lines = [line for line in (unit * 3).split("\n")[1:-1] if line.strip()]
        kind = next((kind for line in lines if (kind := kind_of_line(line)) is not None), None)
        if kind is not None and all(kind_of_line(line) is not None for line in lines):
            return kind
    else:
        kind = _kind_within_line(unit, surroundings.line)
        if kind is not None:
            return kind
    if _is_json(unit):
        return "json"
    return "asked" if is_asked_for(unit, surroundings) else None


def kind_of_line(line: str) -> str | None:
    """Return what kind of data a whole line is, or None when it is prose."""
    stripped = line.strip()
    if not stripped or _CONTROL.search(stripped):
        return None
    if _is_data(stripped):
        return "data"
    if _is_row(stripped):
        return "table"
    if _MARKUP_LINE.fullmatch(stripped):
        return "markup"
    if _BASE64_LINE.fullmatch(stripped):
        return "base64"
    return "json" if _is_json_line(stripped) else None


def is_asked_for(unit: str, surroundings: Surroundings) -> bool:
    """Whether the prompt has the words of `unit`, beginning at any of them. Without words, nothing was asked for."""
    # A unit that begins within a word ends within it, too: the middle copy of three has all words whole.
    tripled = _WORD.findall((unit * 3).casefold())
    size = len(tripled) // 3
    if not 0 < size <= _MAX_ASKED_WORDS:
        return False
    middle = tripled[size : 3 * size]
    prompt = surroundings.prompt_words
    return any(f" {' '.join(middle[first : first + size])} " in prompt for first in range(size))


def _is_data(text: str) -> bool:
    return _DATA.fullmatch(_WORDS_OF_DATA.sub("0", text)) is not None


def _is_repeated_data(unit: str) -> bool:
    # A unit may begin and end within a word: then the words between two copies are looked at, which are whole.
    whole = _PART_OF_WORD.sub("", unit * 3)
    return _is_data(unit) or (bool(whole.strip()) and _is_data(whole))


def _is_row(line: str) -> bool:
    if _BAR_ROW.fullmatch(line) and len(line) > 2:
        return True
    if _OPEN_ROW.fullmatch(line):
        return True
    return not line.endswith(_SENTENCE_END) and _SEPARATED_ROW.fullmatch(line) is not None


def _is_json_line(line: str) -> bool:
    """Whether a line is one or several elements of an array: objects, arrays and what stands in them."""
    text = line.removesuffix(",")
    if text[:1] not in ("{", "[", '"'):
        return False
    try:
        json.loads(f"[{text}]")
    except (ValueError, RecursionError):
        return False
    return True


def _kind_within_line(unit: str, line: str) -> str | None:
    """Return the kind of data of a unit without an end of line."""
    if "|" in unit and line.lstrip().startswith("|"):
        return "table"
    doubled = unit * 2
    start = doubled.find("<")
    if 0 <= start < len(unit) and _TAGS.fullmatch(doubled[start : start + len(unit)]):
        return "markup"
    word = _NOT_BASE64.split(line.rstrip("="))[-1]
    before = word[: len(word) - _repeated_length(word, len(unit))]
    is_base64 = len(word) >= _MIN_BASE64 and len(before) >= 16 and all(kind.search(before) for kind in _MIXED)
    return "base64" if is_base64 else None


def _repeated_length(text: str, period: int) -> int:
    """Return how many characters at the end of `text` repeat with `period`, at least one copy."""
    length = min(period, len(text))
    while length < len(text) and text[-length - 1] == text[-length - 1 + period]:
        length += 1
    return length


def _is_json(unit: str) -> bool:
    """Whether copies of `unit` are elements of a JSON array, or openings of nested objects."""
    tripled = unit * 3
    starts = [match.start() for match in re.finditer(r'[\[{"]', tripled[: len(unit)])][:_MAX_STARTS]
    for start in starts:
        if _OPENINGS.fullmatch(tripled[start : start + len(unit)]):
            return True
        place = start
        while place < start + len(unit):
            try:
                _, end = _DECODER.raw_decode(tripled, place)
            except (ValueError, RecursionError):
                break
            comma = _COMMA.match(tripled, end)
            if comma is None:
                break
            place = comma.end()
        if place == start + len(unit):
            return True
    return False


def _spaced(text: str) -> str:
    return f" {' '.join(_WORD.findall(text.casefold()))} "


__all__ = ["Surroundings", "is_asked_for", "kind_of_data", "kind_of_line"]
