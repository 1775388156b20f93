"""Where the outbox is kept: in its file, or in memory while the file cannot be used."""

from __future__ import annotations

import errno
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TypeVar

from bridge.errors import StateError, Stopped
from bridge.outbox.image import log_of
from bridge.outbox.rows import read
from bridge.outbox.sqlite import ERRORS, Damaged, Database, is_damage
from bridge.outbox.state import DAMAGE, OTHER_VM, STATE_FOLDER_GONE, Loss, State
from bridge.outbox.state_dir import UNSALVAGED, FolderStamp, StateFolder
from bridge.outbox.transfer import fill_file, fill_memory, is_new

log = logging.getLogger(__name__)
T = TypeVar("T")

# Why a file is moved aside, as its new name says.
DAMAGED_FILE, OTHER_VM_FILE = UNSALVAGED, "other-vm"
# What is copied of the file when it fails leaves room in memory for new events.
COPY_BYTES = 16 * 1024 * 1024
_NUMBER = re.compile(r"[0-9]{1,18}")


class _OtherVm(Exception):
    """The file belongs to another VM."""


class Storage:
    """The current database and what is known of it; the caller takes care that one thread at a time uses it.

    Only `open` raises because of the disk, and only StateError. `error` says what is wrong, None where the file
    has everything; `errors` counts the failed attempts to use it.
    """

    def __init__(self, folder: StateFolder, state: State) -> None:
        """Use the file in `folder`; `state` is replaced by a copy whenever another database is used."""
        self._folder = folder
        self._why_aside: str | None = None  # why the file must be moved aside before anything else
        self._inodes: dict[Path, int | None] = {}
        self._seen: list[FolderStamp] = []  # when the folder was last looked into
        self._kept_as = folder.database  # where it was moved last
        self._logged: set[str] = set()
        self._database: Database | None = None
        self.state = state
        self.error: str | None = None
        self.errors = 0

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
            self._use_memory(error)

    def run(self, work: Callable[[Database], T], *, synced: bool | None = None) -> T:
        """Run `work` on the current database; where the file fails, again on what takes its place.

        Args:
            work: what is to be done. It may be called several times.
            synced: whether a transaction around it waits for the disk; None: there is no transaction.
        """
        while True:
            try:
                with nullcontext() if synced is None else self.database.transaction(synced=synced):
                    return work(self.database)
            except ERRORS as error:
                if self.database.is_memory:
                    raise
                self._replace_file(error)

    def recover(self) -> bool:
        """Try the file again where it cannot be used, and make a new one where it is gone.

        Returns:
            Whether anything in the folder may have changed.
        """
        if self.error is not None:
            try:
                self._use_file()
            except (OSError, StateError, *ERRORS) as error:
                self._note(error)
            return True
        # The same time twice, because a change within the clock's resolution does not alter it.
        stamp = self._folder.stamp()
        if self._seen == [stamp, stamp]:
            return False
        self._seen = [*self._seen[-1:], stamp]
        self._check_folder()
        return True

    def _check_folder(self) -> None:
        try:
            self._folder.acquire()  # again, if the lock was removed
            if self._is_file_gone():
                self._replace_missing_file()
        except (OSError, StateError, *ERRORS) as error:
            self._use_memory(error)

    def _is_file_gone(self) -> bool:
        """Return whether the open file, or its log, is no longer what others find under its name."""
        for path in (self._folder.database, log_of(self._folder.database)):
            found = _inode(path)
            known = self._inodes.setdefault(path, found) or found  # the log is made with the first write
            if found != known:
                return True
        return False

    def _replace_missing_file(self) -> None:
        """Make a new file with all that the open one has, which can be read although it has no name."""
        log.error(
            "the state folder was removed or changed while in use; it is created again with everything known"
        )
        self._folder.move_aside("replaced")
        self.state.note_loss(Loss(reason=STATE_FOLDER_GONE, count=0))
        self._use_file()

    def move_aside(self, why: str) -> Path:
        """Move the file away as soon as the disk allows it, and start a new one; return where it is now."""
        self._why_aside = why
        self.close()
        self.state.forget()
        self.open()
        return self._kept_as if self._why_aside is None else self._folder.database

    def close(self) -> None:
        """Close the database."""
        if self._database:
            self._database.close()
            self._database = None

    def _replace_file(self, error: Exception) -> None:
        if is_damage(error) and not self._why_aside:
            self._why_aside = DAMAGED_FILE
            self.close()
            try:
                self._use_file()
            except (OSError, StateError, *ERRORS) as another:
                error = another
            else:
                return
        self._use_memory(error)

    def _use_file(self) -> None:
        """Open the file and write to it all that only this process knows."""
        for _ in range(2):  # the second time instead of a file that was moved aside
            self._folder.acquire()
            self._move_aside_if_due()
            damaged = self._unsalvaged()
            try:
                self._switch_to(Database(self._folder.database), partial(self._fill_file, damaged=damaged))
                self._inodes[self._folder.database] = _inode(self._folder.database)
            except _OtherVm:
                self._why_aside = OTHER_VM_FILE
                self.state.note_loss(Loss(reason=OTHER_VM, count=None))
            except ERRORS as error:
                if not is_damage(error):
                    raise
                self._why_aside = DAMAGED_FILE
            else:
                self._note_salvaged(damaged)
                return self._note_success()
        raise Damaged("the new file is damaged as well")

    def _use_memory(self, error: Exception) -> None:
        """Go on in memory with what can be read of the file."""
        self._note(error)
        if not (self._database or self._why_aside or self.state.files):
            self._open_to_read()
        self._switch_to(Database(), self._fill_memory)

    def _open_to_read(self) -> None:
        """Take over what an older process left also where nothing can be written."""
        try:
            database = Database(self._folder.database, read_only=True)
            state = deepcopy(self.state)
            state.join(database, is_start=True)
            state.recount(database)
        except (OSError, *ERRORS) as error:
            log.debug("the state store cannot be read either: %s", error)
        else:
            state.files.add(database.identity())
            self._database, self.state = database, state

    def _switch_to(self, database: Database, fill: Callable[[Database, State], None]) -> None:
        """Use another database from now on, unless filling it fails: then nothing has changed."""
        state = deepcopy(self.state)
        try:
            with database.transaction():
                fill(database, state)
        except BaseException:
            database.close()
            raise
        self.close()
        self._database, self.state, self._inodes = database, state, {}

    def _fill_file(self, file: Database, state: State, *, damaged: Sequence[Path]) -> None:
        own, found = state.meta.get("vm_id", ""), dict(read(file, "meta")).get("vm_id", "")
        if own and found and own.lower() != found.lower():
            raise _OtherVm
        is_start = not state.files
        # A file that is not new has them: the process that filled it was killed before it renamed the damaged one.
        fill_file(file, self._database, state, damaged=damaged if is_new(file) else ())
        if is_start and self._is_outdated(state):
            state.begin_epoch()
            state.note_loss(Loss(reason=DAMAGE, count=None))
            state.save(file)

    def _is_outdated(self, state: State) -> bool:
        """Return whether the last process committed more than the file has: it was restored, or lost its end."""
        committed = (self._folder.read_status() or {}).get("committed")
        if not isinstance(committed, dict) or committed.get("epoch") != state.meta["epoch"]:
            return False
        last = str(committed.get("reporterseq"))
        return _NUMBER.fullmatch(last) is not None and int(state.meta["reporterseq"]) < int(last)

    def _fill_memory(self, memory: Database, state: State) -> None:
        fill_memory(memory, self._database, state, max_bytes=COPY_BYTES)

    def _move_aside_if_due(self) -> None:
        if self._why_aside:
            self._kept_as = self._folder.move_aside(self._why_aside)
            if self._why_aside == OTHER_VM_FILE:
                log.error(
                    "the state is another VM's: moved aside; starting with an empty outbox",
                    extra={"kept_as": str(self._kept_as)},
                )
            self._why_aside = None

    def _unsalvaged(self) -> list[Path]:
        """Return the damaged files that have to be salvaged, also those that an earlier process was killed over.

        Raises:
            OSError: there is no room for their rows, and searching for them would take long.
        """
        found = self._folder.unsalvaged()
        needed = sum(2 * path.stat().st_size for path in found)  # for the log and then for the file
        if found and needed > shutil.disk_usage(self._folder.path).free:
            raise OSError(errno.ENOSPC, f"{needed} bytes are needed to salvage a damaged file")
        return found

    def _note_salvaged(self, damaged: Sequence[Path]) -> None:
        for path in damaged:
            log.error(
                "the state store is damaged: moved aside; every readable row is copied to a new one",
                extra={"kept_as": str(self._folder.kept_as(path))},
            )
        if damaged:
            self._folder.note_salvaged()

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

    def _note_success(self) -> None:
        if self.error is not None:
            log.warning("the state store works again", extra={"was": self.error})
            self.error = None
            self._logged.clear()


def _inode(path: Path) -> int | None:
    """Return what a name stands for, None if it stands for nothing."""
    try:
        return path.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
