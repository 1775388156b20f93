"""A Service Bus for the lab: AMQP 1.0 over TCP for unmodified clients. In memory, for tests and demonstrations.

It needs python-qpid-proton, which the extra `lab` brings. `imds-bridge lab --help` says what it does not have, beside
forwarding, rule actions and expiry of tokens. Of partitions it has what they refuse and miss.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Self, TypeVar

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.broker import Topic
from bridge.lab.servicebus.bus import Bus
from bridge.lab.servicebus.config import Json, load
from bridge.lab.servicebus.connection import Connection
from bridge.lab.servicebus.messages import Refused
from bridge.lab.servicebus.queues import MessageQueue

T = TypeVar("T")

HOST = "127.0.0.1"
KEY_NAME = "RootManageSharedAccessKey"
# The key in the official emulator's connection string; it is valid only for a lab.
KEY = "SAS_KEY_VALUE"
MAX_MESSAGE_BYTES = 256 * 1024
BACKLOG = 1024
TICK_SECONDS = 0.1
HEARTBEAT_TICKS = 10
CALL_SECONDS = 30.0


class ServiceBusLab:
    """Serve Service Bus over AMQP 1.0 and plain TCP on this machine, for tests and demonstrations.

    Messages are kept in memory, and nothing is encrypted. Every method may be called from any thread.
    """

    bus_class = Bus

    def __init__(
        self,
        config: str | Path | Json,
        *,
        port: int = 0,
        key: str = KEY,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Start the server.

        Args:
            config: the official emulator's configuration file, or its content.
            port: 0 for any free port.
            key: the key with which clients sign their tokens.
            max_message_bytes: the size limit of a message, and of a batch.
        """
        namespace = load(config)
        self._key = key
        self._loop = asyncio.new_event_loop()
        self._bus = self.bus_class(
            namespace,
            now=self._now,
            wake=self._loop.call_soon,
            key_name=KEY_NAME,
            key=key,
            max_message_bytes=max_message_bytes,
        )
        try:
            listener = socket.create_server((HOST, port))
        except OSError as error:
            self._loop.close()
            raise LabError(f"port given: {port}; expected: a free one ({error})") from error
        self.port = int(listener.getsockname()[1])
        self._loop.call_soon(self._tick, 0)
        is_ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener, is_ready), name="lab-servicebus", daemon=True
        )
        self._thread.start()
        is_ready.wait(CALL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections and stop. Messages can still be inspected."""
        if self._thread.is_alive():
            self.call(self._loop.stop)
            self._thread.join(CALL_SECONDS)

    @property
    def connection_string(self) -> str:
        """Return the connection string for clients."""
        return self.connection_string_with(self._key)

    def connection_string_with(self, key: str) -> str:
        """Return a connection string with another key."""
        return (
            f"Endpoint=sb://{HOST}:{self.port};SharedAccessKeyName={KEY_NAME};SharedAccessKey={key};"
            "UseDevelopmentEmulator=true;"
        )

    @property
    def failures(self) -> tuple[Exception, ...]:
        """Return the lab's internal errors so far; each has ended a connection. Tests assert that there are none."""
        return tuple(self._bus.failures)

    def message_ids(self, path: str) -> set[str]:
        """Return the ids of the messages in a queue or "topic/Subscriptions/name", in any letter case."""
        queue = self.find(path)
        found = queue.messages if isinstance(queue, MessageQueue) else {}
        return self.call(lambda: {message.content.message_id for message in found.values()})

    def find(self, path: str) -> MessageQueue | Topic:
        """Return an entity; only `call` may look into it."""
        try:
            return self._bus.broker.find(path)
        except Refused as error:
            raise LabError(f"entity given: {path!r}; expected: one of the configuration") from error

    def call(self, work: Callable[[], T]) -> T:
        """Run the work on the loop's thread; return what it returns, raise what it raises."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return work()
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised again where the call was made
                outcome.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return outcome.result(CALL_SECONDS)

    # --- on the loop's thread ---

    def _now(self) -> float:
        return time.time()

    async def _listen_on(self, listener: socket.socket) -> None:
        self._server = await self._loop.create_server(
            lambda: Connection(self._bus), sock=listener, backlog=BACKLOG
        )

    def _run(self, listener: socket.socket, is_ready: threading.Event) -> None:
        self._loop.run_until_complete(self._listen_on(listener))
        is_ready.set()
        self._loop.run_forever()
        self._disconnect()
        self._loop.run_until_complete(asyncio.sleep(0))  # connections are released in the next round
        self._loop.close()

    def _disconnect(self) -> None:
        self._server.close()
        for connection in list(self._bus.connections):
            connection.close()

    def _tick(self, number: int) -> None:
        self._bus.tick()
        if number % HEARTBEAT_TICKS == 0:
            for connection in list(self._bus.connections):
                connection.guard(connection.tick)
        self._loop.call_later(TICK_SECONDS, self._tick, number + 1)
