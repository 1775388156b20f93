"""Connect to the first address of a name that answers, as browsers do (RFC 8305)."""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress

STAGGER_SECONDS = 0.25


def open_socket(host: str, port: int, *, limit_seconds: float) -> socket.socket:
    """Connect to a host: an address is tried once the one before has failed, or has not answered soon.

    Args:
        host: its name or address.
        port: of TCP.
        limit_seconds: for all addresses together, and for each later wait on the socket.

    Raises:
        OSError: why the last one failed; a TimeoutError if none has answered.
    """
    addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    deadline = time.monotonic() + limit_seconds
    failure: OSError = TimeoutError()
    with selectors.DefaultSelector() as pending, ExitStack() as opened:
        while (left_seconds := deadline - time.monotonic()) > 0 and (addresses or pending.get_map()):
            try:
                if addresses:
                    family, kind, protocol, _, address = addresses.pop(0)
                    tried = opened.enter_context(socket.socket(family, kind, protocol))
                    tried.setblocking(False)
                    with suppress(BlockingIOError):
                        tried.connect(address)
                    pending.register(tried, selectors.EVENT_WRITE, tried)
                wait_seconds = min(left_seconds, STAGGER_SECONDS) if addresses else left_seconds
                for key, _ in pending.select(wait_seconds):
                    pending.unregister(key.fileobj)
                    return _connected(key.data, limit_seconds)
            except OSError as error:
                failure = error
    raise failure


def _connected(tried: socket.socket, limit_seconds: float) -> socket.socket:
    if code := tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        reason = getattr(socket, "errorTab", {}).get(code) or os.strerror(code)  # Windows has the table
        raise OSError(code, reason)
    connected = socket.socket(fileno=tried.detach())  # and is not closed with the others
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(limit_seconds)
    return connected
