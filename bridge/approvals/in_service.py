"""Answer a load balancer that asks whether this VM is in work.

I/O: a port, the application's address, the log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

from bridge.approvals.receipts import stored_state
from bridge.config.approvals import ApprovalSettings
from bridge.config.in_service import InServiceSettings
from bridge.config.values import socket_address
from bridge.outbox.outbox import Outbox
from bridge.runtime.threads import start_thread

log = logging.getLogger(__name__)

PATH = "/in-service"
ALSO_SECONDS = 1.0
AGAIN_SECONDS = 1.0
# What one client may take, and how many are answered at a time: the port is open to the network.
REQUEST_SECONDS, REQUEST_BYTES, MOST_REQUESTS = 3.0, 4096, 32


@dataclass(eq=False)
class InService:
    """Serves `/in-service` from a thread of its own, and nothing else.

    Args:
        settings: where, and what else has to be well.
        approvals: has the rules.
        dry_run: no program is run, and so this VM is in work.

    Attributes:
        is_in_work: returns without waiting whether this VM is in work: as it is recorded, until a listener knows it.
    """

    settings: InServiceSettings
    approvals: ApprovalSettings
    _: KW_ONLY
    dry_run: bool = False
    is_in_work: Callable[[], bool] = field(init=False)

    def start(self, outbox: Outbox) -> None:
        """Serve until the process ends; while the address cannot be used, try again: the VM matters more."""
        state = stored_state(outbox, self.approvals, dry_run=self.dry_run)
        self.is_in_work = lambda: self.dry_run or state.is_in_work
        start_thread("in-service", lambda: asyncio.run(self._serve(self._listen())))

    def _listen(self) -> socket.socket:
        """Return what listens, once it can: another process may leave the port, and an address come at a boot."""
        family, address = socket_address(self.settings.listen)
        is_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        said = ""
        while True:
            try:
                listening = socket.create_server(address, family=family, dualstack_ipv6=is_both)
            except OSError as error:
                text = f"{self.settings.listen} cannot be listened on, and is tried again: {error.strerror}"
                if text != said:
                    log.error("%s has no answer for load balancers: %s", PATH, text)  # noqa: TRY400 - it says all
                said = text
                time.sleep(AGAIN_SECONDS)
            else:
                log.info("%s answers load balancers", PATH, extra={"port": listening.getsockname()[1]})
                return listening

    async def _serve(self, listening: socket.socket) -> None:
        asking = deque[asyncio.Task[Any]]()

        async def answer(reader: StreamReader, writer: StreamWriter) -> None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            asking.append(task)
            if len(asking) > MOST_REQUESTS:  # the one that hangs longest makes room
                asking.popleft().cancel()
            try:
                await self._answer(reader, writer)
            finally:
                writer.close()
                if task in asking:
                    asking.remove(task)

        server = await asyncio.start_server(answer, sock=listening, limit=REQUEST_BYTES)
        await server.serve_forever()

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, word = await self._state(head.split()[:2])
                first = f"HTTP/1.1 {status} {status.phrase}"
                kind = f"Content-Type: text/plain\r\nContent-Length: {len(word)}"
                writer.write(f"{first}\r\n{kind}\r\nConnection: close\r\n\r\n{word}".encode())
                await writer.drain()
        except (OSError, IncompleteReadError, LimitOverrunError) as error:  # a TimeoutError is an OSError
            log.debug("a request for %s had no answer: %s", PATH, error)

    async def _state(self, request: list[bytes]) -> tuple[HTTPStatus, str]:
        if request != [b"GET", PATH.encode()]:
            return HTTPStatus.NOT_FOUND, "unknown"
        if not self.is_in_work():
            return HTTPStatus.SERVICE_UNAVAILABLE, "out-of-service"
        if self.settings.also and not await _is_well(self.settings.also):
            return HTTPStatus.SERVICE_UNAVAILABLE, "unhealthy"
        return HTTPStatus.OK, "in-service"


async def _is_well(url: str) -> bool:
    """Return whether a plain http URL answers 200 within a second."""
    parts = urlsplit(url)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(ALSO_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                writer.write(request.encode())
                answer = await reader.readline()
            finally:
                writer.close()
    except (OSError, ValueError) as error:  # ValueError: a line without an end
        log.debug("%s did not answer: %s", url, error)
        return False
    return answer.split()[1:2] == [b"200"]
