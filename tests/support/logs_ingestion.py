"""The Logs Ingestion API of Azure Monitor as it is documented: what it demands of a request, without a table."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

PATH = "/dataCollectionRules/dcr-0123456789abcdef0123456789abcdef/streams/Custom-ScheduledEvents_CL"
MAX_BYTES = 1_000_000


class LogsIngestion:
    """Takes rows on a loopback port; `token` is the only one that has the role."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.rows: list[dict[str, Any]] = []
        self.answers: list[int] = []
        lab = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._answer(lab.judge(self.path, dict(self.headers), self._body()))

            def do_OPTIONS(self) -> None:
                self._answer(200 if self.headers["Authorization"] == f"Bearer {lab.token}" else 403)

            def _body(self) -> bytes:
                return self.rfile.read(int(self.headers["Content-Length"]))

            def _answer(self, status: int) -> None:
                lab.answers.append(status)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}{PATH}?api-version=2023-01-01"

    def judge(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Keep the rows of a request that is right; return the status."""
        if path != f"{PATH}?api-version=2023-01-01":
            return 404
        if not (sent := re.fullmatch(r"Bearer (\S+)", headers.get("Authorization", ""))):
            return 401
        if sent[1] != self.token:
            return 403
        if headers.get("Content-Type", "").partition(";")[0] != "application/json":
            return 415
        if len(body) > MAX_BYTES:
            return 413
        rows = json.loads(body)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return 400
        received_at = datetime.now(UTC)
        for row in rows:
            if datetime.fromisoformat(row["TimeGenerated"]) < received_at - timedelta(days=2):
                row["TimeGenerated"] = received_at.isoformat()
        self.rows += rows
        return 204

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
