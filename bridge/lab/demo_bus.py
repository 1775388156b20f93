"""The Service Bus of the demonstration, and the commands that are sent over it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from bridge.http.signing import sign
from bridge.lab.servicebus import ServiceBusLab

SEND_SECONDS = 30.0
BUS_FILE = Path(__file__).with_name("servicebus.json")
TOPIC, SUBSCRIPTION, QUEUE = "scheduled-events", "everything", "approvals"
SESSION = "lab.web-0"
SECRET = "whsec_ZGVtbyBkZW1vIGRlbW8gZGVtbyBkZW1vIGRlbW8h"  # noqa: S105 - only for the demonstration
FORGED_SECRET = "whsec_Zm9yZ2VkIGZvcmdlZCBmb3JnZWQgZm9yZ2VkIQ=="  # noqa: S105 - not a real secret


class DemoBus:
    """A simulated Service Bus with a topic for events and a queue for commands."""

    def __enter__(self) -> Self:
        self._lab = ServiceBusLab(BUS_FILE).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._lab.__exit__(*error)

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
allow = [{{ event_source = ["User"] }}]
"""

    def received_ids(self) -> set[str]:
        """Return the ids of the events that have arrived at the subscription."""
        messages = self._lab.entity(f"{TOPIC}/Subscriptions/{SUBSCRIPTION}").messages
        return {message.message_id for message in messages}

    def approve(self, event_id: str, other_vm: str, config: Path, report: Callable[[str], None]) -> None:
        """Approve an event as an operator does, then send commands that must be refused.

        Args:
            event_id: the event.
            other_vm: a VM that the event does not affect.
            config: the configuration file.
            report: called with a line for everything that happens.
        """
        arguments = [event_id, "--reason", "drained", "--wait"]
        report(f"$ imds-bridge approve {' '.join(arguments)}")
        with subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "bridge", "approve", *arguments, "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            for line in process.stdout or ():
                report(line.rstrip())
        late = datetime.now(UTC) - timedelta(minutes=5)
        for what, data, secret in (
            ("a forged command", {}, FORGED_SECRET),
            ("an expired command", {"ExpiresAt": late.isoformat()}, SECRET),
            ("a command for another VM", {"Vm": other_vm}, SECRET),
        ):
            report(f"sending {what}")
            self._send({"EventId": event_id, "Id": what, **data}, secret)

    def _send(self, command: Mapping[str, Any], secret: str) -> None:
        body = json.dumps(command).encode()
        properties: dict[str | bytes, Any] = {}
        properties.update(sign([secret], str(command["Id"]), datetime.now(UTC), body))
        message = ServiceBusMessage(
            body, message_id=str(command["Id"]), session_id=SESSION, application_properties=properties
        )
        with (
            ServiceBusClient.from_connection_string(self._lab.connection_string) as client,
            client.get_queue_sender(QUEUE) as sender,
        ):
            sender.send_messages(message, timeout=SEND_SECONDS)
