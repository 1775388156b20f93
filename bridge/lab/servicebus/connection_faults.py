"""Apply the faults that affect whole connections and links."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridge.lab.servicebus.conditions import DETACH_FORCED, NOT_FOUND, Refused
from bridge.lab.servicebus.faults import Fault
from bridge.lab.servicebus.links import SEND_REFUSALS, Consumer, Endpoint, Producer
from bridge.lab.servicebus.peer import Peer

if TYPE_CHECKING:
    from bridge.lab.servicebus.amqp import Bus


@dataclass(kw_only=True)
class Client:
    """Hold the state of one client connection.

    Attributes:
        opened_paths: the entities that its tokens give access to.
        silent: whether it was accepted and never gets an answer.
        suspended: work that a stall has postponed, with the entity it belongs to.
    """

    endpoints: set[Endpoint] = field(default_factory=set)
    opened_paths: set[str] = field(default_factory=set)
    silent: bool = False
    suspended: deque[tuple[str, Callable[[], None]]] = field(default_factory=deque)


class ConnectionFaults:
    """Close, pause and detach connections and links. Everything here runs on the loop's thread."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def begin(self, fault: Fault) -> None:
        """Start a lasting fault, or apply an immediate one."""
        endpoints = [
            e for peer in self._bus.peers for e in peer.context.endpoints if fault.matches(e.path.lower())
        ]
        peers = set(self._bus.peers) if fault.entity is None else {endpoint.peer for endpoint in endpoints}
        if fault.kind == "drop":
            for peer in peers:
                peer.close()
        elif fault.kind == "detach":
            _detach(endpoints, lambda endpoint: idle(endpoint, self._bus.idle_seconds))
        else:
            self._bus.faults.add(fault)
        if fault.kind == "stall" and not fault.skip:
            for peer in peers:
                peer.pause()
        elif fault.kind == "missing":
            _detach(endpoints, lambda endpoint: missing(endpoint.path))
        elif fault.kind == "disabled":
            _detach(endpoints, lambda _: SEND_REFUSALS["disabled"])

    def on_connect(self, peer: Peer) -> None:
        """Pause a new connection if a fault applies to it."""
        if self._bus.faults.applies("silent"):
            peer.context.silent = True
            peer.pause()
            return
        stall = self._bus.faults.find("stall")
        if stall is not None and not stall.skip:
            peer.pause()

    def stalls(self, peer: Peer, path: str, again: Callable[[], None]) -> bool:
        """Return whether a stall applies; if so, pause the connection.

        Args:
            peer: the connection.
            path: the entity.
            again: the postponed work, which runs when the stall is over.
        """
        if not self._bus.faults.applies("stall", path):
            return False
        peer.context.suspended.append((path, again))
        peer.pause()
        return True

    def resume(self, peer: Peer) -> None:
        """Resume a connection that no fault stalls any more; close one that was silent."""
        if not peer.paused:
            return
        client = peer.context
        if client.silent:
            if self._bus.faults.find("silent") is None:
                peer.close()
            return
        paths = [
            None,
            *(endpoint.path for endpoint in client.endpoints),
            *(path for path, _ in client.suspended),
        ]
        if any(self._bus.faults.find("stall", path) for path in paths):
            return
        suspended, client.suspended = client.suspended, deque()
        for _, work in suspended:
            if not peer.closed:
                peer.loop.guard(peer, work)
        peer.resume()


def idle(endpoint: Endpoint, limit_seconds: float) -> Refused:
    """Return the error with which the service detaches an idle link."""
    return Refused(
        DETACH_FORCED,
        f"The link '{endpoint.link.name}' is force detached. Code: {endpoint.kind}. "
        f"Details: AmqpMessage{endpoint.kind.capitalize()}.IdleTimerExpired: Idle timeout: {limit_seconds:g} s.",
    )


def missing(path: str) -> Refused:
    """Return the error for an entity that does not exist."""
    return Refused(NOT_FOUND, f"The messaging entity '{path}' could not be found.")


def _detach(endpoints: list[Endpoint], why: Callable[[Endpoint], Refused]) -> None:
    for endpoint in endpoints:
        if isinstance(endpoint, (Producer, Consumer)):
            endpoint.detach(why(endpoint))
