"""Who the VM is, and the heartbeats of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.config.models import Config
from bridge.imds.instance import Vm
from bridge.imds.memory import ImdsDouble
from bridge.outbox.outbox import Outbox
from bridge.service.identity import VmIdentity, approval_session
from tests.support.clock import MovedClock
from tests.support.imds import WEB_0, WEB_1
from tests.support.outbox import open_outbox


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


def start(imds: ImdsDouble, outbox: Outbox, clock: MovedClock) -> VmIdentity:
    """Return the identity of a process that starts on the state."""
    return VmIdentity(Config(), "forward", imds=imds, outbox=outbox, clock=clock)


def heartbeats(outbox: Outbox) -> list[dict[str, Any]]:
    return [event.envelope for event in outbox.pending("a", 100)[1]]


def test_a_heartbeat_states_its_own_number_as_the_last_one(
    imds: ImdsDouble, outbox: Outbox, clock: MovedClock
) -> None:
    identity = start(imds, outbox, clock)
    identity.emit_heartbeat()
    identity.next_sequence()
    identity.emit_stopping()
    numbers = [(event["reporterseq"], event["data"]["LastReporterSeq"]) for event in heartbeats(outbox)]
    assert numbers == [("000000000001", 1), ("000000000003", 3)]


def test_heartbeats_are_an_hour_apart(imds: ImdsDouble, outbox: Outbox, clock: MovedClock) -> None:
    identity = start(imds, outbox, clock)
    identity.emit_heartbeat()
    clock.advance(3599)
    identity.emit_heartbeat()
    assert len(heartbeats(outbox)) == 1
    clock.advance(1)
    identity.emit_heartbeat()
    assert [event["data"]["Reason"] for event in heartbeats(outbox)] == ["Started", "Hourly"]


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
