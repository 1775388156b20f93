"""SQLite as the outbox uses it: named statements, migrations, and errors told apart."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bridge.errors import StateError

# The outbox waits for another process with its lock held: a notice must not be late for that.
BUSY_SECONDS = 0.5
CACHE_KIB = 512  # the default of 2 MiB is more than this needs
LOG_LIMIT_BYTES = 4 * 1024 * 1024  # what stays of the log's file after it was once larger


class Damaged(sqlite3.DatabaseError):
    """The file holds what nobody wrote, although SQLite has not noticed."""


class Database:
    """An open outbox file; the caller takes care that one thread at a time uses it.

    `migrate` is for the process that holds the folder; others use the file as it is, or not at all.
    The constructor may raise StateError (a newer version wrote the file), and OSError; every method may raise
    sqlite3.Error. `is_damage` tells a damaged file from a disk that fails.
    """

    def __init__(self, path: Path, *, read_only: bool = False, migrate: bool = True) -> None:
        self.read_only = read_only
        if read_only:
            self._connection = _connect_to_read(path)
        else:
            if migrate:
                _create_private(path)
            self._connection = _connect(path, "rw")
        try:
            self._prepare(path, migrate=migrate and not read_only)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, path: Path, *, migrate: bool) -> None:
        execute = self._connection.execute
        execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        execute(f"PRAGMA journal_size_limit = {LOG_LIMIT_BYTES}")
        version = execute("PRAGMA user_version").fetchone()[0]
        newest = len(_migrations())
        if version > newest:
            raise StateError(
                f"{path} was written by a newer imds-bridge (its version is {version}, this one knows {newest}): "
                "install that version, or give this one an empty state_dir"
            )
        if migrate:
            execute("PRAGMA journal_mode = WAL")
            self._migrate(version)
            with self.transaction(synced=False):  # a file that can only be read shows it here
                execute("UPDATE meta SET value = value WHERE 0")
        elif version < newest:
            raise sqlite3.OperationalError(
                f"its version is {version}, this one needs {newest}: it is brought there by the next start"
            )

    def _migrate(self, version: int) -> None:
        for number, statements in enumerate(_migrations()[version:], start=version + 1):
            with self.transaction():
                for statement in statements:
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {number}")
        tables = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master")}
        if missing := {"meta", "event", "cursor", "dead_letter", "occurrence", "record"} - tables:
            raise Damaged(f"tables are missing: {', '.join(sorted(missing))}")

    @contextlib.contextmanager
    def transaction(self, *, synced: bool = True) -> Iterator[None]:
        """Commit all that is executed inside, or nothing; `synced` waits until the disk has it for good."""
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
                self._connection.execute("ROLLBACK")
            raise

    def execute(self, name: str, *values: Any) -> sqlite3.Cursor:
        """Run the statement called `name` in outbox.sql."""
        return self._connection.execute(_statements()[name], [_storable(value) for value in values])

    def used_bytes(self) -> int:
        """Return how much of the file is in use."""
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def find_damage(self) -> str | None:
        """Return the first damage that SQLite's quick check finds, None if it finds none."""
        (result,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        return None if result == "ok" else str(result)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()


def is_damage(error: sqlite3.Error) -> bool:
    """Tell whether the file itself is broken, so that trying again cannot help."""
    return isinstance(error, Damaged) or _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_passing(error: sqlite3.Error) -> bool:
    """Tell whether the open file goes on by itself, once there is room or another process lets go."""
    return _code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _create_private(path: Path) -> None:
    """Make the file 0600 before SQLite does; SQLite gives its helper files the same mode.

    A file that is there is not opened: closing it would drop the locks that this process has on it.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if path.stat().st_mode & 0o077:
        with contextlib.suppress(OSError):
            path.chmod(0o600)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    name = str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(
        f"file:{name}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_SECONDS,
    )
    # One broken text must not hide the others.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    return connection


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Open a file that may lie where SQLite cannot make its helper files; without a log it is whole."""
    log = path.with_name(path.name + "-wal")
    log_bytes = log.stat().st_size if log.exists() else None
    if log_bytes is not None:
        connection = _connect(path, "ro")
        try:
            connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error:
            connection.close()
            if log_bytes:
                raise
        else:
            return connection
    return _connect(path, "ro&immutable=1")


def _storable(value: Any) -> Any:
    """Replace halves of surrogate pairs, which JSON can bring and SQLite cannot store."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@cache
def _statements() -> dict[str, str]:
    text = files("bridge.outbox").joinpath("outbox.sql").read_text(encoding="utf-8")
    named = (part.partition("\n") for part in text.split("-- name: ")[1:])
    return {name.strip(): statement.strip() for name, _, statement in named}


@cache
def _migrations() -> list[list[str]]:
    """Return, for each version, the statements that lead to it."""
    scripts = [
        (int(name.split("-")[0]), sql) for name, sql in _statements().items() if name.endswith("-migration")
    ]
    return [_split(sql) for _, sql in sorted(scripts)]


def _split(script: str) -> list[str]:
    """Cut a script into statements where SQLite itself says that one is complete."""
    statements, current = [], ""
    for line in script.splitlines():
        current += line + "\n"
        if sqlite3.complete_statement(current):
            statements.append(current)
            current = ""
    return statements
