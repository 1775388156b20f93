"""The Service Bus of the demo, and the commands that are sent over it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from bridge.http.signing import sign
from bridge.lab.servicebus import ServiceBusLab

SEND_SECONDS = 30.0
BUS_FILE = Path(__file__).parents[1] / "servicebus.json"
TOPIC, SUBSCRIPTION, QUEUE = "scheduled-events", "everything", "approvals"
SESSION = "lab.web-0"
SECRET = "whsec_ZGVtbyBkZW1vIGRlbW8gZGVtbyBkZW1vIGRlbW8h"  # noqa: S105 - only for the demo
FORGED_SECRET = "whsec_Zm9yZ2VkIGZvcmdlZCBmb3JnZWQgZm9yZ2VkIQ=="  # noqa: S105 - not a real secret


class DemoBus:
    """A simulated Service Bus with a topic for events and a queue for commands."""

    def __init__(self, stack: ExitStack) -> None:
        self._lab = stack.enter_context(ServiceBusLab(BUS_FILE))

    def config(self) -> str:
        """Return the sections of the configuration that use the bus."""
        return f"""
[sinks.bus]
kind = "servicebus"
connection_string = "{self._lab.connection_string}"
topic = "{TOPIC}"

[approvals]
connection_string = "{self._lab.connection_string}"
queue = "{QUEUE}"
session = "{{resource_group}}.{{vm}}"
signing_secret = "{SECRET}"
receipts_topic = "{TOPIC}"
receipts_subscription = "receipts"

[approvals.policy]
allow = [{{ event_type = ["Freeze"] }}]
"""

    def received_ids(self) -> set[str]:
        """Return the ids of the events that have arrived at the subscription."""
        return self._lab.message_ids(f"{TOPIC}/Subscriptions/{SUBSCRIPTION}")

    def forge(self, event_id: str) -> None:
        """Send a command that approves the event and is signed with a wrong key."""
        body = json.dumps({"EventId": event_id, "Id": "forged"}).encode()
        properties: dict[str | bytes, Any] = {}
        properties.update(sign([FORGED_SECRET], "forged", datetime.now(UTC), body))
        message = ServiceBusMessage(
            body, message_id="forged", session_id=SESSION, application_properties=properties
        )
        with (
            ServiceBusClient.from_connection_string(self._lab.connection_string) as client,
            client.get_queue_sender(QUEUE) as sender,
        ):
            sender.send_messages(message, timeout=SEND_SECONDS)
