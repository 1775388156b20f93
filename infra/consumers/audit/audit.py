#!/usr/bin/env python3
"""Verify that every event of imds-bridge has arrived, and list those that have not."""

import argparse
import json
import logging
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

EXAMPLE = """examples:
  audit.py --namespace contoso.servicebus.windows.net --topic scheduled-events --subscription audit
  audit.py ... --consume archive.jsonl     (append the messages to a file, then audit the whole file)
  audit.py --file archive.jsonl --json     (one CloudEvent per line)
In place of --namespace: SERVICEBUS_CONNECTION_STRING in the environment.
Exit codes: 0 complete, 1 the bus or a file cannot be read, 2 an option is wrong, 3 INCOMPLETE."""
SILENT_SECONDS = 4200  # heartbeats are hourly
PEEK_MESSAGES = 250
Json = dict[str, Any]


@dataclass(kw_only=True)
class Run:
    """What has arrived of one run of a process, its epoch; `ranges` are [first, last], in order and apart."""

    reporter: str
    epoch: str
    first_at: float
    last_at: float
    heartbeat_at: float
    ranges: list[list[int]] = field(default_factory=list)
    claimed: int = 0  # the highest number that a heartbeat of its own, or the next run, has named
    stopped: int = 0  # the number of the Stopping heartbeat
    started: bool = False  # whether its first heartbeat has arrived, which names the run before
    previous: str | None = None
    followed: int = 0  # how many runs name this one as the one before
    partial: bool = False  # whether it began before the time from which on events are verified

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        place = bisect_right(self.ranges, [number, sys.maxsize])
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

    @property
    def last(self) -> int:
        """The last number that has arrived."""
        return self.ranges[-1][1] if self.ranges else 0

    def missing(self) -> list[tuple[int, int]]:
        """Return the gaps from number 1 to the last one known."""
        first = self.ranges[0][0] - 1 if self.partial and self.ranges else 0
        bounds = [[0, first], *self.ranges, [max(self.claimed, self.last) + 1, 0]]
        return [(low[1] + 1, high[0] - 1) for low, high in pairwise(bounds) if high[0] > low[1] + 1]

    def count(self) -> int:
        """Return how many numbers have arrived."""
        return sum(last - first + 1 for first, last in self.ranges)

    def is_silent(self, now: float, gone: list[str]) -> bool:
        """Return whether heartbeats are missing; a relay sends none."""
        is_over = self.stopped == self.last or any(fnmatch(self.reporter, one) for one in gone)
        return not is_over and not self.is_relay and now - self.heartbeat_at > SILENT_SECONDS

    @property
    def is_relay(self) -> bool:
        """Whether it is a relay's, whose runs are not chained."""
        return self.reporter.endswith("/relay")

    def remarks(self, *, is_over: bool) -> Iterator[str]:
        """Yield notes on it; `is_over` if a later run has taken its place."""
        if self.started and self.previous is None:
            yield f"started about {iso(self.first_at)} without a run before it"
        if self.partial:
            yield f"numbers before {self.ranges[0][0]} are not verified (--since)"
        if self.followed > 1:
            yield f"{self.followed} runs follow it: its state was restored from a copy, or lost what was in memory"
        if is_over and not self.is_relay:
            if self.stopped != self.last:
                yield f"was killed after number {self.last}"
            if not self.followed:
                yield "no run follows it: what came after its last heartbeat is not verified"


class Audit:
    """What has arrived: the runs of each reporter with their numbers, and the id of each scheduledevent."""

    def __init__(self, since: float = 0.0) -> None:
        self.since, self.latest, self.duplicates = since, 0.0, 0
        self.runs: dict[tuple[str, str], Run] = {}
        # What later runs name: a reporter, an epoch and its last number.
        self.named: list[tuple[str, str, int]] = []
        self.newest: dict[str, Run] = {}  # the run of each reporter that must still send heartbeats
        self.arrived: set[str] = set()
        # ids that have not arrived, and the listing document
        self.listed: dict[str, tuple[str, str, int]] = {}
        self.unreadable: list[str] = []
        self.unreachable: list[str] = []
        self.losses: list[Json] = []

    def add(self, body: bytes, where: str) -> None:
        """Add an event; `where` names it in errors."""
        try:
            event = json.loads(body)
            if event["type"].startswith("io.imdsbridge.scheduledevent."):
                self.add_scheduled(event["id"])
            elif "reporter" in event:
                reporter, epoch = str(event["reporter"]), str(event["reporterepoch"])
                self.add_counted(event, reporter, epoch, int(event["reporterseq"]))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.unreadable.append(f"{where}: {error!r}")

    def add_scheduled(self, name: str) -> None:
        """Add any VM's copy of an event, also from before `since`: a later document may list it."""
        self.duplicates += name in self.arrived
        self.arrived.add(name)
        self.listed.pop(name, None)

    def add_counted(self, event: Json, reporter: str, epoch: str, number: int) -> None:
        """Add one of a reporter's own events."""
        if number < 1:
            raise ValueError(f"reporterseq {number}")
        at, data = seconds(event["time"]), event["data"]
        self.latest = max(self.latest, at)
        if at < self.since:
            return
        run = self.runs.setdefault(
            (reporter, epoch),
            Run(reporter=reporter, epoch=epoch, first_at=at, last_at=at, heartbeat_at=at),
        )
        if not run.add(number):
            self.duplicates += 1
            return
        run.first_at, run.last_at = min(run.first_at, at), max(run.last_at, at)
        if event["type"] == "io.imdsbridge.bridge.heartbeat.v1":
            self.add_heartbeat(run, at, number, data)
        for name in data.get("CloudEventIds", ()):
            if name not in self.arrived:
                self.listed.setdefault(name, (reporter, epoch, number))
        if event["type"] == "io.imdsbridge.bridge.loss.v1":
            self.losses.append({"reporter": reporter, "epoch": epoch, **loss_of(data)})
        if event["type"] == "io.imdsbridge.imds.recovered.v1":
            self.unreachable.append(
                f"{reporter} could not reach IMDS from {data['BlindFrom']} to {data['BlindTo']}"
            )

    def add_heartbeat(self, run: Run, at: float, number: int, data: Json) -> None:
        """Note what a heartbeat says of its own run, and of the one before."""
        run.heartbeat_at = max(run.heartbeat_at, at)
        run.claimed = max(run.claimed, data["LastReporterSeq"])
        if data["Reason"] == "Stopping":
            run.stopped = number
        if data["Reason"] == "Started":
            run.started, run.previous = True, data["PreviousEpoch"]
            if run.previous is not None:
                self.named.append((run.reporter, run.previous, data["PreviousLastReporterSeq"]))

    def finish(self) -> list[Json]:
        """Link each run to the one before it; return the runs of which nothing has arrived. Call once, at the end."""
        first: dict[str, Run] = {}
        for run in self.in_order():
            if first.setdefault(run.reporter, run) is run:  # it may have begun before `since`
                run.partial = self.since > 0 and not run.started
        lost: list[Json] = []
        for reporter, epoch, last in self.named:
            run_before = self.runs.get((reporter, epoch))
            if run_before:
                run_before.claimed = max(run_before.claimed, last)
                run_before.followed += 1
            elif not (self.since and first[reporter].previous == epoch):
                lost.append({"kind": "run", "reporter": reporter, "epoch": epoch, "last": last})
        for run in sorted(self.runs.values(), key=lambda run: (not run.followed, run.last_at)):
            self.newest[run.reporter] = run
        return lost

    def missing(self, now: float, gone: list[str], expected: list[str]) -> list[Json]:
        """Return what is missing.

        Args:
            now: the time at which heartbeats are checked.
            gone: patterns of reporters that may have stopped without a heartbeat.
            expected: reporters that must have published something.
        """
        found: list[Json] = [{"kind": "unreadable", "what": what} for what in self.unreadable]
        found += self.finish()
        for run in self.in_order():
            who = {"reporter": run.reporter, "epoch": run.epoch}
            found += [{"kind": "numbers", **who, "first": low, "last": high} for low, high in run.missing()]
            if run is self.newest[run.reporter] and run.is_silent(now, gone):
                found.append({"kind": "silent", **who, "since": iso(run.heartbeat_at)})
        found += [{"kind": "loss", **loss} for loss in self.losses if loss["count"] != 0]
        for name, (reporter, epoch, number) in self.listed.items():
            found.append(
                {"kind": "event", "id": name, "reporter": reporter, "epoch": epoch, "document": number}
            )
        return found + [
            {"kind": "reporter", "reporter": name} for name in expected if name not in self.newest
        ]

    def remarks(self) -> list[str]:
        """Return notes for the reader of the report."""
        notes: list[str] = []
        for run in self.in_order():
            is_over = run is not self.newest[run.reporter]
            notes += [f"{run.reporter} {run.epoch}: {note}" for note in run.remarks(is_over=is_over)]
        return notes + self.unreachable

    def in_order(self) -> list[Run]:
        """Return the runs by reporter, the older one first."""
        return sorted(self.runs.values(), key=lambda run: (run.reporter, run.first_at))


SENTENCES = {
    "unreadable": "cannot be read: {what}",
    "numbers": "{reporter} {epoch}: numbers {first} to {last}",
    "run": "{reporter} {epoch}: the whole run, numbers 1 to {last}",
    "silent": "{reporter} {epoch}: no heartbeat since {since}, and no Stopping heartbeat",
    "event": "CloudEvent {id}, listed by document {document} of {reporter} {epoch}",
    "reporter": "{reporter}: no event has arrived",
    "loss": "{reporter} {epoch}: {lost} from {oldest} to {newest} ({reason}; sink {sink})",
}


def escape(text: str) -> str:
    """Show control characters as escapes: they may come from the bus."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def show(line: str) -> None:
    """Print one line."""
    print(escape(line))


def report(audit: Audit, missing: list[Json], *, as_json: bool) -> int:
    """Print the result; return the exit code."""
    runs, remarks = audit.in_order(), audit.remarks()
    events = sum(run.count() for run in runs) + len(audit.arrived)
    reporters = len({run.reporter for run in runs})
    is_complete = bool(runs) and not missing
    names = ("reporter", "epoch", "first", "last", "count", "missing")
    rows = [(one.reporter, one.epoch, one.ranges[0][0], one.last, one.count(), gaps(one)) for one in runs]
    if as_json:
        summary = {"complete": is_complete, "events": events, "duplicates": audit.duplicates}
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
        show(f"missing: {SENTENCES[one['kind']].format(**one)}")
    total = f"{events} events from {reporters} reporters"
    found = f"INCOMPLETE, {len(missing) or 'nothing'} missing of" if runs else "INCOMPLETE, nothing was read:"
    print(f"audit: complete, {total}" if is_complete else f"audit: {found} {total}")
    return 0 if is_complete else 3


def loss_of(data: Json) -> Json:
    """Return what a loss event reports."""
    count = data["Count"]
    return {
        "reason": str(data["Reason"]),
        "count": count,
        "lost": "an unknown number of events lost" if count is None else f"{count} events lost",
        "sink": data["Sink"] or "any",
        "oldest": data["OldestTime"] or "unknown",
        "newest": data["NewestTime"] or "unknown",
    }


def gaps(run: Run) -> str:
    """Return a run's missing numbers as text."""
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in run.missing())


def peek(receiver: Any) -> Iterator[bytes]:
    """Peek at all messages of a subscription."""
    number = 1
    while messages := receiver.peek_messages(PEEK_MESSAGES, sequence_number=number, timeout=30):
        yield from (b"".join(message.body) for message in messages)
        number = messages[-1].sequence_number + 1


def consume(receiver: Any, archive: Path) -> None:
    """Append all messages of a subscription to a file, sync it to disk, then complete them."""
    with archive.open("ab") as file:
        while messages := receiver.receive_messages(PEEK_MESSAGES, max_wait_time=2):
            for message in messages:
                file.write(b" ".join(b"".join(message.body).splitlines()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            for message in messages:
                receiver.complete_message(message)


def read_bus(options: argparse.Namespace) -> Iterator[bytes]:
    """Yield the events of a subscription."""
    from azure.servicebus import ServiceBusClient  # noqa: PLC0415 - not needed with --file

    if options.namespace:
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415

        bus = ServiceBusClient(options.namespace, DefaultAzureCredential())
    else:
        bus = ServiceBusClient.from_connection_string(os.environ["SERVICEBUS_CONNECTION_STRING"])
    with bus, bus.get_subscription_receiver(options.topic, options.subscription) as receiver:
        if not options.consume:
            yield from peek(receiver)
            return
        consume(receiver, options.consume)
    yield from read_file(options.consume)


def read_file(path: Path) -> Iterator[bytes]:
    """Yield the events of a file, one per line."""
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def seconds(instant: str) -> float:
    """Return an instant as seconds since 1970; UTC if it has no offset."""
    at = datetime.fromisoformat(instant)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def iso(at: float) -> str:
    """Return seconds since 1970 as text."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def read_options() -> argparse.Namespace:
    """Read the options; exit with 2 if they are invalid."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=raw)
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
        "--since", type=seconds, default=0.0, metavar="TIME", help="ignore reporters' events before this time"
    )
    add(
        "--now",
        type=seconds,
        metavar="TIME",
        help="check heartbeats at this time (default: now; with --file its latest time)",
    )
    add(
        "--expect",
        action="append",
        default=[],
        metavar="REPORTER",
        help="must have published something, for example web-0/forward",
    )
    add(
        "--gone",
        action="append",
        default=[],
        metavar="PATTERN",
        help="reporters that may have stopped without a heartbeat: 'spot-*'",
    )
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
    audit = Audit(since=options.since)
    try:
        for number, body in enumerate(
            read_file(options.file) if options.file else read_bus(options), start=1
        ):
            audit.add(body, f"event {number}")
    except Exception as error:  # noqa: BLE001 - the SDK raises errors of many families
        print(f"audit: cannot read: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    now = options.now or (audit.latest if options.file else time.time())
    return report(audit, audit.missing(now, options.gone, options.expect), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
