"""SQLite as the outbox uses it: named statements, migrations, and errors told apart."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bridge.errors import StateError

DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
BUSY_SECONDS = 5.0


class Database:
    """An open outbox file; the caller takes care that one thread at a time uses it.

    Every method may raise sqlite3.Error; `is_damage` tells a damaged file from a disk that fails.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        # Without a log beside it the file is whole, and may lie where SQLite cannot make its helper files.
        whole = not path.with_name(path.name + "-wal").exists()
        mode = ("ro&immutable=1" if whole else "ro") if read_only else "rwc"
        self._connection = sqlite3.connect(
            f"file:{_quote(path)}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_SECONDS,
        )
        try:
            self._prepare(path, read_only=read_only)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, path: Path, *, read_only: bool) -> None:
        execute = self._connection.execute
        execute("PRAGMA cache_size = -512")  # KiB; the default of 2 MiB is more than this needs
        version = execute("PRAGMA user_version").fetchone()[0]
        newest = len(_migrations())
        if version > newest:
            raise StateError(
                f"{path} was written by a newer imds-bridge (its version is {version}, this one knows {newest}): "
                "install that version, or give this one an empty state_dir"
            )
        if read_only:
            if version == 0:
                raise sqlite3.OperationalError("the database was never set up")
            return
        execute("PRAGMA journal_mode = WAL")
        for number in range(version, newest):
            with self.transaction():
                for statement in _migrations()[number]:
                    execute(statement)
                execute(f"PRAGMA user_version = {number + 1}")

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
        return self._connection.execute(_statements()[name], values)

    def used_bytes(self) -> int:
        """Return how much of the file is in use."""
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()


def is_damage(error: sqlite3.Error) -> bool:
    """Tell whether the file itself is broken, so that trying again cannot help."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in DAMAGE


def _quote(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


@cache
def _statements() -> dict[str, str]:
    text = files("bridge").joinpath("outbox.sql").read_text(encoding="utf-8")
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
