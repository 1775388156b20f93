"""Store every event of imds-bridge once in a table, however often it is delivered."""

import hmac
import json
import logging
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import azure.functions as func
from azure.core.exceptions import ResourceExistsError
from azure.data.tables import TableServiceClient
from azure.identity import ManagedIdentityCredential

TABLE = "scheduledevents"
ATTRIBUTES = (
    *("source", "id", "type", "subject", "time", "correlationid", "causationid"),
    *("reporter", "reporterepoch", "reporterseq"),
)
FROM_DATA = ("EventType", "EventStatus", "Outcome")
RECEIPTS = "io.imdsbridge.approval."
TOLERANCE_SECONDS = 300

# The limits are 64 KiB per property and 1 MiB per entity, in UTF-16, where a character has up to four bytes.
BODY_PART_CHARACTERS = 16_000
COLUMN_CHARACTERS = 1_000

# A message is dead-lettered after ten deliveries, so each retries for about three minutes if the storage fails.
RETRIES: dict[str, Any] = {"retry_connect": 8, "retry_read": 8, "retry_status": 8, "retry_backoff_max": 60}

app = func.FunctionApp()


class AuditTable:
    """A table with a row for each event, whose keys are the source and the id."""

    def __init__(self, service: TableServiceClient) -> None:
        self._table = service.create_table_if_not_exists(TABLE)

    def add(self, row: Mapping[str, Any]) -> bool:
        """Insert a row; return False if it exists."""
        try:
            # By default the SDK does not retry a POST whose answer is lost; this one is idempotent.
            self._table.create_entity(row, retry_on_methods=["POST"])
        except ResourceExistsError:
            return False
        return True


@cache
def audit_table() -> AuditTable:
    """Open the table once per process: in Azure with the managed identity of the app, on a laptop Azurite's."""
    if local := os.environ.get("AUDIT_TABLE_CONNECTION_STRING"):
        return AuditTable(TableServiceClient.from_connection_string(local, **RETRIES))
    endpoint, identity = os.environ["AUDIT_TABLE_ENDPOINT"], ManagedIdentityCredential()
    return AuditTable(TableServiceClient(endpoint, credential=identity, **RETRIES))


@app.function_name("audit")
@app.service_bus_topic_trigger(
    arg_name="message",
    topic_name="%EVENTS_TOPIC%",
    subscription_name="%EVENTS_SUBSCRIPTION%",
    connection="ServiceBusConnection",
)
def audit(message: func.ServiceBusMessage) -> None:
    """Store the event; after an exception the host abandons the message, and finally dead-letters it."""
    row = to_row(message.get_body())
    secrets = os.environ.get("SIGNING_SECRETS", "").split()
    if secrets and row["type"].startswith(RECEIPTS):
        row["SignatureFault"] = signature_fault(secrets, message)
    is_new = audit_table().add(row)
    logging.info("%s %s %s", "stored" if is_new else "stored before:", row["type"], row["id"])


def signature_fault(secrets: Sequence[str], message: func.ServiceBusMessage) -> str:
    """Say what is wrong with the signature of a receipt, made as in Standard Webhooks; "" if nothing is."""
    given = message.application_properties or {}
    name, at, offered = (str(given.get(f"webhook-{part}", "")) for part in ("id", "timestamp", "signature"))
    sent = message.enqueued_time_utc
    if any(secret.startswith("@Microsoft.KeyVault(") for secret in secrets):
        return "the app cannot read SIGNING_SECRETS from the Key Vault"
    if not offered or not at.isdecimal() or sent is None:
        return "it is not signed"
    if abs(int(at) - sent.timestamp()) > TOLERANCE_SECONDS:
        return "it was not signed within five minutes of being sent"
    signed = f"{name}.{at}.".encode() + message.get_body()
    keys = [b64decode(secret.removeprefix("whsec_")) for secret in secrets]
    expected = [b"v1," + b64encode(hmac.digest(key, signed, "sha256")) for key in keys]
    if any(hmac.compare_digest(one, other.encode()) for one in expected for other in offered.split()):
        return ""
    return "the signature is by none of the known secrets"


def to_row(body: bytes) -> dict[str, Any]:
    """Return an event as a table entity: columns for queries, and the whole body as received.

    Raises:
        ValueError: it is not a CloudEvent.
    """
    text = body.decode()
    event = read_event(text)
    data = event["data"] if isinstance(event.get("data"), dict) else {}
    parts = range(0, len(text), BODY_PART_CHARACTERS)
    return {
        "PartitionKey": sha256(event["source"].encode()).hexdigest(),  # a key cannot contain slashes
        "RowKey": event["id"],
        **{name: column(event[name]) for name in ATTRIBUTES if event.get(name) is not None},
        **{name: column(data[name]) for name in FROM_DATA if data.get(name) is not None},
        **{f"Body{number}": text[at : at + BODY_PART_CHARACTERS] for number, at in enumerate(parts)},
    }


def read_event(text: str) -> dict[str, Any]:
    """Parse a CloudEvent; raise ValueError if it is not one."""
    event = json.loads(text)
    if not isinstance(event, dict) or event.get("specversion") != "1.0":
        raise ValueError("not a CloudEvent 1.0")
    for name in ("id", "source", "type"):
        if not isinstance(event.get(name), str) or not event[name]:
            raise ValueError(f"a CloudEvent without {name}")
    return event


def column(value: Any) -> str:
    """Return a value as text, truncated for a column; the body has all of it."""
    return str(value)[:COLUMN_CHARACTERS].encode("utf-8", "replace").decode()
