"""The port that serves the metrics and the health of a process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from bridge.config.values import socket_address
from bridge.runtime.threads import stalled_threads
from bridge.runtime.time import Clock
from bridge.service.health import find_stalled, find_unready
from bridge.service.metrics import Status, StatusCollector

log = logging.getLogger(__name__)

_READ_SECONDS = 10.0
MAX_CONNECTIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: HTTPStatus
    content_type: str
    body: bytes


class MetricsServer:
    """Serves `/metrics`, `/livez` and `/readyz` from threads of its own."""

    def __init__(
        self,
        listen: str,
        *,
        role: str,
        registry: CollectorRegistry,
        collector: Callable[[Callable[[], Status], Clock], Collector] | None = StatusCollector,
        clock: Clock,
    ) -> None:
        """Prepare to serve.

        Args:
            listen: the address, as configured; port 0 takes a free one.
            role: which process it is; a health check may reach another one on the same port.
            registry: has the metrics of what happens.
            collector: reads the metrics of how things are from the status; None if the registry has them.
            clock: for ages.
        """
        self._listen = listen
        self._role = role
        self._clock = clock
        self._registry = registry
        self._collector = collector
        self._server: _Server | None = None

    @property
    def port(self) -> int:
        """The port in use, 0 if there is none."""
        return self._server.server_address[1] if self._server else 0

    def start(self, status: Callable[[], Status]) -> None:
        """Serve until `close`; if the address cannot be used, only log that: events matter more.

        Args:
            status: returns what the status file shows.
        """
        self._status = status
        if self._collector:
            self._registry.register(self._collector(status, self._clock))
        try:
            self._server = _Server(self._listen, self._handler())
        except OSError as error:
            # The text is enough, without a traceback.
            log.error("no metrics: %s cannot be listened on: %s", self._listen, error)  # noqa: TRY400
            return
        log.info("metrics are served on %s", self._listen, extra={"port": self.port})
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def answer(self, path: str, accept: str) -> _Answer:
        """Return the answer to a request.

        Args:
            path: without the query.
            accept: the request's Accept header.
        """
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return _Answer(status=HTTPStatus.OK, content_type=content_type, body=encode(self._registry))
        if path == "/livez":
            return self._health(find_stalled(stalled_threads()))
        if path == "/readyz":
            return self._health(find_unready(self._status(), self._clock.now()))
        return _Answer(
            status=HTTPStatus.NOT_FOUND,
            content_type="text/plain; charset=utf-8",
            body=b"expected /metrics, /livez or /readyz\n",
        )

    def _health(self, reasons: list[str]) -> _Answer:
        body = json.dumps({"ok": not reasons, "role": self._role, "reasons": reasons}, ensure_ascii=False)
        return _Answer(
            status=HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK,
            content_type="application/json",
            body=f"{body}\n".encode(),
        )

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            timeout = _READ_SECONDS
            server_version = "imds-bridge"

            def do_GET(self) -> None:
                found = answer(self.path.partition("?")[0], self.headers.get("Accept", ""))
                self.send_response(found.status)
                self.send_header("Content-Type", found.content_type)
                self.send_header("Content-Length", str(len(found.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(found.body)

            do_HEAD = do_GET  # noqa: N815 - http.server's name

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
                """Log no request: a probe comes every few seconds."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    server_address: tuple[str, int]

    def __init__(self, listen: str, handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: dict[socket, None] = {}
        self.address_family, address = socket_address(listen)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and end the oldest ones if there are too many: they take descriptors and threads."""
        self._open[request] = None
        for oldest in list(self._open)[:-MAX_CONNECTIONS]:
            with suppress(OSError):  # it has just ended
                oldest.shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
        """Log a request that failed: its client has gone, mostly."""
        log.debug("a request of %s failed", client_address, exc_info=True)
