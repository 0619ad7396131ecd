"""Tables and fences of Markdown. Owns escaping; knows no content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A table with an empty line after it; columns `right` are aligned to the right."""
    rules = ["---:" if place in right else "---" for place in range(len(head))]
    lines = [_line(head), "|" + "|".join(rules) + "|", *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def fenced(text: str, language: str = "") -> str:
    """A block of code with an empty line after it."""
    return f"```{language}\n{text}\n```\n"


__all__ = ["fenced", "table"]
