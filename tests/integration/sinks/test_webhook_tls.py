"""The webhook sink with a private authority, a client certificate and a proxy, and when these are rotated."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.errors import Misconfigured, Unavailable
from tests.support.delivery import running
from tests.support.process import RawServer, answering, closed_port
from tests.support.tls import Authority, Pair, proxying
from tests.support.webhook import EVENT, MakeWebhook, failure, sink

TAKEN = answering(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
LOGIN = "user:secret-password"


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "other")


def put(pair: Pair, certificate: Path, key: Path) -> None:
    shutil.copy(pair.certificate, certificate)
    shutil.copy(pair.key, key)


# --- the server ---


def test_a_rotated_authority_is_trusted_after_the_reload(
    webhook: MakeWebhook, authority: Authority, other: Authority, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.pem"
    shutil.copy(other.file, trusted)
    with RawServer(TAKEN, tls=authority.server()) as server:
        target = webhook(server.url, ca_file=trusted)
        assert type(failure(target)) is Misconfigured
        shutil.copy(authority.file, trusted)
        target.reload()
        target.send([EVENT])


# --- the client's certificate ---


def test_a_certificate_that_was_renewed_is_used_from_the_outbox_without_a_restart(
    webhook: MakeWebhook, authority: Authority, other: Authority, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "mine.pem", tmp_path / "mine.key.pem"
    put(other.issue("stranger"), certificate, key)
    with RawServer(TAKEN, tls=authority.server(asks=True)) as server:
        target = webhook(
            server.url,
            ca_file=authority.file,
            client_certificate_file=certificate,
            client_key_file=key,
        )
        assert type(failure(target)) is Misconfigured
        with running(tmp_path / "state", target, EVENT) as rig:
            put(authority.issue("renewed"), certificate, key)
            rig.finish()
            assert (len(server.requests), rig.dead()) == (1, [])


def test_files_that_are_half_written_lose_no_event_and_end_no_sink(
    webhook: MakeWebhook, authority: Authority, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "mine.pem", tmp_path / "mine.key.pem"
    put(authority.issue("first"), certificate, key)
    with RawServer(TAKEN, tls=authority.server(asks=True)) as server:
        target = webhook(
            server.url,
            ca_file=authority.file,
            client_certificate_file=certificate,
            client_key_file=key,
        )
        target.send([EVENT])
        renewed = authority.issue("second")
        shutil.copy(renewed.certificate, certificate)  # and the key is still the old one
        target.reload()
        error = failure(target)
        assert type(error) is Misconfigured
        assert "expected a certificate and its own private key in PEM" in str(error)
        key.unlink()
        target.reload()
        assert type(failure(target)) is Misconfigured
        shutil.copy(renewed.key, key)
        target.reload()
        target.send([EVENT])
        assert len(server.requests) == 2


# --- a proxy ---


class ProxiedSink:
    """A sink that reaches a server with TLS through the proxy in a file."""

    def __init__(self, folder: Path, authority: Authority, server: RawServer, address: str) -> None:
        self.file = folder / "proxy"
        self.set(address)
        url = f"{server.url}/hook?sig=secret-query"
        self.sink = sink(folder, url, ca_file=authority.file, proxy_file=self.file)

    def set(self, address: str) -> None:
        self.file.write_text(f"{address}\n")


def with_login(url: str, login: str = LOGIN) -> str:
    return url.replace("://", f"://{login}@")


@pytest.fixture
def server(authority: Authority) -> Iterator[RawServer]:
    with RawServer(TAKEN, tls=authority.server()) as started:
        yield started


@pytest.fixture
def proxy() -> Iterator[RawServer]:
    with RawServer(proxying(login=LOGIN)) as started:
        yield started


def test_each_sink_goes_through_its_own_proxy(
    webhook: MakeWebhook, authority: Authority, server: RawServer, proxy: RawServer, tmp_path: Path
) -> None:
    ProxiedSink(tmp_path, authority, server, with_login(proxy.url)).sink.send([EVENT])
    webhook(server.url, ca_file=authority.file).send([EVENT])
    assert (len(proxy.requests), len(server.requests)) == (1, 2)
    assert not [head for head in server.requests if "proxy-" in head.lower()]


def test_a_wrong_login_at_the_proxy_loses_no_event_and_the_new_one_is_taken_without_a_restart(
    authority: Authority, server: RawServer, proxy: RawServer, tmp_path: Path
) -> None:
    rig = ProxiedSink(tmp_path, authority, server, with_login(proxy.url, "user:secret-wrong-one"))
    error = failure(rig.sink)
    assert type(error) is Misconfigured
    assert "proxy" in str(error)
    assert "secret" not in str(error)
    with running(tmp_path / "state", rig.sink, EVENT) as delivery:
        rig.set(with_login(proxy.url))
        delivery.finish()
        assert (len(server.requests), delivery.dead()) == (1, [])


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "invalid-secret",
        "http://secret-user:secret@127.0.0.1:0",
        "http://s\N{EURO SIGN}cret:secret@127.0.0.1:8080",
        "http://secret:secret@[::1",
        "http://secret:secret@127.0.0.1:99999",
        "socks5://secret:secret@127.0.0.1:1080",
        None,
    ],
)
def test_a_proxy_that_cannot_be_used_keeps_the_old_one_and_is_not_shown(
    authority: Authority,
    proxy: RawServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    broken: str | None,
) -> None:
    with RawServer(TAKEN, tls=authority.server()) as server:
        rig = ProxiedSink(tmp_path, authority, server, with_login(proxy.url))
        rig.file.unlink()
        if broken is not None:
            rig.set(broken)
        with caplog.at_level(logging.DEBUG, logger="bridge"):
            rig.sink.reload()
        rig.sink.send([EVENT])
        assert (len(proxy.requests), len(server.requests)) == (1, 1)
    assert "keeping the previous value" in caplog.text
    assert "secret" not in caplog.text.replace("a secret file cannot be used", "")


def test_an_unreachable_proxy_may_come_back_and_its_login_is_shown_nowhere(
    authority: Authority, server: RawServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as url, caplog.at_level(logging.DEBUG, logger="bridge"):
        rig = ProxiedSink(tmp_path, authority, server, with_login(url))
        error = failure(rig.sink)
        assert type(error) is Unavailable
        with pytest.raises(Unavailable) as raised:
            rig.sink.check()
    text = f"{error} {raised.value} {rig.sink.preview(EVENT)} {rig.sink._settings!r} {caplog.text}"
    assert "secret-password" not in text
    assert "secret-query" not in text
    assert server.requests == []


def test_what_a_receiver_repeats_of_the_proxys_login_is_not_shown(
    authority: Authority, tmp_path: Path
) -> None:
    content = b"user:secret-p%40ssw0rd user:secret-p@ssw0rd <secret-p@ssw0rd>"
    head = b"HTTP/1.1 500 Error\r\nContent-Length: %d\r\n\r\n" % len(content)
    with (
        RawServer(answering(head + content), tls=authority.server()) as server,
        RawServer(proxying(login="user:secret-p@ssw0rd")) as proxy,
    ):
        rig = ProxiedSink(tmp_path, authority, server, with_login(proxy.url, "user:secret-p%40ssw0rd"))
        assert str(failure(rig.sink)) == f"{server.url} answered 500: *** *** <***>"
