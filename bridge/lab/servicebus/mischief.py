"""Carry out the faults that meet whole connections and links."""

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
    """Hold what is known of the client of one connection.

    Attributes:
        opened_paths: of the entities that its tokens open.
        silent: whether it was taken and is never to be spoken to.
        held_up: what a stall has kept from being done, and the entity that it is about.
    """

    endpoints: set[Endpoint] = field(default_factory=set)
    opened_paths: set[str] = field(default_factory=set)
    silent: bool = False
    held_up: deque[tuple[str, Callable[[], None]]] = field(default_factory=deque)


class Mischief:
    """Cut, freeze and detach. Everything here happens on the loop's thread."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def begin(self, fault: Fault) -> None:
        """Let something go wrong from now on, or just now."""
        met = [e for peer in self._bus.peers for e in peer.context.endpoints if fault.meets(e.path.lower())]
        peers = set(self._bus.peers) if fault.entity is None else {endpoint.peer for endpoint in met}
        if fault.kind == "drop":
            for peer in peers:
                peer.close()
        elif fault.kind == "detach":
            _detach(met, lambda endpoint: idle(endpoint, self._bus.idle_seconds))
        else:
            self._bus.faults.add(fault)
        if fault.kind == "stall" and not fault.skip:
            for peer in peers:
                peer.freeze()
        elif fault.kind == "missing":
            _detach(met, lambda endpoint: missing(endpoint.path))
        elif fault.kind == "disabled":
            _detach(met, lambda _: SEND_REFUSALS["disabled"])

    def greet(self, peer: Peer) -> None:
        """Freeze a new connection where nobody is to be spoken to."""
        if self._bus.faults.strikes("silent"):
            peer.context.silent = True
            peer.freeze()
            return
        stall = self._bus.faults.find("stall")
        if stall is not None and not stall.skip:
            peer.freeze()

    def stalls(self, peer: Peer, path: str, again: Callable[[], None]) -> bool:
        """Return whether a stall strikes; what is to be done is done when it is over."""
        if not self._bus.faults.strikes("stall", path):
            return False
        peer.context.held_up.append((path, again))
        peer.freeze()
        return True

    def thaw(self, peer: Peer) -> None:
        """Let a connection go on where nothing stalls it any more; cut one that was never spoken to."""
        if not peer.frozen:
            return
        client = peer.context
        if client.silent:
            if self._bus.faults.find("silent") is None:
                peer.close()
            return
        paths = [
            None,
            *(endpoint.path for endpoint in client.endpoints),
            *(path for path, _ in client.held_up),
        ]
        if any(self._bus.faults.find("stall", path) for path in paths):
            return
        held_up, client.held_up = client.held_up, deque()
        for _, work in held_up:
            if not peer.closed:
                peer.loop.guard(peer, work)
        peer.thaw()


def idle(endpoint: Endpoint, limit_seconds: float) -> Refused:
    """Return the error with which the service ends a link that carries nothing."""
    return Refused(
        DETACH_FORCED,
        f"The link '{endpoint.link.name}' is force detached. Code: {endpoint.kind}. "
        f"Details: AmqpMessage{endpoint.kind.capitalize()}.IdleTimerExpired: Idle timeout: {limit_seconds:g} s.",
    )


def missing(path: str) -> Refused:
    """Return the error for an entity that is not there."""
    return Refused(NOT_FOUND, f"The messaging entity '{path}' could not be found.")


def _detach(endpoints: list[Endpoint], why: Callable[[Endpoint], Refused]) -> None:
    for endpoint in endpoints:
        if isinstance(endpoint, (Producer, Consumer)):
            endpoint.detach(why(endpoint))
