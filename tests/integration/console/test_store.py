"""The store: once for each source and id, whatever arrives, on a disk that fails, and after damage."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.console import rows, tables
from bridge.console import store as store_module
from bridge.console.fleet import groups
from bridge.console.received import Received
from bridge.console.store import Store
from bridge.console.writer import Writer
from bridge.errors import StateError, Unavailable
from bridge.outbox.sqlite import log_bytes
from tests.support.clock import MovedClock
from tests.support.console import NOW, FleetVm, Shown, event, event_id, received, shown
from tests.support.disk import small_disk
from tests.support.only import only

AT = NOW.timestamp()
TABLES = ("event", "sighting", "scheduled", "affected", "vm", "run", "hole")
HEARTBEAT = FleetVm("web-0").heartbeat()
STATE = Path(__file__).parents[2] / "data/state/0.1.0/console/console.db"


def after(seconds: float = 0, *, hours: float = 0) -> datetime:
    return NOW + timedelta(seconds=seconds, hours=hours)


def beat(epoch: str, number: int, hours: float = 0, *, previous: tuple[str, int] | None = None) -> bytes:
    """Return the heartbeat of web-0 that has a number in a run."""
    vm = FleetVm("web-0", epoch=epoch, sequence=number - 1)
    reason = "Started" if number == 1 else "Hourly"
    return vm.heartbeat(after(hours=hours), reason=reason, previous=previous)


def without_identity(body: bytes, **changes: str) -> bytes:
    """Return an event of a VM that does not know who it is."""
    found = json.loads(body)
    found["data"]["Vm"] |= {"ResourceId": "", "VmId": ""}
    return json.dumps({**found, **changes}).encode()


# --- what is kept ---


def test_an_event_of_several_vms_is_one_with_what_each_saw(seen: Shown) -> None:
    vms = [FleetVm(f"web-{number}") for number in range(3)]
    for number, vm in enumerate(reversed(vms)):  # the one that saw it last arrives first
        seen.add(vm.change("scheduled", event(), after(2 - number)))
    row = only(seen.events())
    assert (row.event_id, row.first_seen_at) == (event_id("E"), AT)
    report = only(seen.read(rows.reports_of, row.key))
    assert report.seen_by == (("web-0", AT), ("web-1", AT + 1), ("web-2", AT + 2))
    assert (report.at, report.vm, report.data["Vm"]["Name"]) == (AT, "web-0", "web-0")
    assert (row.seen, row.seen_by_others) == (1, 2)


@pytest.mark.parametrize("order", [(5, 0, 9), (0, 5, 9), (9, 5, 0)])
def test_of_the_sightings_of_a_vm_the_first_is_kept(seen: Shown, order: tuple[int, ...]) -> None:
    vm = FleetVm("web-0")
    change = vm.change("scheduled", event(), after(9))
    listed = json.loads(change)["id"]
    seen.add(change)
    seen.add(*(vm.document(event(), [listed], after(seconds)) for seconds in order))
    assert only(seen.read(rows.reports_of, event_id("E").lower())).seen_by == (("web-0", AT),)


def test_a_document_shows_what_its_vm_saw_although_another_copy_was_kept(seen: Shown) -> None:
    first, second, elsewhere = FleetVm("web-0"), FleetVm("web-1"), FleetVm("web-0", group="other")
    change = first.change("scheduled", event())
    listed = [json.loads(change)["id"]]
    seen.add(change, *(vm.document(event(), listed, after(1)) for vm in (second, elsewhere)))
    report = only(seen.read(rows.reports_of, event_id("E").lower()))
    assert [name for name, _ in report.seen_by] == ["web-0", "web-1"]  # the other group has events of its own


def test_what_is_too_old_is_deleted_with_all_that_is_derived_from_it(seen: Shown) -> None:
    vm = FleetVm("web-0")
    seen.add(vm.heartbeat(), vm.change("scheduled", event(minutes=0)))
    assert [seen.store.prune(at) for at in (AT, AT + 1)] == [0, 2]
    assert [seen.sql(f"SELECT count(*) FROM {table}") for table in TABLES] == [0] * len(TABLES)  # noqa: S608 - constants


def test_an_announced_event_is_kept_until_it_is_over_and_too_old(seen: Shown) -> None:
    vm, day = FleetVm("web-0"), 86_400.0
    announced = event(minutes=7 * 24 * 60)
    seen.add(vm.heartbeat(), vm.change("scheduled", announced))
    assert seen.store.prune(AT + day) == 1  # the VM
    assert len(seen.events()) == 1
    ended = NOW + timedelta(days=7)
    seen.add(vm.change("canceled", announced, ended, previous=announced), at=ended)
    assert [seen.store.prune(AT + days * day) for days in (7, 8)] == [0, 3]  # two events, one VM
    assert seen.read(rows.find_event, event_id("E")) is None


def test_receipts_do_not_push_out_what_was_reported(seen: Shown) -> None:
    vm = FleetVm("web-0")
    seen.add(vm.change("scheduled", event()))
    seen.add(*(vm.receipt(event(), after(number), outcome="rejected") for number in range(1, 301)))
    seen.add(vm.change("started", event(EventStatus="Started"), after(400)))
    row = seen.event()
    assert (row.first_seen_at, row.approval, row.status) == (AT, "rejected", "Started")


def test_of_more_reports_than_a_page_has_those_that_decide_are_kept(seen: Shown) -> None:
    vm, steps = FleetVm("web-0"), list[tuple[Any, dict[str, Any]]]([("scheduled", {})])
    steps += [("updated", {"Description": str(n)}) for n in range(510)]
    steps += [("started", {"EventStatus": "Started"}), ("completed", {"EventStatus": "Started"})]
    bodies = [vm.change(kind, event(**more), after(n)) for n, (kind, more) in enumerate(steps)]
    seen.add(*bodies, at=after(600))
    page = seen.page(f"/event/{event_id('E')}")
    titles = re.findall("<b>(Announced|Updated|Started|Completed)</b>", page)
    assert (titles[0], titles[-2:], len(titles)) == ("Announced", ["Started", "Completed"], 500)
    assert "13 more reports: earlier changes and preparations" in page
    assert "463 more CloudEvents" in page


def test_a_stored_event_that_the_disk_has_changed_stops_no_other(seen: Shown) -> None:
    vm = FleetVm("web-0")
    seen.add(vm.change("scheduled", event()))
    with closing(sqlite3.connect(seen.path)) as database, database:
        database.execute("UPDATE event SET body = x'7b'")
    seen.add(vm.change("started", event(EventStatus="Started"), after(5)))
    assert seen.event().status == "Started"


# --- VMs ---


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("bodies", "missing", "doubled_at"),
    [
        pytest.param([beat("a", 1), beat("a", 3, 2)], 1, None, id="a number"),
        pytest.param([beat("a", 3, 2), beat("a", 1), beat("a", 2, 1)], 0, None, id="none that comes late"),
        pytest.param([beat("a", 1), beat("a", 10**15)], 0, None, id="none before one that jumps"),
        pytest.param(
            [beat("a", 1), beat("b", 1, previous=("a", 4))], 3, None, id="the last ones of the run before"
        ),
        pytest.param(
            [beat("b", 1, previous=("a", 400))], 0, None, id="none of a run that the console never saw"
        ),
        pytest.param(
            [
                beat("b", 1, previous=("a", 400)),
                beat("b", 2, -1 / 60),  # its clock was set back
                beat("c", 1, 0.1, previous=("b", 2)),
            ],
            0,
            None,
            id="none of such a run after later ones",
        ),
        pytest.param([beat("a", 1), beat("c", 1, 2, previous=("b", 7))], 7, None, id="a run between two"),
        pytest.param(
            [beat("a", 1), beat("c", 1, 2, previous=("b", 7)), beat("b", 3, 1)],
            6,
            None,
            id="the rest of a run between two",
        ),
        pytest.param(
            [beat(epoch, n + first, n / 3) for n in (0, 1, 2) for epoch, first in (("a", 1), ("b", 501))],
            0,
            AT + 2400,
            id="none of two forwarders that run at once",
        ),
        pytest.param(
            [beat("a", 1), beat("b", 501, 0.1), beat("a", 2, 0.2)],
            0,
            AT + 360,
            id="none of a forwarder that runs for seconds beside another",
        ),
        pytest.param([beat("a", 1), beat("b", 501, 0.15)], 500, None, id="the start of a run after another"),
    ],
)
def test_of_the_numbers_of_a_vm_those_that_never_arrived_are_missing(
    seen: Shown, bodies: list[bytes], missing: int, doubled_at: float | None, order: int
) -> None:
    for body in bodies[::order]:
        seen.add(body, at=after(hours=3))
    assert (seen.vm().missing, seen.vm().doubled_at) == (missing, doubled_at)


@pytest.mark.parametrize("is_known", [True, False])
def test_the_store_of_0_1_0_is_upgraded_with_what_it_holds(tmp_path: Path, *, is_known: bool) -> None:
    """Of an event that had ended, it did not keep which VMs it names; and it kept every heartbeat."""
    copy = shutil.copy(STATE, tmp_path / "console.db")
    with closing(sqlite3.connect(copy)) as old, old:
        at = old.execute("SELECT at FROM event").fetchone()[0]
        old.execute("UPDATE scheduled SET event_type = 'Terminate', status = 'Completed', is_open = 0")
        old.execute("UPDATE scheduled SET ended_at = ?", (at,))
        old.execute("DELETE FROM affected")
        old.execute("DELETE FROM sighting WHERE ?", (not is_known,))
        old.execute("UPDATE reporter SET last = 8")
    later = datetime.fromtimestamp(at, UTC) + timedelta(hours=3)
    for _ in range(2):
        with shown(tmp_path, later) as seen:
            row = seen.read(rows.find_event, "a308b7a8-40f7-5018-95b7-0652f8fdee21")
            assert row
            assert (row.seen, row.status) == (is_known, "Completed")
            page = seen.page(f"/event/{row.key}")
            assert ("Seen by 1 of 1 VM" in page, "before the upgrade" in page) == (is_known, not is_known)
            assert (seen.vm().watch, seen.vm().missing, seen.vm().group) == ("gone", 7, "shop")
            noted = seen.read(rows.notes)
            assert [noted.get(one) for one in ("damaged", "first_at", "last_at")] == [None, at, at]
            while seen.store.prune(0):
                pass
            assert seen.sql("SELECT count(*) FROM event") == 1


def test_what_is_deleted_is_not_missing(seen: Shown) -> None:
    vm = FleetVm("web-0")
    for hour in range(6):
        seen.add(vm.heartbeat(after(hours=hour)), at=after(hours=hour))
    assert seen.store.prune(AT + 3 * 3600) == 0
    assert seen.vm().missing == 0


def test_imds_is_unreachable_until_the_vm_says_otherwise(seen: Shown) -> None:
    vm = FleetVm("web-0")
    unreachable, recovered = vm.unreachable(since=after(-42)), vm.recovered(after(9), since=after(-42))
    seen.add(unreachable)
    assert (seen.vm().watch, seen.vm().unreachable_since) == ("unreachable", AT - 42)
    seen.add(recovered)
    seen.add(vm.heartbeat(), unreachable)
    assert seen.vm().watch == "watched"


@pytest.mark.parametrize("order", [1, -1])
def test_imds_that_fails_right_after_a_document_is_unreachable(seen: Shown, order: int) -> None:
    vm = FleetVm("web-0")
    for body in [vm.document(event(), []), vm.unreachable(after(10), since=NOW)][::order]:
        seen.add(body, at=after(20))
    assert seen.vm().unreachable_since == AT


@pytest.mark.parametrize("late_seconds", [0, 0.001, 20])
def test_a_gap_that_is_published_when_it_is_over_is_over(seen: Shown, late_seconds: float) -> None:
    vm, since = FleetVm("web-0"), after(-42)
    seen.add(vm.unreachable(after(late_seconds), since=since), vm.recovered(since=since))
    assert seen.vm().unreachable_since is None


def test_since_of_a_vm_with_a_wrong_clock_is_corrected_as_its_time_is(seen: Shown) -> None:
    wrong = NOW + timedelta(days=300)
    seen.add(FleetVm("web-0").unreachable(wrong, since=wrong - timedelta(seconds=42)))
    assert (seen.vm().alive_at, seen.vm().unreachable_since) == (AT, AT - 42)


@pytest.mark.parametrize(
    "clock", ["0001-01-01T00:00:00Z", "1970-01-02T00:00:00Z", "9999-12-31T23:59:59Z", "x"]
)
def test_of_a_clock_that_is_years_off_the_time_of_arrival_counts(seen: Shown, clock: str) -> None:
    seen.add(HEARTBEAT.replace(b"2026-11-20T13:00:00.000Z", clock.encode()))
    assert seen.store.prune(AT) == 0
    assert seen.vm().alive_at == AT


def test_the_future_does_not_make_a_vm_look_alive(seen: Shown) -> None:
    seen.add(FleetVm("web-0").heartbeat(after(hours=2)))
    seen.clock.advance(3901)
    assert seen.vm().watch == "silent"


def test_groups_that_differ_in_case_are_one(seen: Shown) -> None:
    seen.add(FleetVm("web-0", "Shop").heartbeat(), FleetVm("web-1", "SHOP").heartbeat())
    assert [group.vms[0].group for group in groups(seen.vms())] == ["shop"]


def test_a_vm_that_was_not_identified_at_first_is_shown_once(seen: Shown) -> None:
    seen.add(without_identity(FleetVm("WEB-0").heartbeat(), id="another"))
    assert seen.vm().name == "WEB-0"
    seen.add(HEARTBEAT)
    assert seen.vm().name == "web-0"


def test_a_vm_that_lost_its_identity_is_shown_until_it_has_it_again(seen: Shown) -> None:
    vm = FleetVm("web-0")
    seen.add(vm.heartbeat(after(hours=-1)), without_identity(vm.heartbeat(NOW)))
    assert sorted(bool(one.resource_id) for one in seen.vms()) == [False, True]
    seen.add(vm.heartbeat(after(1)))
    assert [bool(one.resource_id) for one in seen.vms()] == [True]


# --- the file ---


@pytest.mark.parametrize("content", [b"x" * 9000, b"SQLite format 3\0" + b"\xff" * 9000])
def test_what_is_no_database_is_moved_aside_and_the_pages_say_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "console.db").write_bytes(content)
    with shown(tmp_path) as seen:
        seen.add(HEARTBEAT)
        note = seen.read(rows.notes).get("damaged")
        assert note
        assert (tmp_path / note["moved_to"]).read_bytes() == content
        assert "and has started empty" in seen.page("/")
    with shown(tmp_path) as seen:
        assert len(seen.vms()) == 1
        assert seen.read(rows.notes).get("damaged") == note


def test_damage_that_only_a_page_finds_ends_the_writer_and_the_next_start_is_empty(tmp_path: Path) -> None:
    with shown(tmp_path) as seen:
        for number in range(100):
            seen.add(FleetVm(f"web-{number}").change("scheduled", event(f"E{number}")))
    with shown(tmp_path) as seen:
        with closing(sqlite3.connect(seen.path)) as database:
            root = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'vm'").fetchone()[0]
        with seen.path.open("r+b") as file:  # overwrite the page that the table begins on
            file.seek((root - 1) * 4096)
            file.write(b"\xff" * 4096)
        with pytest.raises(sqlite3.DatabaseError):
            seen.vms()
        writer = seen.writer()
        refused = writer.submit(received(HEARTBEAT))
        with pytest.raises(sqlite3.DatabaseError):
            writer.run_once(0)
        with pytest.raises(Unavailable):
            refused.result(0)
    with shown(tmp_path) as seen:
        assert seen.vms() == []
        assert seen.read(rows.notes).get("damaged")


def test_a_start_that_was_killed_while_it_made_the_tables_is_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    script = Path(rows.__file__).with_name("schema.sql").read_text().partition("CREATE TABLE vm")[0]
    begun = f"BEGIN;{tables.SCHEDULED_TABLE};{script}"
    code = f"import os, sqlite3; sqlite3.connect({str(path)!r}).executescript({begun!r}); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    with shown(tmp_path) as seen:
        assert seen.read(rows.notes).get("damaged") is None


def test_after_an_orderly_stop_the_store_is_one_file(tmp_path: Path) -> None:
    with shown(tmp_path) as seen:
        seen.add(HEARTBEAT)
        assert len(seen.vms()) == 1
    copy = tmp_path / "backup"
    copy.mkdir()
    shutil.copy(tmp_path / "console.db", copy)
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["console.db"]
    with shown(copy) as seen:
        assert len(seen.vms()) == 1


def test_the_store_of_another_version_is_refused_or_moved_aside(tmp_path: Path) -> None:
    def write(version: int) -> None:
        with closing(sqlite3.connect(tmp_path / "console.db")) as other:
            other.execute(f"PRAGMA user_version = {version}")

    write(99)
    with pytest.raises(StateError, match="newer imds-bridge"):
        Store(tmp_path / "console.db", clock=MovedClock())
    write(1)
    with shown(tmp_path) as seen:
        assert seen.read(rows.notes).get("damaged")


def test_a_log_that_a_long_reader_made_grow_is_emptied_afterwards(
    seen: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOG_BYTES", 400_000)
    with seen.store.reading() as reader:
        assert rows.vms(reader) == []
        for number in range(50):
            seen.add(FleetVm(f"web-{number}").change("scheduled", event(f"E{number}")))
        assert log_bytes(seen.path) > 400_000
    seen.store.prune(0)
    assert log_bytes(seen.path) == 0


def test_readers_and_the_writer_do_not_wait_for_each_other(seen: Shown) -> None:
    with seen.store.reading() as reader:
        assert rows.vms(reader) == []
        thread = threading.Thread(target=seen.add, args=(HEARTBEAT,))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert rows.vms(reader) == []
    assert len(seen.vms()) == 1


def test_no_query_reads_a_table_that_grows_from_end_to_end(seen: Shown) -> None:
    seen.add(*(FleetVm(f"web-{number}").change("scheduled", event(), NOW) for number in range(2)))
    row, everything = seen.event(), rows.EVERY
    queries: tuple[tuple[Callable[..., object], tuple[object, ...]], ...] = (
        *((one, ()) for one in (rows.open_events, rows.vms, rows.count_vms, rows.count_types, rows.notes)),
        *((one, (everything,)) for one in (rows.every_open, rows.count_due)),
        *((one, (row.key,)) for one in (rows.reports_of, rows.bodies_of_event)),
        (rows.vms_of, (row,)),
        (rows.count_receipts, (AT, everything)),
        *((partial(one, limit=50), (AT, everything)) for one in (rows.ended_events, rows.losses_since)),
    )
    statements: list[str] = []
    with seen.store.reading() as connection:
        connection.set_trace_callback(statements.append)
        for query, given in queries:
            query(connection, *given)
        connection.set_trace_callback(None)
        plans = [
            tuple(row)[3]
            for one in statements
            if not one.startswith("--")
            for row in connection.execute(f"EXPLAIN QUERY PLAN {one}")
        ]
    scans = [plan for plan in plans if plan.startswith(("SCAN event", "SCAN sighting", "SCAN scheduled"))]
    assert [scan for scan in scans if "USING" not in scan] == [], scans


# --- the writer ---


class FullStore(Store):
    """A store on a disk that is full while it says so."""

    is_full = True

    def add(self, *args: object, **kwargs: object) -> object:  # type: ignore[override] # of any signature
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        return super().add(*args, **kwargs)  # type: ignore[arg-type] # as given


def commit(writer: Writer, *bodies: bytes) -> Future[None]:
    """Give events to the writer, and let it work once."""
    future = writer.submit(received(*bodies))
    writer.run_once(0)
    return future


def test_what_cannot_be_committed_is_not_acknowledged(seen: Shown) -> None:
    seen.store = full = FullStore(seen.path, clock=seen.clock)
    writer = seen.writer()
    with pytest.raises(Unavailable, match="disk is full"):
        commit(writer, HEARTBEAT).result(0)
    full.is_full = False
    assert commit(writer, HEARTBEAT).result(0) is None
    assert (writer.received, writer.error) == (1, "")


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), ValueError("x"), sqlite3.IntegrityError("NOT NULL constraint failed"), RecursionError()],
)
def test_an_event_that_can_never_be_stored_is_refused_and_holds_up_nobody(
    seen: Shown, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bad, good = received(*(FleetVm(name).change("scheduled", event(name)) for name in ("bad", "good")))

    def read(event: Received, received_at: float) -> tuple[object, ...]:
        if event is bad:
            raise error
        return event_row(event, received_at)

    event_row = tables._event_row
    monkeypatch.setattr(tables, "_event_row", read)
    writer = seen.writer()
    refused, committed = writer.submit([bad]), writer.submit([good])
    writer.run_once(0)
    with pytest.raises(ValueError, match="cannot be stored"):
        refused.result(0)
    assert committed.result(0) is None


def test_what_changes_nothing_wakes_no_page(seen: Shown) -> None:
    woken: list[int] = []
    writer = seen.writer(on_change=lambda: woken.append(1))
    for _ in range(3):
        commit(writer, HEARTBEAT, FleetVm("web-0").change("scheduled", event()))
    assert (writer.version, len(woken), writer.repeated) == (1, 1, 4)
    commit(writer, FleetVm("web-1").change("scheduled", event()))
    assert writer.version == 2  # another VM has seen it


def test_a_clock_that_jumps_ahead_makes_nothing_old(seen: Shown) -> None:
    writer = seen.writer(retain_seconds=86_400.0)
    commit(writer, HEARTBEAT)
    seen.clock.jump(400 * 86_400.0)
    for seconds, left in ((3600, 1), (86_400, 0)):
        seen.clock.advance(seconds)
        writer.run_once(0)
        assert len(seen.vms()) == left


def test_senders_of_the_same_moment_share_a_transaction(seen: Shown) -> None:
    writer = seen.writer()
    futures = [writer.submit(received(FleetVm(f"web-{number}").heartbeat())) for number in range(20)]
    writer.run_once(0)
    assert all(future.done() for future in futures)
    assert writer.version == 1


def test_a_full_disk_costs_nothing_and_works_again_without_a_restart(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, shown(disk.path) as seen:
        writer = seen.writer()
        acknowledged: list[int] = []

        def send(number: int) -> None:
            if commit(writer, FleetVm(f"web-{number}").heartbeat()).exception(0) is None:
                acknowledged.append(number)

        for number in range(5000):
            send(number)
            if number == 20:
                disk.fill()
            if len(acknowledged) < number:
                break
        assert writer.error
        assert len(seen.vms()) == len(acknowledged)
        disk.free()
        send(number)
        assert (acknowledged[-1], writer.error) == (number, "")
        assert len(seen.vms()) == len(acknowledged)
        assert seen.read(rows.notes).get("damaged") is None


def test_a_file_that_another_program_locks_is_written_afterwards(
    seen: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BUSY_SECONDS", 0.01)
    with closing(sqlite3.connect(seen.path, isolation_level=None)) as other:
        writer = seen.writer()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="locked"):
            commit(writer, HEARTBEAT).result(0)
        other.execute("ROLLBACK")
        assert commit(writer, HEARTBEAT).result(0) is None
        assert writer.received == 1
