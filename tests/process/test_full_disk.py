"""The real command on a file system that is full: it publishes, survives kill -9, and loses nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from tests.support.disk import small_disk
from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward, wait_until


def errors(forward: Forward) -> int:
    """Return how often processes have reported that their store is unavailable; each does so at its start."""
    return sum("the state store is unavailable" in line["message"] for line in forward.lines())


def wait_for_notice(forward: Forward, event_id: str) -> None:
    """Wait until an event is published, by a process that runs."""

    def is_published() -> bool:
        assert forward.process is not None
        assert forward.process.poll() is None, forward
        return event_id in map(subject, forward.output.read_text().splitlines())

    wait_until(is_published, describe=lambda: forward)


def subject(line: str) -> str | None:
    """Return the subject of a line; None if a kill has cut it off, or it is still being written."""
    with suppress(ValueError):
        return str(json.loads(line)["subject"])
    return None


def test_a_full_disk_ends_no_process_and_loses_no_notice(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, ImdsLab(rate_limit=None) as lab:
        forward = Forward(
            tmp_path,
            {"imds": {"endpoint": lab.url("web-0"), "poll_seconds": 0.2}, "state_dir": disk.state},
        )
        forward.state = disk.state / "forward"

        def schedule(size: int = 0) -> str:
            return lab.schedule(
                event_type="Reboot", resources=["web-0"], notice_seconds=86_400, description="x" * size
            )

        with forward:
            wait_for_notice(forward, schedule())
            disk.fill()
            while not errors(forward):
                wait_for_notice(forward, schedule(20_000))
            forward.kill()
        for starts in (2, 3):
            with forward:
                wait_for_notice(forward, schedule(20_000))
                assert errors(forward) >= starts, forward
                forward.kill()
        with forward:
            event_id = schedule()
            wait_for_notice(forward, event_id)
            disk.free()
            forward.wait_for_log("the state store works again")
            wait_for_notice(forward, schedule())
            assert forward.stop() == 0, forward
        with forward:
            forward.wait_for_status(lambda status: status["storage_error"] is None)
            wait_for_notice(forward, schedule())
            assert forward.stop() == 0, forward
