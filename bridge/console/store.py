"""The console's database file: opened, read beside the writer, and replaced if it is damaged or gone."""

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

from bridge.console import tables
from bridge.console.received import Received, receive
from bridge.console.tables import Added
from bridge.errors import StateError
from bridge.events.envelope import decode_event
from bridge.outbox.sqlite import Damaged, is_damage, log_bytes, log_of, transaction
from bridge.runtime.threads import report_progress

log = logging.getLogger(__name__)

VERSION = 1
SALVAGED_ROWS = 256  # at a time
CHECKED_BYTES = 64 * 1024 * 1024  # a larger file takes too long to check at the start
_MAX_ROWS = 10**9
_BUSY_SECONDS = 5.0
_CACHE_KIB = 8192
_LOG_PAGES = 4000
_LOG_BYTES = 32 * 1024 * 1024  # of which the log is emptied
_UNREADABLE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SUFFIXES = ("-wal", "-shm", "")  # the log is moved first: beside a new file, SQLite would read it


class Store:
    """The database, for one thread that writes; `connect_reader` gives connections that read beside it.

    It may be damaged, deleted or replaced at any time: `rebuild` makes a new one of what can be read.

    Attributes:
        path: of the file.
        generation: counts the files.
        damage: what a reader has found, None if nothing.
    """

    def __init__(self, path: Path) -> None:
        """Open the database, or make it.

        Raises:
            StateError: a newer version wrote it.
            OSError, sqlite3.Error: the disk does not allow it.
        """
        self.path = path
        self.generation = 0
        self.damage: Exception | None = None
        for rebuilt in path.parent.glob(f"{path.name}.rebuilt-*"):  # by a process that was killed then
            self._replace_file(rebuilt)
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._connection = sqlite3.connect(path)
            self.rebuild(error)

    def add(self, events: Sequence[Received], *, received_at: float) -> Added:
        """Commit events and everything that is derived from them, or nothing.

        Raises:
            sqlite3.Error: the disk does not allow it, or the file is damaged or gone.
        """
        with self._transaction() as connection:
            return tables.add(connection, events, received_at=received_at)

    def prune(self, before: float) -> int:
        """Delete some of what was received before a time; return how many events.

        Raises:
            sqlite3.Error: the disk does not allow it, or the file is damaged or gone.
        """
        with self._transaction() as connection:
            return tables.prune(connection, before)

    def rebuild(self, error: Exception) -> None:
        """Replace the file by a new one with every event that can still be read, and move the old one aside.

        If the process is killed meanwhile, the next one begins again or uses the new file.

        Raises:
            OSError, sqlite3.Error: the disk does not allow it; the old file is used until it does.
        """
        unfinished = self.path.with_name(f"{self.path.name}.unfinished")
        for suffix in _SUFFIXES:
            Path(f"{unfinished}{suffix}").unlink(missing_ok=True)
        now = datetime.now(UTC)
        rebuilt = self.path.with_name(f"{self.path.name}.rebuilt-{now:%Y%m%dT%H%M%S%f}")
        aside = _aside(rebuilt)
        with contextlib.closing(_connect(unfinished)) as new:
            recovered = _copy(self._connection, new)
            note = {"at": now.timestamp(), "recovered": recovered, "moved_to": aside.name}
            new.execute("INSERT INTO meta VALUES ('rebuilt', ?)", (json.dumps(note),))
            new.execute("PRAGMA journal_mode = DELETE")  # all is in the file then
        unfinished.replace(rebuilt)
        self.close()
        self._replace_file(rebuilt)
        self._open()
        self.generation += 1
        self.damage = None
        log.error("the store was damaged (%s); moved to %s; %d events recovered", error, aside, recovered)

    def report_damage(self, generation: int, error: sqlite3.Error) -> None:
        """Have the file rebuilt if an error shows that it is damaged; for any thread that reads.

        Args:
            generation: of the file that was read.
            error: what reading it raised.
        """
        if generation == self.generation and getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNREADABLE:
            self.damage = error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _open(self) -> None:
        self._connection = _connect(self.path)
        self._inodes = self._find_inodes()
        self._log_limit = _LOG_BYTES

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with transaction(self._connection) as connection:
            yield connection
        if self._find_inodes() != self._inodes:
            raise Damaged("the file was deleted or replaced")
        if (size := log_bytes(self.path)) > self._log_limit:
            self._empty_log(size)

    def _empty_log(self, size: int) -> None:
        """Wait for the readers of the log, and empty it: SQLite does that alone only while nobody reads."""
        is_busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        self._log_limit = 2 * size if is_busy else _LOG_BYTES

    def _find_inodes(self) -> list[int]:
        found = []
        for path in (self.path, log_of(self.path)):
            try:
                found.append(path.stat().st_ino)
            except FileNotFoundError:
                found.append(0)
        return found

    def _replace_file(self, rebuilt: Path) -> None:
        """Move what is there aside, and have the new file take its place."""
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{_aside(rebuilt)}{suffix}")
        rebuilt.replace(self.path)


def _aside(rebuilt: Path) -> Path:
    """Return where the file goes that a new one replaces."""
    return rebuilt.with_name(rebuilt.name.replace(".rebuilt-", ".damaged-"))


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that only reads.

    Raises:
        sqlite3.Error: the file cannot be opened.
    """
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_SECONDS, check_same_thread=False
    )
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.row_factory = sqlite3.Row
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database for the writer, or make it.

    Raises:
        StateError, OSError, sqlite3.Error: as of `Store`.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
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
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise StateError(f"{path} was written by a newer imds-bridge; install that version")
    if version == 0:
        connection.executescript(files("bridge.console").joinpath("schema.sql").read_text("utf-8"))
    if path.stat().st_size < CHECKED_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Damaged(found)
    connection.execute("SELECT count(*) FROM vm").fetchone()


def _copy(old: sqlite3.Connection, new: sqlite3.Connection) -> int:
    """Copy what can be read; return how many events."""
    recovered = 0
    for rows in _salvage(old):
        report_progress()
        batches: dict[float, list[Received]] = {}
        for received_at, body in rows:
            with contextlib.suppress(ValueError, TypeError):
                event = receive(decode_event(body), body, now=received_at)
                batches.setdefault(received_at, []).extend([event] if event else [])
        with transaction(new):
            for received_at, events in batches.items():
                recovered += tables.add(new, events, received_at=received_at).new
    for table, marks in (("sighting", "?, ?, ?"), ("reporter", "?, ?, ?, ?, ?, ?, ?")):
        # They also know of copies that were not kept, and of numbers that were deleted.
        with contextlib.suppress(sqlite3.Error), transaction(new):
            new.executemany(
                f"INSERT OR REPLACE INTO {table} VALUES ({marks})",  # noqa: S608 - constants
                old.execute(f"SELECT * FROM {table}"),  # noqa: S608 - constants
            )
    return recovered


def _salvage(old: sqlite3.Connection) -> Iterator[list[tuple[float, bytes]]]:
    """Yield the times and bodies of a damaged file's events, and skip what cannot be read."""
    last = 0
    for find_last in ("SELECT seq FROM sqlite_sequence WHERE name = 'event'", "SELECT max(n) FROM event"):
        with contextlib.suppress(sqlite3.Error, TypeError, ValueError):
            last = max(last, int(old.execute(find_last).fetchone()[0]))
    for start in range(0, min(last, _MAX_ROWS) + 1, SALVAGED_ROWS):
        yield _read_rows(old, start, start + SALVAGED_ROWS)


def _read_rows(old: sqlite3.Connection, start: int, end: int) -> list[tuple[float, bytes]]:
    """Return the rows from one number to before another; around a damaged page, all that it does not hold."""
    try:
        return old.execute(
            "SELECT received_at, body FROM event WHERE n >= ? AND n < ?", (start, end)
        ).fetchall()
    except sqlite3.Error:
        middle = (start + end) // 2
        return [] if middle == start else _read_rows(old, start, middle) + _read_rows(old, middle, end)
