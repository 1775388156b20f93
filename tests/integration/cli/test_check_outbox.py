"""`check` stores events beside the state, and lets each sink write them."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bridge.contract.status import from_json
from bridge.formats.cloudevents import CloudEvents
from bridge.formats.samples import samples
from bridge.outbox import rows, sqlite
from bridge.outbox.upkeep import KeptOutbox
from bridge.process.metrics import StatusCollector
from tests.support.cli import Cli, CommandResult
from tests.support.disk import small_disk
from tests.support.inbox import Inbox
from tests.support.outbox import commit, kill, open_outbox

MIB = 1024 * 1024
SERVICE = 12345  # the user and the group of a unit


def everything(folder: Path) -> list[Path]:
    return [folder, *sorted(folder.rglob("*"))]


def failure(done: CommandResult, name: str = "outbox forward") -> str:
    row = done.row(check=name, result="FAIL")
    assert (done.code, bool(row["remedy"])) == (3, True)
    return row["message"]


def test_what_a_sink_takes_is_written_as_it_is_sent_and_nothing_of_it_stays(
    cli: Cli, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    encode = CloudEvents.encode

    def note(self: CloudEvents, events: Any, now: Any) -> Any:
        written.extend(event.type for event in events)
        return encode(self, events, now)

    monkeypatch.setattr(CloudEvents, "encode", note)
    cli.state().mkdir(parents=True)
    cli.sinks(
        all={"kind": "webhook", "url": inbox.url},
        few={"kind": "webhook", "url": inbox.url, "types": ["*.scheduled.v1"]},
    )
    assert cli.check().code == 0
    types = [sample.type for sample in samples(datetime.now(UTC))]
    scheduled = [type_ for type_ in types if type_.endswith(".scheduled.v1")]
    assert sorted(written) == sorted([*types, *scheduled])
    assert {one.method for one in inbox.received} == {"OPTIONS"}
    assert everything(cli.state().parent) == [cli.state().parent, cli.state()]


def test_a_statement_that_this_sqlite_does_not_know_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    statements = {**sqlite._statements(), "save-event": "INSERT INTO event VALUES (?, ?, ?, ?, ?, ?) NEWER"}
    monkeypatch.setattr(sqlite, "_statements", lambda: statements)
    cli.sinks()
    message = failure(cli.check())
    assert f"SQLite {sqlite3.sqlite_version}" in message
    assert 'near "NEWER": syntax error' in message
    assert not cli.state().parent.exists()


def test_a_hash_that_this_python_refuses_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise ValueError("[digital envelope routines] unsupported")

    monkeypatch.setattr(rows, "key_number", refuse)
    cli.sinks()
    assert "ValueError: [digital envelope routines] unsupported" in failure(cli.check())


@pytest.mark.parametrize("error", [ValueError("no such shape"), ZeroDivisionError("by zero")])
def test_a_format_that_cannot_write_an_event_fails_with_its_sink(
    cli: Cli, inbox: Inbox, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(CloudEvents, "encode", refuse)
    cli.sinks(ops={"kind": "webhook", "url": inbox.url}, screen={"kind": "stdout"})
    done = cli.check()
    (message,) = (row["message"] for row in done.json if row["result"] == "FAIL")
    assert done.code == 3
    assert "cannot be shown as cloudevents" in message
    assert str(error) in message
    assert done.err.count("\n") == 1  # without the log of a delivery


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_disk_that_is_full_or_read_only_fails(cli: Cli, is_read_only: bool) -> None:
    state = cli.state().parent
    with small_disk(state) as disk:
        disk.set_read_only(is_read_only)
        if not is_read_only:
            disk.fill()
        cli.sinks()
        message = failure(cli.check(), "state forward")
        assert ("Read-only file system" if is_read_only else "KiB are free") in message
        assert {path.name for path in state.iterdir()} <= {"filling"}


def test_a_disk_on_which_only_the_outbox_fails_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(sqlite, "_connect", refuse)
    cli.sinks()
    assert "database or disk is full" in failure(cli.check())


def test_a_log_that_a_reader_lets_grow_is_a_warning_and_a_metric(cli: Cli) -> None:
    cli.sinks()
    with closing(open_outbox(cli.state())) as outbox:
        with closing(sqlite3.connect(outbox.folder.database)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT COUNT(*) FROM event").fetchone()
            commit(outbox, *map(str, range(20)), size=MIB)
            assert log_metric(outbox) > 20 * MIB
            warning = cli.check().row(check="state forward", result="warn")["message"]
            assert "outbox.db-wal has 2" in warning
            assert warning.endswith("another program keeps it by reading the database; end that program")
        commit(outbox, "next", "last")
        assert log_metric(outbox) < 16 * MIB
        assert cli.check().row(check="state forward", result="ok")


def log_metric(outbox: KeptOutbox) -> float:
    status = from_json({}, "forward")
    shown = StatusCollector(lambda: status, outbox, outbox.clock).collect()
    return next(one.samples[0].value for one in shown if one.name == "imds_bridge_outbox_log_bytes")


@pytest.mark.posix("Windows has no root")
def test_what_root_leaves_can_be_written_by_the_services_user(cli: Cli, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    state = cli.state()
    outbox = open_outbox(tmp_path / "before")
    commit(outbox, "1")
    state.parent.mkdir()
    kill(outbox, tmp_path / "before", state)  # its log is left, which a reader opens
    (state / "outbox.db-shm").unlink()
    for path in everything(state.parent):
        os.chown(path, SERVICE, SERVICE)
    cli.sinks(a={"kind": "stdout"})
    assert cli.check().code == 0
    assert {(one.stat().st_uid, one.stat().st_gid) for one in everything(state.parent)} == {
        (SERVICE, SERVICE)
    }
    assert not [*state.glob("check-*")]
