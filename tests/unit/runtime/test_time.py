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

INSTANT = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)


@pytest.mark.parametrize("seconds", [60.0, 61.0, 300.0, 600.0, 86_400.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_jump_of_a_minute_or_more_is_noticed_once_and_ages_never_follow_it(
    seconds: float, sign: int
) -> None:
    clock = MovedClock()
    before = clock.steady()
    for _ in range(3):
        clock.jump(sign * seconds)
        assert clock.jump_seconds() == pytest.approx(sign * seconds)
        assert clock.jump_seconds() == pytest.approx(0)
        assert clock.steady() == pytest.approx(before)


def test_a_drift_is_followed_after_a_jump_as_well() -> None:
    clock = MovedClock()
    clock.jump(3600)
    clock.jump_seconds()
    clock.jump(30)
    assert clock.jump_seconds() == 0
    assert clock.wall() - clock.steady() == pytest.approx(3600)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 59.0, -59.0])
def test_a_change_of_less_than_a_minute_is_followed_silently(seconds: float) -> None:
    clock = MovedClock()
    clock.jump(seconds)
    assert clock.jump_seconds() == 0
    assert clock.steady() == pytest.approx(clock.wall())


def test_a_clock_that_drifts_slowly_never_jumps() -> None:
    clock = MovedClock()
    for _ in range(60):
        clock.advance(3600)
        clock.jump(30)
        assert clock.jump_seconds() == 0
    assert clock.steady() == pytest.approx(clock.wall())


def test_a_wait_with_full_jitter_is_anywhere_below_its_limit() -> None:
    for attempt, limit in ((0, 0.5), (3, 4.0), (9, 60.0), (10_000, 60.0)):
        drawn = [full_jitter(attempt, base_seconds=0.5, limit_seconds=60) for _ in range(500)]
        assert min(drawn) < limit / 10
        assert limit * 0.9 < max(drawn) <= limit


@pytest.mark.skipif(
    not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux counts the time of a suspended machine"
)
def test_the_time_of_a_suspended_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before = clock.monotonic()
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) + 3600
    monkeypatch.setattr(time_module, "_clock_gettime", {time.CLOCK_BOOTTIME: slept}.__getitem__)
    assert clock.monotonic() - before >= 3600


def test_the_boot_id_is_read_without_its_line_break(tmp_path: Path) -> None:
    path = tmp_path / "boot_id"
    path.write_text("5c9a0b2e-9d5f-4c5e-8d0e-1d1f4d6f0d3a\n")
    assert read_boot_id(path) == "5c9a0b2e-9d5f-4c5e-8d0e-1d1f4d6f0d3a"


def test_a_system_without_boot_ids_has_an_empty_one(tmp_path: Path) -> None:
    assert read_boot_id(tmp_path / "absent") == ""
    (tmp_path / "odd").write_bytes(b"\xff")
    assert read_boot_id(tmp_path / "odd") == ""


@pytest.fixture(params=["UTC", "Asia/Tokyo"], autouse=True)
def zone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the machine's time zone, which must decide nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    "text",
    [
        "Mon, 11 Apr 2022 22:26:58 GMT",
        "Sun, 11 Apr 2022 22:26:58 GMT",  # the weekday is wrong
        "Mon, 11 Apr 2022 22:26:58",
        "2022-04-11T22:26:58Z",
        "2022-04-11T22:26:58",
        " 2022-04-12T00:26:58+02:00 ",
    ],
)
def test_every_format_is_read_as_the_same_instant(text: str) -> None:
    assert parse_instant(text) == INSTANT


@pytest.mark.parametrize(
    "value",
    ["", " ", "soon", "0", "2022-13-01", None, 5, ["2022-04-11"], "9999-12-31T23:59:59-23:00"],
)
def test_what_is_not_an_instant_is_none(value: object) -> None:
    assert parse_instant(value) is None


def test_a_reader_of_one_format_refuses_the_other() -> None:
    assert parse_iso("Mon, 11 Apr 2022 22:26:58 GMT") is None
    assert parse_http_date("2022-04-11T22:26:58Z") is None


def test_an_instant_is_written_in_utc_with_milliseconds() -> None:
    assert iso_utc(datetime.fromisoformat("2022-04-12T00:26:58.1234+02:00")) == "2022-04-11T22:26:58.123Z"


@given(st.datetimes(datetime(1000, 1, 1), timezones=st.just(UTC)).map(lambda at: at.replace(microsecond=0)))
def test_the_form_that_imds_sends_is_read_as_the_library_reads_it(instant: datetime) -> None:
    text = format_datetime(instant, usegmt=True)
    assert parse_instant(text) == parsedate_to_datetime(text) == instant


@pytest.mark.parametrize("text", ["Mon, 31 Feb 2026 10:00:00 GMT", "Mon, 02 Abc 2026 10:00:00 GMT"])
def test_a_date_that_does_not_exist_is_unreadable(text: str) -> None:
    assert parse_instant(text) is None
