"""When a failed delivery is tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import Unavailable
from bridge.events.model import StoredEvent
from bridge.service.schedule import FailedEvent, Failure, Pace, is_urgent_type

SHARES = st.floats(min_value=0, max_value=1)
COUNTS = st.integers(min_value=1, max_value=10_000)
SLOW = Pace(limit_seconds=60.0)
NO_ANSWER = Unavailable("later")


@given(share=SHARES, count=COUNTS)
def test_a_wait_is_a_share_of_a_limit_that_doubles_up_to_a_minute(share: float, count: int) -> None:
    wait_seconds = Failure(error=NO_ANSWER, count=count, at=100.0, share=share).retry_at(SLOW) - 100.0
    assert wait_seconds == pytest.approx(share * min(60.0, 0.5 * 2 ** min(count - 1, 20)))


@given(share=SHARES, count=COUNTS)
def test_an_urgent_event_is_retried_within_two_seconds_and_a_drain_within_half_of_one(
    share: float, count: int
) -> None:
    failure = Failure(error=NO_ANSWER, count=count, at=0.0, share=share)
    assert failure.retry_at(Pace(limit_seconds=60.0, is_urgent=True)) <= 2.0
    assert failure.retry_at(Pace(limit_seconds=60.0, is_draining=True)) <= 0.5
    assert failure.retry_at(Pace(limit_seconds=0.1, is_urgent=True)) <= 0.1


@pytest.mark.parametrize(
    ("status", "is_urgent", "is_draining", "wait_seconds"),
    [
        (429, False, False, 90.0),
        (429, True, False, 90.0),
        (429, True, True, 90.0),
        (503, False, False, 90.0),
        (503, True, False, 2.0),
        (503, True, True, 90.0),
        (None, False, False, 90.0),
    ],
)
def test_what_the_receiver_asks_for_is_obeyed_unless_it_delays_an_urgent_event_without_429(
    status: int | None, is_urgent: bool, is_draining: bool, wait_seconds: float
) -> None:
    error = Unavailable("later", status=status, retry_after_seconds=90.0)
    pace = Pace(limit_seconds=60.0, is_urgent=is_urgent, is_draining=is_draining)
    assert Failure(error=error, count=9, at=0.0, share=1.0).retry_at(pace) == wait_seconds


@pytest.mark.parametrize(
    ("name", "is_urgent"),
    [
        ("scheduledevent.scheduled", True),
        ("scheduledevent.ended", True),
        ("approval.failed", True),
        ("document.changed", False),
        ("bridge.heartbeat", False),
        ("imds.unreachable", False),
    ],
)
def test_notices_and_receipts_are_urgent(name: str, is_urgent: bool) -> None:
    stored = StoredEvent(seq=1, id="1", type=f"io.imdsbridge.{name}.v1", stored_at=0.0, body=b"{}")
    assert is_urgent_type(stored) is is_urgent


@pytest.mark.parametrize(
    ("is_urgent", "status", "name", "wait_seconds"),
    [
        (True, 503, "scheduledevent.scheduled", 2.0),
        (False, 503, "scheduledevent.scheduled", 60.0),
        (True, None, "scheduledevent.scheduled", 60.0),
        (True, 503, "bridge.heartbeat", 60.0),
    ],
)
def test_an_isolated_event_is_retried_often_only_if_it_is_a_young_notice_that_is_answered(
    is_urgent: bool, status: int | None, name: str, wait_seconds: float
) -> None:
    stored = StoredEvent(seq=1, id="1", type=f"io.imdsbridge.{name}.v1", stored_at=0.0, body=b"{}")
    failure = Failure(error=Unavailable("not now", status=status), at=0.0, share=1.0, count=20)
    failed = FailedEvent(event=stored, failure=failure, is_passed=True, is_isolated=True)
    assert failed.retry_at(Pace(limit_seconds=60.0, is_urgent=is_urgent)) == wait_seconds
