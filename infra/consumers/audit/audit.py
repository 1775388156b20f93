#!/usr/bin/env python3
"""Verify that every event of imds-bridge has arrived, and list those that have not."""

import argparse
import gzip
import json
import logging
import os
import re
import sqlite3
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from fnmatch import fnmatch
from hashlib import sha256
from itertools import groupby, pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote

EXAMPLE = """examples:
  audit.py --namespace contoso.servicebus.windows.net --topic scheduled-events --subscription audit
  audit.py ... --consume archive.jsonl --state audit.db   (move the messages to a file, then audit what is new in it)
  audit.py --file archive.jsonl --json                    (one CloudEvent per line)
  audit.py ... @accepted.txt                              (further arguments, one per line: --accept=ID)
In place of --namespace: SERVICEBUS_CONNECTION_STRING in the environment.
Exit codes: 0 complete, 1 the bus or a file cannot be read, 2 an option is wrong, 3 INCOMPLETE."""
SILENT_SECONDS = 4200  # heartbeats are hourly
MESSAGES, RECEIVERS = 250, 16  # of one call; at the same time
BATCH_IDS = 100_000
BLOCK_BYTES = 2**20
MAX_NUMBER = 10**18
VM_ID = re.compile(
    r"/subscriptions/[^/\s\"',]+/resourceGroups/[^/\s\"',]+/providers/Microsoft\.Compute"
    r"/(?:virtualMachineScaleSets/[^/\s\"',]+/)?virtualMachines/[^/\s\"',]+",
    re.IGNORECASE,
)
SCHEDULED, HEARTBEAT, LOSS, RECOVERED = (
    f"io.imdsbridge.{name}"
    for name in ("scheduledevent.", "bridge.heartbeat.v1", "bridge.loss.v1", "imds.recovered.v1")
)
Json = dict[str, Any]


@dataclass(kw_only=True)
class Run:
    """What has arrived of one run of a process, its epoch; `ranges` are [first, last], in order and apart."""

    epoch: str
    reporter: str
    source: str  # the VM: names are not unique
    first_at: float
    last_at: float
    heartbeat_at: float = 0.0  # of the heartbeat with the highest number
    ranges: list[list[int]] = field(default_factory=list)
    claimed: int = 0  # the highest number that a heartbeat of its own, or the next run, has named
    stopped: int = 0  # the number of the Stopping heartbeat
    started: int = 0  # whether its first heartbeat has arrived, which names the run before
    previous: str | None = None
    followers: int = 0  # how many runs name this one as the one before
    vm_id: str = ""  # in lower case, blank until it is known: VMs may share a configured source
    heartbeat: int = 0  # the highest number of a heartbeat

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        place = bisect_right(self.ranges, [number, MAX_NUMBER])
        before = self.ranges[place - 1] if place else [-1, -1]
        if number <= before[1]:
            return False
        if number == before[1] + 1 and place:
            before[1] = number
        else:
            self.ranges.insert(place, before := [number, number])
            place += 1
        if place < len(self.ranges) and self.ranges[place][0] == number + 1:
            before[1] = self.ranges.pop(place)[1]
        return True

    def note_time(self, number: int, at: float) -> None:
        """Note when an event was published: a clock may have been wrong for a while, so the number is the order."""
        self.first_at = min(self.first_at, at)
        if number == self.last:
            self.last_at = at

    @property
    def last(self) -> int:
        """The last number that has arrived."""
        return self.ranges[-1][1] if self.ranges else 0

    def missing(self, *, is_partial: bool = False) -> list[tuple[int, int]]:
        """Return the gaps from number 1, or from the first that arrived, to the last one known."""
        first = (self.ranges[0][0] - 1 if self.ranges else self.claimed) if is_partial else 0
        bounds = [[0, first], *self.ranges, [max(self.claimed, self.last) + 1, 0]]
        return [(low[1] + 1, high[0] - 1) for low, high in pairwise(bounds) if high[0] > low[1] + 1]

    def count(self) -> int:
        """Return how many numbers have arrived."""
        return sum(last - first + 1 for first, last in self.ranges)

    def is_silent(self, now: float, gone: list[str]) -> bool:
        """Return whether heartbeats are missing; a relay sends none."""
        is_over = self.stopped == self.last or any(self.matches(one) for one in gone)
        return not is_over and not self.is_relay and now - self.alive_at > SILENT_SECONDS

    @property
    def alive_at(self) -> float:
        """The time of its last heartbeat, or if none has arrived, of its first event."""
        return self.heartbeat_at or self.first_at

    def matches(self, pattern: str) -> bool:
        """Return whether a pattern is that of its reporter, or of its VM's source or id."""
        names = (self.reporter, self.source, self.vm_id)
        return any(fnmatch(name.lower(), pattern.lower()) for name in names)

    @property
    def vm(self) -> tuple[str, str]:
        """What names its VM: VMs may share a source."""
        return self.source.lower(), self.vm_id or self.reporter.rpartition("/")[0].lower()

    @property
    def role(self) -> str:
        """What the process does: forward, listen or relay."""
        return self.reporter.rpartition("/")[2]

    @property
    def is_relay(self) -> bool:
        """Whether it is a relay's, whose runs are not chained."""
        return self.role == "relay"

    def remarks(self, *, is_over: bool, is_partial: bool) -> Iterator[str]:
        """Yield notes on it; `is_over` if a later run has taken its place."""
        if self.started and self.previous is None:
            yield f"started about {iso(self.first_at)} without a run before it"
        if is_partial:
            yield f"numbers before {self.ranges[0][0]} are not verified (--since)"
        if self.followers > 1:
            yield f"{self.followers} runs follow it: its state was restored from a copy, or lost what was in memory"
        if is_over and not self.is_relay:
            if self.stopped != self.last:
                yield f"was killed after number {self.last}"
            if not self.followers:
                yield "no run follows it: what came after its last heartbeat is not verified"


class Heartbeat(NamedTuple):
    """What a heartbeat says: the last number of its run; if it is Started, the run before and that run's."""

    reason: str
    claimed: int
    previous: str | None
    previous_last: int


COLUMNS = [one.name for one in fields(Run)]
TABLES = f"""
CREATE TABLE runs ({", ".join(COLUMNS)}, has_gaps, PRIMARY KEY (epoch)) WITHOUT ROWID;
CREATE TABLE arrived (id PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE listed (id PRIMARY KEY, reporter, epoch, document) WITHOUT ROWID;
CREATE TABLE found (id PRIMARY KEY, item);
CREATE TABLE inputs (name PRIMARY KEY, position, tail);
CREATE TABLE totals (since, events, duplicates);
PRAGMA user_version = 3;
"""
_UPGRADE = "ALTER TABLE runs ADD COLUMN heartbeat DEFAULT 0; PRAGMA user_version = 3"
# In a state of version 1, `tail` is the last bytes of what was read; now, as text, the checksum of all of it.
COMMANDS = {0: TABLES, 1: f"ALTER TABLE runs ADD COLUMN vm_id DEFAULT ''; {_UPGRADE}", 2: _UPGRADE}


class OtherSinceError(ValueError):
    """The state has another `--since` than was given."""


class Audit:
    """What has arrived: runs with their numbers, and the ids of events that arrived or were only listed so far.

    All of it is in a SQLite file, so that the next audit reads only what is new; memory holds what has news.

    Args:
        state: the file, which is written by `save`; None for a temporary one.
        since: ignore reporters' events before this time; None for that of the state.

    Raises:
        sqlite3.Error: the file is another program's, or in use.
        OtherSinceError: the state has another `since`.
    """

    def __init__(self, state: Path | None = None, since: float | None = None) -> None:
        self.database = sqlite3.connect(state or "", isolation_level=None)
        try:
            self.since, self.events, self.duplicates = self.begin(since)
        except BaseException:
            self.close()
            raise
        self.runs: dict[str, Run] = {}  # those that have news
        self.arrived: set[str] = set()  # not in the database yet, as the next one
        self.listed: dict[str, tuple[str, str, int]] = {}  # with the document that lists it
        self.notes: list[str] = []
        self.newest: set[str] = set()  # the runs that must still send heartbeats
        self.partial: set[str] = set()  # those that began before `since`
        self.judged_at: float | None = None  # the time at which silence was judged

    def begin(self, since: float | None) -> tuple[float, int, int]:
        """Lock the state, which is made if it is new, and return its `since`, events and duplicates."""
        self.database.execute("BEGIN EXCLUSIVE")
        version = self.database.execute("PRAGMA user_version").fetchone()[0]
        for command in COMMANDS.get(version, "").split(";"):
            self.database.execute(command)
        if not version:
            self.database.execute("INSERT INTO totals VALUES (?, 0, 0)", (since or 0.0,))
        begun, events, duplicates = self.database.execute(
            "SELECT since, events, duplicates FROM totals"
        ).fetchone()
        if since is not None and since != begun:
            raise OtherSinceError(
                f"the state was begun with --since {iso(begun)}: give the same one, or none"
            )
        return begun, events, duplicates

    def close(self) -> None:
        """Close the file; without `save`, it is as it was."""
        self.database.close()

    def add(self, body: bytes, where: str) -> None:
        """Add an event; `where` names it in errors."""
        try:
            event = json.loads(body)
            kind = value(event, "type", str)
            if kind.startswith(SCHEDULED):
                self.add_scheduled(value(event, "id", str))
            elif "reporter" in event:
                self.add_own(kind, event)
        except (ValueError, OverflowError, RecursionError) as error:
            name = sha256(body.strip()).hexdigest()[:16]
            self.find({"kind": "unreadable", "id": name, "what": f"{where}: {error}"})

    def add_scheduled(self, name: str) -> None:
        """Add any VM's copy of an event, also from before `since`: a later document may list it."""
        self.duplicates += name in self.arrived
        self.arrived.add(name)
        if len(self.arrived) >= BATCH_IDS:
            self.store_ids()

    def add_own(self, kind: str, event: Json) -> None:
        """Add one of a reporter's own events; if any part of it is malformed, none."""
        reporter, epoch, source, name = (
            value(event, one, str) for one in ("reporter", "reporterepoch", "source", "id")
        )
        number, at, data = number_of(event), seconds(value(event, "time", str)), value(event, "data", dict)
        heartbeat = heartbeat_of(data) if kind == HEARTBEAT else None
        loss = loss_of(data) if kind == LOSS else None
        listed = value(data, "CloudEventIds", list) if data.get("CloudEventIds") is not None else []
        if not all(isinstance(one, str) and one.isprintable() for one in listed):
            raise ValueError(f"CloudEventIds is {short(listed)}, expected texts")
        if at < self.since:
            return
        run = self.run(epoch, reporter, source, at)
        if not run.ranges:  # until now, only the next run has named it
            run.reporter, run.source = reporter, source
        if not run.add(number):
            self.duplicates += 1
            return
        self.events += 1
        run.vm_id = max(run.vm_id, vm_id_of(data))
        run.note_time(number, at)
        if heartbeat:
            self.add_heartbeat(run, at, number, heartbeat)
        for one in listed:
            self.listed.setdefault(one, (reporter, epoch, number))
        if len(self.listed) >= BATCH_IDS:
            self.store_ids()
        if loss:
            self.find({"kind": "loss", "id": name, "reporter": reporter, "epoch": epoch, **loss})
        if kind == RECOVERED:
            blind = f"from {data.get('BlindFrom')} to {data.get('BlindTo')}"
            self.notes.append(f"{reporter} could not reach IMDS {blind}")

    def add_heartbeat(self, run: Run, at: float, number: int, heartbeat: Heartbeat) -> None:
        """Note what a heartbeat says of its own run, and of the one before."""
        if number > run.heartbeat:
            run.heartbeat, run.heartbeat_at = number, at
        run.claimed = max(run.claimed, heartbeat.claimed)
        if heartbeat.reason == "Stopping":
            run.stopped = max(run.stopped, number)
        if heartbeat.reason == "Started":
            run.started, run.previous = 1, heartbeat.previous
        if heartbeat.previous is not None:
            before = self.run(heartbeat.previous, run.reporter, run.source, at)
            before.claimed = max(before.claimed, heartbeat.previous_last)
            before.followers += 1

    def run(self, epoch: str, reporter: str, source: str, at: float) -> Run:
        """Return the run with this epoch, a new one if it is not known."""
        if epoch not in self.runs:
            known = next(self.select("WHERE epoch = ?", epoch), None)
            new = Run(epoch=epoch, reporter=reporter, source=source, first_at=at, last_at=at)
            self.runs[epoch] = known or new
        return self.runs[epoch]

    def find(self, item: Json) -> None:
        """Note what will stay wrong, whatever arrives."""
        self.database.execute("INSERT OR IGNORE INTO found VALUES (?, ?)", (item["id"], json.dumps(item)))

    # What is stored

    def select(self, condition: str, *values: object) -> Iterator[Run]:
        """Yield stored runs."""
        for row in self.database.execute(f"SELECT {', '.join(COLUMNS)} FROM runs {condition}", values):  # noqa: S608
            run = Run(**dict(zip(COLUMNS, row, strict=True)))
            run.ranges = json.loads(row[COLUMNS.index("ranges")])
            yield run

    def store_ids(self) -> None:
        """Store the ids that have arrived; of those that are listed, the ones that have not."""
        before = self.database.total_changes
        self.database.executemany(
            "INSERT OR IGNORE INTO arrived VALUES (?)", ([one] for one in sorted(self.arrived))
        )
        new = self.database.total_changes - before
        self.events, self.duplicates = self.events + new, self.duplicates + len(self.arrived) - new
        rows = ((name, *document) for name, document in self.listed.items())
        self.database.executemany("INSERT OR IGNORE INTO listed VALUES (?, ?, ?, ?)", rows)
        self.database.execute("DELETE FROM listed WHERE id IN (SELECT id FROM arrived)")
        self.arrived, self.listed = set(), {}

    def store(self) -> None:
        """Store everything that has news."""
        self.store_ids()
        names = ", ".join([*COLUMNS, "has_gaps"])
        marks = ", ".join("?" * (len(COLUMNS) + 1))
        rows = (
            [
                *(json.dumps(one) if isinstance(one, list) else one for one in vars(run).values()),
                bool(run.missing()),
            ]
            for run in self.runs.values()
        )
        self.database.executemany(f"INSERT OR REPLACE INTO runs ({names}) VALUES ({marks})", rows)  # noqa: S608
        self.database.execute("UPDATE totals SET events = ?, duplicates = ?", (self.events, self.duplicates))

    def save(self) -> None:
        """Keep for the next audit what `missing` has seen; until then, the file is as it was."""
        self.database.execute("COMMIT")

    def position(self, name: str) -> tuple[int, str | bytes]:
        """Return how far a file or a subscription has been read, and the checksum of what was."""
        row: tuple[int, str | bytes] | None = self.database.execute(
            "SELECT position, tail FROM inputs WHERE name = ?", (name,)
        ).fetchone()
        return row or (0, b"")

    def set_position(self, name: str, position: int, checksum: str = "") -> None:
        """Note how far it has been read."""
        self.database.execute("INSERT OR REPLACE INTO inputs VALUES (?, ?, ?)", (name, position, checksum))

    # What is missing

    def missing(self, now: float | None, gone: list[str], expected: list[str]) -> list[Json]:
        """Return what is missing.

        Args:
            now: the time at which heartbeats are checked; None for the latest that two VMs have reached.
            gone: patterns of reporters, or of their VMs, that may have stopped without a heartbeat.
            expected: reporters or sources, in any letter case, that must have published something.
        """
        self.store()
        self.partial = set(self.begun_before()) if self.since else set()
        found: list[Json] = [json.loads(item) for (item,) in self.database.execute("SELECT item FROM found")]
        for run in self.select("WHERE has_gaps ORDER BY reporter, source, first_at, epoch"):
            found += self.gaps_of(run)
        found += self.silent(now, gone)
        for name, reporter, epoch, number in self.database.execute("SELECT * FROM listed ORDER BY id"):
            found.append(
                {"kind": "event", "id": name, "reporter": reporter, "epoch": epoch, "document": number}
            )
        rows = self.database.execute("SELECT DISTINCT reporter, source FROM runs WHERE ranges <> '[]'")
        known = {fold(name) for row in rows for name in row}
        wanted = {fold(name): name for name in expected}
        return found + [
            {"kind": "reporter", "id": name, "reporter": name}
            for folded, name in wanted.items()
            if folded not in known
        ]

    def gaps_of(self, run: Run) -> Iterator[Json]:
        """Yield the numbers of a run that are missing."""
        who = {"reporter": run.reporter, "epoch": run.epoch}
        for low, high in run.missing(is_partial=run.epoch in self.partial):
            if run.ranges:
                name = f"{run.epoch}:{low}-{high}"
                yield {"kind": "numbers", "id": name, **who, "first": low, "last": high}
            else:
                yield {"kind": "run", "id": run.epoch, **who, "last": high}

    def gaps_as_text(self, run: Run) -> str:
        """Return a run's missing numbers as text."""
        gaps = run.missing(is_partial=run.epoch in self.partial)
        return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in gaps)

    def silent(self, now: float | None, gone: list[str]) -> Iterator[Json]:
        """Find the last run of each process: the latest one that no other follows; yield those that are silent."""
        self.judged_at = self.reached_by_two() if now is None else now
        for run in self.last_runs():
            self.newest.add(run.epoch)
            if self.judged_at is None:
                continue
            if run.last_at > self.judged_at + SILENT_SECONDS:
                until = f"has events until {iso(run.last_at)}, long after silence was judged"
                doubt = "its clock is ahead, or all others are silent"
                self.notes.append(f"{run.reporter} {run.epoch}: {until}: {doubt}")
            if run.is_silent(self.judged_at, gone):
                who = {"reporter": run.reporter, "epoch": run.epoch, "source": run.source}
                yield {"kind": "silent", **who, "since": iso(run.alive_at)}

    def reached_by_two(self) -> float | None:
        """Return the latest time that two VMs have reached: the clock of one may be ahead."""
        reached: dict[tuple[str, str], float] = {}
        for run in self.last_runs():
            if not run.is_relay:
                reached[run.vm] = max(reached.get(run.vm, run.last_at), run.last_at)
        return max(sorted(reached.values())[:-1], default=None)

    def last_runs(self) -> Iterator[Run]:
        """Yield the last run of each process; one without a VM id belongs to a later one's VM of its name."""
        runs = self.select("WHERE followers = 0 ORDER BY source COLLATE NOCASE, last_at, epoch")
        for _, of_source in groupby(runs, key=lambda run: run.source.lower()):
            processes: dict[tuple[str, str], Run] = {}
            for run in of_source:
                unknown = f"{run.reporter.lower()} "  # no id has a blank at its end
                processes.pop((run.role, unknown), None)
                processes[run.role, run.vm_id or unknown] = run
            yield from processes.values()

    def begun_before(self) -> Iterator[str]:
        """Yield the first run of each process if it may have begun before `since`."""
        followers = dict(self.database.execute("SELECT previous, max(vm_id) FROM runs GROUP BY previous"))
        in_order = self.select("ORDER BY source COLLATE NOCASE, first_at, ranges <> '[]', epoch")
        for _, runs in groupby(in_order, key=lambda run: run.source.lower()):
            known: set[str] = set()
            for run in runs:
                name, vm_id = run.reporter.lower(), run.vm_id or followers.get(run.epoch)
                unknown = f"{name} "
                own = f"{vm_id} {run.role}" if vm_id else unknown
                if known.isdisjoint({own, unknown} if vm_id else {name}) and not run.started:
                    yield run.epoch
                known |= {name, own}
                if vm_id:
                    known.discard(unknown)  # the same VM, before its id was known

    def remarks(self) -> list[str]:
        """Return notes on what has news."""
        notes: list[str] = []
        for run in self.news():
            states = {"is_over": run.epoch not in self.newest, "is_partial": run.epoch in self.partial}
            notes += [f"{run.reporter} {run.epoch}: {note}" for note in run.remarks(**states)]
        return notes + self.notes

    def news(self) -> list[Run]:
        """Return the runs of which something has arrived by reporter and VM, the older one first."""
        runs = [run for run in self.runs.values() if run.ranges]
        return sorted(runs, key=lambda run: (run.reporter, run.source, run.first_at))

    def processes(self) -> int:
        """Return how many processes of VMs there are."""
        known = self.database.execute("SELECT DISTINCT reporter, lower(source) FROM runs")
        return len(known.fetchall())


# What an event must have


def value(values: Any, name: str, kind: type) -> Any:
    """Return a property of this type; a text has only printable characters.

    Raises:
        ValueError: it is missing, or of another type.
    """
    found: Any = values.get(name) if isinstance(values, dict) else None
    is_kind = type(found) is kind  # a bool is no count
    if not is_kind or (kind is str and not found.isprintable()):
        raise ValueError(f"{name} is {short(found)}, expected {kind.__name__}")
    return found


def count_of(values: Json, name: str) -> int:
    """Return a property that counts something."""
    found: int = value(values, name, int)
    if not 0 <= found < MAX_NUMBER:
        raise ValueError(f"{name} is {short(found)}, expected 0 to {MAX_NUMBER - 1}")
    return found


def number_of(event: Json) -> int:
    """Return an event's number in its run."""
    text: str = value(event, "reporterseq", str)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < MAX_NUMBER):
        raise ValueError(f"reporterseq is {short(text)}, expected digits from 1 to {MAX_NUMBER - 1}")
    return int(text)


def heartbeat_of(data: Json) -> Heartbeat:
    """Return what a heartbeat says."""
    reason, claimed = value(data, "Reason", str), count_of(data, "LastReporterSeq")
    if reason != "Started" or ("PreviousEpoch" in data and data["PreviousEpoch"] is None):
        return Heartbeat(reason, claimed, None, 0)
    previous, last = value(data, "PreviousEpoch", str), count_of(data, "PreviousLastReporterSeq")
    return Heartbeat(reason, claimed, previous, last)


def loss_of(data: Json) -> Json | None:
    """Return what a loss event reports; None if nothing was lost."""
    if data.get("Count") is not None and not count_of(data, "Count"):
        return None
    lost = "an unknown number of events" if data.get("Count") is None else f"{data['Count']} events"
    return {
        "reason": value(data, "Reason", str),
        "count": data.get("Count"),
        "lost": f"{lost} lost",
        "sink": None if data.get("Sink") is None else value(data, "Sink", str),
        "oldest": data.get("OldestTime") or "unknown",
        "newest": data.get("NewestTime") or "unknown",
    }


def vm_id_of(data: Json) -> str:
    """Return the id of the VM that reports, in lower case; blank where it is not known."""
    vm = data.get("Vm")
    found = vm.get("VmId") if isinstance(vm, dict) else None
    return found.lower() if isinstance(found, str) and found.isprintable() else ""


def fold(name: str) -> str:
    """Return a reporter or a source for comparison: sources are URIs of ARM ids, which have any letter case."""
    return unquote(name).lower()


def short(found: Any) -> str:
    """Return a value as text for an error."""
    return repr(found)[:100]


def seconds(instant: str) -> float:
    """Return an instant as seconds since 1970; UTC if it has no offset."""
    at = datetime.fromisoformat(instant)
    return (at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def iso(at: float) -> str:
    """Return seconds since 1970 as text."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# The report

SENTENCES = {
    "unreadable": "{id}: cannot be read: {what}",
    "numbers": "{reporter} {epoch}: numbers {first} to {last}",
    "run": "{reporter} {epoch}: the whole run, numbers 1 to {last}",
    "silent": "{reporter} {epoch}: no heartbeat since {since}, and no Stopping heartbeat ({source})",
    "event": "CloudEvent {id}, listed by event {document} of {reporter} {epoch}",
    "reporter": "{reporter}: no event has arrived",
    "loss": "loss {id}: {reporter} {epoch}: {lost} from {oldest} to {newest} ({reason}; sink {sink})",
}


def set_aside(found: list[Json], accepted: list[str], sink: str | None) -> tuple[list[Json], list[str]]:
    """Separate what is missing from notes on what was accepted, and on losses of sinks that are not the archive's."""
    missing, notes = [], []
    for one in found:
        is_others = one["kind"] == "loss" and None not in (sink, one["sink"]) and one["sink"] != sink
        if is_others or one.get("id") in accepted:
            notes.append(f"{'of another sink' if is_others else 'accepted'}: {sentence(one)}")
        else:
            missing.append(one)
    return missing, notes


def sentence(item: Json) -> str:
    """Return what is missing as text."""
    return SENTENCES[item["kind"]].format(**{**item, "sink": item.get("sink") or "any"})


def report(audit: Audit, missing: list[Json], notes: list[str], *, as_json: bool) -> int:
    """Print the result; return the exit code."""
    runs, remarks = audit.news(), [*audit.remarks(), *notes]
    is_complete = audit.events > 0 and not missing
    names = ("reporter", "epoch", "first", "last", "count", "missing")
    rows = [
        (one.reporter, one.epoch, one.ranges[0][0], one.last, one.count(), audit.gaps_as_text(one))
        for one in runs
    ]
    if as_json:
        summary: Json = {"complete": is_complete, "events": audit.events, "duplicates": audit.duplicates}
        summary["silence_judged_at"] = None if audit.judged_at is None else iso(audit.judged_at)
        table = [dict(zip(names, row, strict=True)) for row in rows]
        print(json.dumps({**summary, "reporters": table, "missing": missing, "remarks": remarks}, indent=2))
        return 0 if is_complete else 3
    cells = [[escape(str(cell)) for cell in row] for row in [tuple(map(str.upper, names)), *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        show("  ".join(map(str.ljust, row, widths)).rstrip())
    for line in [*remarks, f"{audit.duplicates} duplicates"]:
        show(f"note: {line}")
    for one in missing:
        show(f"missing: {sentence(one)}")
    silence = "not judged: give --now" if audit.judged_at is None else f"judged at {iso(audit.judged_at)}"
    total = f"{audit.events} events from {audit.processes()} reporters, silence {silence}"
    found = (
        f"INCOMPLETE, {len(missing) or 'nothing'} missing of"
        if audit.events
        else "INCOMPLETE, nothing was read:"
    )
    print(f"audit: complete, {total}" if is_complete else f"audit: {found} {total}")
    return 0 if is_complete else 3


def escape(text: str) -> str:
    """Show control characters as escapes: they may come from the bus."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def show(line: str) -> None:
    """Print one line."""
    print(escape(line))


# Where the events are


def read_file(audit: Audit, path: Path) -> None:
    """Add the events of a file, one per line, from where the last audit ended.

    Raises:
        OSError, EOFError: it cannot be read to its end.
        ValueError: it is another one than before, or no file of events.
    """
    name = str(path.resolve())
    position, known = audit.position(name)
    with open_events(path) as file:
        read = checksum(file, position)
        if isinstance(known, bytes):  # of version 1: the last bytes
            file.seek(max(0, position - len(known)))
            is_same = file.read(len(known)) == known
        else:
            is_same = not position or read.hexdigest() == known
        if not is_same:
            raise ValueError(f"{path} is not the file that the state has read: a new file needs a new name")
        for line in file:
            if not line.endswith(b"\n") and not is_whole(line):
                audit.notes.append(f"the last line of {path} is not complete: it was left out")
                break
            if not position and line.strip() and not is_whole(line):
                text = "is no JSON object, expected a CloudEvent in each line, as text or packed by gzip"
                raise ValueError(f"the first line of {path} {text}: {short(line)}")
            if line.strip():
                audit.add(line, f"byte {position} of {path}")
            read.update(line)
            position += len(line)
    audit.set_position(name, position, read.hexdigest())


def open_events(path: Path) -> BinaryIO:
    """Open a file, or what gzip has made of one."""
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return cast("BinaryIO", gzip.open(path)) if is_packed else path.open("rb")


def checksum(file: BinaryIO, size: int) -> Any:
    """Read the first bytes of a file; return a hash of them, to which more can be added."""
    read = sha256()
    while size > 0 and (block := file.read(min(size, BLOCK_BYTES))):
        read.update(block)
        size -= len(block)
    return read


def is_whole(line: bytes) -> bool:
    """Return whether a line is a JSON object, also a last one without its end."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def listed_vms(path: Path) -> list[str]:
    """Return the ARM ids of VMs in a text of any form."""
    found = VM_ID.findall(path.read_text(encoding="utf-8-sig"))
    if not found:
        raise ValueError(f"{path} has no ARM id of a VM: /subscriptions/.../virtualMachines/NAME")
    return found


def read_bus(audit: Audit, options: argparse.Namespace) -> None:
    """Add the events of a subscription."""
    from azure.servicebus import ServiceBusClient  # noqa: PLC0415 - not needed with --file

    if options.namespace:
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415

        bus = ServiceBusClient(options.namespace, DefaultAzureCredential())
    else:
        bus = ServiceBusClient.from_connection_string(os.environ["SERVICEBUS_CONNECTION_STRING"])
    with bus:
        if options.consume:
            consume(
                lambda: bus.get_subscription_receiver(options.topic, options.subscription), options.consume
            )
            read_file(audit, options.consume)
            return
        with bus.get_subscription_receiver(options.topic, options.subscription) as receiver:
            peek(audit, receiver, f"{options.topic}/{options.subscription}")


def peek(audit: Audit, receiver: Any, name: str) -> None:
    """Add all messages of a subscription that no audit with this state has seen, and leave them there."""
    number, _ = audit.position(name)
    while messages := receiver.peek_messages(MESSAGES, sequence_number=number + 1, timeout=30):
        for message in messages:
            audit.add(b"".join(message.body), f"message {message.sequence_number}")
        number = messages[-1].sequence_number
    audit.set_position(name, number)


def consume(open_receiver: Callable[[], Any], archive: Path) -> None:
    """Append all messages of a subscription to a file, sync it to disk, then complete them.

    Each completion waits for the bus, so there are several receivers.
    """
    end_last_line(archive)
    lock = Lock()

    def move(_: int) -> None:
        with open_receiver() as receiver:
            while messages := receiver.receive_messages(MESSAGES, max_wait_time=2):
                lines = [b" ".join(b"".join(message.body).splitlines()) + b"\n" for message in messages]
                with lock:
                    file.writelines(lines)
                    file.flush()
                    os.fsync(file.fileno())
                for message in messages:
                    complete(receiver, message)

    with archive.open("ab") as file, ThreadPoolExecutor(RECEIVERS) as pool:
        list(pool.map(move, range(RECEIVERS)))


def complete(receiver: Any, message: Any) -> None:
    """Complete a message; if its lock is lost, it comes again, as a duplicate."""
    from azure.servicebus.exceptions import MessageLockLostError  # noqa: PLC0415

    with suppress(MessageLockLostError):
        receiver.complete_message(message)


def end_last_line(archive: Path) -> None:
    """Cut off a line that a killed audit began: its message was not completed, and comes again."""
    with archive.open("a+b") as file:
        if not file.tell():
            return
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
            rest = content[end:]
        if rest and is_whole(rest):
            file.write(b"\n")
        else:
            file.truncate(end)


def read_options() -> argparse.Namespace:
    """Read the options; exit with 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
    )
    add = parser.add_argument
    add(
        "--namespace",
        help="NAME.servicebus.windows.net, with the managed identity (AZURE_CLIENT_ID chooses one)",
    )
    add("--topic")
    add("--subscription", help="a subscription that gets everything and has no other receiver")
    add(
        "--consume",
        type=Path,
        metavar="FILE",
        help="move the messages from the subscription to the end of FILE",
    )
    add("--file", type=Path, help="read a file instead of the bus")
    add(
        "--state",
        type=Path,
        metavar="FILE",
        help="keep in FILE what was read: the next audit reads only what is new",
    )
    add("--since", type=seconds, metavar="TIME", help="ignore reporters' events before this time")
    add(
        "--now",
        type=seconds,
        metavar="TIME",
        help="check heartbeats at this time (default: now; with --file the latest that two VMs have reached)",
    )
    add(
        "--expect",
        action="append",
        default=[],
        metavar="NAME",
        help="must have published something: a reporter such as web-0/forward, or a source, in any letter case",
    )
    add(
        "--expect-list",
        type=Path,
        metavar="FILE",
        help="each VM whose ARM id is in FILE must have published something: Resource Graph's CSV or JSON",
    )
    add(
        "--gone",
        action="append",
        default=[],
        metavar="PATTERN",
        help="reporters, sources or VM ids that may have stopped without a heartbeat: 'spot-*'",
    )
    add(
        "--accept",
        action="append",
        default=[],
        metavar="ID",
        help="something missing that was looked at: the id of a loss or an event, EPOCH:FIRST-LAST, or EPOCH",
    )
    add("--sink", metavar="NAME", help="the sink that fills this archive: losses of others are notes")
    add("--json", action="store_true")
    options = parser.parse_args()
    if not options.file and not (options.topic and options.subscription):
        parser.error("give --topic and --subscription, or --file")
    if not options.file and not (options.namespace or os.environ.get("SERVICEBUS_CONNECTION_STRING")):
        parser.error("give --namespace, or SERVICEBUS_CONNECTION_STRING in the environment")
    return options


def main() -> int:
    """Read the events, audit them and print the result."""
    options = read_options()
    logging.getLogger("azure").setLevel(logging.CRITICAL)  # errors are printed below
    with ExitStack() as stack:
        try:
            audit = stack.enter_context(closing(Audit(options.state, options.since)))
            if options.file:
                read_file(audit, options.file)
            else:
                read_bus(audit, options)
            now = options.now or (None if options.file else time.time())
            expected = [*options.expect, *(listed_vms(options.expect_list) if options.expect_list else [])]
            found = audit.missing(now, options.gone, expected)
            audit.save()
        except OtherSinceError as error:
            print(f"audit: {error}", file=sys.stderr)
            return 2
        except Exception as error:  # noqa: BLE001 - the SDK raises errors of many families
            print(f"audit: cannot read: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
        return report(audit, *set_aside(found, options.accept, options.sink), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
