"""What an event means to people: the parts that every chat format lays out in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Literal

from bridge.formats.text import format_relative

Part = str | datetime
Tone = Literal["warning", "attention", "good", "accent", "default"]

_EXACT_SECONDS = 120


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


@dataclass(frozen=True, kw_only=True)
class Message:
    """An event in words: its tone, a title that says all, sentences that explain it, and fields."""

    tone: Tone
    title: str
    sentences: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RenderContext:
    """The time of the attempt, and the zone in which times are written (None: UTC)."""

    now: datetime
    zone: tzinfo | None = None

    def seconds_until(self, instant: datetime) -> float:
        """Return the seconds to an instant; negative once it is over."""
        return (instant - self.now).total_seconds()

    def relative(self, instant: datetime) -> str:
        """Write when that is: `in 15 min` or `3 min ago`."""
        return format_relative(self.seconds_until(instant))

    def time(self, instant: datetime) -> str:
        """Write the time of day with its zone, and the date unless it is today's."""
        zone = self.zone or UTC
        local = instant.astimezone(zone)
        name = local.tzname() or ""
        date = "" if local.date() == self.now.astimezone(zone).date() else f"{local:%a %d %b} "
        is_near = abs(self.seconds_until(instant)) < _EXACT_SECONDS
        time = f"{local:%H:%M:%S}" if is_near else f"{local:%H:%M}"
        return f"{date}{time} {'UTC' if name[:1] in '+-' else ''}{name}"

    def field(self, label: str, *parts: Part, is_code: bool = False) -> Field:
        """Make a field of texts and instants."""
        text = "".join(self.time(part) if isinstance(part, datetime) else part for part in parts)
        return Field(label=label, text=text, parts=parts, is_code=is_code)
