from __future__ import annotations

import json
from typing import Any

import pytest

from bridge.formats.teams import MESSAGE_BYTES
from tests.support.examples import EVENTS, scheduled, updated, with_data
from tests.support.receivers import NOW, check_teams, strings, teams


def card(message: Any) -> Any:
    return message["attachments"][0]["content"]


def texts(message: Any) -> str:
    return "\n".join(strings(message))


@pytest.mark.parametrize(
    ("kind", "style"),
    [("scheduled", "warning"), ("started", "attention"), ("completed", "good"), ("canceled", "accent")],
)
def test_the_head_has_the_colour_of_what_happens(kind: str, style: str) -> None:
    assert card(teams().write(EVENTS[f"scheduledevent.{kind}"], NOW))["body"][0]["style"] == style


def test_the_title_stands_first_and_the_command_is_monospaced() -> None:
    body = card(teams().write(EVENTS["scheduledevent.scheduled"], NOW))["body"]
    title = body[0]["items"][0]["inlines"][0]
    assert (title["text"], title["weight"]) == ("🟧 Reboot of web-0, web-1 in 15 min (13:18 UTC)", "Bolder")
    monospaced = [
        run["text"]
        for block in body
        for run in block.get("inlines", ())
        if run.get("fontType") == "Monospace"
    ]
    assert len(monospaced) == 1
    assert monospaced[0].startswith("imds-bridge approve 602d9444-")


def test_without_a_time_zone_each_reader_sees_their_own() -> None:
    text = texts(teams().write(EVENTS["scheduledevent.scheduled"], NOW))
    starts = "{{DATE(2026-11-20T13:18:00Z, SHORT)}} {{TIME(2026-11-20T13:18:00Z)}}"
    assert f"**Starts:** automatically in 15 min, at {starts}" in text


def test_with_a_time_zone_times_are_written_in_it() -> None:
    text = texts(teams(time_zone="Europe/Berlin").write(EVENTS["scheduledevent.scheduled"], NOW))
    assert "automatically in 15 min, at 14:18 CET" in text
    assert "{{DATE(" not in text


def test_markup_from_outside_stands_in_runs_which_know_none() -> None:
    hostile = "**bold** [e](https://evil.example) {{DATE(2026-11-20T13:18:00Z, SHORT)}} {{{TIME( <at>all</at>"
    message = teams().write(scheduled("scheduled", Description=hostile), NOW)
    check_teams(message)
    shown = (
        "**bold** [e](https://evil.example) {\u200b{DATE(2026-11-20T13:18:00Z, SHORT)}} {\u200b{\u200b{TIME("
    )
    assert shown in texts(message)
    assert "entities" not in texts(message)


@pytest.mark.parametrize("letter", ["\N{OPEN BOOK}", "{"])
def test_letters_that_need_many_bytes_are_cut_to_the_size_that_is_sent(letter: str) -> None:
    wide = letter * 1_000
    before = {"Resources": [wide], "Description": wide, "EventType": wide, "EventSource": "User"}
    after = {
        "Resources": [wide[1:]] * 100,
        "Description": wide[1:],
        "EventType": wide[1:],
        "EventSource": wide,
    }
    event = updated(before, **after)
    vm = dict.fromkeys(("Name", "Location", "Zone"), wide)
    message = teams().write(with_data(event, EventId=wide, Vm=vm), NOW)
    check_teams(message)
    assert "… (cut)" in texts(message)
    assert len(json.dumps(message)) > MESSAGE_BYTES / 3
