"""Fails unless CHANGELOG.md's first version is the package's: a release without its notes is not a release."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from deskfleet import __version__

HEADING = re.compile(r"^## \[?v?(\d+\.\d+\.\d+[^\]\s]*)", re.MULTILINE)


def run(path: Path) -> int:
    """Return 0 when the first version heading in `path` is the package's version."""
    if not path.exists():
        print(f"{path.name} is missing", file=sys.stderr)
        return 1
    found = HEADING.search(path.read_text(encoding="utf-8"))
    if found is None or found[1] != __version__:
        at_top = "no version" if found is None else found[1]
        print(f"{path.name} has {at_top} at the top; the package is {__version__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(Path(__file__).parents[1] / "CHANGELOG.md"))
