"""Simulate the credits and connections of one namespace while events are announced to a fleet.

A model, not the code: VMs poll once a second, connect, send and close as imds-bridge does, and the namespace counts
what it publishes about itself. Sends that the namespace refuses wait as it asks for.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from bridge.sinks.servicebus import REST_SECONDS

VMS, GROUP, SUBSCRIPTIONS = 10_000, 100, 2
EVENTS, MINUTE = 500, 60.0
CREDITS_A_SECOND, CONNECTIONS = 1_000, 5_000
RESERVED = 0.7  # of what a namespace accepts, at most
KEPT = 1 + 2 * SUBSCRIPTIONS  # credits of a message: sent, and by each subscription compared and received
COPY = 1  # credits of a message that duplicate detection drops
POLL_SECONDS = 1.0
COLD_SECONDS = (1.0, 2.0)  # azure-sdk-for-python 35266: a fresh sender
THROTTLED_SECONDS = 2.0
REFUSED_SECONDS = (0.5, 2.0)  # until the next try to connect, while a young notice waits
HOUR, ROLES = 3600.0, 2
BEFORE_SECONDS, AFTER_SECONDS = 30.0, 420.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """How the VMs are configured.

    Attributes:
        documents, scope: as in the configuration, of `forward` and of its Service Bus sink.
        hold_seconds: how long a VM that an event does not name keeps its copy at most; 0 for not at all.
        is_listening: whether each VM that an event names receives commands until it starts.
        vms, events: how many there are, in groups of 100, and how many are announced.
    """

    documents: str = "named"
    scope: str = "all"
    hold_seconds: float = 0.0
    is_listening: bool = True
    vms: int = VMS
    events: int = EVENTS


@dataclass(kw_only=True)
class Outcome:
    """What the namespace and the named VMs have seen.

    Attributes:
        credits: used in each second.
        connections: the most at a time.
        throttled, refused: sends for want of credits, and connections above the limit.
        sends_cold: how often a sender connected.
        notice_seconds: from each named VM's poll to its notice on the topic, in order.
    """

    credits: Counter[int] = field(default_factory=Counter)
    connections: int = 0
    throttled: int = 0
    refused: int = 0
    sends_cold: int = 0
    notice_seconds: list[float] = field(default_factory=list)

    @property
    def peak_credits(self) -> int:
        """Return the credits of the worst second."""
        return max(self.credits.values())

    @property
    def is_within_reserve(self) -> bool:
        """Return whether 30 % of credits and connections are left."""
        return self.peak_credits <= RESERVED * CREDITS_A_SECOND and self.connections <= RESERVED * CONNECTIONS

    @property
    def notice(self) -> tuple[float, float, float]:
        """Return median, 99th percentile and maximum of the notices' time."""
        times = sorted(self.notice_seconds)
        return statistics.median(times), times[int(0.99 * len(times))], times[-1]


@dataclass(frozen=True, kw_only=True)
class _Message:
    key: str  # the first message with a key is kept, further ones are copies
    seen_at: float | None = None  # of a named VM's notice


@dataclass(eq=False)
class _Sender:
    waiting: list[_Message] = field(default_factory=list)
    held: list[_Message] = field(default_factory=list)
    is_open: bool = False
    is_busy: bool = False
    closes_at: float = 0.0


class Simulation:
    """One run, by events in the order of their time."""

    def __init__(self, fleet: Fleet, *, spread_seconds: float, seed: int = 1) -> None:
        """Prepare a run in which the events are announced within `spread_seconds`."""
        self._fleet = fleet
        self._rng = random.Random(seed)  # noqa: S311 - it shall be repeatable
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()  # of two acts at the same instant, the older comes first
        self._open = 0
        self._known: set[str] = set()
        self._senders: dict[tuple[int, int], _Sender] = {}
        self.outcome = Outcome()
        self._plan_heartbeats()
        for number in range(fleet.events):
            self._announce(number, self._rng.uniform(0, spread_seconds))

    def run(self) -> Outcome:
        """Do everything in its order; return what was seen."""
        while self._agenda:
            at, _, act = heapq.heappop(self._agenda)
            act(at)
        return self.outcome

    def _at(self, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (at, next(self._numbers), act))

    def _plan_heartbeats(self) -> None:
        length = BEFORE_SECONDS + AFTER_SECONDS
        for number in range(round(self._fleet.vms * ROLES * length / HOUR)):
            sender = self._sender(self._rng.randrange(self._fleet.vms), self._rng.randrange(ROLES))
            message = _Message(key=f"heartbeat {number}")
            at = self._rng.uniform(-BEFORE_SECONDS, AFTER_SECONDS)
            self._at(at, partial(self._give, sender, [message]))

    def _sender(self, vm: int, role: int = 0) -> _Sender:
        return self._senders.setdefault((vm, role), _Sender())

    def _announce(self, number: int, at: float) -> None:
        groups = self._fleet.vms // GROUP
        first = number % groups * GROUP
        named = first + self._rng.randrange(GROUP)
        for vm in range(first, first + GROUP):
            seen_at = at + self._rng.uniform(0, POLL_SECONDS)
            self._at(seen_at, partial(self._see, number, vm, vm == named))

    def _see(self, number: int, vm: int, is_named: bool, now: float) -> None:
        fleet, sender = self._fleet, self._sender(vm)
        messages = []
        if is_named or fleet.scope == "all":
            messages.append(_Message(key=f"event {number}", seen_at=now if is_named else None))
        if is_named or fleet.documents == "all":
            messages.append(_Message(key=f"document {number} of {vm}"))
        if is_named and fleet.is_listening:
            self._listen(now)
        if messages and not is_named and fleet.hold_seconds:
            if not sender.held:  # what comes later goes with it
                self._at(
                    now + self._rng.uniform(0, fleet.hold_seconds),
                    partial(self._release, sender, messages[0]),
                )
            sender.held += messages
        elif messages:
            self._give(sender, messages, now)

    def _release(self, sender: _Sender, first: _Message, now: float) -> None:
        if sender.held[:1] == [first]:  # else it went with another send
            self._give(sender, [], now)

    def _give(self, sender: _Sender, messages: list[_Message], now: float) -> None:
        sender.waiting += [*sender.held, *messages]
        sender.held = []
        if not sender.is_busy:
            sender.is_busy = True
            (self._send if sender.is_open else self._connect)(sender, now)

    def _connect(self, sender: _Sender, now: float) -> None:
        if self._open >= CONNECTIONS:
            self.outcome.refused += 1
            self._at(now + self._rng.uniform(*REFUSED_SECONDS), partial(self._connect, sender))
            return
        self._connected(1)
        sender.is_open = True
        self.outcome.sends_cold += 1
        self._at(now + self._rng.uniform(*COLD_SECONDS), partial(self._send, sender))

    def _send(self, sender: _Sender, now: float) -> None:
        while sender.waiting:
            message = sender.waiting[0]
            cost = COPY if message.key in self._known else KEPT
            if self.outcome.credits[int(now)] + cost > CREDITS_A_SECOND:
                self.outcome.throttled += 1
                self._at(now + THROTTLED_SECONDS, partial(self._send, sender))
                return
            sender.waiting.pop(0)
            self.outcome.credits[int(now)] += cost
            self._known.add(message.key)
            if message.seen_at is not None:
                self.outcome.notice_seconds.append(now - message.seen_at)
        sender.is_busy = False
        sender.closes_at = now + REST_SECONDS
        self._at(sender.closes_at, partial(self._rest, sender))

    def _rest(self, sender: _Sender, now: float) -> None:
        if sender.is_open and not sender.is_busy and now >= sender.closes_at:
            sender.is_open = False
            self._connected(-1)

    def _listen(self, now: float) -> None:
        """Connect a listener, until the event starts: after the end of the run."""
        if self._open < CONNECTIONS:
            self._connected(1)
            return
        self.outcome.refused += 1
        self._at(now + self._rng.uniform(*REFUSED_SECONDS), self._listen)

    def _connected(self, change: int) -> None:
        self._open += change
        self.outcome.connections = max(self.outcome.connections, self._open)


def simulate(fleet: Fleet, *, spread_seconds: float = MINUTE, seed: int = 1) -> Outcome:
    """Announce events of a VM each, as many of each group, within a time; return what the namespace saw."""
    return Simulation(fleet, spread_seconds=spread_seconds, seed=seed).run()
