"""Serve HTTP for the simulators: record whole requests, answer wrongly on demand, stop promptly."""

from __future__ import annotations

import json
import math
import re
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, urlsplit

from requests.structures import CaseInsensitiveDict

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_LINE_BYTES = 65_536  # of the sizes of chunks
KEPT_REQUESTS = 20_000  # per simulator
JSON_TYPE = "application/json; charset=utf-8"
NO_ANSWER = 0  # the status recorded for a request that gets none


class LabError(ValueError):
    """A simulator was asked for something it cannot do; the message names what was given and expected."""


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """Hold one request as received, and the status of its answer (0: none)."""

    server: str
    method: str
    path: str
    query: str
    headers: CaseInsensitiveDict[str]  # with names in lower case; values of a repeated one are joined
    body: bytes
    at: float  # time.monotonic()
    wall: float  # time.time()
    status: int = NO_ANSWER

    @property
    def parameters(self) -> dict[str, list[str]]:
        """Return the query's parameters, each with all its values."""
        return parse_qs(self.query, keep_blank_values=True)

    def json(self) -> Any:
        """Return the body parsed as JSON; raise ValueError if it is not JSON."""
        return json.loads(self.body)

    def summary(self) -> dict[str, Any]:
        """Return what the control API shows of this request."""
        return {
            **{field: value for field, value in vars(self).items() if field != "at"},
            "headers": dict(self.headers),
            "body": self.body.decode("utf-8", "replace"),
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Hold what to send, and how to break it."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    hang: bool = False
    drop: bool = False
    interrupt: threading.Event | None = None  # set when faults are cleared; ends each wait of this answer


def json_answer(value: object, status: int = 200, **headers: str) -> Answer:
    """Return an answer that carries the value as JSON; `allow="GET"` adds a header."""
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    return Answer(
        status=status, body=json.dumps(value).encode(), headers={"content-type": JSON_TYPE, **names}
    )


def check_seconds(name: str, value: object) -> None:
    """Raise LabError unless the value is a finite number of seconds from 0 up."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise LabError(f"{name} given: {value!r}; expected: a number of seconds from 0 up")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A wrong answer, and the requests that get it; None matches all."""

    kinds: ClassVar[tuple[str, ...]] = ("slow", "timeout", "drop", "garbage", "status")

    kind: str
    status: int = 503
    seconds: float = 0.0  # real seconds before the answer
    retry_after: str | int | None = None
    body: bytes | str = b""  # of a status
    vm: str | None = None
    method: str | None = None
    path: str | None = None  # a prefix

    @classmethod
    def of(cls, kind: str | int, *, seconds: float | None = None, **rest: Any) -> Self:
        """Return the fault; raise LabError if there is none of that kind.

        Args:
            kind: one of `kinds`, or an HTTP status by number or name.
            seconds: None: 5 for `slow`, else 0.
            rest: the other fields.
        """
        text = str(kind).strip().lower().replace("-", "_")
        if text.upper() in HTTPStatus.__members__:
            text = str(int(HTTPStatus[text.upper()]))
        if text.isdigit():
            text, rest["status"] = "status", int(text)
        if text not in cls.kinds or not 200 <= rest.get("status", 200) <= 599:  # noqa: PLR2004 - final statuses
            raise LabError(
                f"fault given: {kind!r}; expected: an HTTP status, 200 to 599, or {', '.join(cls.kinds)}"
            )
        if seconds is None:
            seconds = 5.0 if text == "slow" else 0.0
        check_seconds("seconds", seconds)
        return cls(kind=text, seconds=seconds, **rest)

    def matches(self, request: HttpRequest) -> bool:
        """Return whether this fault applies to the request."""
        return (
            self.vm in (None, request.server)
            and self.method in (None, request.method)
            and request.path.startswith(self.path or "")
        )

    def answer(self, right: Callable[[], Answer]) -> Answer:
        """Return the wrong answer; only `slow` processes the request, with `right`."""
        match self.kind:
            case "slow":
                return replace(right(), delay_seconds=self.seconds)
            case "timeout" | "drop":
                answer = Answer(status=NO_ANSWER, hang=self.kind == "timeout", drop=True)
            case "garbage":
                answer = Answer(body=b"<html>Service busy</html>", headers={"content-type": "text/html"})
            case _:
                answer = self._status_answer()
        return replace(answer, delay_seconds=self.seconds)

    def _status_answer(self) -> Answer:
        headers = {"content-type": "text/plain"} if self.body else {}
        if 300 <= self.status < 400:  # noqa: PLR2004 - the class of redirects
            headers["location"] = "/redirected"
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        body = self.body.encode() if isinstance(self.body, str) else self.body
        return Answer(status=self.status, body=body, headers=headers)


class Faults:
    """Apply to each request the first fault that matches. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # each with the number of requests that are left; None: no limit
        self._queue: list[list[Any]] = []
        self._cleared = threading.Event()

    def add(self, fault: Fault, *, count: int | None = 1) -> None:
        """Queue the fault for `count` requests; None for no limit."""
        if count is not None and (type(count) is not int or count < 1):
            raise LabError(f"count given: {count!r}; expected: a whole number from 1 up")
        with self._lock:
            self._queue.append([fault, count])

    def clear(self) -> None:
        """Remove all faults and answer every request that one of them delays."""
        with self._lock:
            self._queue.clear()
            self._cleared.set()
            self._cleared = threading.Event()

    def apply(self, request: HttpRequest, right: Callable[[], Answer]) -> Answer:
        """Return the right answer, or that of the first fault that matches."""
        with self._lock:
            fault = self._take(request)
            interrupt = self._cleared
        return right() if fault is None else replace(fault.answer(right), interrupt=interrupt)

    def _take(self, request: HttpRequest) -> Fault | None:
        queued = next((one for one in self._queue if one[0].matches(request)), None)
        if queued is None:
            return None
        fault, left = queued
        queued[1] = None if left is None else left - 1
        if queued[1] == 0:
            self._queue.remove(queued)
        return fault  # type: ignore[no-any-return]


class Server(ThreadingHTTPServer):
    """Serve one address on 127.0.0.1 with HTTP/1.1 and keep-alive until closed."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = sys.platform != "win32"  # on Windows it would let two servers share one port

    def __init__(self, name: str, handle: Callable[[HttpRequest], Answer], *, port: int = 0) -> None:
        """Start to serve.

        Args:
            name: recorded with each request.
            handle: returns the answer to a request; called from many threads.
            port: 0 for any free port.

        Raises:
            LabError: the port cannot be used.
        """
        self.name = name
        self.handle = handle
        self._open: set[socket.socket] = set()
        self._none_open = threading.Condition()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:  # in use or not allowed; or not a port number
            raise LabError(
                f"port given: {port}; expected: a free one ({error}); --port-base chooses others"
            ) from error
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, name=f"lab-{name}", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Return the base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Bind without asking DNS for this machine's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember the connection from the moment it is accepted."""
        with self._none_open:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection and forget it."""
        with self._none_open:
            super().shutdown_request(request)
            self._open.discard(request)
            self._none_open.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected; print every other error, since it is a bug of the lab."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop accepting, close every connection, and wait for their threads."""
        self.shutdown()
        self._thread.join()
        with self._none_open:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the client has already disconnected
                    continue
            self._none_open.wait_for(lambda: not self._open, timeout=10)
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Read whole requests of any method, and send answers with the faults they carry."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Serve every method with the same function: the simulator decides which to refuse."""
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class has this name
        """Write no access log: requests are recorded."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        request = HttpRequest(
            server=self.server.name,
            method=self.command,
            path=parts.path,
            query=parts.query,
            headers=CaseInsensitiveDict(
                {name.lower(): ", ".join(self.headers.get_all(name, ())) for name in self.headers}
            ),
            body=self._read_body(),
            at=time.monotonic(),
            wall=time.time(),
        )
        self._send(self.server.handle(request))

    def _read_body(self) -> bytes:
        if "transfer-encoding" in self.headers:
            return self._read_chunks()
        length_text = self.headers.get("content-length", "0")
        if not length_text.isdigit() or int(length_text) > MAX_BODY_BYTES:
            raise ConnectionAbortedError("no usable Content-Length")
        body = self.rfile.read(int(length_text))
        if len(body) < int(length_text):
            raise ConnectionAbortedError("the client disconnected before the end of the body")
        return body

    def _read_chunks(self) -> bytes:
        """Return a body that came without a length, as .NET and others send JSON (RFC 9112, 7.1)."""
        body = b""
        while size := self._chunk_size():
            chunk = self.rfile.read(size)
            if len(body) + size > MAX_BODY_BYTES or len(chunk) < size or self.rfile.read(2) != b"\r\n":
                raise ConnectionAbortedError("no whole chunk within the limit")
            body += chunk
        while self.rfile.readline(MAX_LINE_BYTES).strip():  # trailers
            pass
        return body

    def _chunk_size(self) -> int:
        text = self.rfile.readline(MAX_LINE_BYTES).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,7}", text):
            raise ConnectionAbortedError("no usable size of a chunk")
        return int(text, 16)

    def _send(self, answer: Answer) -> None:
        interrupt = answer.interrupt or threading.Event()
        if answer.hang or answer.delay_seconds:
            interrupt.wait(None if answer.hang else answer.delay_seconds)
        if answer.hang or answer.drop:
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != HTTPStatus.NO_CONTENT:
            self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def control(routes: Mapping[tuple[str, str], Callable[..., object]]) -> Callable[[HttpRequest], Answer]:
    """Return a handler that calls a function for each (method, path) with the JSON body as its arguments.

    A LabError, or unexpected arguments, are answered with 400 and the reason. A function that returns None is
    answered with `{"ok": true}`.
    """

    def handle(request: HttpRequest) -> Answer:
        function = routes.get((request.method, request.path.rstrip("/")))
        if function is None:
            known = ", ".join(f"{method} {path}" for method, path in routes)
            given = f"{request.method} {request.path}"
            return json_answer({"error": f"given: {given}; expected one of: {known}"}, 404)
        try:
            value = function(**json.loads(request.body or b"{}"))
        except (ValueError, TypeError) as error:  # a LabError, or a value of the wrong type
            return json_answer({"error": str(error)}, 400)
        return json_answer({"ok": True} if value is None else value)

    return handle
