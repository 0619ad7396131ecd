"""What every run ends with: the largest differences that the tests measured."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines that tests recorded under the property "measured", also those of passing ones."""
    # A property recorded after the test body is on the report of its teardown, which counts under no outcome.
    lines = {
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "measured"
    }
    if lines:
        terminalreporter.section("measured against the publisher's numbers")
        for line in sorted(lines):
            terminalreporter.write_line(line)
