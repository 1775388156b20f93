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
from tests.support.tls import Authority, proxying
from tests.support.webhook import EVENT, MakeWebhook, failure

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


@pytest.fixture
def proxy() -> Iterator[RawServer]:
    with RawServer(proxying(login=LOGIN)) as started:
        yield started


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of the proxy's address."""
    return tmp_path / "proxy"


# Makes a sink that reaches `server`, or another URL, through the proxy in the file.
Proxied = Callable[..., WebhookSink]


@pytest.fixture
def proxied(webhook: MakeWebhook, authority: Authority, server: RawServer, file: Path) -> Proxied:
    def proxied(address: str, url: str = server.url) -> WebhookSink:
        file.write_text(address)
        return webhook(f"{url}/hook?sig=secret-query", ca_file=authority.file, proxy_file=file)

    return proxied


def with_login(url: str, login: str = LOGIN) -> str:
    return url.replace("://", f"://{login}@") + "\n"


def test_a_new_login_at_the_proxy_is_taken_at_the_reload(
    proxied: Proxied, server: RawServer, proxy: RawServer, file: Path
) -> None:
    target = proxied(with_login(proxy.url, "user:secret-wrong-one"))
    error = failure(target)
    assert type(error) is Misconfigured
    assert "proxy" in str(error)
    assert "secret" not in str(error)
    file.write_text(with_login(proxy.url))
    target.reload()
    target.send([EVENT])
    assert len(server.requests) == 1


def test_a_proxy_that_cannot_be_used_keeps_the_old_one_and_is_not_shown(
    proxied: Proxied, proxy: RawServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = proxied(with_login(proxy.url))
    caplog.set_level(logging.DEBUG, logger="bridge")
    for broken in ("", "socks5://secret:secret@127.0.0.1:1080"):
        file.write_text(broken)
        target.reload()
    file.unlink()
    target.reload()
    target.send([EVENT])
    assert len(proxy.requests) == 1
    assert caplog.text.count("keeping the previous value") == 3
    assert "secret" not in caplog.text.replace("a secret file cannot be used", "")


def test_an_unreachable_proxy_may_come_back_and_its_login_is_shown_nowhere(
    proxied: Proxied, server: RawServer, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as url, caplog.at_level(logging.DEBUG, logger="bridge"):
        target = proxied(with_login(url))
        error = failure(target)
        assert type(error) is Unavailable
        with pytest.raises(Unavailable) as raised:
            target.check()
    text = f"{error} {raised.value} {target.preview(EVENT)} {target._settings!r} {caplog.text}"
    assert "secret-password" not in text
    assert "secret-query" not in text
    assert server.requests == []


def test_what_a_receiver_repeats_of_the_proxys_login_is_not_shown(
    proxied: Proxied, authority: Authority
) -> None:
    content = b"user:secret-p%40ssw0rd user:secret-p@ssw0rd <secret-p@ssw0rd>"
    head = b"HTTP/1.1 500 Error\r\nContent-Length: %d\r\n\r\n" % len(content)
    with (
        RawServer(answering(head + content), tls=authority.server()) as server,
        RawServer(proxying(login="user:secret-p@ssw0rd")) as proxy,
    ):
        target = proxied(with_login(proxy.url, "user:secret-p%40ssw0rd"), server.url)
        assert str(failure(target)) == f"{server.url} answered 500: *** *** <***>"
