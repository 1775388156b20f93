"""Run the lab's Service Bus on a thread of this process."""

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
# What the official emulator's connection string has in this place; it opens nothing but a lab.
KEY = "SAS_KEY_VALUE"
MAX_MESSAGE_BYTES = 256 * 1024
IDLE_SECONDS = 600.0

log = logging.getLogger(__name__)


class ServiceBusLab:
    """Serve Service Bus over AMQP 1.0 and plain TCP on this machine, for tests and demonstrations.

    It is a lab: messages live in memory, and nothing is encrypted. Every method may be called from any thread.
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
        """Start to serve.

        Args:
            config: the official emulator's configuration file, or its content.
            port: 0 for any free one.
            host: the address to listen at.
            key: what clients must sign their tokens with.
            max_message_bytes: of a message, and of a batch.
            idle_seconds: a link that carries nothing for so long is detached, as in Azure.
            clock: seconds since 1970; `advance` adds to it.
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
        """Cut all connections and end. Messages can still be looked at."""
        self._loop.stop()

    @property
    def port(self) -> int:
        """Return the port, which stays the same."""
        return self._loop.port

    @property
    def connection_string(self) -> str:
        """Return what a client needs to connect."""
        return self.connection_string_with(self._key)

    def connection_string_with(self, key: str) -> str:
        """Return a connection string with another key, right or wrong."""
        return (
            f"Endpoint=sb://{self._bus.host};SharedAccessKeyName={KEY_NAME};SharedAccessKey={key};"
            "UseDevelopmentEmulator=true;"
        )

    @property
    def connections(self) -> int:
        """Return how many connections there are."""
        return int(self._loop.call(lambda: len(self._loop.peers)))

    @property
    def failures(self) -> tuple[Exception, ...]:
        """Return the lab's own faults so far, each of which has cost a connection: a test can say there are none."""
        return tuple(self._loop.failures)

    def senders(self, path: str) -> int:
        """Return how many links clients have for sending to an entity."""
        return self._loop.call(lambda: self._bus.count_links(Producer, path))

    def receivers(self, path: str) -> int:
        """Return how many links clients have for receiving from an entity, those that wait for a session too."""
        return self._loop.call(lambda: self._bus.count_links(Consumer, path))

    def entity(self, path: str) -> Entity:
        """Return a view of a queue, a topic or "topic/Subscriptions/name", in any letter case."""
        self._read(path, lambda _: None)
        return Entity(self._read, path)

    # --- the world outside ---

    def stop_listening(self) -> None:
        """Be down: cut all connections and refuse new ones. Messages and locks stay."""
        self._loop.call(self._loop.deafen)

    def listen_again(self) -> None:
        """Be back on the same port."""
        self._loop.call(self._loop.listen)

    def advance(self, seconds: float) -> None:
        """Put the lab's clock forward: locks, lives, windows and idle times end accordingly."""
        self._loop.call(lambda: self._advance(seconds))

    def create_queue(self, name: str, properties: Json | None = None) -> None:
        """Create a queue, with properties as in the configuration file."""
        settings = configuration.queue_settings({"Name": name, "Properties": properties or {}})
        self._loop.call(lambda: self._bus.broker.add_queue(settings))

    def create_topic(
        self, name: str, properties: Json | None = None, subscriptions: Sequence[Json] = ()
    ) -> None:
        """Create a topic, with subscriptions as in the configuration file."""
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
        """Let something go wrong.

            drop: connections are cut, now
            detach: links are detached with the error of an idle one, now
            drop_before_store: a message or batch comes in, nothing of it is stored, the connection is cut
            drop_after_store: all of it is stored, and the connection is cut before the answer
            drop_before_settle, drop_after_settle: the same for a settlement
            detach_idle: links that carry nothing for `seconds` are detached (in place of idle_seconds)
            stall: connections are taken and kept, and nothing is read or answered; in the end all goes on
            silent: new connections are taken, never spoken to, and cut in the end
            silent_cbs, refuse_cbs: tokens get no answer, or are refused
            unauthorized: links are refused as for a missing role
            no_credit: senders get no more credit
            busy, quota: sends are refused; busy: requests to $management, too
            missing, disabled: links are detached and refused as for such an entity

        Args:
            kind: one of the above.
            entity: whom it meets, with what lies below it (a topic with its subscriptions); None for all.
            seconds: how long it lasts; for detach_idle, how long a link may be idle. None: until cleared.
            count: how often it strikes; None: without end. Not for detach_idle, no_credit and stall.
            after: how many it lets pass first.
        """
        if kind not in KINDS:
            raise LabError(f"fault given: {kind!r}; expected: one of {', '.join(KINDS)}")
        if count is not None and kind in ("detach_idle", "no_credit", "stall", *AT_ONCE):
            raise LabError(f"count given: {count} for {kind}; expected: none, it does not strike one by one")
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
        self._loop.call(lambda: self._bus.mischief.begin(fault))

    def struck(self, kind: str) -> int:
        """Return how often faults of a kind have struck, for those that strike one by one, and stall."""
        return self._loop.call(lambda: self._bus.faults.struck[kind])

    def clear_faults(self, kind: str | None = None) -> None:
        """End all faults, or those of a kind."""
        self._loop.call(lambda: self._clear(kind))

    def _clear(self, kind: str | None) -> None:
        self._bus.faults.clear(kind)
        self._bus.housekeeping()

    # --- within ---

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
