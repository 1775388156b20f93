"""What a hostile client tries: slow, many, huge and forged requests."""

from __future__ import annotations

import gzip
import socket
from contextlib import ExitStack, suppress

import pytest
import requests

from bridge.console import ingest
from tests.support.console import BATCH, PROXY_SECRET, STRUCTURED, FleetVm, RunningConsole
from tests.support.process import LIMIT_SECONDS

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /ingest HTTP/1.1\r\nHost: localhost\r\n"
SECRET, USER = PROXY_SECRET.encode(), b"X-Forwarded-User: ana"
FOREIGN_HOSTS = (
    b"evil.example",
    b"evil.example, localhost",
    b"localhost@evil.example",
    b"localhost/evil.example",
    b"127.0.0.1.evil.example",
    b"[",
    b"",
)


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
    with console.connect() as client:
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
    with console.connect() as client:
        with suppress(OSError):  # it may be refused before it is sent
            client.sendall(request_)
        answer = read_all(client)
    assert b"HTTP/1.1 200" not in answer
    assert console.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "lines",
    [
        [b"X_Proxy_Secret: " + SECRET, b"X_Forwarded_User: ana"],
        [b"X-Proxy-Secret : " + SECRET, USER],
        [b"X-Other: 1", b" X-Proxy-Secret: " + SECRET, USER],
        [b"X-Proxy-Secret: " + SECRET],
        [b"X-Proxy-Secret\t: " + SECRET, USER],
        [b"X-Proxy-Secret: " + SECRET, b"x-proxy-SECRET: x", USER],
        [b"X-Proxy-Secret: " + SECRET, USER, b"x-forwarded-user: root"],
        [b"X-Proxy-Secret: x, " + SECRET, USER],
        [b"X-Proxy-Secret: " + SECRET.upper(), USER],
        [b"X-Proxy-Secret: " + SECRET[:-1], USER],
        [b"X-Proxy-Secret: \xff" + SECRET, USER],
        [b"X-Proxy-Secret:", USER],
        [b"X-Proxy-Secret: x\x00", USER],
        [b"X-Proxy-Secret: " + SECRET, b"X-Forwarded-User:", b"X-Forwarded-Email: ana"],
        [b"Cookie: X-Proxy-Secret=" + SECRET, USER],
        [b"Connection: X-Forwarded-User", USER],
    ],
)
def test_no_spelling_of_headers_replaces_the_proxys(guarded: RunningConsole, lines: list[bytes]) -> None:
    right = [b"X-Proxy-Secret: " + SECRET, USER]
    for given, is_answered in ((right, True), (lines, False)):
        head = [b"GET / HTTP/1.1", b"Host: x", b"Connection: close", b"X-Forwarded-Groups: staff", *given]
        with guarded.connect() as client:
            client.sendall(b"\r\n".join([*head, b"", b""]))
            assert (b"HTTP/1.1 200" in read_all(client)) == is_answered


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
    head = POST + b"Content-Type: application/cloudevents+json\r\n"
    with console.connect() as client:
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
    with console.connect() as client:
        client.sendall(request_ + b"\r\nHost: localhost\r\n\r\n")
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    "body", [b"zz\r\n", b"5\r\nhello\r\nzz\r\n", b"-1\r\n", b"f" * 30 + b"\r\n", b"5;" + b"x" * 100_000]
)
def test_chunks_that_are_none_end_the_connection(console: RunningConsole, body: bytes) -> None:
    with console.connect() as client:
        with suppress(OSError):  # it may be refused before it is sent
            client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        read_all(client)
    assert console.get("/livez").status_code == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(b"Content-Length: 99999999999\r\n\r\n", 413, id="too large, before it is read"),
        pytest.param(b"Content-Length: 9\r\n\r\n{", 408, id="does not arrive"),
    ],
)
def test_a_body_that_is_too_large_or_does_not_arrive_is_given_up(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
) -> None:
    monkeypatch.setattr(ingest, "BODY_SECONDS", 0.05)
    with console.connect() as client:
        client.sendall(POST + sent)
        assert client.recv(200).startswith(b"HTTP/1.1 %d " % status)


def test_a_body_without_a_length_is_read_up_to_the_limit(console: RunningConsole) -> None:
    chunks = (b" " * 65536 for _ in range(200))
    url = f"{console.url}/ingest"
    assert requests.post(url, data=chunks, headers=STRUCTURED, timeout=LIMIT_SECONDS).status_code == 413


def test_a_compressed_body_is_not_expanded(console: RunningConsole) -> None:
    bomb = gzip.compress(b"[" + b" " * 50_000_000 + b"]")
    answer = console.post(bomb, {**BATCH, "Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()) == (415, {"error": "expected a body without Content-Encoding"})


def test_a_body_of_somebody_without_the_token_is_not_read(guarded: RunningConsole) -> None:
    with guarded.connect() as client:
        client.sendall(b"POST /ingest HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_large_bodies_wait_while_others_arrive_and_small_ones_do_not(
    console: RunningConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "BODY_SECONDS", 30.0)
    heartbeat = FleetVm("pending").heartbeat()
    length = b"Content-Length: %d\r\nContent-Type: application/cloudevents+json\r\n\r\n"
    large = POST + length % (100_000 + len(heartbeat)) + b" " * 100_000 + heartbeat
    with ExitStack() as stack:
        for _ in range(ingest.MAX_LARGE):
            stack.enter_context(console.connect()).sendall(POST + b"Content-Length: 1000000\r\n\r\n ")
        assert console.post(heartbeat).status_code == 200
        waiting = stack.enter_context(console.connect())
        waiting.sendall(large)
        waiting.settimeout(0.5)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        assert console.post(heartbeat).status_code == 200
    with console.connect() as client:
        client.sendall(large)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
