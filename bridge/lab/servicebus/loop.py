"""Run the connections in a selectors loop on a separate thread.

Proton's Container uses select(), which fails from descriptor 1,024 on; this loop has no such limit.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from bridge.lab.servicebus.peer import Peer

T = TypeVar("T")

BACKLOG = 1024
HOUSEKEEPING_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
CALL_SECONDS = 30.0
KEPT_FAILURES = 100


class Handler(Protocol):
    """Handles what happens on connections, on the loop's thread. An exception ends only the connection."""

    def opened(self, peer: Peer) -> None:
        """Handle a new connection."""

    def event(self, peer: Peer, event: Any) -> None:
        """Handle an event of proton."""

    def gone(self, peer: Peer) -> None:
        """Handle the end of a connection."""

    def settle(self) -> None:
        """Answer what was read in this round."""

    def housekeeping(self) -> None:
        """Run periodic work, ten times a second."""

    def next_at(self) -> float | None:
        """Return in how many seconds `settle` must be called at the latest."""


class Loop:
    """Run a handler for the connections of one listening port, on a separate thread.

    `call` and `stop` may be called from any thread; the rest belongs to the loop's thread.
    """

    def __init__(self, handler: Handler, *, host: str, port: int) -> None:
        """Start to listen.

        Args:
            handler: called for everything that happens.
            host: the address to listen on.
            port: 0 for any free port.
        """
        self.dirty: set[Peer] = set()
        self.peers: set[Peer] = set()
        self.failures: deque[Exception] = deque(maxlen=KEPT_FAILURES)
        self._dead: list[Peer] = []
        self._handler = handler
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._awake, self._wake = socket.socketpair()
        self._awake.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, None)
        self._listener: socket.socket | None = None
        self._stopping = False
        self._cleaned_at = 0.0
        self._ticked_at = 0.0
        self.host = host
        self.port = port
        self.listen()
        self._thread = threading.Thread(target=self._run, name="lab-servicebus", daemon=True)
        self._thread.start()

    # --- from any thread ---

    def call(self, work: Callable[[], T]) -> T:
        """Run the work between two rounds of the loop; return what it returns, raise what it raises."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return work()
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised again where the call was made
                outcome.set_exception(error)

        self._calls.append(run)
        with suppress(OSError):  # the buffer is full, so the loop is awake anyway
            self._wake.send(b"\0")
        return outcome.result(CALL_SECONDS)

    def stop(self) -> None:
        """Close all connections and end the thread."""
        if self._thread.is_alive():
            self.call(self._end)
            self._thread.join(CALL_SECONDS)

    # --- on the loop's thread ---

    def listen(self) -> None:
        """Accept connections; the port, once chosen, stays the same."""
        if self._listener is not None:
            return
        listener = socket.create_server((self.host, self.port), backlog=BACKLOG)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def stop_listening(self) -> None:
        """Accept no more connections, and close the existing ones."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self.disconnect()

    def disconnect(self) -> None:
        """Close all connections."""
        for peer in list(self.peers):
            peer.close()

    def watch(self, peer: Peer, events: int = selectors.EVENT_READ) -> None:
        """Watch for a peer that can be read or written."""
        try:
            self._selector.modify(peer.sock, events, peer)
        except KeyError:
            self._selector.register(peer.sock, events, peer)

    def forget(self, peer: Peer) -> None:
        """Stop watching a peer."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)

    def remove_peer(self, peer: Peer) -> None:
        """Remove a closed peer."""
        self.peers.discard(peer)
        self.dirty.discard(peer)
        self._dead.append(peer)
        self.guard(peer, lambda: self._handler.gone(peer))

    def handle(self, peer: Peer, event: Any) -> None:
        """Pass an event to the handler."""
        self.guard(peer, lambda: self._handler.event(peer, event))

    def guard(self, peer: Peer | None, work: Callable[[], T]) -> T | None:
        """Return what the work returns; an exception ends this connection, never the loop."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - kept for tests; the other connections go on
            self.failures.append(error)
            if peer is not None:
                peer.close()
            return None

    def _end(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not self._stopping:
            for key, mask in self._selector.select(self._wait_seconds()):
                self._ready(key.data, mask)
            while self._calls:
                self._calls.popleft()()
            self._clean()
            self.guard(None, self._handler.settle)
            while self.dirty:
                peer = self.dirty.pop()
                self.guard(peer, peer.flush)
            self._free_dead()
        self.stop_listening()
        self._free_dead()
        while self._calls:
            self._calls.popleft()()
        for sock in (self._awake, self._wake):
            sock.close()
        self._selector.close()

    def _free_dead(self) -> None:
        while self._dead:
            self._dead.pop().free()

    def _wait_seconds(self) -> float:
        due = self._handler.next_at()
        return HOUSEKEEPING_SECONDS if due is None else max(0.0, min(due, HOUSEKEEPING_SECONDS))

    def _ready(self, what: Peer | socket.socket | None, mask: int) -> None:
        if what is None:
            with suppress(BlockingIOError):
                self._awake.recv(4096)
        elif isinstance(what, socket.socket):
            self.guard(None, lambda: self._accept(what))
        elif not what.closed:
            if mask & selectors.EVENT_READ:
                self.guard(what, what.read)
            self.dirty.add(what)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the client disconnected again, or the listener has closed meanwhile
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(self, sock)
        self.peers.add(peer)
        self.watch(peer)
        self.guard(peer, lambda: self._handler.opened(peer))

    def _clean(self) -> None:
        now = time.monotonic()
        if now - self._cleaned_at < HOUSEKEEPING_SECONDS:
            return
        self._cleaned_at = now
        self.guard(None, self._handler.housekeeping)
        if now - self._ticked_at >= HEARTBEAT_SECONDS:
            self._ticked_at = now
            for peer in list(self.peers):
                self.guard(peer, peer.tick)
