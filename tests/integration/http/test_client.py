"""HTTP with limits: time, size, no redirect, no proxy, no cookie, verified TLS."""

from __future__ import annotations

import gzip
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from bridge.errors import DeliveryError, Misconfigured, Unavailable
from bridge.http import client as module
from bridge.http.client import USER_AGENT, HttpClient, origin, retry_after_seconds
from tests.support.http_client import OK, MakeClient, ask, failure
from tests.support.process import (
    RawServer,
    Serve,
    answering,
    closed_port,
    dripping,
    silent,
)

LIMIT_BYTES = 1000


@pytest.fixture(autouse=True)
def small_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients read few bytes of an answer."""
    monkeypatch.setattr(module, "MAX_BODY_BYTES", LIMIT_BYTES)


@pytest.fixture
def client(make_client: MakeClient) -> HttpClient:
    return make_client()


# --- time ---


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_peer_that_says_nothing_is_aborted(make_client: MakeClient, scheme: str) -> None:
    with RawServer(silent) as server:
        failure(Unavailable, make_client(timeout_seconds=0.5), server.url.replace("http", scheme))


def test_a_peer_that_does_not_take_the_request_is_aborted(make_client: MakeClient) -> None:
    with RawServer(silent) as server:
        failure(Unavailable, make_client(timeout_seconds=0.5), server.url, body=bytes(32 * 1024 * 1024))


def test_after_a_time_out_the_client_can_be_used_again(make_client: MakeClient) -> None:
    client = make_client(timeout_seconds=1)
    with RawServer(silent) as server:
        failure(Unavailable, client, server.url)
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


def test_no_proxy_of_the_environment_is_used(client: HttpClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    with RawServer(answering(OK)) as server:
        assert ask(client, server.url).status == 200


def test_no_password_of_a_netrc_file_is_sent(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with RawServer(answering(OK)) as server:
        ask(client, server.url)
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


@pytest.mark.parametrize(
    "serve",
    [
        pytest.param(dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n", b"x"), id="length"),
        pytest.param(dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"x"), id="unknown-length"),
        pytest.param(
            dripping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"), id="chunks"
        ),
    ],
)
def test_a_status_counts_when_the_time_is_over_before_the_body_ends(
    make_client: MakeClient, serve: Serve
) -> None:
    with RawServer(serve) as server:
        assert ask(make_client(timeout_seconds=1), server.url).status == 200


# --- what goes wrong ---


def test_no_connection_or_address_is_a_fault_of_the_moment(client: HttpClient) -> None:
    with closed_port() as url:
        error = failure(Unavailable, client, url)
    assert error.endswith(": the connection failed: Connection refused")
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


@pytest.mark.parametrize("value", ["tök€n", "line\nbreak", " leading blank"])
def test_a_header_that_cannot_be_sent_is_a_fault_of_the_settings(client: HttpClient, value: str) -> None:
    with pytest.raises(DeliveryError) as raised:
        client.exchange("GET", "http://127.0.0.1/secret", {"Authorization": value})
    assert type(raised.value) is Misconfigured
    assert value.strip() not in str(raised.value)


@pytest.mark.parametrize("url", ["", "http://", "ftp://x/", "http://*/", "http://exa mple/", "http://[::1"])
def test_an_address_that_leads_nowhere_is_a_fault_of_the_settings(client: HttpClient, url: str) -> None:
    with pytest.raises(DeliveryError) as raised:
        client.exchange("GET", url, {})
    assert type(raised.value) is Misconfigured


# --- Retry-After and origin ---


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("7", 7),
        (" 7 ", 7),
        ("4000", 100),
        ("9" * 400, 100),
        ("-7", None),
        ("1.5", None),
        ("", None),
        ("soon", None),
        ("²", None),
        ("Mon, 99 Foo 2022 22:26:58 GMT", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2915 07:28:00 GMT", 100),
    ],
)
def test_retry_after_is_read_in_seconds_or_as_a_date_and_nonsense_is_passed_over(
    value: str, seconds: float | None
) -> None:
    assert retry_after_seconds({"Retry-After": value}, limit_seconds=100) == seconds


def test_a_date_in_retry_after_counts_from_now() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=50), usegmt=True)
    seconds = retry_after_seconds({"Retry-After": soon}, limit_seconds=100)
    assert seconds is not None
    assert 45 < seconds <= 50


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://example.org/path?sig=1#x", "https://example.org"),
        ("http://me:secret@example.org:8080/", "http://example.org:8080"),
        ("https://[::1]:8443/x", "https://[::1]:8443"),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert origin(url) == shown
