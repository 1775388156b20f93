"""The names of event types and of attributes, without the models of their data."""

from __future__ import annotations

TYPE_PREFIX = "io.imdsbridge."


def type_of(name: str) -> str:
    """Return the CloudEvents type of the event named, for example, `document.changed`."""
    return f"{TYPE_PREFIX}{name}.v1"


def schema_id(name: str) -> str:
    """Return the `$id` of a schema, which is the `dataschema` of events of the type named."""
    return f"urn:imds-bridge:schema:{name}:1"


EVENT_NAMES = (
    "scheduledevent.scheduled",
    "scheduledevent.started",
    "scheduledevent.updated",
    "scheduledevent.completed",
    "scheduledevent.canceled",
    "scheduledevent.ended",
    "document.changed",
    "imds.unreachable",
    "imds.recovered",
    "bridge.heartbeat",
    "bridge.loss",
    "bridge.test",
    "approval.accepted",
    "approval.rejected",
    "approval.failed",
    "command.approve",
)
EVENT_TYPES = tuple(map(type_of, EVENT_NAMES))

ATTRIBUTES = (
    "specversion",
    "id",
    "source",
    "type",
    "subject",
    "time",
    "datacontenttype",
    "dataschema",
    "correlationid",
    "causationid",
    "partitionkey",
    "reporter",
    "reporterepoch",
    "reporterseq",
)

# Azure adds new values to the first three: an unknown one is never an error.
KNOWN_VALUES = {
    "EventType": ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"),
    "EventStatus": ("Scheduled", "Started", "Completed", "Canceled", "Ended"),
    "EventSource": ("Platform", "User"),
    "Outcome": ("Accepted", "Rejected", "Failed"),
}

# The reasons of receipts, by Outcome, and of losses.
RECEIPT_REASONS = {
    "Accepted": ("approved", "already_approved"),
    "Rejected": (
        *("malformed", "bad_signature", "expired", "unknown_event", "already_started", "other_vm", "denied"),
    ),
    "Failed": ("imds_refused", "imds_unavailable"),
}
LOSS_REASONS = ("Damage", "SizeLimit", "StateFolderGone", "OtherVm")
