"""What a process tries while nothing else shows it: whether it can do what it will need for a notice."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from bridge.outbox.state_dir import try_to_write
from bridge.process.parts import Parts
from bridge.runtime.threads import start_thread

log = logging.getLogger(__name__)

TRIAL_SECONDS = 60.0
# A disk that does not answer for so long takes no notice, either.
HUNG_SECONDS = 30.0


class Trial:
    """Tries programs, and the state in each minute without events, on a thread that ends with the try.

    The thread holds no lock, and nothing waits for it, however slow the disk is. `look` is for one thread; any may
    read why the state takes no notice (`error`) and why programs cannot be started (`program_faults`).
    """

    def __init__(self, parts: Parts, find_program_faults: Callable[[], Sequence[str]]) -> None:
        self._outbox, self._clock, self._folder = parts.outbox, parts.clock, parts.folder.path
        self._find_program_faults = find_program_faults
        self.error: str | None = None
        self.program_faults: Sequence[str] = ()
        self._thread = Thread()
        self._tried_at = -math.inf
        self._began_at = math.inf  # with the state, of the try that runs
        self._changes, self._stored_at = self._outbox.changes, self._clock.monotonic()

    def look(self) -> None:
        """Begin a try if it is time: at first, after a minute, at once after one that failed; note one that hangs."""
        now = self._clock.monotonic()
        if self._outbox.changes != self._changes:
            self._changes, self._stored_at = self._outbox.changes, now
        if self._thread.is_alive():
            if now - self._began_at >= HUNG_SECONDS:
                self._note(f"{self._folder}: the disk does not answer within {HUNG_SECONDS:.0f} s")
            return
        is_quiet = bool(self.error) or now - self._stored_at >= TRIAL_SECONDS
        if is_quiet or self.program_faults or now - self._tried_at >= TRIAL_SECONDS:
            self._tried_at = now
            with suppress(RuntimeError):  # at the limit of threads; the next look tries again
                self._thread = start_thread("trial", self._try_state if is_quiet else self._try_programs)

    def _try_programs(self) -> None:
        """Test, with the rights of this process, the programs that it will need."""
        faults = self._find_program_faults()
        for fault in faults:
            if fault not in self.program_faults:
                log.error("a program cannot be started: %s", fault)
        self.program_faults = faults

    def _try_state(self) -> None:
        self._try_programs()
        error = None
        self._stored_at = self._began_at = self._clock.monotonic()
        try:
            try_to_write(self._folder)
        except FileNotFoundError:
            pass  # the outbox makes the folder again, or has an error of its own
        except OSError as failure:
            error = f"{self._folder}: {failure}"
        self._began_at = math.inf
        self._note(error)

    def _note(self, error: str | None) -> None:
        if bool(error) != bool(self.error):
            text = "the state store %s take a notice now"
            log.error(text, "cannot" if error else "can", extra={"error": error})
        self.error = error
