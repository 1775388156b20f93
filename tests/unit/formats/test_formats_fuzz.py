"""Whatever an event contains, each format writes what its receiver accepts, and mentions no one."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bridge.events.model import StoredEvent, encode_json
from bridge.formats.notice import Notice, notice
from bridge.formats.pagerduty import ACTIONS
from bridge.runtime.text import sanitize
from tests.support.diff import json_values, steady, trials
from tests.support.receivers import (
    CONSOLE,
    FORMATS,
    check_texts,
    make_format,
    strings,
    units,
)
from tests.support.samples import BERLIN, EVENTS, NOW, scheduled, updated, with_data

ZONES = ("", "Europe/Berlin", "Asia/Kolkata", "America/Sao_Paulo")
CHECKS = {name: row.check for name, row in FORMATS.items() if row.check}
MADE = {
    zone: {
        name: make_format(name, time_zone=zone, console_url=zone and CONSOLE, show_tags=["env"])
        for name in CHECKS
    }
    for zone in ZONES
}
DIGESTS = {name: check for name, check in CHECKS.items() if name != "pagerduty"}
WORDS = r"""
@everyone @here <!channel> <!here|x> <@U012AB3CD> <@&1234> <#C1|x> <at>all</at>
*b* _i_ __u__ ~s~ ||x|| `c` ```c``` [x](https://evil.example) :skull: & &amp; < 😀
<https://evil.example|x> https://evil.example discord.gg/x <!date^1^{date}|x> <t:1:R>
{{{{TIME(2017-02-14T06:08:39Z)}}}} ${x} @{x()} $(reboot) --vm \ "
"""
HOSTILE = [
    *WORDS.split(),
    *("# h", "> q", "; reboot", "{{DATE(2017-02-14T06:08:39Z, SHORT)}}", "e\u0301" * 50, " " * 50),
    *("\x00", "\x1b[31m", "\u202e", "\u2066", "\u200f", "\ufffd", "\ufeff", "\uffff", "\U000e0041"),
    *("\r\n", "\u2028"),
]
BITS = st.sampled_from(HOSTILE) | st.text(max_size=20)
TEXTS = st.builds(
    lambda bits, times: "".join(bits) * times, st.lists(BITS, max_size=6), st.sampled_from([1, 1, 1, 400])
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON = json_values(SCALARS, st.text(max_size=9))
TIMES = st.datetimes(min_value=datetime(1, 1, 1), max_value=datetime(9999, 12, 31)).map(
    lambda at: f"{at.isoformat()}Z"
)
VM = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("Name", "VmId", "ResourceId", "Location", "Zone", "ScaleSet"), TEXTS | JSON)
)
COMMAND = st.fixed_dictionaries({}, optional=dict.fromkeys(("Id", "RequestedBy", "Reason"), TEXTS | JSON))
TEXT_NAMES = ("EventId", "Description", "ApprovalSession", "Reason", "Detail")
CHANGED = st.sampled_from(["NotBefore", "EventType", "Resources"])
PROPERTIES = {
    **dict.fromkeys(TEXT_NAMES, TEXTS | JSON),
    **dict.fromkeys(("NotBefore", "NotBeforeUtc", "Since", "BlindFrom", "BlindTo"), TIMES | TEXTS | JSON),
    "EventStatus": st.sampled_from(["Scheduled", "Started"]) | JSON,
    "EventType": st.sampled_from(["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]) | TEXTS | JSON,
    "EventSource": st.sampled_from(["Platform", "User"]) | TEXTS | JSON,
    "PreviousStatus": st.sampled_from(["Scheduled", "Started"]) | JSON,
    "DurationInSeconds": st.integers() | JSON,
    "Resources": st.lists(TEXTS, max_size=8) | st.builds(lambda name: [name] * 1_000, BITS) | JSON,
    "Changed": st.lists(CHANGED | TEXTS, max_size=9) | JSON,
    "Previous": st.dictionaries(CHANGED, TIMES | JSON) | JSON,
    "Vm": VM | JSON,
    "Command": COMMAND | JSON,
    "DryRun": st.booleans() | JSON,
    "Document": JSON,
}
ATTRIBUTES = dict.fromkeys(("id", "source", "subject", "time"), TIMES | TEXTS | JSON)
EVENT = st.builds(
    lambda event, data, attributes: with_data({**event, **attributes}, **data),
    st.sampled_from([*EVENTS.values(), updated({"Description": "old"})]),
    st.fixed_dictionaries({}, optional=PROPERTIES),
    st.fixed_dictionaries({}, optional=ATTRIBUTES),
)
TYPES = st.sampled_from([event["type"] for event in EVENTS.values()])
NONSENSE = st.fixed_dictionaries({}, optional={**ATTRIBUTES, "data": JSON, "type": TYPES | JSON})
NOWS = st.timedeltas(min_value=timedelta(days=-30), max_value=timedelta(days=30)).map(lambda away: NOW + away)
LETTERS = ("x", "&", "@", "{", "😀", "\n x", "\u202e", "\ud800", ":a:", "_")
FUZZ = settings(steady, max_examples=trials(250), suppress_health_check=list(HealthCheck))


ALERTS = [kind for kind, (action, _) in ACTIONS.items() if action]


@pytest.mark.parametrize("kind", EVENTS)
def test_every_type_of_event_is_within_the_limits_in_every_format(kind: str) -> None:
    for name, format_ in [made for zone in ZONES for made in MADE[zone].items()]:
        written = format_.write(EVENTS[kind], NOW)
        assert (written is None) == (name == "pagerduty" and kind not in ALERTS)
        if written is not None:
            CHECKS[name](written)


@FUZZ
@given(event=EVENT | NONSENSE, now=NOWS, zone=st.sampled_from(ZONES))
@example(event={}, now=NOW, zone="")
@example(event=scheduled("scheduled", EventId=":犬:"), now=NOW, zone="")
@example(event=scheduled("scheduled", EventId=":skull:`:skull:"), now=NOW, zone="")
@example(
    event=scheduled("scheduled", EventType="&" * 100, Description="<" * 100_000, Resources=["&" * 100] * 9),
    now=NOW,
    zone="",
)
@example(
    event={"type": f"io.imdsbridge.approval.{'x' * 300}.v1", "data": {"Resources": ["a"]}}, now=NOW, zone=""
)
@example(event={"data": {"Vm": dict.fromkeys(("Name", "Location", "Zone"), "x" * 5_000)}}, now=NOW, zone="")
def test_every_event_is_valid_in_every_format(event: dict[str, Any], now: datetime, zone: str) -> None:
    for name, format_ in MADE[zone].items():
        written = format_.write(event, now)
        if written is not None:
            CHECKS[name](written)
        assert written is not None or name == "pagerduty"
    check_words(notice(event, now=now, zone=BERLIN))


def check_digest(given: list[dict[str, Any]], now: datetime, zone: str) -> None:
    """Check a digest by the receivers' rules, far below their sizes, and that each EventId is shown or counted."""
    stored = [StoredEvent(id=str(n), type="", body=encode_json(one).encode()) for n, one in enumerate(given)]
    ids = {
        sanitize(one.get("data", {}).get("EventId")).lower() if isinstance(one.get("data"), dict) else ""
        for one in given
    }
    for name, check in DIGESTS.items():
        headers, body = MADE[zone][name].encode(stored, now)
        message = json.loads(body)
        check(message)
        assert len(body) <= 20_000
        assert headers == {"Content-Type": "application/json"}
        lines = shown_lines(message)
        more = int(lines.pop().split()[1]) if re.fullmatch(r"and \d+ more", lines[-1]) else 0
        assert headline(message)[2:].startswith(f"{len(lines) + more} event")
        assert len(ids - {""}) <= len(lines) + more <= len(given)


def headline(message: Any) -> str:
    if "text" in message:
        return str(message["blocks"][0]["text"]["text"])
    return str(message["attachments"][0]["content"]["body"][0]["items"][0]["inlines"][0]["text"])


def shown_lines(message: Any) -> list[str]:
    if "text" in message:
        texts = [block["text"]["text"] for block in message["blocks"][1:]]
        return [text for text in texts if not text.startswith("Fleet: ")]
    return [block["inlines"][0]["text"] for block in message["attachments"][0]["content"]["body"][1:]]


@settings(FUZZ, max_examples=trials(60))
@given(
    given=st.lists(EVENT | NONSENSE, min_size=2, max_size=9),
    times=st.sampled_from([1, 1, 30]),
    now=NOWS,
    zone=st.sampled_from(ZONES),
)
def test_every_digest_is_valid_in_every_format(
    given: list[dict[str, Any]], times: int, now: datetime, zone: str
) -> None:
    check_digest(given * times, now, zone)


@pytest.mark.parametrize("letter", LETTERS)
def test_200_events_of_hostile_text_are_within_the_limits_and_counted(letter: str) -> None:
    many = [f"{letter * 60}{number}" for number in range(9)]
    base = EVENTS["scheduledevent.scheduled"]
    check_digest(
        [
            with_data(base, EventId=f"{letter * 20}-{n}", EventType=f"{letter * 40}{n}", Resources=many)
            for n in range(200)
        ],
        NOW,
        ZONES[1],
    )


def check_words(message: Notice) -> None:
    """Check that the words of all formats are short and clean."""
    assert 0 < units(message.title) <= 146
    assert "\n" not in message.title
    assert all(sentence.isascii() for sentence in message.sentences)
    check_texts([message.text, message.command])
    for field in (*message.fields, *message.details):
        assert field.label.isascii()
        assert 0 < units(field.text) <= 1_100
        assert "\n" not in field.text
        words = [part for part in field.parts if not isinstance(part, datetime)]
        assert not field.has_instant or all(word.isascii() for word in words)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("letter", LETTERS)
def test_a_hundred_kilobytes_of_text_and_a_thousand_vms_are_cut_visibly(name: str, letter: str) -> None:
    many = [f"{letter * 60}{number}" for number in range(1_000)]
    event = with_data(EVENTS["scheduledevent.scheduled"], Description=letter * 100_000, Resources=many)
    for made in MADE.values():
        message = made[name].write(event, NOW)
        CHECKS[name](message)
        text = "\n".join(strings(message))
        assert "… (cut)" in text
        assert " more" in text
        assert len(json.dumps(message)) < 40_000
