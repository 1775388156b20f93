"""Describe any event in words, which the chat formats only lay out: `EventView` reads it, `notice` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, tzinfo
from typing import Literal

from bridge.contract.types import is_new_type
from bridge.formats.reasons import REASONS, Reason
from bridge.formats.text import DAY_SECONDS, format_duration, format_relative, instant_of, join_names
from bridge.imds.document import SCHEDULED, STARTED, fold_name, names
from bridge.imds.instance import resource_group_of
from bridge.runtime.json import Json, object_of
from bridge.runtime.text import length, sanitize, truncate

Part = str | datetime
Tone = Literal["warning", "attention", "good", "accent", "default"]

NAME_LENGTH = 100
TITLE_LENGTH = 146  # with its symbol it is a Slack header of 150
_TITLE_NAMES = 3
_SHORT_VM_LENGTH = 64
_MAX_NAMES = 200  # more do not fit into any message
_EXACT_SECONDS = 120
_TYPE = re.compile(r"io\.imdsbridge\.([a-z]+\.[a-z]+)\.v1")
# Squares are shown alike in notifications, on phones and in every chat.
SYMBOLS = {"warning": "🟧", "attention": "🟥", "good": "🟩", "accent": "🟦", "default": "⬜"}
# The age of a younger event is not shown.
_OLD_SECONDS = 60
_LINE_LENGTH = 400
_NOUN_LENGTH = 30
_VMS_LENGTH = 1_000
_RELEASES_LENGTH = 300
_CHANGE_LENGTH = 150
_MAX_CHANGES = 4
_NOUNS = {"preempt": "Spot eviction (Preempt)", "terminate": "Deletion (Terminate)"}
_MEANINGS = {
    "freeze": "A pause, mostly of seconds: memory and files are kept, open connections may drop.",
    "reboot": "A restart: memory is lost, disks are kept.",
    "redeploy": "A move to another host: memory and the ephemeral (temporary) disk are lost.",
    "preempt": "Azure takes the Spot VM back: it is deleted or deallocated. The notice is best effort.",
    "terminate": "The VM is deleted.",
}
_TONES: Mapping[str, Tone] = {SCHEDULED: "warning", STARTED: "attention"}  # what is unknown is no alarm
_GONE = "The VM is deleted, or if a Spot VM perhaps deallocated: there is nothing to put back to work."
_DELETING = ("preempt", "terminate")
_LONGEST_SECONDS = 365 * DAY_SECONDS
_SOURCES = {"platform": "Azure (platform)", "user": "a user or automation of yours"}
# Can be pasted into a shell as it is, and is not an option.
_PLAIN_WORD = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_NOTHING_TO_DO = "It was removed before it started; there is nothing to do."
_ENDS: Mapping[str, tuple[Tone, str, str]] = {
    "completed": ("good", "is over", ""),
    "canceled": ("accent", "is canceled: it did not happen", _NOTHING_TO_DO),
    "ended": ("default", "is gone; whether it ran is unknown", ""),
}
_END_REASONS = {
    "Restart": "It was removed while imds-bridge was restarted",
    "Gap": "It was removed while IMDS could not be reached",
    "Reset": "IMDS was restarted, and the event has not come back",
    "IncarnationSkipped": "It was removed by a change of the document that was not seen",
    "IncarnationUnknown": "The document had no incarnation that can be read",
    "EntryUnreadable": "An entry of the document can no longer be read",
    "Advisory": "It was an early warning: nothing was scheduled",
    "UnknownStatus": "Its status was unknown to imds-bridge",
    "NotBeforeUnknown": "Its start was unknown",
    "NotBeforePassed": "Its earliest start had passed when it was removed",
    "ClockJumped": "It was removed after the VM's clock had jumped: whether its earliest start had passed is unknown",
}
_REASON_LENGTH = 45  # in the title
_OUTCOMES: Mapping[str, tuple[Tone, str]] = {
    "accepted": ("accent", "Approved"),
    "rejected": ("warning", "Approval rejected"),
    "failed": ("attention", "Approval failed"),
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A labelled value.

    `text` is the whole value. `parts` are the same with instants kept as such, for receivers that show each reader's
    own time zone; in a value with an instant, the texts around it are never from outside. `is_code` marks a command
    to copy.
    """

    label: str
    text: str
    parts: tuple[Part, ...]
    is_code: bool = False

    @property
    def has_instant(self) -> bool:
        """Whether an instant is among the parts."""
        return any(isinstance(part, datetime) for part in self.parts)


def format_time(instant: datetime, now: datetime, zone: tzinfo = UTC) -> str:
    """Write the time of day with its zone, and the date unless it is today's."""
    local = instant.astimezone(zone)
    name = local.tzname() or ""
    date = "" if local.date() == now.astimezone(zone).date() else f"{local:%a %d %b} "
    is_near = abs((instant - now).total_seconds()) < _EXACT_SECONDS
    time = f"{local:%H:%M:%S}" if is_near else f"{local:%H:%M}"
    return f"{date}{time} {'UTC' if name[:1] in '+-' else ''}{name}"


class EventView:
    """What a CloudEvent says, as sanitized text; the attributes are what several types of events have.

    `kind` is the middle of the type, for example `scheduledevent.started`, "" for types of other programs. `status`
    is in lower case. `vm` reports the event; `short_vm` is short enough for a title. `resources` are the affected
    VMs, the reporting one first and at most some hundreds, of `count`. A text without a value is "".

    Args:
        event: of any type, known or not, with any data.
        now: the time of the attempt, from which "in 15 min" counts.
        zone: in which times are written; None is UTC.
    """

    def __init__(self, event: Mapping[str, Json], *, now: datetime, zone: tzinfo | None = None) -> None:
        self.event, self._now, self._zone = event, now, zone or UTC
        self.data = object_of(event.get("data"))
        self.type = sanitize(event.get("type")) or "unknown"
        match = _TYPE.fullmatch(self.type)
        self.kind = match[1] if match else ""
        self.time = instant_of(event.get("time"))
        self.subject = sanitize(event.get("subject"))
        self.event_id = self.get("EventId")
        self.event_type = sanitize(self.data.get("EventType"), NAME_LENGTH)
        self.status = self.get("EventStatus").lower()
        self.not_before = instant_of(self.data.get("NotBeforeUtc")) or instant_of(self.data.get("NotBefore"))
        self.vm = self.of_vm("Name") or self.subject or "a VM"
        self.short_vm = truncate(self.vm, _SHORT_VM_LENGTH, mark="…")
        self.resource_group = resource_group_of(self.of_vm("ResourceId"))
        affected = names(self.data.get("Resources"))
        self.count = len(affected)
        this = fold_name(self.vm)
        first = sorted(affected, key=lambda name: fold_name(name[:NAME_LENGTH]) != this)[:_MAX_NAMES]
        self.resources = tuple(sanitize(name, NAME_LENGTH) or "(no name)" for name in first)

    def get(self, name: str) -> str:
        """Read a property of `data`."""
        return sanitize(self.data.get(name))

    def of_vm(self, name: str) -> str:
        """Read a property of the VM that reports the event."""
        return sanitize(object_of(self.data.get("Vm")).get(name))

    def fleet(self, tags: Sequence[str]) -> str:
        """Name the resource group and the scale set of the VM that reports, and those of its tags that are wanted."""
        of_vm = object_of(object_of(self.data.get("Vm")).get("Tags"))
        given = {name.casefold(): sanitize(value, NAME_LENGTH) for name, value in of_vm.items()}
        parts = [("resource group", self.resource_group), ("scale set", self.of_vm("ScaleSet"))]
        parts += [(name, given.get(name.casefold(), "")) for name in tags]
        return truncate(", ".join(f"{label} {text}" for label, text in parts if text), _LINE_LENGTH)

    def vms(self, max_length: int, max_names: int | None = None) -> str:
        """Name the affected VMs, as many as fit."""
        return join_names(self.resources, max_length=max_length, max_names=max_names, total=self.count)

    def title(self, before: str, after: str) -> str:
        """Write a title with the affected VMs in its middle, as many as fit."""
        if not self.count:
            return truncate(f"{before} (no VM is named){after}", TITLE_LENGTH)
        max_length = TITLE_LENGTH - length(f"{before} of {after}")
        return f"{before} of {self.vms(max_length, _TITLE_NAMES)}{after}"

    def seconds_until(self, instant: datetime) -> float:
        """Return the seconds to an instant; negative once it is over."""
        return (instant - self._now).total_seconds()

    def relative(self, instant: datetime) -> str:
        """Write when that is: `in 15 min` or `3 min ago`."""
        return format_relative(self.seconds_until(instant))

    def clock(self, instant: datetime) -> str:
        """Write the time of day; see format_time."""
        return format_time(instant, self._now, self._zone)

    def field(self, label: str, *parts: Part, is_code: bool = False) -> Field:
        """Make a field of texts and instants."""
        text = "".join(self.clock(part) if isinstance(part, datetime) else part for part in parts)
        return Field(label=label, text=text, parts=parts, is_code=is_code)

    def fields(self, texts: Mapping[str, str]) -> Iterator[Field]:
        """Make a field of each text that is not blank."""
        return (self.field(label, text) for label, text in texts.items() if text)


@dataclass(frozen=True, kw_only=True)
class Message:
    """An event in words: its tone, a title that says all, sentences that explain it, and fields."""

    tone: Tone
    title: str
    sentences: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Notice(Message):
    """A message with everything that a format or a template may show of an event.

    All texts have a limited length and no control characters; markup is left to the formats. `headline` is the
    title with a symbol of its tone, `text` the whole message in lines, `command` the one to approve with. `kind` is
    the middle of the type, for example `scheduledevent.started`, "" for types of other programs. `event_id`,
    `event_type`, `vm` (which reports the event), `resource_group` and `fleet` are "" if the event has none.
    """

    headline: str
    text: str
    command: str
    details: tuple[Field, ...]
    kind: str
    event_id: str
    event_type: str
    vm: str
    resource_group: str
    fleet: str


def notice(
    event: Mapping[str, Json], *, now: datetime, zone: tzinfo | None, tags: Sequence[str] = ()
) -> Notice:
    """Describe a CloudEvent to people.

    Args:
        event: of any type, known or not, with any data.
        now: the time of the attempt, from which "in 15 min" counts.
        zone: in which times are written; None is UTC.
        tags: the names of those of the VM's tags that are shown.
    """
    view = EventView(event, now=now, zone=zone)
    fleet = view.fleet(tags)
    family = view.kind.partition(".")[0]
    describe = _DESCRIPTIONS.get(view.kind) or _DESCRIPTIONS.get(family, _describe_unknown)
    message = describe(view)
    # first, where no receiver cuts it off
    message = replace(message, fields=(*view.fields({"Fleet": fleet}), *message.fields))
    headline = f"{SYMBOLS[message.tone]} {message.title}"
    details = tuple(_details(view))
    lines = (f"{field.label}: {field.text}" for field in (*message.fields, *details))
    return Notice(
        **vars(message),
        headline=headline,
        text="\n".join((headline, *message.sentences, *lines)),
        command=next((field.text for field in message.fields if field.is_code), ""),
        details=details,
        kind=view.kind,
        event_id=view.event_id,
        event_type=view.event_type,
        vm=view.vm,
        resource_group=view.resource_group,
        fleet=fleet,
    )


def _message(tone: Tone, title: str, *sentences: str, fields: Iterable[Field] = ()) -> Message:
    return Message(tone=tone, title=title, sentences=tuple(filter(None, sentences)), fields=tuple(fields))


def _noun(view: EventView) -> str:
    """Return the type of the event as a noun; an unknown type as it is."""
    known = _NOUNS.get(view.event_type.lower(), view.event_type)
    return truncate(known, _NOUN_LENGTH, mark="…") or "Event"


def _describe_scheduled_event(view: EventView) -> Message:
    """Describe what happened to the event."""
    transition = view.kind.partition(".")[2]
    meaning = _MEANINGS.get(view.event_type.lower(), "")
    if view.get("EndReason") == "Advisory":
        return _message(
            "default", view.title("Early warning", " is over"), _end_reason(view), fields=_about(view)
        )
    if transition in _ENDS:
        tone, what, sentence = _ENDS[transition]
        if transition == "completed":
            sentence = meaning
        if view.data.get("VmIsGone") is True:
            tone, what, sentence = "default", "is over: the VM is gone", _GONE
        title = view.title(_noun(view), f" {what}")
        return _message(tone, title, sentence, _end_reason(view), fields=_about(view))
    fields = (*_changes(view), *_when(view), *_about(view))
    if transition == "advised":
        title = view.title("Early warning", ": Azure may take this Spot VM back")
        return _message("accent", title, "Nothing is scheduled, and nothing can be approved.", fields=fields)
    tone = "accent" if is_new_type(view.event_type) else _TONES.get(view.status, "accent")
    title = view.title(*_what_happens(transition, view))
    return _message(tone, title, meaning, _advice(view), fields=fields)


def _end_reason(view: EventView) -> str:
    """Say why it is unknown whether an event happened, and whether this VM has rebooted."""
    reason = _END_REASONS.get(view.get("EndReason"), "")
    if view.data.get("VmRebooted") is True:
        return f"{reason or 'IMDS no longer lists it'}; this VM has rebooted since."
    return f"{reason}." if reason else ""


def _what_happens(transition: str, view: EventView) -> tuple[str, str]:
    """Return the parts of the title before and after the VMs."""
    noun, status = _noun(view), view.status
    if status == SCHEDULED:
        start = view.not_before
        after = _start_text(view)
        if transition != "updated":
            return noun, after
        if view.get("PreviousStatus").lower() == STARTED:
            return f"Back to scheduled: {noun}", after
        moved = start is not None and "NotBefore" in names(view.data.get("Changed"))
        return f"Changed: {noun}", f" now{after}" if moved else after
    if status != STARTED:
        known = truncate(view.get("EventStatus"), _NOUN_LENGTH) or "unknown"
        return f"Changed: {noun}", f": its status is {known}"
    return (noun, " has started") if transition == "started" else (f"Changed: {noun}", ", which has started")


def _start_text(view: EventView) -> str:
    start = view.not_before
    if start is None:
        return " is scheduled (its start is unknown)"
    was = "" if view.seconds_until(start) > 0 else " was due"
    return f"{was} {view.relative(start)} ({view.clock(start)})"


def _changes(view: EventView) -> Iterator[Field]:
    """Describe each change by the values before and after."""
    changed = names(view.data.get("Changed")) if view.kind.endswith(".updated") else ()
    previous = object_of(view.data.get("Previous"))
    for name in changed[:_MAX_CHANGES]:
        old = previous.get(name)
        new = view.data.get("NotBeforeUtc" if name == "NotBefore" else name)
        first, second = instant_of(old), instant_of(new)
        if name == "NotBefore" and first and second:
            yield view.field("Changed", "start, from ", first, " to ", second)
        else:
            shown = sanitize(name, _NOUN_LENGTH)
            yield view.field("Changed", f"{shown}, from {_value(old)} to {_value(new)}")
    if len(changed) > _MAX_CHANGES:
        yield view.field("Changed", "and more")


def _value(value: Json) -> str:
    """Write a property before or after a change."""
    listed = ", ".join(sanitize(name, _CHANGE_LENGTH) for name in names(value)[:50])
    return truncate(listed or sanitize(value, _CHANGE_LENGTH) or "nothing", _CHANGE_LENGTH)


def _when(view: EventView) -> Iterator[Field]:
    start = view.not_before
    if view.status == SCHEDULED and start:
        due = "automatically " if view.seconds_until(start) > 0 else "was due "
        yield view.field("Starts", f"{due}{view.relative(start)}, at ", start)
    yield from view.fields({"Lasts": _lasts(view)})
    if view.status == SCHEDULED:
        yield from _approval(view)


def _lasts(view: EventView) -> str:
    seconds = view.data.get("DurationInSeconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return ""
    if seconds < 0 or seconds > _LONGEST_SECONDS:
        return "" if view.event_type.lower() in _DELETING else "unknown"
    return f"about {format_duration(seconds)}" if seconds else "no impact on the VM is expected"


def _about(view: EventView) -> Iterator[Field]:
    source = view.get("EventSource")
    vms = "" if _releases_many(view) else view.vms(_VMS_LENGTH)  # else the approval names them all
    return view.fields(
        {
            "VM" if view.count == 1 else f"{view.count} VMs": vms,
            "Initiated by": _SOURCES.get(source.lower(), source),
            "Azure says": view.get("Description"),
        }
    )


def _approval(view: EventView) -> Iterator[Field]:
    """Describe how to approve, and every VM that an approval releases."""
    first = (names(view.data.get("Resources")) or (view.of_vm("Name"),))[0].removeprefix("_")
    arguments = {"": view.event_id, "--vm": first, "--resource-group": view.resource_group}
    if not view.get("ApprovalSession"):
        advice = "not set up over Service Bus; POST to IMDS on the VM to start the event earlier"
        yield view.field("Approval", advice)
    elif all(_PLAIN_WORD.fullmatch(word) for word in arguments.values()):
        options = " ".join(f"{name} {word}".strip() for name, word in arguments.items())
        yield view.field("Approve", f"imds-bridge approve {options}", is_code=True)
    else:
        yield view.field("Approve", "with imds-bridge approve on the VM, which lists what is scheduled")
    if view.event_type.lower() == "terminate":
        yield view.field("Approval", "only the VM itself can approve its own deletion")
    elif _releases_many(view):
        count = {2: "both"}.get(view.count, f"all {view.count}")
        yield view.field("Approval releases", f"{count} VMs: {view.vms(_RELEASES_LENGTH)}")


def _releases_many(view: EventView) -> bool:
    can_be_approved = view.status == SCHEDULED and view.event_type.lower() != "terminate"
    return can_be_approved and view.count > 1


def _advice(view: EventView) -> str:
    """Advise to redeploy if the platform gives days of notice, as it does for failing hardware."""
    start = view.not_before
    if view.get("EventSource").lower() != "platform" or view.status != SCHEDULED or start is None:
        return ""
    if view.seconds_until(start) <= DAY_SECONDS:
        return ""
    return (
        "Azure gives days of notice where hardware degrades: it may fail sooner. "
        "Microsoft advises to redeploy the VM now."
    )


def _describe_receipt(view: EventView) -> Message:
    """Describe whether the event was approved, why not, and what follows; without a known VM, which VM answers."""
    outcome = view.kind.partition(".")[2]
    unknown: tuple[Tone, str] = ("default", f"Approval {truncate(outcome, _NOUN_LENGTH)}")
    tone, text = _OUTCOMES.get(outcome, unknown)
    reason = REASONS.get(view.get("Reason"), Reason(view.get("Reason"), ""))
    text, sentence = reason.title or text, reason.sentence
    if view.data.get("DryRun") is True:
        text, sentence = f"Dry run, not sent: {text}", "This was a dry run: nothing was sent to IMDS."
    after = f" ({truncate(reason.short, _REASON_LENGTH)})" if reason.short else ""
    what = f"{text}: {_noun(view)}" if view.count or view.event_type else text
    title = view.title(what, after) if view.count else f"{what} on {view.short_vm}{after}"
    return _message(tone, truncate(title, TITLE_LENGTH), sentence, fields=_receipt_fields(view))


def _describe_prepared(view: EventView) -> Message:
    """Say that a VM is prepared, and when the event starts unless it is approved."""
    start = view.not_before
    fields = [view.field("Starts", f"{view.relative(start)}, at ", start)] if start else []
    return _message("good", view.title(f"{view.short_vm} is prepared: {_noun(view)}", ""), fields=fields)


def _describe_of_work(view: EventView) -> Message:
    """Say that a VM is back at work, or that it is not."""
    since, noun = instant_of(view.data.get("Since")), f" after {_noun(view)}" if view.event_type else ""
    fields = [view.field("Out of work since", since)] if since else []
    if view.kind == "approval.recovered":
        return _message("good", f"{view.short_vm} is back at work{noun}", fields=fields)
    fields += view.fields({"Detail": view.get("Detail")})
    what_to_do = "`imds-bridge status --role listen` on the VM says what it waits for."
    return _message("attention", f"{view.short_vm} is still out of work{noun}", what_to_do, fields=fields)


def _receipt_fields(view: EventView) -> Iterator[Field]:
    command = object_of(view.data.get("Command"))
    yield from view.fields(
        {
            "Reason": "" if view.get("Reason") in REASONS else view.get("Reason"),
            "Detail": view.get("Detail"),
            "Releases": view.vms(_LINE_LENGTH) if view.kind.endswith(".accepted") else "",
            "Requested by": sanitize(command.get("RequestedBy")),
            "Because": sanitize(command.get("Reason")),
        }
    )
    start = view.not_before
    if start and view.seconds_until(start) > 0:
        yield view.field("Starts automatically", f"{view.relative(start)}, at ", start)
    yield from view.fields({"Command": sanitize(command.get("Id"))})


def _details(view: EventView) -> Iterator[Field]:
    zone = view.of_vm("Zone")
    places = filter(None, [view.vm, view.of_vm("Location"), f"zone {zone}" if zone else ""])
    yield from view.fields(
        {"EventId": view.event_id, "Reported by": truncate(", ".join(places), _LINE_LENGTH)}
    )
    if view.time:
        is_old = view.seconds_until(view.time) < -_OLD_SECONDS
        yield view.field("Seen at", view.time, f", {view.relative(view.time)}" if is_old else "")


def _describe_unreachable(view: EventView) -> Message:
    since = instant_of(view.data.get("Since"))
    duration = f"for {format_duration(view.seconds_until(since))}" if since else "since it started"
    fields = [view.field("Unreachable since", since)] if since else []
    did_not_run = view.get("Cause") in ("Restart", "NotPolled")
    return _message(
        "attention",
        f"{view.short_vm} has not seen its Scheduled Events {duration}",
        "imds-bridge did not run meanwhile."
        if did_not_run
        else "IMDS gives no good answer. Until it does, maintenance of this VM may come without a notice.",
        fields=(*fields, view.field("Reason", view.get("Reason") or "unknown")),
    )


def _describe_recovered(view: EventView) -> Message:
    since, until = instant_of(view.data.get("BlindFrom")), instant_of(view.data.get("BlindTo"))
    gap = f" (after {format_duration((until - since).total_seconds())})" if since and until else ""
    fields = [view.field("Unreachable", "from ", since, " to ", until)] if since and until else []
    title = f"{view.short_vm} sees its Scheduled Events again{gap}"
    return _message("good", title, "Events that came and went meanwhile were not seen.", fields=fields)


def _describe_heartbeat(view: EventView) -> Message:
    states = {"started": "has started", "stopping": "is stopping"}
    state = states.get(view.get("Reason").lower(), "is running")
    fields = view.fields({"Version": view.get("Version")})
    return _message("default", f"imds-bridge on {view.short_vm} {state}", fields=fields)


def _describe_loss(view: EventView) -> Message:
    count = view.data.get("Count")
    lost = f"{count} event{'' if count == 1 else 's'}" if isinstance(count, int) and count else "events"
    verb = "lost" if count else "may have lost"
    fields = view.fields({name: view.get(name) for name in ("Reason", "Sink")})
    return _message("attention", f"imds-bridge on {view.short_vm} {verb} {lost}", fields=fields)


def _describe_document(view: EventView) -> Message:
    events = object_of(view.data.get("Document")).get("Events")
    count = len(events) if isinstance(events, list) else 0
    content = f"it contains {count} event{'' if count == 1 else 's'}" if count else "it is empty"
    return _message("default", f"The Scheduled Events document of {view.short_vm} changed: {content}")


def _describe_test(view: EventView) -> Message:
    title = f"TEST: imds-bridge on {view.short_vm} can send here; nothing is scheduled"
    return _message("accent", title, "This is only a test. No VM is affected, and there is nothing to do.")


def _describe_unknown(view: EventView) -> Message:
    title = f"{truncate(view.type, 80, mark='…')} about {truncate(view.subject or view.vm, 50, mark='…')}"
    return _message("default", title, "This version of imds-bridge does not know this type of event.")


_DESCRIPTIONS: dict[str, Callable[[EventView], Message]] = {
    "scheduledevent": _describe_scheduled_event,
    "approval": _describe_receipt,
    "approval.prepared": _describe_prepared,
    "approval.recovered": _describe_of_work,
    "approval.outofwork": _describe_of_work,
    "imds.unreachable": _describe_unreachable,
    "imds.recovered": _describe_recovered,
    "bridge.heartbeat": _describe_heartbeat,
    "bridge.loss": _describe_loss,
    "bridge.test": _describe_test,
    "document.changed": _describe_document,
}
