"""Commands a second through decision, records, receipt and settlement, against bare receive and complete."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from bridge.approvals.programs import Stays
from bridge.azure.bus_receiver import RECEIVE_MESSAGES, BusReceiver
from bridge.config.approvals import ApprovalSettings, PolicySettings, RuleSettings
from bridge.config.base import Secret
from bridge.config.models import Config, ImdsSettings
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.imds.client import ImdsClient
from bridge.imds.document import parse_document
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock, iso_utc
from bridge.service.answers import STAY
from bridge.service.composition import NoMeter
from bridge.service.identity import VmIdentity, approval_session
from bridge.service.listener import Listener
from bridge.sinks.servicebus import ServiceBusSink
from tests.bench import bus, parts, simulators
from tests.bench.measure import BenchError, Progress, Row
from tests.support.forward import parts_of
from tests.support.memory_sink import MemorySink
from tests.support.process import wait_until

COMMANDS = 1_000  # counted, of
SENT = 1_200
EVENTS = 5  # that they name
WARM_UP = (
    100  # before them: the first waits for the connection; the last for more, which the SDK does for 0.2 s
)
FILL = 100
TYPE = "io.imdsbridge.command.approve.v1"
HEARTBEAT = "io.imdsbridge.bridge.heartbeat.v1"
RECEIPT = "io.imdsbridge.approval.accepted.v1"


class _Task(NamedTuple):
    folder: Path
    address: str
    imds_url: str


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Fill the queue and empty it through the listener, fill it and empty it barely, again and again."""
    with bus.lab() as lab, simulators.imds() as imds:
        event_ids = [
            imds("schedule", event_type="Freeze", resources=[simulators.VM], notice_seconds=86_400)
            for _ in range(EVENTS)
        ]
        address, url = lab("address"), imds("base_url")

        def prepare(number: int) -> _Task:
            check_empty()
            fill(address, event_ids)
            return _Task(folder / f"commands{number}", address, url)

        def check_empty() -> None:
            if left := lab("left", bus.SESSION_QUEUE):
                raise BenchError(f"{left} of {SENT} commands were not completed")

        row = bus.compare(
            (_decided, _bare),
            prepare,
            progress,
            name="commands a second / the bare SDK's receive and complete",
            limit=0.4,
            how=f"{COMMANDS:,} from a session, at most {RECEIVE_MESSAGES} at a time; new ids, {EVENTS} events "
            "approved before; to the last settlement and receipt taken by a sink in memory",
        )
        check_empty()
        if imds("approved"):
            raise BenchError("an event was POSTed although the records have it")
        bus.check(lab)
    return [row]


def fill(address: str, event_ids: Sequence[str]) -> None:
    """Put commands into the session."""
    messages = [command(event_ids[number % len(event_ids)]) for number in range(SENT)]
    with (
        ServiceBusClient.from_connection_string(address, retry_total=0) as client,
        client.get_queue_sender(bus.SESSION_QUEUE) as sender,
    ):
        for begin in range(0, SENT, FILL):
            sender.send_messages(messages[begin : begin + FILL], timeout=bus.TRY_SECONDS)


def command(event_id: str) -> ServiceBusMessage:
    """Make a command as `imds-bridge approve` does, with an id of its own."""
    envelope = {
        "specversion": "1.0",
        "id": str(uuid4()),
        "source": "urn:imds-bridge:approve:bench",
        "type": TYPE,
        "time": iso_utc(datetime.now(UTC)),
        "datacontenttype": "application/json",
        "data": {"EventIds": [event_id], "RequestedBy": "someone@bench", "Reason": "the benchmark"},
    }
    return ServiceBusMessage(
        json.dumps(envelope).encode("ascii"),
        content_type=CONTENT_TYPE,
        message_id=str(envelope["id"]),
        subject=TYPE,
        session_id=simulators.VM,
        application_properties={"cloudEvents_type": TYPE, "cloudEvents_id": str(envelope["id"])},
    )


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


def _decided(task: _Task) -> bus.Done:
    """Put the second flow together as the composition root does, in this process."""
    clock, stop, sink = Clock(), Stop(), _Receipts()
    settings = ApprovalSettings(
        connection_string=Secret(task.address),
        queue=bus.SESSION_QUEUE,
        session="{vm}",
        policy=PolicySettings(allow=(RuleSettings(event_type=("Freeze",)),)),
    )
    config = Config(state_dir=task.folder, imds=ImdsSettings(endpoint=task.imds_url), approvals=settings)
    outbox = parts.open_outbox(task.folder, parts.NAME)
    imds = ImdsClient(config.imds, clock=clock)
    stays, document = Stays(lambda _: None), parse_document(imds.document())
    stays.update(document, read_at=clock.monotonic())
    for key in document.events:
        stays.approve(key, at=clock.now())
    outbox.commit([], records={(STAY, key): stays.record(key) for key in document.events})
    identity = VmIdentity(config, "listen", imds=imds, outbox=outbox, clock=clock)
    received = BusReceiver(
        settings,
        what="commands",
        session=lambda: approval_session(settings.session, identity.vm),
        clock=clock,
        stop=stop,
    )
    built = parts_of(imds=imds, outbox=outbox, clock=clock, stop=stop, identity=identity, meter=NoMeter())
    listener = Listener(built, settings, received)
    sender = parts.dispatcher(parts.NAME, sink, outbox)
    with bus.completions() as border:
        threads = [
            start_thread("decide", listener.run),
            start_thread("commands", received.run),
            start_thread("sink", sender.run),
        ]
        wait_until(
            lambda: len(border.at) >= SENT and len(sink.at) >= SENT,
            timeout_seconds=bus.ROUND_SECONDS,
            describe=lambda: f"{len(border.at)} of {SENT} commands are settled",
            apart_seconds=0.05,
        )
        stop.set()
        sender.stop_when_drained()
        for thread in threads:
            thread.join(timeout=5)
    outbox.close()
    imds.close()
    if len(border.at) != SENT or len(sink.at) != SENT or sink.others != {HEARTBEAT}:
        raise BenchError(f"{len(border.at)} settlements, {len(sink.at)} receipts and {sink.others}")
    return _done(border, sink.at[WARM_UP + COMMANDS - 1])


def _bare(task: _Task) -> bus.Done:
    with (
        bus.completions() as border,
        ServiceBusClient.from_connection_string(task.address, retry_total=0) as client,
        client.get_queue_receiver(bus.SESSION_QUEUE, session_id=simulators.VM) as receiver,
    ):
        while len(border.at) < SENT:
            messages = receiver.receive_messages(max_message_count=RECEIVE_MESSAGES, max_wait_time=5)
            if not messages:
                raise BenchError(f"only {len(border.at)} of {SENT} messages came")
            for message in messages:
                receiver.complete_message(message)
    return _done(border, 0.0)


def _done(border: bus.Border, received_at: float) -> bus.Done:
    """Rate what is counted, until it was settled and, at `received_at`, the last receipt for it had come."""
    for noted in (border.at, border.cpu, border.counts):
        del noted[WARM_UP + COMMANDS :]
    return bus.Done(border.rate(WARM_UP, until=received_at), border.cpu_us(WARM_UP))
