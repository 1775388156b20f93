"""Turn any event into words for people, which the formats only lay out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo

from bridge.formats.approvals import tell_receipt
from bridge.formats.scheduled import tell_scheduled_event
from bridge.formats.text import Fact, Moment, Said, cut, instant_of, span
from bridge.formats.view import Reading
from bridge.runtime.json import Json

# Squares show in notifications, on phones and in every chat alike.
_SYMBOLS = {"warning": "🟧", "attention": "🟥", "good": "🟩", "accent": "🟦", "default": "⬜"}
# Younger than that, a notice tells how old it is by being there.
_OLD_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Notice(Said):
    """An event in words: `tone`, `title`, `sentences`, `facts`, and small print in `details`.

    Everything is of bounded length and without control characters; markup is left to the formats. `headline` is the
    title with a symbol of its tone, `text` the whole in lines, `command` the one to approve with. `kind` is the
    type's own part, for example `scheduledevent.started`, "" for types of others. `event_id`, `event_type`,
    `vm` (which tells) and `resource_group` are "" where they are not told.
    """

    headline: str
    text: str
    command: str
    details: tuple[Fact, ...]
    kind: str
    event_id: str
    event_type: str
    vm: str
    resource_group: str


def notice(event: Mapping[str, Json], *, now: datetime, zone: tzinfo | None) -> Notice:
    """Say what a CloudEvent means to people.

    Args:
        event: of any type, also of none that is known, whatever its data.
        now: the time of the attempt, from which "in 15 min" counts.
        zone: in which times are written; None is UTC.
    """
    reading, moment = Reading(event), Moment(now=now, zone=zone)
    tell = _TELLERS.get(reading.kind) or _TELLERS.get(reading.kind.partition(".")[0], _tell_unknown)
    said = tell(reading, moment)
    headline = f"{_SYMBOLS[said.tone]} {said.title}"
    details = tuple(_details(reading, moment))
    lines = (f"{fact.label}: {fact.text}" for fact in (*said.facts, *details))
    return Notice(
        tone=said.tone,
        title=said.title,
        sentences=said.sentences,
        facts=said.facts,
        headline=headline,
        text="\n".join((headline, *said.sentences, *lines)),
        command=next((fact.text for fact in said.facts if fact.is_code), ""),
        details=details,
        kind=reading.kind,
        event_id=reading.event_id,
        event_type=reading.event_type,
        vm=reading.vm,
        resource_group=reading.resource_group,
    )


def _details(reading: Reading, moment: Moment) -> Iterator[Fact]:
    if reading.event_id:
        yield moment.fact("EventId", reading.event_id)
    places = [reading.of_vm("Location"), f"zone {reading.of_vm('Zone')}" if reading.of_vm("Zone") else ""]
    yield moment.fact("Told by", ", ".join(filter(None, [reading.vm, *places])))
    if reading.time:
        is_old = moment.until(reading.time) < -_OLD_SECONDS
        yield moment.fact("Seen at", reading.time, f", {moment.countdown(reading.time)}" if is_old else "")


def _tell_unreachable(reading: Reading, moment: Moment) -> Said:
    since = instant_of(reading.data.get("Since"))
    blind = f"for {span(moment.until(since))}" if since else "since it started"
    facts = [moment.fact("Blind since", since)] if since else []
    return Said(
        tone="attention",
        title=f"{reading.teller} has not seen its Scheduled Events {blind}",
        sentences=(
            "IMDS gives no good answer. Until it does, maintenance of this VM may come without a notice.",
        ),
        facts=(*facts, moment.fact("Reason", reading.get("Reason") or "unknown")),
    )


def _tell_recovered(reading: Reading, moment: Moment) -> Said:
    since, until = instant_of(reading.data.get("BlindFrom")), instant_of(reading.data.get("BlindTo"))
    blind = f" (blind for {span((until - since).total_seconds())})" if since and until else ""
    facts = (moment.fact("Blind", "from ", since, " to ", until),) if since and until else ()
    return Said(
        tone="good",
        title=f"{reading.teller} sees its Scheduled Events again{blind}",
        sentences=("What began and ended meanwhile was not seen.",),
        facts=facts,
    )


def _tell_heartbeat(reading: Reading, moment: Moment) -> Said:
    doing = {"started": "has started", "stopping": "is stopping"}.get(
        reading.get("Reason").lower(), "is alive"
    )
    facts = (moment.fact("Version", reading.get("Version")),) if reading.get("Version") else ()
    return Said(tone="default", title=f"imds-bridge on {reading.teller} {doing}", facts=facts)


def _tell_document(reading: Reading, _: Moment) -> Said:
    document = reading.data.get("Document")
    events = document.get("Events") if isinstance(document, Mapping) else None
    count = len(events) if isinstance(events, list) else 0
    holds = f"it holds {count} event{'' if count == 1 else 's'}" if count else "it is empty"
    return Said(tone="default", title=f"The Scheduled Events document of {reading.teller} changed: {holds}")


def _tell_test(reading: Reading, _: Moment) -> Said:
    return Said(
        tone="accent",
        title=f"TEST: imds-bridge on {reading.teller} can send here; nothing is scheduled",
        sentences=("This is only a test. No VM is concerned, and there is nothing to do.",),
    )


def _tell_unknown(reading: Reading, _: Moment) -> Said:
    return Said(
        tone="default",
        title=f"{cut(reading.type, 80, sign='…')} about {cut(reading.subject or reading.vm, 50, sign='…')}",
        sentences=("This version of imds-bridge has no words for this type of event.",),
    )


_TELLERS: dict[str, Callable[[Reading, Moment], Said]] = {
    "scheduledevent": tell_scheduled_event,
    "approval": tell_receipt,
    "imds.unreachable": _tell_unreachable,
    "imds.recovered": _tell_recovered,
    "bridge.heartbeat": _tell_heartbeat,
    "bridge.test": _tell_test,
    "document.changed": _tell_document,
}
