"""A storm through `imds-bridge relay` over real sockets with compressed times: few messages, also after a kill -9."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage

from tests.support.bus import Sender, message
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.receivers import CONSOLE
from tests.support.relay import TOPIC, RelayProcess, fleet_bus, subscription
from tests.support.servicebus import ServiceBusLab
from tests.support.storm import EVENTS, Told, event_ids, scheduled

DIGEST_SECONDS = 1.0
STORM_SECONDS = 4.0
PARTS = 40
PART = EVENTS // PARTS + 1
FAILURES = 3


def storm(numbers: range) -> list[ServiceBusMessage]:
    """Return the messages of a part of the storm."""
    made = [scheduled(event_ids()[number], datetime.now(UTC)) for number in numbers]
    return [message(one.body, message_id=one.id) for one in made]


def chat(format_: str, inbox: Inbox) -> dict[str, Any]:
    settings = {"digest_seconds": DIGEST_SECONDS, "max_per_second": 20, "allow_http": True}
    return {"kind": "webhook", "format": format_, "url": inbox.url, **settings}


def told(format_: str, inbox: Inbox) -> Told:
    return Told.by(format_, [one.body for one in inbox.accepted])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_killed", [False, True], ids=["", "kill -9"])
def test_a_storm_is_few_messages_in_teams_and_slack_although_they_fail(
    tmp_path: Path, is_killed: bool
) -> None:
    with ExitStack() as stack:
        inboxes = {name: stack.enter_context(Inbox()) for name in ("teams", "slack")}
        bus = stack.enter_context(ServiceBusLab(fleet_bus()))
        sender = stack.enter_context(Sender(bus, TOPIC))
        sinks = {name: chat(name, inbox) for name, inbox in inboxes.items()}
        more: dict[str, Any] = {"console_url": CONSOLE, "stop_seconds": LIMIT_SECONDS / 2}
        relay = RelayProcess(tmp_path, bus, None, sinks=sinks, **more)
        relay.start()
        began_at = time.monotonic()
        for start in range(0, EVENTS, PART):
            sender.send(*storm(range(start, min(start + PART, EVENTS))))
            if start // PART == PARTS // 4:
                for inbox in inboxes.values():
                    inbox.fault(503, count=FAILURES)
            if is_killed and start // PART == PARTS // 2:
                wait_until(lambda: told("teams", inboxes["teams"]).messages > 1, describe=lambda: relay)
                relay.kill()
                relay.start()
            threading.Event().wait(STORM_SECONDS / PARTS)
        wait_until(lambda: subscription(bus).counts.active == 0, timeout_seconds=3 * LIMIT_SECONDS)
        assert relay.stop() == 0, relay
        # After the first, one in DIGEST_SECONDS; each failure and the kill may add one.
        most = 2 + (time.monotonic() - began_at) / DIGEST_SECONDS + FAILURES + is_killed
        for name, inbox in inboxes.items():
            found = told(name, inbox)
            assert found.messages <= most
            assert found.largest <= 20_000
            # The message that was on its way when the process was killed may come twice, with all that was sent.
            assert 0 <= found.events - EVENTS <= ((PARTS // 2 + 1) * PART if is_killed else 0)
            assert is_killed or max(found.shown.values()) == 1
        assert bus.failures == ()
