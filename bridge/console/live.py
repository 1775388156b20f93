"""Notify open pages of changes by server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

MAX_STREAMS = 200
REPEAT_SECONDS = 5.0  # a page that hears nothing for longer than twice that says that it is not live
# Between two messages to a page, which fetches itself after each: at least, and for each open page.
APART_SECONDS = 0.2
PAGE_SECONDS = 0.05


class Live:
    """The streams of open pages; for the thread of the event loop, but `notify` may be called from any."""

    def __init__(self, version: Callable[[], int]) -> None:
        """Prepare streams; `version` returns a number that changes with every commit."""
        self._version = version
        self._streams: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def start(self) -> None:
        """Use the loop of this thread."""
        self._loop = asyncio.get_running_loop()

    def notify(self) -> None:
        """Wake all streams."""
        if self._loop:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self._wake()

    @property
    def is_full(self) -> bool:
        """Whether there are too many streams."""
        return len(self._streams) >= MAX_STREAMS

    async def stream(self) -> AsyncIterator[str]:
        """Yield the version now, after each change, and again and again in between."""
        changed = asyncio.Event()
        self._streams.add(changed)
        try:
            yield self._message()
            while not self._is_closed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), REPEAT_SECONDS)
                changed.clear()
                yield self._message()
                await asyncio.sleep(
                    min(REPEAT_SECONDS, max(APART_SECONDS, PAGE_SECONDS * len(self._streams)))
                )
        finally:
            self._streams.discard(changed)

    def _message(self) -> str:
        return f"event: version\ndata: {self._version()}\n\n"

    def _wake(self) -> None:
        for stream in self._streams:
            stream.set()
