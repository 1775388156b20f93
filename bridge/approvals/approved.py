"""What is recorded when IMDS has approved an event, and whether that still holds for the event as it is now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any

from bridge.imds.document import STARTED, ScheduledEvent
from bridge.runtime.time import iso_utc, parse_instant

RECENT_SECONDS = 60.0

# They change when an event starts, which does not make it another event.
_CHANGED_BY_START = ("EventStatus", "NotBefore")


def record_approval(
    event: ScheduledEvent, *, at: datetime, earlier: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the record of an approval.

    Args:
        event: as in the document by which it was approved.
        at: when IMDS answered.
        earlier: the record of the event's last approval, if there was one.
    """
    return {
        "at": iso_utc(at),
        "content": content_hash(event),
        "not_before": iso_utc(event.not_before) if event.not_before else None,
        "has_started": False,
        "number": (earlier["number"] if earlier else 0) + 1,
    }


def is_same(record: Mapping[str, Any] | None, event: ScheduledEvent) -> bool:
    """Return whether an approval was for the event as it is: unchanged, and not Scheduled again after a start."""
    if record is None or record["content"] != content_hash(event):
        return False
    if event.status == STARTED:
        return True
    not_before = iso_utc(event.not_before) if event.not_before else None
    return not record["has_started"] and bool(record["not_before"] == not_before)


def is_recent(record: Mapping[str, Any], now: datetime) -> bool:
    """Return whether an approval was made within the last minute."""
    at = parse_instant(record["at"])
    return at is not None and 0 <= (now - at).total_seconds() <= RECENT_SECONDS


def content_hash(event: ScheduledEvent) -> str:
    """Return a hash of what an event is, whether or not it has started."""
    content = {name: value for name, value in event.content.items() if name not in _CHANGED_BY_START}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
