"""The simulated services, each in a process of its own, so that what each costs can be measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.servicebus import ServiceBusLab

TOPIC, QUEUE = "scheduled-events", "approvals"
SUBSCRIPTIONS = ("audit", "chat", "console")


class GroupImds:
    """The IMDS of each VM of a group, each with a document of its own."""

    def __init__(self, group: str, vms: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._labs = {
            vm: self._stack.enter_context(ImdsLab(vms=(vm,), scale_set=group, resource_group=group))
            for vm in vms
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def urls(self) -> Mapping[str, str]:
        """Return the address of each VM's IMDS."""
        return {vm: lab.url(vm) for vm, lab in self._labs.items()}

    def schedule(self, vms: Sequence[str], **event: Any) -> float:
        """Add an event to the documents of these VMs; return when, in seconds since 1970."""
        if len(vms) > 1:  # all say the same NotBefore, which has whole seconds
            time.sleep(-time.time() % 1)
        for vm in vms:
            self._labs[vm].schedule(**event)
        return time.time()

    def start_all(self) -> None:
        """Start every event that has not started."""
        for lab in self._labs.values():
            for event in lab.events:
                lab.start(event["EventId"])

    def complete_all(self) -> None:
        """Complete every event."""
        for lab in self._labs.values():
            for event in lab.events:
                lab.complete(event["EventId"])

    def approved(self) -> Sequence[tuple[str, str]]:
        """Return VM and EventId of each approval that was accepted."""
        return [(one.vm, one.event_id) for lab in self._labs.values() for one in lab.approvals]


class Bus(ServiceBusLab):
    """A topic with duplicate detection, and one queue with sessions for the commands to all VMs."""

    def __init__(self) -> None:
        properties = {"LockDuration": "PT10S", "MaxDeliveryCount": 100, "DefaultMessageTimeToLive": "PT1H"}
        topic = {
            "Name": TOPIC,
            "Properties": {"RequiresDuplicateDetection": True, "DuplicateDetectionHistoryTimeWindow": "PT1H"},
            "Subscriptions": [{"Name": name, "Properties": properties} for name in SUBSCRIPTIONS],
        }
        queue = {"Name": QUEUE, "Properties": {**properties, "RequiresSession": True}}
        super().__init__(
            {"UserConfig": {"Namespaces": [{"Name": "lab", "Queues": [queue], "Topics": [topic]}]}}
        )

    def address(self) -> str:
        """Return the connection string."""
        return self.connection_string

    def waiting(self) -> int:
        """Return how many messages of the relay, the console and the listeners wait."""
        paths = (QUEUE, *(f"{TOPIC}/Subscriptions/{name}" for name in ("chat", "console")))
        return sum(self.entity(path).counts.active for path in paths)

    def stored(self) -> Sequence[bytes]:
        """Return the body of each message that the topic has stored, in order."""
        return [one.body for one in self.entity(f"{TOPIC}/Subscriptions/audit").messages]

    def stored_at(self) -> Mapping[str, float]:
        """Return when the topic stored each id, in seconds since 1970."""
        messages = self.entity(f"{TOPIC}/Subscriptions/audit").messages
        return {one.message_id: one.enqueued_at for one in messages}

    def figures(self) -> Mapping[str, int]:
        """Return how many messages the topic stored, how many it dropped as duplicates, and the connections."""
        counts = self.entity(TOPIC).counts
        return {
            "stored": counts.enqueued,
            "duplicates": counts.duplicates,
            "connections": self.connections,
            "dead_letters": self.entity(QUEUE).counts.dead_letters,
            "failures": len(self.failures),
        }


class Chat(Inbox):
    """The receiver of what the relay sends."""

    def __init__(self) -> None:
        super().__init__(strict=True)

    def address(self) -> str:
        """Return the URL of the webhook."""
        return self.url
