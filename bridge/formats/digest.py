"""Many events as one message: a headline that counts them, and a line for each EventId with its newest state."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from pydantic import Field

from bridge.config.sinks import ChatSettings, WebhookSettings
from bridge.events.model import StoredEvent, is_alarm
from bridge.formats.base import ChatFormat, Encoded, encode_json
from bridge.formats.notice import SYMBOLS, TITLE_LENGTH, EventView, Notice, Tone, notice
from bridge.formats.reasons import REASONS
from bridge.formats.text import describe_wave, join_names, plural
from bridge.imds.document import SCHEDULED
from bridge.runtime.json import Json
from bridge.runtime.text import length, truncate

# Far below the 28 KB of Teams: a workflow answers 202 to a card that is too large, and posts nothing.
DIGEST_BYTES = 20_000
MAX_LINES = 40  # Slack takes 50 blocks
LINE_LENGTH = 200
_FLEET_LENGTH = 100
_WORST_FIRST: Sequence[Tone] = ("attention", "warning", "default", "accent", "good")
_PREPARED, _RECOVERED = "approval.prepared", "approval.recovered"
_STATES = {
    "scheduled": SCHEDULED,
    "started": "has started",
    "advised": "is advised",
    "prepared": "is prepared",
    "completed": "is over",
    "canceled": "is canceled",
    "ended": "is gone",
}
_State = tuple[Notice, EventView, Sequence[EventView]]  # the newest one in words, its event, and all


class DigestSettings(ChatSettings, WebhookSettings):
    """What Teams and Slack have in common: behind a relay, they show many events as one message."""

    digest_seconds: float = Field(default=300.0, ge=0, le=3600)
    """How long `relay` gathers events for one message, at most half of `max_age_seconds`; 0 sends a message for each.
    Example: `60`."""

    @property
    def gather_seconds(self) -> float:
        """How long a relay gathers events for one message, so that none is too old in it."""
        return min(self.digest_seconds, self.max_age_seconds / 2)


class Digest(NamedTuple):
    """Many events in words, with the tone of the worst line.

    `fleet` names that of all VMs; it is empty if there are several, which the lines name then. `lines` has the newest
    state of each Scheduled Event and the address of its page, "" without one; the most urgent comes first.
    """

    tone: Tone
    headline: str
    fleet: Sequence[str]
    lines: Sequence[tuple[str, str]]

    def more(self, shown: int) -> tuple[str, ...]:
        """Return a line that counts those behind the first `shown`, if there are any."""
        return (f"and {len(self.lines) - shown} more",) if shown < len(self.lines) else ()


class DigestFormat(ChatFormat):
    """A chat format that can write many events as one message."""

    @abstractmethod
    def write_lines(self, digest: Digest, count: int) -> Json:
        """Return the message with the first `count` lines, and how many there are behind them."""

    def encode(self, events: Sequence[StoredEvent], now: datetime) -> Encoded:
        """Write the one event as a message of its own, or several as a digest with as many lines as fit."""
        if len(events) == 1:
            return super().encode(events, now)
        digest = summarize([one.envelope for one in events], now=now, settings=self._settings)
        count = min(len(digest.lines), MAX_LINES)
        while len(body := encode_json(self.write_lines(digest, count))) > DIGEST_BYTES:
            count -= 1
        return {"Content-Type": "application/json"}, body.encode()


def summarize(events: Sequence[Mapping[str, Json]], *, now: datetime, settings: ChatSettings) -> Digest:
    """Describe events in their order.

    Args:
        events: at least one, of any type, with any data.
        now: the time of the attempt.
        settings: the time zone, the links and the tags.
    """
    zone, tags = settings.zone, settings.show_tags
    found: dict[str, list[EventView]] = {}
    for number, event in enumerate(events):
        view = EventView(event, now=now, zone=zone)
        found.setdefault(view.event_id.lower() or f"#{number}", []).append(view)
    # That a VM is prepared, or back at work, does not change what happens and when.
    of_vm = (_PREPARED, _RECOVERED)
    newest = [([one for one in all_ if one.kind not in of_vm] or all_)[-1] for all_ in found.values()]
    messages = [notice(view.event, now=now, zone=zone, tags=tags) for view in newest]
    states = sorted(zip(messages, newest, found.values(), strict=True), key=_urgency)
    worst = min((message.tone for message in messages), key=_WORST_FIRST.index)
    fleets = {message.fleet for message in messages}
    fleet = fleets.pop() if len(fleets) == 1 else ""
    counts = f"{plural(len(states), 'event')}: {', '.join(_counts(newest))}"
    return Digest(
        tone=worst,
        headline=truncate(f"{SYMBOLS[worst]} {counts}", TITLE_LENGTH, mark="…"),
        fleet=[f"Fleet: {fleet}"] if fleet else [],
        lines=[(_line(*state, fleet), settings.link(state[0].event_id)) for state in states],
    )


def _urgency(state: _State) -> tuple[int, float]:
    """Return what comes first, the least value first: bad news, notices by their NotBefore, starts, the rest."""
    message, view, _ = state
    rank = 0 if is_alarm(view.event) else {"warning": 1, "attention": 2}.get(message.tone, 3)
    return rank, view.not_before.timestamp() if view.not_before else 0.0


def _counts(views: Sequence[EventView]) -> Iterator[str]:
    """Count the events in each state, the most first."""
    for (noun, what), count in Counter(map(_counted, views)).most_common():
        starts = [view.not_before for view in views if view.not_before and _counted(view) == (noun, what)]
        when, at = what if count == 1 else what.replace("is ", "are ").replace("has ", "have "), ""
        if what == SCHEDULED and starts:
            when, at = "at" if count == 1 else "from", f" {views[0].clock(min(starts))}{' on' * (count > 1)}"
        yield f"{describe_wave(count, noun, when)[0]}{at}".rstrip()


def _counted(view: EventView) -> tuple[str, str]:
    """Return what a headline counts together: a noun, and what is said of it."""
    family, _, kind = view.kind.partition(".")
    if family == "approval" and kind in ("accepted", "rejected", "failed"):
        title = REASONS.get(view.get("Reason"), REASONS["approved"]).title or f"{family} {kind}"
        noun, _, state = title.lower().partition(" ")
        return noun, state
    if kind in ("recovered", "outofwork") and family == "approval":
        return "VM", "is back at work" if kind == "recovered" else "is out of work"
    if family not in ("scheduledevent", "approval"):
        return "other message", ""
    state = view.status if kind == "updated" else kind
    return truncate(view.event_type, 30, mark="…") or "Event", _STATES.get(state, "has changed")


def _line(message: Notice, view: EventView, views: Sequence[EventView], fleet: str) -> str:
    """Write the newest state; titles do not say when the event of a receipt starts, who else is prepared, and where.

    The fleet is left out if it is that of the whole digest.
    """
    text, start = message.headline, view.not_before
    if view.kind.startswith("approval.") and start and view.seconds_until(start) > 0:
        text += f", starts {view.relative(start)} ({view.clock(start)})"
    prepared = dict.fromkeys(one.short_vm for one in views if one.kind == _PREPARED and one is not view)
    names = f"; prepared: {join_names([*prepared], max_length=80)}" if prepared else ""
    where = f" ({truncate(message.fleet, _FLEET_LENGTH, mark='…')})" if message.fleet != fleet else ""
    return truncate(text + names, LINE_LENGTH - length(where), mark="…") + where
