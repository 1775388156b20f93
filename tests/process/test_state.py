"""State that is damaged, another VM's, or on a full disk: the real command starts, reports losses, and publishes."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from bridge.events.filters import Filter
from bridge.lab.imds import INSTANCE_PATH
from bridge.outbox.rows import STATE, VM
from bridge.runtime.time import Clock
from tests.support.disk import small_disk
from tests.support.imds_lab import ImdsLab
from tests.support.only import only
from tests.support.outbox import open_outbox
from tests.support.process import Forward, closed_port, wait_until

ORIGINAL, CLONE = "web-0", "web-1"


def schedule(lab: ImdsLab, size: int = 0) -> str:
    return lab.schedule(
        event_type="Reboot", resources=[ORIGINAL], notice_seconds=86_400, description="x" * size
    )


def imds(lab: ImdsLab, vm: str = ORIGINAL) -> dict[str, Any]:
    return {"endpoint": lab.url(vm), "poll_seconds": 0.2}


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


def losses(forward: Forward) -> list[dict[str, Any]]:
    """Wait until a loss is published; return the data of all."""
    return wait_until(
        lambda: [one["data"] for one in forward.printed() if "bridge.loss" in one["type"]],
        describe=lambda: forward,
    )


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
            assert [one["Reason"] for one in losses(forward)] == ["Damage"]
            assert forward.stop() == 0, forward


def boot_another_machine(clone: Forward) -> None:
    """Let the copied state be of another boot than this machine's, as it is on a clone."""
    with closing(open_outbox(clone.state, sinks={"out": (Filter(), True)}, clock=Clock())) as outbox:
        outbox.commit([], records={(STATE, VM): {**outbox.record(STATE, VM), "boot_id": "the original's"}})


def test_a_clone_publishes_the_notices_of_its_document_and_reports_what_it_does_not_publish(
    tmp_path: Path,
) -> None:
    with ImdsLab(vms=[ORIGINAL, CLONE], rate_limit=None) as lab, closed_port() as nowhere:
        sinks = {"out": {"kind": "webhook", "url": nowhere, "from_start": True}}
        given = {"imds": imds(lab), "sinks": sinks, "stop_seconds": 0}
        event_id = schedule(lab)
        with Forward(tmp_path / "original", given) as original:
            original.wait_for_status(lambda status: status["sinks"]["out"]["backlog"] >= 3)
            assert original.stop() == 0, original
        sinks = {"out": {"kind": "stdout", "from_start": True}}
        clone = Forward(tmp_path / "clone", {"imds": imds(lab, CLONE), "sinks": sinks})
        shutil.copytree(original.state, clone.state)
        boot_another_machine(clone)
        lab.fault("500", path=INSTANCE_PATH, vm=CLONE, count=2)
        with clone:
            wait_for_notice(clone, event_id)
            loss = only(losses(clone))
            assert clone.stop() == 0, clone
        assert (loss["Reason"], loss["Count"] >= 3, loss["Vm"]["Name"]) == ("OtherVm", True, CLONE)
        assert [one["data"]["AffectsThisVm"] for one in notices(clone, event_id)] == [False]
        names = {one["data"].get("Vm", {}).get("Name") for one in clone.printed()}
        assert {CLONE, ORIGINAL} & names == {CLONE}


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
        for starts in (2, 3):
            with forward:
                wait_for_notice(forward, schedule(lab, 20_000))
                assert errors(forward) >= starts, forward
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
