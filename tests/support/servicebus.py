"""The lab's Service Bus with what tests need: faults, a clock that moves, outages, and a look at its messages."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bridge.lab import servicebus as server
from bridge.lab.servicebus.broker import Topic, missing
from bridge.lab.servicebus.bus import Bus
from bridge.lab.servicebus.config import Json, QueueSettings
from bridge.lab.servicebus.connection import Connection
from bridge.lab.servicebus.links import Consumer, Endpoint, Producer
from bridge.lab.servicebus.messages import ARGUMENT, BUSY, UNAUTHORIZED, Message, Refused
from bridge.lab.servicebus.queues import MessageQueue
from tests.support.ports import ReservedPorts

T = TypeVar("T")

# What each kind refuses, and at which stages.
REFUSALS: Mapping[str, tuple[tuple[str, ...], Callable[[str], Refused]]] = {
    "refuse_cbs": (("token",), lambda _: Refused(ARGUMENT, "InvalidSignature: The token is invalid.")),
    "unauthorized": (
        ("attach",),
        lambda path: Refused(
            UNAUTHORIZED,
            "Unauthorized access. 'Send' or 'Listen' claim(s) are required to perform this operation. "
            f"Resource: 'sb://127.0.0.1/{path}'.",
        ),
    ),
    "missing": (("attach",), missing),
    "disabled": (
        ("attach", "store"),
        lambda _: Refused("com.microsoft:entity-disabled", "Messaging entity is currently disabled."),
    ),
    "no_connection": (
        ("attach",),
        lambda _: Refused("amqp:resource-limit-exceeded", "ConnectionsQuotaExceeded for namespace: lab."),
    ),
    "busy": (("store", "manage"), lambda _: Refused(BUSY, "The entity is being throttled. Wait 10 seconds.")),
    "quota": (
        ("store",),
        lambda _: Refused("amqp:resource-limit-exceeded", "The maximum entity size has been reached."),
    ),
}
DROPS = {
    "store": "drop_before_store",
    "stored": "drop_after_store",
    "settle": "drop_before_settle",
    "settled": "drop_after_settle",
}
STALLED = ("connect", "attach", "ask", "send", "settle")
_IDLE = Refused(
    "amqp:link:detach-forced", "The link is force detached. Code: publisher. Details: IdleTimerExpired."
)


@dataclass(kw_only=True)
class Fault:
    """A fault: for which entity with its subscriptions (None: all), how often, and after how many."""

    kind: str
    entity: str | None
    left: float
    skip: int

    def matches(self, path: str) -> bool:
        return self.entity is None or f"{path.lower()}/".startswith(f"{self.entity.lower()}/")


@dataclass(eq=False)
class _Stalled:
    again: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    is_silent: bool = False


class FaultyBus(Bus):
    """A bus that fails on demand; on the loop's thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.intercept = self._intercept
        self.faults: list[Fault] = []
        self.applied: Counter[str] = Counter()
        self._stalled: dict[Connection, _Stalled] = {}

    def begin(self, fault: Fault) -> None:
        """Start a lasting fault, or apply an immediate one."""
        everything = [one for connection in self.connections for one in connection.endpoints]
        endpoints = [one for one in everything if fault.matches(one.path)]
        links = [one for one in endpoints if isinstance(one, Producer | Consumer)]
        connections = set(self.connections) if fault.entity is None else {one.connection for one in endpoints}
        if fault.kind == "drop":
            for connection in connections:
                connection.close()
        elif fault.kind == "detach":
            _detach(links, lambda _: _IDLE)
        else:
            self.faults.append(fault)
        if fault.kind == "stall" and not fault.skip:
            for connection in connections:
                self._pause(connection)
        if fault.kind in ("missing", "disabled"):
            _detach(links, REFUSALS[fault.kind][1])

    def _intercept(self, stage: str, connection: Connection, path: str, again: Callable[[], None]) -> bool:
        """Apply the faults of this stage."""
        self.applied[stage] += 1
        if not self.faults:
            return False
        for kind, (stages, refusal) in REFUSALS.items():
            if stage in stages and path != "$cbs" and self._applies(kind, path):
                raise refusal(path)
        if stage == "connect" and self._applies("silent", path):
            self._pause(connection).is_silent = True
            return True
        if stage in STALLED and path != "$cbs" and self._applies("stall", path):
            self._pause(connection).again.append((path, again))
            return True
        if stage == "credit":
            return self._find("no_credit", path) is not None
        if stage == "token":
            return self._applies("silent_cbs", path)
        if stage in DROPS and self._applies(DROPS[stage], path):
            connection.close()
            return True
        return False

    def tick(self) -> None:
        """End what is over."""
        super().tick()
        for connection, stalled in list(self._stalled.items()):
            self._resume(connection, stalled)
        for connection in list(self.connections):
            for endpoint in list(connection.endpoints):
                if isinstance(endpoint, Producer) and connection.active:
                    connection.guard(endpoint.grant)

    def _pause(self, connection: Connection) -> _Stalled:
        if connection.active:
            connection.active = False
            connection.socket.pause_reading()
        return self._stalled.setdefault(connection, _Stalled())

    def _resume(self, connection: Connection, stalled: _Stalled) -> None:
        paths = ["", *(one.path for one in connection.endpoints), *(path for path, _ in stalled.again)]
        if not connection.closed:
            if stalled.is_silent:
                if self._find("silent", "") is None:
                    connection.close()
                return
            if any(self._find("stall", path) for path in paths):
                return
            for _, again in stalled.again:
                connection.guard(again)
            connection.active = not connection.closed
            connection.socket.resume_reading()
            connection.dispatch()
        del self._stalled[connection]

    def _find(self, kind: str, path: str) -> Fault | None:
        self.faults = [one for one in self.faults if one.left > 0]
        return next((one for one in self.faults if one.kind == kind and one.matches(path)), None)

    def _applies(self, kind: str, path: str) -> bool:
        fault = self._find(kind, path)
        if fault is None:
            return False
        if fault.skip > 0:
            fault.skip -= 1
            return False
        fault.left -= 1
        self.applied[kind] += 1
        return True


def _detach(links: Sequence[Endpoint], why: Callable[[str], Refused]) -> None:
    for link in links:
        link.detach(why(link.path))


@dataclass(frozen=True, kw_only=True)
class StoredMessage:
    """A copy of one message in the broker."""

    message_id: str
    body: bytes
    subject: str | None
    correlation_id: str | None
    content_type: str | None
    session_id: str | None
    application_properties: Mapping[str, Any]
    delivery_count: int
    locked: bool
    enqueued_at: float
    dead_letter_reason: str | None
    dead_letter_description: str | None


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Messages of an entity, now and since it was created; a topic holds none."""

    active: int = 0
    locked: int = 0
    dead_letters: int = 0
    enqueued: int = 0
    completed: int = 0
    duplicates: int = 0


class Entity:
    """A view of one queue, topic or subscription. Every property is a new copy."""

    def __init__(self, lab: ServiceBusLab, path: str) -> None:
        self._lab = lab
        self._entity = lab.find(path)

    @property
    def messages(self) -> tuple[StoredMessage, ...]:
        """Return the messages in order."""
        return self._lab.call(lambda: _copies(self._entity))

    @property
    def dead_letters(self) -> tuple[StoredMessage, ...]:
        """Return the messages of the dead-letter queue in order."""
        return self._lab.call(lambda: _copies(getattr(self._entity, "dead_letters", None)))

    @property
    def counts(self) -> Counts:
        """Return how many messages the entity holds and held."""
        return self._lab.call(lambda: _counts(self._entity))


def _copies(entity: MessageQueue | Topic | None) -> tuple[StoredMessage, ...]:
    if not isinstance(entity, MessageQueue):
        return ()
    return tuple(_copy(message) for _, message in sorted(entity.messages.items()))


def _copy(message: Message) -> StoredMessage:
    properties = message.content.properties
    application = message.content.application_properties
    dead = application if message.dead_letter_source is not None else {}
    return StoredMessage(
        message_id=message.content.message_id,
        body=message.content.body,
        subject=properties.get("subject"),
        correlation_id=properties.get("correlation_id"),
        content_type=properties.get("content_type"),
        session_id=message.content.session_id,
        application_properties=dict(application),
        delivery_count=message.delivery_count,
        locked=message.lock_token is not None,
        enqueued_at=message.enqueued_at,
        dead_letter_reason=dead.get("DeadLetterReason"),
        dead_letter_description=dead.get("DeadLetterErrorDescription"),
    )


def _counts(entity: MessageQueue | Topic) -> Counts:
    counted = entity.counts
    since = {name: counted[name] for name in ("enqueued", "completed", "duplicates")}
    if isinstance(entity, Topic):
        return Counts(**since)
    messages = entity.messages.values()
    return Counts(
        active=len(messages),
        locked=sum(message.lock_token is not None for message in messages),
        dead_letters=0 if entity.dead_letters is None else len(entity.dead_letters.messages),
        **since,
    )


def entities(
    *,
    queues: Sequence[Json] = ({"Name": "notices"},),
    topic: str = "events",
    subscriptions: Sequence[Json] = ({"Name": "all"},),
    **properties: Any,
) -> Json:
    """Return a configuration of queues, and of one topic with subscriptions and properties."""
    topics = [{"Name": topic, "Properties": properties, "Subscriptions": subscriptions}]
    return {"UserConfig": {"Namespaces": [{"Name": "lab", "Queues": queues, "Topics": topics}]}}


def fleet_entities(topic: str, subscriptions: Sequence[str], commands: str) -> Json:
    """Return a topic with duplicate detection, and one queue with sessions for the commands to all VMs."""
    properties = {"LockDuration": "PT10S", "MaxDeliveryCount": 100, "DefaultMessageTimeToLive": "PT1H"}
    return entities(
        queues=[{"Name": commands, "Properties": {**properties, "RequiresSession": True}}],
        topic=topic,
        subscriptions=[{"Name": name, "Properties": properties} for name in subscriptions],
        RequiresDuplicateDetection=True,
        DuplicateDetectionHistoryTimeWindow="PT1H",
    )


class ServiceBusLab(server.ServiceBusLab):
    """The lab's bus, for tests. Every method may be called from any thread."""

    bus_class = FaultyBus
    _bus: FaultyBus

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._ahead_seconds = 0.0
        self._reserved = ReservedPorts()  # also during an outage
        port = 0 if sys.platform == "win32" else self._reserved.first
        super().__init__(*arguments, **{"port": port, **options})

    def stop(self) -> None:
        """Close all connections and stop."""
        super().stop()
        self._reserved.close()

    @property
    def clients(self) -> list[Connection]:
        """Return the connections."""
        return self.call(lambda: list(self._bus.connections))

    @property
    def connections(self) -> int:
        """Return the number of connections."""
        return len(self.clients)

    def senders(self, path: str) -> int:
        """Return the number of links for sending to an entity."""
        return self.call(lambda: self._count(Producer, path))

    def receivers(self, path: str) -> int:
        """Return the number of links for receiving from an entity, including those that wait for a session."""
        return self.call(lambda: self._count(Consumer, path))

    def _count(self, kind: type[Endpoint], path: str) -> int:
        endpoints = [one for connection in self._bus.connections for one in connection.endpoints]
        return sum(isinstance(one, kind) and one.path.lower() == path.lower() for one in endpoints)

    def entity(self, path: str) -> Entity:
        """Return a view of a queue, a topic or "topic/Subscriptions/name", in any letter case."""
        return Entity(self, path)

    def create_queue(self, name: str, properties: Json | None = None) -> None:
        """Create a queue, with properties as in the configuration file."""
        settings = QueueSettings.model_validate({"Name": name, "Properties": properties or {}})
        self.call(lambda: self._bus.broker.add_queue(settings))

    def stop_listening(self) -> None:
        """Simulate an outage: close all connections and refuse new ones. Messages and locks stay."""
        self.call(self._disconnect)

    def listen_again(self) -> None:
        """End the outage, if there is one: accept connections on the same port."""
        if self._server.is_serving():
            return
        listener = socket.create_server((server.HOST, self.port))
        asyncio.run_coroutine_threadsafe(self._listen_on(listener), self._loop).result(server.CALL_SECONDS)

    def advance(self, seconds: float) -> None:
        """Move the lab's clock forward: locks, messages, duplicate windows and idle links expire accordingly."""

        def move() -> None:
            self._ahead_seconds += seconds
            self._bus.tick()

        self.call(move)

    def _now(self) -> float:
        return time.time() + self._ahead_seconds

    def fault(
        self, kind: str, entity: str | None = None, *, count: int | None = None, after: int = 0
    ) -> None:
        """Start a fault, which lasts until it is cleared.

            drop: close connections immediately
            detach: detach links immediately, with the error of an idle link
            drop_before_store: receive a message or batch, store nothing, close the connection
            drop_after_store: store all of it, close the connection before the answer
            drop_before_settle, drop_after_settle: the same for a settlement
            stall: accept and keep connections, read and answer nothing; afterwards continue
            silent: accept new connections, send nothing, close them at the end
            silent_cbs, refuse_cbs: do not answer tokens, or refuse them
            unauthorized: refuse links as for a missing role
            no_credit: grant senders no more credit
            no_connection: refuse links as a namespace does that has no connection left
            busy, quota: refuse sends; busy also refuses requests to $management
            missing, disabled: detach and refuse links as for such an entity

        Args:
            kind: one of the above.
            entity: a queue, or a topic with its subscriptions; None for all.
            count: how often it applies; None: no limit. Not for no_credit and stall.
            after: how many operations pass first.
        """
        known = {*REFUSALS, *DROPS.values(), "drop", "detach", "stall", "silent", "silent_cbs", "no_credit"}
        assert kind in known, kind
        left = float("inf") if count is None else count
        self.call(lambda: self._bus.begin(Fault(kind=kind, entity=entity, left=left, skip=after)))

    def applied(self, kind: str) -> int:
        """Return how often faults of a kind have applied, for the kinds that are counted, and stall; or a stage."""
        return self.call(lambda: self._bus.applied[kind])

    def clear_faults(self, kind: str | None = None) -> None:
        """End all faults, or those of a kind."""

        def clear() -> None:
            self._bus.faults = [one for one in self._bus.faults if kind not in (None, one.kind)]
            self._bus.tick()

        self.call(clear)
