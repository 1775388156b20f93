"""The console's metrics for Prometheus; no label holds an event id or the name of a VM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge.console.fleet import STATES
from bridge.console.queries import EventRow
from bridge.contract.types import KNOWN_VALUES

_STATUSES = ("Scheduled", "Started")
_OTHER = "other"  # what Azure may add


class _Figures(Collector):
    def __init__(
        self, status: Mapping[str, Any], states: Mapping[str, int], events: Iterable[EventRow]
    ) -> None:
        self._status = status
        self._states = states
        self._events = events

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for name, text in (
            ("received", "New events that were committed."),
            ("repeated", "Events that were known."),
        ):
            yield CounterMetricFamily(f"imds_bridge_console_{name}", text, value=self._status[name])
        yield GaugeMetricFamily(
            "imds_bridge_storage_available",
            "0 while the store cannot be written.",
            not self._status["storage_error"],
        )
        if bus := self._status["bus"]:
            text = "1 while messages can be received."
            yield GaugeMetricFamily("imds_bridge_bus_connected", text, not bus["last_error"])
        states = GaugeMetricFamily("imds_bridge_console_vms", "VMs by state.", labels=["state"])
        for state in STATES:
            states.add_metric([state], self._states.get(state, 0))
        yield states
        yield self._open_events()

    def _open_events(self) -> Metric:
        types = KNOWN_VALUES["EventType"]
        counts = Counter(
            (
                event.event_type if event.event_type in types else _OTHER,
                event.status if event.status in _STATUSES else _OTHER,
            )
            for event in self._events
        )
        family = GaugeMetricFamily(
            "imds_bridge_console_open_events", "Open events.", labels=["type", "status"]
        )
        for event_type in (*types, _OTHER):
            for status in (*_STATUSES, _OTHER):
                family.add_metric([event_type, status], counts[event_type, status])
        return family


def render_metrics(
    accept: str, *, status: Mapping[str, Any], states: Mapping[str, int], events: Iterable[EventRow]
) -> tuple[str, bytes]:
    """Return the content type and the text of all metrics.

    Args:
        accept: the request's Accept header.
        status: of the process.
        states: the number of VMs by state.
        events: the open ones.
    """
    registry = CollectorRegistry()
    registry.register(_Figures(status, states, events))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)
