"""Say what became of a Scheduled Event: what happens to which VM, when, and what that means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from bridge.formats.text import DAY_SECONDS, Fact, Moment, Said, Tone, clean, cut, instant_of, span
from bridge.formats.view import Reading
from bridge.imds.document import SCHEDULED, STARTED, is_among, names
from bridge.runtime.json import Json

_NOUN_LENGTH = 30
_VMS_LENGTH = 1_000
_RELEASES_LENGTH = 300
_CHANGE_LENGTH = 150
_MOST_CHANGES = 4
_NOUNS = {"preempt": "Spot eviction (Preempt)", "terminate": "Deletion (Terminate)"}
_MEANINGS = {
    "freeze": "A pause, mostly of seconds: memory and files are kept, open connections may drop.",
    "reboot": "A restart: memory is lost, disks are kept.",
    "redeploy": "A move to another host: memory and the ephemeral (temporary) disk are lost.",
    "preempt": "Azure takes the Spot VM back: it is deleted, its ephemeral disk is lost. The notice is best effort.",
    "terminate": "The VM is deleted.",
}
_FOR_GOOD = ("preempt", "terminate")
_LONGEST_SECONDS = 365 * DAY_SECONDS
_SOURCES = {"platform": "Azure (platform)", "user": "a user or automation of yours"}
# What can be pasted into a shell as it is, and is no option.
_PLAIN_WORD = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_ENDS: Mapping[str, tuple[Tone, str, str]] = {
    "completed": ("good", "is over", ""),
    "canceled": (
        "accent",
        "is canceled: it did not happen",
        "It vanished before it started; there is nothing to do.",
    ),
    "ended": (
        "default",
        "is gone; whether it ran is unknown",
        "The watch was interrupted when it went: this VM may itself have been rebooted.",
    ),
}


def noun_of(reading: Reading) -> str:
    """Name the type of the event, an unknown one as it is."""
    known = _NOUNS.get(reading.event_type.lower(), reading.event_type)
    return cut(known, _NOUN_LENGTH, sign="…") or "Event"


def tell_scheduled_event(reading: Reading, moment: Moment) -> Said:
    """Say what became of it."""
    became = reading.kind.partition(".")[2]
    meaning = _MEANINGS.get(reading.event_type.lower(), "")
    if became in _ENDS:
        tone, what, sentence = _ENDS[became]
        title = reading.title(noun_of(reading), f" {what}")
        return _said(tone, title, (sentence or meaning,), _about(reading, moment))
    facts = chain(_changes(reading, moment), _when(reading, moment), _about(reading, moment))
    tone = "warning" if reading.status == SCHEDULED else "attention"
    title = reading.title(*_what_happens(became, reading, moment))
    return _said(tone, title, (meaning, _advice(reading, moment)), facts)


def _said(tone: Tone, title: str, sentences: Iterable[str], facts: Iterable[Fact]) -> Said:
    return Said(tone=tone, title=title, sentences=tuple(filter(None, sentences)), facts=tuple(facts))


def _what_happens(became: str, reading: Reading, moment: Moment) -> tuple[str, str]:
    """Return what stands before and after the VMs in the title."""
    noun, status = noun_of(reading), reading.status
    if status == SCHEDULED:
        start = reading.not_before
        after = _start_words(reading, moment)
        if became != "updated":
            return noun, after
        if reading.get("PreviousStatus").lower() == STARTED:
            return f"Back to scheduled: {noun}", after
        moved = start is not None and "NotBefore" in names(reading.data.get("Changed"))
        return f"Changed: {noun}", f" now{after}" if moved else after
    if status != STARTED:
        return (
            f"Changed: {noun}",
            f": its status is {cut(reading.get('EventStatus'), _NOUN_LENGTH) or 'unknown'}",
        )
    return (noun, " has started") if became == "started" else (f"Changed: {noun}", ", which has started")


def _start_words(reading: Reading, moment: Moment) -> str:
    start = reading.not_before
    if start is None:
        return " is scheduled (its start is unknown)"
    was = "" if moment.until(start) > 0 else " was due"
    return f"{was} {moment.countdown(start)} ({moment.clock(start)})"


def _changes(reading: Reading, moment: Moment) -> Iterator[Fact]:
    """Say what changed, from what to what."""
    changed = names(reading.data.get("Changed")) if reading.kind.endswith(".updated") else ()
    previous = reading.data.get("Previous")
    for name in changed[:_MOST_CHANGES]:
        old = previous.get(name) if isinstance(previous, Mapping) else None
        new = reading.data.get("NotBeforeUtc" if name == "NotBefore" else name)
        first, second = instant_of(old), instant_of(new)
        if name == "NotBefore" and first and second:
            yield moment.fact("Changed", "start, from ", first, " to ", second)
        else:
            yield moment.fact("Changed", f"{clean(name, _NOUN_LENGTH)}, from {_value(old)} to {_value(new)}")
    if len(changed) > _MOST_CHANGES:
        yield moment.fact("Changed", "and more")


def _value(value: Json) -> str:
    """Write a property before or after a change."""
    listed = ", ".join(clean(name, _CHANGE_LENGTH) for name in names(value)[:50])
    return cut(listed or clean(value, _CHANGE_LENGTH) or "nothing", _CHANGE_LENGTH)


def _when(reading: Reading, moment: Moment) -> Iterator[Fact]:
    start = reading.not_before
    if reading.status == SCHEDULED and start:
        due = "by itself " if moment.until(start) > 0 else "was due "
        yield moment.fact("Starts", f"{due}{moment.countdown(start)}, at ", start)
    if lasts := _lasts(reading):
        yield moment.fact("Lasts", lasts)
    if reading.status == SCHEDULED:
        yield from _approval(reading, moment)


def _lasts(reading: Reading) -> str:
    seconds = reading.data.get("DurationInSeconds")
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return ""
    if seconds < 0 or seconds > _LONGEST_SECONDS:
        return "" if reading.event_type.lower() in _FOR_GOOD else "unknown"
    return f"about {span(seconds)}" if seconds else "no impact on the VM is expected"


def _about(reading: Reading, moment: Moment) -> Iterator[Fact]:
    if reading.count and not _releases_many(reading):  # which names them all
        label = "VM" if reading.count == 1 else f"{reading.count} VMs"
        yield moment.fact(label, reading.vms(_VMS_LENGTH))
    if source := reading.get("EventSource"):
        yield moment.fact("Initiated by", _SOURCES.get(source.lower(), source))
    if description := reading.get("Description"):
        yield moment.fact("Azure says", description)


def _approval(reading: Reading, moment: Moment) -> Iterator[Fact]:
    """Say how to approve, and every VM that this releases."""
    first = (names(reading.data.get("Resources")) or (reading.of_vm("Name"),))[0].removeprefix("_")
    words = {"": reading.event_id, "--vm": first, "--resource-group": reading.resource_group}
    if not reading.get("ApprovalSession"):
        yield moment.fact(
            "Approval", "none over the bus is set up; POST to IMDS on the VM to let it start before its time"
        )
    elif all(_PLAIN_WORD.fullmatch(word) for word in words.values()):
        options = " ".join(f"{name} {word}".strip() for name, word in words.items())
        yield moment.fact("Approve", f"imds-bridge approve {options}", is_code=True)
    else:
        yield moment.fact("Approve", "with imds-bridge approve on the VM, which lists what is scheduled")
    if reading.event_type.lower() == "terminate":
        yield moment.fact("Approval", "only the VM itself can approve its own deletion")
    elif _releases_many(reading):
        yield moment.fact("Approval releases", f"all {reading.count} VMs: {reading.vms(_RELEASES_LENGTH)}")


def _releases_many(reading: Reading) -> bool:
    can_be_approved = reading.status == SCHEDULED and reading.event_type.lower() != "terminate"
    return can_be_approved and reading.count > 1


def _advice(reading: Reading, moment: Moment) -> str:
    """Advise to redeploy where the platform gives days of notice: that is what failing hardware gets."""
    start = reading.not_before
    if reading.get("EventSource").lower() != "platform" or reading.status != SCHEDULED or start is None:
        return ""
    if moment.until(start) <= DAY_SECONDS:
        return ""
    words = reading.resource_group, _degrading(reading)
    hint = ""
    if all(_PLAIN_WORD.fullmatch(word) for word in words) and not reading.of_vm("ScaleSet"):
        hint = f" (az vm redeploy --resource-group {words[0]} --name {words[1]})"
    return (
        "Azure gives days of notice where hardware degrades: it may fail sooner. "
        f"Microsoft advises to redeploy the VM now{hint}."
    )


def _degrading(reading: Reading) -> str:
    """Name the VM to redeploy, "" where it is not clear: in a group, the one that tells may not be concerned."""
    told, teller = names(reading.data.get("Resources")), reading.of_vm("Name")
    if is_among(teller, told):
        return teller
    return told[0].removeprefix("_") if len(told) == 1 else ""
