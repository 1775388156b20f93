"""`imds-bridge demo`, as a user runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bridge.lab.demo.story import INTRODUCTION, LEGEND

pytestmark = pytest.mark.timeout(300)  # the whole story is played, on a busy machine

LIMIT_SECONDS = 120
WITHOUT_PROTON = (
    "import sys; sys.modules['proton'] = None; from bridge.cli.main import main; sys.exit(main())"
)
PROCESS = re.compile(r"starts as process (\d+)")


def play(*options: str) -> str:
    """Run a demo to its end, which must be a good one; return what it prints."""
    command = [sys.executable, "-m", "bridge", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_plays_every_chapter_and_succeeds() -> None:
    text = play("--fast")
    lines = text.splitlines()
    # A busy machine may hold the forwarder up for 5 s, which is two events more.
    assert re.fullmatch(r"demo: ok, (20|2[2468]) published, 0 lost", lines[-1])
    assert text.split()[:5] == INTRODUCTION.split()[:5]
    assert [line.partition(". ")[2] for line in lines if re.match(r"\d\. ", line)] == [
        "An announcement reaches everyone",
        "A receiver dies, the process is killed, nothing is lost",
        "An approval over the bus; a forged one is refused",
        "How the event ended",
    ]
    words = (re.match(r" *\d+\.\d s  (\w+)", line) for line in lines)  # of the left column
    assert {one[1] for one in words if one} == set(LEGEND)
    assert max(map(len, lines)) <= 80
    assert "\033" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_runs_without_proton_and_removes_its_files_when_it_is_interrupted(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = [sys.executable, "-c", WITHOUT_PROTON, "demo", "--no-bus", "--fast"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        pid = next(int(found[1]) for line in demo.stdout if (found := PROCESS.search(line)))
        demo.send_signal(number)
        demo.send_signal(number)
        assert demo.wait(LIMIT_SECONDS) == 1
        assert demo.stderr.read() == "demo: stopped\n"
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{pid}").exists()


def test_the_console_of_the_demo_shows_its_fleet_and_ends_on_its_own() -> None:
    text = play("--console", "127.0.0.1:0", "--minutes", "0.01")
    assert re.search(r"^The console is on http://127\.0\.0\.1:\d+$", text, re.MULTILINE)
    assert "60 simulated VMs" in text
