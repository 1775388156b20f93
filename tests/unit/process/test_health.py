"""What makes a process not ready, and what needs a person."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from bridge.process.status import find_unready, find_urgent
from bridge.runtime.time import iso_utc
from tests.support.only import only
from tests.support.status import process_status, sink_status

NOW = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)


status = partial(process_status, NOW)


@pytest.mark.parametrize("role", ["forward", "listen", "relay"])
def test_a_process_that_works_is_ready_and_needs_nobody(role: str) -> None:
    assert find_unready(status(role=role), NOW) == []
    assert find_urgent(status(role=role), NOW) == []


def test_a_listener_without_a_bus_is_ready() -> None:
    assert find_unready(status(role="listen", commands=None), NOW) == []


@pytest.mark.parametrize(
    ("role", "changes", "reason"),
    [
        ("forward", {"last_good_at": None}, "IMDS has given no valid answer yet"),
        ("forward", {"last_good_at": None, "last_error": "refused"}, "no valid answer yet: refused"),
        ("forward", {"last_good_at": iso_utc(NOW - timedelta(seconds=31))}, "is 31 s old"),
        ("listen", {"last_good_at": iso_utc(NOW - timedelta(seconds=31))}, "is 31 s old"),
        ("listen", {"commands": {"from": "sb://q", "last_error": "gone"}}, "from sb://q: gone"),
        ("relay", {"relay": {"from": "sb://q", "last_error": "gone"}}, "from sb://q: gone"),
        ("relay", {"metrics_error": "there are no metrics: no port"}, "there are no metrics: no port"),
        ("forward", {"storage_error": "disk full"}, "the state cannot be written: disk full"),
    ],
)
def test_a_process_is_not_ready_for_a_reason(role: str, changes: dict[str, Any], reason: str) -> None:
    assert reason in only(find_unready(status(role=role, **changes), NOW))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": "misconfigured", "last_error": "401"}, "sink ops is misconfigured: 401"),
        ({"state": "gone", "last_error": "410"}, "sink ops is gone: 410"),
        ({"state": "rejecting", "last_error": "400"}, "sink ops is rejecting: 400"),
        ({"backlog": 3, "oldest_waits_seconds": 301}, "3 event(s) waiting, the oldest for 301 s"),
        ({"dead_letters": 2}, "2 dead letter(s)"),
        (
            {"notice_until": iso_utc(NOW + timedelta(seconds=299))},
            "sink ops has not delivered a notice that takes effect in 299 s: no answer yet",
        ),
        (
            {"notice_until": iso_utc(NOW - timedelta(seconds=3)), "last_error": "503"},
            "sink ops has not delivered a notice that took effect 3 s ago: 503",
        ),
    ],
)
def test_a_sink_needs_a_person_for_a_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in only(find_urgent(status(sinks={"ops": sink_status(**changes)}), NOW))


def test_a_sink_that_retries_needs_nobody_before_the_limit() -> None:
    until = iso_utc(NOW + timedelta(seconds=301))
    waiting = sink_status(state="retrying", backlog=3, oldest_waits_seconds=300, notice_until=until)
    assert find_urgent(status(sinks={"ops": waiting}), NOW) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failed_share": 0.9, "last_error": "429"}, "IMDS fails to answer 90% of the requests, .*: 429"),
        ({"failed_share": 0.6}, "60% .*: the last request was answered"),
        ({"clock_ahead_seconds": 1200.4}, "this VM's clock is 1200 s ahead of IMDS's, and so times"),
        ({"clock_ahead_seconds": -31}, "this VM's clock is 31 s behind IMDS's"),
        ({"role": "listen", "clock_ahead_seconds": 31}, "this VM's clock is 31 s ahead of IMDS's"),
        ({"role": "listen", "dry_run": True}, "dry run: nothing is approved and no program is run until"),
        (
            {"identity_error": "no answer"},
            "instance data is missing or incomplete, so approvals may wait: no answer",
        ),
        ({"program_faults": ["/drain: no"]}, "^a program cannot be started by this process: /drain: no$"),
    ],
)
def test_what_delays_notices_or_hides_alerts_needs_a_person_although_the_process_is_ready(
    changes: dict[str, Any], reason: str
) -> None:
    assert find_unready(status(**changes), NOW) == []
    assert re.search(reason, only(find_urgent(status(**changes), NOW)))


@pytest.mark.parametrize(
    "changes",
    [
        *({"clock_ahead_seconds": seconds} for seconds in (30.0, -30.0, None)),
        {"failed_share": 0.5, "last_error": "429"},
    ],
)
def test_a_clock_that_is_nearly_right_and_few_failures_of_imds_need_nobody(changes: dict[str, Any]) -> None:
    assert find_urgent(status(**changes), NOW) == []
