"""The events that `render` and the check of a format at the start show."""

from __future__ import annotations

from datetime import UTC, datetime

from bridge.contract.types import EVENT_TYPES
from bridge.formats.samples import samples

AT = datetime(2031, 5, 6, 7, 8, 9, 125_000, tzinfo=UTC)


def test_there_is_one_of_every_type_but_the_test_event_and_the_command() -> None:
    others = {"io.imdsbridge.bridge.test.v1", "io.imdsbridge.command.approve.v1"}
    assert [event.type for event in samples(AT)] == [type_ for type_ in EVENT_TYPES if type_ not in others]


def test_they_are_seen_now_and_their_times_are_as_far_away_as_in_the_examples() -> None:
    events = {event.type.split(".")[-2]: event.envelope for event in samples(AT)}
    assert {event["time"] for event in events.values()} == {"2031-05-06T07:08:09.125Z"}
    data = events["updated"]["data"]
    assert data["NotBeforeUtc"].startswith("2031-05-06T07:28:")
    assert data["NotBefore"].startswith("Tue, 06 May 2031 07:28:")
    assert data["Previous"]["NotBefore"].startswith("Tue, 06 May 2031 07:23:")
