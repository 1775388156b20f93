"""Instants as text: the formats that IMDS and others write, and the one that imds-bridge writes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

from bridge.runtime.json import Json

_KEPT = 64  # the events of a document share their instants, and each is read and written several times


def parse_instant(value: Json) -> datetime | None:
    """Read RFC 1123 (whatever its weekday) or ISO 8601, in UTC unless it says otherwise; None if it is neither."""
    return _parse_any(value) if isinstance(value, str) else None


@lru_cache(maxsize=_KEPT)
def _parse_any(text: str) -> datetime | None:
    return parse_http_date(text) or parse_iso(text)


def parse_http_date(value: Json) -> datetime | None:
    """Read RFC 1123, in UTC unless it says otherwise; None if it is something else."""
    return _parse(parsedate_to_datetime, value)


def parse_iso(value: Json) -> datetime | None:
    """Read ISO 8601, in UTC unless it says otherwise; None if it is something else."""
    return _parse(datetime.fromisoformat, value)


@lru_cache(maxsize=_KEPT)
def iso_utc(instant: datetime) -> str:
    """Write an instant as RFC 3339 in UTC with milliseconds."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _parse(read: Callable[[str], datetime], value: Json) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        instant = read(value.strip())
        return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
