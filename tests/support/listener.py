"""The listener on doubles: a queue and IMDS in memory, a clock that the test moves, one pass at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from bridge.approvals.listener import PASS_SECONDS, Listener
from bridge.approvals.receipts import COMMAND, EVENTS, KNOWN
from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.config.approvals import ApprovalSettings, PolicySettings
from bridge.config.base import Secret
from bridge.events.builder import Reporter
from bridge.events.filters import Filter
from bridge.events.model import CloudEvent
from bridge.imds.instance import Vm
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from bridge.process.identity import VmIdentity
from bridge.runtime.json import Json
from bridge.runtime.threads import Stop
from bridge.runtime.time import iso_utc
from tests.support.clock import MovedClock
from tests.support.diff import entry
from tests.support.forward import parts_of
from tests.support.imds import ImdsCall, ImdsDouble
from tests.support.machine import Machine
from tests.support.memory_queue import MemoryQueue, MemoryReceiver
from tests.support.only import only

ALLOW_ALL: Mapping[str, Any] = {"allow": [{}]}
PREPARED = "io.imdsbridge.approval.prepared.v1"
RECEIPTS = tuple(f"io.imdsbridge.approval.{outcome}.v1" for outcome in ("accepted", "rejected", "failed"))


class ImdsOfGroup(ImdsDouble):
    """IMDS with a list of events, which an approval leaves Scheduled; `journal` gets a line for each POST."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.incarnation = 1
        self.bad: dict[str, Callable[[float], object]] = {}
        self.on_post: Callable[[list[str]], object] = lambda _: None
        self.on_read: Callable[[], object] = lambda: None
        self.limit_seconds = 0.0  # of the last POST
        self._journal = journal

    def schedule(self, *resources: str, event_id: str = "", **changes: Json) -> str:
        """Add an event for `resources`, web-0 by default; return its EventId."""
        event_id = event_id or str(uuid4()).upper()
        shown = {
            "Resources": [*resources] or ["web-0"],
            "NotBefore": "Mon, 19 Jan 2037 22:26:58 GMT",
            **changes,
        }
        event = entry(event_id, **{"DurationInSeconds": 9, **shown})
        self.show(*self.events, event)
        return event_id

    def show(self, *events: dict[str, Any]) -> None:
        """Serve a document with these events."""
        self.events, self.incarnation = list(events), self.incarnation + 1
        self.serve({"DocumentIncarnation": self.incarnation, "Events": self.events})

    def change(self, event_id: str, **changes: Json) -> None:
        """Change properties of an event."""
        self.show(*[{**one, **changes} if one["EventId"] == event_id else one for one in self.events])

    def remove(self, event_id: str) -> None:
        """Remove an event from the document."""
        self.show(*[one for one in self.events if one["EventId"] != event_id])

    def document(self, **given: Any) -> bytes:
        """Return the document; `on_read` is called with each that is returned."""
        body = super().document(**given)
        self.on_read()
        return body

    def approve(self, event_ids: Sequence[str], *, incarnation: Json, limit_seconds: float = 10.0) -> None:
        """Record the POST; `on_post`, and what `bad` has for one of its events, may take time and raise an error."""
        self._journal.append(f"POST {' '.join(event_ids)}")
        self.limit_seconds = limit_seconds
        for event_id in event_ids:
            if event_id in self.bad:
                self.calls.append(
                    ImdsCall(method="approve", event_ids=tuple(event_ids), incarnation=incarnation)
                )
                self.bad[event_id](limit_seconds)
        self.on_post([*event_ids])
        super().approve(event_ids, incarnation=incarnation)

    @property
    def posts(self) -> list[tuple[str, ...]]:
        """The EventIds of every POST, also of those that failed."""
        return [call.event_ids for call in self.calls if call.method == "approve"]

    def asked(self, method: str = "document") -> int:
        """Return how often a method was called."""
        return sum(call.method == method for call in self.calls)


class _JournalReceiver(MemoryReceiver):
    def __init__(self, queue: MemoryQueue, journal: list[str], clock: MovedClock) -> None:
        super().__init__(queue, stop=Stop(), monotonic=clock.monotonic)
        self._journal = journal

    def settle(self, message: ReceivedMessage, settlement: Settlement) -> None:
        self._journal.append(f"settle {message.message_id}")
        super().settle(message, settlement)


class _JournalOutbox(KeptOutbox):
    journal: list[str]
    on_commit: Callable[[], object]

    def commit(self, events: Any, *, records: Any = None, published: Any = ()) -> bool:
        self.on_commit()
        durable = super().commit(events, records=records, published=published)
        self.on_commit()
        receipts = [
            event.subject for event in events if isinstance(event, CloudEvent) and event.type in RECEIPTS
        ]
        if receipts:
            self.journal.append(f"commit receipt {' '.join(receipts)}")
        for (kind, name), value in (records or {}).items():
            intended = value.get("intended") if kind == COMMAND else ()
            if (kind, name) == (EVENTS, KNOWN):  # for auto rules
                intended = [key for key, one in value["events"].items() if one["stay"]["is_intended"]]
            if intended:
                self.journal.append(f"commit intent {' '.join(intended)}")
        return durable


class ListenerRig:
    """The real listener and outbox on the doubles. `restart` keeps the state, the queue, IMDS and the programs."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: Mapping[str, Any] = ALLOW_ALL,
        dry_run: bool = False,
        **approvals: Any,
    ) -> None:
        self.machine = Machine()
        self.journal: list[str] = []
        self.clock = MovedClock()
        self.queue = MemoryQueue(now=self.clock.now)
        self.imds = ImdsOfGroup(self.journal)
        self.settings = ApprovalSettings(
            **{
                "connection_string": Secret("Endpoint=sb://memory"),
                "queue": "approvals",
                "policy": PolicySettings(**policy),
                **approvals,
            }
        )
        self.dry_run = dry_run
        self.approved_after: list[float] = []
        self.programs: Counter[str] = Counter()  # how they ended, and events that started unprepared
        self.boot_id = "boot-1"
        self.on_commit: Callable[[], object] = lambda: None  # called before and after each commit
        self.folder = folder
        self._events: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        """Start a process on what is there."""
        self.outbox = _JournalOutbox(
            StateFolder(self.folder),
            clock=self.clock,
            sinks={"audit": (Filter(types=("io.imdsbridge.*",)), True)},
            max_bytes=2**30,
            retain_seconds=3600.0,
        )
        self.outbox.journal, self.outbox.on_commit = self.journal, self._committing
        identity = VmIdentity(
            "listen",
            imds=self.imds,
            outbox=self.outbox,
            clock=self.clock,
            boot_id=self.boot_id,
            make_reporter=partial(Reporter, session=self.settings.session),
        )
        identity.settle(lambda _: True)
        self.receiver = _JournalReceiver(self.queue, self.journal, self.clock)
        self.stop = Stop()
        parts = parts_of(
            imds=self.imds,
            outbox=self.outbox,
            clock=self.clock,
            show_status=lambda: None,
            stop=self.stop,
            identity=identity,
            meter=SimpleNamespace(
                approved=self.approved_after.append,
                prepared=lambda result, _: self.programs.update([result]),
                recovered=lambda result: self.programs.update([f"recover {result}"]),
                unprepared=lambda: self.programs.update(["unprepared"]),
            ),
        )
        self.listener = Listener(
            parts, self.settings, self.receiver, dry_run=self.dry_run, make_run=self.machine.make
        )

    def _committing(self) -> None:
        self.on_commit()

    def restart(
        self, *, vm: Vm | None = None, dry_run: bool = False, wait: float | None = None, **settings: Any
    ) -> None:
        """End the process without a word, start it again with changed `settings`, perhaps on another VM, and wait."""
        self.events()
        self.receiver.disconnect()
        self.outbox.close()
        self.settings = self.settings.model_copy(update=settings)
        self.imds.vm, self.boot_id = vm or self.imds.vm, vm.vm_id if vm else self.boot_id
        self.dry_run = dry_run
        self.start()
        if wait is not None:
            self.run(wait)

    def finish(self) -> None:
        """Stop as the process does when it gets a signal."""
        self.stop.set()
        self.listener.run()
        self.receiver.disconnect()

    def run(self, seconds: float = 0.0) -> None:
        """Make a pass now, and one every quarter of a second, or second where it rests, for so many seconds."""
        self.listener.run_once(0.0)
        while seconds > 0:
            step = min(seconds, max(PASS_SECONDS, self.listener.wait_seconds))
            seconds -= step
            self.clock.advance(step)
            self.listener.run_once(0.0)

    def send(
        self,
        *event_ids: str,
        id: str = "c",  # noqa: A002 - the attribute is called so
        wait: float | None = None,
        **data: Any,
    ) -> None:
        """Send a command as a CloudEvent, and perhaps wait; `data` adds Vm, Reason, ExpiresAt and so on."""
        self.queue.send(command_body(*event_ids, id=id, **data), message_id=id)
        if wait is not None:
            self.run(wait)

    def decide(self, *event_ids: str, **command: Any) -> dict[str, Any]:
        """Send a command a second later, make a pass, and return the data of the only new receipt."""
        self.clock.advance(1.0)
        known = len(self.receipts())
        self.send(*event_ids, **command, wait=0.0)
        return dict(only(self.receipts()[known:])["data"])

    def end_programs(self, *, wait: float = 2.0, **result: Any) -> None:
        """Let every program that runs end, with 0 by default, and wait."""
        self.machine.finish(**(result or {"code": 0}))
        self.run(wait)

    def announce(self, *resources: str, wait: float = 0.0, **event: Any) -> str:
        """Announce an event, wait, and return its EventId."""
        event_id = self.imds.schedule(*resources, **event)
        self.run(wait)
        return event_id

    def show(self, *events: dict[str, Any], wait: float) -> None:
        """Serve a document with these events, and wait."""
        self.imds.show(*events)
        self.run(wait)

    def change(self, event_id: str, *, wait: float, **changes: Json) -> None:
        """Change properties of an event, and wait."""
        self.imds.change(event_id, **changes)
        self.run(wait)

    def remove(self, event_id: str, *, wait: float) -> None:
        """Remove an event from the document, and wait."""
        self.imds.remove(event_id)
        self.run(wait)

    def prepare(self, *resources: str, **event: Any) -> str:
        """Announce an event, let its program succeed, and return its EventId."""
        event_id = self.announce(*resources, **event)
        self.end_programs()
        return event_id

    def in_seconds(self, seconds: float) -> str:
        """Write the instant in so many seconds."""
        return iso_utc(self.clock.now() + timedelta(seconds=seconds))

    def notice(self, seconds: float) -> str:
        """Write the instant in so many seconds as IMDS does."""
        return format_datetime(self.clock.now() + timedelta(seconds=seconds), usegmt=True)

    def records(self) -> list[tuple[str, Any]]:
        """Return the key and the value of each command's record."""
        rows = self.outbox.storage.database.rows("record").fetchall()
        return [(key, json.loads(value)) for kind, key, value, *_ in rows if kind == COMMAND]

    def events(self) -> list[dict[str, Any]]:
        """Return every event that was committed so far, repeated ones too."""
        while page := self.outbox.pending("audit", 1000):
            self.outbox.acknowledge("audit", page)
            self._events += [event.envelope for event in page]
        return self._events

    def receipts(self, command_id: str | None = None) -> list[dict[str, Any]]:
        """Return the receipts so far in their order, all or those of a command."""
        return [
            event
            for event in self.events()
            if event["type"] in RECEIPTS and (command_id is None or event.get("causationid") == command_id)
        ]

    def prepared(self) -> list[dict[str, Any]]:
        """Return the events so far that report that the VM is prepared."""
        return [event for event in self.events() if event["type"] == PREPARED]

    def why(self, event_id: str) -> str:
        """Return what the status says of what the auto rules make of an event."""
        return next(str(one.Why) for one in self.listener.status().auto or () if one.EventId == event_id)

    def answers(self, command_id: str | None = None) -> list[tuple[str, str]]:
        """Return outcome and reason of each receipt."""
        return [(one["data"]["Outcome"], one["data"]["Reason"]) for one in self.receipts(command_id)]

    def reasons(self, command_id: str | None = None) -> list[str]:
        """Return the reasons of the receipts."""
        return [receipt["data"]["Reason"] for receipt in self.receipts(command_id)]

    @property
    def dead_letter_reasons(self) -> list[str]:
        """The reasons of the dead-lettered messages."""
        return [one.settlement.dead_letter_reason for one in self.queue.dead_letters if one.settlement]

    @property
    def is_abandoned(self) -> bool:
        """Whether the only message that is left is free for other receivers."""
        return only(self.queue.messages).locked_by is None

    def close(self) -> None:
        """Close the outbox."""
        self.outbox.close()


def command_body(*event_ids: str, id: str = "c", **data: Any) -> bytes:  # noqa: A002 - the attribute is called so
    """Write a command as a CloudEvent."""
    return json.dumps(
        {
            "specversion": "1.0",
            "id": id,
            "source": "urn:test",
            "type": "io.imdsbridge.command.approve.v1",
            "data": {"EventIds": list(event_ids), **data},
        }
    ).encode()


MakeListener = Callable[..., ListenerRig]
