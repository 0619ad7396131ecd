"""Writes the pages of docs/reference from what they describe. With --check, only says which are out of date.

    python tools/gen_docs.py [--check]

cli.md is what each verb's --help prints, environment.md the registry in deskfleet.env, errors.md the tree in
deskfleet.errors, chat-completions.md the tables of deskfleet.gateway.fields, benchmarks.md and engram-reader.md (with
its picture) the files in bench/results, planner.md the text and figures of deskfleet.planner.evidence. ARCHITECTURE.md
carries the tree of modules, each with the first sentence of its docstring. Nothing of this is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from deskfleet import env, errors
from deskfleet.bench.engram import is_reader_result, latest, render_page, render_plot
from deskfleet.bench.report import render_report
from deskfleet.cli.app import VERBS, main
from deskfleet.errors import DeskfleetError
from deskfleet.gateway import fields
from deskfleet.planner.evidence import page as planner_evidence

ROOT = Path(__file__).parents[1]
REFERENCE = Path("docs/reference")
WIDTH = "100"
NOTICE = "<!-- Made by tools/gen_docs.py (make fix). Changes belong into what it describes. -->\n"

COMMANDS = (
    *((verb,) for verb in VERBS),
    ("bench", "engine"),
    ("bench", "engram"),
    ("bench", "prefix"),
    ("bench", "speculation"),
)


def cli_page() -> str:
    """Return the help of every verb, as printed 100 columns wide."""
    parts = ["# Command line\n", NOTICE, _fenced(_help())]
    for command in sorted(COMMANDS):
        parts += [f"## deskfleet {' '.join(command)}\n", _fenced(_help(*command))]
    parts += [
        "## Exit codes\n",
        "| code | meaning |\n|---:|---|\n"
        "| 0 | done; for `serve` and `demo` also: stopped by Ctrl-C or SIGTERM |\n"
        "| 1 | the verdict is no: it does not fit, a pack is the wrong one, faults were found |\n"
        "| 2 | bad input: a flag, a variable, a file's content |\n"
        "| 3 | a machine or a file failed: a checkpoint is damaged, a port is taken, a rank died |\n"
        "| 130, 143 | interrupted by Ctrl-C, by SIGTERM |\n",
        "## Output\n",
        "Results go to stdout, everything else to stderr. An error is a line `error: ...`, then a line `hint: ...`\n"
        "where there is something to do about it. With `--json` an error is also an object on stdout,\n"
        '`{"error": {"type", "message", "hint", "exit_code"}}`. `NO_COLOR` is obeyed.\n',
    ]
    return "\n".join(parts)


def environment_page() -> str:
    """Return the table of variables."""
    rows = [
        f"| `{variable.name}` | {_ticked(variable.values) or 'any'} | {_ticked([variable.default]) or 'none'} "
        f"| {variable.meaning} |"
        for variable in env.VARIABLES
    ]
    return "\n".join(
        [
            "# Environment variables\n",
            NOTICE,
            f"A variable that starts with `{env.PREFIX}` and is not listed here is an error.\n",
            "| variable | values | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def errors_page() -> str:
    """Return the tree of errors: names indented by descent, exit codes, first lines of their descriptions."""
    rows = [
        f"| {'&emsp;' * depth}`{kind.__name__}` | {kind.exit_code} | {_first_line(kind)} |"
        for kind, depth in _descend(DeskfleetError, 0)
    ]
    return "\n".join(
        [
            "# Errors\n",
            NOTICE,
            "Everything deskfleet raises on purpose, from `deskfleet.errors`. The exit code is the command's.\n",
            "| error | exit code | meaning |",
            "|---|---:|---|",
            *rows,
            "",
        ]
    )


def benchmarks_page() -> str:
    """Return the tables of every file in bench/results."""
    report = render_report([path for path in _results() if not is_reader_result(path)])
    intro = (
        "Each table comes from one file in `bench/results`. Times on shared machines are worth little; the ratios\n"
        "between rows of one table were measured side by side. `make bench` adds a file.\n"
    )
    return "\n".join(["# Benchmarks\n", NOTICE, intro, report])


def engram_reader_page() -> str:
    """Return targets and rates of the latest measurement of the row store."""
    intro = (
        "How fast rows come from the disk, beside fio and the ways of reading that people use today. fio reads\n"
        "blocks of 4 KiB from the same files, directly, as many as the lookup needs and as many at once: a batch is\n"
        "over when its last read is. Every ratio was measured side by side in one run; times on shared machines are\n"
        "worth little. `make bench` adds a file.\n"
    )
    report = render_page(latest(_results()), "engram-reader.svg")
    return "\n".join(["# Row store benchmark\n", NOTICE, intro, report])


def engram_reader_plot() -> str:
    """Return the picture of the same measurement."""
    return render_plot(latest(_results()))


def _results() -> list[Path]:
    return sorted((ROOT / "bench" / "results").glob("*.json"))


def chat_completions_page() -> str:
    """Return which fields of a chat request are honoured, resolved or refused."""
    honoured = ", ".join(f"`{name}`" for name in fields.ChatFields.__struct_fields__)
    efforts = [f"| `{spelled}` | {tier or 'thinking off'} |" for spelled, tier in fields.EFFORT_TIERS.items()]
    refused = [
        f"| `{name}` | {_json(neutral)} | {reason} |"
        for name, (neutral, reason) in fields.UNSUPPORTED.items()
    ]
    return "\n".join(
        [
            "# Chat Completions: fields\n",
            NOTICE,
            (inspect.getdoc(fields) or "").partition("\n\n")[2] + "\n",
            f"## Honoured\n\n{honoured}\n",
            "`response_format`, strict tools and a required `tool_choice` are enforced token by token:\n"
            "docs/concepts/structured-output.md.\n",
            "## Effort\n\n| as sent | the publisher's tier |\n|---|---|",
            *efforts,
            "\n## Refused\n\n| field | the value that asks for nothing | why anything else is refused |\n|---|---|---|",
            *refused,
            "",
        ]
    )


def planner_page() -> str:
    """Return how to read a plan, and how its arithmetic stands against published figures."""
    return "\n".join([planner_evidence.TITLE, NOTICE, planner_evidence.render_body()])


def architecture_page() -> str:
    """Return ARCHITECTURE.md with its tree of modules renewed."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    begin, end = "<!-- tree:begin", "<!-- tree:end -->"
    head, rest = text.split(begin)
    first_line, tail = rest.partition("\n")[0], rest.split(end)[1]
    return f"{head}{begin}{first_line}\n{_fenced(_tree())}{end}{tail}"


def _tree() -> str:
    lines = []
    for root in ("src/deskfleet", "packages/deskfleet-engram/src/deskfleet_engram"):
        lines.append(f"{root}/")
        for path in sorted(
            (ROOT / root).rglob("*.py"), key=lambda p: (p.parent, p.name != "__init__.py", p.name)
        ):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            if docstring is None:
                continue
            name = path.relative_to(ROOT / root)
            is_package = name.name == "__init__.py"
            shown = f"{name.parent.name}/" if is_package else name.name
            depth = len(name.parts) - (1 if is_package else 0)
            if name == Path("__init__.py"):
                continue
            sentence = re.split(r"(?<=[.:])\s", " ".join(docstring.split()), maxsplit=1)[0].rstrip(":.")
            lines.append(f"{'  ' * depth}{shown:<{max(24 - 2 * depth, 1)}} {sentence}")
    return "\n".join(lines)


def _ticked(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values if value)


def _json(value: object) -> str:
    return f"`{json.dumps(value)}`"


PAGES: dict[Path, Callable[[], str]] = {
    Path("ARCHITECTURE.md"): architecture_page,
    REFERENCE / "chat-completions.md": chat_completions_page,
    REFERENCE / "cli.md": cli_page,
    REFERENCE / "environment.md": environment_page,
    REFERENCE / "errors.md": errors_page,
    REFERENCE / "benchmarks.md": benchmarks_page,
    REFERENCE / "engram-reader.md": engram_reader_page,
    REFERENCE / "engram-reader.svg": engram_reader_plot,
    REFERENCE / "planner.md": planner_page,
}


def _help(*command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([*command, "--help"])
    if code != 0:
        raise SystemExit(f"deskfleet {' '.join(command)} --help ended with {code}")
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def _fenced(text: str) -> str:
    return f"```\n{text}\n```\n"


def _descend(kind: type[DeskfleetError], depth: int) -> Iterator[tuple[type[DeskfleetError], int]]:
    """Yield `kind` and what derives from it in deskfleet.errors, in the order written there."""
    yield kind, depth
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _descend(child, depth + 1)


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _report_stale(path: Path, old: str, new: str) -> None:
    print(f"{path} is out of date; run: make fix", file=sys.stderr)
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "committed", "generated", lineterm="", n=1
    )
    for line in list(lines)[:20]:
        print(f"  {line}", file=sys.stderr)


def run(*, check: bool) -> int:
    """Write every page, or with `check` compare them; return 1 when one is out of date."""
    os.environ |= {"COLUMNS": WIDTH, "NO_COLOR": "1"}
    stale = False
    for name, render in PAGES.items():
        path, new = ROOT / name, render()
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == new:
            continue
        if check:
            stale = True
            _report_stale(name, old, new)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
            print(f"wrote {name}")
    return int(stale)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a page is out of date"
    )
    sys.exit(run(check=parser.parse_args().check))
