"""The webhook sink: what it sends, alone and in batches, whose signature it has, and that it shows no secret."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from svix.webhooks import Webhook, WebhookVerificationError

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import MAX_BATCH_EVENTS
from bridge.formats.samples import samples
from bridge.formats.slack import Slack
from bridge.http.client import USER_AGENT
from bridge.lab.httpd import Answer, HttpRequest
from bridge.sinks.base import Inconclusive
from bridge.sinks.webhook import WebhookSink
from tests.support.clock import MovedClock
from tests.support.inbox import Inbox
from tests.support.only import only
from tests.support.process import RawServer, answering, closed_port, stored_event
from tests.support.receivers import ROUTING_KEY
from tests.support.sinks import EVENT, FORMS, MakeWebhook, failure
from tests.support.tls import Authority, forwarding, proxying

TOKEN = "secret-token"  # noqa: S105 - a test's
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the vector of the standard
NEXT = "whsec_" + "QUJD" * 8
SIGNING_SECRETS = [secret.removeprefix("whsec_") for secret in (SECRET, NEXT)]


def is_signed_by(secret: str, received: HttpRequest) -> bool:
    """Return whether a receiver that knows only `secret` believes the message, by a library that is not ours."""
    try:
        Webhook(secret).verify(received.body, dict(received.headers))
    except WebhookVerificationError:
        return False
    return True


def signers(received: HttpRequest) -> list[str]:
    return [secret for secret in (SECRET, NEXT) if is_signed_by(secret, received)]


# --- what it sends ---


BATCH = [stored_event(number, Description='100% "quoted" \ud800 €') for number in range(3)]


@pytest.mark.parametrize(("mode", "events"), [("structured", [EVENT]), ("batch", BATCH)])
def test_events_alone_or_in_a_list_are_the_stored_ones_byte_by_byte(
    inbox: Inbox, webhook: MakeWebhook, mode: str, events: list[StoredEvent]
) -> None:
    webhook(mode=mode).send(events)
    one, is_list = only(inbox.accepted), mode == "batch"
    whole = b",".join(event.body for event in events)
    assert one.body == (b"[" + whole + b"]" if is_list else whole)
    form = "cloudevents-batch" if is_list else "cloudevents"
    assert one.headers["content-type"] == f"application/{form}+json; charset=utf-8"
    assert one.headers["user-agent"] == USER_AGENT
    assert one.headers["webhook-request-origin"]
    assert "webhook-signature" not in one.headers
    assert (inbox.events(), inbox.problems) == ([event.envelope for event in events], [])


def test_a_binary_event_has_its_attributes_in_headers(inbox: Inbox, webhook: MakeWebhook) -> None:
    event = stored_event(2)
    webhook(mode="binary").send([event])
    one = only(inbox.accepted)
    assert inbox.events() == [event.envelope]
    assert one.headers["content-type"] == "application/json"
    assert "ce-datacontenttype" not in one.headers
    assert json.loads(one.body) == event.envelope["data"]
    assert one.headers["ce-id"] == event.id


def test_headers_can_be_a_table_and_replace_those_of_the_sink(inbox: Inbox, webhook: MakeWebhook) -> None:
    webhook(headers={"X-Api-Key": "abc", "User-Agent": "ours"}).send([EVENT])
    one = only(inbox.accepted)
    assert (one.headers["x-api-key"], one.headers["user-agent"]) == ("abc", "ours")


class JsonOnly(Inbox):
    """Takes application/json alone, as Fluent Bit does."""

    def _answer(self, request: HttpRequest) -> Answer:
        is_json = request.headers["content-type"] == "application/json"
        return super()._answer(request) if is_json else Answer(status=400)


@pytest.mark.parametrize("mode", ["structured", "batch"])
def test_a_receiver_that_takes_only_json_gets_its_content_type(webhook: MakeWebhook, mode: str) -> None:
    with JsonOnly() as receiver:
        assert type(failure(webhook(receiver.url, mode=mode))) is Rejected
        target = webhook(receiver.url, mode=mode, content_type="application/json")
        target.send([EVENT])
        one = only(receiver.accepted)
        assert "Content-Type: application/json" in target.preview(EVENT).head
    assert one.body == (EVENT.body if mode == "structured" else b"[" + EVENT.body + b"]")


# --- batches ---


def ids(events: Sequence[StoredEvent]) -> list[str]:
    return [event.id for event in events]


def arrived(inbox: Inbox) -> list[str]:
    return [event["id"] for event in inbox.events()]


def sizes(inbox: Inbox) -> list[int]:
    """Return how many events each request held, refused ones too."""
    return [len(json.loads(one.body)) for one in inbox.received]


def test_only_batch_mode_takes_several_events_at_once(webhook: MakeWebhook) -> None:
    forms: list[dict[str, Any]] = [{"mode": "batch"}, {"mode": "structured"}, {"format": "slack"}]
    assert [webhook(**form).max_batch for form in forms] == [MAX_BATCH_EVENTS, 1, 1]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_batch_that_is_refused_as_a_whole_goes_in_halves_each_with_its_own_signature(
    inbox: Inbox, webhook: MakeWebhook, status: int
) -> None:
    events = [stored_event(number) for number in range(5)]
    inbox.fault(status)
    webhook(mode="batch", signing_secret=SECRET).send(events)
    assert sizes(inbox) == [5, 2, 3]
    assert arrived(inbox) == ids(events)
    assert [signers(one) for one in inbox.received] == [[SECRET]] * 3
    assert len({one.headers["webhook-id"] for one in inbox.received}) == 3


@pytest.mark.parametrize(
    ("status", "kind"), [(503, Unavailable), (429, Unavailable), (401, Misconfigured), (410, Gone)]
)
def test_a_receiver_that_fails_half_way_has_what_it_took_before(
    inbox: Inbox, webhook: MakeWebhook, status: int, kind: type[DeliveryError]
) -> None:
    events = [stored_event(number) for number in range(8)]
    target = webhook(mode="batch")
    inbox.fault(400)  # the eight
    inbox.fault("slow", seconds=0.001)  # the first four are taken
    inbox.fault(status, retry_after=7)
    error = failure(target, *events)
    assert (type(error), error.status, error.delivered) == (kind, status, 4)
    assert error.retry_after_seconds == 7
    target.send(events[error.delivered :])
    assert arrived(inbox) == ids(events)


# --- signatures ---


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_arrives_is_verified_by_an_independent_library(
    any_inbox: Inbox, webhook: MakeWebhook, form: dict[str, Any]
) -> None:
    event = next(iter(samples(datetime.now(UTC))))
    webhook(any_inbox.url, **form, signing_secret=SECRET).send([event])
    one = only(any_inbox.accepted)
    assert signers(one) == [SECRET]
    assert one.headers["webhook-id"] == event.id


@pytest.mark.parametrize("file", [False, True])
def test_while_rotating_receivers_with_either_secret_believe_it(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path, file: bool
) -> None:
    given: dict[str, Any] = {"signing_secrets": [SECRET, NEXT]}
    if file:
        (tmp_path / "secrets").write_text(f"{SECRET}\n\n{NEXT}\n")
        given = {"signing_secrets_file": tmp_path / "secrets"}
    webhook(**given).send([EVENT])
    one = only(inbox.accepted)
    assert signers(one) == [SECRET, NEXT]


@pytest.mark.parametrize("mode", ["structured", "binary", "batch"])
def test_a_retry_has_the_same_id_and_body_and_its_own_timestamp(
    inbox: Inbox, webhook: MakeWebhook, mode: str
) -> None:
    clock = MovedClock()
    target = webhook(mode=mode, signing_secret=SECRET, clock=clock)
    events = [stored_event(number) for number in range(target.max_batch // 25 or 1)]
    inbox.fault(503, count=2)
    for _ in range(2):
        assert type(failure(target, *events)) is Unavailable
        clock.advance(600)
    target.send(events)
    tries = inbox.received
    assert len({(one.headers["webhook-id"], one.body) for one in tries}) == 1
    stamps = [int(one.headers["webhook-timestamp"]) for one in tries]
    assert stamps == [int(clock.wall()) - 1200, int(clock.wall()) - 600, int(clock.wall())]
    assert len({one.headers["webhook-signature"] for one in tries}) == 3


def test_the_id_of_a_batch_depends_on_its_events_in_their_order_alone(
    inbox: Inbox, webhook: MakeWebhook
) -> None:
    first, second, third = (stored_event(number) for number in range(3))
    alike = [[replace(first, id=given) for given in ids] for ids in (("a:b", "c"), ("a", "b:c"))]
    batches = [[first], [second], [first, second], [second, first], [first, second, third], *alike]
    for _ in range(2):  # as a process that was restarted
        target = webhook(mode="batch", signing_secret=SECRET)
        for events in batches:
            target.send(events)
    found = [one.headers["webhook-id"] for one in inbox.accepted]
    assert found[:2] == [first.id, second.id]
    assert found[: len(batches)] == found[len(batches) :]
    assert len(set(found)) == len(batches)
    assert all("." not in given for given in found)


# --- secrets ---


# For each secret with a file: two that can be used, what cannot be used, and how a request shows the one in use.
ROTATED: dict[str, tuple[str, str, list[str], Callable[[HttpRequest], Any]]] = {
    "bearer_token": ("one", "two", ["qux quux", "tökén"], lambda one: one.headers["authorization"][7:]),
    "headers": (
        "# for the gateway\nX-Env: lab\n\nX-Key: one: 1",
        "X-Key: two",
        ["xyzzy"],
        lambda one: f"X-Key: {one.headers['x-key']}",
    ),
    "signing_secret": (
        *(SECRET, NEXT),
        ["whsec_c2hvcnQ=", f"{NEXT}\nno-base64!"],
        lambda one: "".join(signers(one)),
    ),
    "routing_key": ("0" * 32, "1" * 32, ["qux quux"], lambda one: one.json()["routing_key"]),
    "url": (
        "INBOX/one?key=abc",
        "INBOX/two?",
        ["http://192.0.2.1/in-the-clear"],
        lambda one: f"INBOX{one.path}?{one.query}",
    ),
}


@pytest.mark.parametrize("setting", ROTATED)
def test_a_rotated_secret_is_taken_at_the_reload_and_one_that_is_broken_or_lost_keeps_the_old(
    any_inbox: Inbox, webhook: MakeWebhook, tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    first, second, broken, shown = ROTATED[setting]
    old, new = (text.splitlines()[-1] for text in (first, second))
    file = tmp_path / "secret"

    def write(text: str) -> None:
        file.write_text(text.replace("INBOX", any_inbox.base_url) + "\n", encoding="latin-1")

    write(first)
    format_ = {"format": "pagerduty"} if setting == "routing_key" else {}
    target = webhook(any_inbox.url, **{f"{setting}_file": file}, **format_)
    target.send([EVENT])
    write(second)
    target.send([EVENT])
    target.reload()
    target.send([EVENT])
    with caplog.at_level(logging.DEBUG):
        for text in ("", "\xff", *broken):
            write(text)
            target.reload()
        file.unlink()
        target.reload()
    target.send([EVENT])
    assert [shown(one) for one in any_inbox.accepted] == [old, old, new, new]
    assert caplog.text.count("keeping the previous value") == len(broken) + 3
    words = [word.removeprefix("whsec_") for text in broken for word in text.split()]
    assert not [word for word in words if word in caplog.text]


def test_what_a_receiver_repeats_of_our_secrets_is_not_shown(
    inbox: Inbox, webhook: MakeWebhook, caplog: pytest.LogCaptureFixture
) -> None:
    query = "sig=a%2Fb-secret-secret%3D&x=1"
    url = f"{inbox.base_url}/services/T000-secret-path-of-a-chat?{query}"
    headers = {"X-Key": "secret-header"}
    target = webhook(url, headers=headers, bearer_token=TOKEN, signing_secrets=[SECRET, NEXT])
    repeated = [TOKEN, "secret-header", query, "a/b-secret-secret=", "T000-secret-path-of-a-chat", url]
    with caplog.at_level(logging.DEBUG, logger="bridge"):
        text = [repr(target._settings), *target.preview(EVENT).head]
        for status in (400, 401, 410, 503):
            inbox.fault(status, body=json.dumps({"headers": [*repeated, *SIGNING_SECRETS, SECRET]}))
            text.append(str(failure(target)))
    for secret in ("-secret", "secret-", *SIGNING_SECRETS):
        assert secret not in "".join([*text, caplog.text])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_would_be_sent_is_shown_without_any_secret(
    inbox: Inbox, webhook: MakeWebhook, form: dict[str, Any]
) -> None:
    target = webhook(
        f"{inbox.base_url}/secret-path?sig=secret-query",
        **form,
        headers={"X-Key": "s3cr", "X-Long": "secret-header"},
        bearer_token=TOKEN,
        signing_secret=NEXT,
        proxy="http://user:secret-proxy@127.0.0.1:9",
    )
    event = next(one for one in samples(datetime.now(UTC)) if "scheduledevent" in one.type)
    shown = target.preview(event)
    text = "\n".join(shown.head) + shown.body.decode()
    assert shown.head[0] == f"POST {inbox.base_url}/..."
    for name in ("X-Key", "X-Long", "Authorization"):
        assert f"{name}: ***" in shown.head
    for secret in ("s3cr", "secret", SIGNING_SECRETS[1], ROUTING_KEY, "user"):
        assert secret not in text
    assert inbox.received == []


# --- what cannot be shown ---


@pytest.mark.parametrize(
    "outcome",
    [
        ValueError("no \ud800 way\n\x1b[31m"),
        KeyError("data"),
        RecursionError(),
        UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"),
        pytest.param(object(), id="no-json"),
        math.nan,
    ],
    ids=repr,
)
def test_whatever_a_format_raises_the_event_is_rejected(
    inbox: Inbox, webhook: MakeWebhook, monkeypatch: pytest.MonkeyPatch, outcome: Any
) -> None:
    def write(*_: object) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(Slack, "write", write)
    target = webhook(format="slack")
    error = failure(target)
    assert type(error) is Rejected
    assert str(error).startswith("the event cannot be shown as slack: ")
    assert str(error).isprintable()
    str(error).encode()
    with pytest.raises(Rejected):
        target.preview(EVENT)
    assert inbox.received == []


@pytest.mark.parametrize(
    "change", [{"subject": "half \ud800"}, {"data": None}, {"datacontenttype": None}], ids=str
)
def test_an_event_that_binary_mode_can_hardly_carry_arrives_as_far_as_it_can(
    inbox: Inbox, webhook: MakeWebhook, change: dict[str, Any]
) -> None:
    envelope = {name: value for name, value in {**EVENT.envelope, **change}.items() if value is not None}
    webhook(mode="binary").send([replace(EVENT, body=json.dumps(envelope).encode())])
    one = only(inbox.accepted)
    assert one.headers["ce-id"] == EVENT.id
    assert bool(one.body) is ("data" in envelope)


def test_a_signature_refused_with_400_costs_no_event(inbox: Inbox, webhook: MakeWebhook) -> None:
    inbox.fault(400, body='{"error": "Invalid Signature"}', count=2)
    assert type(failure(webhook(signing_secret=NEXT))) is Misconfigured
    assert type(failure(webhook())) is Rejected


def test_what_pagerduty_has_no_action_for_is_no_dead_letter(inbox: Inbox, webhook: MakeWebhook) -> None:
    later = EVENT.body.replace(b"scheduledevent.scheduled.v1", b"scheduledevent.later.v1")
    webhook(format="pagerduty").send([replace(EVENT, body=later)])
    assert inbox.received == []


def test_a_template_is_tried_on_samples(inbox: Inbox, webhook: MakeWebhook) -> None:
    with pytest.raises(ValueError, match="NoSuchName"):
        webhook(format="template", template={"text": "{{ data.NoSuchName }}"})
    assert inbox.received == []


# --- check ---


def test_a_check_asks_with_options_and_sends_no_event(inbox: Inbox, webhook: MakeWebhook) -> None:
    found = webhook(f"{inbox.url}?sig=secret").check()
    assert found.endswith("reachable, it answered 200 to OPTIONS")
    one = only(inbox.received)
    assert (one.method, one.body) == ("OPTIONS", b"")
    assert one.headers["webhook-request-origin"]


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        *((status, Inconclusive, f"it answered {status} to OPTIONS") for status in (400, 405, 503)),
        *((status, Misconfigured, "redirects are not followed") for status in (300, 302, 399)),
    ],
)
def test_a_check_says_what_was_answered(
    inbox: Inbox, webhook: MakeWebhook, status: int, kind: type[DeliveryError], text: str
) -> None:
    inbox.fault(status, method="OPTIONS")
    with pytest.raises(kind, match=text) as raised:
        webhook().check()
    assert raised.value.status == status


# --- certificates and proxies that are rotated ---


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


def test_a_short_notice_is_sent_anew_soon_where_a_nat_forgot_the_connection(
    webhook: MakeWebhook, any_inbox: Inbox
) -> None:
    clock = MovedClock()

    def notice(left_seconds: float) -> StoredEvent:
        at = datetime.fromtimestamp(clock.wall() + left_seconds, UTC)
        return stored_event(1, NotBeforeUtc=at.isoformat())

    port = int(any_inbox.base_url.rpartition(":")[2])
    with RawServer(forwarding(port)) as nat:
        sink = webhook(nat.url, clock=clock)
        sink.send([notice(30)])
        nat.forgotten = 1
        error = failure(sink, notice(30))
        assert str(error) == f"{nat.url}: no answer on an open connection within 2 s"
        assert (error.uncertain, type(error)) == (1, Unavailable)
        sink.send([notice(30)])
    assert len(any_inbox.accepted) == 2
