"""The signals that ask for a stop."""

from __future__ import annotations

import signal
import socket
from types import FrameType

# Windows has also SIGBREAK, Ctrl-Break: the one that a supervisor there can send to a single process.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]


class Signals:
    """The signals that ask for a stop, as something the main thread waits for.

    The handlers do nothing but wake the main thread through a socket, so no lock is ever taken inside one.
    Use as a context manager, in the main thread only.
    """

    def __enter__(self) -> Signals:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers = [(number, signal.signal(number, _ignore)) for number in STOP_SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers:
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float, *, keep: bool = False) -> str | None:
        """Wait for a signal for at most `seconds`; return its name, or None. `keep` leaves it for the next call."""
        self._reader.settimeout(max(0.001, seconds))
        try:
            received = self._reader.recv(1, socket.MSG_PEEK if keep else 0)
        except TimeoutError:
            return None
        return signal.Signals(received[0]).name


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Let the wakeup socket carry the signal."""
