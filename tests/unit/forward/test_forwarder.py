"""The first flow's decisions: polls, restarts, outages, missing events, the clock and the VM's identity."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest

from bridge import __version__
from bridge.config.models import ImdsSettings
from bridge.errors import ImdsError, StateError
from bridge.forward import forwarder as forwarder_module
from bridge.imds.document import parse_document
from bridge.outbox import storage
from bridge.outbox.file_storage import FileStorage
from bridge.outbox.rows import DAMAGE, Loss
from bridge.outbox.sqlite import Database
from bridge.process.bridge_events import LISTED_IDS, BridgeEvents
from bridge.runtime.time import iso_utc
from tests.support.diff import FIRST, SECOND, entry, envelope_of
from tests.support.forward import DAY, HOUR, Scripted, name_of
from tests.support.imds import WEB_1
from tests.support.only import only
from tests.support.outbox import abandon, trace

GAP = ["imds.unreachable", "imds.recovered"]
DOCUMENT = ["document"]
INSTANCE = ["instance"]


def gap(station: Scripted, *, after: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Poll once; return what the two events of a gap say, which are all that came since the last call."""
    outage, recovery = station.published(after=after)
    assert [name_of(outage), name_of(recovery)] == GAP
    assert outage["time"] <= recovery["time"] == station.now()
    return outage["data"], recovery["data"]


@pytest.fixture
def station(tmp_path: Path) -> Iterator[Scripted]:
    started = Scripted(tmp_path / "state")
    yield started
    started.close()


def test_a_first_start_publishes_the_document_and_the_status_shows_it_with_the_last_error(
    station: Scripted,
) -> None:
    assert station.poll() is None
    good_at = station.now()
    event = only(station.events())
    assert name_of(event) == "document.changed"
    assert event["data"]["Document"] == {"DocumentIncarnation": 1, "Events": []}
    assert event["data"]["CloudEventIds"] == []
    station.imds.fail(503, methods=DOCUMENT)
    station.poll()
    status = station.forwarder.status()
    assert (status.vm, status.imds) == ("web-0", station.imds.base)
    assert (status.document, status.last_good_at) == (event["data"]["Document"], good_at)
    assert "503" in str(status.last_error)
    station.imds.restore()
    station.poll()
    assert station.forwarder.status().last_error is None


def test_the_status_shows_which_share_of_the_last_requests_failed(station: Scripted) -> None:
    for _ in range(10):
        station.imds.fail(429, methods=DOCUMENT, count=9)
        station.poll_for(10)
    assert 0.8 < (station.forwarder.status().failed_share or 0) <= 0.9
    station.imds.restore()
    station.poll_for(15)
    assert (station.forwarder.status().failed_share or 0) < 0.5


def test_a_first_start_with_events_publishes_each_and_the_document_last(station: Scripted) -> None:
    station.imds.schedule(FIRST)
    station.imds.schedule(SECOND, status="Started", Resources=["web-1"])
    first, second, document = station.published()
    assert name_of(first) == f"scheduledevent.scheduled {FIRST}"
    assert name_of(second) == f"scheduledevent.started {SECOND}"
    assert document["data"]["CloudEventIds"] == [first["id"], second["id"]]
    assert [first["data"]["AffectsThisVm"], second["data"]["AffectsThisVm"]] == [True, False]
    assert first["data"]["Vm"]["Name"] == "web-0"
    assert document["source"].endswith("/virtualMachines/web-0")
    assert first["time"] == document["time"] == station.now()


def test_an_unreadable_entry_and_its_changes_are_published_with_the_document_as_received(
    station: Scripted,
) -> None:
    invalid_entries = {"EventId": None, "Whatever": ["\ud800", {}]}
    raw: dict[str, Any] = {"DocumentIncarnation": 5, "Events": [invalid_entries, entry(), 5]}
    station.imds.serve(raw)
    event, document = station.published()
    assert name_of(event) == f"scheduledevent.scheduled {FIRST}"
    assert document["data"]["Document"] == raw
    assert document["data"]["Unreadable"] == 2
    station.imds.serve({**raw, "Events": [*raw["Events"][:2], 6]})
    assert station.polled() == ["document.changed"]


# Gaps


def test_a_process_that_did_not_run_publishes_the_gap_afterwards(station: Scripted) -> None:
    station.imds.schedule()
    since = station.settle()
    station.imds.end(FIRST)
    outage, recovery, ended, _ = station.published(after=30)
    assert outage["data"]["Since"] == since
    assert outage["data"]["Reason"].startswith("imds-bridge did not poll in that time")
    assert [event["data"]["Cause"] for event in (outage, recovery)] == ["NotPolled", "NotPolled"]
    assert (recovery["data"]["BlindFrom"], recovery["data"]["BlindSeconds"]) == (since, 30)
    assert ended["data"]["EndReason"] == "Gap"


@pytest.mark.parametrize("seconds", [6.0, HOUR, 30 * DAY])
def test_a_gap_over_a_restart_is_published_by_the_first_answer(station: Scripted, seconds: float) -> None:
    station.poll_for(90)
    since = station.now()
    station.story()
    station.restart(after=seconds - 2)
    station.imds.fail(500, methods=DOCUMENT, count=1)
    station.poll()
    outage, recovery = gap(station)
    told = {"Since": since, "Cause": "Restart", "Reason": "imds-bridge was restarted"}
    assert outage.items() >= told.items()
    blind = {"BlindFrom": since, "BlindTo": station.now(), "BlindSeconds": seconds, "Cause": "Restart"}
    assert recovery.items() >= blind.items()
    station.restart()
    assert station.polled() == []


@pytest.mark.parametrize(("jump", "after"), [(0, 3), (-HOUR, 0)])
def test_a_short_restart_and_a_clock_that_was_set_back_meanwhile_are_no_gap(
    station: Scripted, jump: float, after: float
) -> None:
    station.poll_for(90)
    station.story()
    station.clock.jump(jump)
    station.restart(after=after)
    station.poll_for(3)
    assert station.story() == []
    assert station.polled(after=5.0) == []


def test_an_outage_after_a_restart_is_one_gap_from_the_last_answer_before_it(
    station: Scripted,
) -> None:
    since = station.settle()
    station.restart(after=10)
    station.imds.fail(500, methods=DOCUMENT)
    station.poll_for(6)
    station.imds.restore()
    outage, recovery = gap(station)
    assert (outage["Since"], outage["Cause"]) == (since, "NoAnswer")
    assert (recovery["BlindSeconds"], recovery["Cause"]) == (17, "NoAnswer")
    station.poll_for(2)
    assert station.story() == []


@pytest.mark.parametrize("text", ["", "never", "2026-", "\0" * 24, "9" * 4000])
def test_an_unreadable_time_of_the_last_answer_is_none(station: Scripted, text: str) -> None:
    station.settle()
    (station.folder / "last-good").write_text(text)
    station.restart(after=HOUR)
    assert station.polled() == []


def test_a_request_without_an_answer_is_an_outage_after_five_seconds(station: Scripted) -> None:
    station.settle()
    station.imds.lags = [8.0]
    station.imds.fail(ImdsError("no answer within 10 s"), methods=DOCUMENT, count=1)
    outage = only(station.published(after=1))
    assert outage["data"]["Reason"] == "IMDS does not answer"
    assert outage["time"] == iso_utc(station.clock.now() - timedelta(seconds=4))
    assert station.polled() == ["imds.recovered"]


def test_gaps_of_a_slow_schedule_are_not_outages(station: Scripted) -> None:
    station.settings = ImdsSettings(poll_seconds=20.0)
    station.run(waits=5)
    assert "imds.unreachable" not in station.story()


@pytest.mark.parametrize(("away", "limit"), [(1.0, 10), (DAY - 1, 10), (DAY + 1, 130)])
def test_only_after_a_day_without_an_answer_imds_gets_the_long_limit(
    station: Scripted, away: float, limit: float
) -> None:
    station.poll()
    assert station.imds.calls[-1].timeout_seconds == 130  # the first one ever
    station.restart(after=away)
    station.imds.calls.clear()
    station.poll(after=0)
    station.poll()
    limits = [call.timeout_seconds for call in station.imds.calls if call.method == "document"]
    assert limits == [limit, 10]


def test_an_end_after_a_reboot_of_this_vm_says_so(station: Scripted) -> None:
    station.imds.schedule()
    station.settle()
    station.boot_id = "another"
    station.restart(after=60)
    station.imds.end()
    ended = station.published()[len(GAP)]
    assert (ended["data"]["EndReason"], ended["data"]["VmRebooted"]) == ("Restart", True)


def test_an_unchanged_answer_is_not_parsed(station: Scripted) -> None:
    station.imds.schedule()
    with patch.object(forwarder_module, "parse_document", wraps=parse_document) as parse:
        station.poll_for(5)
        assert parse.call_count == 1
        station.imds.start(FIRST)
        station.poll_for(5)
        assert parse.call_count == 2


# Restarts


@pytest.mark.parametrize(
    ("status", "is_gone", "kind"),
    [("Scheduled", False, None), ("Scheduled", True, "ended"), ("Started", True, "completed")],
)
def test_a_restart_publishes_nothing_twice_and_is_a_gap_in_the_watch(
    station: Scripted, status: str, is_gone: bool, kind: str | None
) -> None:
    station.imds.schedule(status=status)
    station.poll()
    assert len(station.story()) == 2
    station.restart(after=1)
    if is_gone:
        station.imds.end()  # one change, so that the incarnation skips nothing
    assert station.polled() == ([f"scheduledevent.{kind} {FIRST}", "document.changed"] if kind else [])


def test_the_same_transition_seen_again_has_another_id_also_after_a_restart(station: Scripted) -> None:
    shown = {"DocumentIncarnation": 5, "Events": [entry()]}
    hidden = {"DocumentIncarnation": 5, "Events": []}
    ids = []
    for _ in range(3):
        for served in (shown, hidden):
            station.imds.serve(served)
            ids += [event["id"] for event in station.published() if event["subject"] == FIRST]
        station.restart()
    assert len(ids) == len(set(ids)) == 6


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Let no transaction on a file succeed while the list has an item; files that are written in place can be."""
    broken: list[bool] = []
    transaction = Database.transaction

    @contextmanager
    def fail(database: Database, *, synced: bool = True) -> Iterator[None]:
        if broken and not database.is_memory:
            raise sqlite3.OperationalError("database or disk is full")
        with transaction(database, synced=synced):
            yield

    monkeypatch.setattr(Database, "transaction", fail)
    yield broken
    broken.clear()


def settle_with_two(station: Scripted) -> None:
    """Let two events be known, and pass over what was committed."""
    station.imds.schedule(FIRST)
    station.imds.schedule(SECOND)
    station.settle()


def hide(station: Scripted) -> None:
    """Restart on a state that cannot be read."""
    station.close()
    file = station.folder / "outbox.db"
    file.rename(station.folder / "away")
    file.mkdir()  # SQLite cannot open it
    station.restart(after=1)


def show(station: Scripted) -> None:
    """Let the state be read again."""
    (station.folder / "outbox.db").rmdir()
    (station.folder / "away").rename(station.folder / "outbox.db")


@contextmanager
def unreadable(station: Scripted) -> Iterator[None]:
    """Restart on a state that cannot be read, and once more when it can be read again, as a supervisor does."""
    hide(station)
    yield
    show(station)
    station.outbox.recover(may_end=False)
    assert station.outbox.storage_error
    with pytest.raises(StateError, match="the process ends, and the next start goes on"):
        station.outbox.recover()
    station.restart()


def kill_in_memory(station: Scripted) -> None:
    """End a process whose events every sink had and only memory has."""
    station.outbox.acknowledge("all", station.outbox.pending("all", 10_000))
    abandon(station.outbox)


def ends(station: Scripted) -> list[str]:
    """Return the kinds of all ends that were published."""
    kinds = [name_of(event).split(" ")[0].rpartition(".")[2] for event in station.all_events()]
    return [kind for kind in kinds if kind in ("ended", "completed", "canceled")]


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_only_a_state_knows_that_could_not_be_read_ends_and_the_rest_comes_again_with_its_ids(
    station: Scripted, is_killed: bool
) -> None:
    settle_with_two(station)
    with unreadable(station):
        station.forget()
        station.imds.end(FIRST)
        station.imds.schedule("third")
        station.poll()
        told = {name_of(event): event["id"] for event in station.events()}
        assert set(told) >= {f"scheduledevent.scheduled {name}" for name in (SECOND, "third")}
    station.forget()
    if is_killed:
        station.restart()
    station.run(waits=1)
    station.forget()
    again = station.events()
    loss = only([event for event in again if name_of(event) == "bridge.loss"])
    assert (loss["data"]["Reason"], loss["data"]["Count"]) == ("NotWritten", None)
    ended = only([event for event in again if name_of(event) == f"scheduledevent.ended {FIRST}"])
    assert ended["data"]["EndReason"] == "Restart"
    for name in (SECOND, "third"):
        events = [event for event in again if name_of(event) == f"scheduledevent.scheduled {name}"]
        assert {event["id"] for event in events} == {told[f"scheduledevent.scheduled {name}"]}
    station.restart()
    assert station.polled() == []


def test_what_waits_in_memory_at_the_end_is_delivered_after_what_waits_in_the_state(
    station: Scripted,
) -> None:
    station.imds.schedule(FIRST)
    station.poll()
    with unreadable(station):
        station.imds.schedule(SECOND)
        station.poll()
        station.outbox.acknowledge("all", station.outbox.pending("all", 1))
    names = [name_of(envelope_of(one.body)) for one in station.outbox.pending("all", 100)]
    first, second = (f"scheduledevent.scheduled {name}" for name in (FIRST, SECOND))
    assert names == [first, "document.changed", second, "document.changed"]


@pytest.mark.parametrize("is_read_only", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
def test_what_ends_while_the_state_cannot_be_read_is_told_also_after_a_kill_in_memory(
    station: Scripted, broken_disk: list[bool], is_told: bool, is_read_only: bool
) -> None:
    settle_with_two(station)
    with unreadable(station):  # an earlier time
        station.poll()
    station.poll()
    hide(station)
    if is_told:  # else this process never sees it
        station.poll()
    station.imds.end(FIRST)
    station.poll()
    assert ends(station) == (["canceled"] if is_told else [])
    kill_in_memory(station)
    show(station)
    broken_disk += [True] * is_read_only  # so that the next process is in memory, too
    station.start()
    station.poll()
    broken_disk.clear()
    station.outbox.recover()
    station.poll_for(3)
    assert ends(station) == ["ended"]


def test_a_state_that_could_not_be_read_twice_is_read_each_time(station: Scripted) -> None:
    station.settle()
    for expected in ([], ["ended"]):
        with unreadable(station):
            if expected:
                station.imds.end(FIRST)
            station.poll()
        station.poll()
        assert ends(station) == expected
        station.imds.schedule(FIRST)
        station.poll()


@pytest.mark.parametrize(("starts", "end"), [(False, "canceled"), (True, "completed")])
def test_what_ended_in_memory_ends_once_more_with_the_state(
    station: Scripted, starts: bool, end: str
) -> None:
    station.imds.schedule()
    station.settle()
    with unreadable(station):
        station.poll()
        if starts:
            station.imds.start()
            station.poll()
        station.imds.end()
        station.poll()
    station.poll_for(3)
    assert ends(station) == [end, "ended"]


def test_after_a_loss_what_imds_shows_is_published_again_beside_the_ends_of_an_unread_state(
    station: Scripted,
) -> None:
    settle_with_two(station)
    with unreadable(station):
        station.imds.end(FIRST)
    loss = Loss(reason=DAMAGE, count=None)
    station.outbox.storage.run(lambda database: database.note_losses([loss]), synced=True)
    before = len(station.all_events())
    station.run(waits=1)
    names = [name_of(event) for event in station.all_events()[before:]]
    assert f"scheduledevent.scheduled {SECOND}" in names
    assert f"scheduledevent.ended {FIRST}" in names


def test_a_state_that_is_read_before_the_first_answer_gives_no_id_to_another_content(
    station: Scripted,
) -> None:
    station.imds.schedule()
    station.settle()
    for source in ("User", "Platform", "User"):
        station.imds.update(EventSource=source)
        station.poll()
    with unreadable(station):
        station.imds.update(EventSource="Platform")
    station.poll()
    updates = [event["id"] for event in station.all_events() if name_of(event).endswith(f"updated {FIRST}")]
    assert len(updates) == len(set(updates)) == 4


def test_a_state_of_which_a_failing_disk_gave_too_little_is_read_later(station: Scripted) -> None:
    station.imds.schedule()
    station.settle()
    failure = sqlite3.OperationalError("disk I/O error")
    with (
        patch.object(FileStorage, "_use_file", side_effect=failure),
        patch.object(storage, "fill_memory", side_effect=failure),
    ):
        station.restart(after=1)
        station.imds.end()
        station.poll()
    with pytest.raises(StateError):
        station.outbox.recover()
    station.restart()
    station.poll()
    assert ends(station) == ["ended"]


def see_in_memory_and_kill(
    station: Scripted, broken_disk: list[bool], served: dict[str, Any], *, is_delivered: bool
) -> None:
    """Let only memory have a document, kill the process, and start it again on a disk that works."""
    station.settle()
    broken_disk.append(True)
    station.imds.serve(served)
    station.poll()
    assert station.outbox.storage_error
    if is_delivered:
        kill_in_memory(station)
    else:
        abandon(station.outbox)
    broken_disk.clear()
    station.start()
    station.events()


@pytest.mark.parametrize(("is_delivered", "events"), [(True, 1), (False, 1), (False, 3000)])
def test_what_was_only_known_in_memory_ends_after_a_kill(
    station: Scripted, broken_disk: list[bool], is_delivered: bool, events: int
) -> None:
    names = [str(uuid4()) for _ in range(events)]
    served = {"DocumentIncarnation": 2, "Events": [entry(name) for name in names]}
    see_in_memory_and_kill(station, broken_disk, served, is_delivered=is_delivered)
    assert [loss.reason for loss in station.outbox.losses()] == ([] if is_delivered else ["NotWritten"])
    station.imds.serve({"DocumentIncarnation": 3, "Events": []})
    station.run(waits=1)
    ended = [event for event in station.events() if ".ended." in event["type"]]
    assert {event["subject"] for event in ended} == {*names}
    assert {event["data"]["EndReason"] for event in ended} == {"Restart"}
    station.restart()
    assert station.polled() == []


@pytest.mark.parametrize("returns", [False, True])
def test_what_ended_in_memory_after_a_loss_is_over_after_another_kill(
    station: Scripted, broken_disk: list[bool], returns: bool
) -> None:
    station.imds.schedule(FIRST)
    station.settle()
    broken_disk.append(True)
    station.imds.schedule(SECOND)
    station.poll()
    abandon(station.outbox)
    station.start()
    assert [loss.reason for loss in station.outbox.losses()] == ["NotWritten"]
    station.run(waits=1)
    station.imds.end(FIRST)
    station.poll()
    kill_in_memory(station)
    broken_disk.clear()
    if returns:
        station.imds.schedule(FIRST)
    station.start()
    before = len(station.all_events())
    station.poll_for(2)
    told = [name_of(event) for event in station.all_events()[before:]]
    assert [name for name in told if FIRST in name] == [f"scheduledevent.scheduled {FIRST}"] * returns


def test_what_is_still_shown_after_a_kill_in_memory_goes_on(
    station: Scripted, broken_disk: list[bool]
) -> None:
    served = {"DocumentIncarnation": 2, "Events": [entry()]}
    see_in_memory_and_kill(station, broken_disk, served, is_delivered=True)
    assert station.polled() == []
    station.imds.serve({"DocumentIncarnation": 3, "Events": []})
    assert station.polled() == [f"scheduledevent.canceled {FIRST}", "document.changed"]


def test_what_an_older_copy_of_the_state_knows_ends_and_the_rest_is_published_again(
    station: Scripted, tmp_path: Path
) -> None:
    settle_with_two(station)
    older = tmp_path / "older.db"
    station.close()
    shutil.copy(station.folder / "outbox.db", older)
    station.start()
    station.imds.schedule("third")
    station.poll()
    station.close()
    shutil.copy(older, station.folder / "outbox.db")
    station.imds.end(FIRST)
    station.start()
    station.events()
    station.run(waits=1)
    names = station.story()
    assert "bridge.loss" in names
    assert {name for name in names if name.startswith("scheduledevent")} == {
        f"scheduledevent.ended {FIRST}",
        f"scheduledevent.scheduled {SECOND}",
        "scheduledevent.scheduled third",
    }


def test_a_gap_and_the_change_that_follows_it_wait_for_the_disk_once(station: Scripted) -> None:
    station.settle()
    station.imds.schedule()
    ran: list[str] = []
    trace(station.outbox, ran.append)
    station.poll(after=10)
    trace(station.outbox, None)
    assert ran.count("COMMIT") == 1
    *gap, scheduled, document = station.events()
    assert [name_of(event) for event in gap] == GAP
    assert name_of(scheduled) == f"scheduledevent.scheduled {FIRST}"
    assert document["data"]["CloudEventIds"] == [scheduled["id"]]


def test_an_hourly_heartbeat_lists_the_events_that_are_not_over(station: Scripted) -> None:
    station.imds.schedule()
    station.imds.schedule(SECOND)
    station.run(waits=4000)
    hourly = [one["data"] for one in station.all_events() if one["data"].get("Reason") == "Hourly"]
    assert [*map(sorted, (one["OpenEventIds"] for one in hourly))] == [sorted([FIRST, SECOND])] * len(hourly)
    assert hourly


# Outages


def test_each_outage_is_published_once_and_its_end_with_both_times(station: Scripted) -> None:
    for _ in range(2):
        since = station.settle()
        station.imds.fail(500, methods=DOCUMENT)
        station.poll_for(20)
        station.imds.restore()
        outage, recovery = gap(station)
        assert outage["Since"] == recovery["BlindFrom"] == since
        assert "500" in outage["Reason"]
        assert (recovery["BlindTo"], recovery["BlindSeconds"]) == (station.now(), 21)


@pytest.mark.parametrize("seconds", [2.0, 4.9])
def test_only_an_outage_of_five_seconds_is_published_and_a_gap_in_the_watch(
    station: Scripted, seconds: float
) -> None:
    station.imds.schedule()
    station.settle()
    station.imds.fail(500, methods=DOCUMENT)
    assert station.polled(after=seconds) == []
    if seconds > 4:
        assert station.polled(after=0.1) == ["imds.unreachable"]
        return
    station.imds.restore()
    station.imds.end(FIRST)
    assert station.polled() == [f"scheduledevent.canceled {FIRST}", "document.changed"]


@pytest.mark.parametrize("is_over", [False, True])
def test_an_outage_that_lasts_or_ends_over_a_restart_is_one_outage(station: Scripted, is_over: bool) -> None:
    blind_from = station.settle()
    station.imds.fail(500, methods=DOCUMENT)
    assert station.polled(after=10) == ["imds.unreachable"]
    if is_over:
        station.imds.restore()
    station.restart(after=100)
    if not is_over:
        station.poll()
        assert station.polled(after=10) == []
        station.imds.restore()
    recovery = only(station.published())
    assert name_of(recovery) == "imds.recovered"
    seconds = 111 if is_over else 122
    blind = {"BlindFrom": blind_from, "BlindTo": station.now(), "BlindSeconds": seconds}
    assert recovery["data"].items() >= blind.items()


def test_a_request_that_failed_within_a_gap_is_its_cause(station: Scripted) -> None:
    station.settle()
    station.imds.fail(500, methods=DOCUMENT, count=1)
    assert station.polled(after=4) == []
    outage, recovery = gap(station, after=4)
    assert (outage["Cause"], recovery["Cause"]) == ("NoAnswer", "NoAnswer")
    assert "500" in outage["Reason"]


def test_an_outage_of_an_imds_that_never_answered_has_no_start(station: Scripted) -> None:
    station.imds.fail(500, methods=DOCUMENT)
    station.poll()
    outage = only(station.published(after=6))
    assert outage["data"]["Since"] is None
    station.imds.restore()
    recovery, _ = station.published()
    assert (recovery["data"]["BlindFrom"], recovery["data"]["BlindSeconds"]) == (None, None)


DEEP = b'{"Events": [' + b'{"EventId":' * 5000 + b"1" + b"}" * 5000 + b"]}"


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\x00", b"<html></html>", b"[]", b"{}", b'{"Events": 5}', b'{"Events": [', DEEP],
    ids=lambda body: repr(body[:20]),
)
def test_unreadable_answers_are_an_outage_until_the_next_usable_one(
    station: Scripted, nonsense: bytes
) -> None:
    station.imds.schedule()
    station.settle()
    station.imds.serve(nonsense)
    station.poll()
    assert "sent" in str(station.forwarder.status().last_error)
    station.poll(after=6)
    station.imds.serve_events()
    assert station.poll() is None
    assert station.story() == ["imds.unreachable", "imds.recovered"]


@pytest.mark.parametrize(
    ("status", "retry_after", "wait"),
    [
        *((429, 3.0, 3.0), (429, 5.0, 5.0), (429, 1.0, 1.0), (429, 0.0, 1.0), (429, None, 1.0)),
        *((status, 5.0, 1.0) for status in (302, 400, 404, 408, 410, 500, 503, None)),
    ],
)
def test_imds_is_asked_again_after_the_poll_interval_or_later_if_a_429_asks_for_it(
    station: Scripted, status: int | None, retry_after: float | None, wait: float
) -> None:
    error = ImdsError("no answer", status=status, retry_after_seconds=retry_after)
    station.imds.fail(error, methods=DOCUMENT, count=5)
    assert station.run(waits=8).waited == [0, *[wait] * 5, 1, 1]
    assert station.story()[-2:] == ["document.changed", "bridge.heartbeat"]


# The schedule


def test_the_first_poll_comes_at_once_and_the_others_once_a_second_whatever_the_wall_clock_does(
    station: Scripted,
) -> None:
    assert station.run(waits=4).waited == [0, 1, 1, 1]
    station.clock.jump(HOUR)
    assert station.run(waits=3).waited == [0, 1, 1]


@pytest.mark.parametrize(
    ("lags", "asked"),
    [([0.25, 0.5, 0.0, 0.875, 0.125], [0, 1, 2, 3, 4, 5]), ([2.5, 0.0, 1.0, 0.0], [0, 3, 4, 5, 6])],
)
def test_slow_answers_do_not_shift_the_schedule_and_missed_polls_are_skipped(
    station: Scripted, lags: list[float], asked: list[float]
) -> None:
    start = station.clock.monotonic()
    station.imds.lags = lags
    station.run(waits=len(asked))
    assert [at - start for at in station.imds.asked[: len(asked)]] == asked


def test_after_the_stop_imds_is_polled_once_more(station: Scripted) -> None:
    station.poll()
    station.imds.schedule()
    station.run(waits=0)
    assert station.story()[1:] == [
        "bridge.heartbeat",
        f"scheduledevent.scheduled {FIRST}",
        "document.changed",
        "bridge.heartbeat",
    ]
    assert len(station.imds.asked) == 2


def test_heartbeats_are_published_at_the_start_every_hour_and_at_the_stop(station: Scripted) -> None:
    station.imds.lags = [0.0, 1800.0, 1800.0]
    station.run(waits=3)
    beats = [event["data"] for event in station.events() if ".heartbeat." in event["type"]]
    assert [beat["Reason"] for beat in beats] == ["Started", "Hourly", "Stopping"]
    assert [beat["Version"] for beat in beats] == [__version__] * 3
    assert all(beat["Backlog"].keys() == {"all"} for beat in beats)


@pytest.mark.parametrize(("share", "beats"), [(0.1, [360, 3960]), (0.25, [900, 4500]), (1, [3600, 7200])])
def test_heartbeats_of_vms_that_start_together_are_spread_over_the_hour(
    station: Scripted, share: float, beats: list[float]
) -> None:
    with patch("random.uniform", return_value=share):
        events = BridgeEvents(station.identity)
        events.emit_started()
    seconds = []
    for minute in range(1, 122):
        station.clock.advance(60)
        before = len(station.all_events())
        events.emit_heartbeat()
        seconds += [60 * minute] * (len(station.all_events()) - before)
    assert seconds == beats


# `documents = "named"`


def named(station: Scripted) -> None:
    """Let the station publish documents only for changes that name it, from its second document on."""
    station.is_fleet = True
    station.restart()
    station.poll()
    station.published()


def test_of_a_change_that_does_not_name_this_vm_the_next_heartbeat_lists_the_events(
    station: Scripted,
) -> None:
    named(station)
    station.imds.schedule(FIRST, Resources=["web-1"])
    first = only(station.published())
    assert name_of(first) == f"scheduledevent.scheduled {FIRST}"
    station.restart()
    station.imds.schedule(SECOND, Resources=["web-1", "web-2"])
    station.poll()
    assert name_of(station.published()[0]) == f"scheduledevent.scheduled {SECOND}"
    events = BridgeEvents(station.identity)
    events.emit_started()
    events.emit_stopping()
    started, stopping = station.events()
    assert first["id"] in started["data"]["CloudEventIds"]
    assert "CloudEventIds" not in stopping["data"]


@pytest.mark.parametrize(
    "served",
    [
        {"DocumentIncarnation": 7, "Events": [entry(FIRST, Resources=["web-1", "web-0"])]},
        {"DocumentIncarnation": 7, "Events": [entry(FIRST, Resources=[])]},
        {"DocumentIncarnation": 7, "Events": [entry(FIRST, Resources=["web-1"]), "unreadable"]},
        {"DocumentIncarnation": 7, "Events": []},
    ],
    ids=["it names this VM", "it names no VM", "an entry cannot be read", "only the incarnation changed"],
)
def test_a_vm_that_may_be_concerned_publishes_the_document(station: Scripted, served: dict[str, Any]) -> None:
    named(station)
    station.imds.serve(served)
    assert station.polled()[-1] == "document.changed"


def test_a_vm_that_an_event_no_longer_names_publishes_the_document_once_more(station: Scripted) -> None:
    named(station)
    for incarnation, resources in enumerate((["web-0", "web-1"], ["web-1"], ["web-1", "web-2"]), 7):
        station.imds.serve(
            {"DocumentIncarnation": incarnation, "Events": [entry(FIRST, Resources=resources)]}
        )
        station.poll()
    names = [name.partition(" ")[0] for name in station.story()]
    assert names == [
        *("scheduledevent.scheduled", "document.changed"),
        *("scheduledevent.updated", "document.changed"),
        "scheduledevent.updated",
    ]


def test_more_events_than_a_heartbeat_lists_are_listed_by_several(station: Scripted) -> None:
    events = BridgeEvents(station.identity)
    ids = [str(number) for number in range(2 * LISTED_IDS + 1)]
    station.outbox.commit([], records=events.list_later(ids))
    events = BridgeEvents(station.identity)  # after a kill
    events.emit_started()
    for _ in range(5):
        events.emit_heartbeat()
    events.emit_stopping()
    beats = [event["data"].get("CloudEventIds", []) for event in station.all_events()]
    assert [len(beat) for beat in beats] == [LISTED_IDS, LISTED_IDS, 1]
    assert [one for beat in beats for one in beat] == ids


# Events that may come back


def test_events_missing_after_a_reset_end_after_five_minutes_of_the_same_answer(
    station: Scripted,
) -> None:
    station.imds.serve({"DocumentIncarnation": 9, "Events": [entry(FIRST), entry(SECOND)]})
    station.poll()
    station.imds.serve({"DocumentIncarnation": 1, "Events": []})
    station.settle()
    assert station.forwarder.status().missing == [entry(FIRST), entry(SECOND)]
    for _ in range(299):
        assert station.polled() == []
    assert station.polled() == [
        f"scheduledevent.ended {FIRST}",
        f"scheduledevent.ended {SECOND}",
        "document.changed",
    ]
    assert station.forwarder.status().missing == []


def test_a_first_call_after_a_day_gives_missing_five_minutes_also_over_a_restart(
    station: Scripted,
) -> None:
    for restarted in (True, False):
        station.imds.schedule()
        station.settle()
        station.imds.end(FIRST)
        if restarted:
            station.restart(after=DAY)
        assert station.polled(after=1 if restarted else DAY) == [*GAP, "document.changed"]
        station.poll_for(301)
        assert station.story() == [f"scheduledevent.ended {FIRST}", "document.changed"]


# The clock


@pytest.mark.parametrize(
    ("jump", "starts_in", "end"),
    [
        *((jump, 100 * DAY, ("canceled", None)) for jump in (HOUR, -HOUR, 30 * DAY)),
        *((jump, seconds, ("ended", "ClockJumped")) for jump, seconds in ((HOUR, HOUR / 2), (-HOUR, 1))),
    ],
)
def test_a_jump_of_the_wall_clock_is_no_gap_and_only_what_no_clock_says_has_begun_is_canceled(
    station: Scripted, jump: float, starts_in: float, end: tuple[str, str | None]
) -> None:
    station.imds.schedule(NotBefore=iso_utc(station.clock.now() + timedelta(seconds=starts_in)))
    station.settle()
    station.imds.end(FIRST)
    station.clock.jump(jump)
    ended, document = station.published()
    assert (name_of(ended), ended["data"].get("EndReason")) == (f"scheduledevent.{end[0]} {FIRST}", end[1])
    assert document["time"] == station.now()


def test_a_jump_of_the_wall_clock_does_not_change_the_length_of_an_outage(station: Scripted) -> None:
    station.settle()
    station.clock.jump(HOUR)
    station.imds.fail(500, methods=DOCUMENT)
    station.poll(after=10)
    station.imds.restore()
    _, recovery = gap(station)
    assert recovery["BlindSeconds"] == 11


# Who reports


def test_what_is_published_again_after_damage_has_the_id_that_it_had_before(station: Scripted) -> None:
    station.imds.schedule(FIRST)
    station.poll()
    station.imds.start(FIRST)
    station.poll()
    station.imds.update(FIRST, EventStatus="Scheduled", NotBefore="")
    before = {event["subject"]: event for event in station.published() if event["subject"] == FIRST}
    station.imds.start(FIRST)
    started = station.published()[0]
    station.outbox.commit([], records={("state", "watch"): ""})  # as after damage
    station.restart()
    again, _ = station.published()
    assert name_of(again) == name_of(started)
    assert again["id"] == started["id"] != before[FIRST]["id"]
    station.imds.end(FIRST)
    station.settle()
    station.imds.schedule(FIRST, status="Started", NotBefore="")
    third, _ = station.published()
    assert third["id"] != again["id"]


def test_every_run_counts_from_one_in_an_epoch_of_its_own_and_names_the_run_before(
    station: Scripted,
) -> None:
    for number in range(3):
        station.imds.schedule(f"event-{number}")
        station.run(waits=2)
        station.restart(after=1)
    own = [event for event in station.all_events() if "reporterseq" in event]
    runs = [list(group) for _, group in groupby(own, lambda event: event["reporterepoch"])]
    before: tuple[str | None, int | None] = (None, None)
    for run in runs:
        assert [int(event["reporterseq"]) for event in run] == list(range(1, len(run) + 1))
        started = run[0]["data"]
        assert (started["Reason"], started["LastReporterSeq"]) == ("Started", 1)
        assert (started["PreviousEpoch"], started["PreviousLastReporterSeq"]) == before
        assert not {"PreviousEpoch", "PreviousLastReporterSeq"} & run[-1]["data"].keys()
        assert run[-1]["data"]["LastReporterSeq"] == len(run)
        before = (run[0]["reporterepoch"], len(run))
    assert len(runs) == 3
    assert {event["reporter"] for event in own} == {"web-0/forward"}
    assert len({event["id"] for event in own}) == len(own)


def test_a_clone_publishes_what_its_document_shows_and_nothing_of_the_original(
    station: Scripted,
) -> None:
    station.imds.schedule(FIRST)
    station.imds.schedule(SECOND)
    before = station.published()
    station.imds.vm = WEB_1
    station.imds.end(SECOND)
    station.forget()
    station.boot_id = "another"
    station.restart(after=HOUR)
    station.run(waits=1)
    names = ["bridge.heartbeat", "bridge.loss", f"scheduledevent.scheduled {FIRST}", "document.changed"]
    heartbeat, loss, event, document, _ = events = station.events()
    assert [name_of(one) for one in events[:4]] == names
    assert (heartbeat["data"]["PreviousEpoch"], loss["data"]["Reason"]) == (None, "OtherVm")
    assert (event["data"]["Vm"]["Name"], event["id"]) == ("web-1", before[0]["id"])
    assert (document["reporter"], document["reporterseq"]) == ("web-1/forward", "000000000003")
    assert [path.name for path in station.folder.glob("*other-vm*[0-9]")]


@contextmanager
def clone_that_cannot_read(station: Scripted) -> Iterator[None]:
    """Start and poll as a clone that can read the original's state only in the end."""
    station.imds.schedule(FIRST)
    station.settle()
    station.imds.schedule(SECOND)
    station.poll()  # and still waits
    station.imds.vm = WEB_1
    station.boot_id = "another"
    hide(station)
    station.imds.end(FIRST)
    station.poll()
    yield
    show(station)
    station.outbox.recover()
    assert station.outbox.storage_error is None


def test_a_clone_that_could_not_read_the_state_moves_it_aside_once_it_can(station: Scripted) -> None:
    with clone_that_cannot_read(station):
        station.story()
    station.poll_for(3)
    station.run(waits=1)
    _, loss, _ = events = station.events()
    assert [name_of(one) for one in events] == ["bridge.heartbeat", "bridge.loss", "bridge.heartbeat"]
    assert (loss["data"]["Reason"], loss["data"]["Count"]) == ("OtherVm", None)
    assert loss["reporter"] == "web-1/forward"
    assert [path.name for path in station.folder.glob("*other-vm*[0-9]")]
    station.restart()
    assert station.polled() == []


def test_a_clone_killed_before_it_could_read_the_state_moves_it_aside_at_its_next_start(
    station: Scripted,
) -> None:
    with clone_that_cannot_read(station):
        station.close()
    station.forget()
    station.restart()
    station.poll()
    station.run(waits=1)
    events = station.events()
    losses = [event["data"] for event in events if name_of(event) == "bridge.loss"]
    assert "OtherVm" in [loss["Reason"] for loss in losses]
    assert {event["data"]["Vm"]["Name"] for event in events} == {"web-1"}
    assert [path.name for path in station.folder.glob("*other-vm*[0-9]")]


def test_what_comes_before_the_name_is_published_without_it_and_the_run_ends_once_it_is_known(
    station: Scripted,
) -> None:
    station.imds.fail(500, methods=INSTANCE)
    station.outbox.commit([], records={("state", "vm"): None})
    station.restart()
    station.imds.schedule()
    station.run(waits=1)
    heartbeat, event, document, _ = station.events()
    assert (event["data"]["AffectsThisVm"], event["data"]["Vm"]["VmId"]) == (None, "")
    assert document["reporter"] == heartbeat["reporter"]
    station.imds.restore()
    station.imds.start(FIRST)
    assert station.run(waits=100).left > 90  # it does not wait for the stop
    *told, stopping = station.events()
    assert f"scheduledevent.started {FIRST}" in map(name_of, told)
    assert stopping["data"]["Reason"] == "Stopping"
    station.restart()
    station.imds.end(FIRST)
    station.run(waits=1)
    start, completed, *_ = station.events()
    assert (completed["data"]["AffectsThisVm"], start["reporter"]) == (True, "web-0/forward")
    assert start["data"]["PreviousEpoch"] == stopping["reporterepoch"]


def test_a_notice_of_a_first_start_without_a_name_comes_again_in_the_vms_name(station: Scripted) -> None:
    station.imds.fail(500)
    station.outbox.commit([], records={("state", "vm"): None})
    station.restart()
    station.run(waits=10)
    station.imds.restore()
    station.imds.schedule(FIRST)
    station.run(waits=10)
    station.restart(after=6)
    station.run(waits=10)
    shown = [one for one in station.all_events() if name_of(one) == f"scheduledevent.scheduled {FIRST}"]
    assert [one["data"]["AffectsThisVm"] for one in shown] == [None, True]


@pytest.mark.parametrize("is_killed", [True, False])
def test_after_a_run_without_the_state_there_is_a_loss_although_everything_was_delivered(
    station: Scripted, is_killed: bool
) -> None:
    settle_with_two(station)
    hide(station)
    station.imds.schedule("third")
    station.poll()
    station.outbox.acknowledge("all", station.outbox.pending("all", 10_000))
    abandon(station.outbox) if is_killed else station.close()
    show(station)
    station.imds.end("third")
    station.start()
    station.forget()
    station.run(waits=3)
    assert station.story().count("bridge.loss") == 1
