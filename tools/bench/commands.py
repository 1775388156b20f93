"""Commands a second through decision, records, receipt and settlement, against bare receive and complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from azure.servicebus import ServiceBusClient, ServiceBusReceiver

from bridge.approvals import receipts
from bridge.approvals.state import EventState, State, Stay
from bridge.azure.bus_receiver import RECEIVE_MESSAGES
from bridge.config.models import ImdsSettings
from bridge.events.model import StoredEvent
from bridge.imds.client import ImdsClient
from bridge.imds.document import parse_document
from bridge.runtime.threads import start_thread
from bridge.runtime.time import Clock
from bridge.sinks.servicebus import ServiceBusSink
from tests.support.bus import BusRig
from tests.support.memory_sink import MemorySink
from tests.support.process import wait_until
from tools.bench import bus, parts, simulators
from tools.bench.measure import BenchError, Progress, Row, apart

ROUNDS = 5
ROUND_SECONDS = 120.0  # only keeps a round from hanging
COMMANDS = 1_000  # counted, of
SENT = 1_200
# Before them: the first waits for the connection; the last for more, which the SDK does for 0.2 s.
WARM_UP = 100
EVENTS = 5  # that they name
FILL = 100
SINK = "audit"  # of the rig
HEARTBEAT = "io.imdsbridge.bridge.heartbeat.v1"
RECEIPT = "io.imdsbridge.approval.accepted.v1"


class _Task(NamedTuple):
    folder: Path
    address: str
    imds_url: str


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Fill the queue and empty it through the listener, fill it and empty it barely, again and again."""
    rates: dict[Callable[[_Task], float], list[float]] = {_decided: [], _bare: []}
    with bus.lab() as lab, simulators.imds() as imds:
        event_ids = [simulators.freeze(imds) for _ in range(EVENTS)]
        for number in range(ROUNDS):
            progress.begin(f"commands: round {number + 1} of {ROUNDS}")
            task = _Task(folder / str(number), lab("connection_string"), imds("url", simulators.VM))
            for way in rates if number % 2 == 0 else reversed(rates):
                _fill(task.address, event_ids)
                rates[way].append(apart(way, task, limit_seconds=ROUND_SECONDS))
                if (left := lab("counts", bus.QUEUE)).active or left.dead_letters:
                    raise BenchError(f"not all of {SENT} commands were completed: {left}")
        if imds("approvals"):
            raise BenchError("an event was POSTed although the records have it")
    ours, theirs = rates.values()
    return [
        Row(
            "commands a second / the bare SDK's receive and complete",
            median(one / other for one, other in zip(ours, theirs, strict=True)),
            "x",
            f"median of {ROUNDS} rounds, in turn; medians {median(ours):,.0f} and {median(theirs):,.0f}, "
            f"{COMMANDS:,} from a session, at most {RECEIVE_MESSAGES} at a time; new ids, {EVENTS} events "
            "approved before; to the last settlement and receipt taken by a sink in memory",
            limit=0.4,
            at_least=True,
        )
    ]


def _fill(address: str, event_ids: Sequence[str]) -> None:
    """Put commands into the session."""
    messages = [bus.approval(event_ids[number % len(event_ids)]) for number in range(SENT)]
    with bus.sending(address) as sender:
        for begin in range(0, SENT, FILL):
            sender.send_messages(messages[begin : begin + FILL], timeout=bus.TRY_SECONDS)


@contextmanager
def _completions() -> Iterator[list[float]]:
    """Date every `complete_message` of this process, whoever calls it (time.monotonic())."""
    at: list[float] = []
    real = ServiceBusReceiver.complete_message

    def complete(self: ServiceBusReceiver, message: Any) -> None:
        real(self, message)
        at.append(time.monotonic())

    with patch.object(ServiceBusReceiver, "complete_message", complete):
        yield at


class _Receipts(MemorySink):
    """Takes as many at once as the sink to Service Bus does; dates each receipt."""

    def __init__(self) -> None:
        super().__init__(max_batch=ServiceBusSink.max_batch)
        self.at: list[float] = []
        self.others: set[str] = set()

    def send(self, events: Sequence[StoredEvent]) -> None:
        super().send(events)
        for event in events:
            if event.type == RECEIPT and b'"already_approved"' in event.body:
                self.at.append(time.monotonic())
            else:
                self.others.add(event.type)


def _decided(task: _Task) -> float:
    """Let the listener decide all commands, and a sink in memory take the receipts; return the rate."""
    _approve_before(task)
    lab: Any = SimpleNamespace(url=lambda _: task.imds_url, connection_string=task.address)
    policy, sink = {"allow": [{"event_type": ["Freeze"]}]}, _Receipts()
    with (
        _completions() as at,
        BusRig(task.folder, lab, lab, policy=policy, queue=bus.QUEUE, session="{vm}") as rig,
    ):
        sender = parts.dispatcher(SINK, sink, rig.outbox)
        thread = start_thread("sink", sender.run)
        wait_until(
            lambda: len(at) >= SENT and len(sink.at) >= SENT,
            timeout_seconds=ROUND_SECONDS,
            describe=lambda: f"{len(at)} of {SENT} commands are settled",
            apart_seconds=0.05,
        )
        sender.stop_when_drained()
        thread.join(timeout=5)
    if len(at) != SENT or len(sink.at) != SENT or sink.others != {HEARTBEAT}:
        raise BenchError(f"{len(at)} settlements, {len(sink.at)} receipts and {sink.others}")
    return _rate(at, sink.at)


def _approve_before(task: _Task) -> None:
    """Leave a state that has each event's approval."""
    clock = Clock()
    outbox, imds = (
        parts.open_outbox(task.folder),
        ImdsClient(ImdsSettings(endpoint=task.imds_url), clock=clock),
    )
    document, stay = parse_document(imds.document()), Stay(since=0.0, approved_at=clock.now(), is_posted=True)
    events = {key: EventState(event=event, stay=stay) for key, event in document.events.items()}
    known = {**State(events=events).dump(lambda _: True), "incarnation": document.incarnation}
    outbox.commit([], records={(receipts.EVENTS, receipts.KNOWN): known})
    outbox.close()
    imds.close()


def _bare(task: _Task) -> float:
    with (
        _completions() as at,
        ServiceBusClient.from_connection_string(task.address, retry_total=0) as client,
        client.get_queue_receiver(bus.QUEUE, session_id=simulators.VM) as receiver,
    ):
        while len(at) < SENT:
            messages = receiver.receive_messages(max_message_count=RECEIVE_MESSAGES, max_wait_time=5)
            if not messages:
                raise BenchError(f"only {len(at)} of {SENT} messages came")
            for message in messages:
                receiver.complete_message(message)
    return _rate(at, at)


def _rate(settled_at: Sequence[float], answered_at: Sequence[float]) -> float:
    """Return what is counted, until it was settled and its last receipt had come."""
    last = WARM_UP + COMMANDS - 1
    return COMMANDS / (max(settled_at[last], answered_at[last]) - settled_at[WARM_UP - 1])
