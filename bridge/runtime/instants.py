"""Instants as text: the formats that IMDS and others write, and the one that imds-bridge writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

from bridge.runtime.json import Json

_KEPT = 64  # the events of a document share their instants, and each is read and written several times

# What IMDS sends, for which the library takes four times as long as for ISO 8601.
_RFC_1123 = re.compile(r"[A-Z][a-z]{2}, (\d\d) ([A-Z][a-z]{2}) ([1-9]\d{3}) (\d\d:\d\d:\d\d) GMT", re.ASCII)
_MONTHS = "    Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec"


def parse_instant(value: Json) -> datetime | None:
    """Read RFC 1123 (whatever its weekday) or ISO 8601, in UTC unless it says otherwise; None if it is neither."""
    return _parse_any(value) if isinstance(value, str) else None


@lru_cache(maxsize=_KEPT)
def _parse_any(text: str) -> datetime | None:
    if match := _RFC_1123.fullmatch(text):
        day, month, year, time = match.groups()
        text = f"{year}-{_MONTHS.find(month) // 4:02}-{day}T{time}Z"
    return parse_iso(text) or parse_http_date(text)


def parse_http_date(value: Json) -> datetime | None:
    """Read RFC 1123, in UTC unless it says otherwise; None if it is something else."""
    return _parse(parsedate_to_datetime, value)


def parse_iso(value: Json) -> datetime | None:
    """Read ISO 8601, in UTC unless it says otherwise; None if it is something else."""
    return _parse(datetime.fromisoformat, value)


@lru_cache(maxsize=_KEPT)
def iso_utc(instant: datetime) -> str:
    """Write an instant as RFC 3339 in UTC with milliseconds."""
    return instant.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _parse(read: Callable[[str], datetime], value: Json) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        instant = read(value.strip())
        return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
