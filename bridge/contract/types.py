"""The names of event types and of attributes, without the models of their data."""

from __future__ import annotations

from hashlib import sha256

TYPE_PREFIX = "io.imdsbridge."


def type_of(name: str) -> str:
    """Return the CloudEvents type of the event named, for example, `document.changed`."""
    return f"{TYPE_PREFIX}{name}.v1"


def schema_id(name: str) -> str:
    """Return the `$id` of a schema, which is the `dataschema` of events of the type named."""
    return f"urn:imds-bridge:schema:{name}:1"


def is_property(name: str) -> bool:
    """Return whether some event's data can have the property `name`, with dots into objects."""
    parts = name.split(".")
    objects = (".".join(parts[:end]) for end in range(1, len(parts)))
    return name in PROPERTIES or any(f"{outer}.*" in PROPERTIES for outer in objects)


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

# The names of all properties of events' data, with dots into objects; `*` is any name.
PROPERTIES = (
    *("EventId", "EventType", "ResourceType", "Resources", "EventStatus", "NotBefore", "Description"),
    *(
        "EventSource",
        "DurationInSeconds",
        "PreviousStatus",
        "Changed",
        "Previous",
        "Previous.*",
        "NotBeforeUtc",
    ),
    *("NoticeSeconds", "DocumentIncarnation", "AffectsThisVm", "ApprovalSession", "VmRebooted", "EndReason"),
    *("Vm", "Vm.Name", "Vm.VmId", "Vm.ResourceId", "Vm.Location", "Vm.Zone", "Vm.ScaleSet"),
    *("Vm.Tags", "Vm.Tags.*", "Document", "Document.DocumentIncarnation", "Document.Events", "Unreadable"),
    *(
        "PreviousIncarnation",
        "CloudEventIds",
        "Since",
        "Reason",
        "Cause",
        "BlindFrom",
        "BlindTo",
        "BlindSeconds",
    ),
    *("Version", "LastReporterSeq", "Backlog", "Backlog.*", "PreviousEpoch", "PreviousLastReporterSeq"),
    *("Count", "Sink", "OldestTime", "NewestTime", "Message", "Detail", "Outcome", "DryRun"),
    *("Command", "Command.Id", "Command.RequestedBy", "Command.Reason", "Command.Vm", "Command.ExpiresAt"),
    *("EventIds", "StartRequests", "Id", "RequestedBy", "ExpiresAt"),
)

# The reasons of receipts, by Outcome, and of losses.
RECEIPT_REASONS = {
    "Accepted": ("approved", "already_approved"),
    "Rejected": (
        *("malformed", "bad_signature", "expired", "unknown_event", "already_started", "other_vm", "denied"),
    ),
    "Failed": ("imds_refused", "imds_unavailable"),
}
LOSS_REASONS = ("Damage", "SizeLimit", "StateFolderGone", "OtherVm")


MAX_SESSION_CHARACTERS = 128  # of Service Bus


def session_id(template: str, **values: str) -> str:
    """Fill in the template of a session id; one that is too long for Service Bus ends with a hash of the whole."""
    text = template.format(**values).encode("utf-8", "replace").decode()
    if len(text) <= MAX_SESSION_CHARACTERS:
        return text
    return f"{text[: MAX_SESSION_CHARACTERS - 17]}-{sha256(text.encode()).hexdigest()[:16]}"
