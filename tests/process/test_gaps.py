"""The real `imds-bridge forward` and the times when it had no answer of IMDS: suspended, restarted, IMDS hanging."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bridge.imds.client import LATE_SECONDS
from bridge.lab.imds import EVENTS_PATH
from bridge.runtime.time import iso_utc
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, SLACK_SECONDS, Forward

POLL_SECONDS = 0.5
SUSPENDED_SECONDS = 7.0
SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"
GAP = ["io.imdsbridge.imds.unreachable.v1", "io.imdsbridge.imds.recovered.v1"]


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    with ImdsLab() as lab:  # with the real limit of five requests a second
        yield lab


@pytest.fixture
def forward(imds: ImdsLab, inbox: Inbox, tmp_path: Path) -> Forward:
    types = ["io.imdsbridge.imds.*", "io.imdsbridge.scheduledevent.*"]
    sink = {"kind": "webhook", "url": inbox.url, "types": types, "from_start": True}
    polled = {"endpoint": imds.url("web-0"), "poll_seconds": POLL_SECONDS}
    return Forward(tmp_path, {"imds": polled, "sinks": {"inbox": sink}})


def gap(inbox: Inbox) -> list[dict[str, Any]]:
    """Return the data of the two events of the only gap, once they have arrived."""
    inbox.wait_for(len(GAP), LIMIT_SECONDS)
    events = inbox.events()
    assert [event["type"] for event in events] == GAP
    return [event["data"] for event in events]


def polls(imds: ImdsLab) -> list[float]:
    """Return when the document was asked for."""
    return [request.at for request in imds.requests() if request.path == EVENTS_PATH]


def wait_for_polls(imds: ImdsLab, count: int) -> None:
    """Wait until the answers to so many further requests are processed."""
    before = len(polls(imds))
    imds.wait_for(lambda: len(polls(imds)) > before + count, timeout=LIMIT_SECONDS)


def test_a_process_that_was_suspended_publishes_the_gap(
    imds: ImdsLab, inbox: Inbox, forward: Forward
) -> None:
    with forward:
        wait_for_polls(imds, 2)
        stopped_at = datetime.now(UTC)
        forward.signal(signal.SIGSTOP)
        imds.wait_for(
            lambda: time.monotonic() - polls(imds)[-1] > SUSPENDED_SECONDS, timeout=2 * SUSPENDED_SECONDS
        )
        continued_at = datetime.now(UTC)
        forward.signal(signal.SIGCONT)
        unreachable, recovered = gap(inbox)
    began, ended = (datetime.fromisoformat(recovered[name]) for name in ("BlindFrom", "BlindTo"))
    assert (unreachable["Cause"], recovered["Cause"]) == ("NotPolled", "NotPolled")
    assert unreachable["Since"] == recovered["BlindFrom"]
    assert abs(stopped_at - began) < timedelta(seconds=1 + SLACK_SECONDS)
    assert timedelta(milliseconds=-1) < ended - continued_at < timedelta(seconds=SLACK_SECONDS)
    assert recovered["BlindSeconds"] == pytest.approx((ended - began).total_seconds(), abs=0.002)


def test_a_request_that_hangs_delays_a_notice_by_little_more_than_two_seconds(
    imds: ImdsLab, inbox: Inbox, forward: Forward
) -> None:
    with forward:
        wait_for_polls(imds, 2)
        imds.fault("slow", seconds=600, path=EVENTS_PATH)
        wait_for_polls(imds, 0)
        imds.schedule(event_type="Preempt", resources=["web-0"], notice_seconds=30)
        scheduled_at = time.monotonic()
        inbox.wait_for(1, LIMIT_SECONDS)
        assert time.monotonic() - scheduled_at < LATE_SECONDS + SLACK_SECONDS
    assert [event["type"] for event in inbox.events()] == [SCHEDULED]
    apart = sorted(later - earlier for earlier, later in pairwise(polls(imds)))
    # A busy machine notes the request that hangs later than it was sent.
    assert LATE_SECONDS - POLL_SECONDS < apart[-1] < 10, apart


def test_an_imds_that_never_answers_is_reported_while_it_hangs(
    imds: ImdsLab, inbox: Inbox, forward: Forward
) -> None:
    with forward:
        wait_for_polls(imds, 2)
        imds.fault("slow", seconds=600, path=EVENTS_PATH, count=None)
        inbox.wait_for(1, LIMIT_SECONDS)
        imds.clear_faults()
        unreachable, recovered = gap(inbox)
    assert (unreachable["Reason"], unreachable["Cause"]) == ("IMDS does not answer", "NoAnswer")
    assert 5 <= recovered["BlindSeconds"] < 5 + SLACK_SECONDS


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_publishes_the_time_since_the_last_answer_of_the_process_before(
    imds: ImdsLab, inbox: Inbox, forward: Forward, end: signal.Signals
) -> None:
    with forward:
        wait_for_polls(imds, 2)
        forward.signal(end)
        forward.wait()
    kept = forward.state / "last-good"
    last = datetime.fromisoformat(kept.read_text())
    assert timedelta() <= datetime.now(UTC) - last < timedelta(seconds=1 + SLACK_SECONDS)
    since = iso_utc(last - timedelta(hours=1))
    kept.write_text(since)  # as if the process had ended an hour ago
    with forward:
        unreachable, recovered = gap(inbox)
    assert (unreachable["Since"], unreachable["Cause"]) == (since, "Restart")
    assert 3600 <= recovered["BlindSeconds"] < 3600 + 2 * SLACK_SECONDS
