"""What the relay's tests share: a bus with a topic, events, the relay as a process, and the relay on threads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

from azure.servicebus import ServiceBusMessage

from bridge.azure.bus_receiver import BusReceiver
from bridge.config.bus import RelaySettings
from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import Gone, Unavailable
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.forward.relay import Relay
from bridge.process.identity import VmIdentity
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from tests.support.bus import message, no_sdk_thread_runs
from tests.support.forward import parts_of
from tests.support.inbox import Inbox
from tests.support.memory_sink import MemorySink
from tests.support.outbox import open_outbox
from tests.support.process import LIMIT_SECONDS, Forward, wait_until

if TYPE_CHECKING:
    from tests.support.servicebus import Entity, ServiceBusLab

TOPIC = "scheduled-events"
SUBSCRIPTION = "chat"
PATH = f"{TOPIC}/Subscriptions/{SUBSCRIPTION}"
TYPE = "io.imdsbridge.scheduledevent.scheduled.v1"
LOCK_SECONDS = 5  # the shortest that Service Bus has


def fleet_bus(**topic: Any) -> Mapping[str, Any]:
    """Describe a namespace with one topic that has properties, and one subscription."""
    from tests.support.servicebus import entities  # noqa: PLC0415 - unit tests do without the lab

    properties = {"LockDuration": f"PT{LOCK_SECONDS}S", "MaxDeliveryCount": 1000}
    subscriptions = [{"Name": SUBSCRIPTION, "Properties": properties}]
    return entities(topic=TOPIC, subscriptions=subscriptions, **topic)


def subscription(bus: ServiceBusLab) -> Entity:
    """Return what the subscription holds."""
    return bus.entity(PATH)


def names(count: int, start: int = 0) -> list[str]:
    """Return the ids of so many events."""
    return [f"e{number:03}" for number in range(start, start + count)]


def event_message(name: str, **changes: Any) -> ServiceBusMessage:
    """Make a message with an event; `changes` are attributes, None for none."""
    return message(body_of(name, **changes), message_id=name)


def body_of(name: str, **changes: Any) -> bytes:
    """Write an event, with blanks and letters that must not change on the way."""
    given = {"specversion": "1.0", "id": name, "source": "/s", "type": TYPE, "subject": "E", **changes}
    given = {name: value for name, value in given.items() if value is not None}
    return json.dumps({**given, "data": {"Text": f"größer {name}"}}, ensure_ascii=False, indent=1).encode()


class RelayProcess(Forward):
    """`imds-bridge relay` as a process of its own, with a webhook."""

    def __init__(self, folder: Path, bus: ServiceBusLab, inbox: Inbox | None = None, **more: Any) -> None:
        sinks = {"hook": {"kind": "webhook", "url": inbox.url}} if inbox else {}
        super().__init__(folder, {"relay": source(bus), "sinks": sinks, **more}, role="relay")

    def wait_until_relayed(self, bus: ServiceBusLab) -> None:
        """Wait until nothing is on the subscription any more and no event waits for a sink."""
        wait_until(lambda: subscription(bus).counts.active == 0, describe=lambda: self)
        self.wait_for_status(lambda status: not any(sink["backlog"] for sink in status["sinks"].values()))


def source(bus: ServiceBusLab) -> dict[str, str]:
    """Say where the relay reads."""
    return {
        "connection_string": bus.connection_string,
        "topic": TOPIC,
        "subscription": SUBSCRIPTION,
    }


def dead(_: StoredEvent) -> Unavailable:
    """Refuse every event."""
    return Unavailable("it is dead")


def die(*sinks: MemorySink) -> None:
    """Let sinks take nothing from now on."""
    for sink in sinks:
        sink.refuse, sink.retry_limit_seconds = dead, 0.1


def live(*sinks: MemorySink) -> None:
    """Let sinks take everything again."""
    for sink in sinks:
        sink.refuse = lambda _: None


class RelayRig:
    """The real relay on the lab's bus with doubles as sinks, on threads of this process.

    It can be stopped and started again on the same state, as a process that restarts.
    """

    def __init__(self, folder: Path, bus: ServiceBusLab) -> None:
        self._folder = folder
        self._bus = bus
        self._clock = Clock()
        self.sinks = [MemorySink()]
        self._loops: list[Thread] = []
        self._senders: list[Thread] = []

    def __enter__(self) -> Self:
        settings = RelaySettings(**source(self._bus))  # type: ignore[arg-type]
        names = [f"sink{number}" for number in range(len(self.sinks))]
        sinks = dict.fromkeys(names, (Filter(), True))
        self.outbox = open_outbox(self._folder, sinks=sinks, clock=self._clock)
        self.stopping, settled = Stop(), Stop()
        self.receiver = BusReceiver(settings, what="events", clock=self._clock, stop=settled)
        identity = VmIdentity("relay", imds=None, outbox=self.outbox, clock=self._clock)
        parts = parts_of(outbox=self.outbox, clock=self._clock, stop=self.stopping, identity=identity)
        self.relay = Relay(parts, self.receiver, settled)
        self._dispatchers = [
            Dispatcher(name, sink, max_age_seconds=3600.0, outbox=self.outbox, clock=self._clock)
            for name, sink in zip(names, self.sinks, strict=True)
        ]
        self._loops = [start_thread("relay", self.relay.run), start_thread("events", self.receiver.run)]
        self._senders = [start_thread(one.name, one.run) for one in self._dispatchers]
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for sink in self.sinks:
            if sink.refuse is dead:
                sink.refuse = lambda _: Gone("it stays dead")  # so that its thread ends
        self._join(self._loops)
        for dispatcher in self._dispatchers:
            dispatcher.stop_when_drained()
        self._join(self._senders)
        self.outbox.close()
        wait_until(no_sdk_thread_runs)

    def _join(self, threads: list[Thread]) -> None:
        for thread in threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not stop"

    def wait_for_status(self, **wanted: Any) -> None:
        """Wait until the status shows all of this."""
        wait_until(lambda: wanted.items() <= vars(self.relay.status()).items(), describe=self.relay.status)

    def wait_until_settled(self) -> None:
        """Wait until nothing is on the subscription any more."""
        wait_until(
            lambda: subscription(self._bus).counts.active == 0,
            describe=lambda: subscription(self._bus).messages,
        )
