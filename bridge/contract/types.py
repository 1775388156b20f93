"""The names of event types, attributes and properties, without the models of their data.

I/O: reads the file of the names, once.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Literal

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


# What the models of tools/contract name: tools/contract/generate.py writes the file.
_NAMES = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))

EVENT_NAMES: tuple[str, ...] = tuple(_NAMES["events"])
EVENT_TYPES = tuple(map(type_of, EVENT_NAMES))
ATTRIBUTES: tuple[str, ...] = tuple(_NAMES["attributes"])
# The names of all properties of events' data, with dots into objects; `*` is any name.
PROPERTIES: tuple[str, ...] = tuple(_NAMES["properties"])
# The reasons of receipts, by Outcome, and of losses.
RECEIPT_REASONS: dict[str, list[str]] = _NAMES["receipt_reasons"]
LOSS_REASONS: list[str] = _NAMES["loss_reasons"]
# The reasons of receipts once more, so that no code gives another.
ReceiptReason = (
    Literal["approved", "already_approved", "not_recorded"]
    | Literal["malformed", "bad_signature", "expired", "unknown_event", "already_started"]
    | Literal["other_vm", "advisory", "denied", "not_prepared"]
    | Literal["imds_refused", "imds_unavailable", "unknown_outcome"]
)

# The newest api-version of Scheduled Events that every IMDS knows, and the first that has a property or an event
# type; the others are in every version.
API_VERSION = "2020-07-01"
FIRST_VERSIONS = {
    "Preempt": "2017-11-01",
    "Terminate": "2019-01-01",
    "Description": "2019-04-01",
    "EventSource": "2019-08-01",
    "DurationInSeconds": "2020-07-01",
    "SpotRebalanceRecommendation": "2024-07-09",
}

# Azure adds new values to the first three: an unknown one is never an error.
KNOWN_VALUES = {
    "EventType": ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate", "SpotRebalanceRecommendation"),
    "EventStatus": ("Scheduled", "Started", "Advisory", "Completed", "Canceled", "Ended"),
    "EventSource": ("Platform", "User"),
    "Outcome": ("Accepted", "Rejected", "Failed"),
}

_TYPES = [known.lower() for known in KNOWN_VALUES["EventType"]]


def is_new_type(event_type: object) -> bool:
    """Return whether it is a type of Scheduled Events that Azure has added; what is blank or no text is none."""
    return isinstance(event_type, str) and event_type != "" and not is_known_type(event_type)


def is_known_type(event_type: object) -> bool:
    """Return whether it is a type of Scheduled Events that Azure has documented."""
    return isinstance(event_type, str) and event_type.lower() in _TYPES


MAX_SESSION_CHARACTERS = 128  # of Service Bus


def session_id(
    template: str, *, vm: str = "", resource_group: str = "", subscription: str = "", **others: str
) -> str:
    """Fill in the template of a session id; one that is too long for Service Bus ends with a hash of the whole.

    The names of VMs and resource groups, and subscriptions, are in lower case: Azure's services spell them in any.
    """
    names = {"vm": vm, "resource_group": resource_group, "subscription": subscription}
    values = {**{name: value.lower() for name, value in names.items()}, **others}
    text = template.format(**values).encode("utf-8", "replace").decode()
    if len(text) <= MAX_SESSION_CHARACTERS:
        return text
    return f"{text[: MAX_SESSION_CHARACTERS - 17]}-{sha256(text.encode()).hexdigest()[:16]}"
