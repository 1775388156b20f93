"""The first flow over real sockets: IMDS is asked, documents are compared, and what changed is committed.

Time is a clock that the test moves; nothing here waits for real time to pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge import __version__
from bridge.config.imds import ImdsSettings
from bridge.config.models import Config
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.imds.document import Document, parse_document
from bridge.lab.imds import COMPUTE_PATH, EVENT_VERSIONS, EVENTS_PATH, ImdsLab
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.instants import iso_utc
from bridge.runtime.threads import Stop
from bridge.service import forwarder as forwarder_module
from bridge.service.forwarder import Forwarder
from tests.support.clock import MovedClock
from tests.support.diff import FIRST, SECOND, entry, envelope_of, faults_of

DAY = 86_400.0
HOUR = 3_600.0


class CountedStop(Stop):
    """Asked for after a number of waits, each of which moves the clock instead of lasting."""

    def __init__(self, clock: MovedClock, waits: int) -> None:
        super().__init__()
        self.clock = clock
        self.left = waits
        self.waited: list[float] = []

    def wait(self, seconds: float | None) -> bool:
        if self.left == 0:
            return True
        self.left -= 1
        self.waited.append(seconds or 0.0)
        self.clock.advance(max(0.0, seconds or 0.0))
        return False


class LaggingClient(ImdsClient):
    """The real client, over a line on which each answer takes its time on the test's clock."""

    def __init__(self, config: Config, clock: MovedClock) -> None:
        super().__init__(config.imds, clock=clock)
        self.clock = clock
        self.lags: list[float] = []
        self.asked: list[float] = []

    def document(self, *, timeout_seconds: float | None = None) -> bytes:
        self.asked.append(self.clock.monotonic())
        body = super().document(timeout_seconds=timeout_seconds)
        self.clock.advance(self.lags.pop(0) if self.lags else 0.0)
        return body


class Station:
    """One VM with its forwarder, its state on disk and its clock."""

    def __init__(
        self, lab: ImdsLab, folder: Path, *, vm: str = "web-0", api_version: str = "2020-07-01"
    ) -> None:
        self.lab, self.folder, self.vm = lab, folder, vm
        self.api_version = api_version
        self.clock = MovedClock()
        self.told = 0
        self.start()

    def start(self) -> None:
        imds = ImdsSettings.model_validate(
            {"endpoint": self.lab.url(self.vm), "api_version": self.api_version}
        )
        self.config = Config(imds=imds)
        self.outbox = Outbox(
            StateFolder(self.folder),
            clock=self.clock,
            sinks={"all": (Filter(), True)},
            max_bytes=2**30,
            retain_seconds=7 * DAY,
        )
        self.imds = LaggingClient(self.config, self.clock)
        self.forwarder = self.forwarder_until(Stop())

    def forwarder_until(self, stop: Stop) -> Forwarder:
        return Forwarder(self.config, imds=self.imds, outbox=self.outbox, clock=self.clock, stop=stop)

    def close(self) -> None:
        self.imds.close()
        self.outbox.close()

    def restart(self, *, after: float = 0.0) -> None:
        """End as kill -9 would, and begin again later, in a process whose monotonic clock began elsewhere."""
        self.close()
        self.clock = MovedClock(self.clock.wall() + after, monotonic=17.0)
        self.start()

    def poll(self, *, after: float = 1.0) -> float | None:
        self.clock.advance(after)
        return self.forwarder.poll()

    def run(self, *, waits: int) -> CountedStop:
        """Let the loop run for a number of polls, and the last one."""
        stop = CountedStop(self.clock, waits)
        self.forwarder = self.forwarder_until(stop)
        self.forwarder.run()
        return stop

    def all_events(self) -> list[dict[str, Any]]:
        """Return everything that was committed; each of it is a valid CloudEvent."""
        _, events = self.outbox.pending("all", 10_000)
        envelopes = [envelope_of(event.body) for event in events]
        for envelope in envelopes:
            assert faults_of(envelope) == []
        return envelopes

    def events(self) -> list[dict[str, Any]]:
        """Return what was committed since the last call."""
        envelopes = self.all_events()
        new = envelopes[self.told :]
        self.told = len(envelopes)
        return new

    def story(self) -> list[str]:
        """Return the names of what was committed since the last call."""
        return [name_of(envelope) for envelope in self.events()]

    def now(self) -> str:
        return iso_utc(self.clock.now())


def name_of(envelope: dict[str, Any]) -> str:
    name = envelope["type"].removeprefix("io.imdsbridge.").removesuffix(".v1")
    return name if "reporterseq" in envelope else f"{name} {envelope['subject']}"


Start = Callable[..., Station]


@pytest.fixture
def lab() -> Iterator[ImdsLab]:
    with ImdsLab(vms=["web-0", "web-1"], rate_limit=None) as started:
        yield started


@pytest.fixture
def start(lab: ImdsLab, tmp_path: Path) -> Iterator[Start]:
    stations: list[Station] = []

    def begin(**options: Any) -> Station:
        folder = tmp_path / f"state-{len(stations)}"
        stations.append(Station(lab, folder, **options))
        return stations[-1]

    yield begin
    for station in stations:
        station.close()


@pytest.fixture
def station(start: Start) -> Station:
    return start()


def reboot(lab: ImdsLab, event_id: str = FIRST, **options: Any) -> str:
    return lab.schedule(**{"event_type": "Reboot", "resources": ["web-0"], "event_id": event_id, **options})


# The first start


def test_a_first_start_without_events_tells_the_document_alone(station: Station) -> None:
    assert station.poll() is None
    (event,) = station.events()
    assert name_of(event) == "document.changed"
    assert event["data"]["Document"] == {"DocumentIncarnation": 1, "Events": []}
    assert event["data"]["CloudEventIds"] == []


def test_a_first_start_with_events_present_tells_each_and_the_document_last(
    lab: ImdsLab, station: Station
) -> None:
    reboot(lab, FIRST)
    reboot(lab, SECOND, event_status="Started", resources=["web-1"])
    station.poll()
    first, second, document = station.events()
    assert name_of(first) == f"scheduledevent.scheduled {FIRST}"
    assert name_of(second) == f"scheduledevent.started {SECOND}"
    assert document["data"]["CloudEventIds"] == [first["id"], second["id"]]
    assert [first["data"]["AffectsThisVm"], second["data"]["AffectsThisVm"]] == [True, False]
    assert first["data"]["Vm"]["Name"] == "web-0"
    assert document["source"].endswith("/virtualMachines/web-0")
    assert first["time"] == document["time"] == station.now()


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_a_whole_life_is_told_in_every_api_version(lab: ImdsLab, start: Start, version: str) -> None:
    station = start(api_version=version)
    station.poll()
    reboot(lab)
    station.poll()
    lab.start(FIRST)
    station.poll()
    lab.complete(FIRST)
    station.poll()
    told = station.events()
    assert [name_of(event) for event in told] == [
        "document.changed",
        f"scheduledevent.scheduled {FIRST}",
        "document.changed",
        f"scheduledevent.started {FIRST}",
        "document.changed",
        f"scheduledevent.completed {FIRST}",
        "document.changed",
    ]
    assert told[1]["data"]["AffectsThisVm"] is True
    assert told[1]["data"]["NotBeforeUtc"] is not None


def test_a_cancellation_that_was_watched_is_told_as_one(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    lab.cancel(FIRST)
    station.poll()
    assert station.story()[2:] == [f"scheduledevent.canceled {FIRST}", "document.changed"]


def test_a_change_under_the_same_incarnation_is_told(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    station.story()
    lab.change_quietly(FIRST, Description="moved")
    station.poll()
    update, document = station.events()
    assert name_of(update) == f"scheduledevent.updated {FIRST}"
    assert update["data"]["Previous"] == {"Description": ""}
    assert document["data"]["DocumentIncarnation"] == document["data"]["PreviousIncarnation"]


def test_a_strange_entry_is_told_in_the_document_as_it_came_beside_the_others(
    lab: ImdsLab, station: Station
) -> None:
    invalid_entries = {"EventId": None, "Whatever": ["\ud800", {}]}
    raw = {"DocumentIncarnation": 5, "Events": [invalid_entries, entry(), 5]}
    lab.serve_document(raw)
    station.poll()
    event, document = station.events()
    assert name_of(event) == f"scheduledevent.scheduled {FIRST}"
    assert document["data"]["Document"] == raw
    assert document["data"]["Unreadable"] == 2


def test_a_strange_entry_that_changes_is_told_by_the_document_alone(lab: ImdsLab, station: Station) -> None:
    lab.serve_document({"DocumentIncarnation": 5, "Events": [entry(), "odd"]})
    station.poll()
    station.story()
    lab.serve_document({"DocumentIncarnation": 5, "Events": [entry(), "odder"]})
    station.poll()
    assert station.story() == ["document.changed"]


def test_numbers_that_json_cannot_hold_stop_nothing(lab: ImdsLab, station: Station) -> None:
    odd = b'{"DocumentIncarnation": 1e999, "Events": [{"EventId": "a", "X": NaN, "Y": %s}]}' % (b"9" * 5000)
    lab.serve_document(odd)
    assert station.poll() is None
    event, _ = station.events()
    assert event["data"]["X"] == "NaN"
    assert event["data"]["Y"] == "9" * 5000


def test_two_vms_of_a_group_give_a_change_the_same_id_and_source(lab: ImdsLab, start: Start) -> None:
    stations = [start(vm="web-0"), start(vm="web-1")]
    reboot(lab)
    for station in stations:
        station.poll()
    (mine, my_document), (theirs, their_document) = (station.events() for station in stations)
    assert (mine["id"], mine["source"]) == (theirs["id"], theirs["source"])
    assert [mine["data"]["AffectsThisVm"], theirs["data"]["AffectsThisVm"]] == [True, False]
    assert my_document["id"] != their_document["id"]
    assert my_document["source"] != their_document["source"]


# Answers that say nothing new


def test_an_unchanged_answer_is_not_parsed(
    lab: ImdsLab, station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []

    def spy(body: bytes) -> Document:
        """Count the calls and let the real one do its work."""
        parsed.append(body)
        return parse_document(body)

    monkeypatch.setattr(forwarder_module, "parse_document", spy)
    reboot(lab)
    for _ in range(5):
        station.poll()
    assert len(parsed) == 1
    lab.start(FIRST)
    for _ in range(5):
        station.poll()
    assert len(parsed) == 2


def test_an_answer_that_is_only_spelled_otherwise_is_no_change(lab: ImdsLab, station: Station) -> None:
    raw = {"DocumentIncarnation": 5, "Events": [entry()]}
    lab.serve_document(raw)
    station.poll()
    station.story()
    lab.serve_document(b"\xef\xbb\xbf" + json.dumps(dict(reversed(raw.items())), indent=2).encode())
    station.poll()
    assert station.story() == []


# Restarts


def test_a_restart_with_the_state_kept_tells_nothing_twice(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    assert len(station.story()) == 2
    station.restart()
    station.poll()
    assert station.story() == []


def test_what_changed_while_the_process_was_away_is_told_at_the_start(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    station.story()
    station.restart(after=10)
    lab.start(FIRST)
    station.poll()
    assert station.story() == [f"scheduledevent.started {FIRST}", "document.changed"]


def test_a_scheduled_event_that_vanished_while_the_process_was_away_is_ended(
    lab: ImdsLab, station: Station
) -> None:
    reboot(lab, FIRST)
    reboot(lab, SECOND, event_status="Started")
    station.poll()
    station.story()
    station.restart(after=1)
    lab.complete(FIRST)
    lab.complete(SECOND)
    station.poll()
    assert station.story() == [
        f"scheduledevent.ended {FIRST}",
        f"scheduledevent.completed {SECOND}",
        "document.changed",
    ]


def test_the_same_transition_seen_again_has_another_id_also_after_a_restart(
    lab: ImdsLab, station: Station
) -> None:
    shown = {"DocumentIncarnation": 5, "Events": [entry()]}
    hidden = {"DocumentIncarnation": 5, "Events": []}
    ids = []
    for again in range(3):
        lab.serve_document(shown)
        station.poll()
        ids += [event["id"] for event in station.events() if event["subject"] == FIRST]
        lab.serve_document(hidden)
        station.poll()
        ids += [event["id"] for event in station.events() if event["subject"] == FIRST]
        if again:
            station.restart()
    assert len(ids) == len(set(ids)) == 6


# Outages


def fail(lab: ImdsLab, kind: str | int = 500, **options: Any) -> None:
    lab.fault(kind, **{"count": None, "path": EVENTS_PATH, **options})


def test_an_outage_is_told_once_and_its_end_with_from_and_to(lab: ImdsLab, station: Station) -> None:
    station.poll()
    blind_from = station.now()
    station.story()
    fail(lab)
    for _ in range(20):
        station.poll()
    (outage,) = station.events()
    assert name_of(outage) == "imds.unreachable"
    assert outage["data"]["Since"] == blind_from
    assert "500" in outage["data"]["Reason"]
    lab.clear_faults()
    station.poll()
    (recovery,) = station.events()
    assert name_of(recovery) == "imds.recovered"
    assert recovery["data"]["BlindFrom"] == blind_from
    assert recovery["data"]["BlindTo"] == station.now()
    assert recovery["data"]["BlindSeconds"] == 21


def test_an_outage_is_told_as_soon_as_it_has_lasted_five_seconds(lab: ImdsLab, station: Station) -> None:
    station.poll()
    station.story()
    fail(lab)
    station.poll(after=4.9)
    assert station.story() == []
    station.poll(after=0.1)
    assert station.story() == ["imds.unreachable"]


def test_a_failure_of_less_than_five_seconds_is_not_told(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    station.story()
    fail(lab)
    station.poll()
    station.poll()
    lab.clear_faults()
    lab.cancel(FIRST)
    station.poll()
    assert station.story() == [f"scheduledevent.canceled {FIRST}", "document.changed"]


def test_a_scheduled_event_that_vanished_during_an_outage_is_ended(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    station.story()
    fail(lab)
    station.poll(after=6)
    lab.clear_faults()
    lab.cancel(FIRST)
    station.poll()
    assert station.story() == [
        "imds.unreachable",
        "imds.recovered",
        f"scheduledevent.ended {FIRST}",
        "document.changed",
    ]


def test_each_outage_is_told_anew(lab: ImdsLab, station: Station) -> None:
    station.poll()
    for _ in range(2):
        fail(lab)
        station.poll(after=10)
        lab.clear_faults()
        station.poll()
    assert station.story()[1:] == ["imds.unreachable", "imds.recovered"] * 2


def test_an_outage_that_lasts_over_a_restart_is_one_outage(lab: ImdsLab, station: Station) -> None:
    station.poll()
    blind_from = station.now()
    fail(lab)
    station.poll(after=10)
    station.story()
    station.restart(after=100)
    station.poll()
    station.poll(after=10)
    assert station.story() == []
    lab.clear_faults()
    station.poll()
    (recovery,) = station.events()
    assert recovery["data"]["BlindFrom"] == blind_from
    assert recovery["data"]["BlindTo"] == station.now()
    assert recovery["data"]["BlindSeconds"] == 122


def test_an_outage_that_ended_while_the_process_was_away_is_told_as_ended_by_the_first_answer(
    lab: ImdsLab, station: Station
) -> None:
    station.poll()
    blind_from = station.now()
    fail(lab)
    station.poll(after=10)
    station.story()
    lab.clear_faults()
    station.restart(after=100)
    station.poll()
    (recovery,) = station.events()
    assert name_of(recovery) == "imds.recovered"
    assert recovery["data"]["BlindFrom"] == blind_from


def test_an_outage_found_at_a_start_counts_from_the_last_good_answer_of_the_run_before(
    lab: ImdsLab, station: Station
) -> None:
    station.run(waits=90)
    blind_from = station.now()
    station.story()
    station.restart(after=30)
    fail(lab)
    station.poll()
    station.poll(after=5)
    (outage,) = station.events()
    assert outage["data"]["Since"] == blind_from


def test_where_imds_never_answered_an_outage_has_no_beginning(lab: ImdsLab, station: Station) -> None:
    fail(lab)
    station.poll()
    station.poll(after=6)
    (outage,) = station.events()
    assert outage["data"]["Since"] is None
    lab.clear_faults()
    station.poll()
    recovery, _ = station.events()
    assert (recovery["data"]["BlindFrom"], recovery["data"]["BlindSeconds"]) == (None, None)


DEEP = b'{"Events": [' + b'{"EventId":' * 5000 + b"1" + b"}" * 5000 + b"]}"


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\x00", b"<html></html>", b"[]", b"{}", b'{"Events": 5}', b'{"Events": [', DEEP],
    ids=lambda body: repr(body[:20]),
)
def test_nonsense_is_an_outage_that_ends_with_the_next_good_answer(
    lab: ImdsLab, station: Station, nonsense: bytes
) -> None:
    reboot(lab)
    station.poll()
    station.story()
    lab.serve_document(nonsense)
    wait = station.poll()
    assert wait is not None
    station.poll(after=6)
    lab.serve_document(None)
    assert station.poll() is None
    assert station.story() == ["imds.unreachable", "imds.recovered"]


@pytest.mark.parametrize("kind", [302, 400, 404, 408, 410, 429, 500, 503, "empty", "garbage", "huge", "drop"])
def test_no_answer_of_imds_is_more_than_a_reason_to_ask_again(
    lab: ImdsLab, station: Station, kind: str | int
) -> None:
    fail(lab, kind, count=1)
    wait = station.poll()
    assert wait is not None
    assert 0.2 <= wait <= 5
    assert station.poll() is None
    assert station.story() == ["document.changed"]


def test_bytes_before_the_json_are_no_outage(lab: ImdsLab, station: Station) -> None:
    fail(lab, "junk_prefix")
    assert station.poll() is None
    assert station.story() == ["document.changed"]


def test_waits_between_failures_stay_between_a_fifth_and_five_seconds(lab: ImdsLab, station: Station) -> None:
    fail(lab)
    waits = [station.poll() for _ in range(60)]
    assert all(wait is not None and 0.2 <= wait <= 5 for wait in waits)
    assert len(set(waits[10:])) > 10  # spread by jitter


@pytest.mark.parametrize(
    ("retry_after", "wait"), [("7", 7.0), ("45", 45.0), ("99999", 60.0), ("1", 1.0), ("0", 0.2)]
)
def test_retry_after_is_obeyed_within_a_minute_and_without_hammering(
    lab: ImdsLab, station: Station, retry_after: str, wait: float
) -> None:
    fail(lab, 429, retry_after=retry_after)
    assert station.poll() == wait


def test_the_loop_waits_as_long_as_retry_after_says(lab: ImdsLab, station: Station) -> None:
    fail(lab, 429, retry_after=7, count=1)
    stop = station.run(waits=3)
    assert stop.waited == [0, 7, 1]


# The schedule


def test_the_first_poll_comes_at_once_and_the_others_once_a_second(station: Station) -> None:
    assert station.run(waits=4).waited == [0, 1, 1, 1]


def test_slow_answers_make_the_schedule_drift_by_nothing(station: Station) -> None:
    begun = station.clock.monotonic()
    station.imds.lags = [0.25, 0.5, 0.0, 0.875, 0.125]
    station.run(waits=6)
    assert [at - begun for at in station.imds.asked[:6]] == [0, 1, 2, 3, 4, 5]


def test_polls_that_were_missed_are_skipped_and_not_made_up_for(station: Station) -> None:
    begun = station.clock.monotonic()
    station.imds.lags = [2.5, 0.0, 1.0, 0.0]
    station.run(waits=5)
    assert [at - begun for at in station.imds.asked[:5]] == [0, 3, 4, 5, 6]


def test_after_the_stop_imds_is_asked_once_more(lab: ImdsLab, station: Station) -> None:
    station.poll()
    reboot(lab)
    station.run(waits=0)
    told = [f"scheduledevent.scheduled {FIRST}", "document.changed", "bridge.heartbeat"]
    assert station.story()[1:] == told
    assert len(station.imds.asked) == 2


def test_a_heartbeat_tells_of_the_start_of_every_hour_and_of_the_stop(station: Station) -> None:
    station.imds.lags = [0.0, 1800.0, 1800.0]
    station.run(waits=3)
    beats = [event["data"] for event in station.events() if ".heartbeat." in event["type"]]
    assert [beat["Reason"] for beat in beats] == ["Started", "Hourly", "Stopping"]
    assert [beat["Version"] for beat in beats] == [__version__] * 3
    assert all(beat["Backlog"].keys() == {"all"} for beat in beats)


def test_a_stop_during_an_outage_ends_the_loop(lab: ImdsLab, station: Station) -> None:
    fail(lab)
    station.run(waits=2)
    assert len(station.imds.asked) == 3


# Events that may come back


def test_events_hidden_by_a_reset_come_back_within_the_grace_without_a_word(
    lab: ImdsLab, station: Station
) -> None:
    lab.serve_document({"DocumentIncarnation": 9, "Events": [entry()]})
    station.poll()
    lab.serve_document({"DocumentIncarnation": 1, "Events": []})
    station.poll()
    assert station.forwarder.status()["missing"] == [entry()]
    lab.serve_document({"DocumentIncarnation": 2, "Events": [entry()]})
    station.poll(after=200)
    assert station.forwarder.status()["missing"] == []
    assert station.story() == [f"scheduledevent.scheduled {FIRST}"] + ["document.changed"] * 3


def test_events_hidden_by_a_reset_end_after_five_minutes_though_the_answer_stays_the_same(
    lab: ImdsLab, station: Station
) -> None:
    lab.serve_document({"DocumentIncarnation": 9, "Events": [entry(FIRST), entry(SECOND, "Started")]})
    station.poll()
    lab.serve_document({"DocumentIncarnation": 1, "Events": []})
    station.poll()
    station.story()
    for _ in range(299):
        station.poll()
    assert station.story() == []
    station.poll()
    assert station.story() == [
        f"scheduledevent.ended {FIRST}",
        f"scheduledevent.completed {SECOND}",
        "document.changed",
    ]


def test_the_grace_goes_on_over_a_restart(lab: ImdsLab, station: Station) -> None:
    lab.serve_document({"DocumentIncarnation": 9, "Events": [entry()]})
    station.poll()
    lab.serve_document({"DocumentIncarnation": 1, "Events": []})
    station.poll()
    station.story()
    station.restart(after=100)
    station.poll()
    assert station.story() == []
    station.poll(after=200)
    assert station.story() == [f"scheduledevent.ended {FIRST}", "document.changed"]


def test_a_first_call_that_turned_the_service_on_gives_missing_events_the_grace(
    lab: ImdsLab, station: Station
) -> None:
    reboot(lab)
    station.poll()
    station.restart(after=HOUR)
    lab.cancel(FIRST)
    station.imds.lags = [110.0]
    station.poll()
    assert station.story()[2:] == ["document.changed"]
    station.poll(after=300)
    assert station.story() == [f"scheduledevent.ended {FIRST}", "document.changed"]


def test_a_first_call_after_a_day_gives_missing_events_the_grace_also_over_a_restart(
    lab: ImdsLab, station: Station
) -> None:
    for restarted in (True, False):
        reboot(lab)
        station.poll()
        station.story()
        lab.cancel(FIRST)
        if restarted:
            station.restart(after=DAY)
        station.poll(after=1 if restarted else DAY)
        assert station.story() == ["document.changed"]
        station.poll(after=301)
        assert station.story() == [f"scheduledevent.ended {FIRST}", "document.changed"]


# The clock


@pytest.mark.parametrize("seconds", [HOUR, -HOUR, 30 * DAY])
def test_a_jump_of_the_wall_clock_is_no_gap_in_the_watch(
    lab: ImdsLab, station: Station, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    reboot(lab)
    station.poll()
    station.story()
    lab.cancel(FIRST)
    station.clock.jump(seconds)
    station.poll()
    canceled, document = station.events()
    assert name_of(canceled) == f"scheduledevent.canceled {FIRST}"
    assert document["time"] == station.now()
    assert "the wall clock jumped" in caplog.text


@pytest.mark.parametrize("seconds", [HOUR, -HOUR])
def test_a_jump_of_the_wall_clock_shortens_and_prolongs_no_grace(
    lab: ImdsLab, station: Station, seconds: float
) -> None:
    lab.serve_document({"DocumentIncarnation": 9, "Events": [entry()]})
    station.poll()
    lab.serve_document({"DocumentIncarnation": 1, "Events": []})
    station.poll()
    station.story()
    station.clock.jump(seconds)
    station.poll(after=299)
    assert station.story() == []
    station.poll(after=1)
    assert station.story() == [f"scheduledevent.ended {FIRST}", "document.changed"]


def test_a_jump_of_the_wall_clock_moves_no_poll(station: Station) -> None:
    station.poll()
    station.clock.jump(HOUR)
    assert station.run(waits=3).waited == [0, 1, 1]


# Who reports


def test_the_counter_of_the_vms_own_events_has_no_holes_over_changes_outages_and_restarts(
    lab: ImdsLab, station: Station
) -> None:
    for number in range(3):
        reboot(lab, f"event-{number}")
        station.poll()
        fail(lab)
        station.poll(after=10)
        lab.clear_faults()
        station.poll()
        station.restart(after=3)
        station.poll()
    own = [event for event in station.all_events() if "reporterseq" in event]
    assert [event["reporterseq"] for event in own] == [f"{number:012d}" for number in range(1, 10)]
    assert {event["reporter"] for event in own} == {"web-0/forward"}
    assert len({event["reporterepoch"] for event in own}) == 1
    assert len({event["id"] for event in own}) == len(own)


def test_another_vms_state_is_set_aside_and_everything_is_told_anew(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    before = station.events()
    station.vm, station.told = "web-1", 0
    station.restart(after=1)
    station.poll()
    event, document = station.events()
    assert name_of(event) == f"scheduledevent.scheduled {FIRST}"
    assert event["data"]["Vm"]["Name"] == "web-1"
    assert event["id"] == before[0]["id"]
    assert document["reporter"] == "web-1/forward"
    assert document["reporterseq"] == "000000000001"
    assert document["reporterepoch"] != before[1]["reporterepoch"]
    assert [path.name for path in station.folder.glob("*other-vm*") if path.suffix not in ("-wal", "-shm")]


def test_another_vms_state_is_set_aside_also_when_the_vm_is_known_only_later(
    lab: ImdsLab, station: Station
) -> None:
    reboot(lab)
    station.poll()
    station.vm, station.told = "web-1", 0
    station.restart(after=1)
    lab.fault(500, count=1, path=COMPUTE_PATH)
    station.poll()
    station.poll(after=31)
    station.poll()
    told = station.events()
    assert [name_of(event) for event in told] == [f"scheduledevent.scheduled {FIRST}", "document.changed"]
    assert told[1]["reporterseq"] == "000000000001"


def test_while_the_vm_is_unknown_events_go_out_with_what_is_known(lab: ImdsLab, station: Station) -> None:
    lab.fault(500, count=1, path=COMPUTE_PATH)
    reboot(lab)
    station.poll()
    event, _ = station.events()
    assert event["data"]["AffectsThisVm"] is None
    assert event["data"]["Vm"]["VmId"] == ""
    station.poll(after=31)
    lab.start(FIRST)
    station.poll()
    event, document = station.events()
    assert event["data"]["AffectsThisVm"] is True
    assert document["reporter"] == "web-0/forward"


def test_who_the_vm_is_is_kept_over_a_restart_without_instance_data(lab: ImdsLab, station: Station) -> None:
    station.poll()
    station.story()
    station.restart(after=1)
    lab.fault(500, count=None, path=COMPUTE_PATH)
    reboot(lab)
    station.poll()
    event, _ = station.events()
    assert event["data"]["AffectsThisVm"] is True


def test_who_the_vm_is_is_asked_once(lab: ImdsLab, station: Station) -> None:
    for _ in range(5):
        station.poll(after=100)
    assert [request.path for request in lab.requests()].count(COMPUTE_PATH) == 1


# The status


def test_the_status_shows_the_document_and_the_trouble(lab: ImdsLab, station: Station) -> None:
    reboot(lab)
    station.poll()
    good_at = station.now()
    fail(lab, 503)
    station.poll()
    status = station.forwarder.status()
    assert status["vm"] == "web-0"
    assert status["imds"] == lab.url("web-0")
    assert status["document"]["Events"][0]["EventId"] == FIRST
    assert status["last_good_at"] == good_at
    assert "503" in status["last_error"]
    lab.clear_faults()
    station.poll()
    assert station.forwarder.status()["last_error"] is None


def test_a_state_that_holds_nonsense_is_begun_anew_and_nothing_is_lost(
    lab: ImdsLab, station: Station
) -> None:
    reboot(lab)
    station.poll()
    station.outbox.set_meta({"watch": '{"missing": 3}', "vm": "[1]"}, synced=True)
    station.restart()
    station.events()
    station.poll()
    assert station.story() == [f"scheduledevent.scheduled {FIRST}", "document.changed"]
