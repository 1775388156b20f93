"""The simulated services, each in a process of its own, so that what each costs can be measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from bridge.lab.servicebus.broker import Topic
from bridge.lab.servicebus.connection import Connection
from bridge.lab.servicebus.links import Consumer, Producer
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.servicebus import FaultyBus, ServiceBusLab, fleet_entities

TOPIC, QUEUE = "scheduled-events", "approvals"
SUBSCRIPTIONS = ("audit", "chat", "console")
KEPT_CREDITS = 1 + 2 * len(SUBSCRIPTIONS)  # sent, and by each subscription compared and received
LOOKS_A_SECOND = 10  # the lab's ticks


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


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the VMs did to the bus within a time.

    Attributes:
        connections: mean and most of the VMs' connections: of "senders" of events, and of "listeners" for commands.
        stored, copies: messages that the topic kept, and duplicates that it dropped.
        cold_sends: how often a sender connected.
        credits, peak_credits: what Standard would count for these messages, and the most within a second.
    """

    connections: Mapping[str, tuple[float, int]]
    stored: int
    copies: int
    cold_sends: int
    credits: int
    peak_credits: int


class CountingBus(FaultyBus):
    """A bus that looks at its load ten times a second; on the loop's thread.

    Attributes:
        looks: senders, listeners, kept messages, copies and cold sends at each look.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cold_sends = 0
        self.looks: list[tuple[int, int, int, int, int]] = []

    def _intercept(self, stage: str, connection: Connection, path: str, again: Callable[[], None]) -> bool:
        self._cold_sends += stage == "attach" and path == TOPIC  # receivers attach to a subscription
        return super()._intercept(stage, connection, path, again)

    def tick(self) -> None:
        """Look, beside what is done at each tick."""
        super().tick()
        links = [one for connection in self.connections for one in connection.endpoints]
        topic = self.broker.find(TOPIC)
        assert isinstance(topic, Topic)
        senders = sum(isinstance(one, Producer) and one.path == TOPIC for one in links)
        listeners = sum(isinstance(one, Consumer) and one.path == QUEUE for one in links)
        counts = topic.counts
        self.looks.append((senders, listeners, counts["enqueued"], counts["duplicates"], self._cold_sends))


class Bus(ServiceBusLab):
    """A topic with duplicate detection, and one queue with sessions for the commands to all VMs."""

    bus_class = CountingBus
    _bus: CountingBus

    def __init__(self) -> None:
        super().__init__(fleet_entities(TOPIC, SUBSCRIPTIONS, QUEUE))

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

    def load(self) -> Load:
        """Return the load since the last call."""
        return self.call(self._load)

    def _load(self) -> Load:
        looks = self._bus.looks
        self._bus.looks = looks[-1:]
        senders, listeners, stored, copies, cold_sends = zip(*looks, strict=True)
        spent = [KEPT_CREDITS * kept + dropped for kept, dropped in zip(stored, copies, strict=True)]
        return Load(
            connections={
                name: (sum(counted) / len(counted), max(counted))
                for name, counted in (("senders", senders), ("listeners", listeners))
            },
            stored=stored[-1] - stored[0],
            copies=copies[-1] - copies[0],
            cold_sends=cold_sends[-1] - cold_sends[0],
            credits=spent[-1] - spent[0],
            peak_credits=max(
                spent[min(at + LOOKS_A_SECOND, len(spent) - 1)] - before for at, before in enumerate(spent)
            ),
        )

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
