"""Notify open pages of changes by server-sent events, and send them the parts that have changed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256

MAX_STREAMS = 200
REPEAT_SECONDS = 5.0  # a page that hears nothing for longer than twice that says that it is not live
APART_SECONDS = 2.0  # at least, after the message of a change: a page fetches itself after each
STREAM_SECONDS = 0.1  # more for each open page: all of them fetch ten pages a second together
_PART = re.compile('<[a-z]+ id="(part-[a-z]+)" data-part.*?<!--part-->', re.DOTALL)
_COUNTED = re.compile("(<time [^>]*data-relative[^>]*>)[^<]*")


def changed_parts(page: str, shown: str | None) -> str:
    """Return a page whose parts have hashes; for an open page, nothing but its parts, without those that it shows.

    A time that the open page counts itself is no change.

    Args:
        page: a whole page.
        shown: the hashes of the parts of an open page, None for the whole page.
    """
    known = (shown or "").split(",")

    def part(found: re.Match[str]) -> str:
        digest = sha256(_COUNTED.sub(r"\1", found[0]).encode()).hexdigest()[:16]
        if digest in known:
            return f'<div id="{found[1]}" data-part data-same></div>'
        return found[0].replace(" data-part", f' data-hash="{digest}" data-part', 1)

    if shown is None:
        return _PART.sub(part, page)
    return page.partition("<header>")[0] + "".join(map(part, _PART.finditer(page)))


class Live:
    """The streams of open pages; for the thread of the event loop, `notify` and `close` are for any."""

    def __init__(self, version: Callable[[], int]) -> None:
        """Prepare streams; `version` returns a number that changes with every commit."""
        self._version = version
        self._streams: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = asyncio.Event()

    def start(self) -> None:
        """Use the loop of this thread."""
        self._loop = asyncio.get_running_loop()

    def notify(self) -> None:
        """Wake all streams."""
        self._call(self._wake)

    def close(self) -> None:
        """End all streams."""
        self._call(self._closed.set)
        self._call(self._wake)

    @property
    def is_full(self) -> bool:
        """Whether there are too many streams."""
        return len(self._streams) >= MAX_STREAMS

    def apart_seconds(self) -> float:
        """Return how long a stream waits after the message of a change."""
        return min(max(APART_SECONDS, len(self._streams) * STREAM_SECONDS), REPEAT_SECONDS)

    @contextmanager
    def place(self) -> Iterator[asyncio.Event]:
        """Count a stream as long as it is answered, and give what wakes it."""
        changed = asyncio.Event()
        self._streams.add(changed)
        try:
            yield changed
        finally:
            self._streams.discard(changed)

    async def stream(self, changed: asyncio.Event) -> AsyncIterator[str]:
        """Yield the version now, after each change, and again and again in between."""
        yield self._message()
        while not self._closed.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), REPEAT_SECONDS)
            is_change = changed.is_set()
            changed.clear()
            yield self._message()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), is_change * self.apart_seconds())

    def _message(self) -> str:
        return f"event: version\ndata: {self._version()}\n\n"

    def _call(self, work: Callable[[], None]) -> None:
        if self._loop:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(work)

    def _wake(self) -> None:
        for stream in self._streams:
            stream.set()
