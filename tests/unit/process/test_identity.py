"""Who the VM is, and the losses that are published in its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import StateError
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from bridge.imds.instance import Vm, approval_session
from bridge.outbox.rows import STATE, Loss
from bridge.outbox.upkeep import KeptOutbox
from bridge.process.bridge_events import BridgeEvents
from bridge.process.identity import SETTLE_SECONDS, VmIdentity
from tests.support.clock import MovedClock
from tests.support.diff import entry
from tests.support.imds import WEB_0, WEB_1, ImdsDouble
from tests.support.only import only
from tests.support.outbox import commit, open_outbox, waiting
from tests.support.samples import change_event


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def imds() -> ImdsDouble:
    return ImdsDouble(vm=WEB_0)


@pytest.fixture
def outbox(tmp_path: Path, clock: MovedClock) -> Iterator[KeptOutbox]:
    opened = open_outbox(tmp_path, clock=clock)
    yield opened
    opened.close()


Start = Callable[..., VmIdentity]


@pytest.fixture
def start(imds: ImdsDouble, outbox: KeptOutbox, clock: MovedClock) -> Start:
    """Return what starts another process on the state, and lets it find out who the VM is."""

    def settled(*, boot_id: str = "", wait: Callable[[float], object] = clock.advance) -> VmIdentity:
        identity = VmIdentity("forward", imds=imds, outbox=outbox, clock=clock, boot_id=boot_id)
        identity.settle(wait)
        return identity

    return settled


def group_source(identity: VmIdentity) -> str:
    change = Change(kind="scheduled", event=ScheduledEvent(raw=entry()))
    return change_event(change, datetime(2026, 11, 20, tzinfo=UTC), by=identity.reporter()).source


def published(outbox: KeptOutbox) -> list[dict[str, Any]]:
    return [event.envelope for event in outbox.pending("a", 100)]


@pytest.mark.parametrize(
    ("vm", "is_other"),
    [
        (WEB_0, False),
        (replace(WEB_0, vm_id=WEB_0.vm_id.upper()), False),
        (replace(WEB_0, name="renamed"), False),
        (WEB_1, True),
        (replace(WEB_0, vm_id=WEB_1.vm_id), True),
    ],
)
def test_only_another_vm_id_means_another_vm(
    start: Start, imds: ImdsDouble, outbox: KeptOutbox, vm: Vm, is_other: bool
) -> None:
    start()
    commit(outbox, "kept")
    imds.vm = vm
    assert start().vm == vm
    assert waiting(outbox) == ([] if is_other else ["kept"])


@pytest.mark.parametrize("name", ["web-0", "WEB-0", "pool_24"])
def test_a_part_of_instance_data_replaces_nothing_that_is_known_and_a_clone_is_seen_later(
    start: Start, imds: ImdsDouble, clock: MovedClock, name: str
) -> None:
    start(boot_id="1")
    imds.vm = Vm(name=name, location="westeurope")
    identity = start(boot_id="2")
    assert identity.vm == WEB_0
    assert identity.resolved == (name != "pool_24")
    assert identity.last_error == "instance data lacks vmId, resourceGroupName, subscriptionId"
    imds.vm = WEB_1
    clock.advance(60)
    with pytest.raises(StateError, match="the state is that of VM"):
        identity.resolve()


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
    assert "500" in identity.last_error
    assert not identity.resolved
    assert len(caplog.messages) == 1


def test_a_restart_on_the_same_boot_needs_no_instance_data(start: Start, imds: ImdsDouble) -> None:
    start(boot_id="1")
    imds.fail(500, methods=["instance"])
    asked = len(imds.calls)
    assert start(boot_id="1").vm == WEB_0
    assert len(imds.calls) == asked


@pytest.mark.parametrize("vm", [None, replace(WEB_0, resource_group="")])
def test_instance_data_is_requested_soon_and_then_every_minute_until_it_is_complete_and_then_every_ten(
    start: Start, imds: ImdsDouble, clock: MovedClock, vm: Vm | None
) -> None:
    imds.fail(500, methods=() if vm else ("instance",))
    imds.vm = vm or WEB_0
    identity = start()
    requested_at = []
    for second in range(900):
        if second == 180:
            imds.restore()
            imds.vm = WEB_0
        before = len(imds.calls)
        identity.resolve()
        if len(imds.calls) > before:
            requested_at.append(second)
        clock.advance(1)
    assert requested_at == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert (identity.is_renamed, identity.last_error) == (True, "")
    assert start().vm == WEB_0


def test_the_boot_is_kept_also_where_the_first_answer_was_a_part(
    start: Start, imds: ImdsDouble, clock: MovedClock
) -> None:
    start(boot_id="1")
    imds.vm = Vm(name=WEB_0.name, location="westeurope")
    identity = start(boot_id="2")
    imds.vm = WEB_0
    clock.advance(60)
    identity.resolve()
    imds.fail(500, methods=["instance"])
    asked = len(imds.calls)
    assert start(boot_id="2").vm == WEB_0
    assert len(imds.calls) == asked


def test_tags_follow_with_the_next_reading_and_a_reading_that_fails_changes_nothing(
    start: Start, imds: ImdsDouble, clock: MovedClock, outbox: KeptOutbox
) -> None:
    identity = start()
    epoch = outbox.epoch
    imds.vm = replace(WEB_0, tags={"owner": "shop"}, name="WEB-0")  # Azure spells names in any case
    clock.advance(600)
    identity.resolve()
    imds.fail(500)
    clock.advance(600)
    identity.resolve()
    assert identity.vm == replace(WEB_0, tags={"owner": "shop"})
    assert (identity.is_renamed, identity.last_error, outbox.epoch) == (False, "", epoch)


MOVED = replace(
    WEB_0, resource_group="other", resource_id=WEB_0.resource_id.replace("/shop/", "/other/"), tags={}
)


@pytest.mark.parametrize("was", [None, Vm(name="web-0"), WEB_0], ids=["unknown", "a part", "known"])
def test_a_vm_that_is_named_otherwise_keeps_its_name_to_the_end_of_the_run_and_the_next_start_has_the_other(
    start: Start, imds: ImdsDouble, clock: MovedClock, was: Vm | None
) -> None:
    imds.fail(500, methods=() if was else ("instance",))
    imds.vm = was or WEB_0
    identity = start(boot_id="1")
    old_source = group_source(identity)
    imds.restore()
    imds.vm = MOVED
    clock.advance(600)
    identity.resolve()
    imds.vm = WEB_0
    clock.advance(600)
    identity.resolve()
    assert (identity.is_renamed, group_source(identity)) == (True, old_source)
    imds.fail(500)
    assert start(boot_id="1").vm == MOVED


def test_a_process_that_learns_late_that_the_state_is_another_vms_ends(
    start: Start, imds: ImdsDouble, outbox: KeptOutbox
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


def note_loss(outbox: KeptOutbox, *losses: Loss) -> None:
    outbox.storage.run(lambda database: database.note_losses(losses), synced=True)


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
    start: Start, outbox: KeptOutbox, loss: Loss, data: dict[str, Any], must_repeat: bool
) -> None:
    events = BridgeEvents(start())
    note_loss(outbox, loss)
    events.emit_losses(lambda: {(STATE, "watch"): "begins again"})
    assert outbox.record(STATE, "watch") == ("begins again" if must_repeat else None)
    event = only(published(outbox))
    assert event["type"] == "io.imdsbridge.bridge.loss.v1"
    assert event["reporterseq"] == "000000000001"
    assert event["data"].items() >= {"Reason": loss.reason, **data}.items()
    assert event["data"]["Vm"]["Name"] == "web-0"
    assert outbox.losses() == []


def test_losses_are_published_together_and_at_most_once_a_minute(
    start: Start, outbox: KeptOutbox, clock: MovedClock
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
        ("{resource_group}.{vm}", Vm(name="Web-0"), None),
        ("{resource_group}.{vm}", Vm(name="Web-0", resource_group="Shop"), "shop.web-0"),
        ("{subscription}.{vm}", Vm(name="Web-0", subscription_id="AB-1"), "ab-1.web-0"),
    ],
)
def test_the_session_of_a_vm_is_named_in_lower_case_once_the_vm_is_known(
    template: str, vm: Vm | None, session: str | None
) -> None:
    assert approval_session(template, vm) == session
