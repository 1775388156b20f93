"""The console's metrics for Prometheus; no label holds an event id or the name of a VM."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.console import rows
from bridge.console.rows import PREPARATIONS, WATCHES
from bridge.console.store import Store
from bridge.contract.types import KNOWN_VALUES
from bridge.runtime.threads import progress_ages
from bridge.service.metrics import describe_process

_STATUSES = ("Scheduled", "Started", "Advisory")
_OTHER = "other"  # what Azure may add


class Figures(Collector):
    """Reads from the status and the store, at each scrape, how things are."""

    def __init__(self, status: Callable[[], Mapping[str, Any]], store: Store) -> None:
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
            yield CounterMetricFamily(f"imds_bridge_console_{name}", text, value=status[name])
        if bus := status["bus"]:
            text = "1 while messages can be received."
            yield GaugeMetricFamily("imds_bridge_bus_connected", text, not bus["last_error"])
        ages = GaugeMetricFamily(
            "imds_bridge_loop_progress_age_seconds", "Since a loop last made progress.", labels=["loop"]
        )
        for loop, seconds in progress_ages().items():
            ages.add_metric([loop], seconds)
        yield ages
        available = not status["storage_error"]
        try:
            with self._store.reading() as store:
                events, counted = rows.count_types(store), rows.count_vms(store)
        except sqlite3.Error:
            available = False
        else:
            for name, text, states in (
                ("vms", "VMs by who watches them.", WATCHES),
                ("preparations", "VMs by what their programs did.", (*PREPARATIONS, "outofwork")),
            ):
                family = GaugeMetricFamily(f"imds_bridge_console_{name}", text, labels=["state"])
                for state in states:
                    family.add_metric([state], counted[state])
                yield family
            yield _open_events(events)
        text = "0 while the store cannot be written or read."
        yield GaugeMetricFamily("imds_bridge_storage_available", text, available)


def _open_events(events: Iterable[tuple[str, str, int]]) -> Metric:
    types, counts = KNOWN_VALUES["EventType"], Counter[tuple[str, str]]()
    for event_type, status, count in events:
        label = event_type if event_type in types else _OTHER, status if status in _STATUSES else _OTHER
        counts[label] += count
    family = GaugeMetricFamily("imds_bridge_console_open_events", "Open events.", labels=["type", "status"])
    for event_type in (*types, _OTHER):
        for status in (*_STATUSES, _OTHER):
            family.add_metric([event_type, status], counts[event_type, status])
    return family


def new_registry(figures: Figures) -> CollectorRegistry:
    """Return all metrics of the console."""
    registry = CollectorRegistry()
    registry.register(figures)
    describe_process(registry)
    return registry
