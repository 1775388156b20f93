"""Clocks and the machine's boot, retry delays, rare log lines, and instants as text."""

from __future__ import annotations

import math
import os
import random
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from uuid import UUID

from bridge.runtime.json import Json

if sys.platform == "win32":
    import winreg

CLOCK_JUMP_SECONDS = 60.0
# Of the time passed: twice as fast as NTP corrects a clock, so that steps do not add up.
FOLLOWED_SHARE = 0.001
# Linux has a clock that counts the time of a suspended machine, which time.monotonic leaves out.
_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", None)
_clock_gettime = getattr(time, "clock_gettime", None)
REPEAT_LOG_SECONDS = 600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOTS = r"SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management\PrefetchParameters"

_KEPT = 64  # the events of a document share their instants, and each is read and written several times

# What IMDS sends, for which the library takes four times as long as for ISO 8601.
_RFC_1123 = re.compile(r"[A-Z][a-z]{2}, (\d\d) ([A-Z][a-z]{2}) ([1-9]\d{3}) (\d\d:\d\d:\d\d) GMT", re.ASCII)
_MONTHS = "    Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec"


class Clock:
    """The wall clock and the monotonic clock; tests use a double that they move.

    Ages are counted on `steady`, which begins with the wall clock's date and follows it slowly, never a jump of it.
    """

    def __init__(self) -> None:
        self._offset = self.wall() - self.monotonic()
        self._jumped_seconds = 0.0
        self._compared_at = self.monotonic()

    def wall(self) -> float:
        """Return the machine's time in seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never jump, and that also pass while the machine is suspended."""
        if _clock_gettime is None or _BOOT_TIME is None:
            return time.monotonic()
        return float(_clock_gettime(_BOOT_TIME))

    def now(self) -> datetime:
        """Return the machine's time in UTC."""
        return datetime.fromtimestamp(self.wall(), UTC)

    def steady(self) -> float:
        """Return seconds since 1970 that advance as `monotonic` does."""
        return self.monotonic() + self._offset

    def jump_seconds(self) -> float:
        """Return how far the wall clock has jumped since the last call; `steady` slowly follows less than a jump."""
        drift = self.wall() - self.steady() - self._jumped_seconds
        passed, self._compared_at = self.monotonic() - self._compared_at, self.monotonic()
        if abs(drift) < CLOCK_JUMP_SECONDS:
            self._offset += math.copysign(min(abs(drift), passed * FOLLOWED_SHARE), drift)
            return 0.0
        self._jumped_seconds += drift
        return drift


def full_jitter(attempt: int, *, base_seconds: float, limit_seconds: float) -> float:
    """Return a random delay before a retry, below an exponentially growing limit.

    Args:
        attempt: the number of failures before this one.
        base_seconds: the limit after the first failure.
        limit_seconds: the highest limit.
    """
    ceiling = min(limit_seconds, base_seconds * 2 ** min(attempt, 32))
    return random.uniform(0.0, ceiling)  # noqa: S311 - it spreads load


class RepeatLimit:
    """Decides whether a message that may come again and again is logged: when it is new, and then rarely."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._subject: object = None
        self._logged_at = -math.inf

    def is_due(self, subject: object = None) -> bool:
        """Return whether to log now: what the message is about has changed, or the last time is long ago."""
        now = self._clock.monotonic()
        if subject == self._subject and now - self._logged_at < REPEAT_LOG_SECONDS:
            return False
        self._subject, self._logged_at = subject, now
        return True

    def reset(self) -> None:
        """Log the next message in any case."""
        self._logged_at = -math.inf


def read_boot_id(path: Path = _BOOT_ID) -> str:
    """Return an id that is new after each start of the machine, in one spelling; "" where there is none.

    systemd's units hide the file, and give the id in the environment, where it has no dashes.
    """
    given = os.environ.get("IMDS_BRIDGE_BOOT_ID", "")
    with suppress(OSError, ValueError):
        given = given or _read_boot(path)
        given = str(UUID(given))
    return given


def _read_boot(path: Path) -> str:
    """Return the id as the system has it, which on Windows is how often it has started; OSError for none."""
    if sys.platform == "win32":
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _BOOTS) as key:
            return str(winreg.QueryValueEx(key, "BootId")[0])
    else:
        return path.read_text("ascii").strip()


def parse_instant(value: Json) -> datetime | None:
    """Read RFC 1123 (whatever its weekday) or ISO 8601, in UTC unless it says otherwise; None if it is neither."""
    return _parse_any(value) if isinstance(value, str) else None


@lru_cache(maxsize=_KEPT)
def _parse_any(text: str) -> datetime | None:
    if match := _RFC_1123.fullmatch(text):
        day, month, year, of_day = match.groups()
        text = f"{year}-{_MONTHS.find(month) // 4:02}-{day}T{of_day}Z"
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
