"""Writes the pages of docs/reference from what they describe. With --check, only says which are out of date.

    python tools/gen_docs.py [--check]

cli.md is what each verb's --help prints, environment.md the registry in deskfleet.env, errors.md the tree in
deskfleet.errors, chat-completions.md, responses.md, messages.md and completions.md the tables of the protocols,
thinking.md that of deskfleet.gateway.thinking, fleet-file.md the keys in deskfleet.planner.fleetfile, benchmarks.md and
engram-reader.md (with its picture) the files in bench/results, metrics.md the catalogue in
deskfleet.gateway.metric_names, planner.md the text and figures of deskfleet.planner.evidence. ARCHITECTURE.md carries
the tree of modules, each with the first sentence of its docstring. Nothing of this is written by hand.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deskfleet import env, errors
from deskfleet.bench.engram import is_reader_result, latest, render_page, render_plot
from deskfleet.bench.report import render_report
from deskfleet.cli.app import VERBS, main
from deskfleet.cli.fleet import present_verbs
from deskfleet.errors import DeskfleetError
from deskfleet.fleet.initial import Draft, fleet_text, parse_node
from deskfleet.gates import reference as gates_reference
from deskfleet.gateway import fields, metric_names, thinking
from deskfleet.gateway import policy_reference as policies
from deskfleet.gateway.protocols import chat_fields, completions, messages_fields, responses_fields
from deskfleet.gateway.recent import OUTCOMES
from deskfleet.planner import fleetfile
from deskfleet.planner.evidence import page as planner_evidence

ROOT = Path(__file__).parents[1]
REFERENCE = Path("docs/reference")
WIDTH = "100"
NOTICE = "<!-- Made by tools/gen_docs.py (make fix). Changes belong into what it describes. -->\n"

COMMANDS = (
    *((verb,) for verb in VERBS),
    ("bench", "compare"),
    ("bench", "cross-check"),
    ("bench", "engine"),
    ("bench", "engram"),
    ("bench", "gateway"),
    ("bench", "prefix"),
    ("bench", "published"),
    ("bench", "serve"),
    ("bench", "speculation"),
    *(("fleet", verb) for verb in present_verbs()),
    ("fleet", "config", "show"),
    ("keys", "list"),
    ("keys", "new"),
    ("keys", "revoke"),
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


def protocol_page(module: ModuleType) -> str:
    """Return which fields of a protocol's requests are honoured, refused or ignored."""
    name, decisions = PROTOCOLS[module]
    honoured = ", ".join(f"`{field}`" for field in decisions.fields.__struct_fields__)
    refused = [
        f"| `{field}` | {_json(neutral)} | {why} |" for field, (neutral, why) in decisions.refused.items()
    ]
    ignored = [f"| `{field}` | {why} |" for field, why in decisions.ignored.items()]
    return "\n".join(
        [
            f"# {name}: fields\n",
            NOTICE,
            (inspect.getdoc(module) or "").partition("\n\n")[2] + "\n",
            (inspect.getdoc(fields) or "").partition("\n\n")[2].partition("\n\n")[2] + "\n",
            f"## Honoured\n\n{honoured}\n",
            "Thinking, effort and budget: thinking.md. Forms of answers and calls are enforced token by token:\n"
            "docs/concepts/structured-output.md.\n",
            "## Refused\n\n| field | the value that asks for nothing | why anything else is refused |\n|---|---|---|",
            *refused,
            "\n## Ignored\n\n| field | why |\n|---|---|",
            *ignored,
            "",
        ]
    )


def thinking_page() -> str:
    """Return the table of spellings for thinking, effort and budget, and how they add up."""
    spellings = [
        f"| `{each.path}` | {each.kind} | {each.values} | {each.sent_by} |" for each in thinking.SPELLINGS
    ]
    tiers = [f"| `{tier}` | {number or 'thinking off'} |" for tier, number in thinking.EFFORT_TIERS.items()]
    return "\n".join(
        [
            "# Thinking and effort\n",
            NOTICE,
            (inspect.getdoc(thinking) or "").partition("\n\n")[2] + "\n",
            f"The header is `{thinking.HEADER}`, for instance `on; effort=75; source=reasoning_effort`.\n"
            "It comes with every answer of a conversation, with streams before their first event, and with\n"
            "counts of tokens.\n",
            "## Spellings\n",
            "All of them are understood in Chat Completions, Responses, Messages, `/v1/messages/count_tokens`\n"
            "and in `/tokenize` with messages. Completions have no conversation and refuse them.\n",
            "| field | says | values | sent by |\n|---|---|---|---|",
            *spellings,
            "\n## Effort\n\n| as sent | the number in the prompt |\n|---|---:|",
            *tiers,
            "| a whole number from 1 to 100 | itself |",
            "| a fraction from 0.01 to 0.99 | hundred times itself |",
            "| 0.0 | thinking off |",
            "",
        ]
    )


def metrics_page() -> str:
    """Return the table of every metric."""
    parts = [
        "# Metrics\n",
        NOTICE,
        (inspect.getdoc(metric_names) or "").partition("\n\n")[2].partition("\ndocs/reference")[0] + "\n",
        "`GET /metrics` answers in Prometheus' text format. Counters are asked for with `_total`, histograms with\n"
        "`_bucket`, `_sum` and `_count`. `protocol` is `chat`, `completions`, `responses` or `messages`; `outcome` is\n"
        f"{_ticked(OUTCOMES)}: a 4xx is refused, a client that went away cancelled, a 5xx or an error inside a\n"
        "stream failed. `deploy/` has a Grafana board, alerts and an example for Prometheus. Policies count under\n"
        "`deskfleet_policy_...`, with labels `model` and `key`; the gateway's own process under `process_...`.\n",
    ]
    for title, specs in metric_names.SECTIONS:
        parts.append(f"## {title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|")
        parts += [
            f"| `{spec.name}{'_total' if spec.kind == 'counter' else ''}` | {spec.kind} | {_ticked(spec.labels)} "
            f"| {spec.help} |"
            for spec in specs
        ]
        parts.append("")
    return "\n".join(parts)


def planner_page() -> str:
    """Return how to read a plan, and how its arithmetic stands against published figures."""
    return "\n".join([planner_evidence.TITLE, NOTICE, planner_evidence.render_body()])


def policies_page() -> str:
    """Return every setting of the policies."""
    return "\n".join(["# Policies\n", NOTICE, policies.render_body()])


def fleet_file_page() -> str:
    """Return every key of a fleet.toml, table by table, with a file to begin with."""
    tables: tuple[tuple[str, type[BaseModel]], ...] = (
        ("At the top", fleetfile.FleetTable),
        ("[[nodes]]", fleetfile.NodeTable),
        ("[paths], [nodes.paths]", fleetfile.PathsTable),
        ("[checkpoint]", fleetfile.CheckpointTable),
        ("[engine]", fleetfile.EngineTable),
        ("[wishes]", fleetfile.WishesTable),
        ("[gateway]", fleetfile.GatewayTable),
        ("[restart]", fleetfile.RestartTable),
    )
    parts = [
        "# fleet.toml\n",
        NOTICE,
        "Read strictly: an unknown key, or a value that cannot be, is an error with its line and the nearest key.\n"
        "`--set KEY=VALUE` of the verbs of `deskfleet fleet` puts a value in place of the file's, with keys as\n"
        "`deskfleet fleet config show --effective` spells them. `deskfleet plan --fleet` reads the same file, and\n"
        "needs nothing but `name` and `kind` of each node.\n",
        "A secret never stands in the file. `[secrets]` says where it is; `${secret:NAME}` in a value of\n"
        "`[engine] env` is replaced when ranks are started, and is not shown, logged or kept. The file of one must be\n"
        "readable by its owner only, and hold one line.\n",
        "`deskfleet fleet init` writes such a file:\n",
        f"```toml\n{fleet_text(_example())}```\n",
    ]
    for title, table in tables:
        rows = [
            f"| `{name}` | {field.description}{_default(field)} |"
            for name, field in table.model_fields.items()
        ]
        parts += [f"## {title}\n", f"{_first_line(table)}\n", "| key | meaning |\n|---|---|", *rows, ""]
    return "\n".join(parts)


def _example() -> Draft:
    nodes = tuple(map(parse_node, ("local", "spark-2", "me@spark-3:2222")))
    return Draft("desk", (replace(nodes[0], fabric=("192.168.100.1",)), *nodes[1:]), profile="max-context")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return " Required."
    if field.default is None or field.default_factory is not None or "[default" in (field.description or ""):
        return ""
    return f" [default: {str(field.default).lower()}]"


def gates_page() -> str:
    """Return every gate, and how to read a verdict."""
    return "\n".join([gates_reference.TITLE, NOTICE, gates_reference.render_body()])


def architecture_page() -> str:
    """Return ARCHITECTURE.md with its tree of modules renewed."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    begin, end = "<!-- tree:begin", "<!-- tree:end -->"
    head, rest = text.split(begin)
    first_line, tail = rest.partition("\n")[0], rest.split(end)[1]
    return f"{head}{begin}{first_line}\n{_fenced(_tree())}{end}{tail}"


def _tree() -> str:
    lines = []
    for root in (
        "src/deskfleet",
        "packages/deskfleet-engram/src/deskfleet_engram",
        "packages/deskfleet-ops/src/deskfleet_ops",
    ):
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


PROTOCOLS: dict[ModuleType, tuple[str, fields.Decisions[Any]]] = {
    chat_fields: ("Chat Completions", chat_fields.DECISIONS),
    responses_fields: ("Responses", responses_fields.DECISIONS),
    messages_fields: ("Messages", messages_fields.DECISIONS),
    completions: ("Completions", completions.DECISIONS),
}


def _ticked(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values if value)


def _json(value: object) -> str:
    return f"`{json.dumps(value)}`"


PAGES: dict[Path, Callable[[], str]] = {
    Path("ARCHITECTURE.md"): architecture_page,
    REFERENCE / "chat-completions.md": partial(protocol_page, chat_fields),
    REFERENCE / "responses.md": partial(protocol_page, responses_fields),
    REFERENCE / "messages.md": partial(protocol_page, messages_fields),
    REFERENCE / "completions.md": partial(protocol_page, completions),
    REFERENCE / "thinking.md": thinking_page,
    REFERENCE / "cli.md": cli_page,
    REFERENCE / "environment.md": environment_page,
    REFERENCE / "errors.md": errors_page,
    REFERENCE / "benchmarks.md": benchmarks_page,
    REFERENCE / "fleet-file.md": fleet_file_page,
    REFERENCE / "gates.md": gates_page,
    REFERENCE / "engram-reader.md": engram_reader_page,
    REFERENCE / "engram-reader.svg": engram_reader_plot,
    REFERENCE / "metrics.md": metrics_page,
    REFERENCE / "planner.md": planner_page,
    REFERENCE / "policies.md": policies_page,
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
