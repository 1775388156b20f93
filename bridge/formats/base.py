"""What a format for people is: it writes an event as the JSON that one kind of receiver takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Protocol, runtime_checkable

from bridge.runtime.json import Json


class Format(Protocol):
    """A way to show an event; made from a WebhookSettings, without I/O but for secrets in files.

    Duties: pure and quick; whatever the event holds, the result is within the receiver's published limits, and
    nothing from outside can act in it: no markup, no mention, no broken JSON. What is cut shows it.
    """

    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the JSON for an event (a CloudEvent as a dictionary), as of `now` (UTC).

        Raises:
            ValueError: this event cannot be shown in this format.
        """


@runtime_checkable
class CheckedFormat(Format, Protocol):
    """A format that an operator wrote, and that can be wrong."""

    def check(self, events: Iterable[Mapping[str, Json]], now: datetime) -> None:
        """Try it on one event of every type that will come.

        Raises:
            ValueError: it fails, or names what none of them has.
        """
