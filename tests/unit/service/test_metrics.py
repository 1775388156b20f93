"""What is counted at the borders of a process, and what a scrape reads from its status."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from bridge.config.models import ImdsSettings
from bridge.contract.types import LOSS_REASONS, RECEIPT_REASONS
from bridge.errors import ImdsError, Rejected, Unavailable
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.service.composition import MeasuredImds
from bridge.service.dispatcher import Dispatcher
from bridge.service.metrics import Meter, StatusCollector
from infra.contract.data import DATA
from tests.support.clock import MovedClock
from tests.support.memory_sink import MemorySink
from tests.support.outbox import event, open_outbox


class Rig:
    """A registry with a meter and the collector of a status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.meter = Meter(self.registry, ["ops"])
        self.clock = MovedClock()
        self.status: dict[str, Any] = {
            "role": "forward",
            "storage_error": None,
            "storage_errors": 0,
            "outbox_bytes": 4096,
            "last_good_at": None,
            "document": None,
            "sinks": {},
            "left_sinks": {"old": 7},
        }
        self.registry.register(StatusCollector(lambda: self.status, self.clock))

    def value(self, name: str, **labels: str) -> float | None:
        """Return a sample's value, None if there is none."""
        return self.registry.get_sample_value(f"imds_bridge_{name}", labels)

    def series(self) -> set[str]:
        """Return every series: a sample's name with its labels."""
        lines = generate_latest(self.registry).decode().splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


class DeliveryRig(Rig):
    """A dispatcher whose deliveries are counted."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.sink = MemorySink(max_batch=100)
        self.outbox = open_outbox(folder, sinks={"ops": (Filter(), True)}, clock=self.clock)
        self.dispatcher = Dispatcher(
            "ops",
            self.sink,
            max_age_seconds=100.0,
            outbox=self.outbox,
            clock=self.clock,
            count=partial(self.meter.sent, "ops"),
        )

    def commit(self, count: int) -> None:
        """Store so many events."""
        self.outbox.commit([event(str(number)) for number in range(count)])


def test_counters_start_at_zero_for_every_known_label() -> None:
    rig = Rig()
    assert rig.value("polls_total", result="throttled") == 0
    assert rig.value("changes_total", kind="ended") == 0
    assert rig.value("deliveries_total", sink="ops", result="rejected") == 0
    assert rig.value("losses_total", reason="Damage") == 0
    assert rig.value("commands_total", outcome="failed", reason="imds_refused") == 0


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "answered"),
        (ImdsError("no connection"), "unanswered"),
        (ImdsError("500", status=500), "refused"),
        (ImdsError("429", status=429), "throttled"),
    ],
)
def test_a_poll_is_counted_by_its_result(error: ImdsError | None, result: str) -> None:
    rig = Rig()
    imds = MeasuredImds(ImdsSettings(), clock=rig.clock)
    imds.meter = rig.meter
    with (
        patch.object(ImdsClient, "document", side_effect=[error or b"{}"]),
        suppress(ImdsError),
    ):
        imds.document()
    assert rig.value("polls_total", result=result) == 1
    assert rig.value("poll_duration_seconds_count") == 1


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DeliveryRig]:
    made = DeliveryRig(tmp_path)
    yield made
    made.outbox.close()


def test_a_delivery_is_counted_with_the_time_that_the_event_waited(rig: DeliveryRig) -> None:
    rig.commit(1)
    rig.clock.advance(3.0)
    rig.dispatcher.step()
    assert rig.value("deliveries_total", sink="ops", result="delivered") == 1
    assert rig.value("delivery_seconds_sum", sink="ops") == pytest.approx(3.0)


@pytest.mark.parametrize(("error", "result"), [(Unavailable, "failed"), (Rejected, "rejected")])
def test_a_part_of_a_batch_is_counted_as_delivered_and_one_event_as_failed(
    rig: DeliveryRig, error: Any, result: str
) -> None:
    rig.commit(4)
    rig.sink.failures.append(error("no", delivered=2))
    rig.dispatcher.step()
    assert rig.value("deliveries_total", sink="ops", result="delivered") == 2
    assert rig.value("deliveries_total", sink="ops", result=result) == 1


def test_an_event_that_became_too_old_is_counted_as_expired(rig: DeliveryRig) -> None:
    rig.commit(1)
    rig.clock.advance(101.0)
    rig.dispatcher.step()
    assert rig.value("deliveries_total", sink="ops", result="expired") == 1
    assert rig.value("deliveries_total", sink="ops", result="delivered") == 0


def test_unknown_types_and_statuses_share_one_series() -> None:
    rig = Rig()
    entries = [{"EventType": f"New{number}", "EventStatus": "Odd"} for number in range(10_000)]
    before = rig.series()
    rig.status["document"] = {"DocumentIncarnation": 7, "Events": [*entries, "not an event", {}]}
    assert rig.value("scheduled_events", type="other", status="other") == 10_001
    rig.status["document"] = {"DocumentIncarnation": "seven", "Events": None}
    assert rig.value("document_incarnation") is None
    assert len(rig.series() - before) == 6 * 3


def test_ten_thousand_events_leave_the_number_of_series_as_it_is(rig: DeliveryRig) -> None:
    before = rig.series()
    rig.commit(10_000)
    while rig.dispatcher.step() is None:
        pass
    notice = event("n")[0]._replace(type="io.imdsbridge.scheduledevent.scheduled.v1")
    for number in range(10_000):
        data = {"EventType": f"New{number}", "NoticeSeconds": number}
        rig.meter.committed([notice._replace(data=data)])
    assert rig.value("deliveries_total", sink="ops", result="delivered") == 10_000
    assert rig.series() == before


def test_a_scrape_shows_the_sinks_and_the_bus() -> None:
    rig = Rig()
    retry_at = datetime.fromtimestamp(rig.clock.wall() + 30, UTC).isoformat()
    rig.status |= {
        "role": "listen",
        "commands": {"last_error": "detached"},
        "waiting_commands": 2,
        "storage_error": "disk full",
        "storage_errors": 3,
        "sinks": {
            "ops": {
                "state": "retrying",
                "backlog": 5,
                "oldest_waits_seconds": 12.5,
                "next_retry_at": retry_at,
                "dead_letters": 1,
            }
        },
    }
    assert rig.value("bus_connected") == 0
    assert rig.value("waiting_commands") == 2
    assert rig.value("storage_available") == 0
    assert rig.value("storage_errors_total") == 3
    assert rig.value("backlog_events", sink="ops") == 5
    assert rig.value("oldest_waiting_seconds", sink="ops") == 12.5
    assert rig.value("next_retry_seconds", sink="ops") == pytest.approx(30, abs=0.01)
    assert rig.value("dead_letters", sink="ops") == 1
    assert rig.value("sink_up", sink="ops") == 0
    assert rig.value("unconfigured_backlog_events", sink="old") == 7


def test_the_known_reasons_are_those_of_the_contract() -> None:
    assert list(LOSS_REASONS) == DATA["bridge.loss"].model_fields["Reason"].examples
    for outcome, reasons in RECEIPT_REASONS.items():
        examples = DATA[f"approval.{outcome.lower()}"].model_fields["Reason"].examples
        assert list(reasons) == examples


def test_a_listener_that_reads_imds_only_for_commands_reports_no_age_of_an_answer() -> None:
    rig = Rig()
    rig.status["last_good_at"] = "2026-11-22T09:00:00.000Z"
    assert rig.value("imds_last_good_answer_age_seconds") is not None
    rig.status["role"] = "listen"
    assert rig.value("imds_last_good_answer_age_seconds") is None
