"""Hooks of pytest about skipped tests: the summary has each reason once; CI may lack Docker and .NET alone."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator

import pytest

NEEDS = ("needs Docker", "need .NET")  # in a reason: CI may lack it


def reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped."""
    given = report.longrepr
    return str(given[2] if isinstance(given, tuple) else given).removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, let a test fail that is skipped for want of something that CI has. Windows lacks more."""
    report = yield
    is_needed = report.skipped and not any(one in reason(report) for one in NEEDS)
    if is_needed and os.environ.get("CI") and sys.platform != "win32":
        report.outcome, report.longrepr = "failed", f"skipped in CI: {reason(report)}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each reason for skipping with the number of its tests, the most frequent first."""
    skipped = Counter(map(reason, terminalreporter.stats.get("skipped", ())))
    if skipped:
        terminalreporter.section("skipped tests")
    for why, count in skipped.most_common():
        terminalreporter.write_line(f"{count:>4}  {why}")
