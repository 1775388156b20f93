"""The Function app that stores an audit trail: called as its host calls it, with messages of the lab's bus.

The table is Azurite's, spoken to by the real SDK over loopback.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from azure.core.credentials import AzureNamedKeyCredential
from azure.data.tables import TableServiceClient
from azure.functions.meta import Datum
from azure.functions.servicebus import ServiceBusMessageInConverter
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
)

from bridge.config.base import Secret
from bridge.events.model import StoredEvent
from bridge.formats.samples import samples
from bridge.sinks.servicebus import ServiceBusSink
from tests.support.bus import SECRET
from tests.support.imds_lab import ImdsLab
from tests.support.npm import node_modules
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, environment, stored_event, wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.sink import TOPIC, entities, settings

pytestmark = pytest.mark.timeout(600)  # npm installs Azurite

HOME = ROOT / "infra" / "consumers" / "function"
SUBSCRIPTION = "function"
PATH = f"{TOPIC}/Subscriptions/{SUBSCRIPTION}"
DELIVERIES = 10
ACCOUNT = "lab"
KEY = "bm9ib2R5J3Mga2V5"  # not a real key
STANDARD_BYTES = 256 * 1024

# Azurite, which also prints its port.
AZURITE = """
const { Server } = require("net");
const listen = Server.prototype.listen;
Server.prototype.listen = function (...given) {
  this.once("listening", () => console.log("port " + this.address().port));
  return listen.apply(this, given);
};
require("azurite/dist/src/table/main.js");
"""


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    modules = node_modules("azurite")
    folder = tmp_path_factory.mktemp("azurite")
    options = ["--tableHost", "127.0.0.1", "--tablePort", "0", "--inMemoryPersistence", "--disableTelemetry"]
    extra = {"NODE_PATH": str(modules), "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
    process = subprocess.Popen(
        ["node", "-e", AZURITE, "azurite", *options, "--skipApiVersionCheck", "--silent"],  # noqa: S607
        cwd=folder,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            assert process.stdout
            line = ""
            while not line.startswith("port "):
                line = process.stdout.readline()
                assert line, f"azurite ended with {process.wait(LIMIT_SECONDS)}"
            yield f"http://127.0.0.1:{int(line.removeprefix('port '))}/{ACCOUNT}"
        finally:
            process.kill()


@pytest.fixture
def service(azurite: str) -> Iterator[TableServiceClient]:
    with TableServiceClient(azurite, credential=AzureNamedKeyCredential(ACCOUNT, KEY)) as client:
        yield client


def load() -> ModuleType:
    """Load the app, as the worker does at its start."""
    spec = importlib.util.spec_from_file_location("function_app", HOME / "function_app.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def app(service: TableServiceClient, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the app, with a table for this test."""
    module = load()
    monkeypatch.setattr(module, "TABLE", f"t{uuid4().hex}")
    table = module.AuditTable(service)
    monkeypatch.setattr(module, "audit_table", lambda: table)
    return module


@pytest.fixture
def lab() -> Iterator[ServiceBusLab]:
    properties = {"MaxDeliveryCount": DELIVERIES, "LockDuration": "PT1M"}
    given = entities(subscriptions=[{"Name": SUBSCRIPTION, "Properties": properties}])
    with ServiceBusLab(given) as bus:
        yield bus


class Host:
    """The relevant part of the Functions host: a peek-lock receiver that completes or abandons."""

    def __init__(self, app: ModuleType, receiver: ServiceBusReceiver) -> None:
        (function,) = app.app.get_functions()
        self._run = function.get_user_function()
        self._receiver = receiver
        self.failures: list[Exception] = []

    def take(self, count: int) -> list[ServiceBusReceivedMessage]:
        """Receive this many messages and settle none."""
        messages: list[ServiceBusReceivedMessage] = []
        while len(messages) < count:
            more = self._receiver.receive_messages(count - len(messages), max_wait_time=LIMIT_SECONDS)
            assert more, f"{len(messages)} of {count} messages came"
            messages += more
        return messages

    def call(self, message: ServiceBusReceivedMessage) -> None:
        """Call the function with a message as the library decodes it."""
        self._run(received(message))

    def handle(self, count: int) -> None:
        """Receive this many messages one by one, call the function with each, and settle it."""
        for _ in range(count):
            (message,) = self.take(1)
            try:
                self.call(message)
            except Exception as error:  # noqa: BLE001 - as the host does
                self.failures.append(error)
                self._receiver.abandon_message(message)
            else:
                self._receiver.complete_message(message)


@contextmanager
def hosting(app: ModuleType, lab: ServiceBusLab) -> Iterator[Host]:
    with (
        ServiceBusClient.from_connection_string(lab.connection_string) as client,
        client.get_subscription_receiver(TOPIC, SUBSCRIPTION) as receiver,
    ):
        yield Host(app, receiver)


def received(message: ServiceBusReceivedMessage) -> Any:
    """Decode a message with the library's converter, as the worker does."""
    names = {
        str(name, "utf-8") if isinstance(name, bytes) else name: str(value, "utf-8")
        if isinstance(value, bytes)
        else value
        for name, value in (message.application_properties or {}).items()
    }
    properties = {
        "EnqueuedTimeUtc": message.enqueued_time_utc.isoformat() if message.enqueued_time_utc else None,
        "MessageId": message.message_id,
        "Subject": message.subject,
        "ContentType": message.content_type,
        "CorrelationId": message.correlation_id,
        "ApplicationProperties": names,
        "UserProperties": names,
    }
    metadata = {name: Datum(json.dumps(value), "json") for name, value in properties.items()}
    return ServiceBusMessageInConverter.decode(
        Datum(b"".join(message.body), "bytes"), trigger_metadata=metadata
    )


def publish(lab: ServiceBusLab, events: Sequence[StoredEvent], secret: str = "") -> None:
    """Publish as imds-bridge does, signed if there is a secret."""
    sink = ServiceBusSink(settings(lab, topic=TOPIC), signing_secrets=Secret(secret) if secret else None)
    try:
        sink.send(events)
    finally:
        sink.close()


def send(lab: ServiceBusLab, *bodies: bytes) -> None:
    with (
        ServiceBusClient.from_connection_string(lab.connection_string) as client,
        client.get_topic_sender(TOPIC) as sender,
    ):
        for body in bodies:
            sender.send_messages(ServiceBusMessage(body), timeout=LIMIT_SECONDS)


def rows(app: ModuleType, service: TableServiceClient) -> list[dict[str, Any]]:
    return [dict(row) for row in service.get_table_client(app.TABLE).list_entities()]


def body_of(row: dict[str, Any]) -> str:
    """Return a row's whole body."""
    count = sum(name.startswith("Body") for name in row)
    return "".join(row[f"Body{number}"] for number in range(count))


def now() -> datetime:
    return datetime.now(UTC)


def test_an_event_of_every_type_is_kept_whole_with_columns_to_look_for(
    app: ModuleType, service: TableServiceClient, lab: ServiceBusLab
) -> None:
    events = samples(now())
    publish(lab, events)
    with hosting(app, lab) as host:
        host.handle(len(events))
        assert host.failures == []
    kept = {row["id"]: row for row in rows(app, service)}
    assert {event.id: event.body.decode() for event in events} == {
        id_: body_of(row) for id_, row in kept.items()
    }
    for event in events:
        row, envelope = kept[event.id], event.envelope
        given = {name: envelope[name] for name in app.ATTRIBUTES if name in envelope}
        assert {name: row[name] for name in app.ATTRIBUTES if name in row} == given
        assert row["RowKey"] == event.id
        assert row.get("EventType") == envelope["data"].get("EventType")
    assert lab.entity(PATH).counts.completed == len(events)


def test_with_secrets_each_receipt_has_a_column_for_what_is_wrong_with_its_signature(
    app: ModuleType, service: TableServiceClient, lab: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts = [event for event in samples(now()) if ".approval." in event.type][:3]
    ours, theirs = SECRET, f"whsec_{'A' * 32}"
    monkeypatch.setenv("SIGNING_SECRETS", f"whsec_{'B' * 32} {ours}")
    for event, secret in zip(receipts, (ours, theirs, ""), strict=True):
        publish(lab, [event], secret)
    with hosting(app, lab) as host:
        host.handle(len(receipts))
        assert host.failures == []
    faults = {row["id"]: row["SignatureFault"] for row in rows(app, service)}
    assert [faults[event.id] for event in receipts] == [
        "",
        "the signature is by none of the known secrets",
        "it is not signed",
    ]


def test_what_the_real_forwarder_sees_is_kept_and_its_completeness_can_be_checked(
    app: ModuleType, service: TableServiceClient, lab: ServiceBusLab, tmp_path: Path
) -> None:
    with ImdsLab() as imds, hosting(app, lab) as host:
        given = {
            "stop_seconds": LIMIT_SECONDS,
            "imds": {"endpoint": imds.url("web-0"), "poll_seconds": 0.3},
            "sinks": {
                "bus": {"kind": "servicebus", "connection_string": lab.connection_string, "topic": TOPIC}
            },
        }
        with Forward(tmp_path, given) as forward:
            event_id = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
            wait_until(
                lambda: any(event_id.encode() in one.body for one in lab.entity(PATH).messages),
                describe=forward.__repr__,
            )
            assert forward.stop() == 0, forward
        host.handle(lab.entity(PATH).counts.active)
        assert host.failures == []
    kept = rows(app, service)
    numbers = sorted(int(row["reporterseq"]) for row in kept if "reporterseq" in row)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    documents = [json.loads(body_of(row)) for row in kept if row["type"].endswith("document.changed.v1")]
    listed = {name for document in documents for name in document["data"]["CloudEventIds"]}
    assert listed
    assert listed <= {row["id"] for row in kept}


def test_calls_at_the_same_time_with_the_same_messages_keep_each_event_once(
    app: ModuleType, service: TableServiceClient, lab: ServiceBusLab
) -> None:
    events = samples(now())
    publish(lab, events)
    with hosting(app, lab) as host, ThreadPoolExecutor(8) as pool:
        messages = host.take(len(events)) * 4
        list(pool.map(host.call, messages))
    assert sorted(row["id"] for row in rows(app, service)) == sorted(event.id for event in events)


@pytest.mark.parametrize("letter", ["x", "\\", "é", "\N{GRINNING FACE}"])
def test_the_largest_message_of_a_standard_namespace_is_stored_whole(
    app: ModuleType, service: TableServiceClient, letter: str
) -> None:
    event = stored_event(1, Description="").envelope
    room = STANDARD_BYTES - len(json.dumps(event))
    size = len(json.dumps(letter, ensure_ascii=False).encode()) - 2
    event["data"]["Description"] = letter * (room // size)
    body = json.dumps(event, ensure_ascii=False).encode()
    assert STANDARD_BYTES - 4 <= len(body) <= STANDARD_BYTES
    row = app.to_row(body)
    assert sum(len(str(value).encode("utf-16-le")) for value in row.values()) < 2**20
    assert all(len(str(value).encode("utf-16-le")) <= 2**16 for value in row.values())
    assert app.audit_table().add(row)
    (kept,) = rows(app, service)
    assert body_of(kept).encode() == body


def test_an_invalid_cloudevent_raises_and_is_dead_lettered_after_the_last_delivery(
    app: ModuleType, service: TableServiceClient, lab: ServiceBusLab
) -> None:
    bodies = [
        b"nonsense",
        b"\xff",
        b"[]",
        b"{}",
        b'{"specversion": "1.0", "id": "", "source": "a", "type": "b"}',
    ]
    send(lab, *bodies)
    with hosting(app, lab) as host:
        host.handle(len(bodies) * DELIVERIES)
        assert all(isinstance(error, ValueError) for error in host.failures)
        assert len(host.failures) == len(bodies) * DELIVERIES
    dead = lab.entity(PATH).dead_letters
    assert sorted(one.body for one in dead) == sorted(bodies)
    assert {one.dead_letter_reason for one in dead} == {"MaxDeliveryCountExceeded"}
    assert rows(app, service) == []


def sample_settings() -> dict[str, str]:
    return dict(json.loads((HOME / "local.settings.json.sample").read_text())["Values"])


def test_the_sample_of_local_settings_has_every_setting_and_means_azurite(app: ModuleType) -> None:
    given = sample_settings()
    (function,) = app.app.get_functions()
    binding = json.loads(function.get_function_json())["bindings"][0]
    named = {binding[key].strip("%") for key in ("connection", "topicName", "subscriptionName")}
    assert named <= given.keys()
    assert given["FUNCTIONS_WORKER_RUNTIME"] == "python"
    assert given["AzureWebJobsStorage"] == given["AUDIT_TABLE_CONNECTION_STRING"]
    with TableServiceClient.from_connection_string(given["AUDIT_TABLE_CONNECTION_STRING"]) as service:
        assert service.url == "http://127.0.0.1:10002/devstoreaccount1"
