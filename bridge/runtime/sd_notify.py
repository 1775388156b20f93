"""Tell systemd how the process does: ready, alive, what it is at, stopping. Elsewhere nothing is told.

The protocol (sd_notify(3)) is a datagram of NAME=value lines to the socket that $NOTIFY_SOCKET names: less than a
package for it would ask us to trust.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping

log = logging.getLogger(__name__)

SEND_SECONDS = 2.0  # how long a supervisor that is busy is waited for
STATUS_LENGTH = 400


class Supervisor:
    """Whoever started this process and wants to hear of it, if anybody does. It is used from one thread."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._status = ""
        self.watchdog_seconds = _watchdog_seconds(environ) if self._address else None

    @property
    def is_there(self) -> bool:
        """Whether anybody hears what is told."""
        return bool(self._address)

    def ready(self) -> None:
        """Tell that the configuration is valid, the state is held and the work begins."""
        self._send("READY=1")

    def alive(self) -> None:
        """Tell that every loop lives; what is silent for `watchdog_seconds` is started afresh."""
        if self.watchdog_seconds is not None:
            self._send("WATCHDOG=1")

    def at(self, status: str) -> None:
        """Tell in a line what the process is at, when that is new."""
        line = " ".join(status.split())[:STATUS_LENGTH]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def stopping(self, within_seconds: float) -> None:
        """Tell that the process ends by itself, and how long that may take."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(within_seconds * 1e6)}")

    def _send(self, state: str) -> None:
        if sys.platform == "win32" or not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_SECONDS)
                sender.sendto(state.encode("utf-8", "replace"), self._address)  # IMDS sends what it likes
        except OSError as error:
            log.warning("the supervisor cannot be told %s: %s", state.partition("=")[0], error)


def _address(name: str) -> str:
    """Return the socket's address, "" where there is none that can be sent to; `@` means an abstract one."""
    if not hasattr(socket, "AF_UNIX") or name[:1] not in ("/", "@"):
        return ""
    return f"\0{name[1:]}" if name[0] == "@" else name


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return within which time a sign of life is expected of this very process, None if none is."""
    try:
        seconds = int(environ.get("WATCHDOG_USEC", "")) / 1e6
        is_ours = int(environ.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except ValueError:
        return None
    return seconds if is_ours and seconds > 0 else None
