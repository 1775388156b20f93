"""The port that serves the metrics and the health of a process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from bridge.config.values import socket_address
from bridge.runtime.threads import stalled_threads
from bridge.runtime.time import Clock
from bridge.service.metrics import Status, StatusCollector
from bridge.service.status import find_stalled, find_unready

log = logging.getLogger(__name__)

_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"


@dataclass(eq=False)
class MetricsServer:
    """Serves `/metrics`, `/livez` and `/readyz` from threads of its own.

    Args:
        listen: the address, as configured; port 0 takes a free one.
        role: which process it is; a health check may reach another one on the same port.
        registry: has the metrics of what happens.
        collector: reads the metrics of how things are from the status; None if the registry has them.
        clock: for ages.
    """

    listen: str
    _: KW_ONLY
    role: str
    registry: CollectorRegistry
    collector: Callable[[Callable[[], Status], Clock], Collector] | None = StatusCollector
    clock: Clock
    _server: ThreadingWSGIServer | None = None

    @property
    def port(self) -> int:
        """The port in use, 0 if there is none."""
        return self._server.server_port if self._server else 0

    def start(self, status: Callable[[], Status]) -> None:
        """Serve until `close`; if the address cannot be used, only log that: events matter more.

        Args:
            status: returns what the status file shows.
        """
        self._status = status
        if self.collector:
            self.registry.register(self.collector(status, self.clock))
        try:
            self._server = _serve(self.listen, self._answer)
        except OSError as error:
            # The text is enough, without a traceback.
            log.error("no metrics: %s cannot be listened on: %s", self.listen, error)  # noqa: TRY400
            return
        log.info("metrics are served on %s", self.listen, extra={"port": self.port})
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, request: dict[str, Any], start: Any) -> Iterable[bytes]:
        path = request["PATH_INFO"]
        if path == "/metrics":
            metrics: Iterable[bytes] = make_wsgi_app(self.registry)(request, start)
            return metrics
        if path == "/livez":
            status, kind, body = self._health(find_stalled(stalled_threads()))
        elif path == "/readyz":
            status, kind, body = self._health(find_unready(self._status(), self.clock.now()))
        else:
            status, kind, body = "404 Not Found", _TEXT, "expected /metrics, /livez or /readyz\n"
        start(status, [("Content-Type", kind)])
        return [b"" if request["REQUEST_METHOD"] == "HEAD" else body.encode()]

    def _health(self, reasons: list[str]) -> tuple[str, str, str]:
        body = json.dumps({"ok": not reasons, "role": self.role, "reasons": reasons}, ensure_ascii=False)
        return "503 Service Unavailable" if reasons else "200 OK", _JSON, f"{body}\n"


def _serve(listen: str, answer: Any) -> ThreadingWSGIServer:
    family, (host, port) = socket_address(listen)

    class Server(ThreadingWSGIServer):
        address_family = family

        def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
            log.debug("a request of %s failed", client_address, exc_info=True)  # mostly, its client has gone

    return make_server(host, port, answer, Server, _Handler)


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Log no request: a probe comes every few seconds."""
