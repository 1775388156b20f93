"""Dispatch proton's events to links, and messages from queues to the links with credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.config import Namespace
from bridge.lab.servicebus.connection import Connection, proton
from bridge.lab.servicebus.links import Consumer, Endpoint, Producer, refuse
from bridge.lab.servicebus.messages import NOT_IMPLEMENTED, SESSION_LOST, UNAUTHORIZED, Refused
from bridge.lab.servicebus.nodes import CBS, MANAGEMENT_SUFFIX, CbsNode, ManagementNode, ReplyLink
from bridge.lab.servicebus.queues import Events, MessageQueue

CONTAINER = "imds-bridge-lab"
KEPT_FAILURES = 100


# Returns whether something else takes over at a stage: connect, token, attach, ask, manage, credit, send, store,
# stored, settle, settled. It gets the connection, the entity's path, and what to call if the same work is to be done
# later; it may raise Refused, for the client.
Intercept = Callable[[str, Connection, str, Callable[[], None]], bool]


class Bus:
    """The service. Everything here runs on the loop's thread.

    Attributes:
        intercept: tests put their faults here.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        now: Callable[[], float],
        wake: Callable[[Callable[[], None]], object],
        key_name: str,
        key: str,
        max_message_bytes: int,
    ) -> None:
        """Start without connections.

        Args:
            namespace: the entities.
            now: returns the Unix time.
            wake: calls a function on the loop's thread, soon.
            key_name: the name of the accepted key.
            key: its value.
            max_message_bytes: the size limit of a message, and of a batch.
        """
        self.now = now
        self.key_name = key_name
        self.key = key
        self.max_message_bytes = max_message_bytes
        self.host = ""
        self.intercept: Intercept = lambda *_: False
        self.connections: set[Connection] = set()
        self.failures: deque[Exception] = deque(maxlen=KEPT_FAILURES)
        self.broker = Broker(namespace, Events(now, self.changed, self._session_lost))
        self._wake = wake
        self._is_awake = False
        self._unpumped: dict[MessageQueue, None] = {}
        self._unsent: set[Connection] = set()
        self._consumers: dict[MessageQueue, deque[Consumer]] = {}
        self._on: dict[Any, Callable[[Connection, Any], None]] = {
            proton.Event.CONNECTION_REMOTE_OPEN: self._connection_opened,
            proton.Event.CONNECTION_REMOTE_CLOSE: self._connection_closed,
            proton.Event.SESSION_REMOTE_OPEN: lambda _, event: event.session.open(),
            proton.Event.SESSION_REMOTE_CLOSE: self._session_closed,
            proton.Event.LINK_REMOTE_OPEN: lambda connection, event: self._attach(connection, event.link),
            proton.Event.LINK_REMOTE_CLOSE: self._link_closed,
            proton.Event.LINK_REMOTE_DETACH: self._link_closed,
            proton.Event.LINK_FLOW: self._link_flowed,
            proton.Event.DELIVERY: self._delivered,
            proton.Event.TRANSPORT_ERROR: lambda connection, _: connection.end(),
        }

    # --- connections ---

    def opened(self, connection: Connection) -> None:
        """Register a new connection."""
        self.connections.add(connection)
        self.intercept("connect", connection, "", lambda: None)

    def gone(self, connection: Connection) -> None:
        """Release what a client held."""
        self.connections.discard(connection)
        for endpoint in list(connection.endpoints):
            self.drop(endpoint)

    def handle(self, connection: Connection, event: Any) -> None:
        """Handle an event of proton."""
        if handler := self._on.get(event.type):
            handler(connection, event)

    def tick(self) -> None:
        """Let what is due expire, and look for links that wait."""
        self.broker.tick()
        for queue in self._consumers:
            self.changed(queue)

    def _connection_opened(self, _: Connection, event: Any) -> None:
        event.connection.container = CONTAINER
        event.connection.open()

    def _connection_closed(self, connection: Connection, event: Any) -> None:
        event.connection.close()
        connection.end()

    def _session_closed(self, connection: Connection, event: Any) -> None:
        for endpoint in list(connection.endpoints):
            if endpoint.link.session == event.session:
                self.drop(endpoint)
        event.session.close()

    # --- messages ---

    def changed(self, queue: MessageQueue) -> None:
        """Look at a queue soon."""
        self._unpumped[queue] = None
        self._wake_up()

    def send_later(self, connection: Connection) -> None:
        """Send soon what a connection has to send."""
        self._unsent.add(connection)
        self._wake_up()

    def _wake_up(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            self._wake(self._settle)

    def _settle(self) -> None:
        self._is_awake = False
        while self._unpumped:
            self.pump(self._unpumped.popitem()[0])
        while self._unsent:
            connection = self._unsent.pop()
            connection.guard(connection.flush)

    def pump(self, queue: MessageQueue) -> None:
        """Send a queue's messages to the links with credit, one to each in turn."""
        consumers = self._consumers.get(queue, deque())
        for consumer in [one for one in consumers if not one.opened and one.connection.active]:
            self._open(consumer)
        unserved = 0
        while unserved < len(consumers):
            consumer = consumers[0]
            consumers.rotate(-1)
            unserved = 0 if consumer.connection.guard(consumer.serve) else unserved + 1

    def _session_lost(self, owner: object) -> None:
        if isinstance(owner, Consumer) and owner in owner.connection.endpoints:
            owner.detach(Refused(SESSION_LOST, "The session lock has expired on the MessageSession."))

    # --- links ---

    def _attach(self, connection: Connection, link: Any) -> None:
        terminus = link.remote_target if link.is_receiver else link.remote_source
        address = terminus.address or ""
        path = unquote(urlsplit(address).path if "://" in address else address).strip("/")
        try:
            if self.intercept("attach", connection, _entity(path), lambda: self._attach(connection, link)):
                return
            endpoint = self._endpoint(connection, link, path)
        except Refused as refused:
            refuse(link, refused)
            return
        link.lab = endpoint
        connection.endpoints.add(endpoint)
        if isinstance(endpoint, Consumer):
            self._consumers.setdefault(endpoint.queue, deque()).append(endpoint)
            self._open(endpoint)

    def _endpoint(self, connection: Connection, link: Any, path: str) -> Endpoint:
        if not path:
            raise Refused(NOT_IMPLEMENTED, "The lab supports neither transactions nor dynamic nodes.")
        entity = _entity(path)
        if path != CBS:
            self.broker.find(entity)
            if not connection.may_use(entity):
                raise Refused(
                    UNAUTHORIZED, f"Unauthorized access. There is no token for the entity '{entity}'."
                )
        kind: type[Endpoint] = Producer if link.is_receiver else Consumer
        if path == CBS:
            kind = CbsNode if link.is_receiver else ReplyLink
        elif path != entity:
            kind = ManagementNode if link.is_receiver else ReplyLink
        return kind(self, connection, link, entity)

    def _open(self, consumer: Consumer) -> None:
        try:
            consumer.open()
        except Refused as refused:
            consumer.detach(refused)

    def _link_flowed(self, _: Connection, event: Any) -> None:
        if endpoint := getattr(event.link, "lab", None):
            endpoint.flowed()

    def _delivered(self, _: Connection, event: Any) -> None:
        if endpoint := getattr(event.link, "lab", None):
            endpoint.delivered(event.delivery)

    def _link_closed(self, _: Connection, event: Any) -> None:
        if endpoint := getattr(event.link, "lab", None):
            self.drop(endpoint)
        if event.link.state & proton.Endpoint.LOCAL_ACTIVE:
            event.link.close()

    def drop(self, endpoint: Endpoint) -> None:
        """Remove a link, and release what it held."""
        endpoint.connection.endpoints.discard(endpoint)
        if isinstance(endpoint, Consumer) and endpoint in self._consumers.get(endpoint.queue, ()):
            self._consumers[endpoint.queue].remove(endpoint)
        endpoint.closed()
        endpoint.link.lab = None  # proton keeps it in C, where the garbage collector does not see the cycle


def _entity(path: str) -> str:
    return path[: -len(MANAGEMENT_SUFFIX)] if path.lower().endswith(MANAGEMENT_SUFFIX) else path
