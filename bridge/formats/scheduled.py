"""Describe a Scheduled Event: what happens to which VMs, when, and what that means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain

from bridge.formats.message import Field, Message, RenderContext, Tone
from bridge.formats.text import DAY_SECONDS, format_duration, instant_of, sanitize, truncate
from bridge.formats.view import EventView
from bridge.imds.document import SCHEDULED, STARTED, is_among, names
from bridge.runtime.json import Json

_NOUN_LENGTH = 30
_VMS_LENGTH = 1_000
_RELEASES_LENGTH = 300
_CHANGE_LENGTH = 150
_MAX_CHANGES = 4
_MINUTE_SECONDS = 60
_NOUNS = {"preempt": "Spot eviction (Preempt)", "terminate": "Deletion (Terminate)"}
_MEANINGS = {
    "freeze": "A pause, mostly of seconds: memory and files are kept, open connections may drop.",
    "reboot": "A restart: memory is lost, disks are kept.",
    "redeploy": "A move to another host: memory and the ephemeral (temporary) disk are lost.",
    "preempt": "Azure takes the Spot VM back: it is deleted, its ephemeral disk is lost. The notice is best effort.",
    "terminate": "The VM is deleted.",
}
_DELETING = ("preempt", "terminate")
_LONGEST_SECONDS = 365 * DAY_SECONDS
_SOURCES = {"platform": "Azure (platform)", "user": "a user or automation of yours"}
# Can be pasted into a shell as it is, and is not an option.
_PLAIN_WORD = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_ENDS: Mapping[str, tuple[Tone, str, str]] = {
    "completed": ("good", "is over", ""),
    "canceled": (
        "accent",
        "is canceled: it did not happen",
        "It was removed before it started; there is nothing to do.",
    ),
    "ended": ("default", "is gone; whether it ran is unknown", ""),
}
_END_REASONS = {
    "Restart": "It was removed while imds-bridge was restarted",
    "Gap": "It was removed while IMDS could not be reached",
    "Reset": "IMDS was restarted, and the event has not come back",
    "IncarnationSkipped": "It was removed by a change of the document that was not seen",
    "IncarnationUnknown": "The document had no incarnation that can be read",
    "EntryUnreadable": "An entry of the document can no longer be read",
    "UnknownStatus": "Its status was unknown to imds-bridge",
    "NotBeforeUnknown": "Its start was unknown",
    "NotBeforePassed": "Its earliest start had passed when it was removed",
}


def noun_of(view: EventView) -> str:
    """Return the type of the event as a noun; an unknown type as it is."""
    known = _NOUNS.get(view.event_type.lower(), view.event_type)
    return truncate(known, _NOUN_LENGTH, mark="…") or "Event"


def describe_scheduled_event(view: EventView, context: RenderContext) -> Message:
    """Describe what happened to the event."""
    transition = view.kind.partition(".")[2]
    meaning = _MEANINGS.get(view.event_type.lower(), "")
    if transition in _ENDS:
        tone, what, sentence = _ENDS[transition]
        title = view.title(noun_of(view), f" {what}")
        if transition == "completed":
            sentence = meaning
        return _message(tone, title, (sentence, _end_reason(view)), _about(view, context))
    fields = chain(_changes(view, context), _when(view, context), _about(view, context))
    tone = "warning" if view.status == SCHEDULED else "attention"
    title = view.title(*_what_happens(transition, view, context))
    return _message(tone, title, (meaning, _advice(view, context)), fields)


def _end_reason(view: EventView) -> str:
    """Say why it is unknown whether an event happened, and whether this VM has rebooted."""
    reason = _END_REASONS.get(view.get("EndReason"), "")
    if view.data.get("VmRebooted") is True:
        return f"{reason or 'IMDS no longer lists it'}; this VM has rebooted since."
    return f"{reason}." if reason else ""


def _message(tone: Tone, title: str, sentences: Iterable[str], fields: Iterable[Field]) -> Message:
    return Message(tone=tone, title=title, sentences=tuple(filter(None, sentences)), fields=tuple(fields))


def _what_happens(transition: str, view: EventView, context: RenderContext) -> tuple[str, str]:
    """Return the parts of the title before and after the VMs."""
    noun, status = noun_of(view), view.status
    if status == SCHEDULED:
        start = view.not_before
        after = _start_text(view, context)
        if transition != "updated":
            return noun, after
        if view.get("PreviousStatus").lower() == STARTED:
            return f"Back to scheduled: {noun}", after
        moved = start is not None and "NotBefore" in names(view.data.get("Changed"))
        return f"Changed: {noun}", f" now{after}" if moved else after
    if status != STARTED:
        return (
            f"Changed: {noun}",
            f": its status is {truncate(view.get('EventStatus'), _NOUN_LENGTH) or 'unknown'}",
        )
    return (noun, " has started") if transition == "started" else (f"Changed: {noun}", ", which has started")


def _start_text(view: EventView, context: RenderContext) -> str:
    start = view.not_before
    if start is None:
        return " is scheduled (its start is unknown)"
    was = "" if context.seconds_until(start) > 0 else " was due"
    return f"{was} {context.relative(start)} ({context.time(start)})"


def _changes(view: EventView, context: RenderContext) -> Iterator[Field]:
    """Describe each change by the values before and after."""
    changed = names(view.data.get("Changed")) if view.kind.endswith(".updated") else ()
    previous = view.data.get("Previous")
    for name in changed[:_MAX_CHANGES]:
        old = previous.get(name) if isinstance(previous, Mapping) else None
        new = view.data.get("NotBeforeUtc" if name == "NotBefore" else name)
        first, second = instant_of(old), instant_of(new)
        if name == "NotBefore" and first and second:
            yield context.field("Changed", "start, from ", first, " to ", second, _short_move(first, second))
        else:
            yield context.field(
                "Changed", f"{sanitize(name, _NOUN_LENGTH)}, from {_value(old)} to {_value(new)}"
            )
    if len(changed) > _MAX_CHANGES:
        yield context.field("Changed", "and more")


def _short_move(first: datetime, second: datetime) -> str:
    """Describe a move that times without seconds do not show."""
    seconds = round((second - first).total_seconds())
    return (
        ""
        if abs(seconds) >= _MINUTE_SECONDS
        else f" ({abs(seconds)} s {'later' if seconds > 0 else 'earlier'})"
    )


def _value(value: Json) -> str:
    """Write a property before or after a change."""
    listed = ", ".join(sanitize(name, _CHANGE_LENGTH) for name in names(value)[:50])
    return truncate(listed or sanitize(value, _CHANGE_LENGTH) or "nothing", _CHANGE_LENGTH)


def _when(view: EventView, context: RenderContext) -> Iterator[Field]:
    start = view.not_before
    if view.status == SCHEDULED and start:
        due = "automatically " if context.seconds_until(start) > 0 else "was due "
        yield context.field("Starts", f"{due}{context.relative(start)}, at ", start)
    if lasts := _lasts(view):
        yield context.field("Lasts", lasts)
    if view.status == SCHEDULED:
        yield from _approval(view, context)


def _lasts(view: EventView) -> str:
    seconds = view.data.get("DurationInSeconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return ""
    if seconds < 0 or seconds > _LONGEST_SECONDS:
        return "" if view.event_type.lower() in _DELETING else "unknown"
    return f"about {format_duration(seconds)}" if seconds else "no impact on the VM is expected"


def _about(view: EventView, context: RenderContext) -> Iterator[Field]:
    if view.count and not _releases_many(view):  # which names them all
        label = "VM" if view.count == 1 else f"{view.count} VMs"
        yield context.field(label, view.vms(_VMS_LENGTH))
    if source := view.get("EventSource"):
        yield context.field("Initiated by", _SOURCES.get(source.lower(), source))
    if description := view.get("Description"):
        yield context.field("Azure says", description)


def _approval(view: EventView, context: RenderContext) -> Iterator[Field]:
    """Describe how to approve, and every VM that an approval releases."""
    first = (names(view.data.get("Resources")) or (view.of_vm("Name"),))[0].removeprefix("_")
    arguments = {"": view.event_id, "--vm": first, "--resource-group": view.resource_group}
    if not view.get("ApprovalSession"):
        yield context.field(
            "Approval", "not set up over Service Bus; POST to IMDS on the VM to start the event earlier"
        )
    elif all(_PLAIN_WORD.fullmatch(word) for word in arguments.values()):
        options = " ".join(f"{name} {word}".strip() for name, word in arguments.items())
        yield context.field("Approve", f"imds-bridge approve {options}", is_code=True)
    else:
        yield context.field("Approve", "with imds-bridge approve on the VM, which lists what is scheduled")
    if view.event_type.lower() == "terminate":
        yield context.field("Approval", "only the VM itself can approve its own deletion")
    elif _releases_many(view):
        count = {2: "both"}.get(view.count, f"all {view.count}")
        yield context.field("Approval releases", f"{count} VMs: {view.vms(_RELEASES_LENGTH)}")


def _releases_many(view: EventView) -> bool:
    can_be_approved = view.status == SCHEDULED and view.event_type.lower() != "terminate"
    return can_be_approved and view.count > 1


def _advice(view: EventView, context: RenderContext) -> str:
    """Advise to redeploy if the platform gives days of notice, as it does for failing hardware."""
    start = view.not_before
    if view.get("EventSource").lower() != "platform" or view.status != SCHEDULED or start is None:
        return ""
    if context.seconds_until(start) <= DAY_SECONDS:
        return ""
    group, vm = view.resource_group, _degrading(view)
    hint = ""
    if _PLAIN_WORD.fullmatch(group) and _PLAIN_WORD.fullmatch(vm) and not view.of_vm("ScaleSet"):
        hint = f" (az vm redeploy --resource-group {group} --name {vm})"
    return (
        "Azure gives days of notice where hardware degrades: it may fail sooner. "
        f"Microsoft advises to redeploy the VM now{hint}."
    )


def _degrading(view: EventView) -> str:
    """Return the VM to redeploy, "" if that is not clear: in a group, the reporting VM may not be affected."""
    affected, reporting = names(view.data.get("Resources")), view.of_vm("Name")
    if is_among(reporting, affected):
        return reporting
    return affected[0].removeprefix("_") if len(affected) == 1 else ""
