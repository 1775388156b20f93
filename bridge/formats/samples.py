"""Events to try a sink with: the published examples of the contract, and the test event.

I/O: reads the files of the examples.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from email.utils import format_datetime, parsedate_to_datetime

from bridge import __version__
from bridge.contract.schemas import example
from bridge.contract.types import EVENT_NAMES
from bridge.events.builder import Reporter
from bridge.events.model import StoredEvent, structured
from bridge.runtime.time import iso_utc

_NAMES = [name for name in EVENT_NAMES if name not in ("bridge.test", "command.approve")]
_ISO = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
_HTTP_DATE = re.compile(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} [\d :]+ GMT")


def samples(at: datetime) -> list[StoredEvent]:
    """Return an event of every type that says something about a VM, as if seen at `at`."""
    return [_seen(example(name).decode(), at) for name in _NAMES]


def make_test_event(at: datetime, *, vm: str) -> StoredEvent:
    """Return the event that says it is only a test; consumers of notices do not act on its type."""
    event = Reporter(name=vm, role="check", epoch="", at=at, next_number=lambda: 0).test(version=__version__)
    return StoredEvent(id=event.id, type=event.type, body=structured(event))


def _seen(text: str, at: datetime) -> StoredEvent:
    """Move every time in an event by as much as it was seen earlier."""
    by = at - datetime.fromisoformat(json.loads(text)["time"])
    text = _ISO.sub(lambda found: iso_utc(datetime.fromisoformat(found[0]) + by), text)
    text = _HTTP_DATE.sub(
        lambda found: format_datetime(parsedate_to_datetime(found[0]) + by, usegmt=True), text
    )
    event = json.loads(text)
    body = json.dumps(event, separators=(",", ":")).encode()
    return StoredEvent(id=event["id"], type=event["type"], body=body)
