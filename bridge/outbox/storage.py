"""Where the rows are: in the file, or in memory while the file cannot be used."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bridge.errors import StateError, Stopped
from bridge.events.urgency import Now
from bridge.outbox import rows
from bridge.outbox.rows import Ledger, Loss
from bridge.outbox.sqlite import ERRORS, is_damage
from bridge.outbox.state_dir import DAMAGED_FILE, StateFolder
from bridge.outbox.transfer import fill_memory

log = logging.getLogger(__name__)
T = TypeVar("T")

# What is copied of the file when it fails leaves room in memory for new events.
COPY_BYTES = 16 * 1024 * 1024


@dataclass(kw_only=True)
class File:
    """The file in use; `version` changes when another program has written to it."""

    database: Ledger
    inode: int
    version: int


@dataclass(kw_only=True)
class Memory:
    """What is used while the file cannot be.

    Attributes:
        database: with all that is known.
        error: what is wrong with the file.
        own_after: it knows what became of every event behind this number, and a failed transaction may have left the
            same events in the file.
        done: of the others, what sinks have had since the file failed.
        published: losses that were published since then.
        is_blind: whether the state in the file could not be read when this process started.
    """

    database: Ledger
    error: str
    own_after: int
    done: set[tuple[str, int]] = field(default_factory=set)
    published: list[Loss] = field(default_factory=list)
    is_blind: bool = False


class Storage:
    """The current database. Of its methods only `run` may be called without the lock.

    `run` raises StateError for damage, with which only a start can deal. FileStorage opens the file.

    Attributes:
        errors: how often the file could not be used.
        last_seq: the last number that was given to an event; no number is given twice.
        file_seq: the last number that the file is known to have.
    """

    def __init__(
        self, folder: StateFolder, lock: AbstractContextManager[Any], now: Callable[[], Now]
    ) -> None:
        """Use the file in `folder`; `run` takes the lock."""
        self._folder = folder
        self._lock = lock
        self._now = now
        self._used: File | Memory | None = None  # None: not opened yet, or closed
        self._why_aside = ""  # why the file must be moved aside before anything else
        self.errors = 0
        self.last_seq = self.file_seq = 0

    @property
    def error(self) -> str | None:
        """What is wrong with the file; None where it has everything."""
        return self._memory.error if self._memory else None

    @property
    def _memory(self) -> Memory | None:
        return self._used if isinstance(self._used, Memory) else None

    @property
    def database(self) -> Ledger:
        """The database that is used now.

        Raises:
            Stopped: it is closed.
        """
        if self._used is None:
            raise Stopped("the outbox is closed")
        return self._used.database

    def run(self, work: Callable[[Ledger], T], *, synced: bool | None = None) -> T:
        """Run `work` on the current database; where the file fails, again on the memory that takes its place.

        Args:
            work: what is to be done. It may be called twice.
            synced: whether a transaction around it waits for the disk; None: there is no transaction.

        Raises:
            StateError: the file is damaged; it is moved aside, and the next start takes over what can be read.
        """
        with self._lock:
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
        if memory := self._memory:
            memory.done.update((sink, seq) for seq in seqs if seq <= memory.own_after)

    def note_published(self, losses: Iterable[Loss]) -> None:
        """Note losses that an event reports, so that the file learns it later."""
        if memory := self._memory:
            memory.published += losses

    def has_stored(self, seq: int) -> bool:
        """Return whether the process is in memory, and the file has an event as well."""
        return self._memory is not None and seq <= self._memory.own_after

    def note_numbers(self) -> None:
        """Write down the last number given, and the last that the next start must find in the file.

        Of what only memory has, that is the last event that a sink waits for; a dead letter or a loss needs them all.
        """
        if self.error is None:
            self.file_seq = needed = self.last_seq
        elif self.database.record(rows.STATE, rows.LOSSES) or self.database.counts("count-dead-letters"):
            needed = self.last_seq
        else:
            needed = max(self.file_seq, *self.database.execute("last-waiting").fetchone())
        self._folder.write_numbers(self.last_seq, needed)

    def keep_state(self) -> None:
        """Write down what is remembered for ever, where only memory has it: a kill must not lose it.

        What a start without the state remembers is less than the state: it has kept a loss instead.
        """
        if (memory := self._memory) and not memory.is_blind:
            self._folder.keep(memory.database.state())

    def close(self) -> None:
        """Close the database."""
        if self._used:
            self._used.database.close()
            self._used = None

    def _is_damage(self, error: Exception) -> bool:
        """Decide whether the file is broken; SQLite does not write to one whose header names an unknown format."""
        is_refused = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY
        return is_damage(error) or (is_refused and self._folder.is_of_newer_format())

    def _leave_file(self, error: Exception) -> None:
        """Go on in memory after a failure, or end with a damaged file moved aside."""
        if not self._is_damage(error):
            self._use_memory(error, self.database)
            return
        self.close()
        self._why_aside = DAMAGED_FILE
        try:
            path = self._folder.move_aside(DAMAGED_FILE)
        except OSError as failure:
            self._use_memory(failure, None)
        else:
            raise StateError(
                f"the state is damaged ({error}) and moved to {path}; the next start goes on with it"
            )

    def _use_memory(self, error: Exception, source: Ledger | None) -> Memory:
        memory = Memory(database=Ledger(), error=self._note(error), own_after=self.last_seq)
        if source:
            with memory.database.transaction(), suppress(*ERRORS):
                fill_memory(memory.database, source, now=self._now(), max_bytes=COPY_BYTES)
        self.close()
        self._used = memory
        return memory

    def _note(self, error: Exception) -> str:
        """Count a failure of the file, and log the first; return what is wrong."""
        self.errors += 1
        failure = f"{self._folder.path}: {error}"
        if self._memory is None:
            text = "the state store is unavailable; events are buffered in memory and would be lost with this process"
            log.error(text, extra={"error": failure})
        return failure
