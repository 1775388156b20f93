"""What is counted at the borders of a process, and what a scrape reads from its status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from bridge.config.models import ImdsSettings
from bridge.contract.schemas import schema
from bridge.contract.status import Status, from_json
from bridge.contract.types import LOSS_REASONS, RECEIPT_REASONS, TYPE_PREFIX
from bridge.errors import DeliveryError, ImdsError, Rejected, Unavailable
from bridge.events.model import CloudEvent
from bridge.imds.client import ImdsClient
from bridge.outbox.state_dir import StateFolder
from bridge.process.metrics import Meter, ProcessFigures, StatusCollector
from bridge.runtime.time import iso_utc
from tests.support.clock import MovedClock
from tests.support.diff import entry
from tests.support.moved_delivery import MovedDelivery
from tests.support.status import bus_status, raw_status, sink_status


def new_event(type_: str, data: dict[str, Any]) -> CloudEvent:
    return CloudEvent("1", "/s", type_, "web-0", MovedClock().now(), "urn:s", {}, data)


class Scrape:
    """A registry with a meter and the collector of a status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.meter = Meter(self.registry, ["ops"])
        self.clock = MovedClock()
        self.status = raw_status(self.clock.now(), last_good_at=None, left_sinks={"old": 7})
        folder = StateFolder(Path("/nowhere"))
        self.outbox = Mock(storage_errors=3, folder=folder, **{"size_bytes.return_value": 4096})
        self.registry.register(StatusCollector(self.read, self.outbox, self.clock))

    def read(self) -> Status:
        return from_json(self.status, self.status["role"])

    def value(self, name: str, **labels: str) -> float | None:
        """Return a sample's value, None if there is none."""
        return self.registry.get_sample_value(f"imds_bridge_{name}", labels)

    def series(self) -> set[str]:
        """Return every series: a sample's name with its labels."""
        lines = generate_latest(self.registry).decode().splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


@pytest.fixture
def scrape() -> Scrape:
    return Scrape()


@pytest.fixture
def delivery(tmp_path: Path, scrape: Scrape) -> Iterator[MovedDelivery]:
    """Return a dispatcher whose deliveries are counted."""
    count = partial(scrape.meter.sent, "ops")
    made = MovedDelivery(tmp_path, max_batch=100, max_age_seconds=100.0, count=count)
    yield made
    made.close()


def test_counters_start_at_zero_for_every_known_label(scrape: Scrape) -> None:
    assert scrape.value("polls_total", result="throttled") == 0
    assert scrape.value("changes_total", kind="ended") == 0
    assert scrape.value("deliveries_total", sink="ops", result="rejected") == 0
    assert scrape.value("losses_total", reason="Damage") == 0
    assert scrape.value("commands_total", outcome="failed", reason="imds_refused") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_process_that_cannot_read_proc_stat_tells_when_it_started_and_what_it_uses(
    scrape: Scrape, tmp_path: Path
) -> None:
    began = scrape.value("start_time_seconds")
    assert began == pytest.approx(time.time(), abs=60)
    (tmp_path / "self").symlink_to("/proc/self")  # as the units' sandbox leaves of it
    registry = CollectorRegistry()
    ProcessFigures(proc=str(tmp_path), registry=registry)
    assert registry.get_sample_value("process_resident_memory_bytes")
    assert registry.get_sample_value("process_cpu_seconds_total")


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "answered"),
        (ImdsError("no connection"), "unanswered"),
        (ImdsError("500", status=500), "refused"),
        (ImdsError("429", status=429), "throttled"),
    ],
)
def test_a_poll_is_counted_by_its_result(scrape: Scrape, error: ImdsError | None, result: str) -> None:
    imds = ImdsClient(ImdsSettings(), clock=scrape.clock, measured=scrape.meter.polling)
    with patch.object(imds, "_call", side_effect=[error or b"{}"]), suppress(ImdsError):
        imds.document()
    assert scrape.value("polls_total", result=result) == 1
    assert scrape.value("poll_duration_seconds_count") == 1


@pytest.mark.parametrize(
    ("errors", "seconds", "results"),
    [
        ([], 3.0, {"delivered": 4}),
        ([Unavailable("no", delivered=2)], 3.0, {"delivered": 2, "failed": 1}),
        ([Rejected("no", delivered=2)], 3.0, {"delivered": 2, "rejected": 1}),
        ([], 101.0, {"expired": 4}),
    ],
    ids=["all are delivered", "a part is delivered", "one of a batch is rejected", "all are too old"],
)
def test_events_are_counted_by_what_becomes_of_them_and_with_the_time_that_they_waited(
    scrape: Scrape,
    delivery: MovedDelivery,
    errors: list[DeliveryError],
    seconds: float,
    results: dict[str, int],
) -> None:
    delivery.commit(*"1234")
    delivery.clock.advance(seconds)
    delivery.sink.failures.extend(errors)
    delivery.dispatcher.step()
    kinds = ("delivered", "failed", "rejected", "expired")
    counted = {kind: scrape.value("deliveries_total", sink="ops", result=kind) for kind in kinds}
    assert counted == {**dict.fromkeys(kinds, 0), **results}
    waited_seconds = seconds * results.get("delivered", 0)
    assert scrape.value("delivery_seconds_sum", sink="ops") == pytest.approx(waited_seconds)


def test_losses_are_counted_also_where_their_number_is_unknown(scrape: Scrape) -> None:
    for count in (3, None):
        data = {"Reason": "SizeLimit", "Count": count}
        scrape.meter.committed([new_event(TYPE_PREFIX + "bridge.loss.v1", data)])
    assert scrape.value("losses_total", reason="SizeLimit") == 2
    assert scrape.value("lost_events_total", reason="SizeLimit") == 3


def test_unknown_types_and_statuses_share_one_series(scrape: Scrape) -> None:
    entries = [{"EventType": f"New{number}", "EventStatus": "Odd"} for number in range(10_000)]
    before = scrape.series()
    scrape.status["document"] = {"DocumentIncarnation": 7, "Events": [*entries, "not an event", {}]}
    assert scrape.value("scheduled_events", type="other", status="other") == 10_001
    scrape.status["document"] = {"DocumentIncarnation": "seven", "Events": None}
    assert scrape.value("document_incarnation") is None
    assert len(scrape.series() - before) == 7 * 4 + 7


def test_many_events_leave_the_number_of_series_as_it_is(scrape: Scrape) -> None:
    before = scrape.series()
    notice = new_event(TYPE_PREFIX + "scheduledevent.scheduled.v1", {})
    for number in range(1000):
        scrape.meter.committed(
            [notice._replace(data={"EventType": f"New{number}", "NoticeSeconds": number}, id=str(number))]
        )
        scrape.meter.sent("ops", "delivered", 1.0)
    assert scrape.value("deliveries_total", sink="ops", result="delivered") == 1000
    assert scrape.series() == before


@pytest.mark.parametrize(("affects", "counted"), [(True, 1), (None, 1), (False, 0)])
def test_the_notice_of_another_vms_event_is_not_measured(
    scrape: Scrape, affects: bool | None, counted: int
) -> None:
    data = {"EventType": "Reboot", "NoticeSeconds": 60, "AffectsThisVm": affects}
    notice = new_event(TYPE_PREFIX + "scheduledevent.scheduled.v1", {})
    scrape.meter.committed([notice._replace(data=data)])
    assert scrape.value("notice_seconds_count", type="Reboot") == counted
    assert scrape.value("changes_total", kind="scheduled") == 1


def test_a_scrape_shows_the_sinks_and_the_bus(scrape: Scrape) -> None:
    now = scrape.clock.now()
    sink = sink_status(
        state="retrying",
        backlog=5,
        oldest_waits_seconds=12.5,
        next_retry_at=(now + timedelta(seconds=30)).isoformat(),
        dead_letters=1,
    )
    scrape.status = raw_status(
        now,
        "listen",
        commands=bus_status(last_error="detached", looked_at="2026-11-22T09:00:00.000Z"),
        waiting_commands=2,
        dry_run=True,
        out_of_work=[{"Since": (now - timedelta(seconds=90)).isoformat()}],
        storage_error="disk full",
        sinks={"ops": sink},
        left_sinks={"old": 7},
    )
    assert scrape.value("bus_connected") == 0
    assert scrape.value("bus_looked_timestamp_seconds") == datetime(2026, 11, 22, 9, tzinfo=UTC).timestamp()
    assert scrape.value("waiting_commands") == 2
    assert (scrape.value("clock_ahead_seconds"), scrape.value("dry_run")) == (0.4, 1)
    assert scrape.value("out_of_work_seconds") == pytest.approx(90, abs=0.1)
    assert scrape.value("storage_available") == 0
    assert scrape.value("storage_errors_total") == 3
    assert scrape.value("backlog_events", sink="ops") == 5
    assert scrape.value("oldest_waiting_seconds", sink="ops") == 12.5
    assert scrape.value("next_retry_seconds", sink="ops") == pytest.approx(30, abs=0.01)
    assert scrape.value("dead_letters", sink="ops") == 1
    assert scrape.value("sink_up", sink="ops") == 0
    assert scrape.value("unconfigured_backlog_events", sink="old") == 7


def test_the_known_reasons_are_those_of_the_contract() -> None:
    named = {"bridge.loss": LOSS_REASONS}
    named |= {f"approval.{outcome.lower()}": reasons for outcome, reasons in RECEIPT_REASONS.items()}
    for name, reasons in named.items():
        assert list(reasons) == json.loads(schema(name))["properties"]["Reason"]["examples"]


def test_before_the_first_answer_of_imds_its_age_counts_from_the_start(scrape: Scrape) -> None:
    scrape.clock.advance(70)
    assert scrape.value("imds_last_good_answer_age_seconds") == 70


def test_a_notice_that_waits_and_a_jump_of_the_clock_have_series(scrape: Scrape) -> None:
    assert scrape.value("undelivered_notice_seconds", sink="ops") is None
    until = scrape.clock.now() - timedelta(seconds=5)
    scrape.status["sinks"] = {"ops": sink_status(notice_until=iso_utc(until))}
    assert scrape.value("undelivered_notice_seconds", sink="ops") == -5
    scrape.meter.jumped()
    assert scrape.value("clock_jumps_total") == 1


def test_a_listener_which_may_be_alone_on_its_vm_reports_the_age_of_the_last_answer(scrape: Scrape) -> None:
    scrape.status.update(raw_status(scrape.clock.now(), "listen"))
    scrape.clock.advance(70)
    assert scrape.value("imds_last_good_answer_age_seconds") == 70


@pytest.mark.parametrize(
    ("changes", "seconds", "count"),
    [
        ({"EventStatus": "Started", "NotBefore": ""}, 0, 1),
        ({}, 121, 0),
        ({}, 119, 1),
        ({}, -60, 1),
        ({"Resources": ["web-1"]}, 60, 0),
        ({"Resources": ["web-1", "_WEB-0"]}, 60, 1),
    ],
)
def test_an_event_of_this_vm_that_has_started_or_will_soon_explains_its_silence(
    scrape: Scrape, changes: dict[str, Any], seconds: float, count: int
) -> None:
    at = scrape.clock.now() + timedelta(seconds=seconds)
    event = entry(Resources=["web-0"], NotBefore=format_datetime(at, usegmt=True)) | changes
    scrape.status["document"] = {"DocumentIncarnation": 1, "Events": [event]}
    assert scrape.value("imminent_events", type=event["EventType"]) == count
    assert scrape.value("imminent_events", type="Preempt") == 0
    scrape.status["vm"] = None
    assert scrape.value("imminent_events", type=event["EventType"]) == 0


def test_missing_instance_data_has_a_series_in_each_role(scrape: Scrape) -> None:
    for role in ("forward", "listen", "relay"):
        scrape.status = raw_status(scrape.clock.now(), role)
        for error, value in ((None, 1), ("no answer", 0)):
            scrape.status["identity_error"] = error
            assert scrape.value("instance_data_available") == value
