#!/usr/bin/env python3
"""Prove that every event of imds-bridge has arrived, or say exactly which has not."""

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
  audit.py ... --consume archive.jsonl     (move what is there to the end of a file, then audit all of the file)
  audit.py --file archive.jsonl --json     (one CloudEvent a line)
In place of --namespace: SERVICEBUS_CONNECTION_STRING in the environment.
Exit codes: 0 complete, 1 the bus or a file cannot be read, 2 an option is wrong, 3 INCOMPLETE."""
SILENT_SECONDS = 4200  # heartbeats are hourly
PEEK_MESSAGES = 250
Json = dict[str, Any]


@dataclass(kw_only=True)
class Count:
    """What has arrived of one reporter's count; `ranges` are [first, last], in order, with holes between them."""

    reporter: str
    epoch: str
    began: float
    beat: float
    ranges: list[list[int]] = field(default_factory=list)
    claimed: int = 0  # the last number that a heartbeat speaks of
    stopped: int = 0  # the number of the Stopping heartbeat

    def add(self, number: int) -> bool:
        """Add a number; tell whether it is new."""
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

    def missing(self) -> list[tuple[int, int]]:
        """Return the holes between the first number seen and the last one known."""
        bounds = [*self.ranges, [max(self.claimed, self.ranges[-1][1]) + 1, 0]]
        return [(low[1] + 1, high[0] - 1) for low, high in pairwise(bounds) if high[0] > low[1] + 1]

    def count(self) -> int:
        """Return how many numbers have arrived."""
        return sum(last - first + 1 for first, last in self.ranges)


class Audit:
    """What has arrived. It keeps a few words for each reporter and hole, and the id of each scheduledevent."""

    def __init__(self, since: float = 0.0) -> None:
        self.since, self.latest, self.duplicates = since, 0.0, 0
        self.counts: dict[tuple[str, str], Count] = {}
        self.arrived: set[str] = set()
        self.listed: dict[str, tuple[str, str, int]] = {}  # ids that have not arrived, with who lists them
        self.unreadable: list[str] = []
        self.blind: list[str] = []

    def take(self, body: bytes, where: str) -> None:
        """Take an event in."""
        try:
            event = json.loads(body)
            if event["type"].startswith("io.imdsbridge.scheduledevent."):
                self.take_scheduled(event["id"])
            elif "reporter" in event:
                reporter, epoch = str(event["reporter"]), str(event["reporterepoch"])
                self.take_counted(event, reporter, epoch, int(event["reporterseq"]))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self.unreadable.append(f"{where}: {error!r}")

    def take_scheduled(self, name: str) -> None:
        """Note any VM's copy of an event; those before `since` may be listed by a document after it."""
        self.duplicates += name in self.arrived
        self.arrived.add(name)
        self.listed.pop(name, None)

    def take_counted(self, event: Json, reporter: str, epoch: str, number: int) -> None:
        """Note one of a reporter's own events."""
        if number < 1:
            raise ValueError(f"reporterseq {number}")
        at, data = seconds(event["time"]), event["data"]
        self.latest = max(self.latest, at)
        if at < self.since:
            return
        count = self.counts.setdefault(
            (reporter, epoch), Count(reporter=reporter, epoch=epoch, began=at, beat=at)
        )
        if not count.add(number):
            self.duplicates += 1
            return
        count.began = min(count.began, at)
        if event["type"] == "io.imdsbridge.bridge.heartbeat.v1":
            count.beat = max(count.beat, at)
            count.claimed = max(count.claimed, data["LastReporterSeq"])
            count.stopped = number if data["Reason"] == "Stopping" else count.stopped
        for name in data.get("CloudEventIds", ()):
            if name not in self.arrived:
                self.listed.setdefault(name, (reporter, epoch, number))
        if event["type"] == "io.imdsbridge.imds.recovered.v1":
            self.blind.append(f"{reporter} saw nothing of IMDS from {data['BlindFrom']} to {data['BlindTo']}")

    def missing(self, now: float, gone: list[str], expected: list[str]) -> list[Json]:
        """Say what is missing, an entry for each thing."""
        found: list[Json] = [{"kind": "unreadable", "what": what} for what in self.unreadable]
        for count in self.in_order():
            who = {"reporter": count.reporter, "epoch": count.epoch}
            found += [{"kind": "numbers", **who, "first": low, "last": high} for low, high in count.missing()]
            is_over = count.stopped == count.ranges[-1][1] or any(
                fnmatch(count.reporter, one) for one in gone
            )
            if not is_over and now - count.beat > SILENT_SECONDS:
                found.append({"kind": "silent", **who, "since": iso(count.beat)})
        for name, (reporter, epoch, number) in self.listed.items():
            found.append(
                {"kind": "event", "id": name, "reporter": reporter, "epoch": epoch, "document": number}
            )
        seen = {count.reporter for count in self.in_order()}
        return found + [{"kind": "reporter", "reporter": name} for name in expected if name not in seen]

    def remarks(self) -> list[str]:
        """Say what a reader should know besides."""
        told, before = [], ""
        for count in self.in_order():
            if count.reporter == before:
                told.append(
                    f"{count.reporter} began its state anew about {iso(count.began)}: epoch {count.epoch}"
                )
            if count.ranges[0][0] > 1:
                told.append(
                    f"{count.reporter} {count.epoch}: nothing can be proved before {count.ranges[0][0]}"
                )
            before = count.reporter
        return told + self.blind

    def in_order(self) -> list[Count]:
        """Return the counts by reporter, the older epoch first."""
        return sorted(self.counts.values(), key=lambda count: (count.reporter, count.began))


SENTENCES = {
    "unreadable": "cannot be read: {what}",
    "numbers": "{reporter} {epoch}: numbers {first} to {last}",
    "silent": "{reporter} {epoch}: no heartbeat since {since}, and none that says it stops",
    "event": "CloudEvent {id}, listed by document {document} of {reporter} {epoch}",
    "reporter": "{reporter}: nothing at all",
}


def report(audit: Audit, missing: list[Json], *, as_json: bool) -> int:
    """Print what was found; return the exit code."""
    counts, remarks = audit.in_order(), audit.remarks()
    events = sum(count.count() for count in counts) + len(audit.arrived)
    reporters = len({count.reporter for count in counts})
    is_complete = bool(counts) and not missing
    names = ("reporter", "epoch", "first", "last", "count", "missing")
    rows = [
        (one.reporter, one.epoch, one.ranges[0][0], one.ranges[-1][1], one.count(), holes(one))
        for one in counts
    ]
    if as_json:
        told = {"complete": is_complete, "events": events, "duplicates": audit.duplicates}
        table = [dict(zip(names, row, strict=True)) for row in rows]
        print(json.dumps({**told, "reporters": table, "missing": missing, "remarks": remarks}, indent=2))
        return 0 if is_complete else 3
    cells = [[str(cell) for cell in row] for row in [tuple(map(str.upper, names)), *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    for line in [*remarks, f"{audit.duplicates} duplicates"]:
        print(f"note: {line}")
    for one in missing:
        print(f"missing: {SENTENCES[one['kind']].format(**one)}")
    total = f"{events} events from {reporters} reporters"
    found = (
        f"INCOMPLETE, {len(missing) or 'nothing'} missing of" if counts else "INCOMPLETE, nothing was read:"
    )
    print(f"audit: complete, {total}" if is_complete else f"audit: {found} {total}")
    return 0 if is_complete else 3


def holes(count: Count) -> str:
    """Write what is missing between the numbers of a reporter."""
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in count.missing())


def peek(receiver: Any) -> Iterator[bytes]:
    """Look at all messages of a subscription and change nothing."""
    number = 1
    while messages := receiver.peek_messages(PEEK_MESSAGES, sequence_number=number, timeout=30):
        yield from (b"".join(message.body) for message in messages)
        number = messages[-1].sequence_number + 1


def consume(receiver: Any, archive: Path) -> None:
    """Move all messages of a subscription to the end of a file: on the disk first, then off the bus."""
    with archive.open("ab") as file:
        while messages := receiver.receive_messages(PEEK_MESSAGES, max_wait_time=2):
            for message in messages:
                file.write(b" ".join(b"".join(message.body).splitlines()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            for message in messages:
                receiver.complete_message(message)


def read_bus(options: argparse.Namespace) -> Iterator[bytes]:
    """Give the events of a subscription."""
    from azure.servicebus import ServiceBusClient  # noqa: PLC0415 - a file needs none of this

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
    """Give the events of a file, one a line."""
    with path.open("rb") as file:
        yield from (line for line in file if line.strip())


def seconds(instant: str) -> float:
    """Read an instant, as seconds since 1970; UTC where it says nothing."""
    at = datetime.fromisoformat(instant)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def iso(at: float) -> str:
    """Write seconds since 1970."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def read_options() -> argparse.Namespace:
    """Read the options; exit 2 where they do not fit."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLE, formatter_class=raw)
    add = parser.add_argument
    add(
        "--namespace",
        help="NAME.servicebus.windows.net, with the managed identity (AZURE_CLIENT_ID chooses one)",
    )
    add("--topic")
    add("--subscription", help="one that gets everything and that nobody else receives from")
    add(
        "--consume",
        type=Path,
        metavar="FILE",
        help="take the messages off the subscription, to the end of FILE",
    )
    add("--file", type=Path, help="read a file and no bus")
    add("--since", type=seconds, default=0.0, metavar="TIME", help="pass over what reporters told before")
    add(
        "--now",
        type=seconds,
        metavar="TIME",
        help="judge silence as of then (default: now; a file: its latest time)",
    )
    add(
        "--expect",
        action="append",
        default=[],
        metavar="REPORTER",
        help="must be there, for example web-0/forward",
    )
    add(
        "--gone",
        action="append",
        default=[],
        metavar="PATTERN",
        help="reporters that may be silent: 'spot-*'",
    )
    add("--json", action="store_true")
    options = parser.parse_args()
    if not options.file and not (options.topic and options.subscription):
        parser.error("give --topic and --subscription, or --file")
    if not options.file and not (options.namespace or os.environ.get("SERVICEBUS_CONNECTION_STRING")):
        parser.error("give --namespace, or SERVICEBUS_CONNECTION_STRING in the environment")
    return options


def main() -> int:
    """Read, judge and report."""
    options = read_options()
    logging.getLogger("azure").setLevel(logging.CRITICAL)  # what fails is said below
    audit = Audit(since=options.since)
    try:
        for number, body in enumerate(
            read_file(options.file) if options.file else read_bus(options), start=1
        ):
            audit.take(body, f"event {number}")
    except Exception as error:  # noqa: BLE001 - the SDK raises errors of many families
        print(f"audit: cannot read: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    now = options.now or (audit.latest if options.file else time.time())
    return report(audit, audit.missing(now, options.gone, options.expect), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
