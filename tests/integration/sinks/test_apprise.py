"""The sink for apprise with its own plugins for mail and JSON, against servers on this machine."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from socket import socket
from threading import current_thread
from typing import Any

import pytest

from bridge.config.loader import load
from bridge.errors import ConfigError, Misconfigured, Rejected, Unavailable
from bridge.process.parts import Parts, build_sinks, filter_of
from bridge.runtime import threads
from bridge.runtime.text import redact
from bridge.runtime.threads import start_thread
from bridge.sinks.base import Inconclusive, Sink
from tests.support.cli import Cli
from tests.support.inbox import Inbox
from tests.support.only import only
from tests.support.process import RawServer, closed_port, stored_event
from tests.support.settings import read_settings
from tests.support.sinks import failure

HOSTILE = "@everyone <!channel> [click](https://evil.example) *bold*"
EVENT = stored_event(
    1, EventStatus="Scheduled", EventSource="Platform", Resources=["web-0"], Description=HOSTILE
)

Make = Callable[..., Sink]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make sinks as the command does."""
    with ExitStack() as stack:

        def make(url: str, **settings: object) -> Sink:
            read = read_settings(tmp_path, kind="apprise", url=url, **settings)
            return stack.enter_context(closing(build_sinks({"ops": read})["ops"]))

        yield make


class MailServer(RawServer):
    """Takes mail without a login; `refuses` are the answers to the next recipients."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = list(refuses)
        self.mails: list[EmailMessage] = []
        super().__init__(lambda _, connection: self._talk(connection))

    def _talk(self, connection: socket) -> None:
        lines = connection.makefile("rb")
        connection.sendall(b"220 mail.example\r\n")
        for line in lines:
            word = line[:4].upper()
            answer = "250 yes"
            if word == b"RCPT" and self.refuses:
                answer = self.refuses.pop(0)
            elif word == b"DATA":
                connection.sendall(b"354 go on\r\n")
                text = b"".join(iter(lines.readline, b".\r\n"))
                mail = message_from_bytes(text, policy=policy.default)
                assert isinstance(mail, EmailMessage)
                self.mails.append(mail)
            elif word == b"QUIT":
                return
            connection.sendall(f"{answer}\r\n".encode())


def test_a_mail_has_the_title_and_the_sentences_and_is_sent_again_after_a_refusal(make: Make) -> None:
    with MailServer("451 later") as server:
        sink = make(f"mailto://127.0.0.1:{server.port}?from=vm@example.org&to=ops@example.org&mode=insecure")
        assert type(failure(sink, EVENT)) is Unavailable
        sink.send([EVENT])
        mail = only(server.mails)
    shown = sink.preview(EVENT)
    assert mail["to"] == "ops@example.org"
    assert f"title: {mail['subject']}" == shown.head[0]
    assert "Reboot of web-0" in mail["subject"]
    body = mail.get_body(("plain",))
    assert body is not None
    assert "A restart: memory is lost, disks are kept." in body.get_content()


def test_text_from_outside_cannot_mention_anyone_and_the_console_is_linked(
    any_inbox: Inbox, tmp_path: Path
) -> None:
    settings = read_settings(tmp_path, kind="apprise", url=any_inbox.url.replace("http", "json"))
    sink = build_sinks({"ops": settings.linked("https://console.example")})["ops"]
    sink.send([EVENT])
    sent = any_inbox.accepted[0].json()
    assert sent["title"].startswith("🟧 Reboot of web-0")
    assert "everyone" in sent["message"]
    for active in ("@everyone", "<!channel>", "[click]", "https://evil", "*bold*"):
        assert active not in f"{sent['title']}{sent['message']}"
    assert sent["message"].endswith(f"\nhttps://console.example/event/{EVENT.data['EventId']}".lower())


def test_what_apprise_says_of_a_failure_is_in_the_error(
    make: Make, any_inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sink = make(any_inbox.url.replace("http://", "json://user:secret-password@"))
    for status, kind in ((500, Unavailable), (401, Misconfigured), (404, Misconfigured)):
        any_inbox.fault(status)
        error = failure(sink, EVENT)
        assert (type(error), f"error={status}" in str(error)) == (kind, True)
    with closed_port() as url, pytest.raises(Unavailable, match="A Connection error occurred sending JSON"):
        make(url.replace("http", "json")).send([EVENT])
    with pytest.raises(Inconclusive):
        sink.check()
    assert len(any_inbox.received) == 3
    assert "secret-password" not in redact(caplog.text)


def test_no_part_of_an_url_is_shown(make: Make) -> None:
    make("tgram://123456789:AAEhBOweik6ad9r_QXMENQjcrGbqCr4K-bc/-1001234567890")
    assert redact("to AAEhBOweik6ad9r_QXMENQjcrGbqCr4K-bc") == "to ***"


@pytest.mark.parametrize("url", ["nonsense://x", "https://example.org/hook", "json://", "json://a json://b"])
def test_what_is_no_single_url_of_apprise_is_refused_at_the_start(make: Make, url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"sinks\.ops: url: expected one URL of a service that apprise knows"
    ):
        make(url)


def test_without_its_package_the_error_names_the_extra(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ConfigError, match=r"install imds-bridge\[apprise\]"):
        make("json://127.0.0.1")


def test_like_a_chat_it_gets_notices_of_this_vm_of_the_last_hour(tmp_path: Path) -> None:
    settings = read_settings(tmp_path, kind="apprise", url="json://127.0.0.1")
    own, other = (
        stored_event(1, AffectsThisVm=True, Resources=["web-0"], Vm={"Name": f"web-{number}"})
        for number in (0, 1)
    )
    heartbeat = stored_event(2, type_="io.imdsbridge.bridge.heartbeat.v1")
    assert [filter_of(settings).matches(one) for one in (own, other, heartbeat)] == [True, False, False]
    assert (settings.max_age_seconds, settings.max_per_second) == (3600, 1)


@pytest.mark.parametrize(
    "url", ["ntfy://host/one/two", "mailtos://u:p@example.org?to=a@example.org,b@example.org"]
)
def test_several_targets_are_refused_by_both_checks_and_a_process_warns(
    cli: Cli, caplog: pytest.LogCaptureFixture, url: str
) -> None:
    cli.sinks(ops={"kind": "apprise", "url": url})
    refusal = "url: given 2 targets, expected one: use a sink for each"
    done = cli._call("config", "check", str(cli.config))
    assert (done.code, f"sinks.ops: {refusal}" in done.err) == (2, True)
    assert cli.check().row(check="sink ops", result="FAIL")["message"].startswith(refusal)
    parts = Parts(load(cli.config, {}), "forward")
    with closing(parts.outbox):
        assert [one.name for one in parts.dispatchers()] == ["ops"]
    assert f"sinks.ops: {refusal}" in caplog.text


def test_a_target_that_apprise_tries_again_is_one(make: Make) -> None:
    assert make("json://127.0.0.1:9/x?retry=2").outdated == ""
    assert "given 2 targets" in make("ntfy://127.0.0.1:9/a/b?retry=1").outdated


def test_an_event_for_several_targets_is_tried_once_and_becomes_a_dead_letter(make: Make) -> None:
    with MailServer("250 yes", "451 later") as server:
        sink = make(f"mailto://127.0.0.1:{server.port}?from=vm@example.org&to=a@b.org,c@b.org&mode=insecure")
        error = failure(sink, EVENT)
        assert [mail["to"] for mail in server.mails] == ["a@b.org"]
    assert type(error) is Rejected
    assert "expected one: use a sink for each" in str(error)


def test_a_redirect_is_not_followed_with_the_secrets_of_the_headers(make: Make, any_inbox: Inbox) -> None:
    for more in ("", "&redirect=yes"):
        any_inbox.fault(307)
        url = any_inbox.url.replace("http://", "json://user:secret-password@")
        assert type(failure(make(f"{url}?+X-Key=top-secret{more}"), EVENT)) is Misconfigured
    assert len(any_inbox.received) == 2
    assert "/redirected" not in [one.path for one in any_inbox.received]


def hang(server: RawServer, _: socket) -> None:
    server.ended.wait(60)


def test_many_targets_that_hang_are_progress_for_the_watchdog(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apprise.plugins.ntfy.NotifyNtfy.request_rate_per_sec", 0)
    with RawServer(hang) as server:
        targets = "/".join(f"t{number}" for number in range(20))
        sink = make(f"ntfy://127.0.0.1:{server.port}/{targets}?rto=0.1")
        deadlines: list[float] = []

        def send() -> None:
            threads.report_progress()
            thread: Any = current_thread()
            deadlines.append(thread.deadline - time.monotonic())
            with pytest.raises(Rejected):
                sink.send([EVENT])
            deadlines.append(thread.deadline - time.monotonic())

        start_thread("ops", send).join(60)
    assert deadlines[0] < 61
    assert deadlines[1] > 20 * 8


@pytest.mark.parametrize(
    "url", ["json://user:pa@ss-word@127.0.0.1/x", "json://user:pa@ss-word@127.0.0.1?a=b"]
)
def test_a_second_at_sign_before_the_path_is_refused_and_no_part_of_the_user_is_shown(
    make: Make, url: str
) -> None:
    with pytest.raises(ConfigError, match="write %40 for an @ of a user or a password") as raised:
        make(url)
    assert "ss-word" not in str(raised.value)
    assert redact("cannot reach ss-word@127.0.0.1") == "cannot reach ***@127.0.0.1"


@pytest.mark.parametrize(
    "url",
    [
        "mailtos://user:password@example.org?to=ops@example.org",
        "mailtos://user:pass%40word@example.org?to=ops@example.org",
        "slack://bot@T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#channel",
        "mastodon://token-of-letters@example.org/@user",
    ],
)
def test_an_at_sign_behind_the_host_and_an_encoded_one_are_right(make: Make, url: str) -> None:
    make(url)


def test_neither_the_user_nor_the_password_is_shown(make: Make) -> None:
    make("json://the-user:the%21password@127.0.0.1")
    assert redact("the-user, the%21password and the!password") == "***, *** and ***"
