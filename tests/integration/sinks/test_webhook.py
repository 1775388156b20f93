"""The webhook sink: what it sends, what each answer means, and that it shows no secret."""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.formats.samples import samples
from bridge.formats.slack import Slack
from bridge.http.client import USER_AGENT
from bridge.sinks.base import Inconclusive
from tests.support.inbox import Inbox
from tests.support.process import stored_event
from tests.support.receivers import ROUTING_KEY
from tests.support.webhook import EVENT, FORMS, MakeWebhook, failure

TOKEN = "secret-token"  # noqa: S105 - a test's
SIGNING_SECRETS = ("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "QUJD" * 8)


# --- what it sends ---


def test_a_structured_event_is_the_stored_one_byte_by_byte(inbox: Inbox, webhook: MakeWebhook) -> None:
    webhook().send([EVENT])
    (one,) = inbox.accepted
    assert one.body == EVENT.body
    assert one.headers["content-type"] == "application/cloudevents+json; charset=utf-8"
    assert one.headers["user-agent"] == USER_AGENT
    assert one.headers["webhook-request-origin"]
    assert "webhook-signature" not in one.headers


def test_a_binary_event_has_its_attributes_in_headers(inbox: Inbox, webhook: MakeWebhook) -> None:
    event = stored_event(2)
    webhook(mode="binary").send([event])
    (one,) = inbox.accepted
    assert inbox.events() == [event.envelope]
    assert one.headers["content-type"] == "application/json"
    assert "ce-datacontenttype" not in one.headers
    assert json.loads(one.body) == event.envelope["data"]
    assert one.headers["ce-id"] == event.id


def test_headers_and_token_come_from_files(inbox: Inbox, webhook: MakeWebhook, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("the-token\n")
    (tmp_path / "headers").write_text("# for the gateway\nX-Api-Key: one: two\n\nX-Env: lab\n")
    (tmp_path / "url").write_text(f"{inbox.url}?key=abc\n")
    inbox.require_token("the-token")
    files: dict[str, Any] = {
        f"{name}_file": tmp_path / file
        for name, file in (("bearer_token", "token"), ("headers", "headers"), ("url", "url"))
    }
    webhook(**files).send([EVENT])
    (one,) = inbox.accepted
    assert (one.headers["x-api-key"], one.headers["x-env"], one.query) == ("one: two", "lab", "key=abc")


def test_headers_can_be_a_table_and_replace_those_of_the_sink(inbox: Inbox, webhook: MakeWebhook) -> None:
    webhook(headers={"X-Api-Key": "abc", "User-Agent": "ours"}).send([EVENT])
    (one,) = inbox.accepted
    assert (one.headers["x-api-key"], one.headers["user-agent"]) == ("abc", "ours")


# --- what an answer means ---


@pytest.mark.parametrize(("status", "kind"), [(429, Unavailable), (401, Misconfigured)])
def test_retry_after_is_taken_over(
    inbox: Inbox, webhook: MakeWebhook, status: int, kind: type[DeliveryError]
) -> None:
    inbox.fault(status, retry_after=17)
    error = failure(webhook())
    assert (type(error), error.status, error.retry_after_seconds) == (kind, status, 17)


# --- secrets ---


def test_a_new_routing_key_is_taken_at_the_reload(webhook: MakeWebhook, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0" * 32)
    with Inbox() as pagerduty:
        pagerduty.fault(400, body='{"status":"invalid event","message":"Invalid routing key"}')
        target = webhook(pagerduty.url, format="pagerduty", routing_key_file=key)
        assert type(failure(target)) is Misconfigured
        key.write_text("1" * 32)
        target.reload()
        target.send([EVENT])
        assert [one.json()["routing_key"] for one in pagerduty.received] == ["0" * 32, "1" * 32]


def test_a_rotated_secret_is_taken_at_the_reload_and_a_lost_one_keeps_the_old(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("token-one")
    target = webhook(bearer_token_file=token)
    target.send([EVENT])
    token.write_text("token-two")
    target.send([EVENT])
    target.reload()
    target.send([EVENT])
    for text in ("", "two words", "tökén"):
        token.write_text(text)
        target.reload()
    token.unlink()
    with caplog.at_level(logging.WARNING):
        target.reload()
    target.send([EVENT])
    assert "keeping the previous value" in caplog.text
    tokens = [one.headers["authorization"] for one in inbox.accepted]
    assert tokens == ["Bearer token-one", "Bearer token-one", "Bearer token-two", "Bearer token-two"]


def test_a_file_may_bring_a_new_safe_url(inbox: Inbox, webhook: MakeWebhook, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(f"{inbox.base_url}/one")
    target = webhook(url_file=file)
    file.write_text(f"{inbox.base_url}/two")
    target.reload()
    file.write_text("http://192.0.2.1/in-the-clear")
    target.reload()
    target.send([EVENT])
    assert [one.path for one in inbox.accepted] == ["/two"]


def test_what_a_receiver_repeats_of_our_secrets_is_not_shown(
    inbox: Inbox, webhook: MakeWebhook, caplog: pytest.LogCaptureFixture
) -> None:
    query = "sig=a%2Fb-secret-secret%3D&x=1"
    url = f"{inbox.base_url}/services/T000-secret-path-of-a-chat?{query}"
    headers, signing = {"X-Key": "secret-header"}, f"whsec_{SIGNING_SECRETS[0]}"
    given = [f"whsec_{secret}" for secret in SIGNING_SECRETS]
    target = webhook(url, headers=headers, bearer_token=TOKEN, signing_secrets=given)
    repeated = [TOKEN, "secret-header", query, "a/b-secret-secret=", "T000-secret-path-of-a-chat", url]
    with caplog.at_level(logging.DEBUG, logger="bridge"):
        text = [repr(target._settings), *target.preview(EVENT).head]
        for status in (400, 401, 410, 503):
            inbox.fault(status, body=json.dumps({"headers": [*repeated, *SIGNING_SECRETS, signing]}))
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
        signing_secret=f"whsec_{SIGNING_SECRETS[1]}",
        proxy="http://user:secret-proxy@127.0.0.1:9",
    )
    (event, *_) = (one for one in samples(datetime.now(UTC)) if "scheduledevent" in one.type)
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
def test_an_event_that_binary_mode_cannot_carry_blocks_nothing(
    inbox: Inbox, webhook: MakeWebhook, change: dict[str, Any]
) -> None:
    envelope = {name: value for name, value in {**EVENT.envelope, **change}.items() if value is not None}
    event = replace(EVENT, body=json.dumps(envelope).encode())
    target = webhook(mode="binary")
    with suppress(Rejected):  # it may become able to carry some
        target.send([event])
    target.send([EVENT])
    assert EVENT.envelope in inbox.events()


def test_a_signature_refused_with_400_costs_no_event(inbox: Inbox, webhook: MakeWebhook) -> None:
    inbox.fault(400, body='{"error": "Invalid Signature"}', count=2)
    assert type(failure(webhook(signing_secret=f"whsec_{SIGNING_SECRETS[1]}"))) is Misconfigured
    assert type(failure(webhook())) is Rejected


def test_a_format_is_tried_on_samples(inbox: Inbox, webhook: MakeWebhook) -> None:
    events = list(samples(datetime.now(UTC)))
    for format_ in ("teams", "slack", "template"):
        webhook(format=format_).check_format(events)
    with pytest.raises(ValueError, match="PagerDuty"):
        webhook(format="pagerduty").check_format(events)
    with pytest.raises(ValueError, match="NoSuchName"):
        webhook(format="template", template={"text": "{{ data.NoSuchName }}"}).check_format(events)
    webhook().check_format(events)
    assert inbox.received == []


# --- check ---


def test_a_check_asks_with_options_and_sends_no_event(inbox: Inbox, webhook: MakeWebhook) -> None:
    found = webhook(f"{inbox.url}?sig=secret").check()
    assert found.endswith("reachable, it answered 200 to OPTIONS and allows 120 requests a minute")
    (one,) = inbox.received
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


@pytest.mark.parametrize(
    ("consent", "error", "reason"),
    [
        ({"allowed_origin": "eventgrid.azure.net"}, Misconfigured, "of eventgrid.azure.net and not of "),
        ({"allowed_rate": "0"}, Misconfigured, "allows no requests"),
        ({"allowed_rate": "60"}, Inconclusive, "fewer than max_per_second"),
    ],
)
def test_a_check_finds_a_receiver_that_allows_less_than_is_sent(
    webhook: MakeWebhook, consent: dict[str, Any], error: type[DeliveryError], reason: str
) -> None:
    with Inbox(**consent) as refusing, pytest.raises(error, match=reason):
        webhook(refusing.url, max_per_second=1.5).check()


@pytest.mark.parametrize("consent", [{"allowed_origin": None}, {"allowed_rate": "*"}, {"allowed_rate": "-3"}])
def test_a_check_does_not_demand_the_handshake(webhook: MakeWebhook, consent: dict[str, Any]) -> None:
    with Inbox(**consent) as silent:
        assert webhook(silent.url).check().endswith("answered 200 to OPTIONS")
