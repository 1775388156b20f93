"""SQLite as the outbox uses it: one connection alone, named statements, migrations, and kinds of errors."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from secrets import randbelow
from typing import Any
from zlib import crc32

from bridge.errors import StateError
from bridge.outbox.image import has_lost_commits, log_bytes, read_image

# How long a start waits while another program reads the file.
BUSY_SECONDS = 0.5
CACHE_KIB = 512  # the default of 2 MiB is more than this needs
LOG_LIMIT_BYTES = 4 * 1024 * 1024  # the log is copied into the file and emptied when it is larger
# A value that cannot be read as what it must be is damage as much as a page that SQLite refuses.
UNREADABLE = (TypeError, ValueError, OverflowError)
ERRORS = (sqlite3.Error, *UNREADABLE)
DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH)

IMAGE_BYTES = CHECKED_BYTES = 64 * 1024 * 1024


class Damaged(sqlite3.DatabaseError):
    """The file holds what was never written, although SQLite has not noticed."""


class Database:
    """An open database with the outbox's tables; the caller takes care that one thread at a time uses it.

    The file is held exclusively: SQLite then needs no shared memory beside it, which a full file system could
    not back. `read_only` reads it without a lock, also beside the process that holds it and where nothing can
    be written; of a huge file, as it was before the last few commits. Every method may raise sqlite3.Error, and
    `is_damage` decides what it means.
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False) -> None:
        """Open the file at `path`, or else a new database in memory.

        Raises:
            StateError: a newer version wrote the file.
            OSError: the file cannot be made, or is a symbolic link.
        """
        self.is_memory = path is None
        self._path = path
        if path and path.is_symlink():
            raise OSError(errno.ELOOP, f"{path.name} is a symbolic link, which is not followed")
        if path and not read_only:
            _create_private(path)
            if has_lost_commits(path):
                raise Damaged("its log ends before the last commit that was written to it")
        self._connection = _connect(path, read_only=read_only)
        try:
            self._prepare(path, read_only=read_only)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, path: Path | None, *, read_only: bool) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # before anything is read, which would need shared memory
        execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        version = execute("PRAGMA user_version").fetchone()[0]
        newest = len(_migrations())
        if version > newest and not self._is_bit_error(version):
            raise StateError(
                f"{path} was written by a newer imds-bridge (its version is {version}, this one knows {newest}): "
                "install that version, or give this one an empty state_dir"
            )
        if not read_only:
            execute("PRAGMA journal_mode = WAL")
            execute("PRAGMA wal_autocheckpoint = 0")
            self._migrate(version)
            self._check(path)
            self._empty_log()
        elif version < newest:
            raise sqlite3.OperationalError(
                f"its version is {version}, this one needs {newest}: the next start migrates it"
            )

    def _migrate(self, version: int) -> None:
        if version > len(_migrations()) or (version == 0 and self.tables()):
            raise Damaged("its version is not that of its tables")
        for number, statements in enumerate(_migrations()[version:], start=version + 1):
            with self.transaction():
                for statement in statements:
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {number}")
                self._connection.execute(f"PRAGMA application_id = {1 + randbelow(2**31 - 1)}")

    def _check(self, path: Path | None) -> None:
        """Look for damage that would show only later; in a huge file this takes too long.

        Raises:
            Damaged: there is some.
        """
        if path is None:
            return
        if self.tables() != _newest_tables():
            raise Damaged("its tables are not as they were made")
        if path.stat().st_size < CHECKED_BYTES:
            found = self._connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if found != "ok":
                raise Damaged(found)

    def _is_bit_error(self, version: int) -> bool:
        """Return whether a version is a damaged one: a newer imds-bridge has other tables."""
        flipped = version ^ len(_migrations())
        return flipped.bit_count() == 1 and self.tables() == _newest_tables()

    def tables(self) -> set[str]:
        """Return how each table was made."""
        found = self._connection.execute("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
        return {sql for (sql,) in found}

    @contextlib.contextmanager
    def transaction(self, *, synced: bool = True) -> Iterator[None]:
        """Commit all that is executed inside, or nothing; `synced` waits until the disk has it for good."""
        self._connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
        with transaction(self._connection):
            yield
        if self._path and log_bytes(self._path) > LOG_LIMIT_BYTES:
            self._empty_log()

    def _empty_log(self) -> None:
        """Copy the log into the file and start a new one of no length.

        SQLite itself would write over the old log: a process killed between the header of a commit and its page
        leaves an old page behind a new header, which looks like damage.
        """
        with contextlib.suppress(sqlite3.Error):  # no room, for example: the log has everything and grows
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def execute(self, name: str, *values: Any) -> sqlite3.Cursor:
        """Run the statement called `name` in outbox.sql, whose ?1 is the first of the values."""
        # By number: SQLite counts ?1 among the named parameters, for which Python 3.14 takes no sequence.
        numbered = {str(number): _storable(value) for number, value in enumerate(values, 1)}
        return self._connection.execute(_statements()[name], numbered)

    def identity(self) -> int:
        """Return the number that identifies a file; a copy has the same."""
        return self._pragma("application_id")

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
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commit all that is executed inside, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
            connection.execute("ROLLBACK")
        raise


def checksum(*values: object) -> int:
    """Return the CRC-32 of a row's values."""
    number = 0
    for value in values:
        number = crc32(value if isinstance(value, bytes) else f"{value}\0".encode(), number)
    return number


def is_damage(error: Exception) -> bool:
    """Decide whether the file itself is broken, so that trying again cannot help."""
    return isinstance(error, (Damaged, *UNREADABLE)) or _code(error) in DAMAGE_CODES


def _code(error: Exception) -> int:
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


def _connect(path: Path | None, *, read_only: bool) -> sqlite3.Connection:
    name = str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    image = None
    if path and read_only and log_bytes(path) and path.stat().st_size < IMAGE_BYTES:
        image = read_image(path)
    # SQLite must not see the log that a running process uses: it would delete it.
    mode = "mode=ro&immutable=1" if read_only else "mode=rw"
    connection = sqlite3.connect(
        ":memory:" if image or not path else f"file:{name}?{mode}",
        uri=image is None and path is not None,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_SECONDS,
    )
    if image:
        connection.deserialize(image)
    # One broken text must not hide the others.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.create_function("checksum", -1, checksum, deterministic=True)
    return connection


def _storable(value: Any) -> Any:
    """Replace halves of surrogate pairs, which JSON can bring and SQLite cannot store."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@cache
def _statements() -> dict[str, str]:
    text = files("bridge.outbox").joinpath("outbox.sql").read_text(encoding="utf-8")
    named = (part.partition("\n") for part in text.split("-- name: ")[1:])
    return {name.strip(): statement.strip() for name, _, statement in named}


@cache
def _newest_tables() -> set[str]:
    with contextlib.closing(Database()) as fresh:
        return fresh.tables()


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
