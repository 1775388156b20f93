"""Building, identifying and encoding an event, against the `cloudevents` package."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent as PackageEvent

from bridge.formats.cloudevents import structured
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from tests.bench import sample
from tests.bench.measure import BenchError, Progress, Row

BATCHES = 100
BATCH = 100
WARM_UP = 5


def rows(_folder: Path, progress: Progress) -> list[Row]:
    """Make the same event in both ways, in turn."""
    progress.begin(f"event: {BATCHES} batches of {BATCH} in each of two ways, in turn")
    envelope = json.loads(sample.event()[1])
    data = envelope.pop("data")
    attributes = {**envelope, "time": sample.AT}
    _check_same(_package((attributes, data)))
    costs: list[tuple[float, float]] = []
    for number in range(-WARM_UP, BATCHES):
        raws = [sample.raw_event(max(0, number) * BATCH + place) for place in range(BATCH)]
        costs.append((_cpu_us(_ours, raws), _cpu_us(_package, [(dict(attributes), data)] * BATCH)))
        progress.step(f"{number} of {BATCHES}")
    ours, package = map(statistics.median, zip(*costs[WARM_UP:], strict=True))
    return [
        Row(
            "an event built, identified, encoded / `cloudevents`, CPU",
            ours / package,
            "x",
            f"medians {ours:.1f} and {package:.1f} us, {BATCHES} batches of {BATCH}",
            limit=1.4,
        )
    ]


def _ours(raw: dict[str, Any]) -> bytes:
    """Do what the forwarder does for one event that it sees for the first time."""
    change = Change(kind="scheduled", event=ScheduledEvent(raw=raw))
    _ = change.fingerprint  # to ask the outbox how often it was seen
    return structured(
        sample.REPORTER.scheduled_event(change, seen_before=0, incarnation=sample.INCARNATION, at=sample.AT)
    )


def _package(given: tuple[dict[str, Any], dict[str, Any]]) -> bytes:
    """Let the package build and encode the same; the attributes, id included, are given."""
    attributes, data = given
    return JSONFormat().write(PackageEvent(attributes=attributes, data=data))


def _check_same(body: bytes) -> None:
    """Make sure that both ways say the same; the package writes microseconds."""
    theirs, ours = json.loads(body), json.loads(_ours(sample.raw_event()))
    for envelope in (theirs, ours):
        envelope["time"] = datetime.fromisoformat(envelope["time"])
    if theirs != ours:
        raise BenchError("the `cloudevents` package does not encode the same event")


def _cpu_us(call: Callable[[Any], object], given: Sequence[Any]) -> float:
    """Return the CPU of one call, as the mean over a batch: one alone is too short to be measured."""
    began = time.thread_time_ns()
    for value in given:
        call(value)
    return (time.thread_time_ns() - began) / 1000 / len(given)
