"""Instants as text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.runtime.instants import iso_utc, parse_http_date, parse_instant, parse_iso

INSTANT = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)


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
