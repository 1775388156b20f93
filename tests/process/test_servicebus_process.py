"""The real `imds-bridge forward` with a Service Bus that fails: nothing else is held up, and it ends in time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.lab.imds import EVENTS_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward, by_order_key, read_outbox, run, wait_until
from tests.support.servicebus import ServiceBusLab, entities
from tests.support.sinks import QUEUE, TOKEN, TokenEndpoint

KEY = "a-key-that-must-not-be-shown"
STOP_SECONDS = 2.0
TYPES = ["io.imdsbridge.scheduledevent.*", "io.imdsbridge.document.*"]

# The process as it is, but for what stands in the place of CHANGE.
WRAPPED = """
import sys, time
from functools import partial
from bridge.azure import servicebus as bus
from bridge.cli import main as cli
from bridge.sinks import servicebus
CHANGE
sys.exit(cli.main())
"""
NO_TLS = "bus.ServiceBusClient = partial(bus.ServiceBusClient, use_tls=False)"  # the lab has none
HANGING = """
servicebus.TRY_SECONDS = servicebus.GRACE_SECONDS = 0.2
servicebus._Link.open = lambda _: time.sleep(3600)
"""


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(entities(), key=KEY) as started:
        yield started
        assert started.failures == ()


def settings(imds: ImdsLab, sink: dict[str, Any], inbox: Inbox | None = None, **more: Any) -> dict[str, Any]:
    common = {"types": TYPES, "from_start": True}
    sinks: dict[str, Any] = {"bus": {"kind": "servicebus", "queue": QUEUE, **common, **sink}}
    if inbox:
        sinks["hook"] = {"kind": "webhook", "url": inbox.url, **common}
    given = {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}
    return {"imds": given, "stop_seconds": STOP_SECONDS, "sinks": sinks, **more}


def schedule(imds: ImdsLab) -> str:
    return imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)


def wanted(forward: Forward) -> list[str]:
    """Return the ids of the events in the outbox that the sinks take."""
    prefixes = tuple(pattern.removesuffix("*") for pattern in TYPES)
    return [row[1] for row in read_outbox(forward.state).events if row[2].startswith(prefixes)]


def assert_all_arrived_in_order(bus: ServiceBusLab, forward: Forward) -> None:
    """Check that the queue has every event that the sink takes, in the order that is promised."""
    ids_wanted = set(wanted(forward))
    stored = [json.loads(body) for _, id_, _, body in read_outbox(forward.state).events if id_ in ids_wanted]
    arrived = [json.loads(message.body) for message in bus.entity(QUEUE).messages]
    assert by_order_key(arrived) == by_order_key(stored)


def wrapped(forward: Forward, change: str) -> Forward:
    command = [sys.executable, "-c", WRAPPED.replace("CHANGE", change)]
    forward._command = [*command, "forward", "--config", str(forward.config)]
    return forward


@pytest.mark.parametrize("kind", ["silent", "stall"])
def test_a_bus_that_does_not_answer_holds_up_neither_poll_nor_webhook_nor_stop(
    imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab, tmp_path: Path, kind: str
) -> None:
    """The bus may take twice as long as the test waits for the process to end."""
    patient = {"connection_string": bus.connection_string, "timeout_seconds": 2 * LIMIT_SECONDS}
    forward = Forward(tmp_path, settings(imds, patient, inbox))
    if kind == "silent":
        bus.fault(kind)
    with forward:
        if kind == "stall":
            forward.wait_for_status(lambda status: status["sinks"]["bus"]["last_success_at"])
            bus.fault(kind)
        inbox.wait_for(1, LIMIT_SECONDS)
        for number in range(3):
            schedule(imds)
            inbox.wait_for(1 + 2 * (number + 1), LIMIT_SECONDS)
        polled = len(imds.requests())
        wait_until(lambda: sum(r.path == EVENTS_PATH for r in imds.requests()[polled:]) >= 3)
        if kind == "silent":
            assert forward.stop() == 0, forward
        # else it is killed
    assert [event["id"] for event in inbox.events()] == wanted(forward)
    bus.clear_faults()
    with forward:
        wait_for_all(bus, forward)
        forward.wait_for_status(lambda status: status["sinks"]["bus"]["backlog"] == 0)
        assert forward.stop() == 0, forward
    assert_all_arrived_in_order(bus, forward)


def arrived(bus: ServiceBusLab) -> list[str]:
    return [message.message_id for message in bus.entity(QUEUE).messages]


def wait_for_all(bus: ServiceBusLab, forward: Forward) -> None:
    """Wait until the queue has every event that the outbox has for it."""
    wait_until(lambda: set(arrived(bus)) >= set(wanted(forward)), describe=forward.status)


def test_after_three_hung_calls_it_exits_1_with_everything_committed_and_the_next_run_goes_on(
    imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab, tmp_path: Path
) -> None:
    sink = {"connection_string": bus.connection_string}
    given = settings(imds, sink, inbox, stop_seconds=LIMIT_SECONDS)
    with wrapped(Forward(tmp_path, given), HANGING) as forward:
        assert forward.wait() == 1, forward
        assert "not returned" in forward.log.read_text()
    assert [event["id"] for event in inbox.events()] == wanted(forward)
    assert wanted(forward)
    with Forward(tmp_path, given) as forward:
        wait_for_all(bus, forward)
        assert forward.stop() == 0, forward
    assert arrived(bus) == wanted(forward)
    assert [event["id"] for event in inbox.events()] == wanted(forward)


def test_no_secret_of_the_bus_is_in_log_status_or_check(
    imds: ImdsLab, bus: ServiceBusLab, tmp_path: Path
) -> None:
    environment = {"IMDS_BRIDGE__SINKS__BUS__CONNECTION_STRING": bus.connection_string}
    bus.fault("refuse_cbs")
    with Forward(tmp_path, settings(imds, {}, log_level="debug"), env=environment) as forward:
        forward.wait_for_status(lambda status: status["sinks"]["bus"]["last_error"])
        status = run("status", "--config", forward.config, env=environment)
        checked = run("check", "--config", forward.config, env=environment)
        bus.clear_faults()
        wait_for_all(bus, forward)
        assert forward.stop() == 0, forward
    assert checked.returncode == 3
    assert "the key or identity is refused" in checked.stdout
    for text in (
        status.stdout,
        str(forward.status()),
        checked.stdout,
        checked.stderr,
        forward.log.read_text(),
    ):
        assert KEY not in text
        assert "sig=" not in text


def test_with_the_identity_of_the_vm_no_token_is_shown_and_everything_arrives(
    imds: ImdsLab, bus: ServiceBusLab, tmp_path: Path
) -> None:
    """Not the real thing: the token is made up and not checked, and TLS is off in the process's SDK."""
    with TokenEndpoint((500, 0.0)) as tokens:
        given = settings(imds, {"namespace": f"127.0.0.1:{bus.port}"}, log_level="debug")
        environment = {"AZURE_POD_IDENTITY_AUTHORITY_HOST": tokens.url}
        with wrapped(Forward(tmp_path, given, env=environment), NO_TLS) as forward:
            wait_until(lambda: bus.entity(QUEUE).messages, describe=forward.status)
            assert forward.stop() == 0, forward
    assert arrived(bus) == wanted(forward)
    assert "no token for the identity" in forward.log.read_text()
    assert TOKEN not in forward.log.read_text()
    assert "ManagedIdentityCredential will use" not in forward.log.read_text()  # the libraries say nothing
