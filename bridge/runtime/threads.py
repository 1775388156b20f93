"""The stop flag, the signals that ask for a stop, and threads whose loops report progress."""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from bridge.errors import BridgeError, Stopped

log = logging.getLogger(__name__)
T = TypeVar("T")

# What a busy machine or a slow disk may add to a deadline that a loop sets.
STALL_SECONDS = 60.0
# A live migration holds a VM up for seconds, and may cut its connections without a word.
PAUSE_SECONDS, BEAT_SECONDS = 2.0, 1.0
# Windows has also SIGBREAK, Ctrl-Break: the one that a supervisor there can send to a single process.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]


class Stop:
    """A flag that ends every wait; loops and their threads share one."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Request that every loop ends."""
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float | None) -> bool:
        """Wait for at most `seconds`; return whether a stop was requested."""
        extend_deadline(seconds)
        return self._event.wait(None if seconds is None else max(0.0, seconds))


class Signals:
    """The signals that ask for a stop, as something the main thread waits for.

    The handlers do nothing but wake the main thread through a socket, so no lock is ever taken inside one.
    Use as a context manager, in the main thread only.
    """

    def __enter__(self) -> Signals:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers = [(number, signal.signal(number, lambda *_: None)) for number in STOP_SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers:
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float, *, keep: bool = False) -> str | None:
        """Wait for a signal for at most `seconds`; return its name, or None. `keep` leaves it for the next call."""
        deadline = time.monotonic() + seconds
        while True:
            self._reader.settimeout(pauses.begin_wait(max(0.001, deadline - time.monotonic())))
            try:
                received = self._reader.recv(1, socket.MSG_PEEK if keep else 0)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None
            else:
                return signal.Signals(received[0]).name
            finally:
                pauses.end_wait()


class _Thread(threading.Thread):
    """A thread that is stalled if it reports no progress before `deadline` (monotonic)."""

    deadline = math.inf
    progressed_at = 0.0


def report_progress() -> None:
    """Report that the loop of this thread makes progress; after the first report it has to go on reporting."""
    thread = threading.current_thread()
    if isinstance(thread, _Thread):
        thread.progressed_at = time.monotonic()
        thread.deadline = thread.progressed_at + STALL_SECONDS


def extend_deadline(seconds: float | None) -> None:
    """Allow a call or a wait of this thread to last `seconds` (None: without limit), if its loop reports progress."""
    thread = threading.current_thread()
    if isinstance(thread, _Thread) and thread.deadline < math.inf:
        limit_seconds = math.inf if seconds is None else max(0.0, seconds)
        thread.deadline = time.monotonic() + limit_seconds + STALL_SECONDS


def _watched() -> list[_Thread]:
    """Return the threads that have to report progress now."""
    threads = (thread for thread in threading.enumerate() if isinstance(thread, _Thread))
    return [thread for thread in threads if thread.deadline < math.inf]


def stalled_threads() -> list[str]:
    """Return the names of the threads that have passed their deadline without progress."""
    now = time.monotonic()
    return sorted(thread.name for thread in _watched() if thread.deadline < now)


def progress_ages() -> dict[str, float]:
    """Return how many seconds ago each thread that has to report progress last did, by its name.

    A call or a wait counts as progress as long as it may last.
    """
    now = time.monotonic()
    allowed = {one.name: max(one.progressed_at, one.deadline - STALL_SECONDS) for one in _watched()}
    return {name: max(0.0, now - until) for name, until in allowed.items()}


def start_thread(name: str, target: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread; log the exception if one ends it."""

    def run() -> None:
        try:
            target()
        except Stopped:
            pass  # what it was about to do is done at the next start
        except BridgeError as error:
            log.critical("thread %s ended: %s", name, error)
        except Exception:
            log.exception("thread %s ended unexpectedly", name)

    thread = _Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def may_be_cut(idle_seconds: float) -> bool:
    """Return whether a pause of the machine may have cut a connection that was idle for so long by the wall clock.

    That clock goes on, or is corrected afterwards, where the others stand still.
    """
    return abs(idle_seconds) > PAUSE_SECONDS


class Pauses:
    """Counts how often this process was held up for 2 s, and perhaps for one, from the first call on; for any thread.

    A wait of the main thread that ends late by the wall clock shows it; such a wait then lasts for a second at most.
    """

    def __init__(self) -> None:
        self._count, self._is_asked, self._due_at = 0, False, math.inf

    def __call__(self) -> int:
        """Return how many pauses there were, also one that is over only now."""
        self._is_asked = True
        return self._count + self._is_late()

    def begin_wait(self, seconds: float) -> float:
        """Note that the main thread begins to wait; return for how long it may."""
        seconds = min(seconds, BEAT_SECONDS) if self._is_asked else seconds
        self._due_at = time.time() + seconds
        return seconds

    def end_wait(self) -> None:
        """Note that the main thread goes on."""
        self._count += self._is_late()
        self._due_at = math.inf

    def _is_late(self) -> bool:
        return time.time() - self._due_at > PAUSE_SECONDS - BEAT_SECONDS


pauses = Pauses()


class PauseWatch:
    """Says whether this process was held up since it was asked last; for one thread at a time."""

    def __init__(self) -> None:
        self._known = 0

    def __call__(self) -> bool:
        """Return whether there was another pause."""
        known, self._known = self._known, pauses()
        return known != self._known
