"""The snippets for consumers approve an event over the bus, with the real `forward` and `listen`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients import go_program
from tests.support.consumers import APPROVER, TOPIC, bus_config, settings
from tests.support.imds_lab import ImdsLab
from tests.support.npm import node_modules
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, wait_until
from tests.support.programs import tool
from tests.support.servicebus import ServiceBusLab

pytestmark = pytest.mark.timeout(900)  # the first run downloads the clients

PAGE = ROOT / "schemas" / "README.md"
SNIPPETS = ROOT / "schemas" / "snippets"
NAMES = sorted(path.name for path in SNIPPETS.iterdir())


SLEEPS = {
    ".py": "__import__('time').sleep(7)  #",
    ".js": "await new Promise((go) => setTimeout(go, 7000)); //",
}
SLEEPS[".go"] = "time.Sleep(7 * time.Second) //"
SLEEPS[".cs"] = "await Task.Delay(7000); //"
BUILD_SECONDS = 300


def with_a_long_drain(snippet: Path, folder: Path) -> Path:
    """Copy a snippet whose drain takes longer than the lock of its message."""
    copy = folder / snippet.name
    text = snippet.read_text()
    assert text.count("Drain here.") == 1
    copy.write_text(re.sub(r"(#|//) Drain here\.", SLEEPS[snippet.suffix], text))
    return copy


def command_of(snippet: Path) -> tuple[list[str], dict[str, str]]:
    """Return how to run a snippet, and the variables that it needs."""
    if snippet.suffix == ".go":
        return [str(go_program(snippet))], {}
    if snippet.suffix == ".cs":
        subprocess.run([tool("dotnet"), "build", snippet], check=True, timeout=BUILD_SECONDS)
        return [tool("dotnet"), "run", "--no-build", str(snippet)], {}
    if snippet.suffix == ".js":
        return [tool("node"), str(snippet)], {"NODE_PATH": str(node_modules("@azure/service-bus"))}
    return [sys.executable, str(snippet)], {}


@pytest.mark.parametrize(
    "name",
    [name if name.endswith(".py") else pytest.param(name, marks=pytest.mark.clients) for name in NAMES],
)
def test_it_approves_the_event_after_a_drain_longer_than_its_lock_and_prints_the_receipt(
    tmp_path: Path, name: str
) -> None:
    command, variables = command_of(with_a_long_drain(SNIPPETS / name, tmp_path))
    with (
        ImdsLab(vms=("web-0", "web-1"), rate_limit=None) as imds,
        ServiceBusLab(bus_config()) as bus,
        Forward(tmp_path / "forward", settings(imds, bus)),
        Forward(tmp_path / "listen", settings(imds, bus), role="listen"),
    ):
        entity = bus.entity(f"{TOPIC}/Subscriptions/{APPROVER}")
        wait_until(lambda: entity.counts.enqueued >= 1, describe=lambda: entity.messages)
        event = imds.schedule(event_type="Reboot", resources=["web-0", "web-1"])
        done = subprocess.run(
            command,
            env={**os.environ, **variables, "SERVICEBUS_CONNECTION_STRING": bus.connection_string},
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert re.sub(r"\W+", " ", done.stdout).strip() == "Accepted approved web 0 web 1"
    assert [one.event_id for one in imds.approvals] == [event]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_snippet_as_it_is(name: str) -> None:
    assert f"\n{(SNIPPETS / name).read_text()}```\n" in PAGE.read_text()
