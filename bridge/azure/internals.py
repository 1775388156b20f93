"""Everything that imds-bridge uses of azure-servicebus beyond its documented interface, in one place.

The SDK offers no documented way to do what stands here. pyproject.toml bounds its version, and a test fails
when one of these attributes is gone.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any


def close_socket_on_close(handler: Any) -> None:
    """Make a sender or receiver close its socket, too.

    When the peer has cut the connection, the SDK leaves the socket open until it is garbage-collected.
    """
    close = handler._close_handler

    def close_all() -> None:
        transport = _transport(handler)
        try:
            close()
        finally:
            if transport is not None:
                transport.close()

    handler._close_handler = close_all


def abort_connection(handler: Any) -> None:
    """Shut the socket down, from any thread, so that a call that hangs on it fails.

    The SDK has no call to do so: `close` waits for the peer.
    """
    with contextlib.suppress(AttributeError, OSError):
        _transport(handler).sock.shutdown(socket.SHUT_RDWR)


def _transport(handler: Any) -> Any:
    """Return the transport below a sender or receiver, None while it is not connected."""
    client = handler._handler
    connection = client._connection if client is not None else None
    return connection._transport if connection is not None else None
