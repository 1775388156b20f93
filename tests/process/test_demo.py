"""`imds-bridge demo`, as a user runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bridge.lab.demonstration import Result

pytestmark = pytest.mark.timeout(300)  # the whole scenario plays, on a busy machine

LIMIT_SECONDS = 120
# 4 heartbeats, 9 documents, 8 changes of events and 4 receipts, in every run.
LAST_LINE = "demo: ok, 25 published, 25 delivered, 0 lost, 1 approval accepted, 3 rejected"
# 2 heartbeats, 9 documents and 8 changes of events.
LAST_LINE_WITHOUT_BUS = "demo: ok, 19 published, 19 delivered, 0 lost"


def test_the_demonstration_plays_all_steps_and_succeeds() -> None:
    command = [sys.executable, "-m", "bridge", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == LAST_LINE
    names = {line[9:20].strip() for line in lines[:-1]} - {""}
    assert names == {"STORY", "IMDS", "COUNTDOWN", "PUBLISHED", "ARRIVED", "CHAT", "APPROVE"}
    assert max(map(len, lines)) <= 80
    assert "\033" not in done.stdout


def test_the_demonstration_needs_no_bus() -> None:
    script = "import sys; sys.modules['proton'] = None; from bridge.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "demo", "--no-bus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == LAST_LINE_WITHOUT_BUS


def test_an_event_that_is_missing_makes_the_last_line_a_failure() -> None:
    result = Result(published=3, delivered=2, faults=["1 of 3 events lost on the way to the bus"])
    assert result.last_line() == "demo: FAILED, 1 of 3 events lost on the way to the bus"
