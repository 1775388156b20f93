"""The console's database file: opened, written by one thread, read beside it, and started empty if it is damaged."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from queue import Empty, LifoQueue
from urllib.parse import quote

from bridge.console import tables
from bridge.console.received import Received, hash_text, place_of, scope_id
from bridge.console.runs import run_of
from bridge.console.tables import Added
from bridge.errors import StateError
from bridge.imds.document import fold_name
from bridge.outbox.sqlite import Damaged, is_damage, log_bytes, transaction
from bridge.runtime.time import Clock

log = logging.getLogger(__name__)

VERSION = 5
NEEDS_SQLITE = (3, 37)  # for strict tables
CHECKED_BYTES = 64 * 1024 * 1024  # a larger file takes too long to check at the start
_BUSY_SECONDS = 5.0
_CACHE_KIB = 8192
_LOG_BYTES = 32 * 1024 * 1024
MOMENT_SECONDS = 1.0  # a reader may be so much behind the clock, not behind the store
_MAX_IDLE = 8
_UNREADABLE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_UPGRADES = {3: ("upgrade",), 2: ("upgrade2", "upgrade")}  # the scripts of each version that is taken over
_SUFFIXES = ("-wal", "-shm", "")  # the log is moved first: beside a new file, SQLite would read it


class Store:
    """The database: `add` and `prune` are for one thread, `reading` for any.

    Attributes:
        damage: what a reader has found, None if nothing.
    """

    def __init__(self, path: Path, *, clock: Clock, away_seconds: float = 1e11) -> None:
        """Open the database, or make it; what is damaged is moved aside.

        Args:
            path: of the file.
            clock: decides what is silent, due or overdue.
            away_seconds: after how long without news VMs and events are put away.

        Raises:
            StateError: a newer version wrote it, or SQLite is too old.
            OSError, sqlite3.Error: the disk does not allow it.
        """
        self._path = path
        self._clock = clock
        self._away_seconds = away_seconds
        self._idle: LifoQueue[sqlite3.Connection] = LifoQueue(_MAX_IDLE)
        self.damage: Exception | None = None
        try:
            self._connection = _connect(path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._connection = start_empty(path, error)

    def add(self, events: Sequence[Received], *, received_at: float | None) -> Added:
        """Commit events and everything that is derived from them, or nothing; arguments as of `tables.add`.

        Raises:
            sqlite3.Error: the disk does not allow it, or the file is damaged; then the next start begins with an
                empty one.
        """
        with self._transaction() as connection:
            return tables.add(connection, events, received_at=received_at)

    def prune(self, before: float) -> int:
        """Delete some of what was received before a time; return how many events.

        Raises:
            sqlite3.Error: as of `add`.
        """
        with self._transaction() as connection:
            found = tables.prune(connection, before)
        if log_bytes(self._path) > _LOG_BYTES:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # waits for readers of the log
        return found

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection that sees one state of the store, with the views of this moment.

        Raises:
            sqlite3.Error: the store cannot be read.
        """
        connection = self._take()
        try:
            connection.execute("BEGIN")
            _look(connection, self._clock.wall(), self._away_seconds)
            yield connection
        except sqlite3.Error as error:
            if is_broken(error):
                self.damage = error
            raise
        finally:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("COMMIT")
            if self._idle.full():
                connection.close()
            else:
                self._idle.put_nowait(connection)

    def close(self) -> None:
        """Close the connections that nobody has, and the file: the last one puts the log into it."""
        with contextlib.suppress(Empty):
            while True:
                self._idle.get_nowait().close()
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            if self.damage:
                raise self.damage
            with transaction(self._connection) as connection:
                yield connection
        except sqlite3.DatabaseError as error:
            if is_broken(error):
                self._connection.close()
                start_empty(self._path, error).close()
            raise

    def _take(self) -> sqlite3.Connection:
        with contextlib.suppress(Empty):
            return self._idle.get_nowait()
        connection = connect_to_read(self._path)
        connection.executescript("".join(_scripts("views")))
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.row_factory = sqlite3.Row
        return connection


def _look(connection: sqlite3.Connection, now: float, away_seconds: float) -> None:
    """Make what is current at a moment, unless the store and nearly the moment are those of the last look."""
    (version,) = connection.execute("PRAGMA data_version").fetchone()
    at, known = connection.execute("SELECT at, version FROM moment").fetchone()
    if known != version or not at <= now < at + MOMENT_SECONDS:
        first, *others = "".join(_scripts("moment")).split(";\n")
        connection.execute(first, (now, version, away_seconds))
        for statement in others:
            connection.execute(statement)


def is_broken(error: Exception) -> bool:
    """Return whether a running process can do nothing with the file any more."""
    return isinstance(error, Damaged) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNREADABLE


def start_empty(path: Path, error: Exception) -> sqlite3.Connection:
    """Move a damaged file aside, and make a new one that says so."""
    now = datetime.now(UTC)
    aside = path.with_name(f"{path.name}.damaged-{now:%Y%m%dT%H%M%S%f}")
    for suffix in _SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
    log.error("the store is damaged (%s); it is now %s, and a new one starts empty", error, aside)
    connection = _connect(path)
    note = {"at": now.timestamp(), "moved_to": aside.name}
    connection.execute("INSERT INTO meta VALUES ('damaged', ?)", (json.dumps(note),))
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open a database that is there, beside its writer.

    Raises:
        sqlite3.Error: it is not there, or cannot be opened.
    """
    return sqlite3.connect(
        f"file:{quote(os.fsencode(path.absolute()), safe='')}?mode=ro",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database for the writer, or make it.

    Raises:
        StateError, OSError, sqlite3.Error: as of `Store`.
    """
    if sqlite3.sqlite_version_info < NEEDS_SQLITE:
        raise StateError(
            f"the console needs SQLite {'.'.join(map(str, NEEDS_SQLITE))} or newer, and this Python has "
            f"{sqlite3.sqlite_version}: run it as the container, or where the system is newer"
        )
    path.touch(mode=0o600)
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    for setting in ("journal_mode = WAL", "synchronous = FULL", f"cache_size = -{_CACHE_KIB}"):
        connection.execute(f"PRAGMA {setting}")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise StateError(f"{path} was written by a newer imds-bridge; install that version")
    if version == 0:
        _make(connection, tables.SCHEDULED_TABLE + ";", *_scripts("schema", "derived", "indexes"))
    elif version in _UPGRADES:
        for function in (fold_name, hash_text, place_of, run_of, scope_id):
            connection.create_function(function.__name__, -1, function, deterministic=True)
        log.info("the store of the version before is upgraded, which takes a minute for a large fleet")
        _make(connection, *_scripts(*_UPGRADES[version], "derived", "indexes", "upgraded"))
    elif version < VERSION:
        raise Damaged("a version that was never released wrote it")
    if path.stat().st_size < CHECKED_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Damaged(found)
    connection.execute("SELECT count(*) FROM vm").fetchone()


def _make(connection: sqlite3.Connection, *commands: str) -> None:
    connection.executescript(f"BEGIN;{''.join(commands)}PRAGMA user_version = {VERSION};COMMIT;")


def _scripts(*names: str) -> Iterator[str]:
    return (files("bridge.console").joinpath(f"{name}.sql").read_text("utf-8") for name in names)
