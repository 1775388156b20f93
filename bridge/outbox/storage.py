"""Where the outbox is kept: in its file, or in memory while the file cannot be used."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from bridge.errors import StateError, Stopped
from bridge.events.model import StoredEvent
from bridge.outbox.rows import (
    DAMAGE,
    LOSSES,
    RUN,
    STATE,
    STATE_FOLDER_GONE,
    Loss,
    last_seq,
    note_losses,
    read_record,
    save_record,
)
from bridge.outbox.sqlite import ERRORS, Database, is_damage
from bridge.outbox.state_dir import DAMAGED_FILE, StateFolder
from bridge.outbox.transfer import copy_missing, fill_memory, salvage

log = logging.getLogger(__name__)
T = TypeVar("T")

# What is copied of the file when it fails leaves room in memory for new events.
COPY_BYTES = 16 * 1024 * 1024
SALVAGED = "salvaged"  # the record that names the damaged files whose rows this file has taken over


class Storage:
    """The current database; the caller takes care that one thread at a time uses it.

    Only `open` raises because of the disk, and only StateError; `run` raises it for damage, with which only a start
    can deal.

    Attributes:
        error: what is wrong with the file; None where it has everything.
        errors: how often it could not be used.
        last_seq: the last number that was given to an event.
        file_seq: the last number that the file has.
    """

    def __init__(self, folder: StateFolder, *, wanted_by: Callable[[StoredEvent], Iterable[str]]) -> None:
        """Use the file in `folder`; `wanted_by` names the sinks that take an event."""
        self._folder = folder
        self._wanted_by = wanted_by
        self._database: Database | None = None
        self._inode = 0
        self._version = 0
        self._why_aside = ""  # why the file must be moved aside before anything else
        self._logged: set[str] = set()
        self._memory_seq = 0  # the first number that was given in memory
        self._done: set[tuple[str, int]] = set()  # what sinks have had of the file's events since it failed
        self.error: str | None = None
        self.errors = 0
        self.last_seq = self.file_seq = 0

    @property
    def database(self) -> Database:
        """The database that is used now.

        Raises:
            Stopped: it is closed.
        """
        if self._database is None:
            raise Stopped("the outbox is closed")
        return self._database

    def open(self) -> None:
        """Hold the folder and open the file, or start in memory with what can be read of it.

        Raises:
            StateError: another process holds the folder, or a newer version wrote the file.
        """
        try:
            self._use_file()
        except (OSError, *ERRORS) as error:
            self._open_memory(error)

    def run(self, work: Callable[[Database], T], *, synced: bool | None = None) -> T:
        """Run `work` on the current database; where the file fails, again on the memory that takes its place.

        Args:
            work: what is to be done. It may be called twice.
            synced: whether a transaction around it waits for the disk; None: there is no transaction.

        Raises:
            StateError: the file is damaged; it is moved aside, and the next start takes over what can be read.
        """
        database = self.database
        try:
            with nullcontext() if synced is None else database.transaction(synced=synced):
                return work(database)
        except ERRORS as error:
            if database.is_memory:
                raise
            self._leave_file(error)
        return self.run(work, synced=synced)

    def note_done(self, sink: str, seqs: Iterable[int]) -> None:
        """Note what a sink has had, so that the file learns it later."""
        if self.error is not None:
            self._done.update((sink, seq) for seq in seqs if seq < self._memory_seq)

    def has_stored(self, seq: int) -> bool:
        """Return whether an event that is in memory is in the file as well."""
        return self.error is not None and seq < self._memory_seq

    def note_number(self) -> None:
        """Write down the last number that must not be missing at the next start.

        That is the last one given, or the file's last one once every sink has what only memory has.
        """
        number = self.last_seq
        if self.error is not None and not self._is_needed(self.database):
            number = self.file_seq
        self._folder.write_number(number)

    def _is_needed(self, memory: Database) -> bool:
        """Return whether memory has anything that would be lost with this process."""
        waits = memory.execute("is-waited-for", self._memory_seq).fetchone()
        return bool(waits or read_record(memory, STATE, LOSSES))

    def recover(self) -> bool:
        """Use the file again where it failed or lost its name; return whether what it has may have changed."""
        if self.error is None and not self._has_lost_name():
            before, self._version = self._version, self.run(Database.version)
            return self.error is None and self._version != before
        if self.error is None:
            log.error(
                "the state folder was removed or changed while in use; it is created again with everything known"
            )
        try:
            self._use_file()
        except (OSError, StateError, *ERRORS) as error:
            if self.error is None:
                self._use_memory(error, self._database)
            else:
                self._note(error)
        return self.error is None

    def replace(self, why: str) -> Path:
        """Move the file away as soon as the disk allows it, and start anew; return where the file is."""
        self.close()
        self._why_aside, self.last_seq = why, 0
        self._folder.forget()
        self.open()
        return self._folder.moved_to

    def close(self) -> None:
        """Close the database."""
        if self._database:
            self._database.close()
            self._database = None

    # The file

    def _use_file(self) -> None:
        """Open the file, or a new one instead of one that is moved aside, and bring into it what it lacks."""
        self._folder.acquire()
        for _ in range(2):
            if self._why_aside:
                self._folder.move_aside(self._why_aside)
                self._why_aside = ""
            try:
                file = self._opened()
            except ERRORS as error:
                if not self._is_damage(error):
                    raise
                log.error("the state store is damaged: %s", error)  # noqa: TRY400 - the text is enough
                self._why_aside, failure = DAMAGED_FILE, error
            else:
                self._begin_file(file)
                return
        raise failure

    def _opened(self) -> Database:
        file = Database(self._folder.database)
        try:
            with file.transaction():
                self._take_over(file)
        except BaseException:
            file.close()
            raise
        return file

    def _begin_file(self, file: Database) -> None:
        self.close()
        self._database, self._version = file, file.version()
        self._inode = self._folder.database.stat().st_ino
        self._folder.note_salvaged()
        self._done.clear()
        self.file_seq = self.last_seq
        if self.error is not None:
            log.warning("the state store works again", extra={"was": self.error})
            self.error = None
            self._logged.clear()
        self.note_number()

    def _take_over(self, file: Database) -> None:
        """Bring into the file what it lacks of damaged files, memory, or a file without a name; note a loss."""
        source = self._database
        damaged = self._salvage(file)
        if source and source.is_memory:
            # A transaction that failed may be in the file all the same, and memory has gone on since.
            file.execute("delete-waiting-from", self._memory_seq)
            file.execute("delete-events-from", self._memory_seq)
            for sink, seq in self._done:
                file.execute("delete-waiting", sink, seq)
        found = last_seq(file)
        expected = self.file_seq if source else self._folder.read_number()
        if damaged or source is None or source.is_memory:
            _note_missing(file, found, expected, is_damaged=bool(damaged))
        if source:
            copy_missing(source, file, after=found)
        self.last_seq = max(self.last_seq, found, expected)

    def _salvage(self, file: Database) -> list[Path]:
        """Take over the rows of files that were moved aside as damaged; return these files."""
        taken = read_record(file, STATE, SALVAGED) or []
        damaged = [path for path in self._folder.damaged() if path.name not in taken]
        for path in damaged:
            log.error(
                "the damaged state store is moved aside; every readable row is copied to a new one",
                extra={"kept_as": str(path)},
            )
            salvage(path, file, self._wanted_by)
        if damaged:
            names = [*taken, *(path.name for path in damaged)]
            save_record(file, STATE, SALVAGED, names, at=0.0)
        return damaged

    def _is_damage(self, error: Exception) -> bool:
        """Decide whether the file is broken; SQLite does not write to one whose header names an unknown format."""
        is_refused = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY
        return is_damage(error) or (is_refused and os.access(self._folder.database, os.W_OK))

    def _has_lost_name(self) -> bool:
        """Return whether the open file is no longer what others find under its name."""
        try:
            return self._folder.database.stat().st_ino != self._inode
        except OSError as error:
            return isinstance(error, FileNotFoundError | NotADirectoryError)

    # Memory

    def _leave_file(self, error: Exception) -> None:
        """Go on in memory after a failure, or end with a damaged file moved aside."""
        if not self._is_damage(error):
            self._use_memory(error, self._database)
            return
        self.close()
        self._why_aside = DAMAGED_FILE
        try:
            self._folder.move_aside(DAMAGED_FILE)
        except OSError as failure:
            self._use_memory(failure, None)
        else:
            raise StateError(
                f"{self._folder.database} is damaged and moved aside ({error}): the process ends, and the next start "
                "takes over every row that can be read"
            )

    def _open_memory(self, error: Exception) -> None:
        """Start in memory, with what can be read of the file."""
        source = None if self._why_aside else self._readable()
        noted = self._folder.read_number()
        found = self.file_seq = last_seq(source) if source else noted
        # Where it is unknown which numbers earlier processes gave, time gives some that they did not.
        self.last_seq = max(found, noted) if source else max(noted, time.time_ns() // 1000)
        memory = self._use_memory(error, source)
        if source:
            source.close()
            _note_missing(memory, found, noted)

    def _readable(self) -> Database | None:
        try:
            database = Database(self._folder.database, mode="read")
            last_seq(database)
        except (OSError, StateError, *ERRORS) as error:
            log.debug("the state store cannot be read either: %s", error)
            return None
        return database

    def _use_memory(self, error: Exception, source: Database | None) -> Database:
        self._note(error)
        memory = Database()
        if source and source is self._database:
            self.file_seq = self.last_seq
        if source:
            with memory.transaction(), suppress(*ERRORS):
                fill_memory(memory, source, max_bytes=COPY_BYTES)
        self.close()
        self._database, self._memory_seq = memory, self.last_seq + 1
        return memory

    def _note(self, error: Exception) -> None:
        self.errors += 1
        self.error = f"{self._folder.database}: {error}"
        if isinstance(error, OSError):
            self.error = f"{self._folder.path}: {error.strerror or error}"
        if self.error not in self._logged:
            self._logged.add(self.error)
            log.error(
                "the state store is unavailable; events are buffered in memory and would be lost with this process",
                extra={"error": self.error},
            )


def _note_missing(database: Database, found: int, expected: int, *, is_damaged: bool = False) -> None:
    """Note a loss if a database was damaged, or is behind the last number that was written down."""
    if is_damaged or found < expected:
        log.error(
            "the state store was damaged or empty, or older than what was published; the document is published again",
            extra={"last_number": found, "expected": expected},
        )
        reason = DAMAGE if is_damaged or found else STATE_FOLDER_GONE
        note_losses(database, [Loss(reason=reason, count=None)])
        run = read_record(database, STATE, RUN) or {}
        save_record(database, STATE, RUN, {**run, "seq": max(found, expected)}, at=0.0)
