"""What an event is at a moment."""

from __future__ import annotations

import pytest

from bridge.console import now
from bridge.console.state import State
from bridge.console.waves import Wave
from tests.unit.console.test_views import AT, OPEN

AHEAD, PAST = AT + 60, AT - 60
STATES = {
    "still to come": (State("later", "Scheduled", AHEAD), {"followed", "due", "coming", "approvable"}),
    "at any time": (State("1h", "Scheduled", None), {"followed", "due", "coming", "approvable"}),
    "an early warning": (State("1h", "Advisory", AHEAD), {"followed", "due", "coming"}),
    "due": (State("1h", "Scheduled", PAST), {"followed", "due", "approvable"}),
    "overdue": (State("overdue", "Scheduled", PAST), {"followed", "overdue", "approvable"}),
    "running": (State("started", "Started", PAST), {"followed", "running"}),
    "running, by a clock that is behind": (State("started", "Started", AHEAD), {"followed", "running"}),
    "started, and its VMs are gone": (State("gone", "Started", PAST), {"followed", "over"}),
    "put away before its start": (State("away", "Scheduled", AHEAD), {"away", "coming", "approvable"}),
    "put away while it runs": (State("away", "Started", PAST), {"away"}),
    "no longer followed": (State("left", "Started", PAST), {"over"}),
    "ended": (State("ended", "Completed", PAST), {"over"}),
}


@pytest.mark.parametrize(("state", "expected"), STATES.values(), ids=STATES)
def test_an_event_is_what_the_store_derives_from_its_reports_and_the_time(
    state: State, expected: set[str]
) -> None:
    found = {
        "followed": state.is_followed,
        "due": state.is_due,
        "coming": state.is_coming(AT),
        "running": state.is_running,
        "overdue": state.is_overdue,
        "over": state.is_over,
        "away": state.is_away,
        "approvable": state.may_be_approved,
    }
    assert {name for name, is_true in found.items() if is_true} == expected


@pytest.mark.parametrize(("reported", "known"), [(None, None), (-1, None), (0, 0), (300, 300)])
def test_an_impact_is_known_if_it_is_reported_and_not_negative(
    reported: int | None, known: int | None
) -> None:
    assert State("1h", "Scheduled", AHEAD, reported).impact_seconds == known


def test_a_bar_lasts_until_now_only_while_its_event_runs() -> None:
    def right(due: str) -> float:
        events = [OPEN._replace(status="Started", due=one, starts_at=AT - 1200) for one in (due, "1h")]
        bar = now.timeline([Wave((*events,))], AT, "1h").bars[OPEN.key]
        return bar.x + bar.width

    assert right("gone") < now.place(0, 3600) < right("started")
