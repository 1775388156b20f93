"""Shared by the tests of the consumers: a bus for a fleet, imds-bridge's processes, and the scripts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.imds_lab import ImdsLab
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, completed, environment, wait_until
from tests.support.servicebus import ServiceBusLab, entities

CONSUMERS = ROOT / "infra" / "consumers"
TOPIC, APPROVALS = "scheduled-events", "approvals"
OWN, ALL, APPROVER = "web-0", "audit", "approver"  # subscriptions
OWN_FILTER = "sys.Label LIKE 'io.imdsbridge.scheduledevent.%' OR sys.Label LIKE 'io.imdsbridge.approval.%'"
# Runs a script with short sleeps: azure-servicebus sleeps whole seconds whenever a client closes.
SHORT_SLEEPS = """
import runpy, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.02))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_LIVES = {"LockDuration": "PT1M", "MaxDeliveryCount": 100, "DefaultMessageTimeToLive": "PT1H"}


def bus_config() -> Mapping[str, Any]:
    """Return the configuration of the namespace in the READMEs."""
    own = {"FilterType": "Sql", "SqlFilter": {"SqlExpression": OWN_FILTER}}
    return entities(
        queues=[{"Name": APPROVALS, "Properties": {**_LIVES, "RequiresSession": True}}],
        topic=TOPIC,
        subscriptions=[
            {"Name": OWN, "Properties": _LIVES, "Rules": [{"Name": "own", "Properties": own}]},
            {"Name": ALL, "Properties": _LIVES},
            {"Name": APPROVER, "Properties": {**_LIVES, "LockDuration": "PT5S"}},
        ],
        RequiresDuplicateDetection=True,
        DuplicateDetectionHistoryTimeWindow="PT10M",
    )


@contextmanager
def bridge(
    folder: Path, vms: Sequence[str] = ("web-0",), **approvals: Any
) -> Iterator[tuple[ImdsLab, ServiceBusLab]]:
    """Run `forward` and `listen` of the first VM on the lab's IMDS and bus."""
    with ImdsLab(vms=vms, rate_limit=None) as imds, ServiceBusLab(bus_config()) as bus:
        link = {"connection_string": bus.connection_string}
        approvals |= {"queue": APPROVALS, "session": "{resource_group}.{vm}", "policy": {"allow": [{}]}}
        given = {
            "imds": {"endpoint": imds.url(vms[0]), "poll_seconds": 0.2},
            "sinks": {"bus": {"kind": "servicebus", "topic": TOPIC, "from_start": True, **link}},
            "approvals": {**approvals, **link},
            "stop_seconds": LIMIT_SECONDS,
        }
        with Forward(folder / "forward", given), Forward(folder / "listen", given, role="listen"):
            yield imds, bus


class Script(Forward):
    """A consumer's script as a separate process, with a plain-text log."""

    def __init__(
        self, folder: Path, script: str, arguments: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(folder, env=env)
        self._command = [sys.executable, "-c", SHORT_SLEEPS, str(CONSUMERS / script), *arguments]

    def wait_for_text(self, text: str, *, count: int = 1) -> None:
        """Wait until the log contains the text this many times."""
        wait_until(
            lambda: self.log.read_text().count(text) >= count, describe=lambda: f"no {text!r} in {self}"
        )


def run_script(
    script: str, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a consumer's script until it exits."""
    command = [sys.executable, "-c", SHORT_SLEEPS, str(CONSUMERS / script)]
    return completed(*command, *arguments, env=environment(env), limit_seconds=LIMIT_SECONDS * 2)
