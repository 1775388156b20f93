"""Words for people: text from outside made harmless, lists and times made short."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Literal

from bridge.formats.table import duration
from bridge.runtime.instants import parse_instant
from bridge.runtime.json import Json

CUT = "… (cut)"
TEXT_LENGTH = 400
DAY_SECONDS = 86_400

_EXACT_SECONDS = 120
_INSTANT_LENGTH = 64
_MAX_INTEGER = 10**18
_YEARS = range(1971, 9998)  # whose instants exist in any time zone
_READ_AHEAD = 8  # blanks collapse: enough is looked at to fill a text that is mostly blanks
# Controls, what reorders or hides the letters beside it, halves of letters, and what is none.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\uffff\U000e0000-\U000e0fff]"
)


def length(text: str) -> int:
    """Count as the strictest receiver does, in UTF-16 units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def cut(text: str, most: int, *, sign: str = CUT) -> str:
    """Shorten a text to `most` UTF-16 units, with a sign where something is missing."""
    if len(text) <= most and length(text) <= most:
        return text
    room = 2 * (most - len(sign))
    kept = text[:most].encode("utf-16-le")[:room].decode("utf-16-le", "ignore")
    return kept.rstrip() + sign


def clean(value: Json, most: int = TEXT_LENGTH) -> str:
    """Make one line of text out of whatever came from outside; "" where there is nothing to read.

    Blanks and line breaks become single blanks; characters that act rather than show are replaced visibly.
    """
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < _MAX_INTEGER):
        return str(value)
    if not isinstance(value, str):
        return "" if value is None else "(not a text)"
    head = value[: most * _READ_AHEAD]
    line = _UNSAFE.sub("\ufffd", " ".join(head.split()))
    return cut(line + CUT if len(head) < len(value) and len(line) < most else line, most)


def listing(names: Sequence[str], *, room: int, most: int | None = None, of: int | None = None) -> str:
    """Write as many names as fit into `room`, and how many more there are.

    Args:
        names: cleaned.
        room: in UTF-16 units, at least some 20.
        most: of names to write.
        of: how many there are, if `names` are only the first of them.
    """
    count = len(names) if of is None else of
    shown: list[str] = []
    left = room - len(f" and {count} more")
    for name in names[:most]:
        left -= length(name) + 2
        if left < 0 and shown:
            break
        shown.append(name)
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return cut(", ".join(shown), room - len(more), sign="…") + more


def span(seconds: float) -> str:
    """Say how long that is, as exactly as a person cares: `45 s`, `15 min`, `6 d 4 h`."""
    exact = abs(seconds) < _EXACT_SECONDS
    return duration(seconds if exact else 60 * round(seconds / 60))


def instant_of(value: Json) -> datetime | None:
    """Read an instant that can be shown anywhere; None if it is none."""
    if not isinstance(value, str) or len(value) > _INSTANT_LENGTH:
        return None
    instant = parse_instant(value)
    return instant if instant and instant.year in _YEARS else None


Part = str | datetime


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing to know, with its label.

    `text` says it whole. `parts` are the same with instants left as such, for receivers that show each reader's
    own time zone; where there are any, the texts around them are this program's own words. `is_code` is a command
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


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The time of the attempt, and the zone in which times are written (None: UTC)."""

    now: datetime
    zone: tzinfo | None = None

    def until(self, instant: datetime) -> float:
        """Count the seconds to an instant; negative once it is over."""
        return (instant - self.now).total_seconds()

    def countdown(self, instant: datetime) -> str:
        """Say when that is: `in 15 min` or `3 min ago`."""
        seconds = self.until(instant)
        return f"in {span(seconds)}" if seconds > 0 else f"{span(seconds)} ago"

    def clock(self, instant: datetime) -> str:
        """Write the time of day with its zone, and the date unless it is today's."""
        zone = self.zone or UTC
        local = instant.astimezone(zone)
        name = local.tzname() or ""
        date = "" if local.date() == self.now.astimezone(zone).date() else f"{local:%a %d %b} "
        time = f"{local:%H:%M:%S}" if abs(self.until(instant)) < _EXACT_SECONDS else f"{local:%H:%M}"
        return f"{date}{time} {'UTC' if name[:1] in '+-' else ''}{name}"

    def fact(self, label: str, *parts: Part, is_code: bool = False) -> Fact:
        """Make a fact of texts and instants."""
        text = "".join(self.clock(part) if isinstance(part, datetime) else part for part in parts)
        return Fact(label=label, text=text, parts=parts, is_code=is_code)


Tone = Literal["warning", "attention", "good", "accent", "default"]


@dataclass(frozen=True, kw_only=True)
class Said:
    """What an event means: its tone, the one line that says all, sentences on it, and facts."""

    tone: Tone
    title: str
    sentences: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
