"""Real text in any amount: documentation and source code of the Python that runs this, in another order each time.

Owns where text comes from and that no piece of it comes twice before all has come once. Nothing is shipped or
downloaded: the text is the interpreter's (PSF-2.0), or a file that the user names. Repeating one word instead would ask
for the same Engram rows and the same experts again and again, and inflate prefill by 9 to 42 %.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from deskfleet.errors import ConfigError

_PIECE_CHARACTERS = 500
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
_FILLER = "the "


class Corpus:
    """Pieces of text of some 500 characters each, a few lines, so that any prompt is a mixture.

    `name` and `digest` say which text it was. `num_passes` counts how often all of it has been handed out: from 1 on,
    a prompt repeats text of an earlier one.
    """

    def __init__(self, name: str, pieces: list[str], *, seed: int = 0) -> None:
        """Raises ConfigError when there is no text."""
        if not pieces:
            raise ConfigError(f"{name} holds no text", hint="name a text file with --text")
        self.name = name
        self.digest = hashlib.sha256("\n".join(pieces).encode()).hexdigest()[:12]
        self.num_passes = 0
        self._pieces = pieces
        self._order = Random(seed)
        self._left = self._shuffled()

    @classmethod
    def of_interpreter(cls, *, seed: int = 0) -> Corpus:
        """Documentation and source code of the standard library. Raises ConfigError where it was not installed."""
        return cls(
            f"the standard library of Python {platform.python_version()}", list(_of_interpreter()), seed=seed
        )

    @classmethod
    def of_file(cls, path: Path, *, seed: int = 0) -> Corpus:
        """The text of a file. Raises ConfigError when it cannot be read or is empty."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read text from {path}: {error}") from error
        return cls(path.name, list(_cut(text)), seed=seed)

    def take(self, num_characters: int) -> str:
        """Return text of about so many characters that has not been handed out yet, or for the longest time not."""
        taken: list[str] = []
        length = 0
        while length < num_characters:
            if not self._left:
                self.num_passes += 1
                self._left = self._shuffled()
            taken.append(self._left.pop())
            length += len(taken[-1]) + 2
        return "\n\n".join(taken)[: max(num_characters, 1)]

    def _shuffled(self) -> list[str]:
        return self._order.sample(self._pieces, len(self._pieces))


def filler(num_characters: int) -> str:
    """Return one word over and over: only for comparing with figures that were measured, and inflated, that way."""
    return (_FILLER * (num_characters // len(_FILLER) + 1))[: max(num_characters, 1)]


@cache
def _of_interpreter() -> tuple[str, ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not _LEFT_OUT & set(path.parts)]
    return tuple(piece for path in files for piece in _cut(_read(path)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _cut(text: str) -> Iterator[str]:
    """Cut at line ends, so that words stay whole."""
    lines: list[str] = []
    length = 0
    for line in text.splitlines():
        lines.append(line)
        length += len(line) + 1
        if length >= _PIECE_CHARACTERS:
            yield "\n".join(lines)
            lines, length = [], 0
    if length > _PIECE_CHARACTERS // 4:
        yield "\n".join(lines)


__all__ = ["Corpus", "filler"]
