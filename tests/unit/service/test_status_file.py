"""When the status file is written, and when it is left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.outbox.state_dir import StateFolder
from bridge.runtime.sd_notify import Supervisor
from bridge.service.status_file import StatusFile
from tests.support.clock import MovedClock


class Folder(StateFolder):
    """Keeps each status instead of writing it."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.statuses: list[dict[str, Any]] = []
        self.error: OSError | None = None

    def write_status(self, status: dict[str, Any]) -> None:
        if self.error:
            raise self.error
        self.statuses.append(status)


class Rig:
    """A status file with a folder in memory."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.folder = Folder()
        self.file = StatusFile(self.folder, supervisor=Supervisor({}), clock=self.clock)
        self.dead_letters = 0
        self.sink: dict[str, Any] = {"state": "ok", "backlog": 0, "oldest_waits_seconds": None}
        self.status: dict[str, Any] = {"vm": "web-0", "written_at": 0.0, "last_good_at": 0.0}

    def write(self) -> int:
        """Write; return how often the file has been written so far."""
        status = {**self.status, "written_at": self.clock.wall(), "sinks": {"ops": {**self.sink}}}
        self.file.write(status, lambda: {"ops": self.dead_letters})
        return len(self.folder.statuses)


def test_an_unchanged_status_is_written_every_ten_seconds() -> None:
    rig = Rig()
    written = []
    for _ in range(13):
        written.append(rig.write())
        rig.status["last_good_at"] += 2.0
        rig.clock.advance(2)
    assert written == [1] * 5 + [2] * 5 + [3] * 3


def test_dead_letters_are_counted_when_the_file_is_written() -> None:
    rig = Rig()
    rig.write()
    rig.dead_letters = 3
    rig.clock.advance(10)
    rig.write()
    assert [status["sinks"]["ops"]["dead_letters"] for status in rig.folder.statuses] == [0, 3]


@pytest.mark.parametrize("change", ["vm", "state", "backlog"])
def test_a_change_is_written_at_once(change: str) -> None:
    rig = Rig()
    rig.write()
    if change == "vm":
        rig.status["vm"] = "web-1"
    else:
        rig.sink[change] = "retrying"
    assert rig.write() == 2
    assert rig.write() == 2


def test_a_file_that_cannot_be_written_is_tried_again_and_ends_nothing() -> None:
    rig = Rig()
    rig.folder.error = OSError(28, "No space left on device")
    assert rig.write() == 0
    rig.folder.error = None
    rig.clock.advance(10)
    assert rig.write() == 1
