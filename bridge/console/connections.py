"""HTTP connections that nobody can hold for nothing, and a log that nobody can fill with requests."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from bridge.runtime.time import Clock, RepeatLimit

HEADER_SECONDS = 10.0
READ_SECONDS = 30.0


class LimitedProtocol(H11Protocol):
    """A connection that is closed if a request does not arrive in time, or if its answer is not read.

    If there are too many connections, the one that has waited longest for a request makes room for a new one.
    """

    _deadline: asyncio.TimerHandle | None = None
    _read_deadline: asyncio.TimerHandle | None = None
    _waits_since = 0.0

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        self._expect_request()
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the next one has its own deadline."""
        super().data_received(data)
        if self._is_answering():
            self._forget_deadline()
        else:
            self._expect_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._waits_since = self.loop.time()
        super().on_response_complete()
        if self.conn.trailing_data[0] and not self._is_answering():  # the next one is arriving
            self._expect_request()

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        super().pause_writing()
        self._expect_reading(math.inf)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        super().resume_writing()
        self._forget_read_deadline()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; in the middle of an answer, only end the connection."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # its answer would be an error by now
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines."""
        self._forget_deadline()
        self._forget_read_deadline()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        others = [one for one in self.connections if isinstance(one, LimitedProtocol) and one is not self]
        waiting = [one for one in others if not one._is_answering()]
        if waiting:
            oldest = min(waiting, key=lambda one: one._waits_since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def _expect_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _forget_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()
            self._deadline = None

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        self._deadline = None
        if not self._is_answering():
            self.transport.close()

    def _expect_reading(self, unread_bytes: float) -> None:
        """End the connection if nothing was read since there were so many bytes to read."""
        unread = self.transport.get_write_buffer_size()
        if unread >= unread_bytes:
            self.transport.abort()
        else:
            self._read_deadline = self.loop.call_later(READ_SECONDS, self._expect_reading, unread)

    def _forget_read_deadline(self) -> None:
        if self._read_deadline:
            self._read_deadline.cancel()
            self._read_deadline = None


class RareLog(logging.Filter):
    """Lets each kind of message of the HTTP server pass only now and then: clients decide how many there are."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._limits: dict[object, RepeatLimit] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a message: a kind is a line of code and the type of an exception."""
        kind = record.pathname, record.lineno, record.exc_info and record.exc_info[0]
        return self._limits.setdefault(kind, RepeatLimit(self._clock)).is_due()
