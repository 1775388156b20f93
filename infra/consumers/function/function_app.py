"""Keep every event of imds-bridge in a table, once each, however often it is delivered."""

import json
import logging
import os
from collections.abc import Mapping
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

# The service takes 64 KiB a property and 1 MiB an entity, in UTF-16, in which a character has up to four bytes.
BODY_PART_CHARACTERS = 16_000
COLUMN_CHARACTERS = 1_000

# Ten deliveries are the last, so each waits some three minutes for a storage that is out of order.
PATIENCE: dict[str, Any] = {"retry_connect": 8, "retry_read": 8, "retry_status": 8, "retry_backoff_max": 60}

app = func.FunctionApp()


class AuditTable:
    """A table with a row for each event, named by what makes an event the same one: source and id."""

    def __init__(self, service: TableServiceClient) -> None:
        self._table = service.create_table_if_not_exists(TABLE)

    def add(self, row: Mapping[str, Any]) -> bool:
        """Insert a row; False if it is there already."""
        try:
            # The SDK repeats no POST of itself when the answer is lost; this one may be.
            self._table.create_entity(row, retry_on_methods=["POST"])
        except ResourceExistsError:
            return False
        return True


@cache
def audit_table() -> AuditTable:
    """Open the table, once for the process, with the managed identity of the Function app."""
    endpoint, identity = os.environ["AUDIT_TABLE_ENDPOINT"], ManagedIdentityCredential()
    return AuditTable(TableServiceClient(endpoint, credential=identity, **PATIENCE))


@app.function_name("audit")
@app.service_bus_topic_trigger(
    arg_name="message",
    topic_name="%EVENTS_TOPIC%",
    subscription_name="%EVENTS_SUBSCRIPTION%",
    connection="ServiceBusConnection",
)
def audit(message: func.ServiceBusMessage) -> None:
    """Keep the event; what is raised makes the host give the message back, and in the end dead-letter it."""
    row = to_row(message.get_body())
    is_new = audit_table().add(row)
    logging.info("%s %s %s", "kept" if is_new else "kept before:", row["type"], row["id"])


def to_row(body: bytes) -> dict[str, Any]:
    """Lay an event down as an entity: columns to look for, and all of the body as it came.

    Raises:
        ValueError: it is no CloudEvent.
    """
    text = body.decode()
    event = read_event(text)
    data = event["data"] if isinstance(event.get("data"), dict) else {}
    parts = range(0, len(text), BODY_PART_CHARACTERS)
    return {
        "PartitionKey": sha256(event["source"].encode()).hexdigest(),  # a source has slashes, a key must not
        "RowKey": event["id"],
        **{name: column(event[name]) for name in ATTRIBUTES if event.get(name) is not None},
        **{name: column(data[name]) for name in FROM_DATA if data.get(name) is not None},
        **{f"Body{number}": text[at : at + BODY_PART_CHARACTERS] for number, at in enumerate(parts)},
    }


def read_event(text: str) -> dict[str, Any]:
    """Read a CloudEvent; ValueError if it is none."""
    event = json.loads(text)
    if not isinstance(event, dict) or event.get("specversion") != "1.0":
        raise ValueError("no CloudEvent 1.0")
    for name in ("id", "source", "type"):
        if not isinstance(event.get(name), str) or not event[name]:
            raise ValueError(f"a CloudEvent without {name}")
    return event


def column(value: Any) -> str:
    """Write a value as a text that fits into a column; the whole of it stands in the body."""
    return str(value)[:COLUMN_CHARACTERS].encode("utf-8", "replace").decode()
