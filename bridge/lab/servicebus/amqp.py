"""Dispatch proton's events to links, and messages from queues to the links with credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from bridge.lab.servicebus import cbs
from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.conditions import (
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    SESSION_LOST,
    UNAUTHORIZED,
    Refused,
)
from bridge.lab.servicebus.config import Namespace
from bridge.lab.servicebus.connection_faults import Client, ConnectionFaults, idle, missing
from bridge.lab.servicebus.faults import Faults
from bridge.lab.servicebus.links import SEND_REFUSALS, Consumer, Endpoint, Producer, refuse
from bridge.lab.servicebus.nodes import CbsNode, ManagementNode, ReplyLink
from bridge.lab.servicebus.peer import Peer, proton
from bridge.lab.servicebus.queues import MessageQueue

CONTAINER = "imds-bridge-lab"


class Bus:
    """The service. Everything here runs on the loop's thread."""

    def __init__(
        self,
        namespace: Namespace,
        *,
        clock: Callable[[], float],
        key_name: str,
        key: str,
        max_message_bytes: int,
        idle_seconds: float,
    ) -> None:
        """Start without connections.

        Args:
            namespace: the entities.
            clock: returns the Unix time.
            key_name: the name of the accepted key.
            key: its value.
            max_message_bytes: the size limit of a message, and of a batch.
            idle_seconds: links without traffic for this long are detached.
        """
        self.now = clock
        self.key_name = key_name
        self.key = key
        self.max_message_bytes = max_message_bytes
        self.idle_seconds = idle_seconds
        self.host = "127.0.0.1"
        self.faults = Faults(clock)
        self.connection_faults = ConnectionFaults(self)
        self.peers: set[Peer] = set()
        self._unpumped: dict[MessageQueue, None] = {}
        self._consumers: dict[MessageQueue, deque[Consumer]] = {}
        self._lost_sessions: list[Consumer] = []
        self.broker = Broker(namespace, clock, changed=self.changed, session_lost=self._session_lost)
        self._on: dict[Any, Callable[[Peer, Any], None]] = {
            proton.Event.CONNECTION_REMOTE_OPEN: self._connection_opened,
            proton.Event.CONNECTION_REMOTE_CLOSE: self._connection_closed,
            proton.Event.SESSION_REMOTE_OPEN: lambda _, event: event.session.open(),
            proton.Event.SESSION_REMOTE_CLOSE: self._session_closed,
            proton.Event.LINK_REMOTE_OPEN: lambda peer, event: self._attach(peer, event.link),
            proton.Event.LINK_REMOTE_CLOSE: self._link_closed,
            proton.Event.LINK_REMOTE_DETACH: self._link_closed,
            proton.Event.LINK_FLOW: self._flowed,
            proton.Event.DELIVERY: self._delivered,
            proton.Event.TRANSPORT_ERROR: self._transport_failed,
        }

    # --- called by the loop ---

    def opened(self, peer: Peer) -> None:
        """Register a new connection."""
        peer.context = Client()
        self.peers.add(peer)
        self.connection_faults.on_connect(peer)

    def gone(self, peer: Peer) -> None:
        """Release what a client held."""
        self.peers.discard(peer)
        for endpoint in list(peer.context.endpoints):
            self._drop(endpoint)

    def event(self, peer: Peer, event: Any) -> None:
        """Handle an event of proton."""
        handler = self._on.get(event.type)
        if handler is not None:
            handler(peer, event)

    def settle(self) -> None:
        """Run the broker's timers, and send what can be sent."""
        self.broker.tick()
        while self._lost_sessions:
            lost = self._lost_sessions.pop()
            if lost in lost.peer.context.endpoints:
                lost.detach(Refused(SESSION_LOST, "The session lock has expired on the MessageSession."))
        while self._unpumped:
            queue, _ = self._unpumped.popitem()
            self.pump(queue)

    def next_at(self) -> float | None:
        """Return in how many seconds the broker's next timer is due."""
        if self._unpumped:
            return 0.0
        due = self.broker.timers.next_at()
        return None if due is None else due - self.now()

    def housekeeping(self) -> None:
        """End links and faults whose time is over."""
        for peer in list(self.peers):
            self.connection_faults.resume(peer)
            for endpoint in list(peer.context.endpoints):
                self._check_idle(endpoint)
        for queue in self._consumers:
            self._unpumped[queue] = None

    def count_links(self, kind: type[Endpoint], path: str) -> int:
        """Return the number of links of a kind to an entity."""
        endpoints = [endpoint for peer in self.peers for endpoint in peer.context.endpoints]
        return sum(isinstance(one, kind) and one.path.lower() == path.lower() for one in endpoints)

    # --- messages ---

    def changed(self, queue: MessageQueue) -> None:
        """Check a queue before the end of this round."""
        self._unpumped[queue] = None

    def pump(self, queue: MessageQueue) -> None:
        """Send a queue's messages to the links with credit, one to each in turn."""
        consumers = self._consumers.get(queue)
        if not consumers:
            return
        for consumer in [c for c in consumers if not c.opened and not c.peer.paused]:
            self._open(consumer)
        unserved = 0
        while unserved < len(consumers):
            consumer = consumers[0]
            consumers.rotate(-1)
            if consumer.has_credit and consumer.peer.loop.guard(consumer.peer, consumer.serve):
                unserved = 0
            else:
                unserved += 1

    def _session_lost(self, owner: object) -> None:
        if isinstance(owner, Consumer):
            self._lost_sessions.append(owner)

    # --- connections, sessions, links ---

    def _connection_opened(self, _: Peer, event: Any) -> None:
        event.connection.container = CONTAINER
        event.connection.open()

    def _connection_closed(self, peer: Peer, event: Any) -> None:
        event.connection.close()
        peer.ending = True

    def _transport_failed(self, peer: Peer, _: Any) -> None:
        peer.ending = True

    def _session_closed(self, peer: Peer, event: Any) -> None:
        for endpoint in list(peer.context.endpoints):
            if endpoint.link.session == event.session:
                self._drop(endpoint)
        event.session.close()

    def _link_closed(self, _: Peer, event: Any) -> None:
        endpoint = getattr(event.link, "lab", None)
        if endpoint is not None:
            self._drop(endpoint)
        if event.link.state & proton.Endpoint.LOCAL_ACTIVE:
            event.link.close()

    def _flowed(self, _: Peer, event: Any) -> None:
        endpoint = getattr(event.link, "lab", None)
        if endpoint is not None:
            endpoint.flowed()

    def _delivered(self, _: Peer, event: Any) -> None:
        endpoint = getattr(event.link, "lab", None)
        if endpoint is not None:
            endpoint.delivered(event.delivery)

    def _attach(self, peer: Peer, link: Any) -> None:
        terminus = link.remote_target if link.is_receiver else link.remote_source
        path = _path(terminus.address)
        if path not in ("", cbs.ADDRESS) and self.connection_faults.stalls(
            peer, _entity(path), lambda: self._attach(peer, link)
        ):
            return
        try:
            endpoint = self._endpoint(peer, link, path)
        except Refused as refused:
            refuse(link, refused)
            return
        link.lab = endpoint
        peer.context.endpoints.add(endpoint)
        if isinstance(endpoint, Consumer):
            self._consumers.setdefault(endpoint.queue, deque()).append(endpoint)
            self._open(endpoint)

    def _endpoint(self, peer: Peer, link: Any, path: str) -> Endpoint:
        if path == cbs.ADDRESS:
            return CbsNode(self, peer, link, path) if link.is_receiver else ReplyLink(self, peer, link, path)
        if not path:
            raise Refused(NOT_IMPLEMENTED, "The lab supports neither transactions nor dynamic nodes.")
        entity = _entity(path)
        self._check_access(peer, entity)
        if path.lower().endswith(cbs.MANAGEMENT_SUFFIX):
            return (
                ManagementNode(self, peer, link, entity)
                if link.is_receiver
                else ReplyLink(self, peer, link, entity)
            )
        if link.is_receiver:
            self.broker.target(entity)
            return Producer(self, peer, link, entity)
        consumer = Consumer(self, peer, link, entity, self.broker.source(entity))
        _check_sessions(consumer)
        return consumer

    def _check_access(self, peer: Peer, entity: str) -> None:
        if not cbs.opens(peer.context.opened_paths, entity) or self.faults.applies("unauthorized", entity):
            raise Refused(
                UNAUTHORIZED,
                f"Unauthorized access. 'Send' or 'Listen' claim(s) are required to perform this operation. "
                f"Resource: 'sb://{self.host}/{entity}'.",
            )
        if not self.broker.exists(entity) or self.faults.applies("missing", entity):
            raise missing(entity)
        if self.faults.applies("disabled", entity):
            raise SEND_REFUSALS["disabled"]

    def _open(self, consumer: Consumer) -> None:
        try:
            consumer.open()
        except Refused as refused:
            self._drop(consumer)
            refuse(consumer.link, refused)
            consumer.peer.loop.dirty.add(consumer.peer)

    def forget(self, endpoint: Endpoint) -> None:
        """Remove a link."""
        endpoint.peer.context.endpoints.discard(endpoint)
        if isinstance(endpoint, Consumer) and endpoint in self._consumers.get(endpoint.queue, ()):
            self._consumers[endpoint.queue].remove(endpoint)

    def _drop(self, endpoint: Endpoint) -> None:
        self.forget(endpoint)
        endpoint.closed()
        endpoint.link.lab = None  # proton keeps it in C, where the garbage collector does not see the cycle

    # --- time ---

    def _check_idle(self, endpoint: Endpoint) -> None:
        if not isinstance(endpoint, (Producer, Consumer)) or endpoint.peer.paused:
            return
        if isinstance(endpoint, Producer):
            endpoint.peer.loop.guard(endpoint.peer, endpoint.grant)
        fault = self.faults.find("detach_idle", endpoint.path)
        limit = self.idle_seconds if fault is None else fault.idle_seconds
        if endpoint.opened and self.now() - endpoint.active_at >= limit:
            endpoint.detach(idle(endpoint, limit))


def _check_sessions(consumer: Consumer) -> None:
    if consumer.queue.requires_session and not consumer.sessionful:
        raise Refused(
            NOT_ALLOWED,
            "It is not possible for an entity that requires sessions to create a non-sessionful message receiver.",
        )
    if consumer.sessionful and not consumer.queue.requires_session:
        raise Refused(
            NOT_ALLOWED,
            "A sessionful message receiver cannot be created on an entity that does not require sessions.",
        )


def _path(address: str | None) -> str:
    if not address:
        return ""
    return unquote(urlsplit(address).path if "://" in address else address).strip("/")


def _entity(path: str) -> str:
    return path[: -len(cbs.MANAGEMENT_SUFFIX)] if path.lower().endswith(cbs.MANAGEMENT_SUFFIX) else path
