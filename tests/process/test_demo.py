"""`imds-bridge demo`, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys

from bridge.lab.demo import Result

LIMIT_SECONDS = 120


def test_the_demonstration_plays_all_steps_and_succeeds() -> None:
    command = [sys.executable, "-m", "bridge", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(
        r"demo: ok, (\d+) events published, (\d+) delivered, 0 lost, 1 approvals accepted, 3 rejected",
        lines[-1],
    )
    assert found
    assert found[1] == found[2]
    told = {line[9:].split()[0] for line in lines[:-1]}
    assert told == {"STORY", "IMDS", "COUNTDOWN", "PUBLISHED", "ARRIVED", "CHAT", "APPROVE"}


def test_whatever_is_missing_makes_the_last_line_a_failure() -> None:
    result = Result(published=3, delivered=2, faults=["1 of 3 events lost on the way to the bus"])
    assert result.last_line() == "demo: FAILED, 1 of 3 events lost on the way to the bus"
