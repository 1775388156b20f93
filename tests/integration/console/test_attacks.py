"""What a hostile client tries: slow, many, huge and forged requests."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime

import pytest
import requests

from bridge.console import ingest
from tests.support.console import (
    BATCH,
    PROXY_SECRET,
    FleetVm,
    RunningConsole,
    behind_proxy,
    running_console,
    signed_in,
)
from tests.support.process import LIMIT_SECONDS

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
FOREIGN_HOSTS = (
    b"evil.example",
    b"evil.example, localhost",
    b"localhost@evil.example",
    b"localhost/evil.example",
    b"127.0.0.1.evil.example",
    b"[",
    b"",
)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningConsole]:
    """Return a console that nobody stops."""
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
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\rX-A: b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n" + b"X-A: b\r\n" * 100_000 + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00",
        *(
            b"GET /livez HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
            for host in FOREIGN_HOSTS
        ),
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
        [b"X-Proxy-Secret\t: " + PROXY_SECRET.encode(), b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: " + PROXY_SECRET.encode(), b"x-proxy-SECRET: x", b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: " + PROXY_SECRET.encode(), b"X-Forwarded-User: ana", b"x-forwarded-user: root"],
        [b"X-Proxy-Secret: x, " + PROXY_SECRET.encode(), b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: " + PROXY_SECRET.encode().upper(), b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: " + PROXY_SECRET.encode()[:-1], b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: \xff" + PROXY_SECRET.encode(), b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret:", b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: x\x00", b"X-Forwarded-User: ana"],
        [b"X-Proxy-Secret: " + PROXY_SECRET.encode(), b"X-Forwarded-User:", b"X-Forwarded-Email: ana"],
        [b"Cookie: X-Proxy-Secret=" + PROXY_SECRET.encode(), b"X-Forwarded-User: ana"],
        [b"Connection: X-Forwarded-User", b"X-Forwarded-User: ana"],
    ],
)
def test_no_spelling_of_headers_replaces_the_proxys(guarded: RunningConsole, lines: list[bytes]) -> None:
    head = [b"GET / HTTP/1.1", b"Host: x", b"Connection: close", *lines, b"", b""]
    with connect(guarded) as client:
        client.sendall(b"\r\n".join(head))
        answer = read_all(client)
    assert b"HTTP/1.1 200" not in answer


def test_the_request_that_the_headers_are_tried_on_is_answered_with_them(guarded: RunningConsole) -> None:
    assert guarded.get("/", signed_in("ana")).status_code == 200


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 60\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 60",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding:\x0bchunked",
        b"Content-Length: +5",
        b"Content-Length: 5, 6",
        b"Content-Length: 0x5",
    ],
)
def test_no_second_request_is_hidden_in_a_body(console: RunningConsole, framing: bytes) -> None:
    head = b"POST /ingest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/cloudevents+json\r\n"
    with connect(console) as client:
        client.sendall(head + framing + b"\r\n\r\n0\r\n\r\n" + GET)
        answer = read_all(client)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("path", ["/fleet/", "/history/", "/ingest/", "/api/v1/events/"])
def test_no_address_redirects_before_sign_in_nor_to_the_host_of_a_request(
    guarded: RunningConsole, path: str
) -> None:
    answer = requests.get(
        guarded.url + path, headers={"Host": "evil.example"}, allow_redirects=False, timeout=LIMIT_SECONDS
    )
    assert (answer.status_code, answer.headers.get("Location")) == (401, None)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET http://evil.example/ HTTP/1.1", 404),
        (b"CONNECT evil.example:443 HTTP/1.1", 404),
        (b"TRACE / HTTP/1.1", 405),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"GET /static/../../console.db HTTP/1.1", 404),
        (b"GET /static/%2e%2e/%2e%2e/console.db HTTP/1.1", 404),
        (b"GET /static/%c0%ae%c0%ae%c0%af/x HTTP/1.1", 404),
        (b"GET //fleet HTTP/1.1", 404),
        (b"GET /FLEET HTTP/1.1", 404),
        (b"GET /fleet%00 HTTP/1.1", 404),
        (b"GET /fleet;/livez HTTP/1.1", 404),
        (b"GET /event/%00%ff%ed%a0%80 HTTP/1.1", 404),
        (b"GET /api/v1/events/%00%ff HTTP/1.1", 404),
        (b"GET /?vm=" + b"%00%ff" * 4000 + b" HTTP/1.1", 200),
        (b"GET /fleet?" + b"a&" * 10_000 + b" HTTP/1.1", 200),
        (b"GET /live HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==", 200),
        (
            b"GET / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM",
            200,
        ),
    ],
)
def test_a_strange_request_is_answered_as_any_other(
    console: RunningConsole, request_: bytes, status: int
) -> None:
    with connect(console) as client:
        client.sendall(request_ + b"\r\nHost: localhost\r\n\r\n")
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    "body", [b"zz\r\n", b"5\r\nhello\r\nzz\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"5;" + b"x" * 100_000]
)
def test_chunks_that_are_none_end_the_connection(console: RunningConsole, body: bytes) -> None:
    with connect(console) as client:
        with suppress(OSError):  # it may be refused before it is sent
            client.sendall(
                b"POST /ingest HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + body
            )
        read_all(client)
    assert console.get("/livez").status_code == 200


def test_a_compressed_body_is_not_expanded(console: RunningConsole) -> None:
    bomb = gzip.compress(b"[" + b" " * 50_000_000 + b"]")
    answer = console.post(bomb, {**BATCH, "Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()) == (415, {"error": "expected a body without Content-Encoding"})


def test_a_body_of_somebody_without_the_token_is_not_read(guarded: RunningConsole) -> None:
    with connect(guarded) as client:
        client.sendall(b"POST /ingest HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_large_bodies_wait_while_others_arrive_and_small_ones_do_not(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "BODY_SECONDS", 30.0)
    head = b"POST /ingest HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    heartbeat = FleetVm("pending").heartbeat(datetime.now(UTC))
    large = head.replace(b"1000000", b"%d" % (100_000 + len(heartbeat))) + b" " * 100_000 + heartbeat
    with ExitStack() as stack:
        for _ in range(ingest.MAX_LARGE):
            stack.enter_context(connect(console)).sendall(head + b" ")
        assert console.post(heartbeat).status_code == 200
        waiting = stack.enter_context(connect(console))
        waiting.sendall(
            large.replace(
                b"Host: localhost", b"Host: localhost\r\nContent-Type: application/cloudevents+json"
            )
        )
        waiting.settimeout(0.5)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        assert console.post(heartbeat).status_code == 200
    with connect(console) as client:
        client.sendall(
            large.replace(
                b"Host: localhost", b"Host: localhost\r\nContent-Type: application/cloudevents+json"
            )
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
