"""Batches of CloudEvents: what is in one, how a refused one is halved, and what counts as delivered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import MAX_BATCH_EVENTS
from bridge.formats.cloudevents import batch as written_batch
from bridge.sinks.http import MAX_BATCH_BYTES, post_batches
from tests.support.delivery import running
from tests.support.diff import thorough
from tests.support.inbox import Inbox
from tests.support.process import stored_event
from tests.support.webhook import MakeWebhook, failure

KB = 1000


def faulty(number: int) -> StoredEvent:
    """MakeWebhook an event that a strict receiver refuses: it has no source."""
    event = stored_event(number)
    envelope = {name: value for name, value in event.envelope.items() if name != "source"}
    return replace(event, body=json.dumps(envelope).encode())


def event_of(number: int, body: bytes) -> StoredEvent:
    return StoredEvent(seq=number, id=str(number), type="t", stored_at=0.0, body=body)


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


@pytest.mark.parametrize(
    ("form", "most"),
    [
        ({"mode": "batch"}, MAX_BATCH_EVENTS),
        ({"mode": "structured"}, 1),
        ({"format": "slack"}, 1),
    ],
    ids=str,
)
def test_only_batch_mode_takes_several_events_at_once(
    webhook: MakeWebhook, form: dict[str, Any], most: int
) -> None:
    assert webhook(**form).max_batch == most


def test_what_is_too_much_for_one_request_is_cut_and_keeps_its_order(
    inbox: Inbox, webhook: MakeWebhook
) -> None:
    events = [stored_event(number, Filling="x" * 300 * KB) for number in range(7)]
    events.append(stored_event(7, Filling="x" * MAX_BATCH_BYTES))
    webhook(mode="batch").send(events)
    assert sizes(inbox) == [3, 3, 1, 1]
    assert all(len(one.body) <= MAX_BATCH_BYTES for one in inbox.accepted[:-1])
    assert arrived(inbox) == ids(events)


@thorough
@given(
    lengths=st.lists(st.integers(min_value=1, max_value=60), min_size=1, max_size=30),
    max_bytes=st.integers(min_value=2, max_value=130),
)
def test_no_request_is_longer_than_it_may_be_and_none_is_empty(lengths: list[int], max_bytes: int) -> None:
    events = [event_of(number, b"x" * length) for number, length in enumerate(lengths)]
    posted: list[Sequence[StoredEvent]] = []
    post_batches(events, posted.append, max_bytes=max_bytes)
    assert [event for batch in posted for event in batch] == events
    assert all(len(batch) == 1 or len(written_batch(batch)) <= max_bytes for batch in posted)
    assert all(posted)
    for batch, following in pairwise(posted):  # nothing more would have fitted
        assert len(written_batch([*batch, following[0]])) >= max_bytes


# --- what is refused ---


@pytest.mark.parametrize("position", range(8))
def test_a_refused_batch_is_halved_until_the_event_that_is_meant_stands_alone(
    inbox: Inbox, webhook: MakeWebhook, position: int
) -> None:
    events = [stored_event(number) for number in range(8)]
    events[position] = faulty(position)
    error = failure(webhook(mode="batch"), *events)
    assert type(error) is Rejected
    assert error.delivered == position
    assert arrived(inbox) == ids(events[:position])
    assert "source" in str(error)


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


def test_a_receiver_that_takes_no_batches_is_a_fault_of_the_settings_and_costs_no_event(
    inbox: Inbox, webhook: MakeWebhook
) -> None:
    inbox.fault(415, count=None)
    error = failure(webhook(mode="batch"), *(stored_event(number) for number in range(8)))
    assert (type(error), error.delivered, len(inbox.received)) == (Misconfigured, 0, 1)


@thorough
@given(
    bad=st.sets(st.integers(min_value=0, max_value=19)),
    size=st.integers(min_value=1, max_value=20),
    fails_at=st.integers(min_value=0, max_value=40),
)
def test_what_is_delivered_is_counted_whatever_is_refused_and_when_the_receiver_fails(
    bad: set[int], size: int, fails_at: int
) -> None:
    events = [event_of(number, b"xxxxxxxxxx") for number in range(size)]
    taken: list[StoredEvent] = []
    calls = 0

    def post(batch: Sequence[StoredEvent]) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise Unavailable("later")
        if any(event.seq in bad for event in batch):
            raise Rejected("no")
        taken.extend(batch)

    dead: list[int] = []
    left = events
    while left:
        try:
            post_batches(left, post, max_bytes=100)
            break
        except DeliveryError as error:
            left = left[error.delivered :]
            if isinstance(error, Rejected):
                dead.append(left[0].seq)
                left = left[1:]
    assert [event.seq for event in taken] == [event.seq for event in events if event.seq not in bad]
    assert dead == sorted(bad & set(range(size)))


def test_from_the_outbox_all_but_the_refused_events_arrive_once_and_in_order(
    inbox: Inbox, webhook: MakeWebhook, tmp_path: Path
) -> None:
    events = [stored_event(number) for number in range(150)]
    for number in (0, 63, 64, 101, 149):
        events[number] = faulty(number)
    with running(tmp_path / "state", webhook(mode="batch"), *events) as rig:
        rig.finish()
        dead = rig.dead()
    good = [event.id for event in events if "source" in event.envelope]
    assert arrived(inbox) == good
    assert sorted(dead) == sorted(set(ids(events)) - set(good))
