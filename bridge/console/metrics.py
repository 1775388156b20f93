"""The console's metrics for Prometheus; no label holds an event id or the name of a VM."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.console import rows
from bridge.console.rows import PREPARATIONS, WATCHES, Where
from bridge.console.store import Store
from bridge.contract.status import Status
from bridge.contract.types import KNOWN_VALUES
from bridge.process.metrics import describe_process, gauge, single
from bridge.runtime.threads import progress_ages

_STATUSES = ("Scheduled", "Started", "Advisory")
_OTHER = "other"  # what Azure may add


class Figures(Collector):
    """Reads from the status and the store, at each scrape, how things are."""

    def __init__(self, status: Callable[[], Status], store: Store) -> None:
        """Prepare to read.

        Args:
            status: returns what the status file shows.
            store: is read.
        """
        self._status = status
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the store is not read before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of this moment; those of the store only if it can be read."""
        status = self._status()
        for name, text in (
            ("received", "New events that were committed."),
            ("repeated", "Events that were known."),
        ):
            yield CounterMetricFamily(f"imds_bridge_console_{name}", text, value=getattr(status.flow, name))
        if bus := status.receiver:
            text = "1 while messages can be received."
            yield single("bus_connected", text, not bus.last_error)
        text = "Since a loop last made progress."
        yield gauge("loop_progress_age_seconds", text, ("loop",), progress_ages())
        available = not status.storage_error
        try:
            with self._store.reading() as store:
                events, counted = rows.count_types(store), rows.count_vms(store)
                put_away = rows.count(store, "event_now", Where("is_open AND due = 'away'", ()))
        except sqlite3.Error:
            available = False
        else:
            for name, text, states in (
                ("vms", "VMs by who watches them.", WATCHES),
                ("preparations", "VMs by what their programs did.", (*PREPARATIONS, "outofwork")),
            ):
                yield gauge(f"console_{name}", text, ("state",), {one: counted[one] for one in states})
            yield _open_events(events)
            yield single("console_put_away", "Open events that people have put away.", put_away)
        text = "0 while the store cannot be written or read."
        yield single("storage_available", text, available)


def _open_events(events: Iterable[tuple[str, str, int]]) -> Metric:
    types, counts = KNOWN_VALUES["EventType"], Counter[tuple[str, str]]()
    for event_type, status, count in events:
        label = event_type if event_type in types else _OTHER, status if status in _STATUSES else _OTHER
        counts[label] += count
    known = {pair: counts[pair] for pair in product((*types, _OTHER), (*_STATUSES, _OTHER))}
    return gauge("console_open_events", "Open events.", ("type", "status"), known)


def new_registry(figures: Figures, last: Status | None = None) -> CollectorRegistry:
    """Return all metrics of the console; `last` is the status that the run before has left."""
    registry = CollectorRegistry()
    registry.register(figures)
    describe_process(registry).set(last is not None and last.running is False)
    return registry
