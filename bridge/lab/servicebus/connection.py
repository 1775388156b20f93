"""Exchange AMQP with one client: proton's engine over an asyncio transport; and what all connections share."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from bridge.lab.servicebus.amqp import proton
from bridge.lab.servicebus.broker import Broker
from bridge.lab.servicebus.config import Namespace
from bridge.lab.servicebus.messages import SESSION_LOST, Refused
from bridge.lab.servicebus.queues import Events, MessageQueue
from bridge.lab.servicebus.sasl import Sasl

MAX_FRAME_BYTES = 65_536
IDLE_SECONDS = 240.0
KEPT_FAILURES = 100


class Service:
    """What connections and links know of the service. Everything here runs on the loop's thread.

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
        self.intercept: Intercept = lambda *_: False
        self.connections: set[Connection] = set()
        self.failures: deque[Exception] = deque(maxlen=KEPT_FAILURES)
        self.broker = Broker(namespace, Events(now, self.changed, self._session_lost))
        self._wake = wake
        self._is_awake = False
        self._unpumped: dict[MessageQueue, None] = {}
        self._unsent: set[Connection] = set()
        self.consumers: defaultdict[MessageQueue, deque[Any]] = defaultdict(deque)  # of links
        self.handlers: dict[Any, Callable[[Connection, Any], None]] = {}  # of proton's events

    def opened(self, connection: Connection) -> None:
        """Register a new connection."""
        self.connections.add(connection)
        self.intercept("connect", connection, "", lambda: None)

    def gone(self, connection: Connection) -> None:
        """Release what a client held."""
        self.connections.discard(connection)
        for endpoint in list(connection.endpoints):
            self.drop(endpoint)

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

    def handle(self, connection: Connection, event: Any) -> None:
        """Handle an event of proton."""
        if handler := self.handlers.get(event.type):
            handler(connection, event)

    def tick(self) -> None:
        """Let what is due expire, and look for links that wait."""
        self.broker.tick()
        for queue in self.consumers:
            self.changed(queue)

    def pump(self, queue: MessageQueue) -> None:
        """Send a queue's messages to the links with credit, one to each in turn."""
        consumers = self.consumers[queue]
        for consumer in [one for one in consumers if not one.opened and one.connection.active]:
            self.open(consumer)
        unserved = 0
        while unserved < len(consumers):
            consumer = consumers[0]
            consumers.rotate(-1)
            unserved = 0 if consumer.connection.guard(consumer.serve) else unserved + 1

    def _session_lost(self, owner: Any) -> None:
        if owner in owner.connection.endpoints:
            owner.detach(Refused(SESSION_LOST, "The session lock has expired on the MessageSession."))

    def open(self, consumer: Any) -> None:
        """Attach a link that receives, once it may."""
        try:
            consumer.open()
        except Refused as refused:
            consumer.detach(refused)

    def drop(self, endpoint: Any) -> None:
        """Remove a link, and release what it held."""
        endpoint.connection.endpoints.discard(endpoint)
        endpoint.closed()
        endpoint.link.lab = None  # proton keeps it in C, where the garbage collector does not see the cycle


class Connection(asyncio.Protocol):
    """The connection of one client.

    Attributes:
        active: whether anything is handled and sent; not once it is closed.
        allowed: what the client has brought tokens for: paths of entities, in lower case, with all below.
        socket: the transport.
    """

    def __init__(self, bus: Service) -> None:
        self.bus = bus
        self.endpoints: set[Any] = set()  # of links
        self.allowed: set[str] = set()
        self.active = True
        self.closed = False
        self._ending = False
        self._sasl = Sasl()
        self._collector = proton.Collector()
        self._connection = proton.Connection()
        self._connection.collect(self._collector)
        self._amqp = proton.Transport(proton.Transport.SERVER)
        self._amqp.max_frame_size = MAX_FRAME_BYTES
        self._amqp.idle_timeout = IDLE_SECONDS
        self._amqp.require_auth(False)
        self._amqp.bind(self._connection)

    def connection_made(self, transport: Any) -> None:
        """Take over the socket."""
        self.socket: asyncio.Transport = transport
        self.bus.opened(self)

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived."""
        if not self._sasl.done:
            data = self._authenticate(data)
        self.guard(lambda: self._push(data))
        self.dispatch()

    def may_use(self, path: str) -> bool:
        """Return whether a token covers an entity."""
        return any(f"{path.lower()}/".startswith(one) for one in self.allowed)

    def _authenticate(self, data: bytes) -> bytes:
        try:
            answer, rest = self._sasl.receive(data)
        except ValueError as error:
            self.socket.write(error.args[0])
            self._gone()
            self.socket.close()
            return b""
        self.socket.write(answer)
        return rest

    def connection_lost(self, _: Exception | None) -> None:
        """Release what the client held, and proton's memory."""
        self._gone()
        self._amqp.unbind()
        self._connection.free()
        self._collector.release()

    def guard(self, work: Callable[[], object]) -> Any:
        """Return what the work returns; an exception ends this connection, never the loop."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - kept for tests; the other connections go on
            self.bus.failures.append(error)
            self.close()
            return None

    def dispatch(self) -> None:
        """Handle proton's events, then send."""
        while self.active and (event := self._collector.peek()):
            self.guard(partial(self.bus.handle, self, event))
            self._collector.pop()
        self.bus.send_later(self)

    def flush(self) -> None:
        """Send what waits."""
        while self.active:
            try:
                waiting = self._amqp.pending()
            except proton.ProtonException:
                waiting = -1
            if waiting <= 0:
                if waiting < 0 or self._ending:
                    self._gone()
                    self.socket.close()
                return
            self.socket.write(self._amqp.peek(waiting))
            self._amqp.pop(waiting)
            self.dispatch()

    def tick(self) -> None:
        """Let proton send heartbeats and detect missing ones."""
        if self.active:
            self._amqp.tick(time.monotonic())
            self.dispatch()

    def end(self) -> None:
        """Close the connection once what waits is sent."""
        self._ending = True

    def close(self) -> None:
        """Close the connection without an AMQP close."""
        self._gone()
        self.socket.abort()

    def _gone(self) -> None:
        if not self.closed:
            self.closed, self.active = True, False
            self.guard(lambda: self.bus.gone(self))

    def _push(self, data: bytes) -> None:
        try:
            while data and not self.closed:
                room = self._amqp.capacity()
                if room <= 0:
                    self.end()
                    return
                self._amqp.push(data[:room])
                data = data[room:]
        except proton.ProtonException:
            self.end()


# Returns whether something else takes over at a stage: connect, token, attach, ask, manage, credit, send, store,
# stored, settle, settled. It gets the connection, the entity's path, and what to call if the same work is to be done
# later; it may raise Refused, for the client.
Intercept = Callable[[str, Connection, str, Callable[[], None]], bool]
