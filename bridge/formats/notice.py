"""Describe any event in words, which the chat formats only lay out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo

from bridge.formats.approvals import describe_receipt
from bridge.formats.message import Field, Message, RenderContext
from bridge.formats.scheduled import describe_scheduled_event
from bridge.formats.text import format_duration, instant_of, truncate
from bridge.formats.view import EventView
from bridge.runtime.json import Json

# Squares are shown alike in notifications, on phones and in every chat.
_SYMBOLS = {"warning": "🟧", "attention": "🟥", "good": "🟩", "accent": "🟦", "default": "⬜"}
# The age of a younger event is not shown.
_OLD_SECONDS = 60
_PLACE_LENGTH = 400


@dataclass(frozen=True, kw_only=True)
class Notice(Message):
    """A message with everything that a format or a template may show of an event.

    All texts have a limited length and no control characters; markup is left to the formats. `headline` is the
    title with a symbol of its tone, `text` the whole message in lines, `command` the one to approve with. `kind` is
    the middle of the type, for example `scheduledevent.started`, "" for types of other programs. `event_id`,
    `event_type`, `vm` (which reports the event) and `resource_group` are "" if the event has none.
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


def notice(event: Mapping[str, Json], *, now: datetime, zone: tzinfo | None) -> Notice:
    """Describe a CloudEvent to people.

    Args:
        event: of any type, known or not, with any data.
        now: the time of the attempt, from which "in 15 min" counts.
        zone: in which times are written; None is UTC.
    """
    view, context = EventView(event), RenderContext(now=now, zone=zone)
    family = view.kind.partition(".")[0]
    describe = _DESCRIPTIONS.get(view.kind) or _DESCRIPTIONS.get(family, _describe_unknown)
    message = describe(view, context)
    headline = f"{_SYMBOLS[message.tone]} {message.title}"
    details = tuple(_details(view, context))
    lines = (f"{field.label}: {field.text}" for field in (*message.fields, *details))
    return Notice(
        tone=message.tone,
        title=message.title,
        sentences=message.sentences,
        fields=message.fields,
        headline=headline,
        text="\n".join((headline, *message.sentences, *lines)),
        command=next((field.text for field in message.fields if field.is_code), ""),
        details=details,
        kind=view.kind,
        event_id=view.event_id,
        event_type=view.event_type,
        vm=view.vm,
        resource_group=view.resource_group,
    )


def _details(view: EventView, context: RenderContext) -> Iterator[Field]:
    if view.event_id:
        yield context.field("EventId", view.event_id)
    places = [view.of_vm("Location"), f"zone {view.of_vm('Zone')}" if view.of_vm("Zone") else ""]
    yield context.field("Reported by", truncate(", ".join(filter(None, [view.vm, *places])), _PLACE_LENGTH))
    if view.time:
        is_old = context.seconds_until(view.time) < -_OLD_SECONDS
        yield context.field("Seen at", view.time, f", {context.relative(view.time)}" if is_old else "")


def _describe_unreachable(view: EventView, context: RenderContext) -> Message:
    since = instant_of(view.data.get("Since"))
    duration = f"for {format_duration(context.seconds_until(since))}" if since else "since it started"
    fields = [context.field("Unreachable since", since)] if since else []
    did_not_run = view.get("Cause") in ("Restart", "NotPolled")
    return Message(
        tone="attention",
        title=f"{view.short_vm} has not seen its Scheduled Events {duration}",
        sentences=(
            "imds-bridge did not run meanwhile."
            if did_not_run
            else "IMDS gives no good answer. Until it does, maintenance of this VM may come without a notice.",
        ),
        fields=(*fields, context.field("Reason", view.get("Reason") or "unknown")),
    )


def _describe_recovered(view: EventView, context: RenderContext) -> Message:
    since, until = instant_of(view.data.get("BlindFrom")), instant_of(view.data.get("BlindTo"))
    gap = f" (after {format_duration((until - since).total_seconds())})" if since and until else ""
    fields = (context.field("Unreachable", "from ", since, " to ", until),) if since and until else ()
    return Message(
        tone="good",
        title=f"{view.short_vm} sees its Scheduled Events again{gap}",
        sentences=("Events that came and went meanwhile were not seen.",),
        fields=fields,
    )


def _describe_heartbeat(view: EventView, context: RenderContext) -> Message:
    state = {"started": "has started", "stopping": "is stopping"}.get(
        view.get("Reason").lower(), "is running"
    )
    fields = (context.field("Version", view.get("Version")),) if view.get("Version") else ()
    return Message(tone="default", title=f"imds-bridge on {view.short_vm} {state}", fields=fields)


def _describe_loss(view: EventView, context: RenderContext) -> Message:
    count = view.data.get("Count")
    lost = f"{count} event{'' if count == 1 else 's'}" if isinstance(count, int) and count else "events"
    verb = "lost" if count else "may have lost"
    fields = tuple(context.field(name, view.get(name)) for name in ("Reason", "Sink") if view.get(name))
    return Message(tone="attention", title=f"imds-bridge on {view.short_vm} {verb} {lost}", fields=fields)


def _describe_document(view: EventView, _: RenderContext) -> Message:
    document = view.data.get("Document")
    events = document.get("Events") if isinstance(document, Mapping) else None
    count = len(events) if isinstance(events, list) else 0
    content = f"it contains {count} event{'' if count == 1 else 's'}" if count else "it is empty"
    return Message(
        tone="default", title=f"The Scheduled Events document of {view.short_vm} changed: {content}"
    )


def _describe_test(view: EventView, _: RenderContext) -> Message:
    return Message(
        tone="accent",
        title=f"TEST: imds-bridge on {view.short_vm} can send here; nothing is scheduled",
        sentences=("This is only a test. No VM is affected, and there is nothing to do.",),
    )


def _describe_unknown(view: EventView, _: RenderContext) -> Message:
    subject = truncate(view.subject or view.vm, 50, mark="…")
    return Message(
        tone="default",
        title=f"{truncate(view.type, 80, mark='…')} about {subject}",
        sentences=("This version of imds-bridge does not know this type of event.",),
    )


_DESCRIPTIONS: dict[str, Callable[[EventView, RenderContext], Message]] = {
    "scheduledevent": describe_scheduled_event,
    "approval": describe_receipt,
    "imds.unreachable": _describe_unreachable,
    "imds.recovered": _describe_recovered,
    "bridge.heartbeat": _describe_heartbeat,
    "bridge.loss": _describe_loss,
    "bridge.test": _describe_test,
    "document.changed": _describe_document,
}
