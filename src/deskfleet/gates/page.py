"""A report as one HTML page that stands alone: what failed and why first, then every gate, figures, evidence.

Owns the page. Everything that came from a server is escaped: answers are not to be trusted with a browser either. No
script, no font and no picture from elsewhere, so that the file can be sent around.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from deskfleet.gates.figures import to_svg
from deskfleet.gates.report import GateResult, Report
from deskfleet.gates.subject import Answered

_SIGNS = {"pass": "✓", "fail": "✗", "skip": "–"}
_EXCHANGES = 3
_TEXT_CHARS = 1200
_HOURS, _MINUTES = 3600, 60


def to_page(report: Report) -> str:
    """Return the page."""
    failed = [result for result in report.results if result.verdict == "fail"]
    skipped = [result for result in report.results if result.verdict == "skip"]
    drawn = [result for result in report.results if result.finding.figures]
    body = [
        _head(report),
        _section("What failed", [_card(report, result) for result in failed]),
        _section("Every gate", [_table(report, when) for when in ("launch", "acceptance")]),
        _section("Figures", [_figures(result) for result in drawn]),
        _section("Not shown", [_skips(skipped)] if skipped else []),
        _section("How it was asked", [_conditions(report)]),
    ]
    title = escape(f"deskfleet {report.verb}: {report.model_id}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _head(report: Report) -> str:
    counts = report.counts
    names = [result.gate.name for result in report.results if result.verdict == "fail"]
    if report.verdict == "fail":
        summary = f"{len(names)} of {len(report.results)} gates failed: {', '.join(names)}."
    elif report.verdict == "skip":
        summary = "Nothing was shown: no gate passed, and none failed."
    else:
        summary = f"{counts['pass']} gates passed" + (
            f", {counts['skip']} skipped." if counts["skip"] else "."
        )
    limit = "" if report.max_model_len is None else f", {report.max_model_len:,} tokens"
    return (
        f'<header class="{report.verdict}"><p class="kind">deskfleet {escape(report.verb)}</p>'
        f"<h1>{_badge(report.verdict)} {escape(report.model_id)}</h1>"
        f"<p class=summary>{escape(summary)}</p>"
        f"<p class=where>{escape(report.url)}{limit} · {escape(report.started_at)} · {duration(report.seconds_s)}</p>"
        "</header>"
    )


def _section(title: str, parts: Iterable[str]) -> str:
    inside = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def _card(report: Report, result: GateResult) -> str:
    gate, finding = result.gate, result.finding
    rows = [
        ("measured", "" if finding.measured in finding.reason else escape(finding.measured)),
        ("threshold", escape(gate.threshold)),
        ("protects", escape(gate.protects)),
        ("cause", escape(_CAUSES.get(finding.cause or "answer", ""))),
        ("ask again", f"<code>{escape(report.command(result))}</code>"),
    ]
    facts = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value)
    wrong = [answered for answered in result.evidence if not answered.is_right][:_EXCHANGES]
    evidence = "".join(map(_exchange, wrong))
    return (
        f'<article id="{escape(gate.name)}"><h3>{_badge("fail")} {escape(gate.name)}</h3>'
        f"<p class=question>{escape(gate.question)}</p><p class=reason>{escape(finding.reason)}</p>"
        f"<dl>{facts}</dl>{evidence}</article>"
    )


_CAUSES = {
    "answer": "a wrong answer",
    "refusal": "the server refused what it should take",
    "server": "the server failed, or what it sent cannot be read",
    "time": "no answer in the time given",
    "pace": "slower than it was, or than others beside it",
    "tool": "the gate itself could not do its work",
}


def _exchange(answered: Answered) -> str:
    reply = answered.reply
    lines = [("asked", _asked(answered)), ("wrong", answered.wrong or "")]
    if reply is not None:
        lines += [("reasoning", reply.reasoning), ("content", reply.content)]
        if reply.tool_calls:
            lines.append(
                ("calls", json.dumps([call["function"] for call in reply.tool_calls], ensure_ascii=False))
            )
        usage = f"prompt {reply.num_prompt_tokens}, cached {reply.num_cached_tokens}"
        ended = f"answer {reply.num_completion_tokens}; finish reason {reply.finish_reason}; {reply.total_s:.2f} s"
        lines.append(("tokens", f"{usage}, {ended}"))
    inside = "".join(
        f"<dt>{name}</dt><dd><pre>{escape(_short(text))}</pre></dd>" for name, text in lines if text
    )
    return f"<details><summary>evidence: {escape(answered.puzzle.label)}</summary><dl>{inside}</dl></details>"


def _asked(answered: Answered) -> str:
    content = answered.body["messages"][-1].get("content")
    if isinstance(content, str):
        return content
    return " ".join(part.get("text", "[image]") for part in content or ())


def _short(text: str) -> str:
    half = _TEXT_CHARS // 2
    return (
        text if len(text) <= _TEXT_CHARS else f"{text[:half]}\n … {len(text):,} characters …\n{text[-half:]}"
    )


def _table(report: Report, when: str) -> str:
    rows = [_row(result) for result in report.results if result.gate.when == when]
    if not rows:
        return ""
    names = ("gate", "measured", "threshold", "time")
    head = "".join(f'<th class="{name}">{name}</th>' for name in names)
    return (
        f"<h3>{when.capitalize()}</h3><div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(result: GateResult) -> str:
    gate, finding = result.gate, result.finding
    name = escape(gate.name)
    shown = f'<a href="#{name}">{name}</a>' if result.verdict == "fail" else name
    return (
        f'<tr class="{result.verdict}"><td class=gate>{_badge(result.verdict)} {shown}'
        f"<span class=small>{escape(gate.question)}</span></td><td>{escape(finding.measured)}</td>"
        f"<td class=threshold>{escape(gate.threshold)}</td><td class=time>{duration(result.seconds_s)}</td></tr>"
    )


def _figures(result: GateResult) -> str:
    drawn = "".join(
        f"<figure><figcaption>{escape(result.gate.name)}: {escape(figure.title)}</figcaption>{to_svg(figure)}</figure>"
        for figure in result.finding.figures
    )
    return f"<div class=scroll>{drawn}</div>"


def _skips(results: list[GateResult]) -> str:
    items = (
        f"<li><b>{escape(result.gate.name)}</b>: {escape(result.finding.reason)}</li>" for result in results
    )
    return f"<ul>{''.join(items)}</ul>"


def _conditions(report: Report) -> str:
    rows = [
        ("questions", f"{report.questions}, because {report.questions_reason}"),
        (
            "limits",
            ", ".join(f"{name} {value}" for name, value in report.limits.items() if value is not None),
        ),
        ("evidence", report.evidence_dir or "not written (--evidence DIR)"),
        *report.provenance.items(),
    ]
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows if value)
    return f"<dl>{inside}</dl>"


def _badge(verdict: str) -> str:
    return f'<span class="badge {verdict}">{_SIGNS[verdict]} {verdict}</span>'


def duration(seconds_s: float) -> str:
    """Return a time as people say it."""
    if seconds_s < _MINUTES:
        return f"{seconds_s:.1f} s"
    if seconds_s < _HOURS:
        return f"{seconds_s / _MINUTES:.1f} min"
    return f"{seconds_s / _HOURS:.1f} h"


_STYLE = """
:root{--ink:#1c2128;--soft:#59636e;--line:#d5dbe1;--back:#fff;--card:#f6f8fa;--good:#1a7f37;--bad:#c62828;--none:#6e7781;
--good-back:#d9f2e0;--bad-back:#fbdcdc;--none-back:#e7ebef;--link:#0a58ca}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa5b1;--line:#353c45;--back:#0f1419;--card:#171d24;
--good:#5fd37f;--bad:#ff8a80;--none:#9aa5b1;--good-back:#143a20;--bad-back:#4a1a1a;--none-back:#2a3038;--link:#79b8ff}}
*{box-sizing:border-box}body{margin:0;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 64px}a{color:var(--link)}
header{border-left:6px solid var(--none);padding:4px 0 4px 18px;margin-bottom:28px}
header.pass{border-color:var(--good)}header.fail{border-color:var(--bad)}
h1{font-size:26px;margin:0 0 6px;display:flex;gap:12px;align-items:center;flex-wrap:wrap}
h2{font-size:19px;margin:34px 0 10px;border-bottom:1px solid var(--line);padding-bottom:6px}
h3{font-size:16px;margin:18px 0 8px}
.kind{margin:0;color:var(--soft);text-transform:uppercase;letter-spacing:.06em;font-size:12px}
.summary{margin:0;font-size:17px}.where,.small{color:var(--soft)}.where{margin:4px 0 0}
.small{display:block;font-size:12.5px;line-height:1.35;margin-top:2px}
.badge{display:inline-block;border-radius:5px;padding:1px 8px;font-size:13px;font-weight:600;white-space:nowrap}
.badge.pass{color:var(--good);background:var(--good-back)}.badge.fail{color:var(--bad);background:var(--bad-back)}
.badge.skip{color:var(--none);background:var(--none-back)}
article{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 18px;margin:12px 0}
article h3{margin:0 0 4px}.question{color:var(--soft);margin:0 0 6px}.reason{margin:0 0 10px;font-weight:600}
dl{display:grid;grid-template-columns:minmax(84px,max-content) 1fr;gap:3px 16px;margin:6px 0}
dt{color:var(--soft)}dd{margin:0;min-width:0;overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}
code{font:13px ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
details{border-top:1px solid var(--line);margin-top:8px;padding-top:8px}summary{cursor:pointer;color:var(--link)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
th{text-align:left;font-size:12.5px;color:var(--soft);font-weight:600;padding:6px 10px 6px 0;
border-bottom:1px solid var(--line)}
td{vertical-align:top;padding:8px 14px 8px 0;border-bottom:1px solid var(--line);overflow-wrap:anywhere}
td.gate{width:36%;min-width:220px}td.threshold{width:24%;color:var(--soft)}
td.time,th.time{text-align:right;white-space:nowrap;
padding-right:0;font-variant-numeric:tabular-nums}
figure{margin:14px 0}figcaption{color:var(--soft);margin-bottom:6px}svg{max-width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}rect.good{fill:var(--good-back)}rect.bad{fill:var(--bad-back)}
rect.none{fill:var(--none-back)}svg text.on-good{fill:var(--good)}svg text.on-bad{fill:var(--bad);font-weight:700}
.rule{stroke:var(--line)}.line{fill:none;stroke:var(--link);stroke-width:2}.dot{fill:var(--link)}ul{padding-left:20px}
"""

__all__ = ["duration", "to_page"]
