"""What keeps the outbox in order beside that: open and close it, use a file again that failed, forget what is old."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path

from bridge.config.base import DAY_SECONDS
from bridge.events.model import StoredEvent
from bridge.outbox import rows
from bridge.outbox.file_storage import FileStorage, TurnedUp
from bridge.outbox.outbox import EXPIRED, Outbox
from bridge.outbox.room import Freed
from bridge.outbox.rows import Ledger, Loss, stored_dead_letter, stored_event
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.json import Json

log = logging.getLogger(__name__)

# How often a transition was seen must be remembered for longer than any duplicate detection (7 days).
RECORD_SECONDS = DEAD_LETTER_SECONDS = 30 * DAY_SECONDS
# How long events wait for a sink that is not configured any more.
LEFT_SECONDS = 7 * DAY_SECONDS
CHUNK_ROWS = 1000


@dataclass(eq=False)
class KeptOutbox(Outbox):
    """The outbox as the process has it that opens, keeps and closes it; to make one opens `folder`, or starts one.

    Args:
        folder: where it is kept.
        retain_seconds: for how long events are kept that every sink has had.

    Raises:
        StateError: another process holds the folder, or a newer version wrote it.
    """

    folder: StateFolder
    _: KW_ONLY
    retain_seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.storage = self._file = FileStorage(self.folder, self._changed, self.now, self._wanted_by)
        try:
            self._file.open()
            self._begin()
        except BaseException:
            self.storage.close()
            self.folder.release()
            raise

    def _begin(self) -> None:
        """Begin this run with what is stored."""
        run = self.record(rows.STATE, rows.RUN) or {}
        self.previous_run = (run.get("epoch"), run.get("reporterseq"))
        now = self.clock.steady()
        self.storage.run(lambda database: database.execute("resume", now), synced=False)
        self._load()
        for sink, count in self.left_sinks().items():
            log.warning(
                "%d event(s) wait for sink %s, which is not configured: `imds-bridge outbox move` hands them to "
                "another sink, `imds-bridge outbox drop --waiting` deletes them",
                *(count, sink),
            )

    @property
    def storage_errors(self) -> int:
        """How often the file could not be used; while it fails, each attempt counts."""
        return self._file.errors

    def left_sinks(self) -> dict[str, int]:
        """Return how many events wait for sinks that are not configured."""
        with self._changed:
            return {sink: count for sink, count in (+self._waiting).items() if sink not in self.sinks}

    def dead_letter_counts(self) -> dict[str, int]:
        """Return the number of dead letters of each sink."""
        return self.storage.run(lambda database: database.counts("count-dead-letters"))

    def size_bytes(self) -> int:
        """Return how much disk the outbox takes up, or how much memory in its place."""
        return self._file.size_bytes()

    def replace(self, state: Mapping[str, Json]) -> Path:
        """Move the state of another VM aside and start a new one; return where the old one is now.

        What waited there is a loss. Nothing may have been committed before.

        Args:
            state: what the new one remembers for ever, by its names.
        """
        with self._changed:
            waiting = [
                Loss(reason=rows.OTHER_VM, count=count, sink=sink, oldest=self.backlog(sink)[1])
                for sink, count in (+self._waiting).items()
            ]
            target = self._file.replace({**state, rows.LOSSES: list(map(asdict, waiting))})
            self._begin()
            return target

    def recover(self, *, may_end: bool = True) -> None:
        """Use a file again that failed, and notice what the command line has changed; call every few seconds.

        Raises:
            StateError: this process started without the state, which can be read now; only with `may_end`.
        """
        with self._changed:
            has_changed = self._file.recover(may_end=may_end)
        while has_changed:
            has_changed = self._load() == CHUNK_ROWS

    def _load(self) -> int:
        """Count what waits, begin with new sinks, and let dead letters wait again; return how many of them."""
        now = self.clock.steady()

        def work(database: Ledger) -> tuple[int, Freed, Counter[str]]:
            appended = 0
            if not database.is_memory:
                self._begin_sinks(database)
                appended = self._append_retries(database, now)
            return appended, self._make_room(database), Counter(database.counts("count-waiting"))

        with self._changed:
            self._delivered_from = 0.0
            appended, freed, waiting = self.storage.run(work, synced=True)
            self._waiting = waiting + freed[1]
            self._note_freed(freed)
            self.storage.note_numbers()
            self.wake()
            return appended

    def _append_retries(self, database: Ledger, now: float) -> int:
        """Let dead letters that are to be sent again wait like new events; return how many.

        Their numbers count as given at once: if the transaction fails, it may be in the file all the same.
        """
        numbers = [number for (number,) in database.execute("retries", CHUNK_ROWS)]
        for number in numbers:
            self.storage.last_seq += 1
            (sink, id_, type_, *_, body), _ = stored_dead_letter(
                database.execute("dead-letter", number).fetchone()
            )
            event = StoredEvent(seq=self.storage.last_seq, id=id_, type=type_, stored_at=now, body=body)
            database.save_event(event)
            database.save_waiting(event, {sink: None}, wall=-math.inf)  # an old notice is not late news
            database.execute("delete-dead-letter", number)
        if numbers:
            database.note_seq(self.storage.last_seq)
        return len(numbers)

    def _begin_sinks(self, database: Ledger) -> None:
        """Let new sinks with `from_start` wait for what is stored, and note since when each filter decides."""
        known = database.record(rows.STATE, rows.SINKS) or []
        if new := [name for name in self.sinks if name not in known]:
            for name in new:
                wanted, from_start = self.sinks[name]
                for row in database.execute("events-after", 0) if from_start else ():
                    event = stored_event(row)
                    if wanted.matches(event):
                        database.save_waiting(event, {name: None})
            database.save_record(rows.STATE, rows.SINKS, [*known, *new])
        noted, kept = database.record(rows.STATE, rows.FILTERS) or {}, {}
        for name, (wanted, from_start) in self.sinks.items():
            since = 0 if from_start and name in new else self.storage.last_seq
            kept[name] = noted[name] if repr(wanted) in noted.get(name, ()) else [repr(wanted), since]
        if kept != noted:
            database.save_record(rows.STATE, rows.FILTERS, kept)

    def prune(self) -> None:
        """Forget what every sink has had and what is old; call every minute."""
        now = self.clock.steady()

        def work(database: Ledger) -> bool:
            database.execute("prune-dead-letters", now - DEAD_LETTER_SECONDS)
            database.execute("prune-records", now - RECORD_SECONDS)
            pruned = database.execute("prune-events", now - self.retain_seconds, CHUNK_ROWS)
            return pruned.rowcount == CHUNK_ROWS

        while self.storage.error is None and self.storage.run(work, synced=False):
            pass
        for sink in self.left_sinks():
            self._expire(sink, now - LEFT_SECONDS)

    def _expire(self, sink: str, before: float) -> None:
        """Let what has waited too long for a sink that is not configured become dead letters."""
        while old := [event for event in self.pending(sink, CHUNK_ROWS) if event.stored_at < before]:
            self.acknowledge(sink, old, dead=(EXPIRED, "the sink is not configured"))
            log.error("%d event(s) for sink %s, which is not configured, are dead-lettered", len(old), sink)

    def close(self) -> bool:
        """Write what can be written and let the folder go; return whether all that waits is stored."""
        with self._changed:
            is_stored = self._store()
            if not is_stored and (waiting := max(self._waiting.values(), default=0)):
                text = "the state store is still unavailable: %d event(s) that were not delivered are lost"
                log.error(text, waiting)
            self.storage.close()
            self.folder.release()
            return is_stored

    def _store(self) -> bool:
        try:
            self._file.recover()
        except TurnedUp:
            return True
        return self.storage.error is None
