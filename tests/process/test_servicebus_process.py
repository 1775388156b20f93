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
TYPES = ["io.imdsbridge.scheduledevent.*", "io.imdsbridge.document.*"]

# The process with an SDK that uses no TLS, which the lab has not.
PLAIN = """
import sys
from functools import partial
from bridge.azure import servicebus as bus
from bridge.cli import main as cli
bus.ServiceBusClient = partial(bus.ServiceBusClient, use_tls=False)
sys.exit(cli.main())
"""
# The process with an SDK whose calls never return.
HANGING = """
import sys, time
from bridge.cli import main as cli
from bridge.sinks import servicebus
servicebus.TRY_SECONDS = servicebus.GRACE_SECONDS = 0.2
servicebus._Link.open = lambda _: time.sleep(3600)
sys.exit(cli.main())
"""


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(entities(), key=KEY) as started:
        yield started
        assert started.failures == ()


def settings(imds: ImdsLab, bus: ServiceBusLab, inbox: Inbox, **more: Any) -> dict[str, Any]:
    """Return a configuration whose bus may take twice as long as a test waits for the process to end."""
    common = {"types": TYPES, "from_start": True}
    place = {"connection_string": bus.connection_string, "queue": QUEUE}
    sinks = {
        "bus": {"kind": "servicebus", "timeout_seconds": 2 * LIMIT_SECONDS, **place, **common},
        "hook": {"kind": "webhook", "url": inbox.url, **common},
    }
    given = {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}
    return {"imds": given, "sinks": sinks, "log_level": "debug", **more}


def wanted(forward: Forward) -> list[dict[str, Any]]:
    """Return the events in the outbox that the sinks take."""
    prefixes = tuple(pattern.removesuffix("*") for pattern in TYPES)
    return [json.loads(row[3]) for row in read_outbox(forward.state).events if row[2].startswith(prefixes)]


def arrived(bus: ServiceBusLab) -> list[dict[str, Any]]:
    return [json.loads(message.body) for message in bus.entity(QUEUE).messages]


def end_once_all_arrived(bus: ServiceBusLab, forward: Forward) -> None:
    """End the process once the queue has every event, and check their order."""

    def all_arrived() -> bool:
        ids = {one["id"] for one in wanted(forward)}
        return bool(ids) and ids <= {one["id"] for one in arrived(bus)}

    wait_until(all_arrived, describe=lambda: forward, apart_seconds=0.05)
    assert forward.stop() == 0, forward
    assert by_order_key(arrived(bus)) == by_order_key(wanted(forward))


def test_a_bus_that_does_not_answer_holds_up_neither_poll_nor_webhook_nor_stop_and_shows_no_secret(
    imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab, tmp_path: Path
) -> None:
    forward = Forward(tmp_path, settings(imds, bus, inbox, stop_seconds=2))
    bus.fault("silent")
    with forward:
        inbox.wait_for(1, LIMIT_SECONDS)
        for number in range(3):
            imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
            inbox.wait_for(1 + 2 * (number + 1), LIMIT_SECONDS)
        polled = len(imds.requests())
        wait_until(lambda: sum(r.path == EVENTS_PATH for r in imds.requests()[polled:]) >= 3)
        assert forward.stop() == 0, forward
    assert inbox.events() == wanted(forward)
    bus.clear_faults()
    bus.fault("refuse_cbs")
    with forward:
        checked = run("check", "--config", forward.config)
        forward.wait_for_status(lambda status: status["sinks"]["bus"]["last_error"])
        outputs = [checked, run("status", "--config", forward.config)]
        bus.clear_faults()
        end_once_all_arrived(bus, forward)
    assert "the key or identity is refused" in checked.stdout
    shown = [forward.log.read_text(), str(forward.status()), *(one.stdout + one.stderr for one in outputs)]
    assert [text for text in shown if KEY in text or "sig=" in text] == []


def test_after_three_hung_calls_it_exits_1_with_everything_committed_and_the_next_run_goes_on(
    imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab, tmp_path: Path
) -> None:
    forward = Forward(tmp_path, settings(imds, bus, inbox, stop_seconds=LIMIT_SECONDS))
    command = forward._command
    forward._command = [sys.executable, "-c", HANGING, "forward", "--config", str(forward.config)]
    with forward:
        assert forward.wait() == 1, forward
        assert "not returned" in forward.log.read_text()
    assert wanted(forward)
    assert inbox.events() == wanted(forward)
    forward._command = command
    with forward:
        end_once_all_arrived(bus, forward)
    assert inbox.events() == wanted(forward)


def test_with_the_identity_of_the_vm_no_token_is_shown_and_everything_arrives(
    imds: ImdsLab, inbox: Inbox, bus: ServiceBusLab, tmp_path: Path
) -> None:
    """Not the real thing: the token is made up and not checked, and TLS is off in the process's SDK."""
    given = settings(imds, bus, inbox)
    del given["sinks"]["bus"]["connection_string"]
    given["sinks"]["bus"]["namespace"] = f"127.0.0.1:{bus.port}"
    with TokenEndpoint((500, 0.0)) as tokens:
        forward = Forward(tmp_path, given, env={"AZURE_POD_IDENTITY_AUTHORITY_HOST": tokens.url})
        forward._command = [sys.executable, "-c", PLAIN, "forward", "--config", str(forward.config)]
        with forward:
            end_once_all_arrived(bus, forward)
    log = forward.log.read_text()
    assert "no token for the identity" in log
    assert TOKEN not in log
    assert "ManagedIdentityCredential will use" not in log  # the libraries say nothing
