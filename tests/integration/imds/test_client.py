"""The IMDS client: its requests, its time limits, and how it reads answers."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bridge.config.models import ImdsSettings
from bridge.errors import ImdsError
from bridge.imds import client as client_module
from bridge.imds.client import CALL_SECONDS, EVENTS_PATH, LATE_SECONDS, MAX_BODY_BYTES, ImdsClient
from bridge.imds.instance import Vm, parse_vm
from bridge.lab import rendering
from bridge.runtime import threads
from tests.support.clock import MovedClock
from tests.support.imds_lab import ImdsLab
from tests.support.process import LIMIT_SECONDS, RawServer, Serve, answering, dripping, silent, wait_until

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


made: list[ImdsClient] = []


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def client(url: str, **settings: Any) -> ImdsClient:
    made.append(ImdsClient(ImdsSettings(endpoint=url, **settings), clock=MovedClock()))
    return made[-1]


def sending(answer: bytes) -> Serve:
    """Answer one request of each connection, and close it."""

    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(answer)

    return serve


def failure(client: ImdsClient, *, timeout_seconds: float = CALL_SECONDS) -> ImdsError:
    with pytest.raises(ImdsError) as raised:
        client.document(timeout_seconds=timeout_seconds)
    return raised.value


# Requests


def test_the_request_is_as_imds_requires(imds: ImdsLab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    body = client(imds.url("web-0")).document()
    assert json.loads(body) == {"DocumentIncarnation": 1, "Events": []}
    client(imds.url("web-0"), api_version="2017-03-01").document()
    request, other = imds.requests()
    assert (request.method, request.path, request.query) == ("GET", EVENTS_PATH, "api-version=2020-07-01")
    assert other.query == "api-version=2017-03-01"
    assert request.headers["metadata"] == "true"
    assert not {"x-forwarded-for", "cookie", "authorization", "forwarded", "via"} & set(request.headers)


def test_an_endpoint_is_discovered_again_after_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # SCHEDULEDEVENTSIP holds an address without a port, so this one leads nowhere
    settings = ImdsSettings(endpoint="discover")
    monkeypatch.delenv("SCHEDULEDEVENTSIP", raising=False)
    imds = ImdsClient(settings, clock=MovedClock())
    assert "no SCHEDULEDEVENTSIP and no lease with DHCP option 245" in str(failure(imds))
    monkeypatch.setenv("SCHEDULEDEVENTSIP", "127.0.0.2")
    assert "IMDS at http://127.0.0.2" in str(failure(imds, timeout_seconds=0.5))
    monkeypatch.setenv("SCHEDULEDEVENTSIP", "127.0.0.3")
    assert "IMDS at http://127.0.0.3" in str(failure(imds, timeout_seconds=0.5))


# Time limits


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be late after a moment, so that no test has to wait."""
    monkeypatch.setattr(client_module, "LATE_SECONDS", 0.05)


@pytest.mark.parametrize(
    "serve",
    [
        silent,
        dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b"{"),
        dripping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_an_answer_that_does_not_end_is_an_error(serve: Any) -> None:
    with RawServer(serve) as server:
        error = failure(client(server.url), timeout_seconds=0.5)
    assert str(error).startswith(f"IMDS at {server.url}: no complete answer within ")


@pytest.mark.usefixtures("impatient")
def test_a_request_that_is_not_answered_is_repeated_on_a_fresh_connection() -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        (silent if server.connections < 3 else answering(OK))(server, connection)

    calls: list[None] = []
    with RawServer(serve) as server:
        assert client(server.url).document(waiting=lambda: calls.append(None)) == b"ok"
    assert server.connections >= 3
    assert len(calls) == server.connections - 1


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all requests but the first have only a moment."""
    monkeypatch.setattr(client_module, "LATE_SECONDS", 0.05)
    monkeypatch.setattr(client_module, "CALL_SECONDS", 0.2)


@pytest.mark.parametrize("others", [silent, sending(b"HTTP/1.1 429 Later\r\nContent-Length: 0\r\n\r\n")])
@pytest.mark.usefixtures("short_calls")
def test_the_first_request_stays_open_for_an_answer_of_minutes_beside_others(others: Serve) -> None:
    asked = threading.Semaphore(0)

    def serve(server: RawServer, connection: socket.socket) -> None:
        if server.connections > 1:
            asked.release()
            others(server, connection)
        else:
            server.read_head(connection)
            for _ in range(4):
                assert asked.acquire(timeout=LIMIT_SECONDS)
            connection.sendall(OK)

    with RawServer(serve) as server:
        assert client(server.url).document(timeout_seconds=LIMIT_SECONDS) == b"ok"
    assert server.connections >= 5  # on a busy machine one more


@pytest.mark.usefixtures("short_calls")
def test_the_answer_to_the_first_request_is_read_where_no_other_connection_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = ImdsClient._open
    tries: list[float] = []

    def once(asking: ImdsClient, limit_seconds: float) -> socket.socket:
        tries.append(limit_seconds)
        if len(tries) > 1:
            raise ConnectionRefusedError
        return opened(asking, limit_seconds)

    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        wait_until(lambda: len(tries) > 1)
        connection.sendall(OK)

    monkeypatch.setattr(ImdsClient, "_open", once)
    with RawServer(serve) as server:
        assert client(server.url).document(timeout_seconds=LIMIT_SECONDS) == b"ok"
    assert len(tries) < 100


@pytest.mark.usefixtures("short_calls")
def test_a_first_request_that_is_lost_does_not_hold_up_the_start() -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        (answering(OK) if server.connections > 1 else silent)(server, connection)

    with RawServer(serve) as server:
        asking = client(server.url)
        assert [asking.document(timeout_seconds=LIMIT_SECONDS) for _ in range(2)] == [b"ok"] * 2
    assert server.connections == 2


# The kept connection


def test_a_connection_is_kept_for_every_request_until_the_server_closes_it() -> None:
    compute = b'{"name": "web-0", "Events": []}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(compute) + compute
    last = answer.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
    with RawServer(answering(answer, answer, last, answer)) as server:
        imds = client(server.url)
        assert [imds.document() for _ in range(2)] == [compute] * 2
        assert imds.instance().name == "web-0"
        assert imds.document() == compute
    assert (len(server.requests), server.connections) == (4, 2)
    assert LATE_SECONDS == 2  # so that late requests stay within what IMDS allows


def test_a_connection_that_was_idle_for_more_than_2_s_as_in_a_pause_of_the_vm_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "PAUSE_SECONDS", 2.0)
    clock = MovedClock()
    with RawServer(answering(OK)) as server:
        imds = client(server.url)
        imds.clock = clock
        imds.document()
        for seconds, connections in ((1.9, 1), (2.1, 2), (1.9, 2)):
            clock.jump(seconds)  # the other clocks may stand still meanwhile
            imds.document()
            assert server.connections == connections


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_kept_connection_that_was_closed_is_replaced(
    is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_seen:  # it closes between the look at the connection and the request
        monkeypatch.setattr(select, "select", lambda *_: ([], [], []))
    with RawServer(sending(OK)) as server:
        imds = client(server.url)
        assert [imds.document() for _ in range(3)] == [b"ok"] * 3
    assert server.connections == 3


@pytest.mark.parametrize("late", [b"\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstale"])
def test_what_a_server_sends_after_an_answer_is_not_taken_for_the_next(late: bytes) -> None:
    answered, sent = threading.Event(), threading.Event()

    def serve(server: RawServer, connection: socket.socket) -> None:
        while server.read_head(connection):
            connection.sendall(OK)
            if len(server.requests) == 1 and answered.wait(LIMIT_SECONDS):
                connection.sendall(late)
                sent.set()

    with RawServer(serve) as server:
        imds = client(server.url)
        assert imds.document() == b"ok"
        answered.set()
        assert sent.wait(LIMIT_SECONDS)
        assert imds.document() == b"ok"
    assert server.connections == 2


def test_an_approval_is_sent_once_on_a_connection_of_its_own() -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        while server.read_head(connection) and not server.requests[-1].startswith("POST"):
            connection.sendall(OK)

    with RawServer(serve) as server:
        imds = client(server.url)
        imds.document()
        with pytest.raises(ImdsError, match="interrupted"):
            imds.approve(["A"], incarnation=1)
        posts = [request for request in server.requests if request.startswith("POST")]
    assert (len(posts), server.connections) == (1, 2)


# Answers


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("drop", "interrupted|connection"),
        ("lost_answer", "interrupted|connection"),
        ("huge", f"an answer of more than {MAX_BODY_BYTES} bytes"),
    ],
)
def test_the_call_after_a_broken_connection_or_a_huge_answer_succeeds(
    imds: ImdsLab, kind: str, reason: str
) -> None:
    imds.fault(kind, count=1)
    asking = client(imds.url("web-0"))
    assert re.search(reason, str(failure(asking)))
    asking.document()


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        *((status, "", "") for status in (201, 204, 302, 403)),
        (410, "", " (the service is being updated, for at most 70 s)"),
        (404, '{ "error": "Not found. Invalid version" }', ": Not found. Invalid version"),
        (404, "", " (the service is being updated, or this is not an Azure VM)"),
        (400, '{"error": {"message": "no header"}}', ": no header"),
        (400, '{"error": "x", "newest-versions": ["2017-12-01"]}', ": x"),
        (403, "no\x1b[1m route " + "x" * 300, ": no [1m route " + "x" * 187),
        (500, "pod list is empty", ": pod list is empty"),
        (503, " <html><script>wait()</script>", ""),
    ],
)
def test_any_status_but_200_is_an_error_with_what_imds_says_of_it(status: int, body: str, said: str) -> None:
    head = f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n"
    with RawServer(answering((head + body).encode())) as server:
        error = failure(client(server.url))
        assert (str(error), error.status) == (f"IMDS at {server.url} answered {status}{said}", status)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "asked", "obeyed"),
    [(429, "3", 3), (429, "86400", 5), (429, "soon", None), (302, None, None), (204, None, None)],
)
def test_only_a_retry_after_in_seconds_is_obeyed_within_a_limit(
    imds: ImdsLab, status: int, asked: str | None, obeyed: float | None
) -> None:
    imds.fault(status, retry_after=asked)
    error = failure(client(imds.url("web-0")))
    assert (error.status, error.retry_after_seconds) == (status, obeyed)


def test_a_version_that_fails_when_it_is_tried_again_leaves_the_one_that_works(imds: ImdsLab) -> None:
    asking = client(imds.url("web-0"), api_version="2099-01-01")
    asking.document()
    asking.clock.advance(3600)  # type: ignore[attr-defined]
    imds.fault(500, count=1)
    for _ in range(3):
        assert json.loads(asking.document())["Events"] == []
    assert "2020-07-01 is asked for" in str(asking.version_error)


def test_a_version_that_imds_does_not_know_is_replaced_and_tried_again_hourly(
    imds: ImdsLab, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = client(imds.url("web-0"), api_version="2099-01-01")
    for _ in range(3):  # it knows it after the second hour
        assert json.loads(asking.document())["Events"] == []
        asking.document()
        assert "2020-07-01 is asked for" in str(asking.version_error)
        asking.approve([imds.schedule(event_type="Freeze", resources=["web-0"], event_id="a")], incarnation=2)
        imds.complete("a")
        asking.clock.advance(3600)  # type: ignore[attr-defined]
    monkeypatch.setattr(rendering, "EVENT_VERSIONS", ("2099-01-01",))
    asking.document()
    assert asking.version_error is None
    versions = [request.query[-10:-6] for request in imds.requests()]
    assert versions == ["2099", *["2020"] * 3] * 3 + ["2099"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_address_that_cannot_be_used_is_an_error() -> None:
    assert "the connection failed" in str(failure(client(f"http://{'a' * 300}")))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "answer",
    [
        OK,
        CHUNKED + b"1\r\no\r\n1;x=y\r\nk\r\n0\r\nTrailer: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nok",  # without a length it ends with the connection
    ],
)
def test_an_answer_may_arrive_in_pieces(answer: bytes, at_once: bool) -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in [answer] if at_once else [answer[at : at + 1] for at in range(len(answer))]:
            connection.sendall(piece)

    with RawServer(serve) as server:
        assert client(server.url).document() == b"ok"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
        CHUNKED + b"2\r\nok\r\n",
        CHUNKED + b"FF\r\nok\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-1\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nok",
        CHUNKED + b"2" * 70_000,
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000,
    ],
    ids=lambda value: repr(value[:60]),
)
def test_an_answer_that_cannot_be_read_is_an_error(answer: bytes) -> None:
    with RawServer(sending(answer)) as server:
        error = failure(client(server.url))
    assert re.search("interrupted|cannot be read", str(error))
    assert error.status is None


# Instance data


def test_instance_data_identifies_this_vm_unless_the_settings_name_it(imds: ImdsLab) -> None:
    assert client(imds.url("web-0"), vm_name="other_7").instance() == Vm(name="other_7")
    vm = client(imds.url("web-0")).instance()
    assert (vm.name, vm.scale_set, vm.location, vm.tags) == ("web-0", "web", "westeurope", {"env": "lab"})
    assert [request.headers["metadata"] for request in imds.requests()] == ["true"]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{}", b'{"name": ""}', b'{"name": 5}', b"\xff\xfe", b"[" * 100_000]
)
@pytest.mark.usefixtures("without_collection")
def test_unreadable_instance_data_is_an_error(body: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with (
        RawServer(answering(answer)) as server,
        pytest.raises(ImdsError, match="instance data that cannot be read"),
    ):
        client(server.url).instance()


def test_missing_instance_data_is_empty_and_invalid_characters_are_removed() -> None:
    compute = {"name": "web-0\x00\n", "vmId": None, "zone": ["1"], "location": "x" * 5000}
    tags = [{"name": "a"}, {"name": 1}, "b", {"name": "n", "value": 5}]
    vm = parse_vm(json.dumps({**compute, "tagsList": tags}).encode())
    assert vm == Vm(name="web-0", location="x" * 1024, tags={"a": "", "n": "5"})
    assert parse_vm(b'{"name": "web-0", "tagsList": "env:lab"}') == Vm(name="web-0")
