"""Metrics for Prometheus, and the port that serves them with the health of a process.

What happens is counted by `Meter`; how things are is read from the status at each scrape.
No label holds an event id, a URL or the name of a VM: the number of series does not grow with the events.
"""

from __future__ import annotations

import errno
import json
import logging
import sys
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from itertools import product
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge import __version__
from bridge.config.values import addresses, socket_address
from bridge.contract.status import ForwardStatus, ListenStatus, SinkStatus, Status, VmStatus
from bridge.contract.types import KNOWN_VALUES, LOSS_REASONS, RECEIPT_REASONS, TYPE_PREFIX
from bridge.errors import ImdsError
from bridge.events.model import CloudEvent
from bridge.imds.document import is_among, read_document
from bridge.outbox.sqlite import log_bytes
from bridge.outbox.upkeep import KeptOutbox
from bridge.process.status import age_of, find_unready
from bridge.runtime.threads import progress_ages, stalled_threads
from bridge.runtime.time import Clock, parse_iso

log = logging.getLogger(__name__)

M = TypeVar("M", Counter, Histogram)

POLL_RESULTS = ("answered", "unanswered", "refused", "throttled")
CHANGES = ("scheduled", "started", "updated", "advised", "completed", "canceled", "ended")
SENT_RESULTS = ("delivered", "failed", "rejected", "expired")
IMMINENT_SECONDS = 120.0
PREPARED_RESULTS = ("succeeded", "failed")

_REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
_DELIVERY_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600, 86_400)
_PREPARE_SECONDS = (1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600)
_NOTICE_SECONDS = (0, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 86_400)
# A series beside each counter for its start, which nothing here needs.
disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no type for it

_JSON, _TEXT = "application/json", "text/plain; charset=utf-8"
_OTHER = "other"  # what Azure may add to its values
_EVENT_TYPES = (*KNOWN_VALUES["EventType"], _OTHER)
_STATUSES = ("Scheduled", "Started", "Advisory", _OTHER)
_SINK_GAUGES: Mapping[str, tuple[str, Callable[[SinkStatus], float]]] = {
    "backlog_events": ("Events that wait for a sink.", lambda sink: sink.backlog or 0),
    "oldest_waiting_seconds": (
        "How long the oldest event has waited.",
        lambda sink: sink.oldest_waits_seconds or 0,
    ),
    "dead_letters": ("Events that were given up.", lambda sink: sink.dead_letters or 0),
    "sink_up": ("1 while a sink accepts events.", lambda sink: sink.state == "ok"),
}


class ProcessFigures(ProcessCollector):
    """The usual `process_` metrics, without /proc/stat, which the units' sandbox hides."""

    def _boot_time(self) -> float:
        return time.time() - time.monotonic()


def describe_process(registry: CollectorRegistry) -> Gauge:
    """Register what runs, since when, and what it uses; return whether the run before was stopped."""
    build = Gauge("imds_bridge_build_info", "Always 1.", ["version"], registry=registry)
    build.labels(__version__).set(1)
    text = "When the process started, in seconds since 1970."
    Gauge("imds_bridge_start_time_seconds", text, registry=registry).set_to_current_time()
    ProcessFigures(registry=registry)
    text = "1 if the run before was stopped, 0 if it failed or was killed, or there was none."
    return Gauge("imds_bridge_previous_run_stopped", text, registry=registry)


class Meter:
    """Counts what happens; every series that is known beforehand starts at zero. Any thread may call it.

    `approved` counts the seconds from a command's arrival to IMDS's answer to its POST, `unprepared` an event of this
    VM that started although a rule's program had not succeeded, `jumped` a jump of the wall clock; `follow` notes
    whether the run before this one was stopped.
    """

    def __init__(self, registry: CollectorRegistry, sinks: Iterable[str]) -> None:
        """Prepare all series.

        Args:
            registry: where the metrics are registered.
            sinks: the names of the sinks.
        """

        def begun(metric: M, known: Mapping[str, Iterable[str]]) -> M:
            for values in product(*known.values()) if known else ():
                metric.labels(*values)
            return metric

        def counter(name: str, text: str, **known: Iterable[str]) -> Counter:
            return begun(Counter(f"imds_bridge_{name}", text, known, registry=registry), known)

        def histogram(name: str, text: str, buckets: tuple[float, ...], **known: Iterable[str]) -> Histogram:
            new = Histogram(f"imds_bridge_{name}", text, known, buckets=buckets, registry=registry)
            return begun(new, known)

        sinks = [*sinks]
        self._polls = counter("polls_total", "Requests to IMDS, by result.", result=POLL_RESULTS)
        self._poll_seconds = histogram("poll_duration_seconds", "How long IMDS took.", _REQUEST_SECONDS)
        self._changes = counter("changes_total", "Changes of Scheduled Events, by kind.", kind=CHANGES)
        text = "From the first sight of an event of this VM to its NotBefore."
        self._notices = histogram("notice_seconds", text, _NOTICE_SECONDS, type=_EVENT_TYPES)
        text = "Attempts to deliver an event."
        self._sent = counter("deliveries_total", text, sink=sinks, result=SENT_RESULTS)
        text = "From an event's creation to its delivery."
        self._waited = histogram("delivery_seconds", text, _DELIVERY_SECONDS, sink=sinks)
        text = "Losses of events, whatever their number."
        self._losses = counter("losses_total", text, reason=LOSS_REASONS)
        text = "Lost events, as far as their number is known."
        self._lost = counter("lost_events_total", text, reason=LOSS_REASONS)
        text = "Results of commands, one for each EventId."
        self._decided = Counter("imds_bridge_commands_total", text, ("outcome", "reason"), registry=registry)
        for outcome, reasons in RECEIPT_REASONS.items():
            for reason in reasons:
                self._decided.labels(outcome.lower(), reason)
        text = "From a command's arrival to IMDS's answer to the POST."
        self.approved = histogram("approval_seconds", text, _REQUEST_SECONDS).observe
        text = "Programs of auto rules that have ended, by result."
        self._prepared = counter("prepared_total", text, result=PREPARED_RESULTS)
        text = "How long programs of auto rules took that succeeded."
        self._prepare_seconds = histogram("prepare_seconds", text, _PREPARE_SECONDS)
        text = "Events of this VM that started although a rule's program had not succeeded."
        self.unprepared = counter("started_unprepared_total", text).inc
        text = "Programs that put the VM back to work that have ended, by result."
        self._recovered = counter("recovered_total", text, result=PREPARED_RESULTS)
        text = "Jumps of the wall clock by more than a minute."
        self.jumped = counter("clock_jumps_total", text).inc
        self.follow = describe_process(registry).set

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Count a request to IMDS for the document, with one of POLL_RESULTS."""
        result = "answered"
        try:
            with self._poll_seconds.time():
                yield
        except ImdsError as error:
            result = {None: "unanswered", 429: "throttled"}.get(error.status, "refused")
            raise
        finally:
            self._polls.labels(result).inc()

    def committed(self, events: Iterable[Any]) -> None:
        """Count new events of this process."""
        for event in events:
            if isinstance(event, CloudEvent):
                self._commit(event.type.removeprefix(TYPE_PREFIX).removesuffix(".v1"), event.data)

    def _commit(self, event_type: str, data: Mapping[str, Any]) -> None:
        family, _, kind = event_type.partition(".")
        if family == "scheduledevent":
            self._changes.labels(kind).inc()
            is_other = data.get("AffectsThisVm") is False
            if kind == "scheduled" and not is_other and data.get("NoticeSeconds") is not None:
                event_type = _known(data.get("EventType"), _EVENT_TYPES)
                self._notices.labels(event_type).observe(data["NoticeSeconds"])
        elif family == "approval" and kind.capitalize() in RECEIPT_REASONS:
            self._decided.labels(kind, data["Reason"]).inc()
        elif event_type == "bridge.loss":
            self._losses.labels(data["Reason"]).inc()
            self._lost.labels(data["Reason"]).inc(data["Count"] or 0)

    def sent(self, sink: str, result: str, seconds: float | None = None) -> None:
        """Count what became of one event at one sink, with one of SENT_RESULTS; `failed` is tried again.

        `seconds` are those from the event's creation to its delivery.
        """
        self._sent.labels(sink, result).inc()
        if seconds is not None:
            self._waited.labels(sink).observe(seconds)

    def prepared(self, result: str, seconds: float) -> None:
        """Count a program of an auto rule that has ended, with one of PREPARED_RESULTS."""
        self._prepared.labels(result).inc()
        if result == "succeeded":
            self._prepare_seconds.observe(seconds)

    def recovered(self, result: str) -> None:
        """Count a program that puts the VM back to work and has ended, with one of PREPARED_RESULTS."""
        self._recovered.labels(result).inc()


class StatusCollector(Collector):
    """Reads from the status, at each scrape, how things are."""

    def __init__(self, status: Callable[[], Status], outbox: KeptOutbox, clock: Clock) -> None:
        """Prepare to read.

        Args:
            status: returns what the status file shows.
            outbox: of the process.
            clock: for ages.
        """
        self._status = status
        self._outbox = outbox
        self._clock = clock
        self._began_at = clock.now()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of this moment."""
        status = self._status()
        now = self._clock.now()
        yield single("storage_available", "0 while the state cannot be written.", not status.storage_error)
        text, errors = "Failed attempts to use the state.", self._outbox.storage_errors
        yield CounterMetricFamily("imds_bridge_storage_errors", text, value=errors)
        text = "Size of the events and records in the outbox."
        yield single("outbox_bytes", text, self._outbox.size_bytes())
        text = "Size of the log beside the database, which a program that reads it lets grow."
        yield single("outbox_log_bytes", text, log_bytes(self._outbox.folder.database))
        text = "Since a loop last made progress."
        yield gauge("loop_progress_age_seconds", text, ("loop",), progress_ages())
        text = "0 while this VM's instance data cannot be read."
        yield single("instance_data_available", text, not status.identity_error)
        text = "Programs of rules and sinks that this process cannot start."
        yield single("program_faults", text, len(status.program_faults or ()))
        flow = status.flow
        if isinstance(flow, VmStatus):
            yield from _of_imds(flow, now, self._began_at)
        if isinstance(flow, VmStatus) and flow.clock_ahead_seconds is not None:
            text = "How far this VM's clock is ahead of IMDS's, negative if it is behind."
            yield single("clock_ahead_seconds", text, flow.clock_ahead_seconds or 0)
        if receiver := status.receiver:
            text = "1 while messages can be received, 0 once that fails repeatedly."
            yield single("bus_connected", text, not receiver.last_error)
            if looked_at := parse_iso(receiver.looked_at):
                text = "When what was on the bus was last received, if only nothing."
                yield single("bus_looked_timestamp_seconds", text, looked_at.timestamp())
        if isinstance(flow, ListenStatus):
            yield single("dry_run", "1 for listen --dry-run, which approves nothing.", bool(flow.dry_run))
            yield single("waiting_commands", "Commands without a decision.", flow.waiting_commands or 0)
            ages = [0.0, *(age_of(one.Since, now) or 0.0 for one in flow.out_of_work or ())]
            text = "Since a program took this VM out of work that is not put back; 0 while it works."
            yield single("out_of_work_seconds", text, max(ages))
        yield from _of_sinks(status.sinks or {}, now)
        text = "Events that wait for a sink that is not configured."
        yield gauge("unconfigured_backlog_events", text, ("sink",), status.left_sinks or {})


def _of_imds(flow: VmStatus, now: datetime, began_at: datetime) -> Iterator[Metric]:
    age_seconds = max(0.0, (now - (parse_iso(flow.last_good_at) or began_at)).total_seconds())
    text = "Since IMDS's last valid answer, or the start if there was none."
    yield single("imds_last_good_answer_age_seconds", text, age_seconds)
    if not isinstance(flow, ForwardStatus) or not (document := flow.document):
        return
    if isinstance(incarnation := document.get("DocumentIncarnation"), int):
        yield single("document_incarnation", "DocumentIncarnation of the document.", incarnation)
    yield _events(document)
    vm, due = flow.vm or "", now + timedelta(seconds=IMMINENT_SECONDS)
    own = [one for one in read_document(document).events.values() if is_among(vm, one.resources)]
    types = [event.raw.get("EventType") for event in own if (event.not_before or now) <= due]
    imminent = Tally(_known(one, _EVENT_TYPES) for one in types)
    text = "Events of this VM that have started or may within 2 minutes."
    yield gauge("imminent_events", text, ("type",), {one: imminent[one] for one in _EVENT_TYPES})


def _events(document: Mapping[str, Any]) -> Metric:
    counts = Tally(
        (_known(event.get("EventType"), _EVENT_TYPES), _known(event.get("EventStatus"), _STATUSES))
        for event in document.get("Events") or ()
        if isinstance(event, dict)
    )
    known = {pair: counts[pair] for pair in product(_EVENT_TYPES, _STATUSES)}
    return gauge("scheduled_events", "Events in the document.", ("type", "status"), known)


def _known(value: object, known: Iterable[str]) -> str:
    return value if isinstance(value, str) and value in known else _OTHER


def _of_sinks(sinks: Mapping[str, SinkStatus], now: datetime) -> Iterator[Metric]:
    for name, (text, value) in _SINK_GAUGES.items():
        yield gauge(name, text, ("sink",), {sink: value(shown) for sink, shown in sinks.items()})
    notices = {
        name: (until - now).total_seconds()
        for name, sink in sinks.items()
        if (until := parse_iso(sink.notice_until))
    }
    text = "Until the NotBefore of the most urgent notice that waits; absent if none does."
    yield gauge("undelivered_notice_seconds", text, ("sink",), notices)
    retries = {
        name: max(0.0, (at - now).total_seconds()) if (at := parse_iso(sink.next_retry_at)) else 0.0
        for name, sink in sinks.items()
    }
    yield gauge("next_retry_seconds", "Until the next try, 0 if none is due.", ("sink",), retries)


def single(name: str, text: str, value: float) -> Metric:
    """Make a gauge without labels."""
    return GaugeMetricFamily(f"imds_bridge_{name}", text, value=value)


def gauge(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    """Make a gauge of values, by the value of its one label, or by those of all its labels."""
    family = GaugeMetricFamily(f"imds_bridge_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


@dataclass(eq=False)
class MetricsServer:
    """Serves `/metrics`, `/livez` and `/readyz` from threads of its own.

    Args:
        listen: the address, as configured; port 0 takes a free one.
        role: which process it is; a health check may reach another one on the same port.
        next_port: whether another port is taken where another process has this one.
        registry: has the metrics of what happens.
        clock: for ages.

    Attributes:
        error: why nothing is served.
    """

    listen: str
    _: KW_ONLY
    role: str
    next_port: bool = True
    registry: CollectorRegistry
    clock: Clock
    error: str | None = None
    _server: ThreadingWSGIServer | None = None

    @property
    def port(self) -> int:
        """The port in use, 0 if there is none."""
        return self._server.server_port if self._server else 0

    @property
    def address(self) -> str:
        """The address and port in use, "" if there is none."""
        return f"{self.listen.rpartition(':')[0]}:{self.port}" if self._server else ""

    def start(self, status: Callable[[], Status], outbox: KeptOutbox | None = None, last: str = "") -> None:
        """Serve until `close`; if the address cannot be used, only note and log that: events matter more.

        Args:
            status: returns what the status file shows.
            outbox: of the process; without one, the registry has the metrics of how things are.
            last: where an earlier run of this process served, which `forward` does not insist on.
        """
        self._status = status
        if outbox:
            self.registry.register(StatusCollector(status, outbox, self.clock))
        places = addresses(self.listen, "" if self.role == "forward" else last)
        for address in places if self.next_port else [self.listen]:
            try:
                self._server = _serve(address, self._answer)
            except OSError as error:
                self.error = f"there are no metrics: {address} cannot be listened on: {error.strerror}"
                if error.errno == errno.EADDRINUSE:
                    continue  # another process may have the same configuration
            else:
                self.error = None
            break
        if not self._server:
            log.error("%s", self.error)
            return
        log.info("metrics are served on %s", self.address, extra={"port": self.port})
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, request: dict[str, Any], start: Any) -> Iterable[bytes]:
        path = request["PATH_INFO"]
        if path == "/metrics":
            metrics: Iterable[bytes] = make_wsgi_app(self.registry)(request, start)
            return metrics
        if self.role not in parse_qs(request["QUERY_STRING"]).get("role", [self.role]):
            status, kind, body = "404 Not Found", _TEXT, f"this port is {self.role}'s\n"
        elif path == "/livez":
            stalled = [f"the loop {name} makes no progress" for name in stalled_threads()]
            status, kind, body = self._health(stalled)
        elif path == "/readyz":
            status, kind, body = self._health(find_unready(self._status(), self.clock.now()))
        else:
            status, kind, body = "404 Not Found", _TEXT, "expected /metrics, /livez or /readyz\n"
        start(status, [("Content-Type", kind)])
        return [b"" if request["REQUEST_METHOD"] == "HEAD" else body.encode()]

    def _health(self, reasons: list[str]) -> tuple[str, str, str]:
        body = json.dumps({"ok": not reasons, "role": self.role, "reasons": reasons}, ensure_ascii=False)
        return "503 Service Unavailable" if reasons else "200 OK", _JSON, f"{body}\n"


def _serve(listen: str, answer: Any) -> ThreadingWSGIServer:
    family, (host, port) = socket_address(listen)

    class Server(ThreadingWSGIServer):
        address_family = family
        allow_reuse_address = sys.platform != "win32"  # there, several processes could have the port

        def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
            log.debug("a request of %s failed", client_address, exc_info=True)  # mostly, its client has gone

    return make_server(host, port, answer, Server, _Handler)


class _Handler(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Log no request: a probe comes every few seconds."""
