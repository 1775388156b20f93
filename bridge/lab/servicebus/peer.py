"""Exchange AMQP with one client: proton's engine over a socket."""

from __future__ import annotations

import selectors
import socket
import time
from typing import TYPE_CHECKING, Any

try:
    import proton as _proton
except ImportError as error:
    raise ImportError(
        "the lab's Service Bus needs python-qpid-proton; install the extra `lab`: pip install 'imds-bridge[lab]'"
    ) from error

if TYPE_CHECKING:
    from bridge.lab.servicebus.loop import Loop

# Proton's annotations are incomplete and partly wrong: it is used untyped, in this package only.
proton: Any = _proton

READ_BYTES = 262_144
MAX_FRAME_BYTES = 65_536
IDLE_SECONDS = 240.0


class Peer:
    """The connection of one client."""

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self.loop = loop
        self.sock = sock
        self.paused = False
        self.closed = False
        self.ending = False
        self.context: Any = None
        self._wanted = selectors.EVENT_READ
        self._collector = proton.Collector()
        self._connection = proton.Connection()
        self._connection.collect(self._collector)
        self._transport = proton.Transport(proton.Transport.SERVER)
        self._transport.max_frame_size = MAX_FRAME_BYTES
        self._transport.idle_timeout = IDLE_SECONDS
        self._transport.require_auth(False)
        self._transport.sasl().allowed_mechs("ANONYMOUS")
        self._transport.bind(self._connection)

    def read(self) -> None:
        """Read what has arrived."""
        capacity = self._transport.capacity()
        if capacity <= 0:
            self.close()
            return
        try:
            data = self.sock.recv(min(capacity, READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            self._transport.push(data)
        except proton.ProtonException:
            self.ending = True
        self._dispatch()

    def flush(self) -> None:
        """Write pending data, as far as the socket accepts it."""
        if self.closed or self.paused:
            return
        while True:
            try:
                waiting = self._transport.pending()
            except proton.ProtonException:
                waiting = -1
            if waiting < 0:
                self.close()
                return
            if waiting == 0:
                break
            try:
                sent = self.sock.send(self._transport.peek(waiting))
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self._transport.pop(sent)
            self._dispatch()
            if self.closed:
                return
        if waiting == 0 and self.ending:
            self.close()
            return
        self._want(selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0))

    def tick(self) -> None:
        """Let proton send heartbeats and detect missing ones."""
        if not self.closed and not self.paused:
            self._transport.tick(time.monotonic())
            self._dispatch()
            self.loop.dirty.add(self)

    def pause(self) -> None:
        """Stop reading and writing until resumed."""
        if not self.paused and not self.closed:
            self.paused = True
            self.loop.forget(self)

    def resume(self) -> None:
        """Continue to read and write."""
        if self.paused and not self.closed:
            self.paused = False
            self._wanted = selectors.EVENT_READ
            self.loop.watch(self)
            self._dispatch()

    def close(self) -> None:
        """Close the connection without an AMQP close."""
        if self.closed:
            return
        self.closed = True
        if not self.paused:
            self.loop.forget(self)
        self.sock.close()
        self.loop.remove_peer(self)

    def free(self) -> None:
        """Release proton's memory, once no function of a closed peer is running."""
        self._transport.unbind()
        self._connection.free()
        self._collector.release()

    def _dispatch(self) -> None:
        while not self.closed and not self.paused and (event := self._collector.peek()):
            self.loop.handle(self, event)
            self._collector.pop()
        if not self.closed:
            self.loop.dirty.add(self)

    def _want(self, events: int) -> None:
        if events != self._wanted:
            self._wanted = events
            self.loop.watch(self, events)
