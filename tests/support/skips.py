"""Hooks of pytest about skipped tests: the summary has each reason once; CI may lack Docker and .NET alone.

The file that TEST_SKIPPED names gets the name of each, one a line, for `pytest @FILE` where nothing is missing.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

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
    reports = terminalreporter.stats.get("skipped", ())
    if file := os.environ.get("TEST_SKIPPED"):
        Path(file).write_text("".join(f"{report.nodeid}\n" for report in reports), encoding="utf-8")
    skipped = Counter(map(reason, reports))
    if skipped:
        terminalreporter.section("skipped tests")
    for why, count in skipped.most_common():
        terminalreporter.write_line(f"{count:>4}  {why}")
