"""The data of every type of event and of the command, as models: the contract with consumers.

`tools/contract/generate.py` makes the JSON Schemas in `schemas/` of them. `bridge` does not use the models; the tests
check its events against the schemas. Properties of IMDS may be missing or null and may have any value, because an
unusual event is published as received. Properties whose values cannot grow in number are literals.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

TIME = "RFC 3339, UTC, with milliseconds"
IMDS, INSTANCE, SENDER = "IMDS, as received", "instance data of IMDS", "the command's sender"
_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
_JSON_TYPES = ("number", "string", "boolean", "object", "array", "null")
_INSTANT = "2026-11-20T12:15:00.000Z"


def _property(text: str, *examples: Any, unit: str = "", source: str = "imds-bridge", **options: Any) -> Any:
    """Describe a property; it is always there unless the options have a `default`.

    Args:
        text: what it says.
        examples: values to show.
        unit: of a number or a time.
        source: where the value comes from.
        options: further ones of pydantic's Field.
    """
    sentences = [text, *([f"Unit: {unit}."] if unit else []), f"Source: {source}."]
    return Field(description=" ".join(sentences), examples=list(examples) or None, **options)


_received = partial(_property, source=IMDS, default=None)
_optional = partial(_property, source=SENDER, default=None)


class Part(BaseModel):
    """The base: further properties are always allowed."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    title: ClassVar[str]
    """What a type of event says, in a few words."""


class VmData(Part):
    """The VM that reports this, as described by its instance data."""

    Name: str = _property(
        "The VM's name in Azure, as used in Resources; the host name until instance data is available.",
        "web-0",
        source=INSTANCE,
    )
    VmId: str = _property(
        'The VM\'s unique id; "" until it is known.',
        "13f56399-bd52-4150-9748-7190aae1ff21",
        source=INSTANCE,
    )
    ResourceId: str = _property(
        'The VM\'s ARM id; "" until it is known.',
        "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/shop/providers"
        "/Microsoft.Compute/virtualMachines/web-0",
        source=INSTANCE,
    )
    Location: str = _property('The Azure region; "" until it is known.', "westeurope", source=INSTANCE)
    Zone: str = _property('The availability zone; "" if there is none.', "1", "", source=INSTANCE)
    ScaleSet: str = _property(
        'The scale set that the VM belongs to; "" if there is none.', "web", "", source=INSTANCE
    )
    Tags: dict[str, str] = _property("The VM's tags, by name.", {"team": "shop"}, {}, source=INSTANCE)


ReportingVm = Annotated[VmData, _property("The VM that reports this, not necessarily one that is affected.")]


class ScheduledEventData(Part):
    """One event of IMDS: its properties as received, and those that imds-bridge adds."""

    EventId: str = _property(
        "The event's id, in the letter case of IMDS, which may differ between VMs: ignore case when comparing.",
        _ID,
        source=IMDS,
    )
    EventType: str | None = _received(
        "What happens to the VMs: Freeze, Reboot, Redeploy, Preempt, Terminate, "
        "SpotRebalanceRecommendation (since api-version 2024-07-09), or a value that Azure adds later.",
        *("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"),
    )
    ResourceType: str | None = _received(
        "The type of what Resources lists: VirtualMachine.", "VirtualMachine"
    )
    Resources: list[str] | None = _received(
        "The names of the affected VMs, `{scaleset}_{instance}` in a scale set; may be empty. Ignore case when "
        "comparing; api-version 2017-03-01 puts a `_` before each name.",
        ["web-0", "web-1"],
        [],
    )
    EventStatus: str | None = _received(
        "Scheduled, Started, Advisory, or a value that Azure adds later. imds-bridge sets its own for events that "
        "are gone.",
        *("Scheduled", "Started"),
    )
    NotBefore: str | None = _received(
        "The earliest start, as received: RFC 1123 or ISO 8601; blank once the event has started. "
        "Use NotBeforeUtc instead.",
        *("Fri, 20 Nov 2026 12:15:00 GMT", ""),
        unit="RFC 1123 or ISO 8601, UTC",
    )
    Description: str | None = _received(
        "A description by Microsoft; may be blank. Since api-version 2019-04-01.",
        *("Host server is undergoing maintenance.", ""),
    )
    EventSource: str | None = _received(
        "Who initiated the event: Platform or User. Since api-version 2019-08-01.", "Platform", "User"
    )
    DurationInSeconds: int | None = _received(
        "How long the VMs will be interrupted; 0 for no impact, -1 for unknown. Since api-version 2020-07-01.",
        *(5, 0, -1),
        unit="seconds",
    )
    PreviousStatus: str | None = _property(
        "EventStatus before this change; null if the event was not known.", "Scheduled", None
    )
    Changed: list[str] = _property(
        "The names of the properties of IMDS that changed; empty for a new event and for one that is gone.",
        ["NotBefore"],
        [],
    )
    Previous: dict[str, Any] = _property(
        "The previous values of the properties in Changed, as received; null for one that did not exist.",
        {"NotBefore": "Fri, 20 Nov 2026 12:15:00 GMT"},
        {},
    )
    NotBeforeUtc: datetime | None = _property(
        "NotBefore as a timestamp; null if it is blank, missing or not readable.",
        *(_INSTANT, None),
        unit=TIME,
    )
    NoticeSeconds: int | None = _property(
        "The seconds from the CloudEvent's time to NotBeforeUtc; negative once it has passed; null without it.",
        *(900, -3, None),
        unit="seconds",
    )
    DocumentIncarnation: int | None = _property(
        "The incarnation of the document that showed this change; it can skip numbers and restart; null if it is "
        "not a number.",
        *(12, None),
        unit="a count",
    )
    AffectsThisVm: bool | None = _property(
        "Whether Resources lists the VM in Vm; null if Resources is empty, or until that VM's name is known. With "
        "duplicate detection, any VM's copy of an event may be the one that is kept: do not filter on it there.",
        *(True, False, None),
    )
    ApprovalSession: str | None = _property(
        "The session id for a command to the first VM in Resources; null if the forwarder has no session template.",
        *("shop.web-0", None),
    )
    Vm: ReportingVm


class EventScheduledData(ScheduledEventData):
    """A new event has the status Scheduled: it is announced."""

    title: ClassVar = "An event is announced"


class EventStartedData(ScheduledEventData):
    """An event has started, or a new one has the status Started (a host failed): its impact starts or has started."""

    title: ClassVar = "An event has started"


class EventUpdatedData(ScheduledEventData):
    """A known event has changed otherwise (time, VMs, duration, text), or its status is unknown to imds-bridge."""

    title: ClassVar = "An event has changed otherwise"


class EventAdvisedData(ScheduledEventData):
    """An event has the status Advisory: an early warning that Azure may take a Spot VM back, not to be approved."""

    title: ClassVar = "An early warning"


_vm_rebooted = _property(
    "Whether the VM in Vm has rebooted since it last saw the event; null if that is unknown.",
    *(True, False, None),
    default=None,
)


_vm_is_gone = _property(
    "Whether the VMs in Resources are gone by the event: true for a completed Preempt or Terminate (deleted, a Spot "
    "VM perhaps only deallocated), false for a canceled event and for Freeze, Reboot and Redeploy, null if that is "
    "unknown.",
    *(True, False, None),
    default=None,
)


class EventCompletedData(ScheduledEventData):
    """An event has disappeared after it had started: it is over and has no further impact."""

    title: ClassVar = "An event is over"

    EventStatus: Literal["Completed"] = _property(
        "Always Completed; IMDS itself has no value for it.", "Completed"
    )
    VmRebooted: bool | None = _vm_rebooted
    VmIsGone: bool | None = _vm_is_gone


class EventCanceledData(ScheduledEventData):
    """An event has disappeared before its NotBefore and under a continuous watch: it did not happen."""

    title: ClassVar = "An event did not happen"

    EventStatus: Literal["Canceled"] = _property(
        "Always Canceled; IMDS itself has no value for it.", "Canceled"
    )
    VmIsGone: bool | None = _vm_is_gone


class EventEndedData(ScheduledEventData):
    """An event has disappeared before its start was seen, and it may have happened: EndReason says why."""

    title: ClassVar = "An event has disappeared and may have happened"

    EventStatus: Literal["Ended"] = _property("Always Ended; IMDS itself has no value for it.", "Ended")
    EndReason: str | None = _property(
        "Why it is unknown whether the event happened: Restart (of imds-bridge), Gap (no usable answer for more than "
        "5 s), Reset (IMDS was restarted or turned on), IncarnationSkipped, IncarnationUnknown, "
        "EntryUnreadable (of the document), Advisory (it was an early warning), UnknownStatus, NotBeforeUnknown, "
        "NotBeforePassed or ClockJumped (so that NotBefore has passed by one clock only).",
        *("Restart", "NotBeforePassed"),
        default=None,
    )
    VmRebooted: bool | None = _vm_rebooted
    VmIsGone: bool | None = _vm_is_gone


class ReceivedDocument(Part):
    """A document of IMDS, whatever it contains."""

    DocumentIncarnation: Any = _received(
        "The document's incarnation; a string in old versions.",
        *(12, "12"),
        unit="a count",
        # generators of code take a missing type for "object", and a list of schemas for a class
        json_schema_extra={"type": [*_JSON_TYPES]},
    )
    Events: list[Any] | None = _property("The events.", [], source=IMDS)


class DocumentChangedData(Part):
    """The document of IMDS has changed: the whole document as received, and the events that were published for it."""

    title: ClassVar = "The document of IMDS has changed"

    Document: Annotated[ReceivedDocument, _property("The whole answer of IMDS.", source=IMDS)]
    DocumentIncarnation: int | None = _property(
        "The document's incarnation; null if it is not a number.", *(12, None), unit="a count"
    )
    PreviousIncarnation: int | None = _property(
        "The incarnation of the previous document; null for the first one.", *(11, None), unit="a count"
    )
    CloudEventIds: list[str] = _property(
        "The `id` of every scheduledevent that was published for this change, in order; empty if there is none.",
        ["0c2f4a2e-7a53-5d2b-8f36-52f0f2f3c7aa"],
        [],
    )
    Unreadable: int = _property(
        "The number of entries of Events that could not be read as events.", *(0, 1), unit="entries", ge=0
    )
    Vm: ReportingVm


_cause = _property(
    "Why there was no usable answer: NoAnswer (IMDS gave none), NotPolled (imds-bridge did not ask in that time: the "
    "VM was suspended, or the disk or the CPU held it up) or Restart (of imds-bridge).",
    *("NoAnswer", "Restart"),
    default=None,
)


class ImdsUnreachableData(Part):
    """There was no usable answer of IMDS for more than five seconds: events may be missed."""

    title: ClassVar = "IMDS cannot be reached"

    Since: datetime | None = _property(
        "The time of the last usable answer; null if there was none.", *(_INSTANT, None), unit=TIME
    )
    Reason: str = _property(
        "What went wrong, as text for people.", "IMDS at http://169.254.169.254 answered 500"
    )
    Cause: str | None = _cause
    Vm: ReportingVm


class ImdsRecoveredData(Part):
    """IMDS gives usable answers again: changes between BlindFrom and BlindTo may have been missed."""

    title: ClassVar = "IMDS can be reached again"

    BlindFrom: datetime | None = _property(
        "The time of the last usable answer before the gap; null if there was none.",
        *(_INSTANT, None),
        unit=TIME,
    )
    BlindTo: datetime = _property(
        "The time of the first usable answer after the gap.", "2026-11-20T12:16:00.500Z", unit=TIME
    )
    BlindSeconds: float | None = _property(
        "The time from BlindFrom to BlindTo; null without BlindFrom.", *(60.5, None), unit="seconds"
    )
    Cause: str | None = _cause
    Vm: ReportingVm


class BridgeHeartbeatData(Part):
    """A process is running: published at its start, every hour, and when it is stopped."""

    title: ClassVar = "A process is running"

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"PreviousEpoch": {"type": "string"}}, "required": ["PreviousEpoch"]},
            "then": {
                "properties": {"PreviousLastReporterSeq": {"type": "integer"}},
                "required": ["PreviousLastReporterSeq"],
            },
            "else": {"properties": {"PreviousLastReporterSeq": {"type": "null"}}},
        }
    )

    Reason: str = _property(
        "Why it is published now: Started, Hourly or Stopping.", "Started", "Hourly", "Stopping"
    )
    Version: str = _property("The version of imds-bridge.", "0.1.0")
    LastReporterSeq: int = _property(
        "The highest `reporterseq` assigned in this `reporterepoch`, which is that of this event, as a number.",
        4,
        unit="a count",
        ge=0,
    )
    Backlog: dict[str, int] = _property(
        "The number of events that waited for each sink before this one, by the name of the sink.",
        {"audit": 0},
        unit="events",
    )
    CloudEventIds: list[str] | None = _property(
        "The `id` of every scheduledevent that this VM published and no `document.changed` of it lists: with "
        '`documents = "named"`, those that name only other VMs.',
        ["0c2f4a2e-7a53-5d2b-8f36-52f0f2f3c7aa"],
        default=None,
    )
    OpenEventIds: list[str] | None = _property(
        "On Hourly, of a forwarder: the EventId of each event that it knows and that is not over; null if there are "
        "more than 1,000. What a consumer believes to be open and is not listed has ended.",
        *([_ID], [], None),
        default=None,
    )
    LookedAt: datetime | None = _property(
        "On Hourly, of a listener: when it last received what was on the bus, if only nothing; null if it never did.",
        *(_INSTANT, None),
        unit=TIME,
        default=None,
    )
    LookError: str | None = _property(
        "On Hourly, of a listener: why it cannot receive from the bus now; null if it can.",
        *("the role Azure Service Bus Data Receiver is missing", None),
        default=None,
    )
    IdentityError: str | None = _property(
        "Why instance data does not say which VM this is; null if it does, or was not read yet. A change is "
        "published at once. Until then a listener approves nothing, unless the same boot proves the name.",
        *("IMDS at http://169.254.169.254 answered 503", None),
        default=None,
    )
    PreviousEpoch: str | None = _property(
        "On Started: the `reporterepoch` of the run before; null if there was none, or if it cannot be known.",
        *("0c2f4a2e7a532d2b8f3652f0f2f3c7aa", None),
        default=None,
    )
    PreviousLastReporterSeq: int | None = _property(
        "On Started: the last `reporterseq` of the run before that was committed; null if PreviousEpoch is null.",
        *(17, None),
        unit="a count",
        default=None,
        ge=0,
    )
    Vm: ReportingVm


class CommandData(Part):
    """The command that a receipt answers; only its Id if it could not be read."""

    Id: str = _property(
        "The command's id, printable characters only; may be blank.",
        "order-17",
        source=f"{SENDER}, or the message id",
    )
    RequestedBy: str | None = _optional(
        "Who sent the command, as stated in it: never trusted.", "ops@example.org", ""
    )
    Reason: str | None = _optional("The reason, as stated in the command.", "drained", "")
    Vm: str | None = _optional(
        "The VM that the command is addressed to; blank for the VM that receives it.", "web-0", ""
    )
    ExpiresAt: datetime | None = _optional("The end of the command's validity.", *(_INSTANT, None), unit=TIME)


class ReceiptData(Part):
    """The result of a command for one EventId."""

    EventId: str | None = _property(
        "The event's id; null if the command could not be read or authenticated.",
        _ID,
        None,
        source="IMDS or the command",
    )
    Resources: list[str] = _property(
        "The names of all VMs that the approval applies to; empty if the event is not known.",
        ["web-0", "web-1"],
        [],
        source=IMDS,
    )
    Reason: str = _property("The reason, as one word.", "approved")
    Detail: str = _property("Details, as text for people; may be blank.", "", "a deny rule matches")
    Command: Annotated[CommandData, _property("The command that this receipt answers.")]
    EventType: str | None = _property(
        "What happens to the VMs; null if the event is not known.",
        *("Reboot", None),
        source=IMDS,
    )
    NotBeforeUtc: datetime | None = _property(
        "The event's earliest start; null if it is not known.", *(_INSTANT, None), unit=TIME
    )
    DryRun: bool = _property(
        "Whether the listener only reports what it would do (`listen --dry-run`).", False
    )
    Vm: ReportingVm


class ApprovalAcceptedData(ReceiptData):
    """IMDS has accepted the approval, now or before, or nothing is left to approve; the start may still wait."""

    title: ClassVar = "IMDS has accepted an approval"

    Outcome: Literal["Accepted"] = _property("Always Accepted.", "Accepted")
    Reason: str = _property(
        "approved, already_approved, or not_recorded: it may have been POSTed, and is no longer Scheduled.",
        *("approved", "already_approved", "not_recorded"),
    )


class ApprovalRejectedData(ReceiptData):
    """The listener has rejected the command; it approved nothing."""

    title: ClassVar = "The listener has rejected a command"

    Outcome: Literal["Rejected"] = _property("Always Rejected.", "Rejected")
    Reason: str = _property(
        "malformed, bad_signature, expired, unknown_event, already_started, other_vm, advisory (an early warning), "
        "denied, or not_prepared: a rule's program has failed. It is tried again, so an Accepted may follow.",
        *(
            "malformed",
            "bad_signature",
            "expired",
            "unknown_event",
            "already_started",
            "other_vm",
            "advisory",
        ),
        *("denied", "not_prepared"),
    )
    Count: int | None = _property(
        "The number of further messages within a minute that this receipt answers; absent if it answers only one.",
        25,
        unit="messages",
        default=None,
        ge=1,
    )


class ApprovalFailedData(ReceiptData):
    """The approval was allowed, but IMDS did not accept it, could not be reached in time, or its answer was lost."""

    title: ClassVar = "IMDS has not accepted an approval"

    Outcome: Literal["Failed"] = _property("Always Failed.", "Failed")
    Reason: str = _property(
        "imds_refused, imds_unavailable, or unknown_outcome: it was POSTed, and whether that counts is not known.",
        *("imds_refused", "imds_unavailable", "unknown_outcome"),
    )


class ApprovalPreparedData(Part):
    """A program has prepared this VM for an event; an event of several VMs is not approved by that."""

    title: ClassVar = "A program has prepared this VM for an event"

    EventId: str = _property("The event's id.", _ID, source=IMDS)
    EventType: str | None = _property("What happens to the VMs.", *("Reboot", None), source=IMDS)
    Resources: list[str] = _property("The names of all VMs of the event.", ["web-0", "web-1"], source=IMDS)
    NotBeforeUtc: datetime | None = _property(
        "The event's earliest start; null if it is not known.", *(_INSTANT, None), unit=TIME
    )
    DurationSeconds: float = _property("How long the program took.", 12.5, unit="seconds", ge=0)
    Vm: ReportingVm


class _OfWorkData(Part):
    """What is known of the time in which a VM is out of work."""

    EventId: str | None = _property(
        "The id of the last event that a program was started for; null if it is not known.",
        *(_ID, None),
        source=IMDS,
    )
    EventType: str | None = _property("What happens to the VMs by it.", *("Reboot", None), source=IMDS)
    Since: datetime = _property("When the first program was started.", _INSTANT, unit=TIME)


class ApprovalRecoveredData(_OfWorkData):
    """What programs had prepared this VM for is over, and it has been put back to work."""

    title: ClassVar = "This VM is back at work"

    DurationSeconds: float | None = _property(
        "How long `recover` took; null if a person did it.", *(3.2, None), unit="seconds", ge=0
    )
    Vm: ReportingVm


class ApprovalOutOfWorkData(_OfWorkData):
    """The VM stays out of work: it needs a person."""

    title: ClassVar = "This VM stays out of work"

    Reason: str = _property(
        "RecoverFails: `recover` has failed for the first time; it is tried again. TwoHours: no event is left for "
        "two hours. OtherVm: this disk comes from a VM that was out of work, and nothing is run.",
        *("RecoverFails", "TwoHours", "OtherVm"),
    )
    Detail: str = _property("Details, as text for people.", "recover /usr/local/bin/recover: exit code 1")
    Vm: ReportingVm


class BridgeLossData(Part):
    """Events were lost or dropped before every sink had them; what IMDS shows now is published again if necessary."""

    title: ClassVar = "Events were lost or dropped"

    Reason: str = _property(
        "Damage: the state store was damaged, or an older one was found. NotWritten: the state could not be read "
        "or written, and the process ended with what only its memory had. SizeLimit: the outbox reached its size "
        "limit; dead letters that it deletes count, too. StateFolderGone: the state store was removed or emptied. "
        "OtherVm: the state was that of the VM from which this one was cloned; these events are not published here, "
        "and that VM has them.",
        *("Damage", "NotWritten", "SizeLimit", "StateFolderGone", "OtherVm"),
    )
    Count: int | None = _property(
        "The number of lost events, as far as it is known; null if it is unknown.",
        *(3, 0, None),
        unit="events",
        ge=0,
    )
    Sink: str | None = _property(
        "The sink that lost the events; null if all that had not received them did.", "ops", None
    )
    OldestTime: datetime | None = _property(
        "The time when the oldest lost event was stored, or an earlier one; null if it is unknown.",
        *(_INSTANT, None),
        unit=TIME,
    )
    NewestTime: datetime | None = _property(
        "The time when the newest lost event was stored, or a later one; null if it is unknown.",
        *(_INSTANT, None),
        unit=TIME,
    )
    Vm: ReportingVm


class BridgeTestData(Part):
    """`imds-bridge check --send` was called: nothing is scheduled."""

    title: ClassVar = "A test; nothing is scheduled"

    Message: str = _property(
        "An explanation, as text for people.", "This is a test of imds-bridge; nothing is scheduled."
    )
    Version: str = _property("The version of imds-bridge.", "0.1.0")
    Vm: ReportingVm


EventIdText = Annotated[str, Field(pattern=r"^[!-~]{1,200}$", examples=[_ID])]


class StartRequest(Part):
    """One entry of a request in the format of IMDS."""

    EventId: EventIdText = _property("The id of the event to approve.", _ID, source=SENDER)


def _has(name: str) -> dict[str, Any]:
    """Require a property, which strict validators want to be named beside it; null counts as absent."""
    return {"properties": {name: {"not": {"type": "null"}}}, "required": [name]}


class CommandApproveData(Part):
    """Approve events that are Scheduled in the document; an approval releases every VM in the event's Resources.

    Give exactly one of EventId, EventIds and StartRequests; null counts as absent, and letter case matters. Send it
    as the data of a CloudEvent of this type, whose `id` is then the command's id, or on its own as JSON (at most
    256 KiB).
    """

    # not "oneOf" alone, of which generators of code make types without properties
    model_config = ConfigDict(
        json_schema_extra={
            "if": {"oneOf": [_has(name) for name in ("EventId", "EventIds", "StartRequests")]},
            "else": False,
        }
    )

    EventId: EventIdText | None = _optional("The id of the event to approve, in any letter case.", _ID)
    EventIds: list[EventIdText] | None = _optional(
        "The ids of the events to approve; each gets its own receipt.", [_ID], min_length=1, max_length=100
    )
    StartRequests: list[StartRequest] | None = _optional(
        "The events to approve, in the format of IMDS.",
        [{"EventId": _ID}],
        min_length=1,
        max_length=100,
    )
    Id: str | None = _optional(
        "The command's id if it is not sent as a CloudEvent; the default is the message id. A command that is "
        "received several times is decided once.",
        "order-17",
    )
    Vm: str | None = _optional(
        "The name of the VM that the command is addressed to, in printable characters; any other VM rejects it. "
        "Missing, null or blank for the VM that receives it.",
        "web-0",
        pattern=r"^$|\S",
        max_length=1000,
    )
    RequestedBy: str | None = _optional(
        "Who sends the command; repeated in the receipt, never trusted.", "ops@example.org"
    )
    Reason: str | None = _optional("The reason; repeated in the receipt.", "drained")
    ExpiresAt: datetime | None = _optional(
        "The end of the command's validity; afterwards it is rejected as expired.",
        "2026-11-20T12:00:00Z",
        unit="RFC 3339, with a capital T, and with a capital Z or an offset",
        json_schema_extra={"pattern": r"^[0-9-]{10}T[0-9:.]+(Z|[+-][0-9:]{5})$"},
    )


# The first version of each: a change that would break a consumer becomes a new type `.v2`.
DATA: dict[str, type[Part]] = {
    "scheduledevent.scheduled": EventScheduledData,
    "scheduledevent.started": EventStartedData,
    "scheduledevent.updated": EventUpdatedData,
    "scheduledevent.advised": EventAdvisedData,
    "scheduledevent.completed": EventCompletedData,
    "scheduledevent.canceled": EventCanceledData,
    "scheduledevent.ended": EventEndedData,
    "document.changed": DocumentChangedData,
    "imds.unreachable": ImdsUnreachableData,
    "imds.recovered": ImdsRecoveredData,
    "bridge.heartbeat": BridgeHeartbeatData,
    "bridge.loss": BridgeLossData,
    "bridge.test": BridgeTestData,
    "approval.accepted": ApprovalAcceptedData,
    "approval.rejected": ApprovalRejectedData,
    "approval.failed": ApprovalFailedData,
    "approval.prepared": ApprovalPreparedData,
    "approval.recovered": ApprovalRecoveredData,
    "approval.outofwork": ApprovalOutOfWorkData,
    "command.approve": CommandApproveData,
}
