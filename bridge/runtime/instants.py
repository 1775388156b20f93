"""Instants as text: what IMDS and others write, and what imds-bridge writes."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from bridge.runtime.json import Json


def parse_instant(value: Json) -> datetime | None:
    """Read a NotBefore: RFC 1123 (whatever its weekday) or ISO 8601, in UTC unless it says otherwise."""
    if not isinstance(value, str) or not value.strip():
        return None
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            instant = parse(value.strip())
            return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
        except (ValueError, TypeError, IndexError, OverflowError):
            continue
    return None


def iso_utc(instant: datetime) -> str:
    """Write an instant as RFC 3339 in UTC with milliseconds."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
