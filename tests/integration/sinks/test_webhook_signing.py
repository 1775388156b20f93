"""Standard Webhooks signatures as they really arrive, checked by a library that is not ours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from svix.webhooks import Webhook, WebhookVerificationError

from bridge.errors import Unavailable
from bridge.formats.samples import samples
from bridge.lab.httpd import HttpRequest
from tests.support.clock import MovedClock
from tests.support.inbox import Inbox
from tests.support.process import stored_event
from tests.support.webhook import EVENT, FORMS, MakeWebhook, failure

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the vector of the standard
NEXT = "whsec_" + "QUJD" * 8
OTHER = "whsec_" + "REVG" * 8


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with Inbox() as started:
        yield started


def is_signed_by(secret: str, received: HttpRequest) -> bool:
    """Return whether a receiver that knows only `secret` believes the message."""
    try:
        Webhook(secret).verify(received.body, dict(received.headers))
    except WebhookVerificationError:
        return False
    return True


def signers(received: HttpRequest) -> list[str]:
    return [secret for secret in (SECRET, NEXT, OTHER) if is_signed_by(secret, received)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_arrives_is_verified_by_an_independent_library(
    inbox: Inbox, webhook: MakeWebhook, form: dict[str, Any]
) -> None:
    (event, *_) = samples(datetime.now(UTC))
    webhook(**form, signing_secret=SECRET).send([event])
    (one,) = inbox.accepted
    assert signers(one) == [SECRET]
    assert one.headers["webhook-id"] == event.id


# --- rotation ---


@pytest.mark.parametrize("file", [False, True])
def test_while_rotating_receivers_with_either_secret_believe_it(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path, file: bool
) -> None:
    given: dict[str, Any] = {"signing_secrets": [SECRET, NEXT]}
    if file:
        (tmp_path / "secrets").write_text(f"{SECRET}\n\n{NEXT}\n")
        given = {"signing_secrets_file": tmp_path / "secrets"}
    webhook(**given).send([EVENT])
    (one,) = inbox.accepted
    assert signers(one) == [SECRET, NEXT]


def test_a_changed_file_of_secrets_is_used_after_the_reload_and_a_broken_one_is_not(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    target = webhook(signing_secret_file=file)
    target.send([EVENT])
    file.write_text(f"{SECRET}\n{NEXT}")
    target.send([EVENT])
    target.reload()
    target.send([EVENT])
    file.write_text(NEXT)
    target.reload()
    target.send([EVENT])
    with caplog.at_level(logging.DEBUG):
        for broken in ("", "whsec_c2hvcnQ=", f"{OTHER}\nno-base64!", "\xff"):
            file.write_text(broken, encoding="latin-1")
            target.reload()
        file.unlink()
        target.reload()
    target.send([EVENT])
    assert [signers(one) for one in inbox.accepted] == [[SECRET], [SECRET], [SECRET, NEXT], [NEXT], [NEXT]]
    assert caplog.text.count("keeping the previous value") == 5
    assert not [part for part in ("c2hvcnQ", OTHER[6:], "no-base64") if part in caplog.text]


# --- what stays over retries ---


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
    assert len(tries) == 3
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
    ids = [one.headers["webhook-id"] for one in inbox.accepted]
    assert ids[:2] == [first.id, second.id]
    assert ids[: len(batches)] == ids[len(batches) :]
    assert len(set(ids)) == len(batches)
    assert all("." not in given for given in ids)


def test_each_half_of_a_refused_batch_has_its_own_signature(inbox: Inbox, webhook: MakeWebhook) -> None:
    inbox.fault(413)
    target = webhook(mode="batch", signing_secret=SECRET)
    target.send([stored_event(number) for number in range(4)])
    assert [signers(one) for one in inbox.received] == [[SECRET]] * 3
    assert len({one.headers["webhook-id"] for one in inbox.received}) == 3
