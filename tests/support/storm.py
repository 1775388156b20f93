"""A storm: hundreds of Scheduled Events within minutes, and what chats are told of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any, Self

from bridge.events.model import StoredEvent
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from tests.support.diff import entry
from tests.support.receivers import CONSOLE, FORMATS, strings
from tests.support.samples import change_event, http_date, stored

EVENTS = 500
_SHOWN = re.compile(rf"{re.escape(CONSOLE)}/event/([0-9a-z-]+)")


def event_ids(count: int = EVENTS) -> list[str]:
    """Return the EventIds of a storm."""
    return [f"{number:08}-afdc-4d2c-b8f2-c94d1a9b7d30" for number in range(count)]


def scheduled(event_id: str, at: datetime, *, minutes: float = 15) -> StoredEvent:
    """Make the notice of a reboot of one VM."""
    start = http_date(at + timedelta(minutes=minutes))
    raw = entry(event_id, Resources=[f"web-{event_id[:8]}"], NotBefore=start)
    return stored(change_event(Change(kind="scheduled", event=ScheduledEvent(raw=raw)), at))


def started(event_id: str, at: datetime) -> StoredEvent:
    """Make the event that such a reboot has started."""
    raw = entry(event_id, Resources=[f"web-{event_id[:8]}"], EventStatus="Started", NotBefore="")
    before = ScheduledEvent(raw=entry(event_id, Resources=[f"web-{event_id[:8]}"]))
    change = Change(
        kind="started", event=ScheduledEvent(raw=raw), previous=before, changed=("EventStatus", "NotBefore")
    )
    return stored(change_event(change, at))


def instants(seconds: float, count: int = EVENTS, seed: int = 1) -> list[float]:
    """Return when the events come, in seconds from the start."""
    chance = Random(seed)  # noqa: S311 - a seed
    return sorted(chance.uniform(0, seconds) for _ in range(count))


@dataclass
class Told:
    """What the messages in a chat say, each of which its receiver takes.

    `shown` counts the EventIds that are in a line or a message of their own, `counted` the others.
    """

    messages: int = 0
    shown: Counter[str] = field(default_factory=Counter)
    counted: int = 0
    largest: int = 0

    @classmethod
    def by(cls, format_: str, bodies: Sequence[bytes]) -> Self:
        """Check and read the messages."""
        told = cls()
        for body in bodies:
            message: Any = json.loads(body)
            check = FORMATS[format_].check
            assert check
            check(message)
            told.messages += 1
            told.largest = max(told.largest, len(body))
            texts = "\n".join(strings(message["blocks"] if format_ == "slack" else message))
            told.shown.update({*_SHOWN.findall(texts)})
            told.counted += sum(int(more) for more in re.findall(r"^and (\d+) more$", texts, re.MULTILINE))
        return told

    @property
    def events(self) -> int:
        """The number of events in all messages."""
        return self.shown.total() + self.counted
