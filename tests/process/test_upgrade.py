"""A new version goes on with the state that a released version left.

`python -m tests.process.test_upgrade VERSION` writes such a state to tests/data/state, once for each release.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.clock import MovedClock
from tests.support.console import TOKEN, FleetVm, RunningConsole, event, running_console
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward, closed_port, read_outbox

STATES = Path(__file__).parents[1] / "data" / "state"
AT = datetime(2026, 11, 23, 8, 0, tzinfo=UTC)
EVENT = {
    "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    "EventType": "Reboot",
    "ResourceType": "VirtualMachine",
    "Resources": ["web-0"],
    "EventStatus": "Scheduled",
    "NotBefore": "Mon, 23 Nov 2026 08:15:00 GMT",
    "Description": "",
    "EventSource": "Platform",
    "DurationInSeconds": -1,
}
of_each_version = pytest.mark.parametrize("version", sorted(path.name for path in STATES.iterdir()))


def settings(imds: ImdsLab, ops: str, strict: str) -> dict[str, Any]:
    """Return a sink that is away and one that refuses everything; the state may be years old."""
    imds.serve_document({"DocumentIncarnation": 7, "Events": [EVENT]})
    kept = {"max_age_seconds": 3e9, "kind": "webhook"}
    sinks = {"ops": {**kept, "url": ops}, "strict": {**kept, "url": strict}}
    return {"imds": {"endpoint": imds.url("web-0")}, "sinks": sinks}


def console(folder: Path) -> AbstractContextManager[RunningConsole]:
    """Run a console at the time of the state."""
    return running_console(folder, clock=MovedClock(AT.timestamp()), ingest={"bearer_token": TOKEN})


@of_each_version
def test_forward_delivers_what_waits_under_its_ids_and_publishes_nothing_again(
    tmp_path: Path, version: str
) -> None:
    shutil.copytree(STATES / version / "forward", tmp_path / "state" / "forward")
    before = read_outbox(tmp_path / "state" / "forward")
    waiting = [id_ for seq, id_, _, _ in before.events if ("ops", seq) in before.waiting]
    assert waiting
    assert before.dead
    with ImdsLab(vms=["web-0"]) as imds, Inbox() as inbox:
        with Forward(tmp_path, settings(imds, inbox.url, inbox.url)) as forward:
            inbox.wait_for(lambda: {*waiting} <= {one["id"] for one in inbox.events()}, LIMIT_SECONDS)
            assert forward.stop() == 0, forward  # after a last poll
        sent = [(one["id"], one["type"]) for one in inbox.events()]
    assert not [line for line in forward.lines() if "moved aside" in line["message"]]
    assert [id_ for id_, _ in sent if id_ in waiting] == waiting
    assert not [kind for id_, kind in sent if id_ not in waiting and "scheduledevent" in kind]
    assert [one[1] for one in read_outbox(forward.state).dead] == [one[1] for one in before.dead]


@of_each_version
def test_the_console_still_shows_the_fleet(tmp_path: Path, version: str) -> None:
    shutil.copytree(STATES / version / "console", tmp_path / "console")
    with console(tmp_path) as running:
        page = running.page("/")
    assert "web-0" in page
    assert "Reboot" in page


def write(target: Path) -> None:
    """Let today's processes leave their state in `target`."""
    with tempfile.TemporaryDirectory() as place, closed_port() as nowhere, ImdsLab(vms=["web-0"]) as imds:
        folder = Path(place)
        with Inbox() as strict:
            strict.fault(400, count=None)
            given = {**settings(imds, nowhere, strict.url), "stop_seconds": 1}
            with Forward(folder, given) as forward:
                forward.wait_for_status(
                    lambda status: status["document"] and status["sinks"]["strict"]["dead_letters"]
                )
                forward.stop()
        shutil.copytree(
            forward.state, target / "forward", ignore=shutil.ignore_patterns("lock", "status.json")
        )
        vm = FleetVm("web-0")
        with console(folder) as running:
            running.send(vm.heartbeat(AT), vm.change("scheduled", event(at=AT), AT))
        shutil.copytree(folder / "console", target / "console", ignore=shutil.ignore_patterns("lock"))


if __name__ == "__main__":
    write(STATES / sys.argv[1])
