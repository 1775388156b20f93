"""Report to systemd: ready, alive, a line of status, stopping. Without systemd, report nothing.

The protocol (sd_notify(3)) is a datagram of NAME=value lines to the socket that $NOTIFY_SOCKET names: less than a
package for it would ask us to trust.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping

from bridge.runtime.text import escape

log = logging.getLogger(__name__)

# How long to wait for a supervisor that is busy.
SEND_SECONDS = 2.0
STATUS_LENGTH = 400


class Supervisor:
    """The supervisor of this process; `is_there` says whether it has one. It is used from one thread."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.is_there = bool(self._address)
        self._status = ""
        self.watchdog_seconds = _watchdog_seconds(environ) if self._address else None

    def ready(self) -> None:
        """Report that the configuration is valid, the state is locked and the work begins."""
        self._send("READY=1")

    def alive(self) -> None:
        """Report that every loop works; without it for `watchdog_seconds` systemd restarts the process."""
        if self.watchdog_seconds is not None:
            self._send("WATCHDOG=1")

    def report_status(self, status: str) -> None:
        """Report the status in one line, if it changed."""
        line = escape(" ".join(status.split()))[:STATUS_LENGTH]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def stopping(self, within_seconds: float) -> None:
        """Report that the process exits on its own, and how long that may take."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(within_seconds * 1e6)}")

    def _send(self, state: str) -> None:
        if sys.platform == "win32" or not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_SECONDS)
                # Text of IMDS may be anything.
                sender.sendto(state.encode("utf-8", "replace"), self._address)
        except OSError as error:
            log.warning("%s cannot be reported to the supervisor: %s", state.partition("=")[0], error)


def _address(name: str) -> str:
    """Return the socket's address, "" if there is none; `@` means an abstract one."""
    if not hasattr(socket, "AF_UNIX") or name[:1] not in ("/", "@"):
        return ""
    return f"\0{name[1:]}" if name[0] == "@" else name


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return the watchdog's time limit for this process, None without a watchdog."""
    try:
        seconds = int(environ.get("WATCHDOG_USEC", "")) / 1e6
        is_ours = int(environ.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except ValueError:
        return None
    return seconds if is_ours and seconds > 0 else None
