"""The audit of `infra/consumers/audit`, and short histories of a fleet that it can read."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID
from warnings import catch_warnings, simplefilter

from bridge.process.bridge_events import BridgeEvents
from infra.consumers.audit.audit import Audit, main, seconds
from tests.support.clock import MovedClock
from tests.support.forward import Station
from tests.support.imds import ScriptedImds
from tests.support.outbox import failing_disk

Json = dict[str, Any]

START = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
HOUR = 3600.0
GROUP = "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/{}"
VM = GROUP + "/providers/Microsoft.Compute/virtualMachines/{}"


@dataclass
class Process:
    """A process on a VM that publishes its own events; `events` has them all, with those of the document."""

    name: str = "web-0"
    _: KW_ONLY
    role: str = "forward"
    group: str = "shop"
    source: str = ""
    vm_id: str = ""
    at: float = START
    events: list[Json] = field(default_factory=list)
    epoch: str = ""
    number: int = 0
    _rng: Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = Random(f"{self.group}/{self.name}/{self.role}{self.vm_id}")  # noqa: S311 - repeatable

    def start(self, *, name: str = "", source: str = "", forget: bool = False) -> Process:
        """Begin a run; `forget` if the state does not say which run was before it."""
        self.name, self.source = name or self.name, source or VM.format(self.group, self.name)
        before = None if forget or not self.epoch else (self.epoch, self.number)
        self.epoch, self.number = self._id().hex, 0
        return self._heartbeat(
            "Started", PreviousEpoch=before and before[0], PreviousLastReporterSeq=before and before[1]
        )

    def hours(self, count: int = 1) -> Process:
        """Publish a heartbeat every hour."""
        for _ in range(count):
            self.at += HOUR
            self._heartbeat("Hourly")
        return self

    def stop(self) -> Process:
        """End orderly."""
        return self._heartbeat("Stopping")

    def change(self, ids: Sequence[str] = ()) -> list[str]:
        """Publish a change of a scheduled event and its document; return the ids, which another VM may list, too."""
        ids = [*ids] or [str(self._id())]
        source = GROUP.format(self.group)
        self.events += [self._event("scheduledevent.scheduled", {}, id=one, source=source) for one in ids]
        self._own("document.changed", CloudEventIds=[*ids])
        return ids

    def lose(self, count: int | None = 3, *, sink: str | None = None) -> str:
        """Publish a loss; return its id."""
        about = {"Reason": "SizeLimit", "Count": count, "Sink": sink, "OldestTime": None, "NewestTime": None}
        return str(self._own("bridge.loss", **about)["id"])

    def _heartbeat(self, reason: str, **data: Any) -> Process:
        self._own(
            "bridge.heartbeat", Reason=reason, LastReporterSeq=self.number + 1, Backlog={"audit": 0}, **data
        )
        return self

    def _own(self, name: str, **data: Any) -> Json:
        self.number += 1
        self.at += 1.0
        data |= {"Vm": {"Name": self.name, "VmId": self.vm_id}}
        reporter = {"reporter": f"{self.name}/{self.role}", "reporterepoch": self.epoch}
        reporter["reporterseq"] = f"{self.number:012d}"
        self.events.append(self._event(name, data, id=str(self._id()), source=self.source, **reporter))
        return self.events[-1]

    def _event(self, name: str, data: Json, **attributes: str) -> Json:
        return {"type": f"io.imdsbridge.{name}.v1", "time": iso(self.at), **attributes, "data": data}

    def _id(self) -> UUID:
        return UUID(int=self._rng.getrandbits(128))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the audit's script says of some events."""

    code: int
    report: Json

    @property
    def kinds(self) -> list[str]:
        return [one["kind"] for one in self.report["missing"]]

    def of(self, kind: str) -> list[Json]:
        return [one for one in self.report["missing"] if one["kind"] == kind]


@dataclass(frozen=True, kw_only=True)
class Done:
    """How the script ended, and what it printed."""

    code: int
    out: str
    err: str


def run_audit(*arguments: str | Path) -> Done:
    """Run the script in this process, which takes a tenth of the time."""
    out, err, logger = StringIO(), StringIO(), logging.getLogger("azure")
    level = logger.level
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        stack.enter_context(patch.object(sys, "argv", ["audit.py", *map(str, arguments)]))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        stack.enter_context(catch_warnings())
        simplefilter("ignore", ResourceWarning)  # its end closes the state
        try:
            code = main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code=code, out=out.getvalue(), err=err.getvalue())


def audit(folder: Path, events: Iterable[Json], *arguments: str | Path) -> Verdict:
    """Write events to a file, and audit it."""
    done = run_audit("--file", write(folder / "events.jsonl", events), "--json", *arguments)
    assert done.err == "", done.err
    return Verdict(code=done.code, report=json.loads(done.out))


def missing(events: Iterable[Json], checked_at: str | None = None) -> list[Json]:
    """Return what the audit of some events finds missing."""
    with closing(Audit()) as audit:
        for number, event in enumerate(events):
            audit.add(json.dumps(event).encode(), f"event {number}")
        found: list[Json] = audit.missing(seconds(checked_at) if checked_at else None, [], [])
        return found


def recording(folder: Path) -> list[Json]:
    """Return the events of four real runs of a forwarder: stopped, killed, killed as the disk failed, stopped."""
    clock = MovedClock()
    imds = ScriptedImds(clock)
    station = Station(folder, imds, clock)
    with failing_disk() as disk:
        for number in range(4):
            imds.schedule(f"event-{number}")
            BridgeEvents(station.identity).emit_started()
            for change in (imds.start, imds.end):
                station.poll_for(3)
                change(f"event-{number}")
            if number == 2:
                disk.fail()
            station.poll_for(3)
            clock.advance(3600)
            BridgeEvents(station.identity).emit_heartbeat()
            station.poll()
            if number == 2:
                disk.recover()
                station.outbox.recover()
            if number in (0, 3):
                BridgeEvents(station.identity).emit_stopping()
            station.restart(after=1)
    lines = station.all_events()
    station.close()
    return lines


def fleet() -> list[Json]:
    """Return the events of a small fleet by time: restarts, a fork, late instance data, losses, a clock ahead."""
    web, other = Process().start().hours(2), Process(group="office").start().hours(1)
    listen, late = Process(role="listen").start().hours(3), Process("vm", group="late")
    shared = [Process(group="fleet", vm_id=one).start(source="urn:fleet") for one in ("", "A1", "a2")]
    shared[1].hours(2)
    ids = web.change()
    other.change(ids)
    web.start().hours(1)
    web.lose()
    web.lose(0)
    web.stop().start().change()
    web.hours(2)
    before = other.epoch, other.number
    other.start().hours(1)
    other.epoch, other.number = before
    other.start().hours(1).stop()
    late.start(source="urn:imds-bridge:vm:vm").hours(1).start(name="db-0").hours(1).start(forget=True).hours(
        3
    )
    ahead = Process("db-1", at=START + 72 * HOUR).start().hours(2).start().hours(1)
    processes = (web, other, listen, late, ahead, *shared)
    return sorted((event for one in processes for event in one.events), key=lambda event: str(event["time"]))


def write(file: Path, events: Iterable[Json]) -> Path:
    """Write events as an archive, one per line."""
    file.write_text("".join(json.dumps(one) + "\n" for one in events), encoding="utf-8")
    return file


def iso(at: float) -> str:
    """Return seconds since 1970 as an event's time."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def tampered(rng: Random, events: Sequence[Json]) -> list[Json]:
    """Return events as a faulty bus might deliver them: some are lost, doubled, late, or a whole run is missing."""
    rest = [*events]
    changes: list[Callable[[], object]] = [
        lambda: rest.pop(rng.randrange(len(rest))),
        lambda: rest.insert(rng.randrange(len(rest)), rng.choice(rest)),
        lambda: rest.append(rest.pop(rng.randrange(len(rest)))),
        lambda: _without_run(rng, rest),
        lambda: rng.shuffle(rest),
    ]
    for _ in range(rng.randrange(4)):
        rng.choice(changes)()
    return rest


def _without_run(rng: Random, events: list[Json]) -> None:
    epoch = rng.choice(events).get("reporterepoch")
    events[:] = [one for one in events if epoch is None or one.get("reporterepoch") != epoch]
