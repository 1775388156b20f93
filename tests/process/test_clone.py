"""A state folder that is copied to another VM: nothing of the original is published there."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from bridge.events.filters import Filter
from bridge.lab.imds import INSTANCE_PATH
from bridge.outbox.rows import STATE
from bridge.runtime.time import Clock
from bridge.service.identity import VM
from tests.support.imds_lab import ImdsLab
from tests.support.outbox import open_outbox
from tests.support.process import Forward, closed_port, wait_until

ORIGINAL, CLONE = "web-0", "web-1"


def published(forward: Forward) -> list[dict[str, Any]]:
    lines = forward.output.read_text().splitlines() if forward.output.exists() else []
    return [json.loads(line) for line in lines]


def named(forward: Forward, name: str) -> list[str]:
    """Return the types of what was published in a VM's name."""
    return [one["type"] for one in published(forward) if one["data"].get("Vm", {}).get("Name") == name]


def boot_another_machine(clone: Forward) -> None:
    """Let the copied state be of another boot than this machine's, as it is on a clone."""
    with closing(open_outbox(clone.state, sinks={"out": (Filter(), True)}, clock=Clock())) as outbox:
        outbox.commit([], records={(STATE, VM): {**outbox.record(STATE, VM), "boot_id": "the original's"}})


def test_a_clone_publishes_the_notices_of_its_document_and_reports_what_it_does_not_publish(
    tmp_path: Path,
) -> None:
    with ImdsLab(vms=[ORIGINAL, CLONE], rate_limit=None) as lab, closed_port() as nowhere:
        sinks = {"out": {"kind": "webhook", "url": nowhere, "from_start": True}}
        imds = {"endpoint": lab.url(ORIGINAL), "poll_seconds": 0.2}
        original = Forward(tmp_path / "original", {"imds": imds, "sinks": sinks, "stop_seconds": 0})
        event_id = lab.schedule(event_type="Reboot", resources=[ORIGINAL], notice_seconds=86_400)
        with original:
            original.wait_for_status(lambda status: status["sinks"]["out"]["backlog"] >= 3)
            assert original.stop() == 0, original
        clone = Forward(
            tmp_path / "clone",
            {
                "imds": {"endpoint": lab.url(CLONE), "poll_seconds": 0.2},
                "sinks": {"out": {"kind": "stdout", "from_start": True}},
            },
        )
        shutil.copytree(original.state, clone.state)
        boot_another_machine(clone)
        lab.fault("500", path=INSTANCE_PATH, vm=CLONE, count=2)
        with clone:
            wait_until(
                lambda: [one for one in published(clone) if one["subject"] == event_id],
                describe=lambda: clone,
            )
            wait_until(
                lambda: [name for name in named(clone, CLONE) if "bridge.loss" in name],
                describe=lambda: clone,
            )
            assert clone.stop() == 0, clone
        assert named(clone, ORIGINAL) == []
        (loss,) = [one["data"] for one in published(clone) if "bridge.loss" in one["type"]]
        assert loss["Reason"] == "OtherVm"
        assert loss["Count"] >= 3
        notices = [one for one in published(clone) if one["subject"] == event_id]
        assert {one["id"] for one in notices} == {notices[0]["id"]}
        assert [one["data"]["AffectsThisVm"] for one in notices] == [False]
