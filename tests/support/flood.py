"""A load generator: offers requests to a console at a rate, whether they are answered or not; prints how many."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from urllib.parse import urlsplit

_TICK_SECONDS = 0.002
_UNSENT_BYTES = 65_536
_PATHS = ("GET /", "POST /ingest", "GET /livez")


async def offer(url: str, *, per_second: float, seconds: float) -> int:
    """Offer requests on one connection, which is made again when it ends; return how many found room."""
    parts = urlsplit(url)
    head = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 0\r\n\r\n"
    requests = itertools.cycle(f"{path}{head}".encode() for path in _PATHS)
    reading: asyncio.Task[bytes] | None = None
    offered = tried = 0
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        if reading is None or reading.done():
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            reading = asyncio.create_task(reader.read())  # to its end
        for _ in range(int(elapsed * per_second) - tried + 1):
            tried += 1
            if writer.transport.get_write_buffer_size() < _UNSENT_BYTES:
                writer.write(next(requests))
                offered += 1
        await asyncio.sleep(_TICK_SECONDS)
    return offered


async def main(url: str, per_second: float, seconds: float, connections: int) -> None:
    """Offer requests on several connections."""
    each = {"per_second": per_second / connections, "seconds": seconds}
    print(sum(await asyncio.gather(*(offer(url, **each) for _ in range(connections)))))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
