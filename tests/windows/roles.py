"""Every border of the two roles at once: webhook, Event Grid and Service Bus, a command, and what shows the state.

tests/windows/run names this file, with the plugin that starts Windows' Python: pytest does not find it on its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bus import QUEUE, SUBSCRIPTION, TOPIC
from tests.support.eventgrid import EventGridLab
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import Forward, run
from tests.support.servicebus import ServiceBusLab

SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"
APPROVED = "io.imdsbridge.approval.accepted.v1"


@pytest.fixture
def grid() -> Iterator[EventGridLab]:
    with EventGridLab() as started:
        yield started


def roles(
    folder: Path, imds: ImdsLab, inbox: Inbox, grid: EventGridLab, bus: ServiceBusLab
) -> tuple[Forward, Forward]:
    """Return both roles, with one state_dir and one namespace."""
    place = {"connection_string": bus.connection_string}
    to = {"from_start": True, "types": ["io.imdsbridge.scheduledevent.*", "io.imdsbridge.approval.*"]}
    topic = {"kind": "servicebus", "topic": TOPIC, **place, **to}
    hook = {"kind": "webhook", "url": inbox.url, **to}
    events = {"kind": "eventgrid", "endpoint": grid.custom_endpoint, "key": grid.keys[0], **to}
    receipts = {"receipts_topic": TOPIC, "receipts_subscription": SUBSCRIPTION}
    rules = {"policy": {"allow": [{"event_type": ["Reboot"]}]}}
    approvals = {**place, "queue": QUEUE, **receipts, **rules}
    given: dict[str, Any] = {"imds": {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}}
    forwarding = {**given, "sinks": {"bus": topic, "hook": hook, "grid": events}}
    listening = {**given, "sinks": {"receipts": topic}, "approvals": approvals}
    return Forward(folder / "forward", forwarding), Forward(folder / "listen", listening, role="listen")


def test_both_roles_serve_every_receiver_and_a_command_is_approved_and_answered(
    imds: ImdsLab, inbox: Inbox, grid: EventGridLab, bus: ServiceBusLab, tmp_path: Path
) -> None:
    forward, listen = roles(tmp_path, imds, inbox, grid, bus)
    with forward, listen:
        for role in (forward, listen):
            role.wait_for_status(lambda status: status["last_good_at"])
        event_id = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
        answer = run("approve", event_id, "--wait", "--config", listen.config)
        assert (answer.returncode, answer.stderr) == (0, ""), answer
        assert [one.event_id for one in imds.approvals] == [event_id]
        forward.wait_for_status(lambda status: event_id in json.dumps(status["document"]))
        forward.wait_for_status(lambda status: not any(one["backlog"] for one in status["sinks"].values()))
        sent = [json.loads(one.body) for one in bus.entity(f"{TOPIC}/Subscriptions/{SUBSCRIPTION}").messages]
        for events in (sent, inbox.events(), grid.events()):
            assert [one["subject"] for one in events if one["type"] == SCHEDULED] == [event_id]
        check = run("check", "--config", forward.config)
        assert check.returncode == 0, check
        status = run("status", "--config", forward.config)
        assert status.returncode == 0, status
        assert event_id in status.stdout
        assert [role.stop() for role in (forward, listen)] == [0, 0]
    assert run("status", "--config", forward.config).returncode == 3
    assert bus.entity(QUEUE).counts.completed == 1
