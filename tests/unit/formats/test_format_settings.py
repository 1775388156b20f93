"""Each format brings its own settings: defaults, required ones, and limits; and what it is tried with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.config.registry import FORMATS
from bridge.contract.types import EVENT_TYPES
from bridge.formats.samples import samples
from tests.support.receivers import FORMATS as ROWS
from tests.support.settings import faults, read, webhook


def test_every_format_has_a_row() -> None:
    assert set(ROWS) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_its_own_defaults_and_the_limits_of_every_sink(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    sink = read(tmp_path, webhook(format=name, **row.needed)).sinks["ops"]
    assert (sink.types, sink.max_age_seconds) == (row.types, row.age_seconds)
    assert (sink.max_per_second, sink.is_chat_format) == (row.per_second, row.is_chat_format)
    found = faults(tmp_path, webhook(format=name, max_per_second=1e-11, max_age_seconds=-1, **row.needed))
    assert {fault.partition(":")[0] for fault in found} == {
        "sinks.ops.max_age_seconds",
        "sinks.ops.max_per_second",
    }


@pytest.mark.parametrize(
    ("settings", "start", "end"),
    [
        ({"format": "pagerduty"}, "routing_key: is missing (or routing_key_file)", ""),
        ({"format": "template"}, "template: is missing (or template_file)", ""),
        (
            {"format": "teams", "routing_key": "x"},
            "routing_key: ",
            'with kind = "webhook" and format = "pagerduty"?',
        ),
        (
            {"format": "slack", "mode": "x"},
            "mode: ",
            'did you mean sinks.NAME.mode with kind = "webhook" and format = "cloudevents"?',
        ),
        ({"content_type": "json\r\nX: y"}, "content_type: ", "^([!-~]+/[ -~]+)?$'"),
        ({"template_file": "x"}, "template_file: ", 'with kind = "webhook" and format = "template"?'),
        (
            {"format": "teams", "time_zone": "Europe/Berln"},
            "time_zone: ",
            "IANA time zone such as Europe/Berlin",
        ),
        ({"where": {"AffectsThisVm": "yes"}}, "where.AffectsThisVm: ", 'given "yes", expected true or false'),
        ({"ca_file": "/etc/nothing.pem"}, "ca_file: ", "No such file or directory"),
        (
            {"format": "team"},
            'format: given "team", expected one of cloudevents, ',
            "; did you mean teams?",
        ),
    ],
)
def test_a_missing_or_foreign_setting_and_an_unknown_format_are_named(
    tmp_path: Path, settings: dict[str, Any], start: str, end: str
) -> None:
    (fault,) = faults(tmp_path, webhook(**settings))
    assert fault.startswith(f"sinks.ops.{start}")
    assert fault.endswith(end)


# The events that `render` and the check of a format at the start show

AT = datetime(2031, 5, 6, 7, 8, 9, 125_000, tzinfo=UTC)


def test_there_is_a_sample_of_every_type_but_the_test_event_and_the_command() -> None:
    others = {"io.imdsbridge.bridge.test.v1", "io.imdsbridge.command.approve.v1"}
    assert [event.type for event in samples(AT)] == [type_ for type_ in EVENT_TYPES if type_ not in others]


def test_samples_are_seen_now_and_their_times_are_as_far_away_as_in_the_examples() -> None:
    events = {event.type.split(".")[-2]: event.envelope for event in samples(AT)}
    assert {event["time"] for event in events.values()} == {"2031-05-06T07:08:09.125Z"}
    data = events["updated"]["data"]
    assert data["NotBeforeUtc"].startswith("2031-05-06T07:28:")
    assert data["NotBefore"].startswith("Tue, 06 May 2031 07:28:")
    assert data["Previous"]["NotBefore"].startswith("Tue, 06 May 2031 07:23:")
