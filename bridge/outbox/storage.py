"""The outbox's file as it comes and goes: opened, given up while the disk fails, set aside when it is damaged."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bridge.errors import StateError
from bridge.outbox.sqlite import Database, is_damage, is_passing
from bridge.outbox.state_dir import StateFolder

log = logging.getLogger(__name__)
T = TypeVar("T")

DAMAGED, OTHER_VM = "damaged", "other-vm"


class Disk:
    """Where the outbox is written to; the caller takes care that one thread at a time uses it.

    Only `open` raises, and only StateError. `storage_error` says what is wrong; a write that succeeds clears it.
    """

    def __init__(self, folder: StateFolder, *, take_over: Callable[[Database], bool]) -> None:
        """Use `folder`; `take_over` is given each file that was opened, and says False if it is another VM's."""
        self._folder = folder
        self._take_over = take_over
        self._database: Database | None = None
        self._must_reopen = False
        self._put_away: str | None = None  # why the file that is there must be set aside before anything else
        self._said: set[str] = set()
        self.storage_error: str | None = None

    def open(self) -> None:
        """Hold the folder and open the file, if only to read it.

        Raises:
            StateError: another process holds the folder, or a newer version wrote the file.
        """
        self._open()
        if self._put_away:
            self._open()

    def ask(self, query: Callable[[Database], T]) -> T | None:
        """Ask the file; None if it does not answer."""
        if self._database is None:
            return None
        try:
            return query(self._database)
        except sqlite3.Error as error:
            self._note(error, reading=self._database.read_only)
            if self._put_away:
                self._reopen()
            return None

    def write(self, work: Callable[[Database], None], *, synced: bool) -> bool:
        """Write in one transaction; tell whether the file has it. In trouble, only what is `synced` is tried."""
        if self.storage_error and not synced:
            return False
        for _ in range(2):  # the second time in the new file, where the first has shown damage
            if self._database is None or self._database.read_only:
                return False
            try:
                with self._database.transaction(synced=synced):
                    work(self._database)
            except sqlite3.Error as error:
                self._note(error, reading=False)
                if not self._put_away:
                    return False
                self._reopen()
            else:
                self._recover()
                return True
        return False

    def mend(self) -> None:
        """Open the file anew where going on with it would not help."""
        if self._database is None or self._database.read_only or self._must_reopen:
            self._reopen()

    def move_aside(self, why: str) -> Path:
        """Put the file away as soon as the disk allows it, and begin a new one; return where it lies now."""
        self.close()
        self._put_away = why
        return self._reopen() or self._folder.database

    def close(self) -> None:
        """Close the file."""
        if self._database:
            self._database.close()
        self._database, self._must_reopen = None, False

    def _open(self) -> Path | None:
        """Open the file, or set it aside and begin a new one; return where the old one lies then.

        What is open already stays so until something better is: reading goes on. But SQLite lets nobody write
        to a file that the same process has open for reading alone.
        """
        kept_as = None
        if self._database and self._database.read_only:
            self.close()
        try:
            self._folder.acquire()
            if self._put_away:
                kept_as = self._folder.move_aside(self._put_away)
                log.error("the outbox is begun anew", extra={"why": self._put_away, "kept_as": str(kept_as)})
                self._put_away = None
            self._hold(Database(self._folder.database))
        except OSError as error:
            self._fail(f"{self._folder.path}: {error.strerror or error}")
        except sqlite3.Error as error:
            self._note(error, reading=False)
        if self._database is None and not self._put_away:
            self._open_to_read()
        return kept_as

    def _open_to_read(self) -> None:
        """Read what an older process left even where nothing can be written."""
        try:
            self._hold(Database(self._folder.database, read_only=True))
        except (OSError, sqlite3.Error) as error:
            log.debug("the outbox cannot be read either: %s", error)

    def _hold(self, database: Database) -> None:
        """Use this file from now on, unless it turns out to be unfit."""
        try:
            is_ours = self._take_over(database)
        except BaseException:
            database.close()
            raise
        self.close()
        if is_ours:
            self._database = database
        else:
            database.close()
            self._give_up(OTHER_VM, "it is another VM's (a clone or an image?)")

    def _reopen(self) -> Path | None:
        try:
            return self._open() or (self._open() if self._put_away else None)
        except StateError as error:  # at runtime, going on in memory beats an end
            self._fail(str(error))
            return None

    def _note(self, error: sqlite3.Error, *, reading: bool) -> None:
        """Decide what an error means; whoever may only read cannot tell damage from a disk that fails."""
        if is_damage(error) and not reading:
            self._give_up(DAMAGED, str(error))
        else:
            self._fail(f"{self._folder.database}: {error}")
            self._must_reopen = not is_passing(error)

    def _give_up(self, why: str, detail: str) -> None:
        self.close()
        self._put_away = why
        self._fail(f"{self._folder.database}: {detail}; it is set aside")

    def _fail(self, storage_error: str) -> None:
        if storage_error not in self._said:
            self._said.add(storage_error)
            log.error(
                "the disk fails: events go out from memory and would be lost with this process",
                extra={"disk": storage_error},
            )
        self.storage_error = storage_error

    def _recover(self) -> None:
        if self.storage_error is not None:
            log.warning(
                "the disk is back: everything that was kept in memory is written",
                extra={"was": self.storage_error},
            )
            self.storage_error = None
            self._said.clear()
