"""The connection to IMDS: how answers are read, and what happens to requests that are not answered."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from bridge.errors import HttpFailure
from bridge.imds import connection as connection_module
from bridge.imds.connection import ImdsConnection
from bridge.imds.response import Response
from tests.support.process import LIMIT_SECONDS, RawServer, answering, dripping, silent

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be late after a moment, so that no test has to wait."""
    monkeypatch.setattr(connection_module, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(connection_module, "REPEAT_SECONDS", 0.05)


def get(connection: ImdsConnection, *, limit_seconds: float = LIMIT_SECONDS, repeat: bool = True) -> Response:
    request = connection.request("GET", "/path", {"Metadata": "true"})
    return connection.send(request, limit_seconds=limit_seconds, max_body_bytes=1000, repeat=repeat)


# One exchange


@pytest.mark.parametrize("at_once", [True, False])
def test_an_answer_may_arrive_in_pieces(at_once: bool) -> None:
    answer = b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n" + OK

    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in [answer] if at_once else [answer[at : at + 1] for at in range(len(answer))]:
            connection.sendall(piece)

    with RawServer(serve) as server:
        response = get(ImdsConnection(server.url))
    assert (response.status, response.body) == (200, b"ok")


def test_an_answer_that_cannot_be_read_is_a_failure() -> None:
    with (
        RawServer(answering(b"SSH-2.0-OpenSSH\r\n\r\n")) as server,
        pytest.raises(HttpFailure, match="not HTTP"),
    ):
        get(ImdsConnection(server.url))


def test_the_request_has_what_http_and_imds_require() -> None:
    with RawServer(answering(OK)) as server:
        connection = ImdsConnection(f"{server.url}/prefix")
        get(connection)
        connection.close()
    host = server.url.removeprefix("http://")
    assert server.requests == [
        f"GET /prefix/path HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\nMetadata: true"
    ]


# The kept connection


def test_a_connection_is_kept_until_the_server_closes_it() -> None:
    answers = answering(OK, OK, b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", OK)
    with RawServer(answers) as server:
        connection = ImdsConnection(server.url)
        for _ in range(4):
            assert get(connection).body == b"ok"
        connection.close()
    assert (len(server.requests), server.connections) == (4, 2)


def test_a_kept_connection_that_the_server_has_closed_is_replaced() -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(OK)

    with RawServer(serve) as server:
        connection = ImdsConnection(server.url)
        for _ in range(3):
            assert get(connection, repeat=False).body == b"ok"
        connection.close()
    assert server.connections == 3


@pytest.mark.parametrize("late", [b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstale"])
def test_what_a_server_sends_after_an_answer_is_not_taken_for_the_next(late: bytes) -> None:
    sent = threading.Event()

    def serve(server: RawServer, connection: socket.socket) -> None:
        while server.read_head(connection):
            connection.sendall(OK)
            if len(server.requests) == 1:
                connection.sendall(late)
                sent.set()

    with RawServer(serve) as server:
        connection = ImdsConnection(server.url)
        for _ in range(2):
            assert get(connection, repeat=False).body == b"ok"
            assert sent.wait(LIMIT_SECONDS)
        connection.close()
    assert server.connections == 2


# Requests without an answer


@pytest.mark.usefixtures("impatient")
def test_a_request_that_is_not_answered_is_repeated_on_a_fresh_connection() -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        if server.connections == 1:
            silent(server, connection)
        answering(OK)(server, connection)

    with RawServer(serve) as server:
        connection = ImdsConnection(server.url)
        assert get(connection).body == b"ok"
        connection.close()
    assert server.connections == 2


@pytest.mark.usefixtures("impatient")
def test_the_first_request_may_still_be_answered() -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        if server.connections > 1:
            silent(server, connection)
        server.read_head(connection)
        while server.connections < 4 and not server.ended.wait(0.01):
            pass
        connection.sendall(OK)

    with RawServer(serve) as server:
        connection = ImdsConnection(server.url)
        assert get(connection).body == b"ok"
        connection.close()
    assert server.connections >= 4


@pytest.mark.usefixtures("impatient")
def test_without_repeating_there_is_one_request() -> None:
    with RawServer(silent) as server, pytest.raises(HttpFailure, match=r"no complete answer within 0\.3 s"):
        get(ImdsConnection(server.url), limit_seconds=0.3, repeat=False)
    assert server.connections == 1


@pytest.mark.parametrize("serve", [silent, dripping(b"HTTP/1.1 200 OK\r\n", b"X-Drop: 1\r\n")])
@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.usefixtures("impatient")
def test_the_limit_holds_for_the_whole_exchange(serve: object, repeat: bool) -> None:
    with RawServer(serve) as server:  # type: ignore[arg-type]  # parametrize loses its type
        start = time.monotonic()
        with pytest.raises(HttpFailure, match=r"no complete answer within 0\.5 s"):
            get(ImdsConnection(server.url), limit_seconds=0.5, repeat=repeat)
        assert 0.5 <= time.monotonic() - start < 5


@pytest.mark.usefixtures("impatient")
def test_the_waiting_caller_is_called_while_there_is_no_answer() -> None:
    calls = []
    with RawServer(silent) as server:
        connection = ImdsConnection(server.url)
        request = connection.request("GET", "/", {})
        with pytest.raises(HttpFailure):
            connection.send(
                request,
                limit_seconds=0.4,
                max_body_bytes=1,
                waiting=lambda: calls.append(time.monotonic()),
            )
    assert len(calls) >= 2


@pytest.mark.usefixtures("impatient")
def test_an_answer_that_came_while_the_process_was_suspended_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    is_late, is_sent = threading.Event(), threading.Event()

    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        is_late.wait(LIMIT_SECONDS)
        connection.sendall(OK)
        is_sent.set()

    def suspend() -> None:
        is_late.set()
        assert is_sent.wait(LIMIT_SECONDS)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 100)

    with RawServer(serve) as server:
        connection = ImdsConnection(server.url)
        request = connection.request("GET", "/", {})
        answer = connection.send(request, limit_seconds=LIMIT_SECONDS, max_body_bytes=10, waiting=suspend)
    assert answer.body == b"ok"


def test_late_requests_stay_within_what_imds_allows() -> None:
    assert connection_module.LATE_SECONDS == 2
    assert connection_module.REPEAT_SECONDS >= 1


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1", "ftp://127.0.0.1", "http://", "http://[::1", "http://a:b"]
)
def test_a_url_that_cannot_be_used_is_a_permanent_failure(url: str) -> None:
    with pytest.raises(HttpFailure) as raised:
        ImdsConnection(url)
    assert raised.value.permanent
