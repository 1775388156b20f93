"""The store: once for each source and id, whatever arrives, also after damage."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from bridge.console import queries, tables
from bridge.console import store as store_module
from bridge.console.fleet import SILENT_SECONDS, fleet, state_of
from bridge.console.received import Received
from bridge.console.store import Store, connect_reader
from bridge.console.writer import Writer
from bridge.errors import StateError, Unavailable
from bridge.outbox.sqlite import log_bytes
from bridge.runtime.threads import Stop
from tests.support.clock import MovedClock
from tests.support.console import NOW, FleetVm, event, event_id, received, stored
from tests.support.disk import small_disk

AT = NOW.timestamp()
SCHEMA = Path(queries.__file__).with_name("schema.sql")


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
    assert (row.event_id, row.first_seen_at) == (event_id("E").lower(), AT)
    (report,) = queries.reports_of(reader, row.event_id)
    assert report.seen_by == (("web-0", AT), ("web-1", AT + 1), ("web-2", AT + 2))
    assert (report.at, report.vm, report.data["Vm"]["Name"]) == (AT, "web-0", "web-0")
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


@pytest.mark.parametrize("is_late", [False, True])
def test_imds_that_fails_right_after_a_document_is_unreachable(
    store: Store, reader: sqlite3.Connection, is_late: bool
) -> None:
    vm = FleetVm("web-0")
    bodies = [vm.document(event(), [], NOW), vm.unreachable(NOW + timedelta(seconds=10), since=NOW)]
    for body in reversed(bodies) if is_late else bodies:
        stored(store, body, now=NOW + timedelta(seconds=20))
    assert queries.vms(reader)[0].unreachable_since == AT


@pytest.mark.parametrize("late_seconds", [0, 0.001, 20])
def test_a_gap_that_is_published_when_it_is_over_is_over(
    store: Store, reader: sqlite3.Connection, late_seconds: float
) -> None:
    vm, since = FleetVm("web-0"), NOW - timedelta(seconds=42)
    stored(
        store,
        vm.unreachable(NOW + timedelta(seconds=late_seconds), since=since),
        vm.recovered(NOW, since=since),
    )
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
    stored(store, vm.heartbeat(), vm.change("scheduled", event(minutes=0)))
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


def damage(path: Path, place: int) -> None:
    """Overwrite the page of a file that holds a place."""
    with path.open("r+b") as file:
        file.seek(place // 4096 * 4096)
        file.write(b"\xff" * 4096)


def place_of_an_event(path: Path) -> int:
    return path.read_bytes().index(b'"specversion"', path.stat().st_size // 2)


def filled(path: Path, count: int = 100) -> None:
    """Make a store with events of as many VMs, all of them in the file."""
    with closing(Store(path)) as store:
        for number in range(count):
            stored(store, FleetVm(f"web-{number}").change("scheduled", event(f"E{number}")))


def test_one_damaged_page_costs_only_the_events_in_it(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    filled(path)
    damage(path, place_of_an_event(path))
    with closing(Store(path)) as store, queries.Readers(store).reading() as reader:
        assert 95 <= len(queries.vms(reader)) < 100


def test_events_are_recovered_although_their_highest_number_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    filled(path)
    with closing(sqlite3.connect(path)) as database:
        root = database.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_sequence'"
        ).fetchone()[0]
    damage(path, (root - 1) * 4096)
    with closing(Store(path)) as store, queries.Readers(store).reading() as reader:
        assert len(queries.vms(reader)) == 100


def test_what_each_vm_saw_survives_a_rebuild(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    vms = [FleetVm(f"web-{number}") for number in range(3)]
    with closing(Store(path)) as store:
        for number, vm in enumerate(vms):
            stored(store, vm.heartbeat(), vm.change("scheduled", event(), NOW + timedelta(seconds=number)))
        store.rebuild(ValueError("for the test"))
        with queries.Readers(store).reading() as reader:
            (report,) = queries.reports_of(reader, event_id("E"))
    assert [name for name, _ in report.seen_by] == ["web-0", "web-1", "web-2"]


def test_damage_that_only_a_page_finds_is_rebuilt_by_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    filled(path)
    with closing(Store(path)) as store, closing(queries.Readers(store)) as readers:
        with closing(sqlite3.connect(path)) as database:
            root = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'vm'").fetchone()[0]
        damage(path, (root - 1) * 4096)
        with pytest.raises(sqlite3.DatabaseError), readers.reading() as reader:
            queries.vms(reader)
        Writer(store, clock=MovedClock(), stop=Stop(), retain_seconds=1e9).run_once(0)
        with readers.reading() as reader:
            assert len(queries.vms(reader)) == 100
            assert queries.rebuilt_note(reader)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_a_file_that_is_deleted_or_replaced_loses_nothing_that_was_acknowledged(
    tmp_path: Path, suffix: str, is_replaced: bool
) -> None:
    path = tmp_path / "console.db"
    writer = Writer(Store(path), clock=MovedClock(), stop=Stop(), retain_seconds=1e9)
    for number in range(3):
        future = writer.submit(received(FleetVm(f"web-{number}").heartbeat()))
        writer.run_once(0)
        assert future.result(0) is None
        if number == 1:
            gone = Path(f"{path}{suffix}")
            gone.unlink()
            if is_replaced:
                gone.write_bytes(b"")
    with closing(sqlite3.connect(path)) as database:  # as another process reads it
        assert database.execute("SELECT count(*) FROM event").fetchone()[0] == 3
        assert database.execute("SELECT count(*) FROM meta WHERE name = 'rebuilt'").fetchone()[0] == 1


@pytest.mark.parametrize("step", [".unfinished", ".rebuilt", "-wal"])
def test_a_rebuild_that_is_killed_is_done_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "console.db"
    filled(path)
    damage(path, place_of_an_event(path))
    replace = Path.replace

    def die(self: Path, target: Path | str) -> Path:
        if step in self.name:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", die)
    if step == "-wal":
        Path(f"{path}-wal").write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        Store(path)
    monkeypatch.undo()
    with closing(Store(path)) as store, queries.Readers(store).reading() as reader:
        assert 95 <= len(queries.vms(reader)) < 100
        note = queries.rebuilt_note(reader)
    assert note
    assert (tmp_path / note["moved_to"]).exists()


def test_a_start_that_was_killed_while_it_made_the_tables_is_not_damage(tmp_path: Path) -> None:
    path = tmp_path / "console.db"
    script = SCHEMA.read_text().partition("CREATE TABLE vm")[0]
    code = f"import os, sqlite3; sqlite3.connect({str(path)!r}).executescript({script!r}); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    with closing(Store(path)) as store, queries.Readers(store).reading() as reader:
        assert queries.rebuilt_note(reader) is None


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


def test_an_announced_event_is_kept_until_it_is_over_and_too_old(
    store: Store, reader: sqlite3.Connection
) -> None:
    vm, day = FleetVm("web-0"), 86_400.0
    announced = event(minutes=7 * 24 * 60)
    stored(store, vm.heartbeat(), vm.change("scheduled", announced))
    assert store.prune(AT + day) == 1  # the heartbeat
    assert len(queries.open_events(reader, AT + 2 * day)) == 1
    assert len(queries.reports_of(reader, event_id("E"))) == 1
    ended = NOW + timedelta(days=7)
    stored(store, vm.change("canceled", announced, ended, previous=announced), now=ended)
    assert store.prune(AT + 7 * day) == 0
    assert store.prune(AT + 8 * day) == 2
    assert queries.find_event(reader, event_id("E")) is None


def test_what_is_deleted_is_not_missing(store: Store, reader: sqlite3.Connection) -> None:
    vm = FleetVm("web-0")
    for hour in range(6):
        at = NOW + timedelta(hours=hour)
        stored(store, vm.heartbeat(at), now=at)
    assert store.prune(AT + 3 * 3600) == 3
    assert [one.gaps for one in queries.vms(reader)] == [0]
    store.rebuild(ValueError("for the test"))
    with queries.Readers(store).reading() as rebuilt:
        assert [one.gaps for one in queries.vms(rebuilt)] == [0]


def test_a_clock_that_jumps_ahead_makes_nothing_old(tmp_path: Path) -> None:
    clock = MovedClock()
    with closing(Store(tmp_path / "console.db")) as store, queries.Readers(store).reading() as reader:
        writer = Writer(store, clock=clock, stop=Stop(), retain_seconds=86_400.0)
        writer.submit(received(FleetVm("web-0").heartbeat()))
        writer.run_once(0)
        clock.jump(400 * 86_400.0)
        clock.advance(3600)
        writer.run_once(0)
        assert len(queries.vms(reader)) == 1
        clock.advance(86_400.0)
        writer.run_once(0)
        reader.rollback()
        assert queries.vms(reader) == []


@pytest.mark.parametrize(
    "clock", ["0001-01-01T00:00:00Z", "1970-01-02T00:00:00Z", "9999-12-31T23:59:59Z", "x"]
)
def test_of_a_clock_that_is_years_off_the_time_of_arrival_counts(
    store: Store, reader: sqlite3.Connection, clock: str
) -> None:
    body = FleetVm("web-0").heartbeat().replace(b"2026-11-20T13:00:00.000Z", clock.encode())
    stored(store, body)
    assert store.prune(AT) == 0
    assert [vm.alive_at for vm in queries.vms(reader)] == [AT]


def test_the_future_does_not_make_a_vm_look_alive(store: Store, reader: sqlite3.Connection) -> None:
    stored(store, FleetVm("web-0").heartbeat(NOW + timedelta(hours=2)))
    (vm,) = queries.vms(reader)
    assert state_of(vm, AT + SILENT_SECONDS + 1)[0] == "silent"


def test_groups_that_differ_in_case_are_one(store: Store, reader: sqlite3.Connection) -> None:
    stored(store, FleetVm("web-0", "Shop").heartbeat(), FleetVm("web-1", "SHOP").heartbeat())
    assert [group.name for group in fleet(queries.vms(reader), [], AT)] == ["shop"]


def test_a_vm_that_lost_its_identity_is_shown_until_it_has_it_again(
    store: Store, reader: sqlite3.Connection
) -> None:
    vm = FleetVm("web-0")
    stored(store, vm.heartbeat(NOW - timedelta(hours=1)))
    body = json.loads(vm.heartbeat(NOW))
    body["data"]["Vm"] |= {"ResourceId": "", "VmId": ""}
    stored(store, json.dumps(body).encode())
    assert [bool(one.resource_id) for one in queries.vms(reader)] == [True, False]
    stored(store, vm.heartbeat(NOW + timedelta(seconds=1)))
    assert [bool(one.resource_id) for one in queries.vms(reader)] == [True]


def test_receipts_do_not_push_out_what_was_reported(store: Store, reader: sqlite3.Connection) -> None:
    vm = FleetVm("web-0")
    stored(store, vm.change("scheduled", event()))
    for number in range(1, 301):
        stored(store, vm.receipt(event(), NOW + timedelta(seconds=number), outcome="rejected"))
    stored(store, vm.change("started", event(EventStatus="Started"), NOW + timedelta(seconds=400)))
    row = queries.find_event(reader, event_id("E"))
    assert row
    assert (row.first_seen_at, row.approval, row.status) == (AT, "rejected", "Started")


def test_a_stored_event_that_the_disk_has_changed_stops_no_other(
    store: Store, reader: sqlite3.Connection
) -> None:
    vm = FleetVm("web-0")
    stored(store, vm.change("scheduled", event()))
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("UPDATE event SET body = x'7b'")
    stored(store, vm.change("started", event(EventStatus="Started"), NOW + timedelta(seconds=5)))
    row = queries.find_event(reader, event_id("E"))
    assert row
    assert row.status == "Started"


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


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), ValueError("x"), sqlite3.IntegrityError("NOT NULL constraint failed"), RecursionError()],
)
def test_an_event_that_can_never_be_stored_is_refused_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bad, good = received(FleetVm("bad").heartbeat(), FleetVm("good").heartbeat())

    def read(event: Received, received_at: float) -> tuple[object, ...]:
        if event is bad:
            raise error
        return event_row(event, received_at)

    event_row = tables._event_row
    monkeypatch.setattr(tables, "_event_row", read)
    with closing(Store(tmp_path / "console.db")) as store:
        writer = Writer(store, clock=MovedClock(), stop=Stop(), retain_seconds=1e9)
        refused, committed = writer.submit([bad]), writer.submit([good])
        writer.run_once(0)
        with pytest.raises(ValueError, match="cannot be stored"):
            refused.result(0)
        assert committed.result(0) is None


def test_what_changes_nothing_wakes_no_page(tmp_path: Path) -> None:
    woken: list[int] = []
    with closing(Store(tmp_path / "console.db")) as store:
        writer = Writer(
            store, clock=MovedClock(), stop=Stop(), retain_seconds=1e9, on_change=lambda: woken.append(1)
        )
        bodies = [FleetVm("web-0").heartbeat(), FleetVm("web-0").change("scheduled", event())]
        for _ in range(3):
            writer.submit(received(*bodies))
            writer.run_once(0)
        assert (writer.version, len(woken), writer.repeated) == (1, 1, 4)
        writer.submit(received(FleetVm("web-1").change("scheduled", event())))
        writer.run_once(0)
        assert writer.version == 2  # another VM has seen it


def test_a_full_disk_costs_nothing_and_works_again_without_a_restart(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        store = Store(disk.path / "console.db")
        writer, readers = (
            Writer(store, clock=MovedClock(), stop=Stop(), retain_seconds=1e9),
            queries.Readers(store),
        )
        acknowledged: list[int] = []

        def send(number: int) -> None:
            future = writer.submit(received(FleetVm(f"web-{number}").heartbeat()))
            writer.run_once(0)
            if future.exception(0) is None:
                acknowledged.append(number)

        for number in range(5000):
            send(number)
            if number == 100:
                disk.fill()
            if len(acknowledged) < number:
                break
        assert writer.error
        with readers.reading() as reader:
            assert len(queries.vms(reader)) == len(acknowledged)
        disk.free()
        send(number)
        assert acknowledged[-1] == number
        assert writer.error == ""
        with readers.reading() as reader:
            assert len(queries.vms(reader)) == len(acknowledged)
            assert queries.rebuilt_note(reader) is None
        readers.close()
        store.close()


def test_a_file_that_another_program_locks_is_written_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_BUSY_SECONDS", 0.01)
    path = tmp_path / "console.db"
    with closing(Store(path)) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        writer = Writer(store, clock=MovedClock(), stop=Stop(), retain_seconds=1e9)
        other.execute("BEGIN IMMEDIATE")
        refused = writer.submit(received(FleetVm("web-0").heartbeat()))
        writer.run_once(0)
        with pytest.raises(Unavailable, match="locked"):
            refused.result(0)
        other.execute("ROLLBACK")
        committed = writer.submit(received(FleetVm("web-0").heartbeat()))
        writer.run_once(0)
        assert committed.result(0) is None
        assert (writer.received, store.generation) == (1, 0)


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


def test_a_log_that_a_long_reader_made_grow_is_emptied_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOG_BYTES", 200_000)
    monkeypatch.setattr(store_module, "_BUSY_SECONDS", 0.01)
    path = tmp_path / "console.db"
    with closing(Store(path)) as store, closing(queries.Readers(store)) as readers:
        with readers.reading() as reader:
            assert queries.vms(reader) == []
            for number in range(50):
                stored(store, FleetVm(f"web-{number}").change("scheduled", event(f"E{number}")))
            assert log_bytes(path) > 400_000
            assert queries.vms(reader) == []
        while log_bytes(path) > 0:
            number += 1
            stored(store, FleetVm(f"web-{number}").heartbeat())
            assert number < 1000


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
