"""The webhook sink with a client certificate or a proxy, when these are rotated."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge.errors import Misconfigured, Unavailable
from bridge.sinks.webhook import WebhookSink
from tests.support.process import RawServer, answering, closed_port
from tests.support.sinks import EVENT, MakeWebhook, failure
from tests.support.tls import Authority, proxying

TAKEN = answering(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
LOGIN = "user:secret-password"


def test_certificates_that_are_half_written_lose_no_event_and_end_no_sink(
    webhook: MakeWebhook, authority: Authority
) -> None:
    pair = authority.issue("mine")
    files = {"client_certificate_file": pair.certificate, "client_key_file": pair.key}
    with RawServer(TAKEN, tls=authority.server(asks=True)) as server:
        target = webhook(server.url, ca_file=authority.file, **files)
        target.send([EVENT])
        renewed = authority.issue("second")
        shutil.copy(renewed.certificate, pair.certificate)  # and the key is still the old one
        target.reload()
        error = failure(target)
        assert type(error) is Misconfigured
        assert "expected a certificate and its own private key in PEM" in str(error)
        pair.key.unlink()
        target.reload()
        assert type(failure(target)) is Misconfigured
        shutil.copy(renewed.key, pair.key)
        target.reload()
        target.send([EVENT])
        assert len(server.requests) == 2


# --- a proxy ---


@pytest.fixture
def server(authority: Authority) -> Iterator[RawServer]:
    with RawServer(TAKEN, tls=authority.server()) as started:
        yield started


# Makes a sink that reaches the server through the proxy whose address stands in a file.
Proxied = Callable[..., WebhookSink]


@pytest.fixture
def proxied(webhook: MakeWebhook, authority: Authority, server: RawServer, tmp_path: Path) -> Proxied:
    def proxied(address: str, login: str = LOGIN, to: RawServer = server) -> WebhookSink:
        (tmp_path / "proxy").write_text(with_login(address, login))
        files = {"ca_file": authority.file, "proxy_file": tmp_path / "proxy"}
        return webhook(f"{to.url}/hook?sig=secret-query", **files)

    return proxied


def with_login(url: str, login: str = LOGIN) -> str:
    return url.replace("://", f"://{login}@") + "\n"


def test_a_new_login_at_the_proxy_is_taken_at_the_reload_and_a_broken_one_keeps_the_old(
    proxied: Proxied, server: RawServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="bridge")
    file = tmp_path / "proxy"
    with RawServer(proxying(login=LOGIN)) as proxy:
        target = proxied(proxy.url, "user:secret-wrong-one")
        error = failure(target)
        assert (type(error), "proxy" in str(error)) == (Misconfigured, True)
        file.write_text(with_login(proxy.url))
        target.reload()
        target.send([EVENT])
        for broken in ("", "socks5://secret:secret@127.0.0.1:1080"):
            file.write_text(broken)
            target.reload()
        file.unlink()
        target.reload()
        target.send([EVENT])
    assert len(server.requests) == 2
    assert caplog.text.count("keeping the previous value") == 3
    assert "secret" not in f"{error}{caplog.text}".replace("a secret file cannot be used", "")


def test_an_unreachable_proxy_may_come_back_and_its_login_is_shown_nowhere(
    proxied: Proxied, server: RawServer, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as url, caplog.at_level(logging.DEBUG, logger="bridge"):
        target = proxied(url)
        error = failure(target)
        with pytest.raises(Unavailable) as raised:
            target.check()
    assert type(error) is Unavailable
    text = f"{error} {raised.value} {target.preview(EVENT)} {target._settings!r} {caplog.text}"
    assert not [secret for secret in ("secret-password", "secret-query") if secret in text]
    assert server.requests == []


def test_what_a_receiver_repeats_of_the_proxys_login_is_not_shown(
    proxied: Proxied, authority: Authority
) -> None:
    content = b"user:secret-p%40ssw0rd user:secret-p@ssw0rd <secret-p@ssw0rd>"
    answer = b"HTTP/1.1 500 Error\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    with (
        RawServer(answering(answer), tls=authority.server()) as server,
        RawServer(proxying(login="user:secret-p@ssw0rd")) as proxy,
    ):
        target = proxied(proxy.url, "user:secret-p%40ssw0rd", server)
        assert str(failure(target)) == f"{server.url} answered 500: *** *** <***>"
