"""Run the simulated Service Bus on a thread of this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from bridge.lab.httpd import LabError
from bridge.lab.servicebus import config as configuration
from bridge.lab.servicebus.amqp import Bus
from bridge.lab.servicebus.broker import Topic
from bridge.lab.servicebus.conditions import Refused
from bridge.lab.servicebus.config import Json
from bridge.lab.servicebus.faults import AT_ONCE, KINDS, Fault
from bridge.lab.servicebus.links import Consumer, Producer
from bridge.lab.servicebus.loop import Loop
from bridge.lab.servicebus.queues import MessageQueue
from bridge.lab.servicebus.views import Entity

T = TypeVar("T")

HOST = "127.0.0.1"
KEY_NAME = "RootManageSharedAccessKey"
# The key in the official emulator's connection string; it is valid only for a lab.
KEY = "SAS_KEY_VALUE"
MAX_MESSAGE_BYTES = 256 * 1024
IDLE_SECONDS = 600.0

log = logging.getLogger(__name__)


class ServiceBusLab:
    """Serve Service Bus over AMQP 1.0 and plain TCP on this machine, for tests and demonstrations.

    Messages are kept in memory, and nothing is encrypted. Every method may be called from any thread.
    """

    def __init__(
        self,
        config: str | Path | Json,
        *,
        port: int = 0,
        host: str = HOST,
        key: str = KEY,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        idle_seconds: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start the server.

        Args:
            config: the official emulator's configuration file, or its content.
            port: 0 for any free port.
            host: the address to listen on.
            key: the key with which clients sign their tokens.
            max_message_bytes: the size limit of a message, and of a batch.
            idle_seconds: links without traffic for this long are detached, as in Azure.
            clock: returns the Unix time; `advance` adds to it.
        """
        namespace = configuration.load(config)
        self.ignored = namespace.ignored
        for sentence in namespace.ignored:
            log.warning("%s", sentence)
        self._key = key
        self._clock = clock
        self._ahead_seconds = 0.0
        self._bus = Bus(
            namespace,
            clock=self._now,
            key_name=KEY_NAME,
            key=key,
            max_message_bytes=max_message_bytes,
            idle_seconds=idle_seconds,
        )
        self._loop = Loop(self._bus, host=host, port=port)
        self._bus.host = f"{host}:{self._loop.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections and stop. Messages can still be inspected."""
        self._loop.stop()

    @property
    def port(self) -> int:
        """Return the port, which stays the same."""
        return self._loop.port

    @property
    def connection_string(self) -> str:
        """Return the connection string for clients."""
        return self.connection_string_with(self._key)

    def connection_string_with(self, key: str) -> str:
        """Return a connection string with another key."""
        return (
            f"Endpoint=sb://{self._bus.host};SharedAccessKeyName={KEY_NAME};SharedAccessKey={key};"
            "UseDevelopmentEmulator=true;"
        )

    @property
    def connections(self) -> int:
        """Return the number of connections."""
        return int(self._loop.call(lambda: len(self._loop.peers)))

    @property
    def failures(self) -> tuple[Exception, ...]:
        """Return the lab's internal errors so far; each has ended a connection. Tests assert that there are none."""
        return tuple(self._loop.failures)

    def senders(self, path: str) -> int:
        """Return the number of links for sending to an entity."""
        return self._loop.call(lambda: self._bus.count_links(Producer, path))

    def receivers(self, path: str) -> int:
        """Return the number of links for receiving from an entity, including those that wait for a session."""
        return self._loop.call(lambda: self._bus.count_links(Consumer, path))

    def entity(self, path: str) -> Entity:
        """Return a view of a queue, a topic or "topic/Subscriptions/name", in any letter case."""
        self._read(path, lambda _: None)
        return Entity(self._read, path)

    # --- availability and time ---

    def stop_listening(self) -> None:
        """Simulate an outage: close all connections and refuse new ones. Messages and locks stay."""
        self._loop.call(self._loop.stop_listening)

    def listen_again(self) -> None:
        """End the outage: accept connections on the same port."""
        self._loop.call(self._loop.listen)

    def advance(self, seconds: float) -> None:
        """Move the lab's clock forward: locks, messages, duplicate windows and idle links expire accordingly."""
        self._loop.call(lambda: self._advance(seconds))

    def create_queue(self, name: str, properties: Json | None = None) -> None:
        """Create a queue, with properties as in the configuration file."""
        settings = configuration.queue_settings({"Name": name, "Properties": properties or {}})
        self._loop.call(lambda: self._bus.broker.add_queue(settings))

    def create_topic(
        self, name: str, properties: Json | None = None, subscriptions: Sequence[Json] = ()
    ) -> None:
        """Create a topic.

        Args:
            name: the topic's name.
            properties: as in the configuration file.
            subscriptions: as in the configuration file.
        """
        entry = {"Name": name, "Properties": properties or {}, "Subscriptions": subscriptions}
        settings = configuration.topic_settings(entry)
        self._loop.call(lambda: self._bus.broker.add_topic(settings))

    # --- faults ---

    def fault(
        self,
        kind: str,
        entity: str | None = None,
        *,
        seconds: float | None = None,
        count: int | None = None,
        after: int = 0,
    ) -> None:
        """Start a fault.

            drop: close connections immediately
            detach: detach links immediately, with the error of an idle link
            drop_before_store: receive a message or batch, store nothing, close the connection
            drop_after_store: store all of it, close the connection before the answer
            drop_before_settle, drop_after_settle: the same for a settlement
            detach_idle: detach links without traffic for `seconds` (in place of idle_seconds)
            stall: accept and keep connections, read and answer nothing; afterwards continue
            silent: accept new connections, send nothing, close them at the end
            silent_cbs, refuse_cbs: do not answer tokens, or refuse them
            unauthorized: refuse links as for a missing role
            no_credit: grant senders no more credit
            busy, quota: refuse sends; busy also refuses requests to $management
            missing, disabled: detach and refuse links as for such an entity

        Args:
            kind: one of the above.
            entity: a queue, or a topic with its subscriptions; None for all.
            seconds: how long it lasts; for detach_idle, how long a link may be idle. None: until cleared.
            count: how often it applies; None: no limit. Not for detach_idle, no_credit and stall.
            after: how many operations pass first.
        """
        if kind not in KINDS:
            raise LabError(f"fault given: {kind!r}; expected: one of {', '.join(KINDS)}")
        if count is not None and kind in ("detach_idle", "no_credit", "stall", *AT_ONCE):
            raise LabError(f"count given: {count} for {kind}; expected: none, this kind cannot be counted")
        idle = kind == "detach_idle"
        if idle and seconds is None:
            raise LabError("seconds given: none for detach_idle; expected: how long a link may be idle")
        fault = Fault(
            kind=kind,
            entity=None if entity is None else entity.lower(),
            until=None if seconds is None or idle else self._now() + seconds,
            left=count,
            skip=after,
            idle_seconds=seconds or 0.0,
        )
        self._loop.call(lambda: self._bus.connection_faults.begin(fault))

    def applied(self, kind: str) -> int:
        """Return how often faults of a kind have applied, for the kinds that are counted, and stall."""
        return self._loop.call(lambda: self._bus.faults.applied[kind])

    def clear_faults(self, kind: str | None = None) -> None:
        """End all faults, or those of a kind."""
        self._loop.call(lambda: self._clear(kind))

    def _clear(self, kind: str | None) -> None:
        self._bus.faults.clear(kind)
        self._bus.housekeeping()

    # --- internals ---

    def _now(self) -> float:
        return self._clock() + self._ahead_seconds

    def _advance(self, seconds: float) -> None:
        self._ahead_seconds += seconds
        self._bus.settle()
        self._bus.housekeeping()

    def _read(self, path: str, look: Callable[[MessageQueue | Topic], T]) -> T:
        return self._loop.call(lambda: look(_find(self._bus, path)))


def _find(bus: Bus, path: str) -> MessageQueue | Topic:
    for find in (bus.broker.target, bus.broker.source):
        try:
            found: MessageQueue | Topic = find(path)
        except Refused:
            continue
        return found
    raise LabError(f"entity given: {path!r}; expected: one of the configuration")
