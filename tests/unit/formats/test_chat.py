"""Slack and Teams: what stands where, whose time is shown, and that nothing from outside acts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridge.formats.teams import MESSAGE_BYTES
from tests.support.receivers import SPACE, check_slack, check_teams, slack, strings, teams
from tests.support.samples import EVENTS, NOW, scheduled, updated, with_data, written

SCHEDULED = EVENTS["scheduledevent.scheduled"]
TITLE = "🟧 Reboot of web-0, web-1 in 15 min (13:18 UTC)"


def blocks_text(message: Any) -> str:
    """Return all that the blocks of a message to Slack hold, a line for each text."""
    return "\n".join(strings(message["blocks"]))


def test_the_text_alone_says_all_for_receivers_that_know_no_blocks() -> None:
    text = slack().write(SCHEDULED, NOW)["text"]
    assert text.splitlines()[:4] == [
        TITLE,
        "A restart: memory is lost, disks are kept.",
        "Fleet: resource group shop",
        "Starts: automatically in 15 min, at 13:18 UTC",
    ]
    assert "\nApprove: imds-bridge approve 602d9444-" in text


def test_slack_has_a_header_a_command_to_copy_and_no_attachments_which_discord_shows_empty() -> None:
    message = slack().write(SCHEDULED, NOW)
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
    message = teams().write(EVENTS[f"scheduledevent.{kind}"], NOW)
    assert message["attachments"][0]["content"]["body"][0]["style"] == style


def test_the_title_stands_first_in_teams_and_the_command_is_monospaced() -> None:
    body = teams().write(SCHEDULED, NOW)["attachments"][0]["content"]["body"]
    title = body[0]["items"][0]["inlines"][0]
    assert (title["text"], title["weight"]) == (TITLE, "Bolder")
    runs = [run for block in body for run in block.get("inlines", ())]
    (monospaced,) = [run["text"] for run in runs if run.get("fontType") == "Monospace"]
    assert monospaced.startswith("imds-bridge approve 602d9444-")


@pytest.mark.parametrize(
    ("format_", "starts"),
    [
        (slack, "in 15 min, at <!date^1795180680^{date_short_pretty} {time}|13:18 UTC>"),
        (teams, "in 15 min, at {{DATE(2026-11-20T13:18:00Z, SHORT)}} {{TIME(2026-11-20T13:18:00Z)}}"),
    ],
)
def test_each_reader_sees_their_own_time_unless_a_time_zone_is_set(format_: Any, starts: str) -> None:
    assert starts in "\n".join(strings(format_().write(SCHEDULED, NOW)))
    text = "\n".join(strings(format_(time_zone="Europe/Berlin").write(SCHEDULED, NOW)))
    assert "automatically in 15 min, at 14:18 CET" in text
    assert "<!date" not in text
    assert "{{DATE(" not in text


def test_no_one_is_mentioned() -> None:
    mentions = "@everyone @here <!channel> <@U012> <@&34> ops@example.org"
    message = slack().write(scheduled("scheduled", Description=mentions), NOW)
    check_slack(message)
    assert f"@{SPACE}everyone @{SPACE}here" in message["text"]
    assert f"&lt;@{SPACE}U012&gt;" in blocks_text(message)
    assert "<!channel>" not in json.dumps(message)


def test_markup_from_outside_is_shown_and_does_not_act() -> None:
    hostile = "*a* _b_ ~c~ `d` [e](https://evil.example) <https://evil.example|f> :skull: ||g|| a_b & \\"
    message = slack().write(scheduled("scheduled", Description=hostile, Resources=["web_0", "web_11"]), NOW)
    check_slack(message)
    assert "∗a∗ ＿b＿ ∼c∼ ˋdˋ" in message["text"]  # noqa: RUF001
    assert "a_b ＆ ＼" in message["text"]  # noqa: RUF001
    assert "Reboot of web_0, web_11 in 15 min" in message["text"]
    assert "&lt;https:\u200b//evil.example|f&gt; :\u200bskull: ||g|| a_b &amp;" in blocks_text(message)
    hostile = "**bold** [e](https://evil.example) {{DATE(2026-11-20T13:18:00Z, SHORT)}} {{{TIME( <at>all</at>"
    card = teams().write(scheduled("scheduled", Description=hostile), NOW)
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
    message = teams().write(with_data(event, EventId=wide, Vm=vm), NOW)
    check_teams(message)
    assert "… (cut)" in "\n".join(strings(message))
    assert len(json.dumps(message)) > MESSAGE_BYTES / 3
