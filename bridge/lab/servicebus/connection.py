"""Exchange AMQP with one client: proton's engine over an asyncio transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import proton as _proton

from bridge.lab.servicebus.sasl import Sasl

if TYPE_CHECKING:
    from bridge.lab.servicebus.bus import Bus
    from bridge.lab.servicebus.links import Endpoint

# Proton's annotations are incomplete and partly wrong: it is used untyped, in this package only.
proton: Any = _proton

MAX_FRAME_BYTES = 65_536
IDLE_SECONDS = 240.0


class Connection(asyncio.Protocol):
    """The connection of one client.

    Attributes:
        active: whether anything is handled and sent; not once it is closed.
        allowed: what the client has brought tokens for: paths of entities, in lower case, with all below.
        socket: the transport.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.endpoints: set[Endpoint] = set()
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
