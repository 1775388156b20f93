"""TLS with a private authority, client certificates, proxies, and how each of them fails."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bridge.config.values import UNTRUSTED, check_ca, check_certificate
from bridge.errors import DeliveryError, Misconfigured, Unavailable
from bridge.http import client as module
from tests.support.http_client import OK, MakeClient, ask, failure, http_client
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, RawServer, Serve, answering, dripping, silent
from tests.support.tls import ESTABLISHED, PASSPHRASE, Authority, Pair, proxying

LOGIN = "user:secret-password"
UNUSABLE = "expected a certificate and its own private key in PEM, without passphrase"
NOWHERE = ("http://127.0.0.1:9", "https://127.0.0.1:9")


def with_login(url: str, login: str = LOGIN) -> str:
    return url.replace("://", f"://{login}@")


def files(pair: Pair) -> dict[str, Any]:
    """Return the settings of a client certificate."""
    return {"client_certificate_file": pair.certificate, "client_key_file": pair.key}


# --- whom the client trusts ---


@pytest.mark.parametrize(
    ("server", "ca", "text"),
    [
        ({}, None, UNTRUSTED),
        ({}, "other.pem", UNTRUSTED),
        ({"host": "other.example"}, "ca.pem", "certificate is not valid for '127.0.0.1'"),
        ({"days": -1}, "ca.pem", "TLS failed: certificate has expired"),
    ],
    ids=str,
)
def test_what_the_private_authority_has_not_certified_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, server: dict[str, Any], ca: str | None, text: str
) -> None:
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.setenv(name, str(authority.file))
    Authority(authority.folder, "other")
    ca_file = authority.folder / ca if ca else None
    with RawServer(answering(OK), tls=authority.server(**server)) as target, RawServer(proxying()) as proxy:
        for through in ("", proxy.url):
            with closing(http_client(ca_file=ca_file, proxy=through)) as client:
                error = failure(Misconfigured, client, target.url)
            assert "TLS failed: " in error
            assert text in error
        assert target.requests == []


def test_a_server_that_speaks_no_tls_or_leaves_while_it_begins(
    make_client: MakeClient, authority: Authority
) -> None:
    def leave(_: RawServer, connection: socket.socket) -> None:
        connection.recv(65536)

    with RawServer(lambda _, connection: connection.sendall(OK)) as server:
        url = server.url.replace("http", "https")
        error = failure(Misconfigured, make_client(ca_file=authority.file), url)
    assert error.endswith(": TLS failed: wrong version number")
    with RawServer(leave) as server:
        failure(Unavailable, make_client(ca_file=authority.file), server.url.replace("http", "https"))


@pytest.mark.parametrize("when", ["handshake", "request"])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_receiver_has_not_got_what_was_not_sent_because_tls_did_not_begin(
    make_client: MakeClient,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    hangs: bool,
) -> None:
    seconds = 0.5 if hangs else LIMIT_SECONDS
    monkeypatch.setattr(module, "CONNECT_SECONDS", seconds if when == "handshake" else LIMIT_SECONDS)

    def end(server: RawServer, connection: socket.socket) -> None:
        if when == "request":
            server.read_head(connection)
        else:
            connection.recv(65536)
        if hangs:
            silent(server, connection)

    with RawServer(end, tls=authority.server() if when == "request" else None) as server:
        client = make_client(ca_file=authority.file, timeout_seconds=seconds)
        with pytest.raises(Unavailable) as raised:
            ask(client, re.sub("^https?", "https", server.url), body=b"{}")
    assert raised.value.is_unreached is (when == "handshake")
    missing = "connection" if when == "handshake" else "answer"
    assert (f": no {missing} within 0.5 s" in str(raised.value)) is hangs


# --- client certificates ---


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_with_its_certificate_is_let_in(
    make_client: MakeClient, authority: Authority, newest: ssl.TLSVersion
) -> None:
    pair = authority.issue("client")
    tls = authority.server(asks=True, newest=newest)
    with RawServer(answering(OK), tls=tls) as server, RawServer(proxying()) as proxy:
        for given in (
            files(pair),
            {"client_certificate_file": pair.in_one_file()},
            {**files(pair), "proxy": proxy.url},
        ):
            assert ask(make_client(ca_file=authority.file, **given), server.url).body == b"ok"
        without = failure(Misconfigured, make_client(ca_file=authority.file, proxy=proxy.url), server.url)
    assert "certificate required" in without or "handshake failure" in without


@pytest.mark.parametrize(
    ("newest", "certificate", "text"),
    [
        (ssl.TLSVersion.TLSv1_2, "none", "handshake failure"),
        (ssl.TLSVersion.TLSv1_3, "none", "certificate required"),
        (ssl.TLSVersion.TLSv1_3, "of another authority", "unknown ca"),
        (ssl.TLSVersion.TLSv1_3, "expired", "certificate expired"),
    ],
)
def test_a_client_whose_certificate_is_missing_or_refused_learns_why(
    make_client: MakeClient, authority: Authority, newest: ssl.TLSVersion, certificate: str, text: str
) -> None:
    issuer = Authority(authority.folder, "other") if certificate == "of another authority" else authority
    pair = issuer.issue("client", days=-1 if certificate == "expired" else 1)
    client = make_client(ca_file=authority.file, **(files(pair) if certificate != "none" else {}))
    with RawServer(answering(OK), tls=authority.server(asks=True, newest=newest)) as server:
        for body in (None, bytes(1_000_000)):
            error = failure(Misconfigured, client, server.url, body=body)
            assert error.endswith(f"TLS failed: the server refused: {text}")
        assert server.requests == []


def test_rotated_files_are_used_after_a_close(make_client: MakeClient, authority: Authority) -> None:
    shown = []

    def serve(server: RawServer, connection: socket.socket) -> None:
        assert isinstance(connection, ssl.SSLSocket)
        shown.append((connection.getpeercert() or {})["serialNumber"])
        answering(OK)(server, connection)

    client = make_client(ca_file=authority.file, **files(authority.issue("client")))
    with RawServer(serve, tls=authority.server(asks=True)) as server:
        ask(client, server.url)
        authority.issue("client")
        ask(client, server.url)
        assert len(shown) == 1
        client.close()
        ask(client, server.url)
        assert len(set(shown)) == 2
        Authority(authority.folder)  # in the file of the old one
        client.close()
        failure(Misconfigured, client, server.url)


# --- files that cannot be used ---


def test_a_file_that_cannot_be_used_is_named(
    make_client: MakeClient, authority: Authority, tmp_path: Path
) -> None:
    missing, invalid, pair = tmp_path / "missing.pem", tmp_path / "invalid.pem", authority.issue("client")
    invalid.write_text("-----BEGIN CERTIFICATE-----\nsecret")
    not_there = f'given "{missing}": No such file or directory'
    with RawServer(answering(OK), tls=authority.server()) as server:
        for given, text in (
            ({"ca_file": missing}, not_there),
            ({"ca_file": invalid}, f"{invalid}: expected CA certificates in PEM"),
            ({"client_certificate_file": missing}, not_there),
            ({**files(pair), "client_key_file": missing}, not_there),
        ):
            client = make_client(**{"ca_file": authority.file, **given})
            assert failure(Misconfigured, client, server.url).endswith(text)


def test_an_encrypted_key_fails_without_a_prompt_for_its_passphrase(authority: Authority) -> None:
    file = authority.issue("client", passphrase=PASSPHRASE).in_one_file()
    script = """
import sys
from pathlib import Path
from tests.support.http_client import http_client
client = http_client(ca_file=Path(sys.argv[1]), client_certificate_file=Path(sys.argv[2]))
try:
    client.exchange("GET", sys.argv[3], {})
except Exception as error:
    print(error)
"""
    terminal, theirs = os.openpty()  # where OpenSSL would ask
    with RawServer(answering(OK), tls=authority.server(asks=True)) as server:
        result = subprocess.run(
            [sys.executable, "-c", script, authority.file, file, server.url],
            cwd=ROOT,
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
            start_new_session=True,
        )
    os.close(theirs)
    os.close(terminal)
    assert result.stdout.endswith(f": {file}: {UNUSABLE}\n")
    assert result.stderr == ""


def test_a_check_says_what_is_wrong_with_a_file(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("client"), authority.issue("other")
    locked = authority.issue("locked", passphrase=PASSPHRASE)
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.touch()
    not_there, folder = f'given "{missing}": No such file or directory', f'given "{tmp_path}": Is a directory'
    check_certificate(pair.certificate, pair.key)
    check_certificate(pair.in_one_file(), None)
    check_ca(authority.file)
    for certificate, key, text in (
        (pair.certificate, other.key, f"{other.key}: {UNUSABLE}"),
        (pair.certificate, None, f"{pair.certificate}: {UNUSABLE}"),
        (pair.key, pair.key, f"{pair.key}: {UNUSABLE}"),
        (locked.certificate, locked.key, f"{locked.key}: {UNUSABLE}"),
        (locked.in_one_file(), None, f"both.pem: {UNUSABLE}"),
        (missing, None, not_there),
        (pair.certificate, missing, not_there),
        (tmp_path, None, folder),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            check_certificate(certificate, key)
    expected = "expected CA certificates in PEM"
    for path, text in (
        (pair.key, f"{pair.key}: {expected}"),
        (empty, f"{empty}: {expected}"),
        (tmp_path, folder),
        (missing, not_there),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            check_ca(path)


# --- through a proxy ---


@pytest.mark.parametrize("proxy_tls", [False, True])
@pytest.mark.parametrize("target_tls", [False, True])
def test_a_proxy_carries_the_request_and_alone_sees_its_login(
    make_client: MakeClient, authority: Authority, proxy_tls: bool, target_tls: bool
) -> None:
    tls = authority.server()
    with (
        RawServer(answering(OK), tls=tls if target_tls else None) as target,
        RawServer(proxying(login=LOGIN), tls=tls if proxy_tls else None) as proxy,
    ):
        client = make_client(ca_file=authority.file, proxy=with_login(proxy.url))
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


@pytest.mark.parametrize("target", NOWHERE)
def test_a_proxy_with_tls_is_verified_before_it_gets_the_login(
    make_client: MakeClient, authority: Authority, target: str
) -> None:
    with RawServer(proxying(), tls=authority.server()) as proxy:
        error = failure(Misconfigured, make_client(proxy=with_login(proxy.url)), target)
        assert proxy.requests == []
    assert " through the proxy: TLS failed: " in error


@pytest.mark.parametrize("target", NOWHERE)
def test_a_proxy_that_refuses_the_login_or_is_not_there(make_client: MakeClient, target: str) -> None:
    with RawServer(proxying(login=LOGIN)) as proxy:
        for url in (with_login(proxy.url, "user:secret-but-wrong"), proxy.url):
            error = failure(Misconfigured, make_client(proxy=url), target)
            assert error.endswith(": the proxy refused the connection: 407")
    error = failure(Unavailable, make_client(proxy=with_login(proxy.url)), target)
    assert error.endswith(" through the proxy: the connection failed: Connection refused")


INTERRUPTED = "through the proxy: the exchange was interrupted: "


@pytest.mark.parametrize(
    ("answer", "text", "kind"),
    [
        (b"HTTP/1.1 403 secret\r\n\r\n", "the proxy refused the connection: 403", Misconfigured),
        (b"HTTP/1.1 502 407 secret\r\n\r\n", "the proxy refused the connection: 502", Unavailable),
        (b"HTTP/1.0 302 Found\r\nLocation: /\r\n\r\n", "the proxy refused the connection: 302", Unavailable),
        (b"SSH-2.0-secret\r\n", f"{INTERRUPTED}BadStatusLine", Unavailable),
        (b"\x00" * 70_000, f"{INTERRUPTED}LineTooLong", Unavailable),
        (b"HTTP/1.1 20", f"{INTERRUPTED}BadStatusLine", Unavailable),
        (b"", f"{INTERRUPTED}RemoteDisconnected", Unavailable),
        (b"HTTP/1.1 200 OK\r\nX: secr", "TLS failed: ", Unavailable),
        (ESTABLISHED, "TLS failed: ", Unavailable),
    ],
)
def test_the_failure_names_a_proxy_that_makes_no_tunnel(
    make_client: MakeClient, answer: bytes, text: str, kind: type[DeliveryError]
) -> None:
    def serve(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with RawServer(serve) as proxy:
        assert text in failure(kind, make_client(proxy=with_login(proxy.url)), "https://127.0.0.1:9")


@pytest.mark.parametrize(
    ("serve", "scheme"), [(silent, "http"), (silent, "https"), (dripping(ESTABLISHED, b""), "http")]
)
def test_a_proxy_that_says_nothing_is_aborted(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, serve: Serve, scheme: str
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.2)
    with RawServer(serve) as proxy:
        client = make_client(proxy=with_login(proxy.url.replace("http", scheme)))
        assert "through the proxy: " in failure(Unavailable, client, "https://127.0.0.1:9")


def test_a_tunnel_that_the_proxy_closed_is_made_again(make_client: MakeClient, authority: Authority) -> None:
    last = OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
    with RawServer(answering(last), tls=authority.server()) as target, RawServer(proxying()) as proxy:
        client = make_client(ca_file=authority.file, proxy=proxy.url)
        assert [ask(client, target.url).body for _ in range(3)] == [b"ok"] * 3
        assert proxy.connections == 3
