"""How fast events that wait are delivered, and what that costs in memory, whatever their number."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from bridge.errors import Gone
from bridge.events.model import StoredEvent
from bridge.sinks.base import Sink
from tests.support.memory_sink import MemorySink
from tests.support.usage import memory_mib
from tools.bench import parts, simulators
from tools.bench.measure import BenchError, Progress, Row, apart, reset_peak

SIZES = FEW, MANY = 1_000, 100_000
ROUNDS = 5
WEBHOOKS = 1_000  # delivered in one round, of those that wait
ROUND_SECONDS = 10.0
OFTEN = 5_000  # a size that drains in an instant is drained several times in each round
WARM_UP = 20


class _Task(NamedTuple):
    folder: Path
    sink: str  # a new one for the outbox each time, so that everything waits for it
    url: str  # of the inbox; "" for the sink that keeps nothing
    most: int
    limit_seconds: float


class _Drain(NamedTuple):
    events: int
    seconds: float
    grown_mib: float  # the peak of what is resident, over what was before the outbox was opened

    @property
    def rate(self) -> float:
        return self.events / self.seconds


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Prepare an outbox of each size, and drain them in turn."""
    folders = {size: folder / f"drain{size}" for size in SIZES}
    for size, target in folders.items():
        progress.begin(f"drain: {size:,} events are prepared")
        parts.fill_outbox(target, size)
    webhook: dict[int, list[_Drain]] = {size: [] for size in SIZES}
    memory: dict[int, list[_Drain]] = {size: [] for size in SIZES}
    with simulators.inbox() as inbox:
        url = inbox("base_url") + "/hook"
        for number in range(ROUNDS):
            progress.begin(f"drain: round {number + 1} of {ROUNDS} over {len(SIZES)} sizes")
            for size, target in folders.items():
                task = _Task(target, f"webhook{number}", url, WEBHOOKS, ROUND_SECONDS)
                webhook[size].append(_run(task))
                inbox("clear")
                for again in range(max(1, OFTEN // size)):
                    task = _Task(target, f"memory{number}-{again}", "", size, ROUND_SECONDS)
                    memory[size].append(_run(task))
        progress.begin(f"drain: {ROUND_SECONDS:g} s of {MANY:,} to the webhook")
        long = _run(_Task(folders[MANY], "long", url, MANY, ROUND_SECONDS))
    return [
        _rate_row("webhook", webhook, f"medians of {ROUNDS} rounds, {WEBHOOKS:,} sent in each"),
        _rate_row("memory", memory, f"all, or {ROUND_SECONDS:g} s; the ceiling: nothing is sent"),
        _memory_row([*webhook[MANY], *memory[MANY], long]),
    ]


def _rate_row(sink: str, drains: dict[int, list[_Drain]], how: str) -> Row:
    few, many = (statistics.median(drain.rate for drain in drains[size]) for size in SIZES)
    return Row(
        f"drain rate, {MANY:,} / {FEW:,} waiting, {sink} sink",
        many / few,
        "x",
        f"{few:,.0f} and {many:,.0f} events a second with {FEW:,} and {MANY:,} waiting; {how}",
        limit=0.8,
        at_least=True,
    )


def _memory_row(drains: Sequence[_Drain]) -> Row:
    return Row(
        f"memory grown with {MANY:,} waiting, RSS",
        max(drain.grown_mib for drain in drains),
        "MiB",
        "the highest peak over what was there before the outbox was opened",
        limit=8,
    )


def _run(task: _Task) -> _Drain:
    """Drain in a new process, so that its memory is its own."""
    return apart(_drained, task, limit_seconds=task.limit_seconds)


def _drained(task: _Task) -> _Drain:
    logging.disable(logging.CRITICAL)  # the end by Gone is on purpose
    gc.collect()
    reset_peak()
    before = memory_mib()
    outbox = parts.open_outbox(task.folder, task.sink)
    sink: Sink = parts.webhook(task.url) if task.url else _Forgetful()
    meter = _Meter(sink, task.most, task.limit_seconds)
    with patch.object(sink, "send", meter):
        sender = parts.dispatcher(task.sink, sink, outbox)
        sender.stop_when_drained()
        sender.run()
    grown = memory_mib("VmHWM") - before
    outbox.close()
    if meter.count < WARM_UP * 2:
        raise BenchError(f"only {meter.count} events were delivered: {sender.status().last_error}")
    return _Drain(meter.count - WARM_UP, meter.last_at - meter.began_at, grown)


class _Forgetful(MemorySink):
    """The sink that keeps what it gets, emptied at once: its lists are no memory of the bridge."""

    def send(self, events: Sequence[StoredEvent]) -> None:
        super().send(events)
        for kept in (self.received, self.batches, self.calls):
            kept.clear()


class _Meter:
    """Stands in for a sink's `send`: counts and times what it takes, and ends the dispatcher once that is enough."""

    def __init__(self, sink: Sink, most: int, limit_seconds: float) -> None:
        self.count = 0
        self.began_at = 0.0
        self.last_at = 0.0
        self._send = sink.send
        self._most = most
        self._limit_seconds = limit_seconds

    def __call__(self, events: Sequence[StoredEvent]) -> None:
        if self.count >= self._most or (self.began_at and self.last_at - self.began_at > self._limit_seconds):
            raise Gone("enough")
        self._send(events)
        self.count += len(events)
        self.last_at = time.monotonic()
        if self.count == WARM_UP:
            self.began_at = self.last_at
