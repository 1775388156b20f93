"""What the message of an event has for filters and sessions, within Azure's limits."""

from __future__ import annotations

import pytest

from bridge.config.values import check_template
from bridge.contract.types import MAX_SESSION_CHARACTERS, session_id
from bridge.sinks.servicebus import to_message
from tests.support.process import stored_event


def resources(*names: object) -> str:
    """Return the property `Resources` of a message."""
    message = to_message(stored_event(1, Resources=list(names)))
    return str((message.application_properties or {})["Resources"])


def test_the_names_stand_between_commas() -> None:
    assert (resources("web-0", "db-1"), resources()) == (",web-0,db-1,", ",")


@pytest.mark.parametrize("letter", ["v", "é"])
def test_names_beyond_what_service_bus_takes_are_cut_as_a_whole_with_a_sign_for_filters(letter: str) -> None:
    names = [f"{letter * 20}{number:04}" for number in range(3_000)]
    text = resources(*names)
    assert len(text.encode()) <= 32 * 1024
    *kept, sign = text.strip(",").split(",")
    assert (kept, sign) == (names[: len(kept)], "*")
    assert len(f"{text}{names[len(kept)]}".encode()) > 30_000


def test_a_session_id_that_is_too_long_ends_with_a_hash_of_the_whole() -> None:
    ids = {session_id("{group}.{vm}", group="g" * 90, vm=f"{'v' * 60}-{number}") for number in range(3)}
    assert {len(one) for one in ids} == {MAX_SESSION_CHARACTERS}
    assert len(ids) == 3
    assert session_id("{group}.{vm}", group="g" * 63, vm="v" * 64) == f"{'g' * 63}.{'v' * 64}"


def test_a_template_that_no_value_fits_is_refused() -> None:
    assert check_template("x" * 127 + "{vm}", ("vm",))
    with pytest.raises(ValueError, match="expected less than 128 characters beside the placeholders"):
        check_template("x" * 128 + "{vm}", ("vm",))
