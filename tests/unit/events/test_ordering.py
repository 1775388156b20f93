"""What the order of events is promised for."""

from __future__ import annotations

from datetime import UTC, datetime

from bridge.events.model import order_key
from tests.support.samples import EVENT_ID, samples

SAMPLES = {
    event.type.removeprefix("io.imdsbridge.").removesuffix(".v1"): event.envelope
    for event in samples(datetime(2026, 1, 1, tzinfo=UTC))
}


def test_events_and_receipts_about_a_scheduled_event_belong_together() -> None:
    kinds = [kind for kind in SAMPLES if kind.startswith(("scheduledevent.", "approval."))]
    assert {order_key(SAMPLES[kind]) for kind in kinds} == {f"event {EVENT_ID}"}


def test_the_letter_case_of_an_event_id_does_not_matter() -> None:
    assert order_key({"correlationid": "ABC"}) == order_key({"correlationid": "abc"})


def test_the_vms_own_events_belong_to_their_reporter() -> None:
    kinds = ["document.changed", "imds.unreachable", "imds.recovered", "bridge.heartbeat"]
    assert len({order_key(SAMPLES[kind]) for kind in kinds}) == 1
    other = {**SAMPLES["bridge.heartbeat"], "reporter": "web-1/forward"}
    assert order_key(other) != order_key(SAMPLES["bridge.heartbeat"])


def test_events_of_other_programs_belong_to_their_subject() -> None:
    event = {"id": "1", "source": "/a", "subject": "s"}
    assert order_key(event) == order_key({**event, "id": "2"})
    assert len({order_key(one) for one in (event, {**event, "subject": "t"}, {**event, "source": "/b"})}) == 3
    assert order_key({"id": "1"}) != order_key({"id": "2"})
