"""The store: once for each source and id, whatever arrives, also after damage."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from bridge.console import queries
from bridge.console.store import Store, connect_reader
from bridge.console.writer import Writer
from bridge.errors import StateError, Unavailable
from bridge.runtime.threads import Stop
from tests.support.clock import MovedClock
from tests.support.console import NOW, FleetVm, event, event_id, received, stored

AT = NOW.timestamp()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "console.db")) as opened:
        yield opened


@pytest.fixture
def reader(store: Store) -> Iterator[sqlite3.Connection]:
    readers = queries.Readers(store)
    with readers.reading() as connection:
        connection.rollback()  # so that each look sees what is new
        yield connection
    readers.close()


def test_an_event_of_several_vms_is_one_with_what_each_saw(store: Store, reader: sqlite3.Connection) -> None:
    vms = [FleetVm(f"web-{number}") for number in range(3)]
    for number, vm in enumerate(reversed(vms)):  # the one that saw it last arrives first
        at = NOW + timedelta(seconds=2 - number)
        stored(store, vm.change("scheduled", event(), at))
    (row,) = queries.open_events(reader, AT)
    assert row.event_id == event_id("E").lower()
    (report,) = queries.reports_of(reader, row.event_id)
    assert report.seen_by == (("web-0", AT), ("web-1", AT + 1), ("web-2", AT + 2))
    assert queries.count_seen_by(reader, row.event_id) == 3


def test_a_repeated_event_changes_nothing(store: Store, reader: sqlite3.Connection) -> None:
    bodies = [FleetVm("web-0").heartbeat(), FleetVm("web-0").change("scheduled", event())]
    stored(store, *bodies, *bodies)
    stored(store, *bodies)
    assert reader.execute("SELECT count(*) FROM event").fetchone()[0] == 2
    assert [vm.gaps for vm in queries.vms(reader)] == [0]


def test_a_document_shows_what_its_vm_saw_although_another_copy_was_kept(
    store: Store, reader: sqlite3.Connection
) -> None:
    first, second = FleetVm("web-0"), FleetVm("web-1")
    change = first.change("scheduled", event())
    (kept,) = received(change)
    listed = json.loads(kept.body)["id"]
    stored(store, change, second.heartbeat(), second.document(event(), [listed], NOW + timedelta(seconds=1)))
    (report,) = queries.reports_of(reader, event_id("E"))
    assert [name for name, _ in report.seen_by] == ["web-0", "web-1"]


def test_numbers_that_are_missing_are_gaps_until_they_arrive(
    store: Store, reader: sqlite3.Connection
) -> None:
    vm = FleetVm("web-0")
    first, late, last = (vm.heartbeat(NOW + timedelta(hours=hour)) for hour in range(3))
    now = NOW + timedelta(hours=3)
    stored(store, last, first, now=now)
    assert [one.gaps for one in queries.vms(reader)] == [1]
    stored(store, late, now=now)
    assert [one.gaps for one in queries.vms(reader)] == [0]


def test_an_older_heartbeat_that_arrives_late_does_not_count(
    store: Store, reader: sqlite3.Connection
) -> None:
    vm = FleetVm("web-0")
    old, new = (
        vm.heartbeat(version="0.2.0", backlog=7),
        vm.heartbeat(NOW + timedelta(hours=1), reason="Stopping"),
    )
    stored(store, new, now=NOW + timedelta(hours=2))
    stored(store, old, now=NOW + timedelta(hours=2))
    (row,) = queries.vms(reader)
    assert (row.version, row.backlog, bool(row.is_stopped)) == ("0.3.0", 0, True)


def test_imds_is_unreachable_until_the_vm_says_otherwise(store: Store, reader: sqlite3.Connection) -> None:
    vm = FleetVm("web-0")
    unreachable = vm.unreachable(NOW, since=NOW - timedelta(seconds=42))
    recovered = vm.recovered(NOW + timedelta(seconds=9), since=NOW - timedelta(seconds=42))
    stored(store, unreachable)
    assert queries.vms(reader)[0].unreachable_since == AT - 42
    stored(store, recovered)
    stored(store, vm.heartbeat(), unreachable)
    assert queries.vms(reader)[0].unreachable_since is None


def test_a_vm_that_was_not_identified_at_first_is_shown_once(
    store: Store, reader: sqlite3.Connection
) -> None:
    body = json.loads(FleetVm("WEB-0").heartbeat())
    body["data"]["Vm"] |= {"ResourceId": "", "VmId": ""}
    unidentified = json.dumps({**body, "id": "another"}).encode()
    stored(store, unidentified)
    assert [vm.name for vm in queries.vms(reader)] == ["WEB-0"]
    stored(store, FleetVm("web-0").heartbeat())
    assert [vm.name for vm in queries.vms(reader)] == ["web-0"]


def test_an_event_that_nobody_reports_on_any_more_is_not_open_for_ever(
    store: Store, reader: sqlite3.Connection
) -> None:
    stored(store, FleetVm("web-0").change("scheduled", event(minutes=15)))
    day = queries.UNRESOLVED_SECONDS
    assert len(queries.open_events(reader, AT + day)) == 1
    assert queries.open_events(reader, AT + day + 1000) == []


@pytest.mark.parametrize("name", ["\\ud800", "x" * 5000, "\\u0000", "<script>"])
def test_hostile_names_are_stored(store: Store, reader: sqlite3.Connection, name: str) -> None:
    body = FleetVm("web-0").change("scheduled", event()).replace(b'"web-0"', f'"{name}"'.encode())
    stored(store, body)
    assert len(queries.open_events(reader, AT)) == 1
    assert len(queries.vms(reader)) == 1


def test_what_is_too_old_is_deleted_with_all_that_is_derived_from_it(
    store: Store, reader: sqlite3.Connection
) -> None:
    vm = FleetVm("web-0")
    stored(store, vm.heartbeat(), vm.change("scheduled", event()))
    assert store.prune(AT) == 0
    assert store.prune(AT + 1) == 2
    left = [reader.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES]  # noqa: S608 - constants
    assert left == [0] * len(TABLES)


TABLES = ("event", "sighting", "scheduled", "vm", "reporter")


def test_a_damaged_store_is_rebuilt_from_what_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    with closing(Store(path)) as store:
        for number in range(300):
            stored(store, FleetVm(f"web-{number}").change("scheduled", event(f"E{number}")))
        store.add([], received_at=AT)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 8192] = b"\xff" * 8192
    path.write_bytes(content)
    with closing(Store(path)) as store, queries.Readers(store).reading() as reader:
        note = queries.rebuilt_note(reader)
        assert note
        assert 0 < note["recovered"] <= 300
        assert reader.execute("SELECT count(*) FROM event").fetchone()[0] == note["recovered"]
        assert len(queries.open_events(reader, AT)) == note["recovered"]
    assert list(tmp_path.glob("console.db.damaged-*"))


def test_a_file_that_is_no_database_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    path.write_bytes(b"x" * 9000)
    with closing(Store(path)) as store:
        stored(store, FleetVm("web-0").heartbeat())


def test_the_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "console.db")) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(StateError, match="newer imds-bridge"):
        Store(tmp_path / "console.db")


class FullStore(Store):
    """A store on a disk that is full while it says so."""

    is_full = True

    def add(self, *args: object, **kwargs: object) -> object:  # type: ignore[override] # of any signature
        if self.is_full:
            raise sqlite3.OperationalError("database or disk is full")
        return super().add(*args, **kwargs)  # type: ignore[arg-type] # as given


def test_what_cannot_be_committed_is_not_acknowledged(tmp_path: Path) -> None:
    store = FullStore(tmp_path / "console.db")
    writer = Writer(store, clock=MovedClock(), stop=Stop(), retain_seconds=1e9)
    future = writer.submit(received(FleetVm("web-0").heartbeat()))
    writer.run_once(0)
    with pytest.raises(Unavailable, match="disk is full"):
        future.result(0)
    store.is_full = False
    future = writer.submit(received(FleetVm("web-0").heartbeat()))
    writer.run_once(0)
    assert future.result(0) is None
    assert (writer.received, writer.error) == (1, "")
    store.close()


def test_senders_of_the_same_moment_share_a_transaction(tmp_path: Path) -> None:
    store = Store(tmp_path / "console.db")
    writer = Writer(store, clock=MovedClock(), stop=Stop(), retain_seconds=1e9)
    futures = [writer.submit(received(FleetVm(f"web-{number}").heartbeat())) for number in range(20)]
    writer.run_once(0)
    assert all(future.done() for future in futures)
    assert writer.version == 1
    store.close()


def test_readers_and_the_writer_do_not_wait_for_each_other(store: Store) -> None:
    readers = queries.Readers(store)
    with readers.reading() as connection:
        assert queries.vms(connection) == []
        thread = threading.Thread(target=stored, args=(store, FleetVm("web-0").heartbeat()))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert queries.vms(connection) == []
    with readers.reading() as connection:
        assert len(queries.vms(connection)) == 1
    readers.close()


def test_no_query_reads_a_table_that_grows_from_end_to_end(store: Store) -> None:
    stored(store, *(vm.change("scheduled", event(), NOW) for vm in (FleetVm("web-0"), FleetVm("web-1"))))
    statements: list[str] = []
    with closing(connect_reader(store.path)) as connection:
        connection.set_trace_callback(statements.append)
        queries.open_events(connection, AT)
        queries.ended_events(connection, AT, limit=50)
        queries.vms(connection)
        queries.count_seen_by(connection, event_id("E").lower())
        queries.reports_of(connection, event_id("E"))
        queries.bodies_of_event(connection, event_id("E"))
        queries.last_received_at(connection)
        queries.count_by_end(connection, AT)
        queries.count_receipts(connection, AT)
        queries.losses_since(connection, AT, limit=50)
        connection.set_trace_callback(None)
        plans = [
            tuple(row)[3] for one in statements for row in connection.execute(f"EXPLAIN QUERY PLAN {one}")
        ]
    scans = [plan for plan in plans if plan.startswith(("SCAN event", "SCAN sighting", "SCAN scheduled"))]
    assert [scan for scan in scans if "USING" not in scan] == ["SCAN event"], scans  # the last row alone
