"""HTTP with limits: time, size, no redirect, no proxy, no cookie, verified TLS."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.config.sinks import HttpSettings
from bridge.errors import DeliveryError, Misconfigured, Unavailable
from bridge.http import client as module
from bridge.http.client import USER_AGENT, Answer, HttpClient, origin, retry_after_seconds
from tests.support.process import (
    LIMIT_SECONDS,
    SLACK_SECONDS,
    RawServer,
    Serve,
    answering,
    closed_port,
    dripping,
    self_signed,
    silent,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LIMIT_BYTES = 1000
LATE_SECONDS = SLACK_SECONDS


Make = Callable[..., HttpClient]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make clients that read few bytes of an answer, and are closed at the end."""
    monkeypatch.setattr(module, "MAX_BODY_BYTES", LIMIT_BYTES)
    with ExitStack() as stack:

        def make(**settings: Any) -> HttpClient:
            return stack.enter_context(
                closing(HttpClient(HttpSettings(**{"timeout_seconds": LIMIT_SECONDS, **settings})))
            )

        yield make


@pytest.fixture
def client(make: Make) -> HttpClient:
    return make()


def ask(client: HttpClient, url: str) -> Answer:
    return client.exchange("GET", f"{url}/secret-path?secret=query", {"X-Key": "secret-header"})


def failure(client: HttpClient, url: str) -> DeliveryError:
    with pytest.raises(DeliveryError) as raised:
        ask(client, url)
    assert "secret" not in str(raised.value)
    return raised.value


# --- time ---


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_peer_that_says_nothing_is_aborted(make: Make, scheme: str) -> None:
    with RawServer(silent) as server:
        started = time.monotonic()
        failure(make(timeout_seconds=0.5), server.url.replace("http", scheme))
        assert time.monotonic() - started < 0.5 + LATE_SECONDS


def test_a_peer_that_does_not_take_the_request_is_aborted(make: Make) -> None:
    with RawServer(silent) as server:
        body = bytes(32 * 1024 * 1024)
        started = time.monotonic()
        with pytest.raises(DeliveryError) as raised:
            make(timeout_seconds=0.5).exchange("POST", server.url, {}, body)
        assert time.monotonic() - started < 0.5 + LATE_SECONDS
        assert type(raised.value) is Unavailable


def test_after_a_time_out_the_client_can_be_used_again(make: Make) -> None:
    client = make(timeout_seconds=1)
    with RawServer(silent) as server:
        failure(client, server.url)
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


def test_a_redirect_is_an_answer_and_not_followed(client: HttpClient) -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    with RawServer(answering(moved)) as server:
        assert ask(client, server.url).status == 302
        assert len(server.requests) == 1


def test_the_body_of_a_redirect_is_bounded_and_not_unpacked_either(client: HttpClient) -> None:
    packed = gzip.compress(bytes(10_000_000))
    head = f"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    with RawServer(answering(head.encode() + packed)) as server:
        answer = ask(client, server.url)
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
        ask(client, server.url)
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
def test_a_status_counts_when_the_time_is_over_before_the_body_ends(make: Make, serve: Serve) -> None:
    with RawServer(serve) as server:
        started = time.monotonic()
        assert ask(make(timeout_seconds=1), server.url).status == 200
        assert 1 <= time.monotonic() - started < 1 + LATE_SECONDS


# --- what goes wrong ---


def test_a_certificate_of_an_unknown_authority_is_refused(client: HttpClient, tmp_path: Path) -> None:
    with RawServer(answering(OK), tls=self_signed(tmp_path)) as server:
        error = failure(client, server.url)
        assert type(error) is Misconfigured
        assert "self-signed certificate" in str(error)
        assert server.requests == []


def test_no_connection_is_a_fault_of_the_moment(client: HttpClient) -> None:
    with closed_port() as url:
        error = failure(client, url)
    assert str(error).endswith(": the connection failed: Connection refused")
    assert type(error) is Unavailable


def test_a_name_that_cannot_be_resolved_is_a_fault_of_the_moment(client: HttpClient) -> None:
    error = failure(client, "http://does-not-exist.invalid")
    assert "the host name cannot be resolved" in str(error)
    assert type(error) is Unavailable


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
            assert type(failure(client, server.url)) is Unavailable


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
