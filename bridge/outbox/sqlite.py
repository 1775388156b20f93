"""SQLite as the outbox uses it: named statements, the tables of a new file, and kinds of errors."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from zlib import crc32

from bridge.errors import StateError

VERSION = 3
APPLICATION_ID = 0x494D4453  # in the header of every file that a released version wrote
# How long the process waits for a lock, which the command line holds for milliseconds.
BUSY_SECONDS = 1.0
CACHE_KIB = 512  # the default of 2 MiB is more than this needs
LOG_BYTES = 4 * 1024 * 1024  # SQLite keeps its log at about this size
KEPT_LOG_BYTES = 4 * LOG_BYTES  # larger only while another program reads
CHECKED_BYTES = 64 * 1024 * 1024
# Python cannot even decode some of SQLite's messages about a damaged file.
ERRORS = (sqlite3.Error, UnicodeDecodeError)
DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH)

Mode = Literal["create", "write", "read"]


class Damaged(sqlite3.DatabaseError):
    """The file holds what was never written, although SQLite has not noticed."""


class Database:
    """An open database with the outbox's tables; the caller takes care that one thread at a time uses it.

    Every method may raise sqlite3.Error, and `is_damage` decides what it means.
    """

    def __init__(
        self, path: Path | None = None, *, mode: Mode = "create", busy_seconds: float = BUSY_SECONDS
    ) -> None:
        """Open the file at `path`, or else a new database in memory.

        Args:
            path: the file.
            mode: "create" makes the file where there is none, and looks for damage; "write" and "read" open it
                beside the process that uses it.
            busy_seconds: how long to wait for another program's lock.

        Raises:
            StateError: a newer version wrote the file.
            sqlite3.Error: the file cannot be opened or made.
        """
        self.is_memory = path is None
        self._connection = _connect(path, mode, busy_seconds)
        self._is_synced: bool | None = None
        try:
            if path:
                _prepare(self._connection, path, mode)
            else:
                _make_tables(self._connection)
            self.format = self._pragma("user_version")  # the version that wrote the tables
            if self.format < VERSION:
                self._adapt(mode)
        except BaseException:
            self._connection.close()
            raise

    def _adapt(self, mode: Mode) -> None:
        """Bring a file of an earlier version up to date, or show its tables to reads as this version has them."""
        if mode != "create":
            self.execute("waiting-of-an-earlier-version")
            return
        waiting = self.rows("waiting").fetchall()
        script = (
            "BEGIN IMMEDIATE; DROP INDEX IF EXISTS event_by_age; DROP TABLE waiting; "
            f"{_statements()['schema-waiting']}"
        )
        with transaction(self._connection, script):
            self.upgrade(waiting)
            self._connection.execute(f"PRAGMA user_version = {VERSION}")
        self.format = VERSION

    def upgrade(self, waiting: Iterable[Sequence[Any]]) -> None:
        """Write what waits in a file of an earlier version, given by its rows; the caller holds the transaction."""

    def transaction(self, *, synced: bool = True) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        """Commit all that is executed inside, or nothing; `synced` waits until the disk has it for good."""
        if synced != self._is_synced:
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            self._is_synced = synced
        return transaction(self._connection)

    def execute(self, name: str, *values: Any) -> sqlite3.Cursor:
        """Run the statement called `name` in outbox.sql."""
        return self._connection.execute(_statements()[name], [*map(_storable, values)])

    def rows(self, table: str, *, backwards: bool = False) -> sqlite3.Cursor:
        """Read a whole table in the order of its key."""
        order = "1 DESC, 2 DESC" if backwards else "1, 2"
        return self._connection.execute(f"SELECT * FROM {table} ORDER BY {order}")  # noqa: S608 - our own names

    def version(self) -> int:
        """Return a number that changes when another program has written to the file."""
        return self._pragma("data_version")

    def used_bytes(self) -> int:
        """Return how much of the file is in use."""
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    def find_damage(self) -> str | None:
        """Return the first damage that SQLite's quick check finds, None if it finds none."""
        (result,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        return None if result == "ok" else str(result)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, begin: str = "") -> Iterator[sqlite3.Connection]:
    """Commit all that is executed inside, or nothing; a script `begin` begins the transaction and is part of it."""
    try:
        if begin:
            connection.executescript(begin)
        else:
            connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
            connection.execute("ROLLBACK")
        raise


def checksum(*values: object) -> int:
    """Return the CRC-32 of a row's values."""
    parts = (value if isinstance(value, bytes) else str(value).encode("utf-8", "replace") for value in values)
    return crc32(b"\0".join(parts))


def is_damage(error: Exception) -> bool:
    """Decide whether the file itself is broken, so that trying again cannot help."""
    return (
        isinstance(error, Damaged | UnicodeDecodeError)
        or getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE_CODES
    )


def log_bytes(path: Path) -> int:
    """Return the size of the log beside a database, 0 if there is none."""
    try:
        return os.stat(f"{path}-wal").st_size  # noqa: PTH116 - every status needs it
    except OSError:
        return 0


def kept_log(path: Path) -> str | None:
    """Return why the log beside a database is large, and what to do; None if it is not."""
    if (size := log_bytes(path)) <= KEPT_LOG_BYTES:
        return None
    return (
        f"{log_of(path)} has {size // 2**20} MiB, which max_outbox_mb does not limit: another program keeps it by "
        "reading the database; end that program"
    )


def log_of(path: Path) -> Path:
    """Return where SQLite keeps the log of a database."""
    return path.with_name(f"{path.name}-wal")


def _connect(path: Path | None, mode: Mode, busy_seconds: float) -> sqlite3.Connection:
    name = ":memory:"
    if path:
        # Without a log a reader needs no lock, and leaves no file of SQLite's behind.
        read = "mode=ro" if log_bytes(path) else "mode=ro&immutable=1"
        options = {"create": "mode=rwc", "write": "mode=rw", "read": read}[mode]
        # SQLite refuses what as_uri makes of Windows' paths that begin with two backslashes.
        name = f"file:{quote(os.fsencode(path.absolute()), safe='')}?{options}"
    connection = sqlite3.connect(
        name, uri=True, isolation_level=None, check_same_thread=False, timeout=busy_seconds
    )
    # One broken text must not hide the others.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, mode: Mode) -> None:
    """Check what a file is, and get it ready.

    Raises:
        Damaged: it is not an outbox.
        StateError: a newer version wrote it.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if tables and application != APPLICATION_ID:
        raise Damaged("no released version of imds-bridge wrote it")
    if version > VERSION:
        raise StateError(
            f"{path} was written by a newer imds-bridge (its version is {version}, this one knows {VERSION}): "
            "install that version, or give this one an empty state_dir"
        )
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    if mode != "create":
        return
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
    if not tables:
        _make_tables(connection)
    elif path.stat().st_size < CHECKED_BYTES:  # in a huge file it would take too long
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise Damaged(found)


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.executescript(
        f"BEGIN IMMEDIATE; {_statements()['schema']} {_statements()['schema-waiting']} "
        f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT;"
    )


def _storable(value: Any) -> Any:
    """Replace halves of surrogate pairs, which JSON can bring and SQLite cannot store."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value


@cache
def _statements() -> dict[str, str]:
    text = files("bridge.outbox").joinpath("outbox.sql").read_text(encoding="utf-8")
    named = (part.partition("\n") for part in text.split("-- name: ")[1:])
    return {name.strip(): statement.strip() for name, _, statement in named}
