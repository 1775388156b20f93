"""HTTP with limits: time, size, no redirect, no proxy, no cookie, verified TLS."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest

from bridge.errors import Unavailable
from bridge.http import client as module
from bridge.http.client import CONNECT_SECONDS, USER_AGENT, HttpClient
from tests.support.http_client import OK, MakeClient, ask, failure
from tests.support.process import (
    LIMIT_SECONDS,
    RawServer,
    Serve,
    answering,
    closed_port,
    dead_port,
    dripping,
    silent,
    wait_until,
)
from tests.support.sinks import set_proxy
from tests.support.tls import forwarding

LIMIT_BYTES = 1000


@pytest.fixture(autouse=True)
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients read few bytes of an answer."""
    monkeypatch.setattr(module, "MAX_BODY_BYTES", LIMIT_BYTES)


@pytest.fixture
def client(make_client: MakeClient) -> HttpClient:
    return make_client()


# --- time ---


@pytest.mark.parametrize("body", [None, bytes(32 * 1024 * 1024)], ids=["no answer", "not taken"])
def test_a_peer_that_says_nothing_is_aborted_and_the_client_can_be_used_again(
    monkeypatch: pytest.MonkeyPatch, client: HttpClient, body: bytes | None
) -> None:
    with monkeypatch.context() as short, RawServer(silent) as server:
        short.setattr(client, "_settings", client._settings.model_copy(update={"timeout_seconds": 0.5}))
        assert "no answer within 0.5 s" in failure(Unavailable, client, server.url, body=body)
    with RawServer(answering(OK)) as server:
        assert ask(client, server.url).body == b"ok"


# --- size ---


def test_an_answer_of_exactly_the_limit_keeps_its_connection_and_a_longer_one_is_cut_off(
    client: HttpClient,
) -> None:
    full = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % LIMIT_BYTES + b"x" * LIMIT_BYTES
    more = full.replace(b"1000", b"1001") + b"x"
    with RawServer(answering(full, more)) as server:
        for _ in range(2):
            assert ask(client, server.url).body == b"x" * LIMIT_BYTES
        assert server.connections == 1


def test_an_endless_answer_is_cut_off(client: HttpClient) -> None:
    with RawServer(dripping(b"HTTP/1.1 500 No\r\n\r\n", b"x" * 600)) as server:
        answer = ask(client, server.url)
    assert (answer.status, answer.body) == (500, b"x" * LIMIT_BYTES)


# --- where it goes ---


def test_a_redirect_is_an_answer_and_neither_followed_nor_unpacked(client: HttpClient) -> None:
    packed = gzip.compress(bytes(10_000_000))
    head = f"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    with RawServer(answering(head.encode() + packed)) as server:
        answer = ask(client, server.url)
        assert len(server.requests) == 1
    assert (answer.status, answer.body) == (302, packed[:LIMIT_BYTES])


def test_no_proxy_and_no_password_of_the_environment_is_used(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_proxy(monkeypatch, "http://127.0.0.1:1")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with RawServer(answering(OK)) as server:
        assert ask(client, server.url).status == 200
        assert "authorization" not in server.requests[0].lower()


def test_only_what_was_asked_for_is_sent(client: HttpClient) -> None:
    with RawServer(answering(OK)) as server:
        ask(client, server.url, method="GET")
        line, *headers = server.requests[0].split("\r\n")
        host = server.url.removeprefix("http://")
    assert line == "GET /secret-path?secret=query HTTP/1.1"
    assert sorted(headers) == [
        "Accept-Encoding: identity",
        f"Host: {host}",
        f"User-Agent: {USER_AGENT}",
        "X-Key: secret-header",
    ]


def test_no_cookie_is_kept(client: HttpClient) -> None:
    with RawServer(answering(OK.replace(b"OK\r\n", b"OK\r\nSet-Cookie: a=b; Path=/\r\n"))) as server:
        ask(client, server.url)
        ask(client, server.url)
        assert "cookie" not in server.requests[1].lower()


def test_all_requests_share_one_connection(client: HttpClient) -> None:
    answers = [
        OK,
        b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 2\r\n\r\nno",
        OK,
    ]
    with RawServer(answering(*answers)) as server:
        assert [ask(client, server.url).status for _ in answers] == [200, 503, 204, 200, 302, 200]
        assert server.connections == 1


def test_a_connection_that_the_server_closed_is_replaced(client: HttpClient) -> None:
    with RawServer(answering(OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"))) as server:
        assert [ask(client, server.url).body for _ in range(3)] == [b"ok"] * 3
        assert server.connections == 3


def test_after_more_than_2_s_as_in_a_pause_of_the_vm_a_connection_that_may_be_forgotten_is_not_used_again(
    client: HttpClient, hold_up: Callable[[], None]
) -> None:
    with RawServer(answering(OK)) as server, RawServer(forwarding(server.port)) as nat:
        assert ask(client, nat.url).status == 200
        nat.forgotten = 1
        hold_up()
        assert [ask(client, nat.url).status for _ in range(2)] == [200, 200]
        assert (nat.connections, nat.lost_bytes) == (2, 0)


def test_a_young_connection_that_a_nat_has_forgotten_costs_only_the_time_that_is_given_for_it(
    client: HttpClient,
) -> None:
    with RawServer(answering(OK)) as server, RawServer(forwarding(server.port)) as nat:
        assert ask(client, nat.url).status == 200
        nat.forgotten = 1
        with pytest.raises(Unavailable, match=r"no answer on an open connection within 0\.3 s") as raised:
            ask(client, nat.url, open_seconds=0.3)
        assert not raised.value.is_unreached, "the receiver may have it"
        assert ask(client, nat.url, open_seconds=0.3).status == 200
        assert nat.connections == 2


def test_a_receiver_that_becomes_slow_has_the_usual_time_on_a_new_connection_and_afterwards(
    client: HttpClient,
) -> None:
    slow = Event()

    def serve(server: RawServer, connection: socket.socket) -> None:
        while server.read_head(connection):
            server.ended.wait(1.0 if slow.is_set() else 0)
            connection.sendall(OK)

    with RawServer(serve) as server:
        ask(client, server.url)
        slow.set()
        with pytest.raises(Unavailable):
            ask(client, server.url, open_seconds=0.1)
        assert [ask(client, server.url, open_seconds=0.1).status for _ in range(2)] == [200, 200]
        assert server.connections == 2


# --- several addresses ---


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give every name these ports of this machine as its addresses."""
    real = socket.getaddrinfo

    def resolve(*ports: int) -> None:
        def resolved(host: str, *more: Any, **named: Any) -> Any:
            return found if host.endswith(".example") else real(host, *more, **named)

        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports]
        monkeypatch.setattr(socket, "getaddrinfo", resolved)

    return resolve


@pytest.mark.parametrize("way", ["direct", "proxy"])
def test_an_address_that_answers_is_found_behind_others_that_are_dead_or_refuse(
    make_client: MakeClient, resolve: Callable[..., None], way: str
) -> None:
    began_at = time.monotonic()
    with dead_port() as dead, closed_port() as closed, RawServer(answering(OK)) as server:
        resolve(dead, urlsplit(closed).port, *[dead] * 4, server.port)
        client = make_client(proxy="http://proxy.example:3128" if way == "proxy" else "")
        assert ask(client, "http://receiver.example").body == b"ok"
    assert time.monotonic() - began_at < CONNECT_SECONDS


def test_a_connect_has_a_limit_of_its_own_for_all_addresses_together(
    make_client: MakeClient, resolve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    with dead_port() as dead, closed_port() as closed, RawServer(answering(OK)) as server:
        resolve(dead, dead)
        error = failure(Unavailable, make_client(timeout_seconds=60), "http://receiver.example")
        assert error.endswith(": no connection within 0.5 s")
        resolve(*[urlsplit(closed).port] * 2)
        assert "refused" in failure(Unavailable, make_client(), "http://receiver.example")
        monkeypatch.setattr(module, "CONNECT_SECONDS", LIMIT_SECONDS)
        resolve(dead, server.port)
        client = make_client(timeout_seconds=0.2)

        def answer() -> str:
            try:
                return str(ask(client, "http://receiver.example").status)
            except Unavailable as error:
                return str(error).rpartition(": ")[2]

        late = "no answer within 0.2 s"  # over a connection, on a busy machine
        assert wait_until(lambda: (found := answer()) != late and found) == "200"


# --- answers of which the status counts ---


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nno colon here\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a chunk",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nsho",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nLocation: http://[\r\nSet-Cookie: \xff=;;;\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_a_status_counts_whatever_its_body_is(client: HttpClient, answer: bytes) -> None:
    def once(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(answer)

    with RawServer(once) as server:
        assert ask(client, server.url).status == 200


def test_a_status_counts_when_the_time_is_over_before_a_body_of_any_kind_ends(
    make_client: MakeClient,
) -> None:
    kinds = {
        "of known length": dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n", b"x"),
        "of unknown length": dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        "in chunks": dripping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    }

    def status(serve: Serve) -> int:
        with RawServer(serve) as server:
            return ask(make_client(timeout_seconds=2), server.url).status

    with ThreadPoolExecutor() as threads:  # all at once: each takes the whole time
        statuses = dict(zip(kinds, threads.map(status, kinds.values()), strict=True))
    assert statuses == dict.fromkeys(kinds, 200)


# --- what goes wrong ---


def test_no_connection_or_address_is_a_fault_of_the_moment(client: HttpClient) -> None:
    with closed_port() as url, pytest.raises(Unavailable) as raised:
        client.exchange("GET", url, {})
    assert str(raised.value).endswith(": the connection failed: Connection refused")
    assert raised.value.is_unreached  # another event would fail as well
    error = failure(Unavailable, client, "http://does-not-exist.invalid")
    assert "the host name cannot be resolved" in error


@pytest.mark.parametrize(
    "answer",
    [b"", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x00" * 500, b"HTTP/1.1 200 OK\r\n"],
)
def test_an_answer_that_is_not_http_is_a_temporary_failure(client: HttpClient, answer: bytes) -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(answer)

    with RawServer(serve) as server:
        if answer.startswith(b"HTTP/1.1 200"):
            assert ask(client, server.url).body == b""  # old servers end a head so
        else:
            failure(Unavailable, client, server.url)
