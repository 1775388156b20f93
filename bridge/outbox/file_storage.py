"""Open the file of the outbox, use it again after it has failed, and bring into it what it lacks."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from bridge.errors import StateError
from bridge.events.urgency import Now
from bridge.outbox import rows
from bridge.outbox.rows import Ledger, Loss
from bridge.outbox.sqlite import ERRORS, log_bytes
from bridge.outbox.state_dir import DAMAGED_FILE, OTHER_VM_FILE, StateFolder
from bridge.outbox.storage import File, Storage
from bridge.outbox.transfer import WantedBy, copy_back, salvage
from bridge.runtime.json import Json

log = logging.getLogger(__name__)

# How long a start waits for another program, such as a virus scanner, to close the file.
IN_USE_SECONDS = 2.0
IN_USE_PAUSE_SECONDS = 0.1


class TurnedUp(StateError):
    """The state can be read without which this process started."""


class FileStorage(Storage):
    """The storage as it is opened, opened again and closed; not to be called without the lock.

    Only `open` raises because of the disk, and only StateError.
    """

    def __init__(
        self,
        folder: StateFolder,
        lock: AbstractContextManager[object],
        now: Callable[[], Now],
        wanted_by: WantedBy,
    ) -> None:
        """Use the file in `folder`; `run` takes the lock, `wanted_by` names the sinks that take an event."""
        super().__init__(folder, lock, now)
        self._wanted_by = wanted_by

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
        if isinstance(file := self._used, File):
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
        self._used = File(database=file, inode=inode, version=file.version())
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
        losses = file.losses()
        file.save_state(kept)
        file.note_losses(losses, count=max)  # what is kept may have others
        has_turned_up = False
        if memory := self._memory:
            runs = [one.record(rows.STATE, rows.RUN) or {} for one in (file, memory.database)]
            # A take-over that failed may have left this process's own run in the file.
            has_turned_up = memory.is_blind and runs[0].get("epoch") not in (None, runs[-1].get("epoch"))
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

    def _is_gone(self, file: File) -> bool:
        """Return whether the open file is no longer what others find under its name."""
        try:
            return self._folder.database.stat().st_ino != file.inode
        except (FileNotFoundError, NotADirectoryError):
            return True

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
        if memory.is_blind:  # a kill or a stop loses what only this process will know
            new, losses = asdict(Loss(reason=rows.NOT_WRITTEN, count=None)), kept.get(rows.LOSSES, [])
            self._folder.keep({**kept, rows.LOSSES: losses if new in losses else [*losses, new]})
        if source:
            source.close()
        if self.file_seq < needed:
            self._note_missing(memory.database, self.file_seq, needed, is_kept=bool(kept))
