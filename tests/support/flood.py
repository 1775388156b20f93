"""A load generator: offers HTTP requests at a rate, whether they are answered or not; prints the counts as JSON."""

from __future__ import annotations

import argparse
import itertools
import json
import select
import socket
import time
from urllib.parse import urlsplit

_TICK_SECONDS = 0.002


class Client:
    """A connection that never waits; a new one replaces it if the server closes it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._unsent = b""
        self.answers = 0
        self._connect()

    def fileno(self) -> int:
        return self._socket.fileno()

    def offer(self, request: bytes) -> bool:
        """Send a request after those that wait for their answers; return whether there was room for it."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            self._unsent = request[self._socket.send(request) :]
        except BlockingIOError:
            return False
        except OSError:
            self._reconnect()
            return False
        return True

    def read(self) -> None:
        """Count the answers that have arrived."""
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.answers += data.count(b"HTTP/1.1 ")
        if not data:
            self._reconnect()

    def _reconnect(self) -> None:
        self._socket.close()
        self._connect()

    def _connect(self) -> None:
        self._unsent = b""
        self._socket = socket.create_connection(self._address, timeout=10)
        self._socket.setblocking(False)


def flood(
    url: str, paths: list[str], *, per_second: float, seconds: float, connections: int
) -> dict[str, int]:
    """Offer requests; return how many were offered and how many were answered."""
    parts = urlsplit(url)
    requests = [
        f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: 0\r\n\r\n".encode()
        for method, path in (one.split(" ") for one in paths)
    ]
    clients = [Client((parts.hostname or "", parts.port or 80)) for _ in range(connections)]
    turns = zip(itertools.cycle(clients), itertools.cycle(requests), strict=False)
    offered = tried = 0
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        for client, request in itertools.islice(turns, int(elapsed * per_second) - tried):
            tried += 1
            offered += client.offer(request)
        for client in select.select(clients, [], [], _TICK_SECONDS)[0]:
            client.read()
    return {"offered": offered, "answered": sum(client.answers for client in clients)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("paths", nargs="+", help="such as 'GET /livez'")
    parser.add_argument("--per-second", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--connections", type=int, required=True)
    print(json.dumps(flood(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
