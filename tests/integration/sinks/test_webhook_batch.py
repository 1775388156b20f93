"""Batches of CloudEvents: what is in one, how a refused one is halved, and what counts as delivered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from bridge.errors import DeliveryError, Gone, Misconfigured, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import MAX_BATCH_EVENTS
from bridge.sinks.http import MAX_BATCH_BYTES
from tests.support.inbox import Inbox
from tests.support.process import stored_event
from tests.support.webhook import MakeWebhook, failure


def ids(events: Sequence[StoredEvent]) -> list[str]:
    return [event.id for event in events]


def arrived(inbox: Inbox) -> list[str]:
    return [event["id"] for event in inbox.events()]


def sizes(inbox: Inbox) -> list[int]:
    """Return how many events each request held, refused ones too."""
    return [len(json.loads(one.body)) for one in inbox.received]


# --- what is in one ---


def test_a_batch_is_a_list_of_the_stored_events_byte_by_byte(inbox: Inbox, webhook: MakeWebhook) -> None:
    events = [stored_event(number, Description='100% "quoted" \ud800 €') for number in range(3)]
    webhook(mode="batch").send(events)
    (one,) = inbox.accepted
    assert one.headers["content-type"] == "application/cloudevents-batch+json; charset=utf-8"
    assert one.body == b"[" + b",".join(event.body for event in events) + b"]"
    assert one.headers["webhook-request-origin"]
    assert (inbox.events(), inbox.problems) == ([event.envelope for event in events], [])


def test_only_batch_mode_takes_several_events_at_once(webhook: MakeWebhook) -> None:
    forms: list[dict[str, Any]] = [{"mode": "batch"}, {"mode": "structured"}, {"format": "slack"}]
    assert [webhook(**form).max_batch for form in forms] == [MAX_BATCH_EVENTS, 1, 1]


def test_what_is_too_much_for_one_request_is_cut_and_keeps_its_order(
    inbox: Inbox, webhook: MakeWebhook
) -> None:
    events = [stored_event(number, Filling="x" * 300_000) for number in range(7)]
    events.append(stored_event(7, Filling="x" * MAX_BATCH_BYTES))
    webhook(mode="batch").send(events)
    assert sizes(inbox) == [3, 3, 1, 1]
    assert all(len(one.body) <= MAX_BATCH_BYTES for one in inbox.accepted[:-1])
    assert arrived(inbox) == ids(events)


# --- what is refused ---


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_batch_that_is_refused_as_a_whole_goes_in_halves(
    inbox: Inbox, webhook: MakeWebhook, status: int
) -> None:
    events = [stored_event(number) for number in range(5)]
    inbox.fault(status)
    webhook(mode="batch").send(events)
    assert sizes(inbox) == [5, 2, 3]
    assert arrived(inbox) == ids(events)


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
    assert (type(error), error.delivered, error.retry_after_seconds) == (kind, 4, 7)
    target.send(events[error.delivered :])
    assert arrived(inbox) == ids(events)
