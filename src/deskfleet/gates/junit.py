"""A report as JUnit XML, which build servers read: one case for each gate."""

from __future__ import annotations

from xml.etree import ElementTree

from deskfleet.gates.report import GateResult, Report


def to_junit(report: Report) -> str:
    """Return the report as one test suite. Control characters, which XML cannot hold, are replaced."""
    counts = report.counts
    suite = ElementTree.Element(
        "testsuite",
        name=f"deskfleet {report.verb}",
        tests=str(len(report.results)),
        failures=str(counts["fail"]),
        skipped=str(counts["skip"]),
        errors="0",
        time=f"{report.seconds_s:.3f}",
        timestamp=report.started_at,
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in {"url": report.url, "model": report.model_id, "questions": report.questions}.items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    for result in report.results:
        _add_case(suite, report, result)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, report: Report, result: GateResult) -> None:
    finding = result.finding
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"deskfleet.{result.gate.when}",
        name=result.gate.name,
        time=f"{result.seconds_s:.3f}",
    )
    if finding.verdict == "fail":
        failure = ElementTree.SubElement(
            case, "failure", message=_clean(finding.reason), type=finding.cause or "answer"
        )
        failure.text = _clean(
            f"measured: {finding.measured}\nthreshold: {result.gate.threshold}\n"
            f"again: {report.command(result)}\n"
        )
    elif finding.verdict == "skip":
        ElementTree.SubElement(case, "skipped", message=_clean(finding.reason))
    output = ElementTree.SubElement(case, "system-out")
    output.text = _clean("\n".join([f"measured: {finding.measured}", *result.files]))


def _clean(text: str) -> str:
    return "".join(c if c in "\t\n" or (c >= " " and c not in "\ufffe\uffff") else "\ufffd" for c in text)


__all__ = ["to_junit"]
