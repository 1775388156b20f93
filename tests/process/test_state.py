"""State that is damaged or on a full disk: the real command starts, reports losses, and publishes."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.disk import small_disk
from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward, wait_until


def schedule(lab: ImdsLab, size: int = 0) -> str:
    return lab.schedule(
        event_type="Reboot", resources=["web-0"], notice_seconds=86_400, description="x" * size
    )


def imds(lab: ImdsLab) -> dict[str, Any]:
    return {"endpoint": lab.url("web-0"), "poll_seconds": 0.2}


def notices(forward: Forward, event_id: str) -> list[dict[str, Any]]:
    """Return what was published about an event; a line that a kill has cut off, and what follows in it, is none."""
    found = []
    for line in forward.output.read_text().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [one for one in found if one["subject"] == event_id]


def wait_for_notice(forward: Forward, event_id: str, count: int = 1) -> None:
    """Wait until a process that runs has published an event so many times."""

    def is_published() -> bool:
        assert forward.process is not None
        assert forward.process.poll() is None, forward
        return len(notices(forward, event_id)) >= count

    wait_until(is_published, describe=lambda: forward)


def test_a_damaged_state_is_a_loss_and_a_live_notice_is_published_again(tmp_path: Path) -> None:
    with ImdsLab(rate_limit=None) as lab:
        forward = Forward(tmp_path, {"imds": imds(lab)})
        event_id = schedule(lab)
        with forward:
            wait_for_notice(forward, event_id)
            assert forward.stop() == 0, forward
        file = forward.state / "outbox.db"
        os.truncate(file, file.stat().st_size // 2 // 512 * 512)
        with forward:
            wait_for_notice(forward, event_id, 2)
            assert forward.stop() == 0, forward
        assert [one["data"]["Reason"] for one in forward.printed() if "loss" in one["type"]] == ["Damage"]


def errors(forward: Forward) -> int:
    """Return how often processes have reported that their store is unavailable; each does so at its start."""
    return sum("the state store is unavailable" in line["message"] for line in forward.lines())


def test_a_full_disk_ends_no_process_and_loses_no_notice(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, ImdsLab(rate_limit=None) as lab:
        forward = Forward(tmp_path, {"imds": imds(lab), "state_dir": disk.state})
        forward.state = disk.state / "forward"
        with forward:
            wait_for_notice(forward, schedule(lab))
            disk.fill()
            while not errors(forward):
                wait_for_notice(forward, schedule(lab, 20_000))
            forward.kill()
        with forward:
            wait_for_notice(forward, schedule(lab, 20_000))
            wait_until(lambda: errors(forward) >= 2, describe=lambda: forward)
            forward.kill()
        with forward:
            wait_for_notice(forward, schedule(lab))
            disk.free()
            forward.wait_for_log("the state store works again")
            wait_for_notice(forward, schedule(lab))
            assert forward.stop() == 0, forward
        with forward:
            forward.wait_for_status(lambda status: status["storage_error"] is None)
            wait_for_notice(forward, schedule(lab))
            assert forward.stop() == 0, forward
