"""Writes what is measured into docs/concepts/pocket.md, and its pictures, from pocket/log: `python -m pocket.page`.

Owns which file fills which part: of each kind the latest by name. Nothing between the marks is written by hand; with
--check it only says what is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pocket.accept import as_markdown as acceptance_table
from pocket.answer import comparison, read_reports
from pocket.curves import pictures, read
from pocket.variants import as_markdown as variants_table

ROOT = Path(__file__).parents[1]
LOG = ROOT / "pocket" / "log"
PAGE = ROOT / "docs" / "concepts" / "pocket.md"
_NOTHING = "Not measured yet.\n"


def latest(directory: Path, kind: str) -> Path | None:
    """The newest file DATE-`kind`.json of a directory, by its name."""
    return max(directory.glob(f"*-{kind}.json"), key=lambda path: path.name, default=None)


def parts(log: Path) -> dict[str, str]:
    """The generated parts of the page by their names."""
    return {
        "acceptance": _acceptance(latest(log, "accept")),
        "variants": _variants(latest(log, "variants")),
        "side by side": _side_by_side(latest(log, "ways"), latest(log, "eval")),
    }


def _acceptance(path: Path | None) -> str:
    if path is None:
        return _NOTHING
    found = _json(path)
    told = acceptance_table(found["lines"])
    drafts = found["lines"].get("drafts", {}).get("detail", {}).get("by_type")
    if drafts:
        rows = [
            f"| {kind} | {each['mean_accepted']} | {each['speed_ratio']} |" for kind, each in drafts.items()
        ]
        told += (
            "\n| text | drafts accepted, of 5 | times as fast |\n|---|---:|---:|\n" + "\n".join(rows) + "\n"
        )
    cells = found["lines"].get("needle", {}).get("detail", {}).get("cells")
    if cells:
        told += "\n" + _needle(cells)
    whose = f"SHA-256 of configuration, index and shards, one after the other: `{found['sha256']}`."
    return f"{told}\nFrom `pocket/log/{path.name}`, {_provenance(found)}. {whose}\n"


def _needle(cells: list[Mapping[str, Any]]) -> str:
    """Found needles by length and depth."""
    depths = sorted({cell["depth"] for cell in cells})
    lines = [
        f"| tokens | {' | '.join(f'{depth:.0%}' for depth in depths)} |",
        f"|---:|{'---:|' * len(depths)}",
    ]
    for length in sorted({cell["num_tokens"] for cell in cells}):
        found = {c["depth"]: f"{c['right']} of {c['asked']}" for c in cells if c["num_tokens"] == length}
        lines.append(f"| {length:,} | {' | '.join(found.get(depth, '') for depth in depths)} |")
    return "Needles found, by length of the text and depth in it:\n\n" + "\n".join(lines) + "\n"


def _variants(path: Path | None) -> str:
    if path is None:
        return _NOTHING
    found = _json(path)
    return f"{variants_table(found['variants'])}\nFrom `pocket/log/{path.name}`, {_provenance(found)}.\n"


def _side_by_side(ways: Path | None, exported: Path | None) -> str:
    reports: dict[str, Any] = {}
    for path in (ways, exported):
        if path is not None:
            reports |= read_reports(path)
    if len(reports) < 2:
        return _NOTHING
    return comparison(reports)


def _provenance(found: Mapping[str, Any]) -> str:
    come_from = found["provenance"]
    commit = "outside a checkout" if come_from["commit"] is None else f"commit `{come_from['commit'][:12]}`"
    dirty = " with uncommitted changes" if come_from["is_dirty"] else ""
    return (
        f"`{come_from['command']}` on {come_from['date'][:10]}, {commit}{dirty}; {come_from['cpu']}, "
        f"{come_from['num_cores']} cores"
    )


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def filled(page: str, made: Mapping[str, str]) -> str:
    """The page with every marked part replaced. Raises ValueError when it has no such mark."""
    for name, text in made.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has no part {name!r}")
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def files(log: Path, page: Path) -> dict[Path, str]:
    """Every generated file with its text."""
    newest = sorted(log.glob("*.jsonl"))[-1:]  # one file a training
    made = {page: filled(page.read_text(encoding="utf-8"), parts(log))}
    return made | {page.parent / name: text for name, text in pictures(read(newest)).items()}


def main(arguments: list[str] | None = None) -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(prog="python -m pocket.page", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 when something is out of date"
    )
    given = parser.parse_args(arguments)
    old = [
        path
        for path, text in files(LOG, PAGE).items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in old:
        if given.check:
            print(f"{path.relative_to(ROOT)} is out of date: python -m pocket.page")
        else:
            path.write_text(files(LOG, PAGE)[path], encoding="utf-8")
            print(path.relative_to(ROOT))
    if old and given.check:
        sys.exit(1)


if __name__ == "__main__":
    main()


__all__ = ["files", "filled", "latest", "main", "parts"]
