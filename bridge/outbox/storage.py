"""Where the outbox is kept: in its file, or in memory while the file cannot be used."""

from __future__ import annotations

import logging
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bridge.errors import StateError, Stopped
from bridge.events.urgency import Now
from bridge.outbox import rows
from bridge.outbox.rows import Ledger, Loss
from bridge.outbox.sqlite import ERRORS, is_damage, log_bytes
from bridge.outbox.state_dir import DAMAGED_FILE, OTHER_VM_FILE, StateFolder
from bridge.outbox.transfer import WantedBy, copy_back, fill_memory, salvage
from bridge.runtime.json import Json

log = logging.getLogger(__name__)
T = TypeVar("T")

# What is copied of the file when it fails leaves room in memory for new events.
COPY_BYTES = 16 * 1024 * 1024
# How long a start waits for another program, such as a virus scanner, to close the file.
IN_USE_SECONDS = 2.0
IN_USE_PAUSE_SECONDS = 0.1


@dataclass(kw_only=True)
class _File:
    """The file in use; `version` changes when another program has written to it."""

    database: Ledger
    inode: int
    version: int


@dataclass(kw_only=True)
class _Memory:
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


class TurnedUp(StateError):
    """The state can be read without which this process started."""


class Storage:
    """The current database. Of its methods only `run` may be called without the lock.

    Only `open` raises because of the disk, and only StateError; `run` raises it for damage, with which only a start
    can deal.

    Attributes:
        errors: how often the file could not be used.
        last_seq: the last number that was given to an event; no number is given twice.
        file_seq: the last number that the file is known to have.
    """

    def __init__(
        self,
        folder: StateFolder,
        lock: AbstractContextManager[Any],
        now: Callable[[], Now],
        wanted_by: WantedBy,
    ) -> None:
        """Use the file in `folder`; `run` takes the lock, `wanted_by` names the sinks that take an event."""
        self._folder = folder
        self._lock = lock
        self._now = now
        self._wanted_by = wanted_by
        self._used: _File | _Memory | None = None  # None: not opened yet, or closed
        self._why_aside = ""  # why the file must be moved aside before anything else
        self.errors = 0
        self.last_seq = self.file_seq = 0

    @property
    def error(self) -> str | None:
        """What is wrong with the file; None where it has everything."""
        return self._memory.error if self._memory else None

    @property
    def _memory(self) -> _Memory | None:
        return self._used if isinstance(self._used, _Memory) else None

    @property
    def database(self) -> Ledger:
        """The database that is used now.

        Raises:
            Stopped: it is closed.
        """
        if self._used is None:
            raise Stopped("the outbox is closed")
        return self._used.database

    def open(self) -> None:
        """Hold the folder and open the file, or start in memory with what can be read of it.

        Raises:
            StateError: another process holds the folder, or a newer version wrote the file.
        """
        deadline = time.monotonic() + IN_USE_SECONDS
        while True:
            try:
                return self._use_file()
            except (OSError, *ERRORS) as error:
                # In memory, it would not be known how often a change was seen before, and which run was the last.
                is_in_use = sys.platform == "win32" and self._folder.is_in_use()
                if not is_in_use or time.monotonic() > deadline:
                    return self._open_memory(error)
            time.sleep(IN_USE_PAUSE_SECONDS)

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

        What a start without the state remembers is less than the state.
        """
        if (memory := self._memory) and not memory.is_blind:
            self._folder.keep(memory.database.state())

    def size_bytes(self) -> int:
        """Return how large the file is with its log, or what memory has."""
        if self._memory:
            return self.run(Ledger.used_bytes)
        return self._folder.database.stat().st_size + log_bytes(self._folder.database)

    def recover(self, *, may_end: bool = True) -> bool:
        """Use the file again where it failed or was removed; return whether what it has may have changed.

        Raises:
            StateError: this process started without the state, which can be read now; only with `may_end`.
        """
        if self._used is None or (self._memory and self._memory.is_blind and not may_end):
            return False
        if isinstance(file := self._used, _File):
            if not self._is_gone(file):
                before, file.version = file.version, self.run(Ledger.version)
                return self._used is file and file.version != before
            self._use_memory(FileNotFoundError("the state folder was removed while in use"), file.database)
        try:
            self._use_file()
        except TurnedUp:
            raise
        except (OSError, StateError, *ERRORS) as error:
            if memory := self._memory:
                memory.error = self._note(error)
            self.note_numbers()  # the folder may be another one
        return self.error is None

    def replace(self, state: Mapping[str, Json]) -> Path:
        """Move another VM's file away as soon as the disk allows it, and start anew; return where the file is.

        `state` is kept before the file moves: a kill between the two loses nothing of it.
        """
        self.close()
        self._why_aside, self.last_seq = OTHER_VM_FILE, 0
        self._folder.forget()
        self._folder.keep(state)
        self.open()
        self.run(lambda database: database.save_state(state), synced=True)  # the disk may have kept nothing
        return self._folder.moved_to

    def close(self) -> None:
        """Close the database."""
        if self._used:
            self._used.database.close()
            self._used = None

    # The file

    def _use_file(self) -> None:
        """Open the file, or a new one instead of one that is moved aside, and bring into it what it lacks."""
        self._folder.acquire()
        is_emptied = self._used is None and self._folder.is_emptied()
        for _ in range(2):
            if self._why_aside:
                self._folder.move_aside(self._why_aside)
                self._why_aside = ""
            try:
                with ExitStack() as stack:
                    file = stack.enter_context(closing(Ledger(self._folder.database)))
                    if self._is_other_vms(file):
                        self._give_up(file)
                        continue
                    with file.transaction():
                        has_turned_up = self._take_over(file, is_emptied=is_emptied)
                    if has_turned_up:
                        text = (
                            "the state can be read now: the process ends, and the next start goes on with it"
                        )
                        raise TurnedUp(text)
                    stack.pop_all()
                return self._begin_file(file)
            except ERRORS as error:
                if not self._is_damage(error):
                    raise
                log.error("the state store is damaged: %s", error)  # noqa: TRY400 - the text is enough
                self._why_aside, failure = DAMAGED_FILE, error
        raise failure

    def _begin_file(self, file: Ledger) -> None:
        was = self.error
        self.close()
        inode = self._folder.database.stat().st_ino
        self._used = _File(database=file, inode=inode, version=file.version())
        self._folder.note_salvaged()
        self._folder.keep({})
        if was is not None:
            log.warning("the state store works again", extra={"was": was})
        self.note_numbers()

    def _is_other_vms(self, file: Ledger) -> bool:
        """Return whether the file and who had to start without it know their VMs, and these are two.

        That is this process, or one that was killed before it could move another VM's file aside.
        """
        own = self._own_vm_id()
        return bool(own) and file.vm_id() not in ("", own)

    def _own_vm_id(self) -> str:
        if self._used is None:
            return rows.vm_id_of(self._folder.read_kept().get(rows.VM))
        return self.database.vm_id() if self._memory and self._memory.is_blind else ""

    def _give_up(self, file: Ledger) -> None:
        """Have another VM's file moved aside, which nothing has to catch up with, and note a loss."""
        text = "the state is another VM's (a clone or an image?): moved aside"
        loss = Loss(reason=rows.OTHER_VM, count=None)
        log.error(text, extra={"was": file.vm_id(), "is": self._own_vm_id()})
        if self._memory:
            self.database.note_losses([loss])
        else:
            self._folder.keep({**self._folder.read_kept(), rows.LOSSES: [asdict(loss)]})
        self._why_aside, self.file_seq = OTHER_VM_FILE, 0

    def _take_over(self, file: Ledger, *, is_emptied: bool) -> bool:
        """Bring into the file what it lacks of damaged files and of memory; note a loss.

        Return whether the file has a state without which this process started: of memory it gets what waits.
        A transaction that failed, an earlier take-over included, may be in the file all the same. To repeat it is
        harmless: what it brought is replaced, and what waits of it is what waits in memory.
        """
        damaged = self._folder.damaged()
        for path in damaged:
            text = "the damaged state store is moved aside; every readable row is copied to a new one"
            log.error(text, extra={"kept_as": str(path)})
            salvage(path, file, self._wanted_by)
        given, needed = self._folder.read_numbers()
        found, kept = file.last_seq(), {} if self._used else self._folder.read_kept()
        file.save_state(kept)
        has_turned_up = False
        if memory := self._memory:
            has_turned_up = memory.is_blind and file.record(rows.STATE, rows.RUN) is not None
            needed = self.file_seq
            file.execute("delete-waiting-after", memory.own_after)
            for row in memory.done:
                file.execute("delete-waiting", *row)
            file.forget_losses(memory.published)
            copy_back(
                memory.database, file, after=min(found, memory.own_after), with_records=not has_turned_up
            )
        self.last_seq = max(self.last_seq, found, given)
        if self.last_seq > found:
            file.note_seq(self.last_seq)
        if has_turned_up:
            self._note_loss(file, rows.NOT_WRITTEN)
        elif damaged:
            self._note_loss(file, rows.DAMAGE)
        elif is_emptied or found < needed:
            self._note_missing(file, found, needed, is_kept=bool(kept))
        return has_turned_up

    def _note_missing(self, database: Ledger, found: int, needed: int, *, is_kept: bool) -> None:
        """Note a loss: a database is empty, or behind the last number that it must have.

        `is_kept`: a process ended while only its memory had these events.
        """
        reason = rows.NOT_WRITTEN if is_kept else rows.DAMAGE if found else rows.STATE_FOLDER_GONE
        self._note_loss(database, reason, last_number=found, expected=needed)

    def _note_loss(self, database: Ledger, reason: str, **numbers: int) -> None:
        text = "events of the state store are lost; what is current is published again: %s"
        log.error(text, reason, extra=numbers)
        database.note_losses([Loss(reason=reason, count=None)])

    def _is_damage(self, error: Exception) -> bool:
        """Decide whether the file is broken; SQLite does not write to one whose header names an unknown format."""
        is_refused = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY
        return is_damage(error) or (is_refused and self._folder.is_of_newer_format())

    def _is_gone(self, file: _File) -> bool:
        """Return whether the open file is no longer what others find under its name."""
        try:
            return self._folder.database.stat().st_ino != file.inode
        except (FileNotFoundError, NotADirectoryError):
            return True

    # Memory

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

    def _open_memory(self, error: Exception) -> None:
        """Start in memory, with what can be read of the file."""
        given, needed = self._folder.read_numbers()
        kept, source = self._folder.read_kept(), None
        self.file_seq = needed
        try:
            if self._why_aside:
                raise error
            source = Ledger(self._folder.database, mode="read")
            self.file_seq = source.last_seq()
            self.last_seq = max(self.file_seq, given)
            if self._is_other_vms(source):
                source.close()
                source = None
        except (OSError, StateError, *ERRORS) as why:
            log.debug("the state store cannot be read either: %s", why)
            # It is unknown which numbers earlier processes gave; time gives some that they did not.
            self.last_seq = max(given, time.time_ns() // 1000)
        memory = self._use_memory(error, source)
        memory.database.save_state(kept)
        memory.is_blind = memory.database.record(rows.STATE, rows.RUN) is None
        if source:
            source.close()
        if self.file_seq < needed:
            self._note_missing(memory.database, self.file_seq, needed, is_kept=bool(kept))

    def _use_memory(self, error: Exception, source: Ledger | None) -> _Memory:
        memory = _Memory(database=Ledger(), error=self._note(error), own_after=self.last_seq)
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
