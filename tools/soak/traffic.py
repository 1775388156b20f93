"""The changes of a group of VMs, and commands that approve some of their events."""

from __future__ import annotations

import queue
import random
import threading
from contextlib import suppress
from uuid import uuid4

from azure.servicebus.exceptions import ServiceBusError

from bridge.lab.httpd import LabError
from tests.support.bus import Sender, command, message
from tests.support.imds_lab import ImdsLab
from tests.support.samples import EVENT_TYPES
from tests.support.servicebus import ServiceBusLab
from tools.soak.checks import APPROVABLE_TYPES
from tools.soak.truth import Command

LIVE_EVENTS = 8  # at a time
LARGE_BYTES, LARGE_SHARE = 180_000, 0.1  # a message of Service Bus has at most 256 KiB
MOST_SECONDS = 1.4  # between two changes
RETRY_SECONDS = 1.0


class Changes:
    """Lets the events of a group come, change and go until `stop`; some start on their own, at NotBefore."""

    def __init__(
        self, imds: ImdsLab, commands: Commands, group: tuple[str, ...], listeners: tuple[str, ...], seed: int
    ) -> None:
        self._imds = imds
        self._commands = commands
        self._group = group
        self._listeners = listeners
        self._rng = random.Random(f"{seed} changes")  # noqa: S311 - it shall be repeatable
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="changes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Change nothing more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # Now and then two changes come at once, and nobody sees the first one.
        while not self._stop.wait(max(0.0, self._rng.uniform(-0.2, MOST_SECONDS))):
            events = self._imds.events
            with suppress(LabError):  # it has started or gone meanwhile
                if len(events) < self._rng.randint(1, LIVE_EVENTS):
                    self._schedule()
                else:
                    event = self._rng.choice(events)
                    is_large = any(len(one["Description"]) > LARGE_BYTES // 2 for one in events)
                    is_started = event["EventStatus"] == "Started"
                    self._change(event["EventId"], is_started=is_started, is_large=is_large)

    def _schedule(self) -> None:
        named = self._rng.sample(self._group, self._rng.choice([1, 1, 1, 2, 20]))
        if self._rng.random() < 0.5:
            named[0] = self._rng.choice(self._listeners)
        event_id = self._imds.schedule(
            event_type=self._rng.choice([*EVENT_TYPES, *APPROVABLE_TYPES]),
            resources=[*dict.fromkeys(named)],
            notice_seconds=self._rng.choice([10, 900, 86_400]),
            event_source=self._rng.choice(["Platform", "Platform", "User"]),
            duration_seconds=self._rng.choice([-1, 5, 10]),
            description="x" * self._rng.randint(20, 1_000),
        )
        for vm in self._listeners:
            if vm in named or self._rng.random() < 0.1:  # at times for an event of other VMs
                self._commands.send(vm, event_id, self._rng)

    def _change(self, event_id: str, *, is_started: bool, is_large: bool) -> None:
        change = self._rng.choice(["update", "update", "end", "end" if is_started else "start"])
        if change == "update":
            # A large one takes a process that may not grow beyond its limit.
            most = LARGE_BYTES if self._rng.random() < LARGE_SHARE and not is_large else 1_000
            text = "x" * self._rng.randint(most // 2, most)
            self._imds.update(event_id, Description=f"text {self._rng.random()} {text}")
        elif change == "start":
            self._imds.start(event_id)
        elif is_started:
            self._imds.complete(event_id)
        else:
            self._imds.cancel(event_id)


class Commands:
    """Sends commands with the real SDK, again until the bus accepts them. `sent` lists all."""

    def __init__(self, bus: ServiceBusLab, entity: str) -> None:
        self.sent: list[Command] = []
        self._bus = bus
        self._entity = entity
        self._waiting: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._is_wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commands", daemon=True)
        self._thread.start()

    def send(self, vm: str, event_id: str, rng: random.Random) -> None:
        """Send a VM up to two commands for an event, one of them twice at times, or what cannot be read."""
        for _ in range(rng.choice([0, 1, 1, 2])):
            sent = Command(id=str(uuid4()), vm=vm, event_id="" if rng.random() < 0.1 else event_id)
            self.sent.append(sent)
            for _ in range(rng.choice([1, 1, 2])):
                self._waiting.put(sent)

    def finish(self) -> None:
        """Return when all are sent."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (sent := self._waiting.get()) is not None:
            while not self._try(sent):
                threading.Event().wait(RETRY_SECONDS)

    def _try(self, sent: Command) -> bool:
        # With a client of its own, so that no fault of an earlier one remains.
        session = f"lab.{sent.vm}"
        with suppress(ServiceBusError, OSError), Sender(self._bus, self._entity) as sender:
            if sent.event_id:
                sender.send_one(command(sent.event_id, id=sent.id, session=session))
            else:
                sender.send_one(message(b"nonsense", message_id=sent.id, session_id=session))
            return True
        return False
