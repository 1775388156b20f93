"""TLS with a private authority, client certificates, proxies, and how each of them fails."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.config.base import Secret
from bridge.config.sinks import HttpSettings
from bridge.config.values import check_ca, check_certificate
from bridge.errors import DeliveryError, Misconfigured, Unavailable
from bridge.http import client as module
from bridge.http.client import Answer, HttpClient, clock_skew_seconds
from tests.support.process import LIMIT_SECONDS, RawServer, Serve, answering, dripping, silent
from tests.support.tls import ESTABLISHED, PASSPHRASE, Authority, proxying

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LOGIN = "user:secret-password"
UNUSABLE = "expected a certificate and its own private key in PEM, without passphrase"

Make = Callable[..., HttpClient]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make clients that are closed at the end."""
    made = []

    def make(*, proxy: str = "", **settings: Any) -> HttpClient:
        given = {"timeout_seconds": LIMIT_SECONDS, "proxy": Secret(proxy) if proxy else None, **settings}
        made.append(HttpClient(HttpSettings().model_copy(update=given)))  # the files change later
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def ask(client: HttpClient, url: str, *, body: bytes | None = None) -> Answer:
    return client.exchange("POST", f"{url}/secret-path?secret=query", {}, body)


def failure(client: HttpClient, url: str, *, body: bytes | None = None) -> DeliveryError:
    with pytest.raises(DeliveryError) as raised:
        ask(client, url, body=body)
    assert "secret" not in str(raised.value)
    return raised.value


def with_login(url: str, login: str = LOGIN) -> str:
    return url.replace("://", f"://{login}@")


# --- whom the client trusts ---


def test_a_server_of_the_private_authority_is_trusted(make: Make, authority: Authority) -> None:
    with RawServer(answering(OK), tls=authority.server()) as server:
        assert ask(make(ca_file=authority.file), server.url).body == b"ok"


def test_it_is_refused_without_that_authority(make: Make, authority: Authority) -> None:
    with RawServer(answering(OK), tls=authority.server()) as server:
        error = failure(make(), server.url)
        assert server.requests == []
    assert type(error) is Misconfigured
    assert "TLS failed: " in str(error)
    assert "certificate" in str(error)


def test_only_the_private_authority_is_trusted(make: Make, authority: Authority, tmp_path: Path) -> None:
    with RawServer(answering(OK), tls=authority.server()) as server:
        assert type(failure(make(ca_file=Authority(tmp_path, "other").file), server.url)) is Misconfigured
        assert server.requests == []


def test_the_environment_names_no_authority(
    make: Make, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(authority.file))
    with RawServer(answering(OK), tls=authority.server()) as server:
        assert type(failure(make(), server.url)) is Misconfigured


def test_a_certificate_for_another_host_is_refused(make: Make, authority: Authority) -> None:
    with RawServer(answering(OK), tls=authority.server(host="other.example")) as server:
        error = failure(make(ca_file=authority.file), server.url)
    assert "certificate is not valid for '127.0.0.1'" in str(error)
    assert type(error) is Misconfigured


def test_an_expired_certificate_is_refused(make: Make, authority: Authority) -> None:
    with RawServer(answering(OK), tls=authority.server(days=-1)) as server:
        error = failure(make(ca_file=authority.file), server.url)
    assert str(error).endswith(": TLS failed: certificate has expired")
    assert type(error) is Misconfigured


def test_a_server_that_speaks_no_tls_is_a_fault_of_the_settings(make: Make, authority: Authority) -> None:
    with RawServer(lambda _, connection: connection.sendall(OK)) as server:
        error = failure(make(ca_file=authority.file), server.url.replace("http", "https"))
    assert str(error).endswith(": TLS failed: wrong version number")
    assert type(error) is Misconfigured


def test_a_server_that_leaves_while_tls_begins_is_a_fault_of_the_moment(
    make: Make, authority: Authority
) -> None:
    def serve(_: RawServer, connection: socket.socket) -> None:
        connection.recv(65536)

    with RawServer(serve) as server:
        assert type(failure(make(ca_file=authority.file), server.url.replace("http", "https"))) is Unavailable


def test_tls_that_does_not_begin_is_aborted(
    make: Make, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.2)
    with RawServer(silent) as server:
        error = failure(make(ca_file=authority.file), server.url.replace("http", "https"))
    assert ": no answer within" in str(error)
    assert type(error) is Unavailable


# --- client certificates ---


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_with_its_certificate_is_let_in(
    make: Make, authority: Authority, newest: ssl.TLSVersion
) -> None:
    pair = authority.issue("client")
    with RawServer(answering(OK), tls=authority.server(asks=True, newest=newest)) as server:
        two_files = make(
            ca_file=authority.file, client_certificate_file=pair.certificate, client_key_file=pair.key
        )
        one_file = make(ca_file=authority.file, client_certificate_file=pair.in_one_file())
        assert [ask(client, server.url).body for client in (two_files, one_file)] == [b"ok", b"ok"]


@pytest.mark.parametrize(
    ("newest", "text"),
    [
        (ssl.TLSVersion.TLSv1_2, "handshake failure"),
        (ssl.TLSVersion.TLSv1_3, "certificate required"),
    ],
)
@pytest.mark.parametrize("body", [None, bytes(1_000_000)])
def test_a_client_without_a_certificate_learns_that_one_is_asked_for(
    make: Make, authority: Authority, newest: ssl.TLSVersion, text: str, body: bytes | None
) -> None:
    with RawServer(answering(OK), tls=authority.server(asks=True, newest=newest)) as server:
        error = failure(make(ca_file=authority.file), server.url, body=body)
        assert server.requests == []
    assert str(error).endswith(f"TLS failed: the server refused: {text}")
    assert type(error) is Misconfigured


@pytest.mark.parametrize(
    ("issuer", "days", "text"), [("other", 1, "unknown ca"), ("ca", -1, "certificate expired")]
)
def test_a_client_whose_certificate_is_refused_learns_why(
    make: Make, authority: Authority, issuer: str, days: float, text: str
) -> None:
    pair = (authority if issuer == "ca" else Authority(authority.folder, issuer)).issue("client", days=days)
    with RawServer(answering(OK), tls=authority.server(asks=True)) as server:
        client = make(
            ca_file=authority.file, client_certificate_file=pair.certificate, client_key_file=pair.key
        )
        error = failure(client, server.url)
    assert str(error).endswith(f"TLS failed: the server refused: {text}")
    assert type(error) is Misconfigured


def test_rotated_files_are_used_after_a_close(make: Make, authority: Authority) -> None:
    shown = []

    def serve(server: RawServer, connection: socket.socket) -> None:
        assert isinstance(connection, ssl.SSLSocket)
        shown.append((connection.getpeercert() or {})["serialNumber"])
        answering(OK)(server, connection)

    pair = authority.issue("client")
    client = make(ca_file=authority.file, client_certificate_file=pair.certificate, client_key_file=pair.key)
    with RawServer(serve, tls=authority.server(asks=True)) as server:
        ask(client, server.url)
        authority.issue("client")
        ask(client, server.url)
        assert len(shown) == 1
        client.close()
        ask(client, server.url)
        assert len(set(shown)) == 2


def test_a_rotated_authority_is_used_after_a_close(make: Make, authority: Authority, tmp_path: Path) -> None:
    client = make(ca_file=authority.file)
    old, new = authority.server(), Authority(tmp_path).server("new")
    with RawServer(answering(OK), tls=new) as server:
        assert ask(client, server.url).body == b"ok"
    client.close()
    with RawServer(answering(OK), tls=old) as server:
        assert type(failure(client, server.url)) is Misconfigured


# --- files that cannot be used ---


def test_a_file_that_is_missing_is_named(make: Make, authority: Authority, tmp_path: Path) -> None:
    missing, pair = tmp_path / "missing.pem", authority.issue("client")
    clients = [
        make(ca_file=missing),
        make(ca_file=authority.file, client_certificate_file=missing),
        make(ca_file=authority.file, client_certificate_file=pair.certificate, client_key_file=missing),
    ]
    with RawServer(answering(OK), tls=authority.server()) as server:
        for client in clients:
            error = failure(client, server.url)
            assert str(error).endswith(f'given "{missing}": No such file or directory')
            assert type(error) is Misconfigured


def test_an_authority_that_is_not_a_certificate_is_named(
    make: Make, authority: Authority, tmp_path: Path
) -> None:
    invalid = tmp_path / "invalid.pem"
    invalid.write_text("-----BEGIN CERTIFICATE-----\nsecret")
    with RawServer(answering(OK), tls=authority.server()) as server:
        error = failure(make(ca_file=invalid), server.url)
    assert str(error).endswith(f"{invalid}: expected CA certificates in PEM")
    assert type(error) is Misconfigured


@pytest.mark.parametrize("one_file", [False, True])
def test_an_encrypted_key_fails_without_a_prompt_for_its_passphrase(
    authority: Authority, one_file: bool
) -> None:
    pair = authority.issue("client", passphrase=PASSPHRASE)
    files = [pair.in_one_file(), None] if one_file else [pair.certificate, pair.key]
    script = (
        "import sys; from bridge.config.sinks import HttpSettings; from bridge.http.client import HttpClient\n"
        "from pathlib import Path; ca, certificate, key, url = sys.argv[1:]\n"
        "client = HttpClient(HttpSettings().model_copy(update=dict(ca_file=Path(ca),"
        " client_certificate_file=Path(certificate), client_key_file=Path(key) if key else None)))\n"
        "try: client.exchange('GET', url, {})\n"
        "except Exception as error: print(error)\n"
    )
    terminal, theirs = os.openpty()  # where OpenSSL would ask
    with RawServer(answering(OK), tls=authority.server(asks=True)) as server:
        result = subprocess.run(
            [sys.executable, "-c", script, authority.file, *(file or "" for file in files), server.url],
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
            start_new_session=True,
        )
    os.close(theirs)
    os.close(terminal)
    named = " and ".join(str(file) for file in files if file)
    assert result.stdout.endswith(f": {named}: {UNUSABLE}\n")
    assert result.stderr == ""


def test_files_that_can_be_used_pass_the_check(authority: Authority) -> None:
    pair = authority.issue("client")
    check_ca(authority.file)
    check_certificate(pair.certificate, pair.key)
    check_certificate(pair.in_one_file(), None)


def test_a_check_says_what_is_wrong_with_a_certificate(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("client"), authority.issue("other")
    locked = authority.issue("locked", passphrase=PASSPHRASE)
    missing = tmp_path / "missing"
    faults = [
        (pair.certificate, other.key, f"{other.key}: {UNUSABLE}"),
        (pair.certificate, None, f"{pair.certificate}: {UNUSABLE}"),
        (pair.key, pair.key, f"{pair.key}: {UNUSABLE}"),
        (locked.certificate, locked.key, f"{locked.key}: {UNUSABLE}"),
        (locked.in_one_file(), None, f"both.pem: {UNUSABLE}"),
        (missing, None, f'given "{missing}": No such file or directory'),
        (pair.certificate, missing, f'given "{missing}": No such file or directory'),
        (tmp_path, None, f'given "{tmp_path}": Is a directory'),
    ]
    for certificate, key, text in faults:
        with pytest.raises(ValueError, match=re.escape(text)):
            check_certificate(certificate, key)


def test_a_check_says_what_is_wrong_with_an_authority(authority: Authority, tmp_path: Path) -> None:
    key, empty = authority.issue("client").key, tmp_path / "empty"
    empty.touch()
    faults = [
        (key, f"{key}: expected CA certificates in PEM"),
        (empty, f"{empty}: expected CA certificates in PEM"),
        (tmp_path, f'given "{tmp_path}": Is a directory'),
        (tmp_path / "missing", f'given "{tmp_path}/missing": No such file or directory'),
    ]
    for path, text in faults:
        with pytest.raises(ValueError, match=re.escape(text)):
            check_ca(path)


# --- through a proxy ---


@pytest.mark.parametrize("proxy_tls", [False, True])
@pytest.mark.parametrize("target_tls", [False, True])
def test_a_proxy_carries_the_request_and_alone_sees_its_login(
    make: Make, authority: Authority, proxy_tls: bool, target_tls: bool
) -> None:
    tls = authority.server()
    with (
        RawServer(answering(OK), tls=tls if target_tls else None) as target,
        RawServer(proxying(login=LOGIN), tls=tls if proxy_tls else None) as proxy,
    ):
        client = make(ca_file=authority.file, proxy=with_login(proxy.url))
        assert [ask(client, target.url).body for _ in range(2)] == [b"ok"] * 2
        assert (proxy.connections, target.connections) == (1, 1)
        line = proxy.requests[0].split("\r\n")[0]
        assert target.requests[0].startswith("POST /secret-path?secret=query ")
    host = target.url.partition("://")[2]
    if target_tls:
        assert line.startswith(f"CONNECT {host} HTTP/1.")
        assert "secret" not in proxy.requests[0]
        assert "proxy-authorization" not in target.requests[0].lower()
    else:
        assert line == f"POST {target.url}/secret-path?secret=query HTTP/1.1"


def test_a_client_certificate_is_shown_through_a_proxy(make: Make, authority: Authority) -> None:
    pair = authority.issue("client")
    with RawServer(answering(OK), tls=authority.server(asks=True)) as target, RawServer(proxying()) as proxy:
        client = make(ca_file=authority.file, client_certificate_file=pair.in_one_file(), proxy=proxy.url)
        assert ask(client, target.url).body == b"ok"
        without = failure(make(ca_file=authority.file, proxy=proxy.url), target.url)
    assert "certificate required" in str(without)
    assert type(without) is Misconfigured


def test_a_target_behind_a_proxy_is_verified(make: Make, authority: Authority) -> None:
    tls = authority.server(host="other.example")
    with RawServer(answering(OK), tls=tls) as target, RawServer(proxying()) as proxy:
        error = failure(make(ca_file=authority.file, proxy=proxy.url), target.url)
    assert "certificate is not valid for '127.0.0.1'" in str(error)
    assert type(error) is Misconfigured


@pytest.mark.parametrize("target", ["http://127.0.0.1:9", "https://127.0.0.1:9"])
def test_a_proxy_with_tls_is_verified_before_it_gets_the_login(
    make: Make, authority: Authority, target: str
) -> None:
    with RawServer(proxying(), tls=authority.server()) as proxy:
        error = failure(make(proxy=with_login(proxy.url)), target)
        assert proxy.requests == []
    assert " through the proxy: TLS failed: " in str(error)
    assert type(error) is Misconfigured


@pytest.mark.parametrize("target", ["http://127.0.0.1:9", "https://127.0.0.1:9"])
@pytest.mark.parametrize("login", ["user:secret-but-wrong", ""])
def test_a_proxy_that_refuses_the_login_is_a_fault_of_the_settings(
    make: Make, target: str, login: str
) -> None:
    with RawServer(proxying(login=LOGIN)) as proxy:
        error = failure(make(proxy=with_login(proxy.url, login) if login else proxy.url), target)
    assert str(error).endswith(": the proxy refused the connection: 407")
    assert type(error) is Misconfigured


@pytest.mark.parametrize(
    ("answer", "text", "kind"),
    [
        (b"HTTP/1.1 403 secret\r\n\r\n", "the proxy refused the connection: 403", Misconfigured),
        (b"HTTP/1.1 502 407 secret\r\n\r\n", "the proxy refused the connection: 502", Unavailable),
        (b"HTTP/1.0 302 Found\r\nLocation: /\r\n\r\n", "the proxy refused the connection: 302", Unavailable),
        (
            b"SSH-2.0-secret\r\n",
            "through the proxy: the exchange was interrupted: BadStatusLine",
            Unavailable,
        ),
        (b"\x00" * 70_000, "through the proxy: the exchange was interrupted: LineTooLong", Unavailable),
        (b"HTTP/1.1 20", "through the proxy: the exchange was interrupted: BadStatusLine", Unavailable),
        (b"", "through the proxy: the exchange was interrupted: RemoteDisconnected", Unavailable),
        (b"HTTP/1.1 200 OK\r\nX: secr", "TLS failed: ", Unavailable),
        (ESTABLISHED, "TLS failed: ", Unavailable),
    ],
)
def test_the_failure_names_a_proxy_that_makes_no_tunnel(
    make: Make, answer: bytes, text: str, kind: type[DeliveryError]
) -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with RawServer(serve) as proxy:
        error = failure(make(proxy=with_login(proxy.url)), "https://127.0.0.1:9")
    assert text in str(error)
    assert type(error) is kind


@pytest.mark.parametrize(
    ("serve", "scheme"), [(silent, "http"), (silent, "https"), (dripping(ESTABLISHED, b""), "http")]
)
def test_a_proxy_that_says_nothing_is_aborted(
    make: Make, monkeypatch: pytest.MonkeyPatch, serve: Serve, scheme: str
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.2)
    with RawServer(serve) as proxy:
        url = with_login(proxy.url.replace("http", scheme))
        error = failure(make(proxy=url), "https://127.0.0.1:9")
    assert "through the proxy: " in str(error)
    assert type(error) is Unavailable


@pytest.mark.parametrize("target", ["http://127.0.0.1:9", "https://127.0.0.1:9"])
def test_a_proxy_that_is_not_there_is_a_fault_of_the_moment(make: Make, target: str) -> None:
    with RawServer(silent) as proxy:
        url = with_login(proxy.url)
    error = failure(make(proxy=url), target)
    assert str(error).endswith(" through the proxy: the connection failed: Connection refused")
    assert type(error) is Unavailable


def test_a_tunnel_that_the_proxy_closed_is_made_again(make: Make, authority: Authority) -> None:
    closing = OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
    with RawServer(answering(closing), tls=authority.server()) as target, RawServer(proxying()) as proxy:
        client = make(ca_file=authority.file, proxy=proxy.url)
        assert [ask(client, target.url).body for _ in range(3)] == [b"ok"] * 3
        assert proxy.connections == 3


@pytest.mark.parametrize(
    "url",
    [
        "proxy:3128",
        "socks5://user:secret@proxy:1080",
        "http://",
        "http://user:sec/ret@proxy",
        "http://user:secret@[::1",
        "http://user:secret%E2%82%AC@proxy",
    ],
)
def test_a_proxy_that_cannot_be_used_is_refused_and_not_shown(make: Make, url: str) -> None:
    with pytest.raises(ValueError, match="expected a proxy such as") as raised:
        make(proxy=url)
    assert "sec" not in str(raised.value)


# --- the clock ---


@pytest.mark.parametrize(
    ("date", "skew_seconds"),
    [
        ("Fri, 02 Jan 2026 03:04:05 GMT", 60),
        ("Fri, 02 Jan 2026 03:04:05 -0000", 60),
        ("Fri, 02 Jan 2026 03:06:05 GMT", -60),
        ("", None),
        ("soon", None),
        ("Fri, 99 Jan 2026 03:04:05 GMT", None),
    ],
)
def test_the_date_of_an_answer_shows_how_wrong_the_clock_is(date: str, skew_seconds: float | None) -> None:
    now = datetime(2026, 1, 2, 3, 5, 5, tzinfo=UTC).timestamp()
    assert clock_skew_seconds({"Date": date} if date else {}, now) == skew_seconds


def test_the_date_is_found_in_a_real_answer(make: Make) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    dated = OK.replace(b"OK\r\n", f"OK\r\ndate: {format_datetime(now, usegmt=True)}\r\n".encode())
    with RawServer(answering(dated)) as server:
        assert clock_skew_seconds(ask(make(), server.url).headers, now.timestamp()) == 0
