"""What tests over the lab's Service Bus share: a bus, a VM's IMDS, the real listener on threads, and a sender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage

from bridge.approvals.listener import Listener
from bridge.azure.bus_receiver import BusReceiver
from bridge.config.approvals import ApprovalSettings, PolicySettings
from bridge.config.base import Secret
from bridge.config.models import ImdsSettings
from bridge.events.builder import Reporter
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.imds.instance import approval_session
from bridge.lab.imds import EVENTS_PATH
from bridge.process.identity import VmIdentity
from bridge.process.parts import NoMeter
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from tests.support.forward import parts_of
from tests.support.imds_lab import ImdsLab
from tests.support.listener import RECEIPTS, command_body
from tests.support.only import only
from tests.support.outbox import open_outbox
from tests.support.process import LIMIT_SECONDS, wait_until

if TYPE_CHECKING:
    from tests.support.servicebus import ServiceBusLab

T = TypeVar("T")

QUEUE = "approvals"
FLEET = "fleet"  # session-enabled
TOPIC = "receipts"
SUBSCRIPTION = "audit"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"  # noqa: S105 - the vector of the standard
ANY: Mapping[str, Any] = {"allow": [{}]}

_LIVES = {"LockDuration": "PT1M", "MaxDeliveryCount": 1000, "DefaultMessageTimeToLive": "PT1H"}


def bus_config(**changes: Any) -> Mapping[str, Any]:
    """Describe a namespace; `changes` are properties of the queues."""
    from tests.support.servicebus import entities  # noqa: PLC0415 - unit tests do without the lab

    properties = {**_LIVES, **changes}
    return entities(
        queues=[
            {"Name": QUEUE, "Properties": properties},
            {"Name": FLEET, "Properties": {**properties, "RequiresSession": True}},
        ],
        topic=TOPIC,
        subscriptions=[{"Name": SUBSCRIPTION, "Properties": properties}],
        DefaultMessageTimeToLive="PT1H",
    )


class Sender:
    """Puts messages on a queue or topic with the real SDK."""

    def __init__(self, bus: ServiceBusLab, entity: str = QUEUE) -> None:
        self._client = ServiceBusClient.from_connection_string(bus.connection_string, retry_total=3)
        self._sender = self._client.get_queue_sender(entity)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()
        self._client.close()

    def open(self) -> None:
        """Open the link now."""
        self._sender.create_message_batch()

    def send_one(self, message: ServiceBusMessage | AmqpAnnotatedMessage) -> None:
        """Send a message in a transfer of its own."""
        self._sender.send_messages(message, timeout=LIMIT_SECONDS)

    def send(self, *messages: ServiceBusMessage | AmqpAnnotatedMessage) -> None:
        """Send in as few batches as possible."""
        waiting = list(messages)
        while waiting:
            batch = self._sender.create_message_batch()
            sent = 0
            try:
                for message in waiting:
                    batch.add_message(message)
                    sent += 1
            except ValueError:
                assert sent, "a message is too large"
            self._sender.send_messages(batch, timeout=LIMIT_SECONDS)
            waiting = waiting[sent:]


def command(
    *event_ids: str,
    id: str | None = None,  # noqa: A002 - the attribute is called so
    session: str | None = None,
    properties: Mapping[str, Any] | None = None,
    **data: Any,
) -> ServiceBusMessage:
    """Make a command as a CloudEvent; `data` adds Vm, Reason, ExpiresAt and so on."""
    command_id = id or str(uuid4())
    body = command_body(*event_ids, id=command_id, **data)
    return message(body, message_id=command_id, session_id=session, properties=properties)


def message(
    body: Any,
    *,
    message_id: str | None = None,
    session_id: str | None = None,
    properties: Mapping[Any, Any] | None = None,
) -> ServiceBusMessage:
    """Make a message with any body."""
    return ServiceBusMessage(
        body,
        message_id=message_id,
        session_id=session_id,
        application_properties=dict(properties or {}),
    )


class BusRig:
    """The real listener on the lab's bus and the lab's IMDS, on threads of this process.

    It can be stopped and started again on the same state, as a process that restarts.
    """

    running = 0

    def __init__(
        self,
        folder: Path,
        imds: ImdsLab,
        bus: ServiceBusLab,
        *,
        vm: str = "web-0",
        policy: Mapping[str, Any] = ANY,
        queue: str = QUEUE,
        api_version: str = "2020-07-01",
        connection_string: str = "",
        **approvals: Any,
    ) -> None:
        self.folder = folder
        self.clock = Clock()
        self._imds_settings = ImdsSettings(endpoint=imds.url(vm), api_version=api_version)
        self.settings = ApprovalSettings(
            connection_string=Secret(connection_string or bus.connection_string),
            queue="" if "topic" in approvals else queue,
            policy=PolicySettings(**policy),
            **approvals,
        )
        self.stopping = Stop()
        self._threads: list[Thread] = []
        self._events: list[dict[str, Any]] = []
        self.is_open = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start both threads on the state as it is."""
        self.stopping = Stop()
        BusRig.running += 1
        sinks = {"audit": (Filter(types=("io.imdsbridge.*",)), True)}
        self.outbox = open_outbox(self.folder, sinks=sinks, clock=self.clock)
        self.is_open = True
        self._imds = imds = ImdsClient(self._imds_settings, clock=self.clock)
        identity = VmIdentity(
            "listen",
            imds=imds,
            outbox=self.outbox,
            clock=self.clock,
            make_reporter=partial(Reporter, session=self.settings.session),
            has_instance_data=not self._imds_settings.vm_name,
        )
        identity.settle(lambda _: True)
        self.commands = BusReceiver(
            self.settings,
            what="commands",
            session=lambda: approval_session(self.settings.session, identity.vm),
            clock=self.clock,
            stop=self.stopping,
        )
        parts = parts_of(
            imds=imds,
            outbox=self.outbox,
            clock=self.clock,
            show_status=lambda: None,
            stop=self.stopping,
            identity=identity,
            meter=NoMeter(),
        )
        self.listener = Listener(parts, self.settings, self.commands, dry_run=False)
        self._threads = [start_thread("decide", self.listener.run), start_thread("bus", self.commands.run)]
        return self

    def is_deciding(self) -> bool:
        """Return whether the listener's thread runs: it ends once the VM has another name."""
        return self._threads[0].is_alive()

    def stop(self) -> None:
        """Stop as the process does."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(LIMIT_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not stop"
        self.events()
        self.is_open = False
        self.outbox.close()
        self._imds.close()
        BusRig.running -= 1
        if not BusRig.running:
            wait_until(no_sdk_thread_runs)

    def events(self) -> list[dict[str, Any]]:
        """Return every event that was committed so far, also before a restart, repeated ones too."""
        while self.is_open:
            page = self.outbox.pending("audit", 1000)
            if not page:
                break
            self.outbox.acknowledge("audit", page)
            self._events += [event.envelope for event in page]
        return self._events

    def receipts(self) -> list[dict[str, Any]]:
        """Return the receipts so far, in their order."""
        return [event for event in self.events() if event["type"] in RECEIPTS]

    def wait_for(
        self, predicate: Callable[[list[dict[str, Any]]], T | None], *, timeout_seconds: float = LIMIT_SECONDS
    ) -> T:
        """Wait until the predicate holds of the receipts."""
        return wait_until(
            lambda: predicate(self.receipts()), timeout_seconds=timeout_seconds, describe=self.receipts
        )

    def receipts_of(self, *ids: str) -> list[dict[str, Any]]:
        """Wait for receipts of each of the commands; return them."""

        def found(receipts: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
            by_command = [[one for one in receipts if one.get("causationid") == name] for name in ids]
            return [one for several in by_command for one in several] if all(by_command) else None

        return self.wait_for(found) or []

    def receipt_of(self, command_id: str) -> dict[str, Any]:
        """Wait for the only receipt of a command; return its data."""
        return dict(only(self.receipts_of(command_id))["data"])


def no_sdk_thread_runs() -> bool:
    """Return whether the SDK has closed its sockets; a process that ends does not wait for that."""
    return not any(
        thread.name in ("servicebus-commands", "servicebus-events") for thread in threading.enumerate()
    )


def wait_settled(bus: ServiceBusLab, queue: str = QUEUE) -> None:
    """Wait until nothing is on the queue any more."""
    wait_until(lambda: bus.entity(queue).counts.active == 0, describe=lambda: bus.entity(queue).messages)


def posts(imds: ImdsLab) -> list[dict[str, Any]]:
    """Return the bodies of the approvals that IMDS was sent, whatever it answered."""
    return [
        dict(request.json())
        for request in imds.requests()
        if request.method == "POST" and request.path.startswith(EVENTS_PATH)
    ]


def reasons(receipts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the reasons of receipts in their order."""
    return [receipt["data"]["Reason"] for receipt in receipts]
