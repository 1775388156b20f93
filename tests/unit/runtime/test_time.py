"""Clocks, the boot id, and instants as text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.runtime import time as time_module
from bridge.runtime.time import (
    Clock,
    full_jitter,
    iso_utc,
    parse_http_date,
    parse_instant,
    parse_iso,
    read_boot_id,
)
from tests.support.clock import MovedClock
from tests.support.diff import steady

TZSET = pytest.mark.posix("Windows has no tzset")
INSTANT = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)


@pytest.mark.parametrize("seconds", [60.0, 61.0, 86_400.0, -60.0, -86_400.0])
def test_a_jump_of_a_minute_or_more_is_noticed_once_and_ages_never_follow_it(seconds: float) -> None:
    clock = MovedClock()
    before = clock.steady()
    for _ in range(3):
        clock.jump(seconds)
        assert clock.jump_seconds() == pytest.approx(seconds)
        assert clock.jump_seconds() == pytest.approx(0)
        assert clock.steady() == pytest.approx(before)
    clock.advance(86_400)
    clock.jump(30)  # a drift after it
    assert clock.jump_seconds() == 0
    assert clock.wall() - clock.steady() == pytest.approx(3 * seconds)


def test_a_slow_drift_is_followed_silently_and_never_is_a_jump() -> None:
    clock = MovedClock()
    for seconds in (0.0, 1.0, 3.6, -3.6, *[3.5] * 60):
        clock.advance(3600)
        clock.jump(seconds)
        assert clock.jump_seconds() == 0
        assert clock.steady() == pytest.approx(clock.wall())


@pytest.mark.parametrize("sign", [1, -1])
def test_many_steps_below_a_minute_are_no_age_but_are_noticed_together(sign: int) -> None:
    clock = MovedClock()
    before, noticed = clock.steady(), 0.0
    for _ in range(1000):
        clock.advance(1)
        clock.jump(sign * 59.0)
        noticed += clock.jump_seconds()
    assert clock.steady() - before == pytest.approx(1000, abs=1)
    assert abs(noticed - sign * 59_000) < 2 * 60
    clock.advance(86_400)
    clock.jump_seconds()
    assert abs(clock.wall() - clock.steady() - noticed) < 1, "the rest is followed in time"


def test_a_wait_with_full_jitter_is_anywhere_below_its_limit() -> None:
    for attempt, limit in ((0, 0.5), (3, 4.0), (9, 60.0), (10_000, 60.0)):
        drawn = [full_jitter(attempt, base_seconds=0.5, limit_seconds=60) for _ in range(500)]
        assert min(drawn) < limit / 10
        assert limit * 0.9 < max(drawn) <= limit


@pytest.mark.posix("only Linux counts the time of a suspended machine")
def test_the_time_of_a_suspended_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before = clock.monotonic()
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) + 3600
    monkeypatch.setattr(time_module, "_clock_gettime", {time.CLOCK_BOOTTIME: slept}.__getitem__)
    assert clock.monotonic() - before >= 3600


BOOT_ID = "5c9a0b2e-1f4d-4f6a-9c3e-0a1b2c3d4e5f"


@pytest.mark.posix("Windows counts its boots")
@pytest.mark.parametrize(
    ("content", "variable", "boot_id"),
    [
        (f"{BOOT_ID}\n".encode(), "", BOOT_ID),
        (f"{BOOT_ID}\n".encode(), BOOT_ID.replace("-", ""), BOOT_ID),
        (None, BOOT_ID.replace("-", "").upper(), BOOT_ID),
        (b"\xff", "", ""),
        (None, "", ""),
    ],
)
def test_the_boot_id_of_a_unit_is_that_of_the_file_which_it_hides_and_empty_if_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, variable: str, boot_id: str
) -> None:
    monkeypatch.setenv("IMDS_BRIDGE_BOOT_ID", variable)
    if content is not None:
        (tmp_path / "boot_id").write_bytes(content)
    assert read_boot_id(tmp_path / "boot_id") == boot_id


@pytest.fixture(params=["UTC", pytest.param("Asia/Tokyo", marks=TZSET)], autouse=True)
def zone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the machine's time zone, which must decide nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        tzset = getattr(time, "tzset", lambda: None)
        tzset()
        yield
    tzset()


@pytest.mark.parametrize(
    "text",
    [
        "Mon, 11 Apr 2022 22:26:58 GMT",
        "Sun, 11 Apr 2022 22:26:58 GMT",  # the weekday is wrong
        "11 Apr 2022 22:26:58 GMT",
        "Mon, 11 Apr 2022 22:26:58 -0000",
        "Tue, 12 Apr 2022 00:26:58 +0200",
        "Mon, 11 Apr 2022 22:26:58",
        "2022-04-11T22:26:58Z",
        "2022-04-11T22:26:58",
        "2022-04-11 22:26:58",
        "2022-04-11T22:26:58.000Z",
        " 2022-04-12T00:26:58+02:00\n",
    ],
)
def test_every_format_is_read_as_the_same_instant(text: str) -> None:
    assert parse_instant(text) == INSTANT


NO_TEXTS: list[object] = [None, 5, 0.5, True, ["2022-04-11"], {}]
NO_FORMS = ["", " ", "soon", "0", "2022", "9" * 5000, "\ud800"]
NO_DATES = [
    "2022-13-01",
    "9999-12-31T23:59:59-23:00",
    "Mon, 31 Feb 2026 10:00:00 GMT",
    "Mon, 02 Abc 2026 10:00:00 GMT",
    "Mon, 11 Apr 2022 99:99:99 GMT",
    "Mon, 11 Apr 2022 22:26:58 +9999",
]


@pytest.mark.parametrize("value", [*NO_TEXTS, *NO_FORMS, *NO_DATES], ids=ascii)
def test_what_is_not_an_instant_is_none(value: object) -> None:
    assert parse_instant(value) is None


def test_a_reader_of_one_format_refuses_the_other() -> None:
    assert parse_iso("Mon, 11 Apr 2022 22:26:58 GMT") is None
    assert parse_http_date("2022-04-11T22:26:58Z") is None


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("2022-04-12T00:26:58.1234+02:00", "2022-04-11T22:26:58.123Z"),
        ("2022-04-11T22:26:58.999999+00:00", "2022-04-11T22:26:58.999Z"),
        ("0001-01-01T00:00:00+00:00", "0001-01-01T00:00:00.000Z"),
        ("9999-12-31T23:59:59.999999+00:00", "9999-12-31T23:59:59.999Z"),
    ],
)
def test_an_instant_is_written_in_utc_with_milliseconds_that_are_cut(given: str, written: str) -> None:
    assert iso_utc(datetime.fromisoformat(given)) == written
    assert parse_instant(written) == datetime.fromisoformat(written)


@steady
@given(st.datetimes(datetime(1000, 1, 1), timezones=st.just(UTC)).map(lambda at: at.replace(microsecond=0)))
def test_the_form_that_imds_sends_is_read_as_the_library_reads_it(instant: datetime) -> None:
    text = format_datetime(instant, usegmt=True)
    assert parse_instant(text) == parsedate_to_datetime(text) == instant
