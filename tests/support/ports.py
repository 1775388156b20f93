"""Ports of this machine that nobody else is given, also while no server listens on them.

One that is chosen, closed and listened on a moment later may meanwhile be another test's, which runs beside this one.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

HOST = "127.0.0.1"


class ReservedPorts:
    """Ports in a row, the first of which is `first`, reserved until `close`: only who knows them listens there."""

    def __init__(self, count: int = 1) -> None:
        self._held: list[socket.socket] = []
        while len(self._held) < count:
            self.close()
            self.first = self._hold(0)
            with suppress(OSError, OverflowError):
                for number in range(self.first + 1, self.first + count):
                    self._hold(number)
        if sys.platform == "win32":  # where a port that is bound is nobody's to listen on
            self.close()

    def _hold(self, number: int) -> int:
        held = socket.socket()
        self._held.append(held)
        try:
            held.bind((HOST, number))
        except (OSError, OverflowError):
            self._held.pop().close()
            raise
        # After the bind: a server may share the port with what is only bound, another reservation may not.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return int(held.getsockname()[1])

    def close(self) -> None:
        """Let others have the ports."""
        while self._held:
            self._held.pop().close()


_kept: list[ReservedPorts] = []


def free_port() -> int:
    """Return a port that is reserved as long as this process runs."""
    _kept.append(ReservedPorts())
    return _kept[-1].first


def free_address() -> str:
    """Return an address of this machine with such a port."""
    return f"{HOST}:{free_port()}"
