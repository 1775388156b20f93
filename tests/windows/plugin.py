"""A plugin for pytest on Linux: a test's processes run on Windows' Python under Wine, its simulators on Linux."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.process import COMMAND, Forward

HERE = Path(__file__).parent
STOP, PID = "stop-asked", "windows-pid"


def pytest_configure() -> None:
    """Start Windows' Python from now on, stop it by a file, and know its own id."""
    COMMAND[:] = [str(HERE / "python"), str(HERE / "stoppable.py")]
    patch = pytest.MonkeyPatch()
    start = Forward.start

    def begin(self: Forward) -> Forward:
        for name in (STOP, PID):
            (self.folder / name).unlink(missing_ok=True)
        self._environment = {**self._environment, "TEST_STOPPABLE": str(self.folder)}
        return start(self)

    def stop(self: Forward) -> int:
        (self.folder / STOP).touch()
        return self.wait()

    def current_status(self: Forward) -> dict[str, Any]:
        file, status = self.folder / PID, self.status()
        return status if file.exists() and file.read_text() == str(status.get("pid")) else {}

    patch.setattr(Forward, "start", begin)
    patch.setattr(Forward, "stop", stop)
    patch.setattr(Forward, "current_status", current_status)
