"""Who the VM is, and the losses that are published in its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.config.models import Config
from bridge.errors import StateError
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from bridge.imds.instance import Vm
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import STATE, Loss
from bridge.service.bridge_events import BridgeEvents
from bridge.service.identity import SETTLE_SECONDS, VmIdentity, approval_session
from tests.support.clock import MovedClock
from tests.support.diff import entry
from tests.support.imds import WEB_0, WEB_1, ImdsDouble
from tests.support.outbox import commit, open_outbox, waiting
from tests.support.samples import change_event


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def imds() -> ImdsDouble:
    return ImdsDouble(vm=WEB_0)


@pytest.fixture
def outbox(tmp_path: Path, clock: MovedClock) -> Iterator[Outbox]:
    opened = open_outbox(tmp_path, clock=clock)
    yield opened
    opened.close()


Start = Callable[..., VmIdentity]


@pytest.fixture
def start(imds: ImdsDouble, outbox: Outbox, clock: MovedClock) -> Start:
    """Return what starts another process on the state, and lets it find out who the VM is."""

    def settled(*, boot_id: str = "", wait: Callable[[float], object] = clock.advance) -> VmIdentity:
        identity = VmIdentity(Config(), "forward", imds=imds, outbox=outbox, clock=clock, boot_id=boot_id)
        identity.settle(wait)
        return identity

    return settled


def group_source(identity: VmIdentity) -> str:
    change = Change(kind="scheduled", event=ScheduledEvent(raw=entry()))
    return change_event(change, datetime(2026, 11, 20, tzinfo=UTC), by=identity.reporter()).source


def published(outbox: Outbox) -> list[dict[str, Any]]:
    return [event.envelope for event in outbox.pending("a", 100)]


@pytest.mark.parametrize(
    ("vm", "is_other"),
    [
        (WEB_0, False),
        (replace(WEB_0, vm_id=WEB_0.vm_id.upper()), False),
        (replace(WEB_0, vm_id=""), False),
        (replace(WEB_0, name="renamed"), False),
        (WEB_1, True),
        (replace(WEB_0, vm_id=WEB_1.vm_id), True),
    ],
)
def test_only_another_vm_id_means_another_vm(
    start: Start, imds: ImdsDouble, outbox: Outbox, vm: Vm, is_other: bool
) -> None:
    start()
    commit(outbox, "kept")
    imds.vm = vm
    assert start().vm == vm
    assert waiting(outbox) == ([] if is_other else ["kept"])


def test_a_stop_ends_the_wait_for_instance_data(imds: ImdsDouble, start: Start) -> None:
    imds.fail(500)
    start(wait=lambda _: "SIGTERM")
    assert len(imds.calls) == 1


@pytest.mark.parametrize("boots", [("1", "2"), ("1", ""), ("", "")])
def test_without_instance_data_a_start_waits_five_seconds_and_then_the_state_counts_as_this_vms(
    start: Start,
    imds: ImdsDouble,
    clock: MovedClock,
    boots: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    start(boot_id=boots[0])
    imds.fail(500, methods=["instance"])
    before = clock.monotonic()
    identity = start(boot_id=boots[1])
    assert 1 < clock.monotonic() - before <= SETTLE_SECONDS
    assert identity.vm == WEB_0
    assert identity.reporter().name == "web-0"
    assert not identity.resolved
    assert len(caplog.messages) == 1


def test_a_restart_on_the_same_boot_needs_no_instance_data(start: Start, imds: ImdsDouble) -> None:
    start(boot_id="1")
    imds.fail(500, methods=["instance"])
    asked = len(imds.calls)
    assert start(boot_id="1").vm == WEB_0
    assert len(imds.calls) == asked


def test_instance_data_is_requested_every_30_seconds_until_there_is_some(
    start: Start, imds: ImdsDouble, clock: MovedClock
) -> None:
    imds.fail(500)
    identity = start()
    requested_at = []
    for second in range(100):
        if second == 80:
            imds.restore()
        before = len(imds.calls)
        identity.resolve()
        if len(imds.calls) > before:
            requested_at.append(second)
        clock.advance(1)
    assert requested_at == [0, 30, 60, 90]
    assert identity.resolved


def test_the_source_of_a_vms_own_events_stays_within_a_run_although_instance_data_comes_late(
    start: Start, imds: ImdsDouble, outbox: Outbox
) -> None:
    imds.fail(500)
    identity = start()
    BridgeEvents(identity).emit_started()
    imds.restore()
    identity.resolve()
    BridgeEvents(identity).emit_heartbeat()
    first, second = published(outbox)
    assert first["source"].startswith("urn:imds-bridge:vm:")
    assert second["source"] == first["source"]
    assert second["reporter"] == first["reporter"]
    assert second["data"]["Vm"]["ResourceId"] == WEB_0.resource_id
    BridgeEvents(start()).emit_started()
    assert published(outbox)[-1]["source"] == WEB_0.resource_id


def test_a_scheduled_event_has_its_groups_source_as_soon_as_instance_data_comes(
    start: Start, imds: ImdsDouble
) -> None:
    imds.fail(500)
    identity = start()
    assert group_source(identity).startswith("urn:imds-bridge:vm:")
    imds.restore()
    identity.resolve()
    assert group_source(identity) == WEB_0.resource_id.partition("/providers/")[0]


def test_a_process_that_learns_late_that_the_state_is_another_vms_ends(
    start: Start, imds: ImdsDouble, outbox: Outbox
) -> None:
    start(boot_id="1")
    commit(outbox, "kept")
    imds.fail(500)
    identity = start(boot_id="2")
    imds.restore()
    imds.vm = WEB_1
    with pytest.raises(StateError, match="the state is that of VM"):
        identity.resolve()
    assert start(boot_id="2").vm == WEB_1
    assert waiting(outbox) == []


SIZE_LIMIT = Loss(reason="SizeLimit", count=3, sink="a", oldest=1e9, newest=1e9 + 60)


def note_loss(outbox: Outbox, *losses: Loss) -> None:
    outbox._storage.run(lambda database: database.note_losses(losses), synced=True)


LOST_TIMES = {"OldestTime": "2001-09-09T01:46:40.000Z", "NewestTime": "2001-09-09T01:47:40.000Z"}
NOTHING_KNOWN = dict.fromkeys(("Count", "Sink", "OldestTime", "NewestTime"))


@pytest.mark.parametrize(
    ("loss", "data", "must_repeat"),
    [
        (SIZE_LIMIT, {"Count": 3, "Sink": "a", **LOST_TIMES}, False),
        (Loss(reason="Damage", count=None), NOTHING_KNOWN, True),
        (Loss(reason="StateFolderGone", count=None), NOTHING_KNOWN, True),
        (Loss(reason="NotWritten", count=None), NOTHING_KNOWN, True),
    ],
    ids=["the size limit", "damage", "no state", "a full disk"],
)
def test_a_loss_is_published_and_what_damage_has_cost_must_be_published_again(
    start: Start, outbox: Outbox, loss: Loss, data: dict[str, Any], must_repeat: bool
) -> None:
    events = BridgeEvents(start())
    note_loss(outbox, loss)
    events.emit_losses(lambda: {(STATE, "watch"): "begins again"})
    assert outbox.record(STATE, "watch") == ("begins again" if must_repeat else None)
    (event,) = published(outbox)
    assert event["type"] == "io.imdsbridge.bridge.loss.v1"
    assert event["reporterseq"] == "000000000001"
    assert event["data"].items() >= {"Reason": loss.reason, **data}.items()
    assert event["data"]["Vm"]["Name"] == "web-0"
    assert outbox.losses() == []


def test_losses_are_published_together_and_at_most_once_a_minute(
    start: Start, outbox: Outbox, clock: MovedClock
) -> None:
    events = BridgeEvents(start())
    note_loss(outbox, SIZE_LIMIT, replace(SIZE_LIMIT, sink="b"))
    events.emit_losses()
    note_loss(outbox, SIZE_LIMIT)
    clock.advance(59)
    note_loss(outbox, SIZE_LIMIT)
    events.emit_losses()
    assert len(published(outbox)) == 2
    clock.advance(1)
    events.emit_losses()
    clock.advance(60)
    events.emit_losses()
    assert [event["data"]["Count"] for event in published(outbox)] == [3, 3, 6]


@pytest.mark.parametrize(
    ("template", "vm", "session"),
    [
        ("", None, ""),
        ("{vm}", None, None),
        ("{resource_group}.{vm}", Vm(name="Web-0", resource_group="Shop"), "shop.web-0"),
    ],
)
def test_the_session_of_a_vm_is_named_in_lower_case_once_the_vm_is_known(
    template: str, vm: Vm | None, session: str | None
) -> None:
    assert approval_session(template, vm) == session


def test_why_there_is_no_instance_data_is_known_until_there_is(
    imds: ImdsDouble, start: Start, clock: MovedClock
) -> None:
    imds.fail(500, methods=["instance"])
    identity = start()
    assert "500" in identity.last_error
    imds.restore()
    clock.advance(30)
    identity.resolve()
    assert identity.last_error == ""
