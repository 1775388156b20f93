"""What a hostile client tries: slow, many, huge and forged requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from bridge.console import connections, process
from tests.support.console import PROXY_SECRET, RunningConsole, behind_proxy, running_console
from tests.support.process import LIMIT_SECONDS

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console that waits for headers only briefly, and that takes few connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEADER_SECONDS", 0.3)
        patch.setattr(process, "MAX_CONNECTIONS", 20)
        with running_console(tmp_path_factory.mktemp("console")) as running:
            yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console behind a proxy."""
    with running_console(tmp_path_factory.mktemp("guarded"), **behind_proxy()) as running:
        yield running


def connect(console: RunningConsole) -> socket.socket:
    host, _, port = console.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), LIMIT_SECONDS)


def read_all(client: socket.socket) -> bytes:
    """Read until the console closes the connection."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize(
    "start", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: b", GET + b"GET / HT"]
)
def test_a_request_that_never_arrives_is_given_up(console: RunningConsole, start: bytes) -> None:
    with connect(console) as client:
        client.sendall(start)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 200") == start.count(GET)


def test_connections_that_do_nothing_keep_nobody_out_for_long(console: RunningConsole) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(console)) for _ in range(60)]
        for client in idle:
            read_all(client)
        assert console.get("/livez").status_code == 200


def test_a_request_that_takes_long_to_answer_is_not_given_up(console: RunningConsole) -> None:
    with connect(console) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while b"event: version" not in seen:
            seen += client.recv(65536)
        client.settimeout(3 * connections.HEADER_SECONDS)
        with pytest.raises(TimeoutError):
            client.recv(65536)


def test_thousands_of_requests_on_one_connection_are_answered_one_by_one(console: RunningConsole) -> None:
    with connect(console) as client:
        client.sendall(GET * 2000)
        seen = 0
        while seen < 2000:
            seen += client.recv(65536).count(b"HTTP/1.1 200 OK")
    assert console.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 2_000_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
def test_a_malformed_request_is_refused(console: RunningConsole, request_: bytes) -> None:
    with connect(console) as client:
        with suppress(OSError):  # it may be refused before it is sent
            client.sendall(request_)
        answer = read_all(client)
    assert b"HTTP/1.1 200" not in answer
    assert console.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "lines",
    [
        [b"X_Proxy_Secret: " + PROXY_SECRET.encode(), b"X_Forwarded_User: ana"],
        [b"X-Proxy-Secret : " + PROXY_SECRET.encode(), b"X-Forwarded-User: ana"],
        [b"X-Other: 1", b" X-Proxy-Secret: " + PROXY_SECRET.encode(), b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: " + PROXY_SECRET.encode()],
        [b"Connection: X-Forwarded-User", b"X-Forwarded-User: ana"],
    ],
)
def test_no_spelling_of_headers_replaces_the_proxys(guarded: RunningConsole, lines: list[bytes]) -> None:
    head = [b"GET / HTTP/1.1", b"Host: x", b"Connection: close", *lines, b"", b""]
    with connect(guarded) as client:
        client.sendall(b"\r\n".join(head))
        answer = read_all(client)
    assert b"HTTP/1.1 200" not in answer
