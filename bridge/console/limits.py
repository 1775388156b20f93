"""What one client may use: a script that asks for pages in a loop holds up neither ingest nor other people."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from bridge.runtime.time import Clock

T = TypeVar("T")

SHARE = 0.3  # of one processor, on average
BURST_SECONDS = 10.0  # of processor time, at once
MAX_OPEN = 32  # requests that are not answered completely, those that wait for their turn included
_REQUEST_SECONDS = 0.001  # what a request takes besides its work
_MAX_CLIENTS = 1000
_THREADS = 4  # more would only compete for the interpreter


class TooManyRequests(Exception):
    """A client has used what it may."""

    def __init__(self, retry_after_seconds: int) -> None:
        super().__init__("Too many requests: wait a moment.")
        self.retry_after_seconds = retry_after_seconds


@dataclass(kw_only=True)
class Client:
    """What a client has used.

    Attributes:
        used_seconds: processor time, less the SHARE of the time that has passed.
        at: when that was so (monotonic).
        open: how many requests are not answered completely.
        last_seconds: the processor time of its last request.
        turn: one request of a client is worked on at a time.
    """

    used_seconds: float = 0.0
    at: float = -math.inf
    open: int = 0
    last_seconds: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Limits:
    """Admits requests and does their work in threads; for the thread of the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._threads = CapacityLimiter(_THREADS)

    @contextmanager
    def admit(self, name: str) -> Iterator[Client]:
        """Count a request as open until it is answered completely.

        Args:
            name: identifies the client.

        Raises:
            TooManyRequests: the client has used its share, or too many of its requests are open.
        """
        client = self._find(name)
        if (excess := client.used_seconds - BURST_SECONDS) > 0:
            raise TooManyRequests(math.ceil(excess / SHARE))
        if client.open >= MAX_OPEN:
            raise TooManyRequests(1)
        client.used_seconds += _REQUEST_SECONDS
        client.open += 1
        try:
            yield client
        finally:
            client.open -= 1

    async def run(self, client: Client, work: Callable[[], T]) -> T:
        """Do a client's work in a thread when it is its turn, and return what it returns."""

        def measured() -> T:
            began = time.thread_time()
            try:
                return work()
            finally:
                client.last_seconds = time.thread_time() - began
                client.used_seconds += client.last_seconds

        async with client.turn:
            return await to_thread.run_sync(measured, limiter=self._threads)

    def _find(self, name: str) -> Client:
        client = self._clients.setdefault(name, Client())
        self._clients.move_to_end(name)
        now = self._clock.monotonic()
        client.used_seconds = max(0.0, client.used_seconds - SHARE * (now - client.at))
        client.at = now
        while len(self._clients) > _MAX_CLIENTS:
            self._clients.popitem(last=False)
        return client
