from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.examples import EVENTS, scheduled, with_data
from tests.support.receivers import NOW, SPACE, check_slack, slack

MENTIONS = "@everyone @here <!channel> <@U012> <@&34> ops@example.org"


def blocks_text(message: Any) -> str:
    """Return all that the blocks hold, a line for each text."""
    texts = []
    for block in message["blocks"]:
        objects = [block["text"]] if "text" in block else block.get("fields", block.get("elements"))
        texts += [found["text"] for found in objects]
    return "\n".join(texts)


def test_the_text_alone_says_all_for_receivers_that_know_no_blocks() -> None:
    text = slack().write(EVENTS["scheduledevent.scheduled"], NOW)["text"]
    assert text.splitlines()[:3] == [
        "🟧 Reboot of web-0, web-1 in 15 min (13:18 UTC)",
        "A restart: memory is lost, disks are kept.",
        "Starts: automatically in 15 min, at 13:18 UTC",
    ]
    assert "\nApprove: imds-bridge approve 602d9444-" in text


def test_a_header_says_it_at_a_glance_and_the_command_can_be_copied() -> None:
    message = slack().write(EVENTS["scheduledevent.scheduled"], NOW)
    assert message["blocks"][0]["type"] == "header"
    assert message["blocks"][0]["text"]["text"] == message["text"].splitlines()[0]
    assert "*Approve*\n```imds-bridge approve 602d9444-" in blocks_text(message)


def test_without_a_time_zone_each_reader_sees_their_own() -> None:
    text = blocks_text(slack().write(EVENTS["scheduledevent.scheduled"], NOW))
    assert "in 15 min, at <!date^1795180680^{date_short_pretty} {time}|13:18 UTC>" in text


def test_with_a_time_zone_times_are_written_in_it() -> None:
    text = blocks_text(slack(time_zone="Europe/Berlin").write(EVENTS["scheduledevent.scheduled"], NOW))
    assert "automatically in 15 min, at 14:18 CET" in text
    assert "<!date" not in text


def test_no_attachments_are_sent_of_which_discord_would_make_empty_embeds() -> None:
    assert "attachments" not in slack().write(EVENTS["scheduledevent.scheduled"], NOW)


def test_no_one_is_mentioned() -> None:
    message = slack().write(scheduled("scheduled", Description=MENTIONS), NOW)
    check_slack(message)
    assert f"@{SPACE}everyone @{SPACE}here" in message["text"]
    assert f"&lt;@{SPACE}U012&gt;" in blocks_text(message)
    assert "<!channel>" not in json.dumps(message)


def test_markup_from_outside_is_shown_and_does_not_act() -> None:
    hostile = "*a* _b_ ~c~ `d` [e](https://evil.example) <https://evil.example|f> :skull: ||g|| a_b & \\"
    message = slack().write(scheduled("scheduled", Description=hostile), NOW)
    check_slack(message)
    assert "∗a∗ ＿b＿ ∼c∼ ˋdˋ" in message["text"]  # noqa: RUF001
    assert "a_b ＆ ＼" in message["text"]  # noqa: RUF001
    assert "&lt;https:\u200b//evil.example|f&gt; :\u200bskull: ||g|| a_b &amp;" in blocks_text(message)


@pytest.mark.parametrize("name", [":skull:", ":犬:", ":skull:`:skull:"])
def test_an_emoji_name_of_any_script_stays_text(name: str) -> None:
    check_slack(slack().write(scheduled("scheduled", EventId=name), NOW))


def test_names_of_scale_sets_stay_as_they_are() -> None:
    text = slack().write(scheduled("scheduled", Resources=["web_0", "web_11"]), NOW)["text"]
    assert "Reboot of web_0, web_11 in 15 min" in text


def test_escapes_do_not_push_a_text_over_a_limit() -> None:
    event = with_data(
        scheduled("scheduled", EventType="&" * 100, Description="<" * 100_000), Resources=["&" * 100] * 9
    )
    check_slack(slack().write(event, NOW))
