"""The console with a simulated fleet, at 60 times the speed: `imds-bridge demo --console`.

The documents are the simulated IMDS's. The forwarder's own code compares them and builds the events; 60 processes
with their polling would keep a laptop busy, and one thread does not.
"""

from __future__ import annotations

import json
import sched
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

import requests
from pydantic import ValidationError

from bridge import __version__
from bridge.config.console import ConsoleSettings
from bridge.config.models import Config
from bridge.console.process import Console
from bridge.errors import UsageError
from bridge.events.builder import Reporter
from bridge.events.model import CloudEvent, structured
from bridge.formats.cloudevents import BATCH_CONTENT_TYPE
from bridge.imds.diff import Observation, Watch, compare
from bridge.imds.document import Document, read_document
from bridge.imds.instance import parse_vm
from bridge.lab.rendering import EVENT_VERSIONS, compute_of, event_fields, render_document
from bridge.runtime.text import show
from bridge.runtime.threads import Signals, start_thread
from bridge.runtime.time import Clock

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
HISTORY_SECONDS = 28 * DAY
HEARTBEATS_SECONDS = 8 * HOUR  # earlier ones would only fill the store
_PAST_EVENT_SECONDS = 26 * HOUR  # on average between two events of a group
_EVENT_SECONDS = HOUR

SPEED = 60.0
STEP_SECONDS = 0.25
_BATCH = 500
_SEND_SECONDS = 30.0
_STOP_SECONDS = 10.0


class Kind(NamedTuple):
    """A kind of event that happens to a group; durations are in seconds."""

    event_type: str
    source: str
    notices: tuple[float, ...]  # one of them is chosen
    duration: int  # DurationInSeconds, -1 for unknown
    impact: float


FREEZE = Kind("Freeze", "Platform", (15 * MINUTE, 40 * MINUTE, 3 * HOUR), 9, MINUTE)
REBOOT = Kind("Reboot", "Platform", (15 * MINUTE, HOUR, 6 * HOUR), -1, 6 * MINUTE)
USER_REBOOT = Kind("Reboot", "User", (15 * MINUTE,), 300, 5 * MINUTE)
REDEPLOY = Kind("Redeploy", "Platform", (2 * HOUR, 12 * HOUR, 5 * DAY), -1, 12 * MINUTE)
TERMINATE = Kind("Terminate", "User", (15 * MINUTE,), -1, 2 * MINUTE)
PREEMPT = Kind("Preempt", "Platform", (30.0,), -1, 20 * MINUTE)
DESCRIPTIONS = {
    "Freeze": "Virtual machine is being paused because of a memory-preserving Live Migration operation.",
    "Redeploy": "The virtual machine is on degraded hardware and has to move to another host.",
}

# Name, the VMs' prefix, their number, zones, and what happens to them.
GROUPS: tuple[tuple[str, str, int, tuple[str, ...], tuple[Kind, ...]], ...] = (
    ("shop-web", "web", 14, ("1", "2"), (FREEZE, REBOOT, USER_REBOOT, TERMINATE)),
    ("shop-db", "db", 6, ("2",), (FREEZE, REDEPLOY)),
    ("batch-spot", "spot", 40, ("1", "3"), (PREEMPT, PREEMPT, FREEZE)),
)
# What is open when the play begins: the kind, its VMs, how long ago it was announced, and its notice.
OPENING: tuple[tuple[Kind, tuple[str, ...], float, float], ...] = (
    (REDEPLOY, ("db-1",), DAY, 3 * DAY),
    (REDEPLOY, ("db-0",), 2.5 * HOUR, 6 * HOUR),
    (REBOOT, ("web-7", "web-8", "web-10", "web-11"), 2 * HOUR, 26 * HOUR),
    (USER_REBOOT, ("web-3",), 2 * MINUTE, 57 * MINUTE),
    (FREEZE, ("db-2",), 4 * MINUTE, 42 * MINUTE),
    (REBOOT, ("web-0", "web-1"), 3 * MINUTE, 23 * MINUTE),
    (TERMINATE, ("web-5",), 2 * MINUTE, 15 * MINUTE),
    (PREEMPT, ("spot-17",), MINUTE, 30.0),
)
# A VM, and how long before the play it fell silent, was stopped, or lost IMDS.
SILENT, STOPPED, UNREACHABLE = ("web-9", 2.2 * HOUR), ("spot-31", 5 * HOUR), ("db-4", 3.5 * MINUTE)


class SimulatedVm:
    """A VM whose forwarder publishes until it is quiet, and sees IMDS until it is lost."""

    def __init__(self, name: str, group: str, zone: str, publish: Callable[[CloudEvent], None]) -> None:
        """Describe the VM; `publish` is called with its events."""
        vm = replace(parse_vm(json.dumps(compute_of(name, "", group)).encode()), zone=zone)
        self.is_quiet = self.is_lost = False
        self._publish = publish
        self._watch = Watch()
        self._numbers = {role: count(1) for role in ("forward", "listen")}
        self._vm = vm

    def see(self, document: Document, at: float) -> None:
        """Publish what differs from the document that was seen before, as a forwarder that polls every second."""
        if self.is_lost:
            return
        before = self._watch.document
        self._watch, changes = compare(self._watch, document, Observation(at=at, gap_seconds=1.0))
        reporter = self._reporter(at)
        events = [
            reporter.scheduled_event(change, seen_before=0, incarnation=document.incarnation)
            for change in changes
        ]
        ids = [event.id for event in events]
        for event in (*events, reporter.document(document, previous=before, event_ids=ids)):
            self._send(event)

    def heartbeat(self, at: float, reason: str) -> None:
        """Publish a heartbeat."""
        version = __version__.partition("+")[0]
        self._send(self._reporter(at).heartbeat(reason=reason, version=version, backlog={}))

    def lose_imds(self, at: float) -> None:
        """Publish that IMDS does not answer."""
        self.is_lost = True
        since, reason = _instant(at - MINUTE), "no answer within 10 s"
        self._send(self._reporter(at).unreachable(since=since, reason=reason, cause="NoAnswer"))

    def answer_approval(self, fields: dict[str, Any], is_allowed: bool, at: float) -> None:
        """Publish the receipt of an approval."""
        event_id = fields["EventId"]
        data = {
            "Reason": "Approved" if is_allowed else "PolicyDenied",
            "Detail": "" if is_allowed else "deny rule 1: no approval by day",
            "Command": {"RequestedBy": "ana@contoso.example", "Reason": "drained, ticket 4711"},
            "EventType": fields["EventType"],
            "NotBeforeUtc": None,
            "DryRun": False,
        }
        receipt = self._reporter(at, "listen").receipt(
            outcome="accepted" if is_allowed else "rejected",
            key=event_id,
            command_id=f"order-{event_id[:4]}",
            event_id=event_id,
            resources=fields["Resources"],
            data=data,
        )
        self._send(receipt)

    def _reporter(self, at: float, role: str = "forward") -> Reporter:
        return Reporter(
            name=self._vm.name,
            role=role,
            epoch=self._vm.vm_id,
            at=_instant(at),
            next_number=self._numbers[role].__next__,
            vm=self._vm,
            session="{resource_group}.{vm}",
        )

    def _send(self, event: CloudEvent) -> None:
        if not self.is_quiet:
            self._publish(event)


class SimulatedGroup:
    """VMs that see the same document."""

    def __init__(self, vms: dict[str, SimulatedVm], kinds: Sequence[Kind], random: Random) -> None:
        """Start with an empty document.

        Args:
            vms: of the group, by name.
            kinds: what happens to them.
            random: chooses how long after a change each VM sees it.
        """
        self.vms = vms
        self.kinds = kinds
        self._random = random
        self._events: dict[str, dict[str, Any]] = {}
        self._incarnation = 1

    def change(self, event_id: str, fields: dict[str, Any] | None, at: float) -> None:
        """Set an event's fields, or remove it; every VM sees that within a second."""
        kept = {name: event for name, event in self._events.items() if name != event_id}
        self._events = kept | ({event_id: fields} if fields else {})
        self._incarnation += 1
        shown = render_document(self._incarnation, list(self._events.values()), EVENT_VERSIONS[-1])
        document = read_document(shown)
        for seconds, name in sorted((self._random.uniform(0.05, 1.0), name) for name in self.vms):
            self.vms[name].see(document, at + seconds)


class SimulatedFleet:
    """60 VMs in three groups, and everything that happens to them."""

    def __init__(self, starts_at: float, *, seed: int = 1) -> None:
        """Plan the fleet.

        Args:
            starts_at: when the play begins, in seconds since 1970; what happened before fills the history.
            seed: the same one gives the same play.
        """
        self._random = Random(seed)  # noqa: S311 - it chooses what happens in a play
        self._starts_at = self._now = starts_at
        self._published: list[bytes] = []
        self._agenda = sched.scheduler(lambda: self._now, lambda _: None)
        self._vms: dict[str, tuple[SimulatedGroup, SimulatedVm]] = {}
        for group in GROUPS:
            self._add_group(*group)
        self._plan()

    def advance(self, until: float) -> list[bytes]:
        """Let everything happen until then; return the published events in structured mode."""
        self._now = until
        self._agenda.run(blocking=False)
        published, self._published = self._published, []
        return published

    def _add_group(
        self, name: str, prefix: str, size: int, zones: tuple[str, ...], kinds: tuple[Kind, ...]
    ) -> None:
        places = {f"{prefix}-{number}": zones[number * len(zones) // size] for number in range(size)}
        vms = {vm: SimulatedVm(vm, name, zone, self._publish) for vm, zone in places.items()}
        group = SimulatedGroup(vms, kinds, self._random)
        self._vms.update({name: (group, vm) for name, vm in vms.items()})
        self._at(self._starts_at - HISTORY_SECONDS + self._random.random() * DAY, self._happen_in, group)

    def _publish(self, event: CloudEvent) -> None:
        self._published.append(structured(event))

    def _at(self, at: float, act: Callable[..., None], *arguments: Any) -> None:
        """Call it then, with the arguments and the time."""
        self._agenda.enterabs(at, 0, act, (*arguments, at))

    def _plan(self) -> None:
        start = self._starts_at
        for _, vm in self._vms.values():
            self._at(start - HEARTBEATS_SECONDS - self._random.random() * HOUR, self._beat, vm, "Started")
        for kind, names, ago, notice in OPENING:
            self._at(start - ago, self._announce, kind, names, notice)
        self._at(start - SILENT[1], self._end, SILENT[0], False)
        self._at(start - STOPPED[1], self._end, STOPPED[0], True)
        self._at(start - UNREACHABLE[1], self._vms[UNREACHABLE[0]][1].lose_imds)

    def _beat(self, vm: SimulatedVm, reason: str, at: float) -> None:
        vm.heartbeat(at, reason)
        self._at(at + HOUR, self._beat, vm, "Hourly")

    def _end(self, name: str, is_announced: bool, at: float) -> None:
        _, vm = self._vms[name]
        if is_announced:
            vm.heartbeat(at, "Stopping")
        vm.is_quiet = True

    def _happen_in(self, group: SimulatedGroup, at: float) -> None:
        """Announce an event of the group, and again after a while."""
        is_past = at < self._starts_at - DAY
        if is_past or at >= self._starts_at:
            kind = self._random.choice(group.kinds)
            names = self._random.sample([*group.vms], self._random.choice((1, 1, 1, 2)))
            # what was announced long ago has ended before the play begins
            notices = [one for one in kind.notices if one < DAY] if is_past else kind.notices
            self._announce(kind, names, self._random.choice(notices), at)
        mean = _PAST_EVENT_SECONDS if is_past else _EVENT_SECONDS
        self._at(at + self._random.expovariate(1 / mean), self._happen_in, group)

    def _announce(self, kind: Kind, names: Sequence[str], notice: float, at: float) -> None:
        group, vm = self._vms[names[0]]
        event_id = str(UUID(int=self._random.getrandbits(128), version=4)).upper()
        starts_at = at + notice
        fields = event_fields(
            event_id=event_id,
            event_type=kind.event_type,
            event_status="Scheduled",
            resources=list(names),
            description=DESCRIPTIONS.get(kind.event_type, ""),
            event_source=kind.source,
            duration_seconds=kind.duration,
        ) | {"NotBefore": formatdate(int(starts_at), usegmt=True)}
        group.change(event_id, fields, at)
        if self._random.random() < 0.15 and notice > HOUR:  # noqa: PLR2004 - a small share
            self._at(at + notice / 2, group.change, event_id, None)
            return
        if kind is REBOOT:
            is_allowed = self._random.random() < 0.6 and starts_at < self._starts_at  # noqa: PLR2004
            self._at(at + 2 * MINUTE, vm.answer_approval, fields, is_allowed)
            starts_at = at + 3 * MINUTE if is_allowed else starts_at
        self._at(starts_at, group.change, event_id, {**fields, "EventStatus": "Started", "NotBefore": ""})
        self._at(starts_at + kind.impact, group.change, event_id, None)


def _instant(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


class FastClock(Clock):
    """A clock that runs faster than the machine's, from its time now."""

    def __init__(self) -> None:
        self._wall, self._monotonic = time.time(), time.monotonic()
        super().__init__()

    def wall(self) -> float:
        """Return the time in seconds since 1970."""
        return self._wall + self.monotonic()

    def monotonic(self) -> float:
        """Return the seconds since the beginning."""
        return (time.monotonic() - self._monotonic) * SPEED


def show_console(*, listen: str, minutes: float) -> int:
    """Play the fleet into a console, until a signal or for some minutes; return the exit code.

    Args:
        listen: the console's address, on this machine.
        minutes: real ones.

    Raises:
        UsageError: the address cannot be listened on, or others could reach it.
    """
    try:
        settings = ConsoleSettings(listen=listen)
    except ValidationError as error:
        raise UsageError(
            f"demo: {listen} given; expected a loopback address and a port, such as 127.0.0.1:8080"
        ) from error
    with tempfile.TemporaryDirectory(prefix="imds-bridge-console-") as folder, Signals() as signals:
        fleet = SimulatedFleet(now := time.time())
        past, clock = fleet.advance(now), FastClock()
        console = Console(Config(state_dir=Path(folder), console=settings), clock=clock)
        threads = [start_thread(name, loop) for name, loop in console.loops().items()]
        try:
            _send(console.address, past)
            _play(fleet, console, clock, signals, minutes)
        finally:
            console.end()
            for thread in threads:
                thread.join(_STOP_SECONDS)
            console.close()
    return 0


def _play(
    fleet: SimulatedFleet, console: Console, clock: FastClock, signals: Signals, minutes: float
) -> None:
    show(
        f"The console is on {console.address}",
        "60 simulated VMs in three groups; an hour passes in a minute.",
        f"Ctrl-C ends it, or it ends after {minutes:g} minutes.",
    )
    ends_at = time.monotonic() + minutes * 60
    while time.monotonic() < ends_at and signals.wait(STEP_SECONDS) is None:
        _send(console.address, fleet.advance(clock.wall()))


def _send(address: str, bodies: Sequence[bytes]) -> None:
    """Send events as a webhook sink does."""
    with requests.Session() as session:
        session.trust_env = False  # no proxy of the environment stands before this machine
        for start in range(0, len(bodies), _BATCH):
            session.post(
                f"{address}/ingest",
                data=b"[" + b",".join(bodies[start : start + _BATCH]) + b"]",
                headers={"Content-Type": BATCH_CONTENT_TYPE},
                timeout=_SEND_SECONDS,
            ).raise_for_status()
