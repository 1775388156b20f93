"""Who the VM is, and the heartbeats of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.config.models import Config
from bridge.imds.instance import Vm
from bridge.imds.memory import ImdsDouble
from bridge.outbox.outbox import Loss, Outbox
from bridge.runtime.instants import iso_utc
from bridge.service.identity import HOLD_SECONDS, VmIdentity, approval_session
from tests.support.clock import MovedClock
from tests.support.imds import WEB_0, WEB_1
from tests.support.outbox import commit, deliver, open_outbox, waiting


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


def start(imds: ImdsDouble, outbox: Outbox, clock: MovedClock, *, boot_id: str = "") -> VmIdentity:
    """Return the identity of a process that starts on the state."""
    return VmIdentity(Config(), "forward", imds=imds, outbox=outbox, clock=clock, boot_id=boot_id)


def published(outbox: Outbox) -> list[dict[str, Any]]:
    return [event.envelope for event in outbox.pending("a", 100)[1]]


def test_a_heartbeat_states_its_own_number_as_the_last_one(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock
) -> None:
    identity = start(imds, outbox, clock)
    identity.emit_heartbeat()
    identity.next_sequence()
    identity.emit_stopping()
    numbers = [(event["reporterseq"], event["data"]["LastReporterSeq"]) for event in published(outbox)]
    assert numbers == [("000000000001", 1), ("000000000003", 3)]


def test_heartbeats_are_an_hour_apart(imds: ImdsDouble, outbox: Outbox, clock: MovedClock) -> None:
    identity = start(imds, outbox, clock)
    identity.emit_heartbeat()
    clock.advance(3599)
    identity.emit_heartbeat()
    assert len(published(outbox)) == 1
    clock.advance(1)
    identity.emit_heartbeat()
    assert [event["data"]["Reason"] for event in published(outbox)] == ["Started", "Hourly"]


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
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock, vm: Vm, is_other: bool
) -> None:
    start(imds, outbox, clock).resolve()
    imds.vm = vm
    assert start(imds, outbox, clock).resolve() is is_other


def test_instance_data_is_requested_less_and_less_often_but_every_30_seconds(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock
) -> None:
    imds.fail(500)
    identity = start(imds, outbox, clock)
    requested_at = []
    for second in range(130):
        before = len(imds.calls)
        identity.resolve()
        if len(imds.calls) > before:
            requested_at.append(second)
        clock.advance(1)
    assert requested_at == [0, 1, 3, 7, 15, 31, 61, 91, 121]


@pytest.mark.parametrize("status", [None, 500], ids=["instance data", "no instance data"])
def test_events_of_an_earlier_process_wait_for_instance_data_but_not_for_long(
    imds: ImdsDouble, clock: MovedClock, tmp_path: Path, status: int | None
) -> None:
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        start(imds, outbox, clock).resolve()
        commit(outbox, "kept")
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        if status:
            imds.fail(status)
        identity = start(imds, outbox, clock)
        commit(outbox, "new")
        assert waiting(outbox) == ["new"]
        identity.resolve()
        clock.advance(HOLD_SECONDS - 1)
        outbox.recover()
        assert waiting(outbox) == (["new"] if status else ["kept", "new"])
        clock.advance(1)
        outbox.recover()
        assert waiting(outbox) == ["kept", "new"]


def test_a_clone_publishes_what_waits_of_the_original_as_a_loss_and_nothing_of_it(
    imds: ImdsDouble, clock: MovedClock, tmp_path: Path
) -> None:
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        start(imds, outbox, clock).resolve()
        commit(outbox, "delivered", "kept 1", "kept 2")
        deliver(outbox, limit=1)
    clock.advance(60)
    imds.vm = WEB_1
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        identity = start(imds, outbox, clock)
        commit(outbox, "new")
        assert identity.resolve()
        identity.emit_losses()
        new, loss = published(outbox)
        assert new["id"] == "new"
        data = loss["data"]
        assert (data["Reason"], data["Count"], data["Sink"]) == ("OtherVm", 2, "a")
        assert data["OldestTime"] == iso_utc(clock.now() - timedelta(seconds=60))
        assert data["Vm"]["Name"] == "web-1"


def test_a_clone_of_a_vm_that_has_delivered_everything_reports_no_loss(
    imds: ImdsDouble, clock: MovedClock, tmp_path: Path
) -> None:
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        start(imds, outbox, clock).resolve()
        commit(outbox, "1")
        deliver(outbox)
    imds.vm = WEB_1
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        identity = start(imds, outbox, clock)
        commit(outbox, "new")
        assert identity.resolve()
        assert outbox.losses() == []
        assert waiting(outbox) == ["new"]


def test_a_first_start_holds_nothing(imds: ImdsDouble, outbox: Outbox, clock: MovedClock) -> None:
    imds.fail(500)
    start(imds, outbox, clock).resolve()
    commit(outbox, "1")
    assert waiting(outbox) == ["1"]
    assert not outbox.has_held()


SIZE_LIMIT = Loss(reason="SizeLimit", count=3, sink="a", oldest=1e9, newest=1e9 + 60)


def note_loss(outbox: Outbox, *losses: Loss) -> None:
    for loss in losses:
        outbox._state.note_loss(loss)


@pytest.mark.parametrize(
    ("loss", "data", "must_repeat"),
    [
        (
            SIZE_LIMIT,
            {
                "Reason": "SizeLimit",
                "Count": 3,
                "Sink": "a",
                "OldestTime": "2001-09-09T01:46:40.000Z",
                "NewestTime": "2001-09-09T01:47:40.000Z",
            },
            False,
        ),
        (
            Loss(reason="Damage", count=None),
            {"Reason": "Damage", "Count": None, "Sink": None, "OldestTime": None, "NewestTime": None},
            True,
        ),
        (
            Loss(reason="Damage", count=0),
            {"Reason": "Damage", "Count": 0, "Sink": None, "OldestTime": None, "NewestTime": None},
            False,
        ),
    ],
    ids=["the size limit", "unknown damage", "damage without a loss"],
)
def test_a_loss_is_published_and_what_damage_has_cost_must_be_published_again(
    imds: ImdsDouble, outbox: Outbox, loss: Loss, data: dict[str, Any], must_repeat: bool
) -> None:
    outbox.set_meta({"watch": "kept"})
    identity = start(imds, outbox, MovedClock())
    identity.resolve()
    note_loss(outbox, loss)
    assert identity.emit_losses() is must_repeat
    assert outbox.meta("watch") == ("" if must_repeat else "kept")
    (event,) = published(outbox)
    assert event["type"] == "io.imdsbridge.bridge.loss.v1"
    assert event["reporterseq"] == "000000000001"
    assert {name: event["data"][name] for name in data} == data
    assert event["data"]["Vm"]["Name"] == "web-0"
    assert outbox.losses() == []


def test_losses_are_published_together_and_at_most_once_a_minute(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock
) -> None:
    identity = start(imds, outbox, clock)
    note_loss(outbox, SIZE_LIMIT, replace(SIZE_LIMIT, sink="b"))
    identity.emit_losses()
    note_loss(outbox, SIZE_LIMIT)
    clock.advance(59)
    note_loss(outbox, SIZE_LIMIT)
    assert not identity.emit_losses()
    assert len(published(outbox)) == 2
    clock.advance(1)
    identity.emit_losses()
    clock.advance(60)
    identity.emit_losses()
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


@pytest.mark.parametrize(
    ("boots", "is_confirmed"),
    [(("1", "1"), True), (("1", "2"), False), (("1", ""), False), (("", ""), False)],
)
def test_a_restart_on_the_same_boot_needs_no_instance_data_to_confirm_the_state(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock, boots: tuple[str, str], is_confirmed: bool
) -> None:
    start(imds, outbox, clock, boot_id=boots[0]).resolve()
    imds.fail(500, methods=["instance"])
    again = start(imds, outbox, clock, boot_id=boots[1])
    again.resolve()
    assert again.is_confirmed == is_confirmed
    again.emit_heartbeat()
    assert len(published(outbox)) == 1
    assert (published(outbox)[0]["reporterepoch"] == outbox.meta("epoch")) == is_confirmed


def test_a_restart_on_the_same_boot_publishes_as_the_vm_also_while_instance_data_is_not_available(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock
) -> None:
    first = start(imds, outbox, clock, boot_id="boot-1")
    first.resolve()
    first.emit_heartbeat()
    imds.fail(500, methods=["instance"])
    again = start(imds, outbox, clock, boot_id="boot-1")
    again.resolve()
    again.emit_heartbeat()
    known, kept = (
        {name: event[name] for name in ("source", "subject", "reporter", "reporterepoch")}
        for event in published(outbox)
    )
    assert kept == known
    assert not again.resolved


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"unknown": 1}'])
def test_a_kept_vm_that_cannot_be_read_is_unknown(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock, kept: str
) -> None:
    start(imds, outbox, clock, boot_id="boot-1").resolve()
    outbox.set_meta({"vm": kept})
    assert start(imds, outbox, clock, boot_id="boot-1").vm is None


def test_another_vm_is_recognised_on_the_same_boot_as_well(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock
) -> None:
    start(imds, outbox, clock, boot_id="boot-1").resolve()
    imds.vm = WEB_1
    assert start(imds, outbox, clock, boot_id="boot-1").resolve()
