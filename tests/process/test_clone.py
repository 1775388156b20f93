"""A state folder that is copied to another VM: nothing of the original is published there."""

from __future__ import annotations

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


def boot_another_machine(clone: Forward) -> None:
    """Let the copied state be of another boot than this machine's, as it is on a clone."""
    with closing(open_outbox(clone.state, sinks={"out": (Filter(), True)}, clock=Clock())) as outbox:
        outbox.commit([], records={(STATE, VM): {**outbox.record(STATE, VM), "boot_id": "the original's"}})


def test_a_clone_publishes_the_notices_of_its_document_and_reports_what_it_does_not_publish(
    tmp_path: Path,
) -> None:
    with ImdsLab(vms=[ORIGINAL, CLONE], rate_limit=None) as lab, closed_port() as nowhere:

        def imds(vm: str) -> dict[str, Any]:
            return {"endpoint": lab.url(vm), "poll_seconds": 0.2}

        sinks = {"out": {"kind": "webhook", "url": nowhere, "from_start": True}}
        given = {"imds": imds(ORIGINAL), "sinks": sinks, "stop_seconds": 0}
        event_id = lab.schedule(event_type="Reboot", resources=[ORIGINAL], notice_seconds=86_400)
        with Forward(tmp_path / "original", given) as original:
            original.wait_for_status(lambda status: status["sinks"]["out"]["backlog"] >= 3)
            assert original.stop() == 0, original
        sinks = {"out": {"kind": "stdout", "from_start": True}}
        clone = Forward(tmp_path / "clone", {"imds": imds(CLONE), "sinks": sinks})
        shutil.copytree(original.state, clone.state)
        boot_another_machine(clone)
        lab.fault("500", path=INSTANCE_PATH, vm=CLONE, count=2)
        with clone:
            for text in (event_id, "bridge.loss"):
                wait_until(lambda sought=text: sought in str(clone.printed()), describe=lambda: clone)  # type: ignore[misc]
            assert clone.stop() == 0, clone
        published = clone.printed()
        names = {one["data"].get("Vm", {}).get("Name") for one in published}
        assert CLONE in names
        assert ORIGINAL not in names
        (loss,) = [one["data"] for one in published if "bridge.loss" in one["type"]]
        assert (loss["Reason"], loss["Count"] >= 3, loss["Vm"]["Name"]) == ("OtherVm", True, CLONE)
        notices = [one for one in published if one["subject"] == event_id]
        assert {one["id"] for one in notices} == {notices[0]["id"]}
        assert [one["data"]["AffectsThisVm"] for one in notices] == [False]
