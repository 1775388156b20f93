"""Slack and Teams: what stands where, whose time is shown, and that nothing from outside acts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridge.config.models import Config
from bridge.events.model import StoredEvent, encode_json
from bridge.formats.digest import MAX_LINES, Digest, summarize
from bridge.formats.teams import MESSAGE_BYTES
from tests.support.diff import steady
from tests.support.only import only
from tests.support.receivers import (
    CONSOLE,
    SPACE,
    check_slack,
    check_teams,
    make_format,
    settings,
    strings,
)
from tests.support.samples import EVENT_ID, EVENTS, NOW, in_, scheduled, updated, with_data, written

SCHEDULED = EVENTS["scheduledevent.scheduled"]
TITLE = "🟧 Reboot of web-0, web-1 in 15 min (13:18 UTC)"


def blocks_text(message: Any) -> str:
    """Return all that the blocks of a message to Slack hold, a line for each text."""
    return "\n".join(strings(message["blocks"]))


def test_the_text_alone_says_all_for_receivers_that_know_no_blocks() -> None:
    text = make_format("slack").write(SCHEDULED, NOW)["text"]
    assert text.splitlines()[:4] == [
        TITLE,
        "A restart: memory is lost, disks are kept.",
        "Fleet: resource group shop",
        "Starts: automatically in 15 min, at 13:18 UTC",
    ]
    assert "\nApprove: imds-bridge approve 602d9444-" in text


def test_slack_has_a_header_a_command_to_copy_and_no_attachments_which_discord_shows_empty() -> None:
    message = make_format("slack").write(SCHEDULED, NOW)
    assert message["blocks"][0]["type"] == "header"
    assert message["blocks"][0]["text"]["text"] == TITLE
    assert "*Approve*\n```imds-bridge approve 602d9444-" in blocks_text(message)
    assert "attachments" not in message
    labels = [field.label for field in written(SCHEDULED).fields]
    assert not [label for label in labels if f"*{label}*" not in blocks_text(message)]


@pytest.mark.parametrize(
    ("kind", "style"),
    [("scheduled", "warning"), ("started", "attention"), ("completed", "good"), ("canceled", "accent")],
)
def test_the_head_in_teams_has_the_colour_of_what_happens(kind: str, style: str) -> None:
    message = make_format("teams").write(EVENTS[f"scheduledevent.{kind}"], NOW)
    assert message["attachments"][0]["content"]["body"][0]["style"] == style


def test_the_title_stands_first_in_teams_and_the_command_is_monospaced() -> None:
    body = make_format("teams").write(SCHEDULED, NOW)["attachments"][0]["content"]["body"]
    title = body[0]["items"][0]["inlines"][0]
    assert (title["text"], title["weight"]) == (TITLE, "Bolder")
    runs = [run for block in body for run in block.get("inlines", ())]
    monospaced = only(run["text"] for run in runs if run.get("fontType") == "Monospace")
    assert monospaced.startswith("imds-bridge approve 602d9444-")


@pytest.mark.parametrize(
    ("name", "starts"),
    [
        ("slack", "in 15 min, at <!date^1795180680^{date_short_pretty} {time}|13:18 UTC>"),
        ("teams", "in 15 min, at {{DATE(2026-11-20T13:18:00Z, SHORT)}} {{TIME(2026-11-20T13:18:00Z)}}"),
    ],
)
def test_each_reader_sees_their_own_time_unless_a_time_zone_is_set(name: str, starts: str) -> None:
    assert starts in "\n".join(strings(make_format(name).write(SCHEDULED, NOW)))
    text = "\n".join(strings(make_format(name, time_zone="Europe/Berlin").write(SCHEDULED, NOW)))
    assert "automatically in 15 min, at 14:18 CET" in text
    assert "<!date" not in text
    assert "{{DATE(" not in text


def test_no_one_is_mentioned() -> None:
    mentions = "@everyone @here <!channel> <@U012> <@&34> ops@example.org"
    message = make_format("slack").write(scheduled("scheduled", Description=mentions), NOW)
    check_slack(message)
    assert f"@{SPACE}everyone @{SPACE}here" in message["text"]
    assert f"&lt;@{SPACE}U012&gt;" in blocks_text(message)
    assert "<!channel>" not in json.dumps(message)


def test_markup_from_outside_is_shown_and_does_not_act() -> None:
    hostile = "*a* _b_ ~c~ `d` [e](https://evil.example) <https://evil.example|f> :skull: ||g|| a_b & \\"
    message = make_format("slack").write(
        scheduled("scheduled", Description=hostile, Resources=["web_0", "web_11"]), NOW
    )
    check_slack(message)
    assert "∗a∗ ＿b＿ ∼c∼ ˋdˋ" in message["text"]  # noqa: RUF001
    assert "a_b ＆ ＼" in message["text"]  # noqa: RUF001
    assert "Reboot of web_0, web_11 in 15 min" in message["text"]
    assert "&lt;https:\u200b//evil.example|f&gt; :\u200bskull: ||g|| a_b &amp;" in blocks_text(message)
    hostile = "**bold** [e](https://evil.example) {{DATE(2026-11-20T13:18:00Z, SHORT)}} {{{TIME( <at>all</at>"
    card = make_format("teams").write(scheduled("scheduled", Description=hostile), NOW)
    check_teams(card)
    texts = "\n".join(strings(card))
    blank = "{\u200b{"
    assert f"**bold** [e](https://evil.example) {blank}DATE(2026-11-20T13:18:00Z, SHORT)}}}} {blank}" in texts
    assert "{\u200b{\u200b{TIME(" in texts
    assert "entities" not in texts


@pytest.mark.parametrize("letter", ["\N{OPEN BOOK}", "{"])
def test_letters_that_need_many_bytes_are_cut_to_the_size_that_teams_takes(letter: str) -> None:
    wide = letter * 1_000
    fields = ("Description", "EventType", "EventSource")
    before = {"Resources": [wide], **dict.fromkeys(fields, wide)}
    event = updated(before, Resources=[wide[1:]] * 100, **dict.fromkeys(fields, wide[1:]))
    vm = dict.fromkeys(("Name", "Location", "Zone"), wide)
    message = make_format("teams").write(with_data(event, EventId=wide, Vm=vm), NOW)
    check_teams(message)
    assert "… (cut)" in "\n".join(strings(message))
    assert len(json.dumps(message)) > MESSAGE_BYTES / 3


# Digests: the headline, one line for each EventId, what comes first, and the links to the console


def about(event: dict[str, Any], event_id: str, *vms: str) -> dict[str, Any]:
    return with_data(event, EventId=event_id, **({"Resources": [*vms]} if vms else {}))


def digest(*events: dict[str, Any], **more: Any) -> Digest:
    return summarize(events, now=NOW, settings=settings("teams", **more))


def lines(*events: dict[str, Any], **more: Any) -> list[str]:
    return [text for text, _ in digest(*events, **more).lines]


def in_minutes(minutes: float, event_id: str, vm: str, **more: Any) -> dict[str, Any]:
    return about(scheduled("scheduled", NotBefore=in_(minutes=minutes), **more), event_id, vm)


def test_the_headline_counts_the_events_by_what_happens_to_them() -> None:
    reboots = [in_minutes(57 + number, f"r{number}", f"web-{number}") for number in range(37)]
    freezes = [
        about(with_data(EVENTS["scheduledevent.completed"], EventType="Freeze"), f"f{n}") for n in range(3)
    ]
    failed = about(EVENTS["approval.failed"], "a")
    found = digest(*freezes, failed, *reboots)
    expected = "41 events: 37 Reboots from 14:00 UTC on, 3 Freezes are over, 1 approval failed"
    assert found.headline == f"🟥 {expected}"
    assert (
        digest(*reboots, time_zone="Europe/Berlin").headline == "🟧 37 events: 37 Reboots from 15:00 CET on"
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("scheduledevent.scheduled", "Reboot at 13:18 UTC"),
        ("scheduledevent.started", "Reboot has started"),
        ("scheduledevent.updated", "Reboot at 13:13 UTC"),
        ("scheduledevent.canceled", "Reboot is canceled"),
        ("scheduledevent.ended", "Reboot is gone"),
        ("approval.accepted", "approval accepted"),
        ("approval.prepared", "Reboot is prepared"),
        ("imds.unreachable", "other message"),
    ],
)
def test_one_event_of_a_kind_is_told_in_the_singular(kind: str, expected: str) -> None:
    many = [about(EVENTS["scheduledevent.completed"], f"{n}") for n in range(2)]
    assert digest(*many, EVENTS[kind]).headline.endswith(f" 3 events: 2 Reboots are over, 1 {expected}")


def test_an_event_is_one_line_with_its_newest_state_however_many_changes_gathered() -> None:
    changes = [EVENTS[f"scheduledevent.{kind}"] for kind in ("scheduled", "updated", "started", "completed")]
    assert lines(*changes[:2]) == ["🟧 Changed: Reboot of web-0, web-1 now in 10 min (13:13 UTC)"]
    assert lines(*changes[:3]) == ["🟥 Reboot of web-0, web-1 has started"]
    upper_case = with_data(changes[3], EventId=EVENT_ID.upper())
    assert lines(changes[0], upper_case) == ["🟩 Reboot of web-0, web-1 is over"]


def test_a_receipt_says_when_its_event_starts() -> None:
    assert lines(EVENTS["scheduledevent.scheduled"], EVENTS["approval.failed"]) == [
        "🟥 Approval failed: Reboot of web-0, web-1 (IMDS did not take it in time), starts in 15 min (13:18 UTC)"
    ]


def test_prepared_vms_are_named_behind_what_happens() -> None:
    prepared = [with_data(EVENTS["approval.prepared"], Vm={"Name": f"web-{n}"}) for n in (1, 0, 1)]
    notice, started = EVENTS["scheduledevent.scheduled"], EVENTS["scheduledevent.started"]
    assert lines(notice, *prepared) == [
        "🟧 Reboot of web-0, web-1 in 15 min (13:18 UTC); prepared: web-1, web-0"
    ]
    assert lines(*prepared, started) == ["🟥 Reboot of web-0, web-1 has started; prepared: web-1, web-0"]
    assert lines(prepared[1]) == [
        "🟩 web-0 is prepared: Reboot of web-0, web-1, starts in 15 min (13:18 UTC)"
    ]
    assert lines(prepared[0], prepared[1])[0].endswith("(13:18 UTC); prepared: web-1")


def test_bad_news_comes_first_then_notices_by_their_time_then_starts_and_the_rest() -> None:
    started = EVENTS["scheduledevent.started"]
    given_ = [
        about(EVENTS["scheduledevent.completed"], "1", "over"),
        about(started, "2", "started"),
        in_minutes(20, "3", "later"),
        in_minutes(5, "4", "soon"),
        about(with_data(started, PreviousStatus=None), "5", "unannounced"),
        about(EVENTS["approval.rejected"], "6", "refused"),
    ]
    words = ["unannounced", "refused", "soon", "later", "started", "over"]
    shown = lines(*given_)
    assert [word for word, line in zip(words, shown, strict=True) if word not in line] == []


def test_a_digest_has_the_colour_of_its_worst_line() -> None:
    # the first line is the rejection, and the start that a notice announced is worse
    rejected, started = EVENTS["approval.rejected"], EVENTS["scheduledevent.started"]
    found = digest(about(rejected, "a"), about(started, "b"))
    assert (found.tone, found.headline[0], found.lines[0][0][0]) == ("attention", "🟥", "🟧")
    assert digest(about(rejected, "a"), about(EVENTS["scheduledevent.completed"], "b")).tone == "warning"


def of_fleet(group: str, **tags: str) -> dict[str, Any]:
    vm = {"Name": "web-0", "ResourceId": f"/subscriptions/0/resourceGroups/{group}", "ScaleSet": "web"}
    return about(with_data(EVENTS["scheduledevent.started"], Vm={**vm, "Tags": tags}), group, "web-0")


@pytest.mark.parametrize("name", ["teams", "slack", "pagerduty"])
def test_every_message_and_digest_names_the_fleet_and_the_tags_that_are_chosen(name: str) -> None:
    made = make_format(name, show_tags=["env"])
    prod, staging = of_fleet("prod", Env="live", owner="x"), of_fleet("staging", Env="test")
    fleet = "resource group prod, scale set web, env live"
    assert fleet in encode_json(made.write(prod, NOW))
    if name != "pagerduty":
        alike = about(prod, "another")
        _, body = made.encode([as_stored(prod), as_stored(alike)], NOW)
        assert body.decode().count(f"Fleet: {fleet}") == 1 + (name == "slack")  # as blocks and as text
        _, body = made.encode([as_stored(prod), as_stored(staging)], NOW)
        texts = "\n".join(strings(json.loads(body)))
        assert f"web-0 has started ({fleet})" in texts
        assert "web-0 has started (resource group staging, scale set web, env test)" in texts
        assert "Fleet: " not in texts


@pytest.mark.parametrize("name", ["teams", "slack"])
def test_what_does_not_fit_is_counted(name: str) -> None:
    given_ = [in_minutes(n, f"id-{n}", f"web-{n}") for n in range(1, 104)]
    made = make_format(name, console_url=CONSOLE)
    _, body = made.encode([as_stored(one) for one in given_], NOW)
    texts = "\n".join(strings(json.loads(body)))
    assert f"and {103 - MAX_LINES} more" in texts
    assert "web-1 " in texts
    assert f"web-{MAX_LINES} " in texts
    assert f"web-{MAX_LINES + 1} " not in texts


def as_stored(event: dict[str, Any]) -> StoredEvent:
    return StoredEvent(id=event["id"], type=event["type"], body=encode_json(event).encode())


@pytest.mark.parametrize("name", ["teams", "slack"])
def test_one_event_is_the_message_that_it_is_without_digests(name: str) -> None:
    made = make_format(name)
    event = EVENTS["scheduledevent.scheduled"]
    assert json.loads(made.encode([as_stored(event)], NOW)[1]) == made.write(event, NOW)


@pytest.mark.parametrize("name", ["teams", "slack", "pagerduty"])
def test_a_message_links_to_its_event_on_the_console_if_one_is_configured(name: str) -> None:
    event = about(EVENTS["scheduledevent.scheduled"], EVENT_ID.upper())
    linked = json.dumps(make_format(name, console_url=CONSOLE).write(event, NOW))
    assert f"{CONSOLE}/event/{EVENT_ID.lower()}" in linked
    assert "console" not in json.dumps(make_format(name).write(event, NOW))


@pytest.mark.parametrize("name", ["teams", "slack"])
def test_each_line_of_a_digest_links_to_its_event(name: str) -> None:
    made = make_format(name, console_url=CONSOLE)
    _, body = made.encode([as_stored(in_minutes(5, f"id-{n}", "vm")) for n in range(3)], NOW)
    assert all(f"{CONSOLE}/event/id-{n}" in body.decode() for n in range(3))


@pytest.mark.parametrize(
    ("event_id", "path"),
    [
        ("C7061BAC-AFDC", "c7061bac-afdc"),
        ("../../admin", "..%2F..%2Fadmin"),
        ("a/b?c#d", "a%2Fb%3Fc%23d"),
        ("a|b>c", "a%7Cb%3Ec"),
        ("_x_~y~", "%5Fx%5F%7Ey%7E"),
        ("%2e%2e", "%252e%252e"),
        ("犬", "%E7%8A%AC"),
        ("\ud800", "%3F"),
    ],
)
def test_an_address_is_built_from_the_event_id_alone(event_id: str, path: str) -> None:
    made = settings("teams").linked(CONSOLE)
    assert made.link(event_id) == f"{CONSOLE}/event/{path}"


@steady
@given(event_id=st.text(max_size=120))
@example(event_id=".")
@example(event_id="..")
@example(event_id="")
def test_no_event_id_changes_the_place_that_a_link_leads_to(event_id: str) -> None:
    link = settings("teams").linked(CONSOLE).link(event_id)
    assert not link or link.removeprefix(f"{CONSOLE}/event/").strip(".")
    assert set(link.removeprefix(f"{CONSOLE}/event/")) <= set("abcdefghijklmnopqrstuvwxyzABCDEF0123456789%.-")
    assert len(link) <= len(CONSOLE) + 107


@pytest.mark.parametrize(
    "given_",
    [
        "console.example.org",
        "https://x.example/?a=",
        "https://x.example/#a",
        "https://x|y.example",
        "http://x.example",
    ],
)
def test_an_address_of_the_console_that_cannot_be_extended_is_refused(given_: str) -> None:
    with pytest.raises(ValueError, match="console_url"):
        Config.model_validate({"console_url": given_})


def test_the_address_of_the_console_may_have_a_path() -> None:
    assert Config.model_validate({"console_url": "https://x.example/a/"}).console_url == "https://x.example/a"
