"""What consumers may rely on: the data of every type of event and of the command, as models.

Nothing is checked by them at run time: the JSON Schemas in `schemas/` are generated from them, and tests hold the
events themselves against those. Properties of IMDS may be missing or null and have any value, because a strange
event is published as it came; the words of our own that are closed are literals.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TIME = "RFC 3339, UTC, with milliseconds"
IMDS, INSTANCE, SENDER = "IMDS, as received", "instance data of IMDS", "the command's sender"
_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
_INSTANT = "2026-11-20T12:15:00.000Z"


def _told(text: str, *examples: Any, unit: str = "", source: str = "imds-bridge", **more: Any) -> Any:
    """Describe a property; without a `default` among `more` it is always there."""
    told = [text, *([f"Unit: {unit}."] if unit else []), f"Source: {source}."]
    return Field(description=" ".join(told), examples=list(examples) or None, **more)


_received = partial(_told, source=IMDS, default=None)
_asked = partial(_told, source=SENDER, default=None)


class Part(BaseModel):
    """The base: further properties are always allowed, and titles are the names as they stand in the JSON."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        defer_build=True,
        field_title_generator=lambda name, _: name,
    )


class VmData(Part):
    """The VM that tells, as its instance data names it."""

    Name: str = _told(
        "The VM's name in Azure, which Resources speaks of; the host name while instance data is not known.",
        "web-0",
        source=INSTANCE,
    )
    VmId: str = _told(
        'The VM\'s unique id; "" while it is not known.',
        "13f56399-bd52-4150-9748-7190aae1ff21",
        source=INSTANCE,
    )
    ResourceId: str = _told(
        'The VM\'s ARM id; "" while it is not known.',
        "/subscriptions/8d10da13-8125-4ba9-a717-bf7490507b3d/resourceGroups/shop/providers"
        "/Microsoft.Compute/virtualMachines/web-0",
        source=INSTANCE,
    )
    Location: str = _told('The Azure region; "" while it is not known.', "westeurope", source=INSTANCE)
    Zone: str = _told('The availability zone; "" for none.', "1", "", source=INSTANCE)
    ScaleSet: str = _told('The scale set that the VM is of; "" for none.', "web", "", source=INSTANCE)
    Tags: dict[str, str] = _told("The VM's tags, by name.", {"team": "shop"}, {}, source=INSTANCE)


TellingVm = Annotated[VmData, _told("The VM that tells of this, not necessarily one that is concerned.")]


class ScheduledEventData(Part):
    """One event of IMDS: its properties as received, and what imds-bridge adds."""

    EventId: str = _told(
        "The event's id, in the letter case of IMDS, which may differ between VMs: compare without case.",
        _ID,
        source=IMDS,
    )
    EventType: str | None = _received(
        "What happens to the VMs: Freeze, Reboot, Redeploy, Preempt, Terminate, or what IMDS comes to say.",
        *("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"),
    )
    ResourceType: str | None = _received("What Resources names: VirtualMachine.", "VirtualMachine")
    Resources: list[str] | None = _received(
        "The names of the VMs concerned, `{scaleset}_{instance}` in a scale set; may be empty. Compare without case; "
        "api-version 2017-03-01 writes a `_` before each.",
        ["web-0", "web-1"],
        [],
    )
    EventStatus: str | None = _received(
        "Scheduled, Started, or what IMDS comes to say. Ends have words of imds-bridge's own.",
        *("Scheduled", "Started"),
    )
    NotBefore: str | None = _received(
        "When it starts at the earliest, as IMDS wrote it: RFC 1123 or ISO 8601; blank once it has started. "
        "Read NotBeforeUtc instead.",
        *("Fri, 20 Nov 2026 12:15:00 GMT", ""),
        unit="RFC 1123 or ISO 8601, UTC",
    )
    Description: str | None = _received(
        "What Microsoft says of it; may be blank; not before api-version 2019-04-01.",
        *("Host server is undergoing maintenance.", ""),
    )
    EventSource: str | None = _received(
        "Who began it: Platform or User; not before api-version 2019-08-01.", "Platform", "User"
    )
    DurationInSeconds: int | None = _received(
        "How long the VMs will be interrupted; 0 for no impact, -1 for unknown; not before api-version 2020-07-01.",
        *(5, 0, -1),
        unit="seconds",
    )
    PreviousStatus: str | None = _told(
        "EventStatus before this change; null where the event was not known.", "Scheduled", None
    )
    Changed: list[str] = _told(
        "The names of IMDS's properties that differ from before; empty for a new event and for an end.",
        ["NotBefore"],
        [],
    )
    Previous: dict[str, Any] = _told(
        "The former values of what Changed names, as received; null for what was not there.",
        {"NotBefore": "Fri, 20 Nov 2026 12:15:00 GMT"},
        {},
    )
    NotBeforeUtc: datetime | None = _told(
        "NotBefore as an instant; null where it is blank, missing or cannot be read.",
        *(_INSTANT, None),
        unit=TIME,
    )
    NoticeSeconds: int | None = _told(
        "From the CloudEvent's time to NotBeforeUtc, negative if that has passed; null where there is none.",
        *(900, -3, None),
        unit="seconds",
    )
    DocumentIncarnation: int | None = _told(
        "The count of the document that showed this change; it can skip and start again; null where it is no number.",
        *(12, None),
        unit="a count",
    )
    AffectsThisVm: bool | None = _told(
        "Whether Resources names the VM in Vm; null where it names none, or while that VM's name is not known. "
        "Behind duplicate detection it is chance which VM's copy survives: do not filter on it there.",
        *(True, False, None),
    )
    ApprovalSession: str | None = _told(
        "The session id for a command to the first of Resources; null where the forwarder knows no template.",
        *("shop.web-0", None),
    )
    Vm: TellingVm


class ScheduledData(ScheduledEventData):
    """An event is seen for the first time, as Scheduled (in any letter case): it is announced."""


class StartedData(ScheduledEventData):
    """An event goes to Started, or is first seen so (a host failed): its impact begins or has begun."""


class UpdatedData(ScheduledEventData):
    """Something else of a known event changes (time, VMs, duration, text), or its status is none of the known."""


class CompletedData(ScheduledEventData):
    """An event is gone after it was Started: it is over, and will have no further impact."""

    EventStatus: Literal["Completed"] = _told(
        "Completed, always; IMDS itself has no word for it.", "Completed"
    )


class CanceledData(ScheduledEventData):
    """An event is gone while Scheduled, and the watch was continuous: it did not happen."""

    EventStatus: Literal["Canceled"] = _told("Canceled, always; IMDS itself has no word for it.", "Canceled")


class EndedData(ScheduledEventData):
    """An event is gone while not seen as Started, and the watch was not continuous: it may have happened."""

    EventStatus: Literal["Ended"] = _told("Ended, always; IMDS itself has no word for it.", "Ended")


class ReceivedDocument(Part):
    """A document of IMDS, whatever it holds."""

    DocumentIncarnation: Any = _received(
        "The count of documents; a string in old versions.", *(12, "12"), unit="a count"
    )
    Events: list[Any] | None = _told("The events.", [], source=IMDS)


class DocumentChangedData(Part):
    """The document of IMDS differs from the last one: all of it as received, and what came of it."""

    Document: Annotated[ReceivedDocument, _told("The whole answer of IMDS.", source=IMDS)]
    DocumentIncarnation: int | None = _told(
        "The document's count; null where it is no number.", *(12, None), unit="a count"
    )
    PreviousIncarnation: int | None = _told(
        "The count of the document before; null for the first one.", *(11, None), unit="a count"
    )
    CloudEventIds: list[str] = _told(
        "The `id` of every scheduledevent that came of this change, in order; empty if none did.",
        ["0c2f4a2e-7a53-5d2b-8f36-52f0f2f3c7aa"],
        [],
    )
    Unreadable: int = _told(
        "How many entries of Events no event could be made of.", *(0, 1), unit="entries", ge=0
    )
    Vm: TellingVm


class UnreachableData(Part):
    """IMDS has given no good answer for five seconds: the watch is blind."""

    Since: datetime | None = _told("The last good answer; null for none ever.", *(_INSTANT, None), unit=TIME)
    Reason: str = _told("What went wrong, for people to read.", "IMDS at http://169.254.169.254 answered 500")
    Vm: TellingVm


class RecoveredData(Part):
    """IMDS gives good answers again: what happened between BlindFrom and BlindTo may never have been seen."""

    BlindFrom: datetime | None = _told(
        "The last good answer before; null for none.", *(_INSTANT, None), unit=TIME
    )
    BlindTo: datetime = _told("The first good answer again.", "2026-11-20T12:16:00.500Z", unit=TIME)
    BlindSeconds: float | None = _told(
        "From BlindFrom to BlindTo; null without BlindFrom.", *(60.5, None), unit="seconds"
    )
    Vm: TellingVm


class HeartbeatData(Part):
    """A process lives: told at its start, hourly, and at its end on purpose."""

    Reason: str = _told("Why it is told now: Started, Hourly or Stopping.", "Started", "Hourly", "Stopping")
    Version: str = _told("The version of imds-bridge.", "0.1.0")
    LastReporterSeq: int = _told(
        "The highest `reporterseq` given in this `reporterepoch`, which is this event's own.",
        4,
        unit="a count",
        ge=0,
    )
    Backlog: dict[str, int] = _told(
        "How many events wait, by the name of the sink, before this one.", {"audit": 0}, unit="events"
    )
    Vm: TellingVm


class CommandData(Part):
    """The command that a receipt answers; only its Id where it could not be read."""

    Id: str = _told(
        "The command's id, printable characters only; may be blank.",
        "order-17",
        source=f"{SENDER}, or the message id",
    )
    RequestedBy: str | None = _asked("Who asks, as the command says: never trusted.", "ops@example.org", "")
    Reason: str | None = _asked("Why, as the command says.", "drained", "")
    Vm: str | None = _asked("The VM that the command is meant for; blank for whoever gets it.", "web-0", "")
    ExpiresAt: datetime | None = _asked("Until when the command is valid.", *(_INSTANT, None), unit=TIME)


class ReceiptData(Part):
    """What became of a command for one EventId."""

    EventId: str | None = _told(
        "The event; null where the command could not be read or believed.",
        _ID,
        None,
        source="IMDS or the command",
    )
    Resources: list[str] = _told(
        "The names of all VMs that the approval releases; empty where the event is not known.",
        ["web-0", "web-1"],
        [],
        source=IMDS,
    )
    Reason: str = _told("Why, as one word.", "approved")
    Detail: str = _told("More of it, for people to read; may be blank.", "", "a deny rule matches")
    Command: Annotated[CommandData, _told("The command that is answered.")]
    EventType: str | None = _told(
        "What would happen to the VMs; null where the event is not known.",
        *("Reboot", None),
        source=IMDS,
    )
    NotBeforeUtc: datetime | None = _told(
        "When the event starts at the earliest; null where it is not known.", *(_INSTANT, None), unit=TIME
    )
    DryRun: bool = _told("Whether the listener only says what it would do (`listen --dry-run`).", False)
    Vm: TellingVm


class AcceptedData(ReceiptData):
    """IMDS has taken the approval, now or before; the start may still wait for other VMs, or for NotBefore."""

    Outcome: Literal["Accepted"] = _told("Accepted, always.", "Accepted")
    Reason: str = _told("approved or already_approved.", "approved", "already_approved")


class RejectedData(ReceiptData):
    """The listener refuses the command; nothing was approved by it."""

    Outcome: Literal["Rejected"] = _told("Rejected, always.", "Rejected")
    Reason: str = _told(
        "malformed, bad_signature, expired, unknown_event, already_started, other_vm or denied.",
        *("malformed", "bad_signature", "expired", "unknown_event", "already_started", "other_vm", "denied"),
    )
    Count: int | None = _told(
        "How many further messages of a minute this one receipt stands for; there only where it stands for several.",
        25,
        unit="messages",
        default=None,
        ge=1,
    )


class FailedData(ReceiptData):
    """The approval was allowed but IMDS did not take it, or could not be asked in time."""

    Outcome: Literal["Failed"] = _told("Failed, always.", "Failed")
    Reason: str = _told("imds_refused or imds_unavailable.", "imds_refused", "imds_unavailable")


class TestData(Part):
    """Somebody has called `imds-bridge check --send`: nothing is scheduled."""

    Message: str = _told(
        "What this is, for people to read.", "This is a test of imds-bridge; nothing is scheduled."
    )
    Version: str = _told("The version of imds-bridge.", "0.1.0")
    Vm: TellingVm


EventIdText = Annotated[str, Field(pattern=r"^[!-~]{1,200}$", title="EventId", examples=[_ID])]


class StartRequest(Part):
    """One entry of IMDS's own form."""

    EventId: EventIdText = _told("The event to start.", _ID, source=SENDER)


class ApproveData(Part):
    """Have events started that stand in the document as Scheduled.

    Give exactly one of EventId, EventIds and StartRequests. It comes as the data of a CloudEvent of this type, whose
    `id` then names the command, or alone as JSON (at most 256 KiB).
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [name]} for name in ("EventId", "EventIds", "StartRequests")]
        }
    )

    EventId: EventIdText = _asked("The event to start, in any letter case.", _ID)
    EventIds: list[EventIdText] = _asked(
        "The events to start; each gets a receipt of its own.", [_ID], min_length=1, max_length=100
    )
    StartRequests: list[StartRequest] = _asked(
        "The events to start, in the form in which IMDS itself takes them.",
        [{"EventId": _ID}],
        min_length=1,
        max_length=100,
    )
    Id: str | None = _asked(
        "The command's id where no CloudEvent is around it; else the message id counts. The same command, however "
        "often it comes, is decided once.",
        "order-17",
    )
    Vm: str | None = _asked(
        "The name of the VM that is meant, in printable characters; any other one rejects the command. Missing, null "
        "or blank for whoever gets it.",
        "web-0",
        pattern=r"^$|\S",
        max_length=1000,
    )
    RequestedBy: str | None = _asked("Who asks; told on in the receipt, never trusted.", "ops@example.org")
    Reason: str | None = _asked("Why; told on in the receipt.", "drained")
    ExpiresAt: datetime | None = _asked(
        "Until when the command is valid; afterwards it is rejected as expired.",
        "2026-11-20T12:00:00Z",
        unit="RFC 3339, with a capital T, and with a capital Z or an offset",
        json_schema_extra={"pattern": r"^[0-9-]{10}T[0-9:.]+(Z|[+-][0-9:]{5})$"},
    )


# The first version of each: a model whose change would break a consumer becomes a type `.v2` beside it.
DATA: dict[str, type[Part]] = {
    "scheduledevent.scheduled": ScheduledData,
    "scheduledevent.started": StartedData,
    "scheduledevent.updated": UpdatedData,
    "scheduledevent.completed": CompletedData,
    "scheduledevent.canceled": CanceledData,
    "scheduledevent.ended": EndedData,
    "document.changed": DocumentChangedData,
    "imds.unreachable": UnreachableData,
    "imds.recovered": RecoveredData,
    "bridge.heartbeat": HeartbeatData,
    "bridge.test": TestData,
    "approval.accepted": AcceptedData,
    "approval.rejected": RejectedData,
    "approval.failed": FailedData,
    "command.approve": ApproveData,
}
